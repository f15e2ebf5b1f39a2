//! Reads pages of the log for a watch that is catching up.
//!
//! The changes of a single key are read by the rows that the index has. Those of a range are found by reading the changes
//! of all keys.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::Arc,
    task::{self, Poll},
};

use super::{chunk::CHUNK_BYTES_MAX, hub::Hub, spec::Spec};
use crate::{
    index::IndexedChange,
    log::{Log, Page, Result, WithPrev},
    types::{Change, ChangeKind, EncodedKv, Key, KeyRange, Prev, Revision, RowId, WatchId},
};

/// Maximum number of rows of a key in a page.
const KEY_ROWS_MAX: usize = if cfg!(test) { 3 } else { 1_000 };

/// Bytes of pairs after which a response in fragments ends while a watch is catching up.
pub(super) const LONG_READ_BYTES_MAX: usize = if cfg!(test) { 200 } else { 16 << 20 };
/// Bytes of pairs from which a page counts as full. A page with less has few events among many rows, so that further
/// pages would take long.
const FULL_PAGE_BYTES: usize = if cfg!(test) { 1 } else { 512 << 10 };

/// A page on its way to a watch. It is a future, which must be polled until it completes, because it may have a
/// connection to the database.
pub(super) struct Reading {
    pub(super) id: WatchId,
    /// The first revision of the page.
    pub(super) from: Revision,
    /// The head when the read began.
    pub(super) head: Revision,
    page: Pin<Box<dyn Future<Output = Result<Page>> + Send>>,
}

impl Reading {
    pub(super) fn begin(hub: &Arc<Hub>, log: &Arc<dyn Log>, id: WatchId, spec: &Spec, from: Revision) -> Self {
        let head = hub.head();
        let page = read(Arc::clone(hub), Arc::clone(log), spec.clone(), from, head);
        Self { id, from, head, page: Box::pin(page) }
    }
}

impl Future for Reading {
    type Output = Result<Page>;

    fn poll(mut self: Pin<&mut Self>, context: &mut task::Context<'_>) -> Poll<Self::Output> {
        self.page.as_mut().poll(context)
    }
}

/// Reads the next page. If the client accepts fragments, further full pages follow, so that it receives as few responses
/// as from etcd. Other clients may limit the size of a response, to 4 MiB by default.
async fn read(hub: Arc<Hub>, log: Arc<dyn Log>, spec: Spec, from: Revision, to: Revision) -> Result<Page> {
    let prev = if spec.flavor.prev_kv { WithPrev::Yes } else { WithPrev::No };
    let mut page = read_page(&hub, &*log, &spec.range, (from, to), prev).await?;
    let permit = spec.fragment.and_then(|_| hub.long_reads.try_acquire().ok());
    let (mut bytes, mut all_bytes) = (pair_bytes(&page), pair_bytes(&page));
    while permit.is_some() && page.next <= to && bytes >= FULL_PAGE_BYTES && all_bytes < LONG_READ_BYTES_MAX {
        let more = read_page(&hub, &*log, &spec.range, (page.next, to), prev).await?;
        bytes = pair_bytes(&more);
        all_bytes += bytes;
        page.changes.extend(more.changes);
        page.next = more.next;
        page.purged = page.purged.max(more.purged);
    }
    Ok(page)
}

/// Reads a page of the changes in [from, to].
async fn read_page(
    hub: &Hub,
    log: &dyn Log,
    range: &KeyRange,
    (from, to): (Revision, Revision),
    prev: WithPrev,
) -> Result<Page> {
    if let KeyRange::Single(key) = range
        && let Some(found) = hub.indexed_changes(key, from, to, KEY_ROWS_MAX + 1)
        && let Some(page) = read_rows(log, key, found, to, prev).await?
    {
        return Ok(page);
    }
    log.changes(from, to, range, prev).await
}

/// Reads a page of the changes that were found, of which there are at most `KEY_ROWS_MAX + 1`. `None`: the log must be
/// read, because it lacks a row, or a revision has several.
async fn read_rows(
    log: &dyn Log,
    key: &Key,
    mut found: Vec<IndexedChange>,
    to: Revision,
    prev: WithPrev,
) -> Result<Option<Page>> {
    // The key was deleted and created in one transaction. Its events show the pair before the transaction.
    if found.windows(2).any(|pair| pair[0].row.revision == pair[1].row.revision) {
        return Ok(None);
    }
    let len = page_len(log, key, &found, prev).await?;
    let next = found.get(len).map_or(to.next(), |change| change.row.revision);
    found.truncate(len);
    let rows = rows_with_pairs(&found, prev);
    let pairs: HashMap<RowId, EncodedKv> =
        if rows.is_empty() { HashMap::new() } else { log.values(&rows).await?.into_iter().collect() };
    // Another instance may have compacted. The log then knows from which revision on its rows are complete.
    if pairs.len() < rows.len() {
        return Ok(None);
    }
    let changes = found.iter().filter_map(|change| with_pairs(key, change, &pairs, prev)).collect();
    Ok(Some(Page { changes, next, purged: None }))
}

/// Returns the number of changes that one page may contain, at least one.
async fn page_len(log: &dyn Log, key: &Key, found: &[IndexedChange], prev: WithPrev) -> Result<usize> {
    if found.len() <= 1 {
        return Ok(found.len());
    }
    let lengths: HashMap<RowId, u64> = log.value_lengths(&rows_with_pairs(found, prev)).await?.into_iter().collect();
    let mut bytes = 0;
    let fitting = found.iter().take_while(|change| {
        let fits = bytes < CHUNK_BYTES_MAX as u64;
        let rows = rows_with_pairs(std::slice::from_ref(*change), prev);
        bytes += rows.iter().map(|row| key.len() as u64 + lengths.get(row).copied().unwrap_or(0)).sum::<u64>();
        fits
    });
    Ok(fitting.count().min(KEY_ROWS_MAX))
}

/// Returns the rows whose pairs the events of the changes contain, each once.
fn rows_with_pairs(changes: &[IndexedChange], prev: WithPrev) -> Vec<RowId> {
    let of_change = |change: &IndexedChange| {
        let put = (!change.is_delete).then_some(change.row);
        [change.prev.filter(|_| prev == WithPrev::Yes), put]
    };
    let mut rows: Vec<RowId> = changes.iter().flat_map(of_change).flatten().collect();
    // The previous row of a change is that of the change before.
    rows.dedup();
    rows
}

/// Returns the change with its pairs, as the log does.
fn with_pairs(key: &Key, change: &IndexedChange, pairs: &HashMap<RowId, EncodedKv>, prev: WithPrev) -> Option<Change> {
    let kind = if change.is_delete { ChangeKind::Delete } else { ChangeKind::put(pairs.get(&change.row)?.clone()) };
    let prev_kv = |row: &RowId| if prev == WithPrev::Yes { pairs.get(row).cloned() } else { None };
    let prev = change.prev.map(|row| Prev { row, kv: prev_kv(&row) });
    Some(Change { row: change.row, key: key.clone(), kind, prev, prev_lease: None })
}

/// Returns the bytes of the pairs that a page contains.
fn pair_bytes(page: &Page) -> usize {
    page.changes.iter().map(Change::pair_bytes).sum()
}
