//! The data directory of an etcd that has stopped: its database, and its write-ahead log (WAL).
//!
//! etcd acknowledges a request when it is in the WAL, and writes it to the database up to 100 ms later. After a clean stop
//! the database has everything. After a crash the WAL may have requests that the database lacks; etcd applies them when
//! it starts. The database contains the index of the last entry that it has. etcd 3.4 updates this index only with
//! changes of keys, so for compactions and leases the content of the database decides. Whether it has other requests after
//! the index cannot be told.

use std::{
    collections::{BTreeMap, HashSet},
    fs::{File, TryLockError},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use prost::Message as _;

use super::{
    Error, Result,
    buckets::Facts,
    file_error,
    wal::{self, Entry},
};
use orlop_core::types::{LeaseId, Revision};
use orlop_wire::proto::server::etcdserverpb::{CompactionRequest, LeaseGrantRequest, LeaseRevokeRequest};

/// Places of the database and of the WAL in a data directory.
const DATABASE: &str = "member/snap/db";
const WAL: &str = "member/wal";
/// Folder in which etcd saves a snapshot that it has received from another member, as `INDEX.snap.db` and
/// `TERM-INDEX.snap`, before it renames the first file to `db`. Both numbers are in hexadecimal.
const RECEIVED: &str = "member/snap";

/// The kind of entries that are requests, in contrast to changes of the members (`raftpb.Entry.type`).
const REQUEST: u64 = 0;

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
    /// If it may lack one, or the WAL is damaged or missing.
    pub(super) fn refuse_unapplied(&self, facts: &Facts) -> Result<()> {
        let (folder, wal) = (self.folder.display(), self.folder.join(WAL));
        let advice = format!("to restore the database as it is, copy {DATABASE} to another folder");
        if let Some(name) = self.received_after(facts.applied)? {
            return Err(Error::File(format!(
                "{folder} has a newer database, {RECEIVED}/{name}, which etcd has received from another member and not \
                 put in the place of {DATABASE} yet; start this etcd and stop it with SIGTERM; {advice}"
            )));
        }
        if !wal.is_dir() {
            return Err(Error::File(format!(
                "{folder} has no {WAL}, so requests that the database lacks would not be noticed; if etcd ran with \
                 --wal-dir, make {WAL} a link to that folder; {advice}"
            )));
        }
        let unapplied = wal::entries_after(&wal, facts.applied).map_err(|error| {
            Error::File(format!("{error}; requests that the database lacks would not be noticed; {advice}"))
        })?;
        match Unapplied::of(unapplied.values()).lacking(facts) {
            0 => Ok(()),
            requests => Err(Error::File(format!(
                "{folder} was not stopped cleanly: its WAL has {requests} requests that its database lacks; start this \
                 etcd and stop it with SIGTERM, which applies them (with etcd 3.4, write a key before you stop it: it \
                 does not note that it has applied changes of users and roles, and requests that change nothing); if \
                 the other members of its cluster are gone, start it on a copy of the folder with --force-new-cluster, \
                 and of several members take the one with the highest revision; {advice}"
            ))),
        }
    }

    /// Returns the name of a database with entries after `applied` that etcd, when it starts, puts in the place of its
    /// own.
    fn received_after(&self, applied: u64) -> Result<Option<String>> {
        let folder = self.folder.join(RECEIVED);
        let unreadable = |error: std::io::Error| file_error("read", &folder, &error);
        let mut names = Vec::new();
        for file in std::fs::read_dir(&folder).map_err(unreadable)? {
            // Names that are not text are not etcd's.
            names.extend(file.map_err(unreadable)?.file_name().into_string());
        }
        let is_newer = |name: &String| {
            let Some(index) = name.strip_suffix(".snap.db") else { return false };
            // etcd ignores a database without the other file.
            let other = format!("-{index}.snap");
            u64::from_str_radix(index, 16).is_ok_and(|index| index > applied)
                && names.iter().any(|name| name.ends_with(&other))
        };
        Ok(names.iter().find(|name| is_newer(name)).cloned())
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

#[cfg(test)]
mod tests {
    use super::*;
    use orlop_core::log::LoggedLease;

    #[test]
    fn requests_that_change_content_are_told_from_others() {
        for (data, changes) in [(&b""[..], false), (b"\x08\x01", true), (b"\x12\x00", false)] {
            let entry = Entry { kind: REQUEST, index: 1, data: Bytes::from_static(data) };
            assert_eq!(changes_content(&entry), changes, "nothing, a request, a publication of version 2: {data:?}");
        }
    }

    #[test]
    fn newer_database_from_another_member_is_found() {
        for (names, newer) in [
            (&["db", "0000000000000002-0000000000000010.snap"][..], None),
            (&["0000000000000010.snap.db", "0000000000000002-0000000000000010.snap"], Some("0000000000000010.snap.db")),
            (&["000000000000000f.snap.db", "0000000000000002-000000000000000f.snap"], None),
            (&["0000000000000010.snap.db", "0000000000000002-000000000000000f.snap"], None),
            (&["other.snap.db", "0000000000000002-other.snap"], None),
        ] {
            let home = tempfile::tempdir().expect("a folder");
            let folder = home.path().join(RECEIVED);
            std::fs::create_dir_all(&folder).expect("a folder can be created");
            for name in ["db"].iter().chain(names) {
                std::fs::write(folder.join(name), "").expect("a file can be written");
            }
            let data_dir = DataDir::of(home.path()).expect("a data directory").expect("a data directory");
            assert_eq!(data_dir.received_after(15).expect("a folder").as_deref(), newer, "{names:?}");
        }
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
