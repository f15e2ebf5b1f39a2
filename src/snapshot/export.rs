//! A snapshot of a store as it is written: a stream from the first byte to the last, without a copy on disk.

use bytes::Bytes;
use orlop_bolt::{Layout, Planner, Unordered, Writer};
use sha2::{Digest as _, Sha256};

use super::{
    Content, Error, Result, archive_bucket,
    buckets::{self, Target},
    on_blocking_thread,
};
use crate::api::STORAGE_VERSION;
use orlop_core::{
    log::{self, ArchivePart, Meta, WithPrev},
    store::{FrozenStore, Store},
    types::{Change, KeyRange, Revision, RowId},
};

/// A snapshot of a store. The store is read twice: to compute where everything will be in the file, and to write it.
pub struct Export {
    store: FrozenStore,
    layout: Layout,
    /// Where the next part begins.
    place: Place,
    stage: Stage,
}

enum Stage {
    Parts(Box<Output>),
    Checksum(Bytes),
    Complete,
}

/// The file, and the checksum of what was written of it.
struct Output {
    writer: Writer,
    hash: Sha256,
}

/// A part of the content.
enum Part {
    Rows(Vec<Change>),
    /// What follows the rows of the log.
    Facts(Meta),
    Archive(ArchivePart),
}

/// Where a part begins, in the order of the file.
#[derive(Clone, Copy)]
enum Place {
    Rows(Revision),
    Archive,
    ArchivedRows(RowId),
    Moments(Revision),
    End,
}

impl Export {
    /// Computes the layout of a store as it is now.
    ///
    /// # Errors
    ///
    /// The same as [`Export::new`], and if the rows of a compaction are being copied to the archive.
    pub async fn of(store: &Store, content: Content) -> Result<Self> {
        Self::new(match content {
            Content::Log => store.freeze().await?,
            Content::LogAndArchive => store.freeze_with_archive().await?,
        })
        .await
    }

    /// Computes the layout.
    ///
    /// # Errors
    ///
    /// If the store cannot be read.
    async fn new(store: FrozenStore) -> Result<Self> {
        let auth = store.log.auth().await?;
        let mut planner = Planner::default();
        buckets::begin(&auth, &mut planner)?;
        let mut place = Place::first();
        while let Some((part, next)) = part(&store, place).await? {
            planner = on_blocking_thread(move || add(part, planner)).await?;
            place = next;
        }
        let layout = planner.finish();
        let mut writer = Writer::new(layout);
        buckets::begin(&auth, &mut writer)?;
        let stage = Stage::Parts(Box::new(Output { writer, hash: Sha256::new() }));
        Ok(Self { store, layout, place: Place::first(), stage })
    }

    /// Returns the size in bytes, without the checksum.
    pub fn bytes(&self) -> u64 {
        self.layout.bytes()
    }

    /// Returns the next piece, about as long as a page of the log. The last one is the checksum alone.
    ///
    /// # Errors
    ///
    /// If the store cannot be read. There are no further pieces then.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        match std::mem::replace(&mut self.stage, Stage::Complete) {
            Stage::Complete => Ok(None),
            Stage::Checksum(checksum) => Ok(Some(checksum)),
            Stage::Parts(output) => match part(&self.store, self.place).await? {
                Some((part, next)) => {
                    let (output, piece) = on_blocking_thread(move || output.part(part)).await?;
                    (self.stage, self.place) = (Stage::Parts(output), next);
                    Ok(Some(piece))
                }
                None => {
                    let (piece, checksum) = output.end()?;
                    self.stage = Stage::Checksum(checksum);
                    Ok(Some(piece))
                }
            },
        }
    }
}

impl Place {
    fn first() -> Self {
        Self::Rows(Revision::EMPTY.next())
    }
}

impl Output {
    fn part(mut self: Box<Self>, part: Part) -> Result<(Box<Self>, Bytes)> {
        self.writer = add(part, self.writer)?;
        let piece = self.writer.take();
        self.hash.update(&piece);
        Ok((self, piece))
    }

    fn end(self: Box<Self>) -> Result<(Bytes, Bytes)> {
        let Self { writer, mut hash } = *self;
        let failed = |error| Error::Log(log::Error::Corrupt(format!("{error}")));
        let piece = writer.finish().map_err(failed)?;
        hash.update(&piece);
        Ok((piece, hash.finalize().to_vec().into()))
    }
}

/// Reads the part that begins at a place, and returns where the next one begins; `None` at the end.
async fn part(store: &FrozenStore, place: Place) -> Result<Option<(Part, Place)>> {
    let FrozenStore { log, meta, archive } = store;
    let (head, compacted) = (meta.position.head, meta.compact_revision.unwrap_or(Revision::EMPTY));
    Ok(match (place, archive) {
        (Place::Rows(next), _) if next <= head => {
            let page = log.changes(next, head, &KeyRange::all(), WithPrev::No).await?;
            Some((Part::Rows(page.changes), Place::Rows(page.next)))
        }
        (Place::Rows(_), _) => Some((Part::Facts(meta.clone()), Place::Archive)),
        (Place::Archive, Some(archive)) => {
            // The log is complete from its compact revision on.
            let first = archive.state().await?.first.min(compacted);
            let part = ArchivePart::Begin { first, copied: compacted };
            Some((Part::Archive(part), Place::ArchivedRows(RowId::new(Revision(0), 0))))
        }
        (Place::ArchivedRows(from), Some(archive)) => {
            let mut rows = archive.rows(from).await?;
            let last = rows.last().map(|last| last.change.row);
            rows.retain(|row| row.is_below(compacted));
            let next = last.filter(|last| last.revision < compacted);
            let next = next.map(|last| Place::ArchivedRows(last.next()));
            Some((Part::Archive(ArchivePart::Rows(rows)), next.unwrap_or(Place::Moments(Revision(0)))))
        }
        (Place::Moments(after), Some(archive)) => {
            let mut moments = archive.moments(after).await?;
            let last = moments.last().map(|last| last.moment.revision);
            moments.retain(|it| it.moment.revision <= head);
            let next = last.map_or(Place::End, Place::Moments);
            Some((Part::Archive(ArchivePart::Moments(moments)), next))
        }
        (Place::Archive | Place::ArchivedRows(_) | Place::Moments(_), None) | (Place::End, _) => None,
    })
}

fn add<T: Target>(part: Part, mut target: T) -> Result<T> {
    match part {
        Part::Rows(changes) => buckets::rows(changes, &mut target)?,
        Part::Facts(meta) => buckets::facts(&meta, STORAGE_VERSION, &mut target)?,
        Part::Archive(part) => archive_bucket::add(part, &mut target)?,
    }
    Ok(target)
}

impl From<Unordered> for Error {
    fn from(error: Unordered) -> Self {
        Self::Log(log::Error::Corrupt(error.to_string()))
    }
}

impl Target for Planner {
    fn bucket(&mut self, name: &'static str) -> std::result::Result<(), Unordered> {
        self.bucket(name)
    }

    fn add(&mut self, key: Bytes, value: Bytes) -> std::result::Result<(), Unordered> {
        self.add(key, value.len())
    }
}

impl Target for Writer {
    fn bucket(&mut self, name: &'static str) -> std::result::Result<(), Unordered> {
        self.bucket(name)
    }

    fn add(&mut self, key: Bytes, value: Bytes) -> std::result::Result<(), Unordered> {
        self.add(key, value)
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc, time::Duration};

    use super::*;
    use crate::snapshot::{HashCheck, status};
    use orlop_core::{
        auth::Caller,
        log::ReadLog as _,
        store::{
            HistorySettings, Keep, Settings,
            request::{CompactionWait, PutLease, PutRequest, PutValue},
        },
    };
    use orlop_sql::{Durability, SqliteLog};

    /// A new store that keeps compacted rows.
    async fn new_store(folder: &Path) -> Store {
        let log = SqliteLog::open_with(&folder.join("orlop.db"), Durability::Unsynced).await.unwrap();
        let archive = log.archive(&log.meta().await.unwrap(), true).await.expect("an archive is created");
        let keep = Keep::Rows { retention: Duration::from_secs(3600), bytes_max: u64::MAX };
        let history = Some(HistorySettings { archive: Arc::new(archive), keep });
        Store::open(Arc::new(log), Settings { history, ..Settings::default() }).await.unwrap()
    }

    /// Returns the compact revision and the number of archived rows of the file.
    async fn content(store: FrozenStore, file: &Path) -> (Option<Revision>, Option<usize>) {
        let mut export = Export::new(store).await.unwrap();
        let mut bytes = Vec::new();
        while let Some(piece) = export.next().await.unwrap() {
            bytes.extend(piece);
        }
        std::fs::write(file, bytes).unwrap();
        let status = status(file, HashCheck::Verify).unwrap();
        (status.compact_revision, status.archived_rows)
    }

    #[tokio::test]
    async fn rows_that_are_archived_after_the_log_is_frozen_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let store = new_store(folder.path()).await;
        for _ in 2..=10 {
            let (key, value) = (Bytes::from_static(b"a"), PutValue::New(Bytes::from_static(b"value")));
            let put = PutRequest { key, value, lease: PutLease::Set(None), prev_kv: false };
            store.put(&Caller::Server, put).await.unwrap();
        }
        store.compact(&Caller::Server, Revision(5), CompactionWait::ForRows).await.unwrap();
        let early = store.freeze_with_archive().await.unwrap();
        store.compact(&Caller::Server, Revision(8), CompactionWait::ForRows).await.unwrap();
        let late = store.freeze_with_archive().await.unwrap();
        let file = folder.path().join("saved.db");
        let between = FrozenStore { log: early.log, meta: early.meta, archive: late.archive.clone() };
        assert_eq!(content(between, &file).await, (Some(Revision(5)), Some(3)));
        assert_eq!(content(late, &file).await, (Some(Revision(8)), Some(6)));
        store.stop().await;
    }
}
