//! Everything that the log has ever contained, including compacted rows; the reference for all checks. Every append is
//! checked when it is applied.

use std::collections::BTreeMap;

use tokio::time::{Duration, Instant};

use super::auth::AuthTruth;
use crate::model::{Model, Pair, Row};
use orlop_core::{
    auth::AuthState,
    index::{Lease, TreeIndex},
    log::{LeaseChange, PastRow},
    types::{Change, ChangeKind, EncodedEvent, EncodedKv, Key, KeyRange, LeaseId, Revision, RowId, Version},
};

/// Clients use lease ids from 1 to this number.
pub(super) const LEASES: i64 = 4;

/// The processes that append.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sharing {
    /// One process, as with SQLite.
    Own,
    /// Any number of instances, as with Postgres.
    Shared,
}

pub(super) struct Truth {
    sharing: Sharing,
    pub rows: Vec<Row>,
    /// For each key, the indexes of its rows in `rows`.
    keys: BTreeMap<Key, Vec<usize>>,
    pub head: Revision,
    pub compact_revision: Option<Revision>,
    pub auth: AuthTruth,
    /// Revisions that include the end of a lease.
    pub lease_ends: Vec<Revision>,
    /// For each lease id, the leases that had it, in order.
    lives: BTreeMap<LeaseId, Vec<Life>>,
}

/// A lease from its grant to its end.
#[derive(Debug)]
struct Life {
    granted: Instant,
    ttl_secs: i64,
    /// The lease must not expire before this time, which a response promised to its holder.
    promised: Instant,
    ended: Option<(Instant, End)>,
    /// When a client first received the acknowledgement of its grant, and of its revocation.
    shown: [Option<Instant>; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Revoked,
    Expired,
}

impl Truth {
    pub fn new(sharing: Sharing, auth: AuthState) -> Self {
        Self {
            sharing,
            rows: Vec::new(),
            keys: BTreeMap::new(),
            head: Revision::EMPTY,
            compact_revision: None,
            auth: AuthTruth::new(auth),
            lease_ends: Vec::new(),
            lives: BTreeMap::new(),
        }
    }

    /// Applies one append.
    pub fn land(&mut self, changes: &[Change], leases: &[LeaseChange], compact: Option<Revision>) {
        let before = self.head;
        for change in changes {
            self.land_change(change);
        }
        let now = Instant::now();
        for change in leases {
            self.land_lease(*change, now);
        }
        if leases.iter().any(|change| !matches!(change, LeaseChange::Grant { .. })) {
            self.lease_ends.extend((before.0 + 1..=self.head.0).map(Revision));
        }
        for pair in self.live_at(self.head) {
            let holds = |id: LeaseId| {
                self.lives.get(&id).and_then(|lives| lives.last()).is_some_and(|life| life.ended.is_none())
            };
            assert!(
                pair.lease.is_none_or(holds),
                "{:?} is attached to the lease {:?}, which does not exist",
                pair.key,
                pair.lease
            );
        }
        if let Some(compact) = compact {
            assert!(compact <= self.head, "compaction at {compact} beyond the head {}", self.head);
            self.compact_revision = self.compact_revision.max(Some(compact));
        }
    }

    fn land_change(&mut self, change: &Change) {
        let row = change.row;
        if row.sub == 0 {
            assert_eq!(row.revision, self.head.next(), "revisions are dense");
            self.head = row.revision;
        } else {
            let last = self.rows.last().map(|row| row.id);
            assert_eq!(last, Some(RowId::new(row.revision, row.sub - 1)), "the changes of a revision are dense");
        }
        let newest = self.at(&change.key, self.head).cloned();
        let before = self.at(&change.key, self.head.prev()).cloned();
        let prev = before.as_ref().map(|pair| pair.version.row);
        assert_eq!(change.prev.as_ref().map(|prev| prev.row), prev, "{change:?} replaces the previous version");
        assert_eq!(
            change.prev_lease,
            newest.as_ref().and_then(|pair| pair.lease),
            "{change:?} is detached from the previous lease"
        );
        let pair = match &change.kind {
            ChangeKind::Delete => {
                assert!(newest.is_some(), "{change:?} deletes nothing");
                None
            }
            ChangeKind::Put { kv, create_revision, version, lease } => {
                let expected =
                    newest.map_or((row.revision, 1), |pair| (pair.version.create_revision, pair.version.version + 1));
                assert_eq!((*create_revision, *version), expected, "{change:?} follows the previous version");
                let version = Version { row, create_revision: *create_revision, version: *version };
                let pair = Pair { key: change.key.clone(), version, value: kv.value(), lease: *lease };
                assert_eq!(pair.encoded(), *kv, "the columns and the pair of {change:?} agree");
                Some(pair)
            }
        };
        self.keys.entry(change.key.clone()).or_default().push(self.rows.len());
        let prev_lease = change.prev_lease;
        self.rows.push(Row { id: row, key: change.key.clone(), pair, prev: before, prev_lease });
    }

    fn land_lease(&mut self, change: LeaseChange, now: Instant) {
        let (id, end) = match change {
            LeaseChange::Grant { id, ttl_secs } => {
                let lives = self.lives.entry(id).or_default();
                assert!(lives.last().is_none_or(|life| life.ended.is_some()), "the lease {id:?} is granted twice");
                let promised = now + seconds(ttl_secs);
                return lives.push(Life { granted: now, ttl_secs, promised, ended: None, shown: [None; 2] });
            }
            LeaseChange::Revoke { id } => (id, End::Revoked),
            LeaseChange::Expire { id } => (id, End::Expired),
        };
        let life = self.lives.get_mut(&id).and_then(|lives| lives.last_mut()).filter(|life| life.ended.is_none());
        let life = life.unwrap_or_else(|| panic!("the lease {id:?} ends but does not exist"));
        assert!(
            end == End::Revoked || now >= life.promised,
            "the lease {id:?} ends {:?} too early",
            life.promised - now
        );
        life.ended = Some((now, end));
    }

    // Keys.

    fn at(&self, key: &Key, at: Revision) -> Option<&Pair> {
        let places = self.keys.get(key)?;
        let until = places.partition_point(|place| self.rows[*place].id.revision <= at);
        self.rows[places[until.checked_sub(1)?]].pair.as_ref()
    }

    /// Returns the live pairs at a revision, in the order of their keys.
    pub fn live_at(&self, at: Revision) -> Vec<Pair> {
        self.keys.keys().filter_map(|key| self.at(key, at).cloned()).collect()
    }

    /// Returns the store at a revision. Every lease exists in it, because lease lifetimes are checked elsewhere.
    pub fn model_at(&self, at: Revision) -> Model {
        Model::of(self.live_at(at), at, (1..=LEASES).map(LeaseId))
    }

    /// Returns the store at a revision, including all earlier revisions.
    pub fn whole_model_at(&self, at: Revision) -> Model {
        let mut model = self.model_at(at);
        model.rows = self.rows[..self.place_of(at.next())].to_vec();
        model
    }

    /// Returns the index of the first row at or above this revision.
    pub fn place_of(&self, revision: Revision) -> usize {
        self.rows.partition_point(|row| row.id.revision < revision)
    }

    /// Returns whether these are all the rows of their revision.
    pub fn has_exactly(&self, rows: &[Row]) -> bool {
        let Some(revision) = rows.first().map(|row| row.id.revision) else { return false };
        let own = &self.rows[self.place_of(revision)..self.place_of(revision.next())];
        let same = |(own, row): (&Row, &Row)| own.id == row.id && own.key == row.key && own.pair == row.pair;
        own.len() == rows.len() && own.iter().zip(rows).all(same)
    }

    /// Returns whether the key was absent at any revision from `from` on.
    pub fn was_absent_since(&self, key: &Key, from: Revision) -> bool {
        (from.0..=self.head.0).any(|at| self.at(key, Revision(at)).is_none())
    }

    /// Returns whether the row may be deleted: no read at or above the compact revision and no watch from there needs
    /// it.
    pub fn is_garbage(&self, row: &Row) -> bool {
        self.compact_revision.is_some_and(|compacted| self.is_garbage_at(row, compacted))
    }

    /// Returns whether a compaction at this revision, or an earlier one, removes the row.
    pub fn is_garbage_at(&self, row: &Row, compacted: Revision) -> bool {
        if row.id.revision >= compacted {
            return false;
        }
        let newer = |place: &usize| self.rows[*place].id > row.id && self.rows[*place].id.revision <= compacted;
        row.pair.is_none() || self.keys[&row.key].iter().any(newer)
    }

    /// Returns the index of a row in `rows`.
    pub fn place_of_row(&self, row: RowId) -> usize {
        self.rows.binary_search_by_key(&row, |row| row.id).expect("a row that was appended")
    }

    /// Returns the first revision, at or after that of a row, whose state does not contain the row.
    pub fn end_of(&self, place: usize) -> Revision {
        let row = &self.rows[place];
        let places = &self.keys[&row.key];
        let next = places.get(places.partition_point(|other| *other <= place));
        match (&row.pair, next) {
            (None, _) => row.id.revision,
            (Some(_), Some(next)) => self.rows[*next].id.revision,
            (Some(_), None) => Revision::MAX,
        }
    }

    /// Returns the changes of a range between two revisions, both included.
    pub fn changes(&self, range: &KeyRange, from: Revision, to: Revision) -> Vec<PastRow> {
        let rows = &self.rows[self.place_of(from)..self.place_of(to.next())];
        let rows = rows.iter().filter(|row| range.contains(&row.key));
        let kv = |row: &Row| row.pair.as_ref().map(Pair::encoded);
        rows.map(|row| PastRow { row: row.id, key: row.key.clone(), kv: kv(row) }).collect()
    }

    /// Checks that an index agrees with the truth at a revision.
    pub fn check_index(&self, index: &TreeIndex, at: Revision) {
        let all = KeyRange::all();
        let found = index.range(all.bounds(), at).map(|(key, entry)| (key.clone(), entry));
        let found: Vec<_> = found.collect();
        let live = self.live_at(at);
        let same = |((key, entry), pair): (&(Key, orlop_core::index::Entry), &Pair)| {
            *key == pair.key
                && entry.version == pair.version
                && [Lease::InRow, Lease::Known(pair.lease)].contains(&entry.lease)
        };
        assert!(
            found.len() == live.len() && found.iter().zip(&live).all(same),
            "the index at {at} has {found:?}, the log {live:?}"
        );
    }

    // Events.

    /// Returns the event of a row, as a watch may receive it.
    pub fn event(row: &Row, prev: Option<EncodedKv>) -> EncodedEvent {
        match &row.pair {
            Some(pair) if pair.version.version == 1 => EncodedEvent::put(&pair.encoded(), None),
            Some(pair) => EncodedEvent::put(&pair.encoded(), prev.as_ref()),
            None => EncodedEvent::delete(&row.key, row.id.revision, prev.as_ref()),
        }
    }

    // Leases.

    /// Returns the time from which every client must see the lease. If several instances share the log, this is its
    /// grant, otherwise the acknowledgement of its grant.
    fn there_from(&self, life: &Life) -> Option<Instant> {
        if self.sharing == Sharing::Shared { Some(life.granted) } else { life.shown[0] }
    }

    /// Returns the time from which no client may see the lease.
    fn gone_from(&self, life: &Life) -> Option<Instant> {
        if self.sharing == Sharing::Shared { life.ended.map(|(ended, _)| ended) } else { life.shown[1] }
    }

    /// Returns whether a client may have seen the lease at some time from `from` on.
    pub fn lease_was_there_since(&self, id: LeaseId, from: Instant) -> bool {
        self.lives(id).any(|life| self.gone_from(life).is_none_or(|gone| gone >= from))
    }

    /// Returns whether a client may have found the lease missing or expired at some time from `from` on.
    pub fn lease_was_gone_since(&self, id: LeaseId, from: Instant) -> bool {
        !self.lives(id).any(|life| {
            let was_there = self.there_from(life).is_some_and(|there| there < from);
            was_there && life.ended.is_none() && life.promised > Instant::now()
        })
    }

    /// Records that a grant was acknowledged. Its request was sent at `from`.
    pub fn lease_granted(&mut self, id: LeaseId, from: Instant) {
        let life = self.lives.entry(id).or_default().iter_mut().find(|life| life.granted >= from);
        let life = life.unwrap_or_else(|| panic!("the lease {id:?} was not granted"));
        life.shown[0].get_or_insert_with(Instant::now);
    }

    /// Records that a revocation was acknowledged. Its request was sent at `from`.
    pub fn lease_revoked(&mut self, id: LeaseId, from: Instant) {
        let is_it = |life: &&mut Life| life.ended.is_some_and(|(ended, _)| ended >= from);
        let life = self.lives.entry(id).or_default().iter_mut().find(is_it);
        let life = life.unwrap_or_else(|| panic!("the lease {id:?} was not revoked"));
        life.shown[1].get_or_insert_with(Instant::now);
    }

    /// Records a response that promised the holder the whole TTL, counted from `from` at the earliest.
    pub fn lease_renewed(&mut self, id: LeaseId, ttl_secs: i64, from: Instant) {
        let is_own = self.sharing == Sharing::Own;
        let was_there = |life: &&mut Life| {
            let gone = if is_own { life.shown[1] } else { life.ended.map(|(ended, _)| ended) };
            life.ttl_secs == ttl_secs && gone.is_none_or(|gone| gone >= from)
        };
        let life = self.lives.entry(id).or_default().iter_mut().rev().find(was_there);
        let life = life.unwrap_or_else(|| panic!("the lease {id:?} has {ttl_secs} seconds left, but did not exist"));
        let promised = from.max(life.granted) + seconds(ttl_secs);
        let is_broken = life.ended.is_some_and(|(ended, end)| end == End::Expired && ended < promised);
        assert!(!is_broken, "the lease {id:?} was renewed but expired");
        life.promised = life.promised.max(promised);
    }

    /// Returns the leases that every client must have seen at all times from `from` on.
    pub fn leases_held_since(&self, from: Instant) -> impl Iterator<Item = LeaseId> {
        self.lives.keys().copied().filter(move |id| !self.lease_was_gone_since(*id, from))
    }

    pub fn has_leases(&self) -> bool {
        self.lives.values().flatten().any(|life| life.ended.is_none())
    }

    fn lives(&self, id: LeaseId) -> impl Iterator<Item = &Life> {
        self.lives.get(&id).into_iter().flatten()
    }
}

fn seconds(secs: i64) -> Duration {
    Duration::from_secs(secs.cast_unsigned())
}
