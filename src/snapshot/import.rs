//! A snapshot as it is read: a file that etcd or Orlop wrote, or the database of an etcd that has stopped.
//!
//! [`crate::load`] makes the rows of a log from those of the file.

use std::{collections::HashSet, fs::File, path::Path};

use bytes::Bytes;
use foldhash::fast::RandomState;
use orlop_bolt::{Bucket, Reader};

use super::{
    Content, Error, HashCheck, Restored, RestoredHistory, Result, Status,
    archive_bucket::{ARCHIVE, Parts, Survey as ArchiveSurvey},
    buckets::{self, Facts, KEY},
    checksum, on_blocking_thread,
};
use crate::load::{Bounds, HEAD_MAX, NewestRows, Rows};
use orlop_core::{
    index::{RowKind, ValidatedColumns},
    log::{self, Load},
    types::{Change, Key, Revision, RowId},
};

/// A file that was read once and found sound.
pub(super) struct Import {
    reader: Reader<File>,
    /// The file's name.
    name: String,
    rows: Bucket,
    archive: Bucket,
    facts: Facts,
    survey: Survey,
}

/// Revisions that a restored store skips, so that revisions of the old store which the snapshot lacks are not used
/// again. Everything up to its new revision is compacted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bump(pub i64);

/// What the rows of a file say together.
#[derive(Default)]
struct Survey {
    /// etcd's hash of the whole file.
    hash: u32,
    rows: usize,
    last: Option<RowId>,
    /// The newest revision without a change before the last row.
    last_hole: Option<Revision>,
    /// Whether there is a row without a change, which stays in etcd's hash.
    is_raised: bool,
    /// The newest revision that lacks one of its changes.
    last_gap: Option<Revision>,
    live: HashSet<Key, RandomState>,
    /// `None`: the file has no archive.
    archive: Option<ArchiveSurvey>,
}

/// Returns whether a snapshot with a checksum, which is not verified again, has an archive.
///
/// # Errors
///
/// If it is not a snapshot, or the names of its buckets cannot be read.
pub(super) fn has_archive(path: &Path) -> Result<bool> {
    let (_, bytes) = checksum::examine(path, HashCheck::Verify)?;
    let file = File::open(path).map_err(|error| super::file_error("read", path, &error))?;
    let buckets = Reader::open(file, bytes).and_then(|reader| reader.buckets());
    let buckets = buckets.map_err(|error| Error::File(format!("{}: {error}", path.display())))?;
    Ok(buckets.iter().any(|(name, _)| name[..] == *ARCHIVE.as_bytes()))
}

impl Import {
    /// Reads a file whose first `bytes` bytes are the database, with its archive or without.
    ///
    /// # Errors
    ///
    /// If it is not a database of etcd, or a part of it is damaged.
    pub(super) fn open(path: &Path, bytes: u64, content: Content) -> Result<Self> {
        let name = path.display().to_string();
        let failed = |error: orlop_bolt::Error| Error::File(format!("{name}: {error}"));
        let file = File::open(path).map_err(|error| super::file_error("read", path, &error))?;
        let reader = Reader::open(file, bytes).map_err(failed)?;
        let buckets = reader.buckets().map_err(failed)?;
        let bucket = |wanted: &str| {
            let found = buckets.iter().find(|(name, _)| name[..] == *wanted.as_bytes());
            found.map_or_else(Bucket::empty, |(_, bucket)| bucket.clone())
        };
        let (rows, archive) = (bucket(KEY), bucket(ARCHIVE));
        let (mut facts, mut survey) = (Facts::default(), Survey::default());
        // The hash contains the names of all buckets, also of empty ones.
        let mut names = buckets.iter().map(|(name, _)| name);
        let mut open: Option<&Bytes> = None;
        let visited = reader.visit(|bucket, key, value| {
            while open.is_none_or(|name| *name != bucket) {
                open = names.next();
                let Some(name) = open else { break };
                survey.hash = crc32c::crc32c_append(survey.hash, name);
            }
            survey.hash = crc32c::crc32c_append(crc32c::crc32c_append(survey.hash, &key), &value);
            if bucket == KEY.as_bytes() {
                buckets::read_columns(&key, &value).map(|(row, change)| survey.take(row, change))
            } else if bucket == ARCHIVE.as_bytes() {
                if content == Content::Log {
                    return Ok(());
                }
                ArchiveSurvey::take(&mut survey.archive, &key, &value)
            } else {
                facts.take(bucket, &key, &value)
            }
        });
        visited.map_err(failed)?;
        survey.hash = names.fold(survey.hash, |hash, name| crc32c::crc32c_append(hash, name));
        let import = Self { reader, name, rows, archive, facts, survey };
        if let Some(archive) = &import.survey.archive {
            archive.check(import.head()).map_err(|what| import.damaged(&what))?;
        }
        match import.survey.last_gap.filter(|gap| Some(*gap) > import.compacted()) {
            Some(gap) => Err(import.damaged(&format!("a change of revision {gap} is missing"))),
            None => Ok(import),
        }
    }

    pub(super) fn status(&self) -> Status {
        Status {
            hash: self.survey.hash,
            revision: self.survey.last.map_or(Revision(0), |row| row.revision),
            compact_revision: self.facts.compacted,
            keys: self.survey.live.len(),
            rows: self.survey.rows,
            archived_rows: self.survey.archive.map(|archive| archive.rows),
            leases: self.facts.leases.len(),
            bytes: self.reader.bytes(),
            version: self.facts.storage_version.clone(),
        }
    }

    pub(super) fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Returns whether etcdutl has raised the revisions with `--bump-revision`.
    pub(super) fn is_raised(&self) -> bool {
        self.survey.is_raised
    }

    /// Returns the compact revision, which is above every revision without a change.
    fn compacted(&self) -> Option<Revision> {
        self.facts.compacted.max(self.survey.last_hole.filter(|hole| Some(*hole) > self.facts.compacted))
    }

    /// Returns the newest revision, which may have no row.
    fn head(&self) -> Revision {
        let last = self.survey.last.map_or(Revision::EMPTY, |row| row.revision);
        last.max(self.facts.compacted.unwrap_or(last))
    }

    /// Fills an empty database. `create` opens it after the snapshot was read up to its compact revision: a database ends a
    /// transaction that is idle for so long.
    ///
    /// # Errors
    ///
    /// If the database cannot be created or written, or a row contradicts the one before.
    pub(super) async fn load<E: From<Error> + From<log::Error>>(
        mut self,
        bump: Option<Bump>,
        create: impl Future<Output = std::result::Result<Box<dyn Load>, E>>,
    ) -> std::result::Result<Restored, E> {
        self.survey.live = HashSet::default();
        let head = self.head();
        let raised = head.0.checked_add(bump.map_or(0, |Bump(revisions)| revisions)).map(Revision);
        let raised =
            raised.filter(|raised| *raised <= HEAD_MAX).ok_or_else(|| self.damaged("no revisions are left"))?;
        let bounds = match bump {
            None => Bounds::new(head, self.facts.compacted, self.survey.last_hole),
            Some(_) => Bounds::new(raised, Some(raised), None),
        };
        let Bounds { head, compacted } = bounds;
        let (mut import, newest) = on_blocking_thread(move || {
            let newest = self.newest_at(compacted)?;
            Ok((self, newest))
        })
        .await?;
        let mut into = create.await?;
        let mut rows = Rows::new(newest, compacted);
        let mut cursor = import.reader.cursor(&import.rows);
        let mut next = import.batch(&mut rows, &mut cursor)?;
        while let Some(batch) = next {
            // The database has a thread of its own, or a process: it writes this batch while the next one is read.
            let (added, read) = tokio::join!(into.add(&batch), async { import.batch(&mut rows, &mut cursor) });
            added?;
            next = read?;
        }
        rows.finish(&mut *into).await?;
        let history = match import.survey.archive {
            None => RestoredHistory::None,
            // The rows between the two compactions are neither in the archive nor in the database.
            Some(archive) if archive.copied != compacted.unwrap_or(Revision::EMPTY) => RestoredHistory::LeftOut,
            Some(archive) => {
                let mut parts = Parts::new(&import.reader, &import.archive);
                while let Some(part) = parts.next(&import.reader).map_err(|what| import.damaged(&what))? {
                    into.add_archive(part).await?;
                }
                RestoredHistory::From(archive.first)
            }
        };
        let meta = bounds.meta(std::mem::take(&mut import.facts.leases), &import.facts.auth);
        into.finish(&meta, &import.facts.auth).await?;
        Ok(Restored { head, history })
    }

    /// Reads rows until they are a batch; `None` at the end, when `rows` has the last ones.
    fn batch(&self, rows: &mut Rows, cursor: &mut orlop_bolt::Cursor) -> Result<Option<Vec<Change>>> {
        while let Some((key, value)) = self.next(cursor)? {
            let stored = buckets::read_row(&key, &value).map_err(|what| self.damaged(&what))?;
            rows.add(stored).map_err(|what| self.damaged(&what))?;
            if let Some(batch) = rows.take_full() {
                return Ok(Some(batch));
            }
        }
        Ok(None)
    }

    /// Returns the newest row of each key at or below the compact revision.
    fn newest_at(&self, compacted: Option<Revision>) -> Result<NewestRows> {
        let mut newest = NewestRows::new();
        let Some(compacted) = compacted else { return Ok(newest) };
        let mut cursor = self.reader.cursor(&self.rows);
        while let Some((key, value)) = self.next(&mut cursor)? {
            let read = buckets::read_columns(&key, &value);
            let (row, change) = read.map_err(|what| self.damaged(&what))?;
            if row.revision > compacted {
                break;
            }
            let Some((key, kind)) = change else { continue };
            newest.insert(key, ValidatedColumns { row, kind, prev_revision: Revision(0) });
        }
        Ok(newest)
    }

    fn next(&self, cursor: &mut orlop_bolt::Cursor) -> Result<Option<(Bytes, Bytes)>> {
        cursor.next(&self.reader).map_err(|error| Error::File(format!("{}: {error}", self.name)))
    }

    fn damaged(&self, what: &str) -> Error {
        Error::File(format!("{} is damaged: {what}", self.name))
    }
}

impl Survey {
    fn take(&mut self, row: RowId, change: Option<(Key, RowKind)>) {
        self.rows += 1;
        let before = self.last.map_or(Revision::EMPTY, |last| last.revision);
        if row.revision > before.next() {
            self.last_hole = Some(row.revision.prev());
        }
        let before = self.last.filter(|last| last.revision == row.revision);
        let sub = before.map_or(Some(0), |last| last.sub.checked_add(1));
        if sub != Some(row.sub) {
            self.last_gap = Some(row.revision);
        }
        self.last = Some(row);
        match change {
            None => {
                self.last_hole = Some(row.revision);
                self.is_raised = true;
            }
            Some((key, RowKind::Put { .. })) => drop(self.live.insert(key)),
            Some((key, RowKind::Delete)) => drop(self.live.remove(&key)),
        }
    }
}

#[cfg(test)]
mod tests {
    use orlop_bolt::{Planner, Writer};

    use super::*;
    use crate::snapshot::buckets::{META, Target, delete_value, row_key};

    /// Adds a delete for each row, and the compact revision.
    fn fill(target: &mut impl Target, rows: &[(i64, u32)], compacted: Option<i64>) {
        target.bucket(KEY).expect("the first bucket");
        for (revision, sub) in rows {
            let key = row_key(RowId::new(Revision(*revision), *sub), true);
            target.add(key, delete_value(&Key::from(b"a".to_vec()))).expect("rows ascend");
        }
        target.bucket(META).expect("buckets ascend");
        if let Some(revision) = compacted {
            let value = row_key(RowId::new(Revision(revision), 0), false);
            target.add(Bytes::from_static(b"finishedCompactRev"), value).expect("the first entry");
        }
    }

    #[test]
    fn revision_that_lacks_a_change_is_refused_unless_it_is_compacted() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file.db");
        for (rows, compacted, lacking) in [
            (&[(2, 0), (2, 1), (3, 0)][..], None, None),
            (&[(2, 0), (2, 2)], None, Some(2)),
            (&[(2, 1), (3, 0)], None, Some(2)),
            (&[(2, 0), (3, 0), (3, 2), (4, 0)], None, Some(3)),
            (&[(2, 0), (3, 0), (3, 2), (4, 0)], Some(2), Some(3)),
            (&[(2, 0), (3, 0), (3, 2), (4, 0)], Some(3), None),
        ] {
            let mut planner = Planner::default();
            fill(&mut planner, rows, compacted);
            let mut writer = Writer::new(planner.finish());
            fill(&mut writer, rows, compacted);
            let bytes = writer.finish().expect("the planned content");
            std::fs::write(&path, &bytes).expect("a file can be written");
            let refused = Import::open(&path, bytes.len() as u64, Content::Log).err().map(|error| error.to_string());
            let expected =
                lacking.map(|it| format!("{} is damaged: a change of revision {it} is missing", path.display()));
            assert_eq!(refused, expected, "{rows:?}, compacted: {compacted:?}");
        }
    }
}
