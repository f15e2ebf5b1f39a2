//! The copy: a log that gets the rows of the source, with the source's revisions.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use orlop_wire::proto::client::mvccpb::{Event, event::EventType};
use tokio::time::sleep;

use super::{
    Failure, Result,
    source::{self, SourceHash},
};
use crate::{
    config::{Datastore, Settings},
    datastore::{self, MissingArchive},
};
use orlop_core::{
    auth::AuthState,
    index::{CompactionCursor, Lease, TreeIndex},
    log::{self, Append, Appended, ArchivePart, AuthMark, Error, FactChange, LeaseChange, Load, Log, Meta, Position},
    private,
    store::{HistoryKeeper, Keep, delete_rows, hash, replay},
    types::{Change, ChangeKind, EncodedKv, Key, KeyRange, LeaseId, Prev, Revision, RowId, Superseded, Version, shown},
};
use orlop_sql::Durability;

/// Limits of one append; a transaction of the source is never divided.
const APPEND_ROWS: usize = 512;
const APPEND_BYTES: usize = 4 << 20;
/// Keys whose history is compacted, and rows that are deleted, at a time.
const COMPACT_KEYS: usize = 10_000;
const DELETE_ROWS: usize = 1_000;
/// Maximum number of attempts to delete rows that are copied to an archive. They are given up if the tenth copy fails.
const KEEP_ATTEMPTS: u32 = 12;
/// Pause between two attempts.
const KEEP_PAUSE: Duration = Duration::from_secs(1);

/// Where the copy is.
pub(super) struct Place<'a> {
    pub settings: &'a Settings,
    pub datastore: &'a Datastore,
}

/// The open copy.
pub(super) struct Target {
    log: Arc<dyn Log>,
    /// `None`: there is no archive.
    history: Option<HistoryKeeper>,
    index: TreeIndex,
    /// Rows that an interrupted compaction has left.
    garbage: Vec<Superseded>,
    position: Position,
    /// The newest row that was added since the log was opened.
    last_row: Option<RowId>,
    /// The leases of the log with their TTLs in seconds.
    leases: BTreeMap<LeaseId, i64>,
    /// The cluster whose unfinished copy this is.
    pub source: Option<u64>,
    pub auth: AuthMark,
}

impl Place<'_> {
    /// Opens what is there; `None` if that is nothing.
    ///
    /// # Errors
    ///
    /// If the database cannot be opened, another process uses it, it is damaged, or an older version of Orlop wrote it.
    pub(super) async fn open(&self, missing: MissingArchive) -> Result<Option<Target>> {
        if !datastore::exists(self.datastore) {
            return Ok(None);
        }
        // Opening migrates the schema, and an older version that still uses the database could not open it again. An
        // unfinished copy with rows has the schema of the version that made it.
        if datastore::is_of_older_version(self.datastore).await? {
            return Err(Failure::Fatal(format!(
                "{} contains other data: it was written by an older version of Orlop; use an empty database",
                self.datastore.name()
            )));
        }
        let keep = datastore::keep(self.settings);
        let synced = Durability::Synced;
        let (log, history) =
            datastore::open_with_archive(self.settings, self.datastore, Vec::new(), synced, None, keep, missing)
                .await?;
        let history = history.map(HistoryKeeper::new);
        let replayed = replay(&*log).await?;
        let auth = log.auth().await?;
        let meta = replayed.meta;
        let is_empty = meta.position.head == Revision::EMPTY
            && meta.compact_revision.is_none()
            && meta.leases.is_empty()
            && meta.source.is_none()
            && auth == AuthState::default();
        if is_empty {
            close(&*log, history, meta.position.head).await;
            return Ok(None);
        }
        let leases = meta.leases.iter().map(|lease| (lease.id, lease.ttl_secs)).collect();
        let (source, auth) = (meta.source, AuthMark::of(&auth));
        Ok(Some(Target {
            log,
            history,
            index: replayed.index,
            garbage: replayed.garbage,
            position: meta.position,
            last_row: None,
            leases,
            source,
            auth,
        }))
    }

    /// Returns whether the server will keep compacted rows.
    pub(super) fn keeps_history(&self) -> bool {
        datastore::keep(self.settings) != Keep::Nothing
    }

    /// Deletes the unfinished copy of a cluster, which is not open.
    pub(super) async fn discard(&self, source: u64) -> Result<()> {
        Ok(datastore::discard_copy(self.datastore, source).await?)
    }

    /// Prepares the empty database for the copy of a cluster. The rows that it gets are counted in `rows`.
    pub(super) async fn load(&self, source: u64, rows: Arc<AtomicU64>) -> log::Result<Box<dyn Load>> {
        datastore::discard_empty(self.datastore)?;
        Ok(Box::new(Marked { inner: datastore::empty_database(self.datastore).await?, source, rows }))
    }

    /// Returns the folder for the snapshot of the source, which exists.
    pub(super) fn scratch_folder(&self) -> Result<PathBuf> {
        let folder = datastore::scratch_folder(self.datastore);
        let made = private::make_folder(&folder);
        made.map_err(|error| Failure::Fatal(format!("cannot create folder {}: {error}", folder.display())))?;
        Ok(folder)
    }
}

/// Loads rows as those of a copy, so that nothing but a migration continues with it.
struct Marked {
    inner: Box<dyn Load>,
    source: u64,
    rows: Arc<AtomicU64>,
}

#[async_trait]
impl Load for Marked {
    async fn add(&mut self, changes: &[Change]) -> log::Result<()> {
        self.inner.add(changes).await?;
        self.rows.fetch_add(changes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    async fn add_archive(&mut self, part: ArchivePart) -> log::Result<()> {
        self.inner.add_archive(part).await
    }

    async fn finish(self: Box<Self>, meta: &Meta, auth: &AuthState) -> log::Result<()> {
        self.inner.finish(&Meta { source: Some(self.source), ..meta.clone() }, auth).await
    }
}

impl Target {
    pub(super) fn head(&self) -> Revision {
        self.index.head()
    }

    pub(super) fn compact_revision(&self) -> Option<Revision> {
        self.index.compact_revision()
    }

    /// Returns the number of keys.
    pub(super) fn keys(&self) -> usize {
        self.index.live()
    }

    /// Returns the leases with their TTLs in seconds.
    pub(super) fn leases(&self) -> &BTreeMap<LeaseId, i64> {
        &self.leases
    }

    /// Marks the log as the unfinished copy of a cluster, or as finished.
    pub(super) async fn mark(&mut self, source: Option<u64>) -> Result<()> {
        self.append(&[], &[], None, Some(FactChange::Source(source))).await?;
        self.source = source;
        Ok(())
    }

    /// Returns whether other instances use the database.
    pub(super) async fn is_served(&self) -> Result<bool> {
        match self.log.shared() {
            Some(shared) => Ok(shared.beat().await?.len() > 1),
            None => Ok(false),
        }
    }

    /// Adds the leases, and the revisions of the events, which follow the head.
    ///
    /// # Errors
    ///
    /// [`Failure::Fatal`] if an event does not follow from the rows before.
    pub(super) async fn follow(&mut self, events: Vec<Event>, grants: &BTreeMap<LeaseId, i64>) -> Result<()> {
        self.add_leases(grants).await?;
        let (mut batch, mut bytes) = (Vec::new(), 0);
        for event in events {
            let is_new_revision = source::revision(&event) > self.head();
            if is_new_revision && (batch.len() >= APPEND_ROWS || bytes >= APPEND_BYTES) {
                self.append(&std::mem::take(&mut batch), &[], None, None).await?;
                bytes = 0;
            }
            let change = self.change(event)?;
            bytes += change.key.len() + change.kv().map_or(0, EncodedKv::len);
            batch.push(change);
        }
        self.append(&batch, &[], None, None).await
    }

    /// Converts an event to the next row, and applies it to the index.
    fn change(&mut self, event: Event) -> Result<Change> {
        let head = self.index.head();
        let is_put = event.r#type() == EventType::Put;
        let kv = event.kv.unwrap_or_default();
        let revision = Revision(kv.mod_revision);
        let key = Key::from(kv.key.to_vec());
        let wrong = |what: &dyn std::fmt::Display| {
            Failure::Fatal(format!(
                "the source sends a change that does not follow from the copy: revision {revision}, key \"{}\": {what}; \
                 the copy is at revision {head}",
                shown(&key)
            ))
        };
        let row = match self.last_row {
            Some(last) if last.revision == revision => last.next(),
            _ if revision == head.next() => RowId::new(revision, 0),
            _ => return Err(wrong(&"a revision is missing")),
        };
        let kind = if is_put {
            let version = Version { row, create_revision: Revision(kv.create_revision), version: kv.version };
            ChangeKind::put(EncodedKv::new(&key, version, &kv.value, LeaseId::from_wire(kv.lease)))
        } else {
            ChangeKind::Delete
        };
        let prev = self.index.get(key.as_slice(), revision.prev());
        let prev = prev.map(|entry| Prev { row: entry.version.row, kv: None });
        let change = Change { row, key: key.clone(), kind, prev, prev_lease: None };
        self.index.restore(&change, self.index.compact_revision()).map_err(|error| wrong(&error))?;
        self.last_row = Some(row);
        Ok(change)
    }

    /// Begins the archive, if rows are to be kept, and finishes a compaction that was interrupted. Call it before anything is
    /// written, and only if the database is a copy of the source: it deletes rows, and the remaining times of leases.
    pub(super) async fn begin(&mut self) -> Result<()> {
        self.log.forget_lease_times().await?;
        let compacted = self.compact_revision();
        if let Some(history) = &self.history {
            history.begin(compacted, self.head()).await;
        }
        let garbage = std::mem::take(&mut self.garbage);
        match compacted {
            Some(compacted) => self.purge(garbage, compacted).await,
            None => Ok(()),
        }
    }

    /// Makes revisions below `revision` unreadable and deletes their rows.
    pub(super) async fn compact(&mut self, revision: Revision) -> Result<()> {
        if Some(revision) <= self.compact_revision() || revision > self.head() {
            return Ok(());
        }
        self.append(&[], &[], Some(revision), None).await?;
        self.index.begin_compaction(revision);
        let (mut cursor, mut garbage) = (CompactionCursor::default(), Vec::new());
        while self.index.compact_step(&mut cursor, COMPACT_KEYS, &mut garbage) {}
        self.purge(garbage, revision).await
    }

    /// Deletes the rows that a compaction removes, after they were copied to the archive. They are deleted in their order:
    /// without its tombstone, a key whose puts are left would exist again.
    async fn purge(&self, mut garbage: Vec<Superseded>, compacted: Revision) -> Result<()> {
        garbage.sort_unstable();
        let (history, server) = (self.history.as_ref(), self.position.server);
        let attempts_max = if history.is_some() { KEEP_ATTEMPTS } else { 1 };
        let (mut left, mut attempts) = (garbage.as_slice(), 0);
        while !left.is_empty() {
            let rows = &left[..left.len().min(DELETE_ROWS)];
            attempts += 1;
            match delete_rows(&*self.log, history, rows, compacted, server).await {
                Ok(deleted) => (left, attempts) = (&left[deleted..], 0),
                Err(_) if attempts < attempts_max => sleep(KEEP_PAUSE).await,
                Err(error) => return Err(error.into()),
            }
        }
        match history {
            Some(history) => Ok(history.finish(compacted, server).await?),
            None => Ok(()),
        }
    }

    /// Gives the log these leases, and those that still have keys, each with its full TTL before it.
    pub(super) async fn set_leases(&mut self, wanted: &BTreeMap<LeaseId, i64>) -> Result<()> {
        if let Some(shared) = self.log.shared() {
            // Deadlines that are set from now on are not moved by the time without a server.
            shared.beat().await?;
        }
        let mut leases = self.leases_with_keys();
        leases.extend(wanted);
        let ids: BTreeSet<LeaseId> = self.leases.keys().chain(leases.keys()).copied().collect();
        let ids: Vec<LeaseId> = ids.into_iter().collect();
        // One append ends a lease and grants it again: otherwise the migration could end between the two.
        for ids in ids.chunks(APPEND_ROWS) {
            let known = ids.iter().filter(|id| self.leases.contains_key(*id));
            let revokes = known.map(|id| LeaseChange::Revoke { id: *id });
            let grants = ids.iter().filter_map(|id| Some(LeaseChange::Grant { id: *id, ttl_secs: *leases.get(id)? }));
            let changes: Vec<LeaseChange> = revokes.chain(grants).collect();
            self.append(&[], &changes, None, None).await?;
        }
        self.leases = leases;
        Ok(())
    }

    /// Returns the leases that live keys name. An Orlop that refuses writes does not list a lease that has expired, but
    /// has its keys. Without the lease, the copy would keep them forever.
    fn leases_with_keys(&self) -> BTreeMap<LeaseId, i64> {
        let all = KeyRange::all();
        let keys = self.index.range(all.bounds(), self.head());
        let named = keys.filter_map(|(_, entry)| match entry.lease {
            Lease::Known(id) => id,
            Lease::InRow => None,
        });
        // A key whose lease the copy does not know had none at the source either, and stays there, too.
        named.filter_map(|id| Some((id, *self.leases.get(&id)?))).collect()
    }

    async fn add_leases(&mut self, leases: &BTreeMap<LeaseId, i64>) -> Result<()> {
        let grants: Vec<LeaseChange> =
            leases.iter().map(|(id, ttl_secs)| LeaseChange::Grant { id: *id, ttl_secs: *ttl_secs }).collect();
        for grants in grants.chunks(APPEND_ROWS) {
            self.append(&[], grants, None, None).await?;
        }
        self.leases.extend(leases);
        Ok(())
    }

    /// Returns whether the log has the hash of the source at the log's head, once it is compacted as the source is.
    pub(super) async fn has_hash(&self, theirs: &SourceHash) -> Result<bool> {
        let (own, head) = (self.compact_revision(), self.head());
        let compacted = theirs.compact_revision.max(own);
        let frozen = self.log.freeze().await?;
        if hash::of_log(&*frozen, &self.index, head, compacted).await?.hash == theirs.hash {
            return Ok(true);
        }
        // At its compact revision, etcd tells the hash from before the compaction.
        let may_be_older = theirs.compact_revision == Some(head) && own < compacted;
        Ok(may_be_older && hash::of_log(&*frozen, &self.index, head, own).await?.hash == theirs.hash)
    }

    /// Records the time of the head. Call it about once a second while the copy has the newest revision of the source. If it
    /// fails, the revisions count as written when the next time is recorded.
    pub(super) async fn note_time(&self) {
        if let Some(history) = &self.history {
            let _ = history.note_time(self.head()).await;
        }
    }

    pub(super) async fn close(self) {
        let head = self.head();
        close(&*self.log, self.history, head).await;
    }

    async fn append(
        &mut self,
        changes: &[Change],
        leases: &[LeaseChange],
        compact: Option<Revision>,
        fact: Option<FactChange>,
    ) -> Result<()> {
        let append = Append { expected: self.position, changes, reads: None, leases, compact, fact, auth: None };
        if append.is_empty() {
            return Ok(());
        }
        let has_epoch = !leases.is_empty() || compact.is_some() || fact.is_some();
        match self.log.append(append).await? {
            Appended::Done => {
                self.position.head = changes.last().map_or(self.position.head, |change| change.row.revision);
                self.position.epoch += i64::from(has_epoch);
                Ok(())
            }
            // The append has no read set, so it is never behind.
            Appended::Behind { .. } | Appended::Conflict => {
                let found = self.log.meta().await?.position;
                let is_ours = (found.head, found.epoch) == (self.position.head, self.position.epoch);
                Err(match is_ours {
                    true => Failure::Target("another server answers at the database's address".to_owned()),
                    false => Failure::Fatal("another process writes to the database of the copy; stop it".to_owned()),
                })
            }
        }
    }
}

async fn close(log: &dyn Log, history: Option<HistoryKeeper>, head: Revision) {
    if let Some(history) = history {
        history.close(head).await;
    }
    log.close(&[]).await;
}

impl From<log::Error> for Failure {
    fn from(error: log::Error) -> Self {
        match error {
            Error::Unavailable(_) | Error::OutcomeUnknown(_) | Error::Full(_) => Self::Target(error.to_string()),
            Error::Refused(_) | Error::Open(_) | Error::Corrupt(_) | Error::Diverged(_) => {
                Self::Fatal(error.to_string())
            }
        }
    }
}
