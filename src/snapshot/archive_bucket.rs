//! The bucket of a snapshot that contains the archive. etcd ignores it.
//!
//! ```text
//!   copied           the compact revision whose rows it has
//!   first            the first complete revision
//!   row REVISION     orlopb.ArchivedRow; REVISION as in the bucket of the log's rows
//!   time REVISION    milliseconds since 1970, and 1 if times before are not known
//! ```
//!
//! Numbers are big-endian, of 8 bytes.

use bytes::Bytes;
use orlop_bolt::{Bucket, Cursor, Reader, Source, Unordered};
use prost::Message as _;

use super::buckets::{Target, delete_value, parse_row_key, read_pair, row_key};
use orlop_core::{
    log::{ArchivePart, ArchivedMoment, ArchivedRow, Moment},
    types::{Change, ChangeKind, Prev, Revision, RowId, shown},
};
use orlop_wire::proto::{client, server::orlopb};

/// The name. Buckets are in the order of their names, so it is behind those of etcd that a snapshot has.
pub(super) const ARCHIVE: &str = "orlopArchive";

const COPIED: &[u8] = b"copied";
const FIRST: &[u8] = b"first";
const ROW: &[u8] = b"row";
const TIME: &[u8] = b"time";

/// Limits of a part that is read.
const PART_ENTRIES: usize = 512;
const PART_BYTES: usize = 1 << 20;

/// Writes a part. The first one begins the bucket.
pub(super) fn add(part: ArchivePart, target: &mut impl Target) -> Result<(), Unordered> {
    match part {
        ArchivePart::Begin { first, copied } => {
            target.bucket(ARCHIVE)?;
            target.add(Bytes::from_static(COPIED), copied.0.to_be_bytes().to_vec().into())?;
            target.add(Bytes::from_static(FIRST), first.0.to_be_bytes().to_vec().into())
        }
        ArchivePart::Rows(rows) => rows.into_iter().try_for_each(|row| {
            let key = [ROW, &row_key(row.change.row, row.change.is_delete())].concat();
            target.add(key.into(), stored(row).encode_to_vec().into())
        }),
        ArchivePart::Moments(moments) => moments.into_iter().try_for_each(|ArchivedMoment { moment, has_gap }| {
            let key = [TIME, &moment.revision.0.to_be_bytes()].concat();
            let value = [&moment.unix_ms.to_be_bytes()[..], &[u8::from(has_gap)]].concat();
            target.add(key.into(), value.into())
        }),
    }
}

fn stored(ArchivedRow { change, end }: ArchivedRow) -> orlopb::ArchivedRow {
    let kv = match change.kind {
        ChangeKind::Put { kv, .. } => kv.into_bytes(),
        ChangeKind::Delete => delete_value(&change.key),
    };
    let prev_revision = change.prev.map_or(0, |prev| prev.row.revision.0);
    orlopb::ArchivedRow { kv, end_revision: end.0, prev_revision }
}

/// An entry of the bucket.
enum Entry {
    Copied(Revision),
    First(Revision),
    Row(ArchivedRow),
    Moment(ArchivedMoment),
}

/// What the bucket contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Survey {
    /// The compact revision whose rows it has.
    pub(super) copied: Revision,
    /// The first complete revision.
    pub(super) first: Revision,
    pub(super) rows: usize,
    newest_moment: Revision,
}

impl Survey {
    /// Takes the next entry of the bucket.
    ///
    /// # Errors
    ///
    /// A text for the operator.
    pub(super) fn take(known: &mut Option<Self>, key: &[u8], value: &Bytes) -> Result<(), String> {
        match (read(key, value)?, known) {
            (Entry::Copied(copied), known) => {
                // A first revision has to follow.
                *known = Some(Self { copied, first: Revision::MAX, rows: 0, newest_moment: Revision(0) });
            }
            (Entry::First(first), Some(known)) => known.first = first,
            (Entry::Row(row), Some(known)) => {
                if !row.is_below(known.copied) {
                    return Err(format!(
                        "a row at or above the compact revision {} of the archive is archived: \"{}\"",
                        known.copied,
                        shown(key)
                    ));
                }
                known.rows += 1;
            }
            (Entry::Moment(it), Some(known)) => known.newest_moment = it.moment.revision,
            (Entry::First(_) | Entry::Row(_) | Entry::Moment(_), None) => {
                return Err("the archive has no compact revision".to_owned());
            }
        }
        Ok(())
    }

    /// Checks that the archive is that of a log with this head, or of an earlier state of it.
    ///
    /// # Errors
    ///
    /// A text for the operator.
    pub(super) fn check(&self, head: Revision) -> Result<(), String> {
        match self.newest_moment.max(self.first).max(self.copied) {
            newest if newest > head => Err(format!("the archive states a later revision than {head}, the last one")),
            _ => Ok(()),
        }
    }
}

/// Reads the bucket part by part.
pub(super) struct Parts {
    cursor: Cursor,
    copied: Revision,
    /// An entry that begins the next part.
    next: Option<Entry>,
}

impl Parts {
    pub(super) fn new<S: Source>(reader: &Reader<S>, bucket: &Bucket) -> Self {
        Self { cursor: reader.cursor(bucket), copied: Revision::EMPTY, next: None }
    }

    /// Returns the next part; `None` at the end.
    ///
    /// # Errors
    ///
    /// A text for the operator.
    pub(super) fn next<S: Source>(&mut self, reader: &Reader<S>) -> Result<Option<ArchivePart>, String> {
        let (mut rows, mut moments, mut bytes) = (Vec::new(), Vec::new(), 0);
        while rows.len().max(moments.len()) < PART_ENTRIES && bytes < PART_BYTES {
            let Some(entry) = self.entry(reader, &mut bytes)? else { break };
            match entry {
                Entry::Copied(copied) => self.copied = copied,
                Entry::First(first) => return Ok(Some(ArchivePart::Begin { first, copied: self.copied })),
                Entry::Row(row) => rows.push(row),
                entry @ Entry::Moment(_) if !rows.is_empty() => {
                    self.next = Some(entry);
                    break;
                }
                Entry::Moment(moment) => moments.push(moment),
            }
        }
        Ok(match (rows.is_empty(), moments.is_empty()) {
            (false, _) => Some(ArchivePart::Rows(rows)),
            (true, false) => Some(ArchivePart::Moments(moments)),
            (true, true) => None,
        })
    }

    fn entry<S: Source>(&mut self, reader: &Reader<S>, bytes: &mut usize) -> Result<Option<Entry>, String> {
        if let Some(entry) = self.next.take() {
            return Ok(Some(entry));
        }
        let Some((key, value)) = self.cursor.next(reader).map_err(|error| error.to_string())? else { return Ok(None) };
        *bytes += value.len();
        read(&key, &value).map(Some)
    }
}

fn read(key: &[u8], value: &Bytes) -> Result<Entry, String> {
    let entry = match key {
        COPIED => revision(value).map(Entry::Copied),
        FIRST => revision(value).map(Entry::First),
        _ if key.starts_with(ROW) => read_row(&key[ROW.len()..], value).map(Entry::Row),
        _ => read_moment(key, value).map(Entry::Moment),
    };
    entry.ok_or_else(|| format!("the entry \"{}\" of the archive is invalid", shown(key)))
}

fn read_moment(key: &[u8], value: &Bytes) -> Option<ArchivedMoment> {
    let (ms, gap) = value.split_first_chunk()?;
    let has_gap = match gap {
        [0] => false,
        [1] => true,
        _ => return None,
    };
    let moment = Moment { revision: revision(key.strip_prefix(TIME)?)?, unix_ms: i64::from_be_bytes(*ms) };
    Some(ArchivedMoment { moment, has_gap })
}

fn revision(bytes: &[u8]) -> Option<Revision> {
    let revision = i64::from_be_bytes(bytes.try_into().ok()?);
    (revision > 0).then_some(Revision(revision))
}

fn read_row(key: &[u8], value: &Bytes) -> Option<ArchivedRow> {
    let (row, is_delete) = parse_row_key(key)?;
    let stored = client::orlopb::ArchivedRow::decode(value.clone()).ok()?;
    let (key, kind) = read_pair(row, is_delete, &stored.kv?)?;
    let prev =
        (stored.prev_revision > 0).then(|| Prev { row: RowId::new(Revision(stored.prev_revision), 0), kv: None });
    let end = Revision(stored.end_revision);
    let is_sound = match &kind {
        ChangeKind::Delete => end == row.revision,
        ChangeKind::Put { create_revision, version, .. } => {
            end >= row.revision && *version > 0 && (Revision::EMPTY..=row.revision).contains(create_revision)
        }
    };
    is_sound.then_some(ArchivedRow { change: Change { row, key, kind, prev, prev_lease: None }, end })
}

#[cfg(test)]
mod tests {
    use orlop_core::types::{EncodedKv, Key, Version};

    use super::*;

    #[derive(Default)]
    struct Entries(Vec<(Bytes, Bytes)>);

    impl Target for Entries {
        fn bucket(&mut self, _: &'static str) -> Result<(), Unordered> {
            Ok(())
        }

        fn add(&mut self, key: Bytes, value: Bytes) -> Result<(), Unordered> {
            self.0.push((key, value));
            Ok(())
        }
    }

    fn row(revision: i64, end: i64, is_delete: bool) -> ArchivedRow {
        let (row, key) = (RowId::new(Revision(revision), 0), Key::from(b"a".to_vec()));
        let version = Version { row, create_revision: Revision(2), version: 1 };
        let put = ChangeKind::put(EncodedKv::new(b"a", version, b"value", None));
        let kind = if is_delete { ChangeKind::Delete } else { put };
        ArchivedRow { change: Change { row, key, kind, prev: None, prev_lease: None }, end: Revision(end) }
    }

    fn begin(first: i64) -> ArchivePart {
        ArchivePart::Begin { first: Revision(first), copied: Revision(9) }
    }

    fn moment(revision: i64) -> ArchivePart {
        let moment = Moment { revision: Revision(revision), unix_ms: 1_000 };
        ArchivePart::Moments(vec![ArchivedMoment { moment, has_gap: false }])
    }

    /// Surveys an archive of a log with the head 10 and the compact revision 9.
    fn survey(parts: Vec<ArchivePart>) -> Result<usize, String> {
        let mut entries = Entries::default();
        for part in parts {
            add(part, &mut entries).expect("the entries are kept");
        }
        let mut known = None;
        for (key, value) in entries.0 {
            Survey::take(&mut known, &key, &value)?;
        }
        let known = known.ok_or("it is empty")?;
        known.check(Revision(10)).map(|()| known.rows)
    }

    #[test]
    fn an_archive_has_only_rows_that_the_log_lacks() {
        let rows = |rows: &[(i64, i64, bool)]| {
            ArchivePart::Rows(rows.iter().map(|(revision, end, is_delete)| row(*revision, *end, *is_delete)).collect())
        };
        let key = |revision: &str| format!("row{}{revision}_{}", r"\x00".repeat(7), r"\x00".repeat(8));
        let above =
            |key: &str| Err(format!("a row at or above the compact revision 9 of the archive is archived: \"{key}\""));
        let invalid = |key: &str| Err(format!("the entry \"{key}\" of the archive is invalid"));
        let later = Err("the archive states a later revision than 10, the last one".to_owned());
        for (parts, expected) in [
            (vec![begin(2), rows(&[(2, 4, false), (5, 5, true), (8, 9, false)]), moment(10)], Ok(3)),
            (vec![begin(2)], Ok(0)),
            (vec![begin(2), rows(&[(8, 10, false)])], above(&key(r"\x08"))),
            (vec![begin(2), rows(&[(9, 9, false)])], above(&key(r"\t"))),
            (vec![begin(2), moment(11)], later.clone()),
            (vec![begin(11)], later),
            // A row cannot end before it begins, and a delete ends where it begins.
            (vec![begin(2), rows(&[(5, 4, false)])], invalid(&key(r"\x05"))),
            (vec![begin(2), rows(&[(5, 6, true)])], invalid(&format!("{}t", key(r"\x05")))),
            (vec![rows(&[(2, 4, false)])], Err("the archive has no compact revision".to_owned())),
        ] {
            assert_eq!(survey(parts.clone()), expected, "{parts:?}");
        }
    }

    #[test]
    fn other_entries_are_invalid() {
        let first = Bytes::from_static(&[0, 0, 0, 0, 0, 0, 0, 2]);
        let time = [TIME, &[0, 0, 0, 0, 0, 0, 0, 2]].concat();
        for (key, value) in [
            (FIRST, &first[1..]),
            (FIRST, &[0; 8]),
            (b"second", &first[..]),
            (&time, &[0; 8]),
            (&time, &[0, 0, 0, 0, 0, 0, 0, 0, 2]),
            (&time[..10], &[0; 9]),
            (b"row", b""),
        ] {
            assert!(read(key, &Bytes::copy_from_slice(value)).is_err(), "{key:?} {value:?}");
        }
    }
}
