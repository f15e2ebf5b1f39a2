//! Finds the keys below a prefix that were deleted and do not exist now, the newest deletion first.
//!
//! The history service sends the changes of a range oldest first. So a search reads spans of revisions, the newest span
//! first. It ends after [`KEYS_MAX`] keys, or after [`SEARCH_MAX`] and the span that is being read then. The next search
//! continues before its first revision.
//!
//! Known limits: if more than [`SPAN_DELETIONS_MAX`] keys were deleted at one revision, only the last ones are found. A key
//! that was deleted several times can be found by several searches. Keys that are too long for a page of their own are left
//! out.

use std::{
    collections::{HashSet, VecDeque},
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use orlop_client::Client;
use orlop_core::types::prefix_end;
use orlop_wire::proto::client::{
    etcdserverpb::RangeRequest,
    orlopb::{HistoryChange, HistoryChangesRequest, HistoryStateRequest},
};
use tokio::time::Instant;
use tonic::Code;

use super::{Failure, Version, within};
use crate::console::pages::names::LINKED_BYTES_MAX;

/// Maximum number of keys that a search finds.
pub(in crate::console) const KEYS_MAX: usize = 200;
/// Maximum time after which a search reads no further span.
pub(in crate::console) const SEARCH_MAX: Duration = Duration::from_secs(3);
/// Number of revisions of the first span.
const SPAN_FIRST: i64 = 500;
/// Maximum number of revisions of a span.
const SPAN_MAX: i64 = 64_000;
/// After a span that took less time, the next one is twice as long; otherwise it is half as long.
const SPAN_TIME: Duration = Duration::from_millis(200);
/// Maximum number of deletions of a span that are kept: the newest ones.
const SPAN_DELETIONS_MAX: usize = 500;

/// A key that was deleted and does not exist now.
pub(in crate::console) struct DeletedKey {
    pub key: Vec<u8>,
    pub deletion: Version,
}

/// The result of a search.
pub(in crate::console) struct DeletedKeys {
    /// The newest deletion first.
    pub keys: Vec<DeletedKey>,
    /// The first and the last searched revision. If no revision was searched, the first is above the last.
    pub revisions: (i64, i64),
    /// Whether there are readable revisions before the first one.
    pub has_older: bool,
    /// Whether further keys were deleted at the first revision.
    pub is_cut: bool,
}

/// Searches for keys that were deleted before a revision; 0: up to the newest one. The user needs the right to read all
/// keys below the prefix.
pub(in crate::console) async fn deleted_keys(
    client: &Client,
    prefix: &[u8],
    before: i64,
) -> Result<DeletedKeys, Failure> {
    let state = match within(client.history().state(HistoryStateRequest {})).await {
        Err(status) if status.code() == Code::Unimplemented => {
            return Err(Failure::Missing("this server has no history service".to_owned()));
        }
        state => state?.into_inner(),
    };
    let first = state.first_revision.max(1);
    let last = if before > 0 { state.revision.min(before - 1) } else { state.revision };
    let last = last.max(first - 1);
    let mut search = Search {
        client,
        prefix,
        keys: Vec::new(),
        known: HashSet::new(),
        hasher: RandomState::new(),
        next: last,
        is_cut: false,
    };
    search.run(first).await?;
    let Search { keys, next, is_cut, .. } = search;
    Ok(DeletedKeys { keys, revisions: (next + 1, last), has_older: next >= first, is_cut })
}

struct Search<'a> {
    client: &'a Client,
    prefix: &'a [u8],
    keys: Vec<DeletedKey>,
    /// Hashes of the keys whose newest deletion was looked at. The keys themselves could take much memory.
    known: HashSet<u64>,
    hasher: RandomState,
    /// The newest revision that was not searched yet.
    next: i64,
    /// Whether deletions at the revision after `next` were left out.
    is_cut: bool,
}

impl Search<'_> {
    /// Searches back to `first`, or until a limit is reached.
    async fn run(&mut self, first: i64) -> Result<(), Failure> {
        let (began, mut length) = (Instant::now(), SPAN_FIRST);
        while self.next >= first && self.keys.len() < KEYS_MAX && !self.is_cut && began.elapsed() < SEARCH_MAX {
            let span_began = Instant::now();
            match self.span(first.max(self.next - length + 1)).await {
                // The oldest revisions have left the history since its state was read.
                Err(Failure::Missing(_)) => self.next = first - 1,
                searched => searched?,
            }
            let is_quick = span_began.elapsed() < SPAN_TIME;
            length = if is_quick { (length * 2).min(SPAN_MAX) } else { (length / 2).max(1) };
        }
        Ok(())
    }

    /// Searches the revisions from `from` to the next one, until there are enough keys.
    async fn span(&mut self, from: i64) -> Result<(), Failure> {
        let mut span = deletions(self.client, self.prefix, from, self.next).await?;
        let mut done = self.next + 1;
        while let Some(found) = span.newest.pop_back() {
            let revision = found.deletion.mod_revision;
            if self.keys.len() == KEYS_MAX {
                self.leave_out(revision, done);
                return Ok(());
            }
            done = revision;
            if self.known.insert(self.hasher.hash_one(&found.key)) && !exists(self.client, &found.key).await? {
                self.keys.push(found);
            }
        }
        match span.left_out {
            Some(revision) => self.leave_out(revision, done),
            None => self.next = from - 1,
        }
        Ok(())
    }

    /// Leaves out the deletions at `revision` and before it. `done` is the revision of the last deletion that was looked at.
    fn leave_out(&mut self, revision: i64, done: i64) {
        self.next = done - 1;
        self.is_cut = revision == done;
    }
}

/// The deletions of a span.
#[derive(Default)]
struct Span {
    /// The newest ones, oldest first; at most [`SPAN_DELETIONS_MAX`].
    newest: VecDeque<DeletedKey>,
    /// The revision of the newest one that is not among them.
    left_out: Option<i64>,
}

impl Span {
    fn add(&mut self, change: HistoryChange) {
        let Some(kv) = change.kv.as_ref().filter(|kv| change.deleted && kv.key.len() <= LINKED_BYTES_MAX) else {
            return;
        };
        // A copy: the key shares the memory of the whole message.
        let key = kv.key.to_vec();
        if self.newest.len() == SPAN_DELETIONS_MAX {
            self.left_out = self.newest.pop_front().map(|oldest| oldest.deletion.mod_revision);
        }
        self.newest.push_back(DeletedKey { key, deletion: Version::of_change(change) });
    }
}

/// Reads the deletions below a prefix in the revisions from `from` to `to`, both included.
async fn deletions(client: &Client, prefix: &[u8], from: i64, to: i64) -> Result<Span, Failure> {
    let request = HistoryChangesRequest {
        key: if prefix.is_empty() { vec![0].into() } else { prefix.to_vec().into() },
        range_end: prefix_end(prefix).into(),
        from_revision: from,
        to_revision: to,
        ..HistoryChangesRequest::default()
    };
    let read = async {
        let mut pages = client.history().changes(request).await?.into_inner();
        let mut span = Span::default();
        while let Some(page) = pages.message().await? {
            page.changes.into_iter().for_each(|change| span.add(change));
        }
        Ok(span)
    };
    Ok(within(read).await?)
}

/// Returns whether a key exists now, as far as the instance knows that has answered before.
async fn exists(client: &Client, key: &[u8]) -> Result<bool, Failure> {
    let request =
        RangeRequest { key: key.to_vec().into(), count_only: true, serializable: true, ..RangeRequest::default() };
    Ok(within(client.kv().range(request)).await?.into_inner().count > 0)
}

#[cfg(test)]
mod tests {
    use orlop_wire::proto::client::mvccpb::KeyValue;

    use super::*;

    #[test]
    fn newest_deletions_of_a_span_are_kept() {
        let more = SPAN_DELETIONS_MAX + 3;
        for (deletions, left_out) in [(0, None), (SPAN_DELETIONS_MAX, None), (more, Some(13))] {
            let mut span = Span::default();
            for revision in (11..).take(deletions) {
                for (key, deleted) in [("put", false), ("deleted", true), (&*"k".repeat(LINKED_BYTES_MAX + 1), true)] {
                    let kv = KeyValue { key: key.to_owned().into(), mod_revision: revision, ..KeyValue::default() };
                    span.add(HistoryChange { kv: Some(kv), deleted, ..HistoryChange::default() });
                }
            }
            assert_eq!(span.left_out, left_out, "{deletions} deletions");
            assert_eq!(span.newest.len(), deletions.min(SPAN_DELETIONS_MAX));
            assert!(span.newest.iter().all(|found| found.key == b"deleted"));
            let last = span.newest.back().map_or(10, |found| found.deletion.mod_revision);
            assert_eq!(last, 10 + deletions as i64);
        }
    }
}
