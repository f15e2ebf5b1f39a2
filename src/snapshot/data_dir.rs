//! The data directory of an etcd that has stopped: its database, and its write-ahead log (WAL).
//!
//! etcd acknowledges a request when it is in the WAL, and writes it to the database up to 100 ms later. After a clean stop
//! the database has everything. After a crash the WAL may have requests that the database lacks; etcd applies them when
//! it starts. The database contains the index of the last entry that it has. etcd 3.4 updates this index only with
//! changes of keys, so for compactions and leases the content of the database decides. Whether it has other requests after
//! the index cannot be told.
//!
//! A file of the WAL is a sequence of records, each a `walpb.Record` behind its length in 8 bytes, little-endian: the
//! lower 56 bits are the length; if the highest bit is set, the lower 3 bits of the last byte are the number of bytes that
//! follow to fill up. A length of 0 ends the file, which etcd creates longer than its content.

use std::{
    collections::{BTreeMap, HashSet},
    fs::{File, TryLockError},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use prost::Message as _;

use super::{Error, Result, buckets::Facts, file_error};
use orlop_core::types::{LeaseId, Revision};
use orlop_wire::proto::server::etcdserverpb::{CompactionRequest, LeaseGrantRequest, LeaseRevokeRequest};

/// Place of the database in a data directory.
const DATABASE: &str = "member/snap/db";

/// Kinds of records (`walpb.Record.type`).
const ENTRY: i64 = 2;
const CHECKSUM: i64 = 4;
/// The kind of entries that are requests, in contrast to changes of the members (`raftpb.Entry.type`).
const REQUEST: u64 = 0;

/// `walpb.Record`.
#[derive(Clone, PartialEq, prost::Message)]
struct Record {
    #[prost(int64, tag = "1")]
    kind: i64,
    /// The CRC-32C of the data of all records up to this one.
    #[prost(uint32, tag = "2")]
    checksum: u32,
    #[prost(bytes = "bytes", tag = "3")]
    data: Bytes,
}

/// `raftpb.Entry`.
#[derive(Clone, PartialEq, prost::Message)]
struct Entry {
    #[prost(uint64, tag = "1")]
    kind: u64,
    #[prost(uint64, tag = "3")]
    index: u64,
    #[prost(bytes = "bytes", tag = "4")]
    data: Bytes,
}

/// The fields of `etcdserverpb.InternalRaftRequest` that change nothing of what a snapshot contains: what members publish
/// of themselves, alarms, remaining times of leases, logins, versions of the cluster.
#[derive(Clone, PartialEq, prost::Message)]
struct OfMembers {
    #[prost(bytes = "bytes", optional, tag = "2")]
    v2: Option<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "10")]
    alarm: Option<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "11")]
    lease_checkpoint: Option<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "1012")]
    authenticate: Option<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "1300")]
    cluster_version: Option<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "1301")]
    member_attributes: Option<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "1302")]
    downgrade: Option<Bytes>,
}

/// The fields of `etcdserverpb.InternalRaftRequest` whose effect is seen in the database.
#[derive(Clone, PartialEq, prost::Message)]
struct Visible {
    #[prost(message, optional, tag = "7")]
    compaction: Option<CompactionRequest>,
    #[prost(message, optional, tag = "8")]
    lease_grant: Option<LeaseGrantRequest>,
    #[prost(message, optional, tag = "9")]
    lease_revoke: Option<LeaseRevokeRequest>,
}

/// What the requests after the index of the database do together.
#[derive(Debug, Default, PartialEq)]
struct Unapplied {
    compaction: Option<Revision>,
    /// Whether the lease exists afterwards.
    leases: BTreeMap<LeaseId, bool>,
    /// Number of requests whose effect is not seen in the database.
    others: usize,
}

/// A data directory that no etcd uses as long as this exists.
pub(super) struct DataDir {
    folder: PathBuf,
    /// Locked, as etcd locks it.
    _database: File,
}

impl DataDir {
    /// Returns the data directory that `path` is, or in which it is the database; `None` if it is another file.
    ///
    /// # Errors
    ///
    /// If it is another folder, or an etcd uses it.
    pub(super) fn of(path: &Path) -> Result<Option<Self>> {
        let folder = if path.is_dir() {
            path
        } else if let Some(folder) = path.ends_with(DATABASE).then(|| path.ancestors().nth(3)).flatten() {
            folder
        } else {
            return Ok(None);
        };
        let database = folder.join(DATABASE);
        if !database.is_file() {
            return Err(Error::File(format!(
                "the folder {} is not a data directory of etcd: it has no {DATABASE}",
                folder.display()
            )));
        }
        let file = File::open(&database).map_err(|error| file_error("read", &database, &error))?;
        match file.try_lock_shared() {
            Ok(()) => Ok(Some(Self { folder: folder.to_owned(), _database: file })),
            Err(TryLockError::WouldBlock) => Err(Error::File(format!(
                "an etcd uses {}; take a snapshot of it with `orlop snapshot save`, or stop it",
                folder.display()
            ))),
            Err(TryLockError::Error(error)) => Err(file_error("lock", &database, &error)),
        }
    }

    pub(super) fn database(&self) -> PathBuf {
        self.folder.join(DATABASE)
    }

    /// Checks that the database, which contains `facts`, has all requests of the WAL.
    ///
    /// # Errors
    ///
    /// If it may lack one, or there is no WAL.
    pub(super) fn refuse_unapplied(&self, facts: &Facts) -> Result<()> {
        let wal = self.folder.join("member/wal");
        let unreadable = |error: std::io::Error| file_error("read", &wal, &error);
        let advice = format!("to restore the database as it is, copy {DATABASE} to another folder");
        if !wal.is_dir() {
            return Err(Error::File(format!(
                "{} has no member/wal, so requests that the database lacks would not be noticed; {advice}",
                self.folder.display()
            )));
        }
        let mut files = Vec::new();
        for file in std::fs::read_dir(&wal).map_err(unreadable)? {
            let file = file.map_err(unreadable)?.path();
            files.extend(file.extension().is_some_and(|extension| extension == "wal").then_some(file));
        }
        // Their names are numbers in hexadecimal with leading zeros.
        files.sort_unstable();
        let mut unapplied = BTreeMap::new();
        for file in files {
            let bytes = std::fs::read(&file).map_err(|error| file_error("read", &file, &error))?;
            for entry in entries(bytes.into()) {
                // An entry replaces those at its index and after it, which no majority had.
                unapplied.split_off(&entry.index);
                if entry.index > facts.applied {
                    unapplied.insert(entry.index, entry);
                }
            }
        }
        match Unapplied::of(unapplied.values()).lacking(facts) {
            0 => Ok(()),
            requests => Err(Error::File(format!(
                "{} was not stopped cleanly: its WAL has {requests} requests that its database lacks; start this etcd and \
                 stop it with SIGTERM, which applies them (with etcd 3.4, write a key before you stop it: it does not \
                 note that it has applied changes of users and roles, and requests that change nothing); {advice}",
                self.folder.display()
            ))),
        }
    }
}

impl Unapplied {
    fn of<'a>(entries: impl Iterator<Item = &'a Entry>) -> Self {
        let mut all = Self::default();
        for entry in entries.filter(|entry| changes_content(entry)) {
            match Visible::decode(entry.data.clone()).unwrap_or_default() {
                Visible { compaction: Some(compaction), .. } => {
                    all.compaction = all.compaction.max(Some(Revision(compaction.revision)));
                }
                Visible { lease_revoke: Some(revoke), .. } => drop(all.leases.insert(LeaseId(revoke.id), false)),
                // After a revocation of the same lease, the database could have the lease from before.
                Visible { lease_grant: Some(grant), .. } if all.leases.get(&LeaseId(grant.id)) != Some(&false) => {
                    all.leases.insert(LeaseId(grant.id), true);
                }
                Visible { .. } => all.others += 1,
            }
        }
        all
    }

    /// Returns the number of requests that a database with `facts` lacks, as far as can be seen.
    fn lacking(&self, facts: &Facts) -> usize {
        let stored: HashSet<LeaseId> = facts.leases.iter().map(|lease| lease.id).collect();
        let leases = self.leases.iter().filter(|(id, exists)| stored.contains(id) != **exists).count();
        self.others + leases + usize::from(self.compaction > facts.compacted)
    }
}

/// Returns whether an entry is a request that may change keys, leases, users or roles.
fn changes_content(entry: &Entry) -> bool {
    // A new leader appends an entry without data.
    let is_request = entry.kind == REQUEST && !entry.data.is_empty();
    is_request && OfMembers::decode(entry.data.clone()).is_ok_and(|of_members| of_members == OfMembers::default())
}

/// Returns the entries of a file of the WAL, up to the first record that is incomplete or damaged: a crash may have
/// interrupted the last write.
fn entries(file: Bytes) -> Vec<Entry> {
    let (mut rest, mut checksum, mut entries) = (file, 0, Vec::new());
    while let Some(record) = take_record(&mut rest) {
        if record.kind == CHECKSUM {
            checksum = record.checksum;
            continue;
        }
        checksum = crc32c::crc32c_append(checksum, &record.data);
        if record.checksum != checksum {
            break;
        }
        if record.kind == ENTRY {
            let Ok(entry) = Entry::decode(record.data) else { break };
            entries.push(entry);
        }
    }
    entries
}

fn take_record(rest: &mut Bytes) -> Option<Record> {
    let field = rest.first_chunk().map(|chunk| u64::from_le_bytes(*chunk)).filter(|field| *field != 0)?;
    let len = usize::try_from(field & (u64::MAX >> 8)).ok()?;
    let has_fill = field >> 63 == 1;
    let fill = if has_fill { usize::try_from(field >> 56 & 7).ok()? } else { 0 };
    let end = len.checked_add(8)?.checked_add(fill).filter(|end| *end <= rest.len())?;
    let record = Record::decode(rest.slice(8..8 + len)).ok();
    *rest = rest.slice(end..);
    record
}

#[cfg(test)]
mod tests {
    use super::*;
    use orlop_core::log::LoggedLease;

    fn frame(record: &Record) -> Vec<u8> {
        let data = record.encode_to_vec();
        let fill = (8 - data.len() % 8) % 8;
        let mut field = data.len() as u64;
        if fill > 0 {
            field |= (0x80 | fill as u64) << 56;
        }
        [&field.to_le_bytes()[..], &data, &vec![0; fill]].concat()
    }

    /// Returns a file whose entries have the indexes 1, 2 and so on.
    fn wal(requests: &[&'static [u8]]) -> Vec<u8> {
        let mut file = frame(&Record { kind: CHECKSUM, checksum: 7, data: Bytes::new() });
        let mut checksum = 7;
        for (index, data) in (1..).zip(requests) {
            let data = Bytes::from(Entry { kind: REQUEST, index, data: Bytes::from_static(data) }.encode_to_vec());
            checksum = crc32c::crc32c_append(checksum, &data);
            file.extend(frame(&Record { kind: ENTRY, checksum, data }));
        }
        file
    }

    #[test]
    fn entries_are_read_up_to_the_first_damage() {
        let whole = wal(&[b"", b"\x08\x01", b"\x12\x00"]);
        let last =
            frame(&Record { kind: ENTRY, checksum: 0, data: Bytes::from_static(&[0x18, 3, 0x22, 2, 0x12, 0]) }).len();
        let mut damaged = whole.clone();
        damaged[whole.len() - last + 12] ^= 1;
        for (file, want) in [
            ([&whole[..], &[0; 100]].concat(), 3),
            (whole.clone(), 3),
            (whole[..whole.len() - 5].to_vec(), 2),
            (damaged, 2),
            (vec![0xff; 64], 0),
            (vec![], 0),
        ] {
            assert_eq!(entries(file.into()).len(), want);
        }
        // Whatever is damaged, what is before it is read, and nothing else.
        for place in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[place] = !damaged[place];
            let read = entries(damaged.into());
            assert!(read.iter().eq(entries(whole.clone().into()).iter().take(read.len())), "byte {place}");
        }
        let changes: Vec<bool> = entries(whole.into()).iter().map(changes_content).collect();
        assert_eq!(changes, [false, true, false], "nothing, a request, a publication of version 2");
    }

    #[test]
    fn effects_are_looked_for_in_the_database() {
        let compact = |revision| {
            let compaction = Some(CompactionRequest { revision, physical: false });
            Visible { compaction, ..Default::default() }
        };
        let grant = |id| Visible { lease_grant: Some(LeaseGrantRequest { ttl: 60, id }), ..Default::default() };
        let revoke = |id| Visible { lease_revoke: Some(LeaseRevokeRequest { id }), ..Default::default() };
        let stored = [7].map(|id| LoggedLease { id: LeaseId(id), ttl_secs: 60, left_secs: None });
        let facts = Facts { leases: stored.to_vec(), compacted: Some(Revision(100)), ..Default::default() };
        for (requests, lacking) in [
            (vec![compact(100), grant(7), revoke(8)], 0),
            (vec![grant(8), revoke(8), grant(7), compact(50)], 0),
            (vec![compact(90), compact(101)], 1),
            (vec![grant(8)], 1),
            (vec![revoke(7)], 1),
            // The lease that is stored may be the one from before.
            (vec![revoke(7), grant(7)], 2),
            // A change of keys or users.
            (vec![grant(7), Visible::default()], 1),
        ] {
            let entries: Vec<Entry> = requests
                .iter()
                .map(|request| {
                    // The request's own number precedes it.
                    let data = [&[0x08, 1][..], &request.encode_to_vec()].concat();
                    Entry { kind: REQUEST, index: 1, data: data.into() }
                })
                .collect();
            assert_eq!(Unapplied::of(entries.iter()).lacking(&facts), lacking, "{requests:?}");
        }
    }
}
