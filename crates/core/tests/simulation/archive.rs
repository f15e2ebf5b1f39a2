//! The simulated archive: naive tables in the database, read and written by calls that fail as those of the log do. Each
//! copy and each deletion from the log is checked against the truth.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
};

use async_trait::async_trait;

use super::{
    database::Database,
    log::SimulatedLog,
    random, scheduler,
    truth::{Sharing, Truth},
};
use orlop_core::{
    log::{
        ARCHIVED_ROW_BYTES, Archive, ArchiveState, ArchivedChanges, ArchivedMoment, ClockStep, Error, FrozenArchive,
        Log, Moment, Order, PastRow, ReadLog, Reclaimed, Result,
    },
    types::{EncodedKv, Key, KeyRange, Revision, RowId, Superseded},
};

/// Rows that one call deletes.
const PRUNE_ROWS: usize = 3;
/// Rows that one transaction copies in an archive that is separate from the log.
const COPY_ROWS: usize = 2;
/// Milliseconds since 1970 when a run starts.
const START_MS: i64 = 1_000_000;

/// What the archive contains.
#[derive(Default)]
pub(super) struct Tables {
    /// Whether an archive was ever opened to keep rows.
    pub exists: bool,
    /// `first` and `copied`; `None` before the archive was begun.
    facts: Option<(Revision, Revision)>,
    rows: BTreeMap<RowId, Archived>,
    moments: Vec<Moment>,
    /// Revisions of moments before which times are not known.
    gaps: HashSet<Revision>,
}

struct Archived {
    past: PastRow,
    bytes: u64,
    end: Revision,
}

impl Archived {
    /// Returns the first revision that does not need this row.
    fn needed_until(&self) -> Revision {
        self.end.max(self.past.row.revision.next())
    }
}

impl Tables {
    /// Returns the first complete revision; [`Revision::MAX`] before the archive was begun.
    pub fn first(&self) -> Revision {
        self.facts.map_or(Revision::MAX, |(first, _)| first)
    }

    pub fn copied(&self) -> Option<Revision> {
        self.facts.map(|(_, copied)| copied)
    }

    pub fn begin(&mut self, compacted: Option<Revision>, truth: &Truth) {
        let compacted = compacted.max(truth.compact_revision).unwrap_or(Revision::EMPTY);
        self.facts.get_or_insert((compacted, compacted));
    }

    fn state(&self) -> ArchiveState {
        let (first, copied) = self.facts.unwrap_or((Revision::MAX, Revision(0)));
        let bytes = self.rows.values().map(|row| row.bytes).sum();
        ArchiveState { first, copied, bytes, rows: self.rows.len() as u64 }
    }

    /// Copies a row of the log.
    fn copy(&mut self, past: PastRow, end: Revision, truth: &Truth) {
        if self.facts.is_none() {
            return;
        }
        let place = truth.place_of_row(past.row);
        let row = &truth.rows[place];
        assert!(truth.is_garbage(row), "{:?} is archived although it can still be read", past.row);
        assert_eq!(end, truth.end_of(place), "the end of {:?}", past.row);
        let pair = row.pair.as_ref().map(|pair| pair.encoded());
        assert_eq!((&past.key, &past.kv), (&row.key, &pair), "the copy of {:?}", past.row);
        let value_len = row.pair.as_ref().map_or(0, |pair| pair.value.len());
        let bytes = (row.key.len() + value_len + ARCHIVED_ROW_BYTES) as u64;
        self.rows.entry(past.row).or_insert(Archived { past, bytes, end });
    }

    fn finish_copy(&mut self, compacted: Revision, truth: &Truth) {
        let Some((_, copied)) = &mut self.facts else { return };
        *copied = compacted.max(*copied);
        self.check(truth);
    }

    fn give_up(&mut self, first: Revision) {
        self.facts = self.facts.map(|(known, copied)| (known.max(first), copied));
    }

    fn prune(&mut self, first: Revision, bytes_max: u64) -> Reclaimed {
        let Some((known, _)) = &mut self.facts else { return Reclaimed::All };
        *known = first.max(*known);
        let first = *known;
        let old = |(row, archived): (&RowId, &Archived)| (archived.needed_until() <= first).then_some(*row);
        let old: Vec<RowId> = self.rows.iter().filter_map(old).take(PRUNE_ROWS).collect();
        old.iter().for_each(|row| drop(self.rows.remove(row)));
        if old.len() == PRUNE_ROWS {
            return Reclaimed::More;
        }
        let known = self.moments.partition_point(|moment| moment.revision <= first);
        self.moments.drain(..known.saturating_sub(1));
        let mut excess = self.state().bytes.saturating_sub(bytes_max);
        if excess == 0 {
            return Reclaimed::All;
        }
        let mut oldest: Vec<&Archived> = self.rows.values().collect();
        oldest.sort_by_key(|archived| (archived.end, archived.past.row));
        let mut reached = first;
        for archived in oldest {
            reached = reached.max(archived.needed_until());
            excess = excess.saturating_sub(archived.bytes);
            if excess == 0 {
                break;
            }
        }
        self.facts = self.facts.map(|(_, copied)| (reached, copied));
        Reclaimed::More
    }

    fn note_time(&mut self, head: Revision, has_gap: bool) {
        if self.moments.last().is_none_or(|last| last.revision < head) {
            if has_gap {
                self.gaps.insert(head);
            }
            self.moments.push(Moment { revision: head, unix_ms: now_ms() });
        }
    }

    fn moment_at(&self, unix_ms: i64) -> Option<Moment> {
        self.moments.iter().rfind(|moment| moment.unix_ms <= unix_ms).copied()
    }

    fn record_of(&self, revision: Revision) -> Option<ArchivedMoment> {
        let is_known = self.moments.first().is_some_and(|first| revision > first.revision);
        let moment = *self.moments.iter().find(|moment| moment.revision >= revision)?;
        is_known.then_some(ArchivedMoment { moment, has_gap: self.gaps.contains(&moment.revision) })
    }

    fn changes(&self, wanted: &ArchivedChanges<'_>) -> (Vec<PastRow>, Option<RowId>) {
        let (from, to) = wanted.rows;
        let mut rows: Vec<&PastRow> = if from > to {
            Vec::new()
        } else {
            self.rows.range(from..=to).map(|(_, archived)| &archived.past).collect()
        };
        if wanted.order == Order::NewestFirst {
            rows.reverse();
        }
        let visited = visit(&mut rows).map(|past| past.row);
        rows.retain(|past| wanted.range.contains(&past.key));
        (rows.into_iter().cloned().collect(), visited)
    }

    fn pairs_at(&self, range: &KeyRange, after: Option<&Key>, at: Revision) -> (Vec<(Key, EncodedKv)>, Option<Key>) {
        let keys: BTreeSet<&Key> = self.rows.values().map(|archived| &archived.past.key).collect();
        let mut keys: Vec<&Key> =
            keys.into_iter().filter(|key| range.contains(key) && after.is_none_or(|after| *key > after)).collect();
        let visited = visit(&mut keys).cloned();
        let is_live = |archived: &&Archived| archived.past.row.revision <= at && at < archived.end;
        let of_key = |key: &Key| self.rows.values().filter(is_live).find(|archived| archived.past.key == *key);
        let pairs = keys.into_iter().filter_map(|key| Some((key.clone(), of_key(key)?.past.kv.clone()?)));
        (pairs.collect(), visited)
    }

    // Checks.

    /// Checks that a row may be deleted from the log: it was copied, or no readable state needs it.
    pub fn check_deleted(&self, place: usize, truth: &Truth) {
        let is_kept = self.facts.is_none() || !self.is_needed(place, truth);
        let row = truth.rows[place].id;
        assert!(is_kept || self.rows.contains_key(&row), "{row:?} is deleted before it was copied");
    }

    /// Checks that the archive has every row that the compactions up to `copied` removed.
    pub fn check(&self, truth: &Truth) {
        let Some((_, copied)) = self.facts else { return };
        assert!(Some(copied) <= truth.compact_revision.max(Some(Revision::EMPTY)), "copied={copied}");
        for (place, row) in truth.rows.iter().enumerate() {
            if truth.is_garbage_at(row, copied) && self.is_needed(place, truth) {
                assert!(self.rows.contains_key(&row.id), "{:?} is not in the archive, copied={copied}", row.id);
            }
        }
    }

    fn is_needed(&self, place: usize, truth: &Truth) -> bool {
        truth.end_of(place).max(truth.rows[place].id.revision.next()) > self.first()
    }
}

/// Reduces what is visited to a random number. Returns the last if there is more.
fn visit<T: Copy>(visited: &mut Vec<T>) -> Option<T> {
    let max = random::below(24) + 1;
    let is_cut = visited.len() > max;
    visited.truncate(max);
    visited.last().copied().filter(|_| is_cut)
}

fn now_ms() -> i64 {
    START_MS + i64::try_from(scheduler::elapsed().as_millis()).expect("a run is short")
}

/// The archive as an instance sees it.
pub(super) struct SimulatedArchive(pub Arc<SimulatedLog>);

impl SimulatedArchive {
    async fn change<T: Send + 'static>(&self, change: impl FnOnce(&mut Database) -> T + Send + 'static) -> Result<T> {
        let traced = move |database: &mut Database| {
            let before = database.archive.first();
            let done = change(database);
            assert!(before == Revision::MAX || database.archive.first() >= before, "the first revision decreases");
            done
        };
        self.0.write(traced).await
    }
}

#[async_trait]
impl Archive for SimulatedArchive {
    async fn begin(&self, compacted: Option<Revision>) -> Result<()> {
        self.change(move |database| database.archive.begin(compacted, &database.truth)).await
    }

    fn shares_database(&self) -> bool {
        self.0.sharing() == Sharing::Shared
    }

    async fn state(&self) -> Result<ArchiveState> {
        self.0.ask(|database| database.archive.state()).await
    }

    async fn freeze(&self, _: &dyn Log) -> Result<(Arc<dyn ReadLog>, Arc<dyn FrozenArchive>)> {
        Err(Error::Unavailable("snapshots are not simulated".to_owned()))
    }

    async fn copy(&self, rows: &[Superseded]) -> Result<()> {
        let chunk = if self.0.sharing() == Sharing::Own { COPY_ROWS } else { rows.len().max(1) };
        for rows in rows.chunks(chunk) {
            if self.0.is_full() {
                return Err(Error::Full("the disk is full".to_owned()));
            }
            let rows = rows.to_vec();
            self.change(move |database| {
                for Superseded { row, end } in rows {
                    if let Some(past) = database.past_row(row) {
                        database.archive.copy(past, end, &database.truth);
                    }
                }
            })
            .await?;
        }
        Ok(())
    }

    async fn finish_copy(&self, compacted: Revision, server: i64) -> Result<()> {
        let finish = move |database: &mut Database| {
            let is_same = database.server == server;
            if is_same {
                database.archive.finish_copy(compacted, &database.truth);
            }
            is_same
        };
        if self.change(finish).await? { Ok(()) } else { Err(Error::Unavailable("another server".to_owned())) }
    }

    async fn give_up(&self, first: Revision) -> Result<()> {
        self.change(move |database| database.archive.give_up(first)).await
    }

    async fn prune(&self, first: Revision, bytes_max: u64) -> Result<Reclaimed> {
        self.change(move |database| database.archive.prune(first, bytes_max)).await
    }

    async fn note_time(&self, head: Revision, has_gap: bool) -> Result<()> {
        self.change(move |database| {
            let head = if database.sharing == Sharing::Own { head } else { database.position().head };
            database.archive.note_time(head, has_gap);
        })
        .await
    }

    async fn now_ms(&self) -> Result<i64> {
        self.0.ask(|_| now_ms()).await
    }

    async fn first_moment(&self) -> Result<Option<Moment>> {
        self.0.ask(|database| database.archive.moments.first().copied()).await
    }

    async fn moment_at(&self, unix_ms: i64) -> Result<Option<Moment>> {
        self.0.ask(|database| database.archive.moment_at(unix_ms)).await
    }

    async fn records(&self, revisions: &[Revision]) -> Result<Vec<Option<ArchivedMoment>>> {
        self.0.ask(|database| revisions.iter().map(|revision| database.archive.record_of(*revision)).collect()).await
    }

    /// The clock of a run is never set.
    async fn clock_steps(&self) -> Result<Vec<ClockStep>> {
        Ok(Vec::new())
    }

    async fn changes(&self, wanted: ArchivedChanges<'_>) -> Result<(Vec<PastRow>, Option<RowId>)> {
        self.0.ask(|database| database.archive.changes(&wanted)).await
    }

    async fn pairs_at(
        &self,
        range: &KeyRange,
        after: Option<&Key>,
        at: Revision,
    ) -> Result<(Vec<(Key, EncodedKv)>, Option<Key>)> {
        self.0.ask(|database| database.archive.pairs_at(range, after, at)).await
    }
}
