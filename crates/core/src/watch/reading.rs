//! Reads pages of the log for a watch that is catching up.

use std::{
    pin::Pin,
    sync::Arc,
    task::{self, Poll},
};

use super::{hub::Hub, spec::Spec};
use crate::{
    log::{Log, Page, Result, WithPrev},
    types::{Change, Revision, WatchId},
};

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
    let mut page = log.changes(from, to, &spec.range, prev).await?;
    let permit = spec.fragment.and_then(|_| hub.long_reads.try_acquire().ok());
    let (mut bytes, mut all_bytes) = (pair_bytes(&page), pair_bytes(&page));
    while permit.is_some() && page.next <= to && bytes >= FULL_PAGE_BYTES && all_bytes < LONG_READ_BYTES_MAX {
        let more = log.changes(page.next, to, &spec.range, prev).await?;
        bytes = pair_bytes(&more);
        all_bytes += bytes;
        page.changes.extend(more.changes);
        page.next = more.next;
        page.purged = page.purged.max(more.purged);
    }
    Ok(page)
}

/// Returns the bytes of the pairs that a page contains.
fn pair_bytes(page: &Page) -> usize {
    page.changes.iter().map(Change::pair_bytes).sum()
}
