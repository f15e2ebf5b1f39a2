//! Reads past states and changes, from the log and the archive.
//!
//! A row leaves the index first, then it is copied to the archive, then it is deleted from the log. So a read looks at
//! the index and the log before the archive. A read that looks at the index must find that the rows of every compaction
//! that the index knows were copied ([`Shared::check_copied`]), before it looks at the archive. Rows can leave the archive
//! at any time. So each read checks afterwards that the archive still has what it needs ([`Shared::check_kept`]). A row
//! that was found in both counts once.

use std::collections::{BTreeMap, HashMap};

use tokio::time::{Duration, Instant, sleep};

use super::{
    HistoryKeeper, Keep,
    moments::{times, times_until_now},
    rows_within,
};
use crate::{
    auth::Caller,
    clock,
    index::{Entry, IndexedRow, ReadAt, Unreadable},
    log::{ArchiveState, ArchivedChanges, Moment, Order, PastRow, WithPrev, Written},
    store::{
        error::Error, handle::Store, reader::pairs::StepCount, request::Projection, select::Selected, shared::Shared,
    },
    types::{Change, ChangeKind, EncodedKv, Key, KeyRange, Revision, RowId},
};

/// Keys visited for one page of a state.
const PAGE_KEYS: usize = 200;
/// Maximum number of changes of a single key in one page.
const PAGE_CHANGES: usize = 200;
/// Bytes of keys and values in the log after which a page ends. Those of the archive are bounded by
/// [`crate::log::ARCHIVE_PAGE_BYTES`].
const PAGE_BYTES: u64 = 4 << 20;
/// Maximum time for a compaction to copy its rows.
const COPY_TIME_MAX: Duration = Duration::from_secs(10);
pub(super) const COPY_POLL_PAUSE: Duration = Duration::from_millis(50);

/// Why a past state cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PastError {
    #[error(transparent)]
    Store(#[from] Error),
    #[error("the history begins at revision {first}: older rows were compacted")]
    Begins { first: Revision },
    #[error("the rows of the compaction at revision {compacted} are being copied to the history; try again")]
    Copying { compacted: Revision },
}

impl From<crate::log::Error> for PastError {
    fn from(error: crate::log::Error) -> Self {
        Self::Store(error.into())
    }
}

pub(super) type PastResult<T> = std::result::Result<T, PastError>;

/// What the history contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistoryState {
    pub head: Revision,
    pub compact_revision: Option<Revision>,
    /// The first revision that can be read.
    pub first: Revision,
    /// Rows in the archive, and their bytes (see [`crate::log::ArchiveState::bytes`]).
    pub rows: u64,
    pub bytes: u64,
    /// Times of revisions after this one are known.
    pub first_moment: Option<Moment>,
    /// `None`: compacted rows are not kept.
    pub retention: Option<Duration>,
    /// The time of the clock by which times are recorded, in milliseconds since 1970.
    pub now_ms: i64,
}

/// A part of a past state, in the order of keys.
#[derive(Debug, Clone, PartialEq)]
pub struct PastPairs {
    pub pairs: Vec<EncodedKv>,
    /// The key after which the next part begins; `None`: this is the last part.
    pub after: Option<Key>,
}

/// A change and when it was written.
#[derive(Debug, Clone, PartialEq)]
pub struct PastChange {
    pub row: PastRow,
    /// `None`: not known.
    pub written: Option<Written>,
}

/// A part of the changes of a range.
#[derive(Debug, Clone, PartialEq)]
pub struct PastChanges {
    pub changes: Vec<PastChange>,
    /// The row with which the next part begins; `None`: this is the last part.
    pub next: Option<RowId>,
}

impl Store {
    /// Returns what the history contains.
    pub async fn history(&self) -> PastResult<HistoryState> {
        self.confirm().await?;
        let (head, compact_revision) = self.shared.revisions();
        let log_begins = compact_revision.unwrap_or(Revision::EMPTY);
        let mut state = HistoryState {
            head,
            compact_revision,
            first: log_begins,
            rows: 0,
            bytes: 0,
            first_moment: None,
            retention: None,
            now_ms: clock::unix_ms(clock::now()),
        };
        if let Some(HistoryKeeper { archive, keep, .. }) = &self.shared.history {
            let archived = archive.state().await?;
            state.first = archived.first.min(log_begins);
            (state.rows, state.bytes) = (archived.rows, archived.bytes);
            state.first_moment = archive.first_moment().await?;
            state.now_ms = archive.now_ms().await?;
            if let Keep::Rows { retention, .. } = keep {
                state.retention = Some(*retention);
            }
        }
        Ok(state)
    }

    /// Returns a part of the state of a range at a revision, after the key `after`. Unlike a range of etcd's API it also
    /// reads compacted revisions, as far as they were kept.
    pub async fn past_pairs(
        &self,
        caller: &Caller,
        range: &KeyRange,
        after: Option<&Key>,
        at: Revision,
    ) -> PastResult<PastPairs> {
        self.confirm().await?;
        self.shared.check_read(caller, range)?;
        when_copied(|| self.shared.past_pairs(range, after, at)).await
    }

    /// Returns a part of the changes of a range, between two rows, both included: at most `limit` changes, which must not be
    /// 0. Only changes of a single key can be read newest first.
    pub async fn past_changes(
        &self,
        caller: &Caller,
        range: &KeyRange,
        rows: (RowId, RowId),
        order: Order,
        limit: usize,
    ) -> PastResult<PastChanges> {
        self.confirm().await?;
        self.shared.check_read(caller, range)?;
        when_copied(|| self.shared.past_changes(range, rows, order, limit)).await
    }
}

/// Repeats a read while rows that it needs are on their way to the archive.
async fn when_copied<T, F>(read: impl Fn() -> F) -> PastResult<T>
where
    F: Future<Output = PastResult<T>>,
{
    let deadline = Instant::now() + COPY_TIME_MAX;
    loop {
        match read().await {
            Err(PastError::Copying { .. } | PastError::Store(Error::Compacted)) if Instant::now() < deadline => {
                sleep(COPY_POLL_PAUSE).await;
            }
            read => return read,
        }
    }
}

/// Rows found so far. A row may be found in the log and in the archive.
type Found = BTreeMap<RowId, PastRow>;

impl Shared {
    fn revisions(&self) -> (Revision, Option<Revision>) {
        let index = self.index.read();
        (index.head(), index.compact_revision())
    }

    async fn past_pairs(&self, range: &KeyRange, after: Option<&Key>, at: Revision) -> PastResult<PastPairs> {
        let Visited { mut entries, mut last, compacted } = self.visit(range, after, at)?;
        let rows: Vec<(RowId, usize)> = entries.iter().map(|(key, entry)| (entry.version.row, key.len())).collect();
        let rows_max = self.rows_of_page(&rows).await?;
        if rows_max < entries.len() {
            entries.truncate(rows_max);
            last = entries.last().map(|(key, _)| key.clone());
        }
        let mut page = BTreeMap::new();
        // Only states below the compact revision need rows that it removed.
        let archived = match compacted.filter(|compacted| at < *compacted) {
            Some(compacted) => {
                let HistoryKeeper { archive, .. } = self.check_copied(at, compacted).await?;
                let (pairs, visited) = archive.pairs_at(range, after, at).await?;
                self.check_kept(at, compacted).await?;
                last = match (last, visited) {
                    (Some(last), Some(visited)) => Some(last.min(visited)),
                    (last, visited) => last.or(visited),
                };
                pairs
            }
            None => Vec::new(),
        };
        let is_within = |key: &Key| last.as_ref().is_none_or(|last| key <= last);
        page.extend(archived.into_iter().filter(|(key, _)| is_within(key)));
        let entries: Vec<(Key, Entry)> = entries.into_iter().filter(|(key, _)| is_within(key)).collect();
        let selected: Vec<Selected> = entries.iter().map(|(_, entry)| Selected { entry: *entry, key: None }).collect();
        let pairs = self.pairs(&selected, Projection::Full, at, &mut StepCount::default(), None).await?;
        page.extend(entries.into_iter().map(|(key, _)| key).zip(pairs));
        Ok(PastPairs { pairs: page.into_values().collect(), after: last })
    }

    /// Visits the keys of a range in the index that were live at a revision, even one below the compact revision.
    fn visit(&self, range: &KeyRange, after: Option<&Key>, at: Revision) -> PastResult<Visited> {
        let index = self.index.read();
        if index.resolve(ReadAt::Revision(at)) == Err(Unreadable::Future) {
            return Err(Error::FutureRevision.into());
        }
        let mut visited = Visited { entries: Vec::new(), last: None, compacted: index.compact_revision() };
        if let KeyRange::Single(key) = range {
            visited.entries.extend(index.get(key, at).map(|entry| (key.clone(), entry)));
        } else if !range.is_empty() {
            let bounds = after.map_or_else(|| range.bounds(), |after| range.bounds_after(after));
            visited.last = index.walk(bounds, at, PAGE_KEYS, |key, entry| visited.entries.push((key.clone(), entry)));
        }
        Ok(visited)
    }

    /// Returns how many of these rows, from the first on and at least one, are a page of about [`PAGE_BYTES`]. Each row has
    /// the length of its key.
    async fn rows_of_page(&self, rows: &[(RowId, usize)]) -> PastResult<usize> {
        let ids: Vec<RowId> = rows.iter().map(|(row, _)| *row).collect();
        let mut lengths = self.value_lengths(ids.iter().copied()).await?;
        for (row, key_len) in rows {
            *lengths.entry(*row).or_default() += *key_len as u64;
        }
        Ok(rows_within(PAGE_BYTES, &ids, &lengths))
    }

    /// Returns the history if its archive has the rows that compactions up to `compacted` removed, from `from` on.
    async fn check_copied(&self, from: Revision, compacted: Revision) -> PastResult<&HistoryKeeper> {
        let (history, state) = self.check_kept(from, compacted).await?;
        if state.copied < compacted {
            return Err(PastError::Copying { compacted });
        }
        Ok(history)
    }

    /// Returns the history if its archive has not deleted anything that a read from `from` on needs.
    async fn check_kept(&self, from: Revision, compacted: Revision) -> PastResult<(&HistoryKeeper, ArchiveState)> {
        let history = self.history.as_ref().ok_or(PastError::Begins { first: compacted })?;
        let state = history.archive.state().await?;
        let first = state.first.min(compacted);
        if from < first { Err(PastError::Begins { first }) } else { Ok((history, state)) }
    }

    async fn past_changes(
        &self,
        range: &KeyRange,
        rows: (RowId, RowId),
        order: Order,
        limit: usize,
    ) -> PastResult<PastChanges> {
        let (mut found, mut page) = match range {
            KeyRange::Single(key) => self.changes_of_key(key, range, rows, order, limit.min(PAGE_CHANGES)).await?,
            KeyRange::Span { .. } => self.changes_of_span(range, rows).await?,
        };
        // Archived rows can be between those of the log.
        page.limit(&mut found, limit);
        let next = page.next();
        let mut rows: Vec<PastRow> = found.into_values().collect();
        if order == Order::NewestFirst {
            rows.reverse();
        }
        let revisions: Vec<Revision> = rows.iter().map(|past| past.row.revision).collect();
        let times = match &self.history {
            Some(HistoryKeeper { archive, keep: Keep::Rows { .. }, .. }) => {
                times_until_now(archive.as_ref(), &revisions).await?
            }
            Some(HistoryKeeper { archive, .. }) => times(archive.as_ref(), &revisions).await?,
            None => vec![None; revisions.len()],
        };
        let changes = rows.into_iter().zip(times).map(|(row, written)| PastChange { row, written }).collect();
        Ok(PastChanges { changes, next })
    }

    /// Returns changes of a single key: at most `indexed_max` that the index knows, and archived ones.
    async fn changes_of_key(
        &self,
        key: &Key,
        range: &KeyRange,
        (from, to): (RowId, RowId),
        order: Order,
        indexed_max: usize,
    ) -> PastResult<(Found, PageEnd)> {
        let (mut indexed, compacted) = {
            let index = self.index.read();
            let rows = index.rows(key, from, to);
            // One more than the page has shows that it is not the last.
            let indexed: Vec<IndexedRow> = match order {
                Order::OldestFirst => rows.take(indexed_max + 1).collect(),
                Order::NewestFirst => rows.rev().take(indexed_max + 1).collect(),
            };
            (indexed, index.compact_revision().unwrap_or(Revision::EMPTY))
        };
        let mut page = PageEnd { order, last: None };
        let total = indexed.len();
        indexed.truncate(indexed_max);
        let rows: Vec<(RowId, usize)> = indexed.iter().map(|it| (it.row, key.len())).collect();
        indexed.truncate(self.rows_of_page(&rows).await?);
        if indexed.len() < total {
            page.end_at(indexed.last().map(|it| it.row));
        }
        let mut found = self.indexed_changes(key, &indexed).await?;
        if from.revision < compacted {
            let HistoryKeeper { archive, .. } = self.check_copied(from.revision, compacted).await?;
            let wanted = ArchivedChanges { range, rows: page.within(from, to), order };
            let (archived, visited) = archive.changes(wanted).await?;
            self.check_kept(from.revision, compacted).await?;
            page.end_at(visited);
            found.extend(archived.into_iter().map(|past| (past.row, past)));
        }
        found.retain(|row, _| page.contains(*row));
        let rows = indexed.iter().map(|it| it.row).filter(|row| page.contains(*row));
        if rows.into_iter().any(|row| !found.contains_key(&row)) {
            // A compaction has removed rows since the index was read.
            return Err(Error::Compacted.into());
        }
        Ok((found, page))
    }

    /// Reads the changes of a key from the log. Omits puts that are no longer there.
    async fn indexed_changes(&self, key: &Key, rows: &[IndexedRow]) -> PastResult<Found> {
        let puts: Vec<RowId> = rows.iter().filter(|it| !it.is_delete).map(|it| it.row).collect();
        let mut pairs: HashMap<RowId, EncodedKv> = self.read_when_free(&puts).await?.into_iter().collect();
        let changes = rows.iter().filter_map(|it| {
            let row = it.row;
            let kv = if it.is_delete { None } else { Some(pairs.remove(&row)?) };
            Some((row, PastRow { row, key: key.clone(), kv }))
        });
        Ok(changes.collect())
    }

    /// Returns changes of a range, oldest first: a page of the log, and the archived rows of the same revisions.
    async fn changes_of_span(&self, range: &KeyRange, (from, to): (RowId, RowId)) -> PastResult<(Found, PageEnd)> {
        let (head, _) = self.revisions();
        let to = to.min(RowId::new(head, u32::MAX));
        let mut page = PageEnd { order: Order::OldestFirst, last: None };
        if from > to {
            return Ok((Found::new(), page));
        }
        let of_log = self.log.changes(from.revision, to.revision, range, WithPrev::No).await?;
        let read_until = RowId::new(of_log.next.prev(), u32::MAX);
        if read_until < to {
            page.end_at(Some(read_until));
        }
        let mut found: Found = of_log.changes.into_iter().map(past_row).map(|past| (past.row, past)).collect();
        // The newest compaction that had deleted rows when the log was read. This instance may not have heard of it.
        let compacted = self.revisions().1.max(of_log.purged).unwrap_or(Revision::EMPTY);
        if from.revision < compacted {
            let (HistoryKeeper { archive, .. }, _) = self.check_kept(from.revision, compacted).await?;
            let wanted = ArchivedChanges { range, rows: (from, read_until.min(to)), order: Order::OldestFirst };
            // Rows that are not copied yet were in the log when it was read.
            let (archived, visited) = archive.changes(wanted).await?;
            self.check_kept(from.revision, compacted).await?;
            page.end_at(visited);
            found.extend(archived.into_iter().map(|past| (past.row, past)));
        }
        found.retain(|row, _| (from..=to).contains(row) && page.contains(*row));
        Ok((found, page))
    }
}

/// The end of a page of changes.
struct PageEnd {
    order: Order,
    /// The last row that the page may contain; `None`: it is the last page.
    last: Option<RowId>,
}

impl PageEnd {
    /// Ends the page at a row, or earlier.
    fn end_at(&mut self, row: Option<RowId>) {
        let Some(row) = row else { return };
        self.last = Some(match (self.last, self.order) {
            (None, _) => row,
            (Some(last), Order::OldestFirst) => last.min(row),
            (Some(last), Order::NewestFirst) => last.max(row),
        });
    }

    /// Returns the part of [from, to] that is in the page.
    fn within(&self, from: RowId, to: RowId) -> (RowId, RowId) {
        match (self.last, self.order) {
            (None, _) => (from, to),
            (Some(last), Order::OldestFirst) => (from, to.min(last)),
            (Some(last), Order::NewestFirst) => (from.max(last), to),
        }
    }

    /// Ends the page at the row with the number `limit`, if it has more rows.
    fn limit(&mut self, found: &mut Found, limit: usize) {
        if found.len() <= limit {
            return;
        }
        let mut rows = found.keys().copied();
        let last = match self.order {
            Order::OldestFirst => rows.nth(limit.saturating_sub(1)),
            Order::NewestFirst => rows.nth_back(limit.saturating_sub(1)),
        };
        self.end_at(last);
        found.retain(|row, _| self.contains(*row));
    }

    fn contains(&self, row: RowId) -> bool {
        self.last.is_none_or(|last| if self.order == Order::OldestFirst { row <= last } else { row >= last })
    }

    /// Returns the row with which the next page begins.
    fn next(&self) -> Option<RowId> {
        let last = self.last?;
        Some(match (self.order, last.sub.checked_sub(1)) {
            (Order::OldestFirst, _) => last.next(),
            (Order::NewestFirst, Some(sub)) => RowId { sub, ..last },
            (Order::NewestFirst, None) => RowId::new(last.revision.prev(), u32::MAX),
        })
    }
}

/// A part of the index.
struct Visited {
    entries: Vec<(Key, Entry)>,
    /// The last visited key, if there are more.
    last: Option<Key>,
    /// The compact revision at that moment.
    compacted: Option<Revision>,
}

fn past_row(change: Change) -> PastRow {
    let kv = match change.kind {
        ChangeKind::Put { kv, .. } => Some(kv),
        ChangeKind::Delete => None,
    };
    PastRow { row: change.row, key: change.key, kv }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::store::fixtures::shared;

    #[tokio::test]
    async fn changes_of_a_key_wait_like_other_lists() {
        let shared = shared(1 << 20);
        let mut lists = Vec::new();
        while let Some(list) = shared.read_memory.list().now_or_never() {
            lists.push(list);
        }
        let key = Key::from(b"k".to_vec());
        let row = |sub: u32| IndexedRow { row: RowId::new(Revision(2), sub), is_delete: false };
        for (count, waits) in [(1, false), (PAGE_CHANGES as u32, true)] {
            let rows: Vec<IndexedRow> = (0..count).map(row).collect();
            let read = shared.indexed_changes(&key, &rows).now_or_never();
            assert_eq!(read.is_none(), waits, "{count} changes");
        }
    }

    #[test]
    fn page_ends_at_the_limit() {
        use Order::{NewestFirst, OldestFirst};
        let row = |revision: i64| RowId::new(Revision(revision), 0);
        // Order, end of the page before (0: none), limit; first and last row, end of the page (0: none).
        for (order, before, limit, expected) in [
            (OldestFirst, 0, 5, (2, 6, 0)),
            (OldestFirst, 0, 2, (2, 3, 3)),
            (OldestFirst, 6, 5, (2, 6, 6)),
            (OldestFirst, 6, 1, (2, 2, 2)),
            (NewestFirst, 0, 5, (2, 6, 0)),
            (NewestFirst, 0, 2, (5, 6, 5)),
            (NewestFirst, 2, 1, (6, 6, 6)),
        ] {
            let past = |row| (row, PastRow { row, key: Key::from(b"k".to_vec()), kv: None });
            let mut found: Found = (2..=6).map(row).map(past).collect();
            let mut page = PageEnd { order, last: (before > 0).then(|| row(before)) };
            page.limit(&mut found, limit);
            let ends = [found.keys().next(), found.keys().next_back(), page.last.as_ref()];
            let ends = ends.map(|row| row.map_or(0, |row| row.revision.0));
            assert_eq!((ends[0], ends[1], ends[2]), expected, "{order:?} {before} {limit}");
        }
    }
}
