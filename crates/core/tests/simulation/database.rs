//! The simulated database: each function does atomically what a function of Postgres (`crates/sql/migrations/postgres`)
//! or a statement of SQLite does. [`super::log`] decides whether and when a call and its response arrive.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::{
    sync::{Mutex as AsyncMutex, watch},
    time::{Instant, sleep},
};

use super::{
    archive::Tables,
    random,
    saved_index::Saved,
    scheduler,
    truth::{Sharing, Truth},
};
use orlop_core::{
    auth::{AuthChange, AuthState},
    log::{
        Alarm, AlarmChange, Append, Appended, AuthMark, Cause, FactChange, HEARTBEAT_TIMEOUT, LeaseChange, LeaseScope,
        LoggedLease, Member, Meta, Page, PastRow, Position, Touch, WithPrev,
    },
    types::{Change, EncodedKv, Key, KeyRange, LeaseId, Prev, Rebase, Revision, RowId},
};

/// Maximum time between two heartbeats that counts against leases. A longer time moves all deadlines by that time.
const SILENCE_MAX: Duration = Duration::from_secs(2);
/// Number of epochs whose changes of leases are kept. An instance that is paused often lacks more.
const EPOCHS_KEPT: i64 = 8;

/// Probabilities per 1,000 calls.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Faults {
    /// The call fails and nothing is applied.
    pub refused: usize,
    /// The call may be applied, now or later, and its response is lost.
    pub lost: usize,
    /// The call takes up to several seconds.
    pub slow: usize,
    /// A notification is lost.
    pub unheard: usize,
    /// There is no space for a copy of rows.
    pub full: usize,
}

/// An [`Append`] that owns its data, because the caller may end before the append is applied.
pub(super) struct Owned {
    expected: Position,
    changes: Vec<Change>,
    /// The keys and the ranges of a [`ReadSet`](orlop_core::log::ReadSet).
    reads: Option<Vec<KeyRange>>,
    leases: Vec<LeaseChange>,
    compact: Option<Revision>,
    fact: Option<FactChange>,
    auth: Option<(AuthChange, AuthState)>,
}

impl From<Append<'_>> for Owned {
    fn from(append: Append<'_>) -> Self {
        Self {
            expected: append.expected,
            changes: append.changes.to_vec(),
            reads: append.reads.map(|reads| {
                let keys = reads.keys.iter().map(|key| KeyRange::Single(Key::from(*key)));
                keys.chain(reads.spans.iter().map(|span| (*span).clone())).collect()
            }),
            leases: append.leases.to_vec(),
            compact: append.compact,
            fact: append.fact,
            auth: append.auth.map(|auth| (auth.change.clone(), auth.next.clone())),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Lease {
    ttl_secs: i64,
    deadline: Instant,
}

/// A row of the table `member`.
struct MemberRow {
    member: Member,
    run: u64,
    started: Instant,
    beat: Instant,
}

pub(super) struct Database {
    pub truth: Truth,
    pub archive: Tables,
    pub saved_index: Saved,
    pub sharing: Sharing,
    pub faults: Faults,
    pub is_up: bool,
    pub server: i64,
    /// The lock that every append holds.
    pub lock: Arc<AsyncMutex<()>>,
    /// The notification channel of each run of an instance; `None` while its connection is broken.
    pub listeners: BTreeMap<u64, Option<watch::Sender<Revision>>>,
    rows: BTreeMap<RowId, Change>,
    leases: BTreeMap<LeaseId, Lease>,
    /// The leases that the newest appends changed, by the epochs that these began.
    lease_changes: BTreeMap<i64, Vec<LeaseId>>,
    alarms: BTreeMap<Alarm, Cause>,
    epoch: i64,
    purged: Revision,
    members: BTreeMap<u64, MemberRow>,
    last_beat: Option<Instant>,
}

impl Database {
    pub fn new(sharing: Sharing, faults: Faults, auth: AuthState) -> Self {
        Self {
            truth: Truth::new(sharing, auth),
            archive: Tables::default(),
            saved_index: Saved::default(),
            sharing,
            faults,
            is_up: true,
            server: i64::from(sharing == Sharing::Shared),
            lock: Arc::default(),
            listeners: BTreeMap::new(),
            rows: BTreeMap::new(),
            leases: BTreeMap::new(),
            lease_changes: BTreeMap::new(),
            alarms: BTreeMap::new(),
            epoch: 0,
            purged: Revision(0),
            members: BTreeMap::new(),
            last_beat: None,
        }
    }

    /// Starts another server, which cancels all calls in progress.
    pub fn restart(&mut self) {
        self.server += 1;
        self.lock = Arc::default();
    }

    pub fn position(&self) -> Position {
        let head = self.rows.last_key_value().map_or(Revision::EMPTY, |(row, _)| row.revision);
        Position { head, epoch: if self.sharing == Sharing::Own { 0 } else { self.epoch }, server: self.server }
    }

    /// Returns the first revision that can be read, from the log or the archive.
    pub fn first(&self) -> Revision {
        self.archive.first().min(self.truth.compact_revision.unwrap_or(Revision::EMPTY))
    }

    /// Returns whether the rows of the newest compaction are not in the archive yet.
    pub fn is_copying(&self) -> bool {
        self.archive.copied().is_some_and(|copied| Some(copied) < self.truth.compact_revision)
    }

    pub fn append(&mut self, append: &Owned) -> Appended {
        let position = self.position();
        let is_expected = match self.sharing {
            Sharing::Shared => position == append.expected,
            Sharing::Own => append.changes.is_empty() || position.head == append.expected.head,
        };
        let others = if is_expected { Some(Vec::new()) } else { self.others_before(append) };
        let Some(others) = others else { return Appended::Conflict };
        let Some(leases) = self.leases_after(&append.leases) else { return Appended::Conflict };
        self.leases = leases;
        let mut changes = append.changes.clone();
        let rebase = Rebase { base: append.expected.head, by: position.head.0 - append.expected.head.0 };
        changes.iter_mut().for_each(|change| rebase.change(change));
        self.truth.land(&changes, &append.leases, append.compact);
        self.rows.extend(changes.into_iter().map(|change| (change.row, change)));
        match append.fact {
            Some(FactChange::Alarm(AlarmChange::Raise { alarm, cause })) => drop(self.alarms.insert(alarm, cause)),
            Some(FactChange::Alarm(AlarmChange::Clear { alarm })) => drop(self.alarms.remove(&alarm)),
            // A store does not send it.
            Some(FactChange::Source(_)) | None => {}
        }
        if let Some((change, next)) = &append.auth {
            self.truth.auth.land(change, next);
        }
        self.epoch += i64::from(
            !append.leases.is_empty() || append.compact.is_some() || append.fact.is_some() || append.auth.is_some(),
        );
        if !append.leases.is_empty() || append.compact.is_some() {
            self.lease_changes.insert(self.epoch, append.leases.iter().map(changed_lease).collect());
            self.lease_changes = self.lease_changes.split_off(&(self.epoch - EPOCHS_KEPT + 1));
        }
        scheduler::note(self.truth.head.0.cast_unsigned());
        self.notify();
        if is_expected {
            return Appended::Done;
        }
        // Large changes of others are in the log only.
        let others = if random::percent(30) { Vec::new() } else { others };
        Appended::Behind { base: position.head, others }
    }

    /// Returns the changes behind which an append may be moved, or `None` if it may not.
    fn others_before(&self, append: &Owned) -> Option<Vec<Change>> {
        let position = self.position();
        let expected = append.expected;
        let reads = append.reads.as_ref().filter(|_| self.sharing == Sharing::Shared)?;
        let can_move = (position.epoch, position.server) == (expected.epoch, expected.server)
            && position.head > expected.head
            && self.purged <= expected.head
            // A database may refuse, because there are many changes.
            && !random::permille(50);
        let others = self.rows.range(RowId::new(expected.head.next(), 0)..);
        let others: Vec<Change> = others.map(|(_, change)| self.read(change, WithPrev::No)).collect();
        let is_read = |change: &Change| reads.iter().any(|range| range.contains(&change.key));
        (can_move && !others.iter().any(is_read)).then_some(others)
    }

    /// Returns the leases after the changes, or `None` if a lease would expire early.
    fn leases_after(&self, changes: &[LeaseChange]) -> Option<BTreeMap<LeaseId, Lease>> {
        let now = Instant::now();
        let (mut leases, mut granted) = (self.leases.clone(), Vec::new());
        for change in changes {
            match *change {
                LeaseChange::Grant { id, ttl_secs } => {
                    let deadline = now + Duration::from_secs(ttl_secs.cast_unsigned());
                    leases.insert(id, Lease { ttl_secs, deadline });
                    granted.push(id);
                }
                LeaseChange::Revoke { id } => drop(leases.remove(&id)),
                LeaseChange::Expire { id } => {
                    let ended = leases.remove(&id);
                    let is_due = granted.contains(&id) || ended.is_some_and(|lease| lease.deadline <= now);
                    if self.sharing == Sharing::Shared && !is_due {
                        return None;
                    }
                }
            }
        }
        Some(leases)
    }

    /// Notifies instances of the current revision, after a random delay, in any order, or not at all.
    fn notify(&self) {
        let head = self.truth.head;
        for notified in self.listeners.values().flatten() {
            if random::permille(self.faults.unheard) {
                continue;
            }
            let notified = notified.clone();
            scheduler::spawn_in(scheduler::DATABASE, async move {
                if random::percent(50) {
                    sleep(random::millis(1, 40)).await;
                }
                notified.send_if_modified(|notified| std::mem::replace(notified, head) != head);
            });
        }
    }

    pub fn meta(&self) -> Meta {
        let now = Instant::now();
        let left = |deadline: Instant| match self.sharing {
            Sharing::Own => None,
            Sharing::Shared => Some(seconds_left(deadline, now)),
        };
        let logged = |(id, lease): (&LeaseId, &Lease)| LoggedLease {
            id: *id,
            ttl_secs: lease.ttl_secs,
            left_secs: left(lease.deadline),
        };
        Meta {
            cluster_id: 1,
            member_id: 1,
            position: self.position(),
            compact_revision: self.truth.compact_revision,
            leases: self.leases.iter().map(logged).collect(),
            alarms: self.alarms.iter().map(|(alarm, cause)| (*alarm, *cause)).collect(),
            auth: AuthMark::of(self.truth.auth.newest()),
            source: None,
        }
    }

    /// Returns the state with the leases that have changed since `known`, or with all leases if they are not known.
    pub fn meta_since(&self, known: Position) -> (Meta, LeaseScope) {
        let meta = self.meta();
        let changes = self.lease_changes.range(known.epoch + 1..);
        let recorded_from = meta.position.epoch - changes.clone().count() as i64;
        if (recorded_from, meta.position.server) != (known.epoch, known.server) {
            return (meta, LeaseScope::All);
        }
        let changed: Vec<LeaseId> = changes.flat_map(|(_, ids)| ids).copied().collect();
        let leases = meta.leases.iter().filter(|lease| changed.contains(&lease.id)).copied().collect();
        (Meta { leases, ..meta }, LeaseScope::Changed(changed))
    }

    /// Returns all rows, as a database stores them.
    pub fn rows(&self) -> Vec<Change> {
        self.rows.values().map(|change| self.read(change, WithPrev::No)).collect()
    }

    pub fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Page {
        let purged = (self.sharing == Sharing::Shared).then_some(self.purged);
        let mut page = Page { changes: Vec::new(), next: to.next(), purged };
        let (looked_at_max, mut looked_at, mut last) = (random::below(24) + 1, 0, None);
        for (row, change) in self.rows.range(RowId::new(from, 0)..RowId::new(to.next(), 0)) {
            if looked_at >= looked_at_max && last != Some(row.revision) {
                page.next = row.revision;
                break;
            }
            looked_at += 1;
            last = Some(row.revision);
            if range.contains(&change.key) {
                page.changes.push(self.read(change, prev));
            }
        }
        page
    }

    /// Returns a change as a database returns it: with the revision of the row that it replaced, but without the `sub`
    /// and the lease of that row.
    fn read(&self, change: &Change, with_prev: WithPrev) -> Change {
        let prev = change.prev.as_ref().map(|prev| {
            let kv = if with_prev == WithPrev::Yes { self.value(prev.row) } else { None };
            Prev { row: RowId::new(prev.row.revision, 0), kv }
        });
        Change { prev, prev_lease: None, ..change.clone() }
    }

    pub fn value(&self, row: RowId) -> Option<EncodedKv> {
        self.rows.get(&row)?.kv().cloned()
    }

    /// Returns a row of the log as an archive keeps it.
    pub fn past_row(&self, row: RowId) -> Option<PastRow> {
        let change = self.rows.get(&row)?;
        Some(PastRow { row, key: change.key.clone(), kv: change.kv().cloned() })
    }

    /// Deletes compacted rows. Returns false, without deleting, if the rows were found on another server, or if this
    /// server does not have the compaction.
    pub fn purge(&mut self, rows: &[RowId], compacted: Revision, server: i64) -> bool {
        let knows = self.truth.compact_revision >= Some(compacted);
        if self.sharing == Sharing::Shared && (server != self.server || !knows) {
            return false;
        }
        self.purged = self.purged.max(compacted);
        for id in rows.iter().filter(|row| row.revision <= compacted) {
            let place = self.truth.place_of_row(*id);
            assert!(self.truth.is_garbage(&self.truth.rows[place]), "{id:?} is deleted although it can still be read");
            if self.rows.remove(id).is_some() {
                self.archive.check_deleted(place, &self.truth);
            }
        }
        true
    }

    pub fn leases(&mut self, ids: &[LeaseId], touch: Touch) -> Vec<LoggedLease> {
        let now = Instant::now();
        let mut logged = Vec::new();
        for id in ids {
            let Some(lease) = self.leases.get_mut(id) else { continue };
            if touch == Touch::Renew && lease.deadline > now {
                lease.deadline = now + Duration::from_secs(lease.ttl_secs.cast_unsigned());
            }
            logged.push(LoggedLease {
                id: *id,
                ttl_secs: lease.ttl_secs,
                left_secs: Some(seconds_left(lease.deadline, now)),
            });
        }
        logged
    }

    /// Records a heartbeat and returns the live instances, the oldest first.
    pub fn beat(&mut self, member: &Member, run: u64) -> Vec<Member> {
        let now = Instant::now();
        let silence = self.last_beat.map_or(Duration::ZERO, |last| now - last);
        if silence > SILENCE_MAX {
            self.leases.values_mut().for_each(|lease| lease.deadline += silence);
        }
        self.last_beat = Some(now);
        let started = self.members.get(&member.id).filter(|row| row.run == run).map_or(now, |row| row.started);
        self.members.insert(member.id, MemberRow { member: member.clone(), run, started, beat: now });
        let mut live: Vec<&MemberRow> =
            self.members.values().filter(|row| now - row.beat < HEARTBEAT_TIMEOUT).collect();
        live.sort_by_key(|row| (row.started, row.member.id));
        live.into_iter().map(|row| row.member.clone()).collect()
    }

    pub fn leave(&mut self, member: u64, run: u64) {
        self.members.retain(|id, row| *id != member || row.run != run);
    }
}

fn changed_lease(change: &LeaseChange) -> LeaseId {
    match change {
        LeaseChange::Grant { id, .. } | LeaseChange::Revoke { id } | LeaseChange::Expire { id } => *id,
    }
}

fn seconds_left(deadline: Instant, now: Instant) -> f64 {
    if deadline >= now { (deadline - now).as_secs_f64() } else { -(now - deadline).as_secs_f64() }
}
