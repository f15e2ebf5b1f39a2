//! Finds the keys below a prefix that were deleted and do not exist now, the newest deletion first.
//!
//! The history service sends the changes of a range oldest first. So a search reads spans of revisions, the newest span
//! first. It ends after [`KEYS_MAX`] keys, or after [`SEARCH_MAX`] and the span that is being read then. The next search
//! continues before its first revision.
//!
//! The service also sends the values of puts, so the next span can have a thousand times the bytes of the last one. A span
//! that is not read within [`SPAN_TIME_MAX`] is given up, and a part of it is read.
//!
//! Known limits: if more than [`SPAN_DELETIONS_MAX`] keys were deleted at one revision, only the last ones are found. A key
//! that was deleted several times can be found by several searches. Keys that are too long for a page of their own are left
//! out. A single revision whose changes are not read within the maximum time of a request ends each search before it.

use std::{
    collections::{HashSet, VecDeque},
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use orlop_client::Client;
use orlop_core::types::prefix_end;
use orlop_wire::proto::client::{
    etcdserverpb::RangeRequest,
    orlopb::{HistoryChange, HistoryChangesRequest, HistoryStateRequest, HistoryStateResponse},
};
use tokio::time::{Instant, timeout};
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
/// After a span that took more time, the next one is half as long.
const SPAN_TIME: Duration = Duration::from_millis(200);
/// After a quick span with at most this number of bytes of keys and values, the next one is twice as long.
const SPAN_BYTES: usize = 16 << 20;
/// Maximum time in which a span of more than one revision is read.
const SPAN_TIME_MAX: Duration = Duration::from_secs(2);
/// After a span that was given up, the next one is shorter by this factor.
const GIVEN_UP_FACTOR: i64 = 16;
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
    search(History { client, prefix }, before).await
}

/// What a search reads.
trait Source {
    async fn state(&self) -> Result<HistoryStateResponse, Failure>;

    /// Reads the deletions in the revisions from `from` to `to`, both included.
    async fn deletions(&self, from: i64, to: i64) -> Result<Span, Failure>;

    /// Returns whether a key exists now.
    async fn exists(&self, key: &[u8]) -> Result<bool, Failure>;
}

async fn search(source: impl Source, before: i64) -> Result<DeletedKeys, Failure> {
    let state = source.state().await?;
    let first = state.first_revision.max(1);
    let last = if before > 0 { state.revision.min(before - 1) } else { state.revision };
    let last = last.max(first - 1);
    let mut search = Search {
        source,
        keys: Vec::new(),
        known: HashSet::new(),
        hasher: RandomState::new(),
        first,
        next: last,
        is_cut: false,
    };
    search.run().await?;
    let Search { keys, first, next, is_cut, .. } = search;
    // Searched revisions may not be readable any more.
    Ok(DeletedKeys { keys, revisions: (first.max(next + 1), last), has_older: next >= first, is_cut })
}

struct Search<S> {
    source: S,
    keys: Vec<DeletedKey>,
    /// Hashes of the keys whose newest deletion was looked at. The keys themselves could take much memory.
    known: HashSet<u64>,
    hasher: RandomState,
    /// The first readable revision.
    first: i64,
    /// The newest revision that was not searched yet.
    next: i64,
    /// Whether deletions at the revision after `next` were left out.
    is_cut: bool,
}

impl<S: Source> Search<S> {
    /// Searches back to the first readable revision, or until a limit is reached.
    async fn run(&mut self) -> Result<(), Failure> {
        let (began, last, mut length) = (Instant::now(), self.next, SPAN_FIRST);
        while self.next >= self.first && self.keys.len() < KEYS_MAX && !self.is_cut {
            // At least one span is searched: otherwise a repeated search would not get further.
            let has_searched = self.next < last;
            if has_searched && began.elapsed() >= SEARCH_MAX {
                break;
            }
            let span_began = Instant::now();
            let from = self.first.max(self.next - length + 1);
            match self.read(from).await {
                Ok(Some(span)) => {
                    let bytes = span.bytes;
                    self.look_at(span, from).await?;
                    if span_began.elapsed() >= SPAN_TIME {
                        length = (length / 2).max(1);
                    } else if bytes <= SPAN_BYTES {
                        length = (length * 2).min(SPAN_MAX);
                    }
                }
                Ok(None) => length = ((self.next - from + 1) / GIVEN_UP_FACTOR).max(1),
                Err(Failure::Missing(reason)) => self.first = self.risen_first(reason).await?,
                // What was found is shown. The next search reads the same revisions first, and reports the failure.
                Err(Failure::Unavailable(_)) if has_searched => break,
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    /// Reads the deletions in the revisions from `from` to the next one; `None` if that takes too long and a shorter span
    /// is possible.
    async fn read(&self, from: i64) -> Result<Option<Span>, Failure> {
        let read = self.source.deletions(from, self.next);
        if from == self.next {
            return read.await.map(Some);
        }
        timeout(SPAN_TIME_MAX, read).await.ok().transpose()
    }

    /// Returns the first readable revision after a compaction, or the failure if that is not its reason.
    async fn risen_first(&self, reason: String) -> Result<i64, Failure> {
        let first = self.source.state().await?.first_revision;
        if first > self.first { Ok(first) } else { Err(Failure::Missing(reason)) }
    }

    /// Looks at the deletions in the revisions from `from` to the next one, until there are enough keys.
    async fn look_at(&mut self, mut span: Span, from: i64) -> Result<(), Failure> {
        let mut done = self.next + 1;
        while let Some(found) = span.newest.pop_back() {
            let revision = found.deletion.mod_revision;
            if self.keys.len() == KEYS_MAX {
                self.leave_out(revision, done);
                return Ok(());
            }
            done = revision;
            if self.known.insert(self.hasher.hash_one(&found.key)) && !self.source.exists(&found.key).await? {
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
    /// Bytes of the keys and values of all changes, which were read to find the deletions.
    bytes: usize,
}

impl Span {
    fn add(&mut self, change: HistoryChange) {
        let Some(kv) = &change.kv else { return };
        self.bytes += kv.key.len() + kv.value.len();
        if !change.deleted || kv.key.len() > LINKED_BYTES_MAX {
            return;
        }
        // A copy: the key shares the memory of the whole message.
        let key = kv.key.to_vec();
        if self.newest.len() == SPAN_DELETIONS_MAX {
            self.left_out = self.newest.pop_front().map(|oldest| oldest.deletion.mod_revision);
        }
        self.newest.push_back(DeletedKey { key, deletion: Version::of_change(change) });
    }
}

/// The history of the keys below a prefix, on a server.
struct History<'a> {
    client: &'a Client,
    prefix: &'a [u8],
}

impl Source for History<'_> {
    async fn state(&self) -> Result<HistoryStateResponse, Failure> {
        match within(self.client.history().state(HistoryStateRequest {})).await {
            Err(status) if status.code() == Code::Unimplemented => {
                Err(Failure::Missing("this server has no history service".to_owned()))
            }
            state => Ok(state?.into_inner()),
        }
    }

    async fn deletions(&self, from: i64, to: i64) -> Result<Span, Failure> {
        let request = HistoryChangesRequest {
            key: if self.prefix.is_empty() { vec![0].into() } else { self.prefix.to_vec().into() },
            range_end: prefix_end(self.prefix).into(),
            from_revision: from,
            to_revision: to,
            ..HistoryChangesRequest::default()
        };
        let read = async {
            let mut pages = self.client.history().changes(request).await?.into_inner();
            let mut span = Span::default();
            while let Some(page) = pages.message().await? {
                page.changes.into_iter().for_each(|change| span.add(change));
            }
            Ok(span)
        };
        Ok(within(read).await?)
    }

    /// As far as the instance knows that has answered before.
    async fn exists(&self, key: &[u8]) -> Result<bool, Failure> {
        let request =
            RangeRequest { key: key.to_vec().into(), count_only: true, serializable: true, ..RangeRequest::default() };
        Ok(within(self.client.kv().range(request)).await?.into_inner().count > 0)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use orlop_wire::proto::client::mvccpb::KeyValue;
    use tokio::time::sleep;

    use super::*;

    /// A history of one put for each revision, except that each 50th of the first 1,000 revisions deletes a key.
    struct Fake {
        /// The newest revision.
        revision: i64,
        /// The first readable revision that the next state has, and that of all further ones.
        first: Cell<i64>,
        then: i64,
        /// The changes of revisions before this one are compacted.
        readable: i64,
        /// A revision whose changes cannot be read.
        broken: i64,
        /// Time in which one revision is read.
        revision_time: Duration,
        value_len: usize,
        /// Length of the longest span that was read.
        longest: Cell<i64>,
    }

    impl Fake {
        fn new(revision: i64) -> Self {
            Self {
                revision,
                first: Cell::new(1),
                then: 1,
                readable: 1,
                broken: 0,
                revision_time: Duration::ZERO,
                value_len: 0,
                longest: Cell::new(0),
            }
        }
    }

    impl Source for &Fake {
        async fn state(&self) -> Result<HistoryStateResponse, Failure> {
            let first_revision = self.first.replace(self.then);
            Ok(HistoryStateResponse { revision: self.revision, first_revision, ..HistoryStateResponse::default() })
        }

        async fn deletions(&self, from: i64, to: i64) -> Result<Span, Failure> {
            let length = to - from + 1;
            sleep(self.revision_time * u32::try_from(length).expect("a short span")).await;
            if from < self.readable {
                return Err(Failure::Missing("compacted".to_owned()));
            }
            if (from..=to).contains(&self.broken) {
                return Err(Failure::Unavailable("broken".to_owned()));
            }
            self.longest.set(self.longest.get().max(length));
            let put = KeyValue { value: vec![0; self.value_len].into(), ..KeyValue::default() };
            let mut span = Span::default();
            for mod_revision in from..=to {
                let deleted = is_deletion(mod_revision);
                let kv = if deleted {
                    KeyValue { key: mod_revision.to_string().into(), mod_revision, ..KeyValue::default() }
                } else {
                    KeyValue { mod_revision, ..put.clone() }
                };
                span.add(HistoryChange { kv: Some(kv), deleted, ..HistoryChange::default() });
            }
            Ok(span)
        }

        async fn exists(&self, _key: &[u8]) -> Result<bool, Failure> {
            Ok(false)
        }
    }

    fn is_deletion(revision: i64) -> bool {
        revision <= 1_000 && revision % 50 == 0
    }

    fn revisions(found: &DeletedKeys) -> Vec<i64> {
        found.keys.iter().map(|key| key.deletion.mod_revision).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn slow_history_is_searched_to_its_end() {
        for revision_time in [0, 1, 10, 700, 3_000].map(Duration::from_millis) {
            let fake = Fake { revision_time, ..Fake::new(1_000) };
            let (mut before, mut found) = (0, Vec::new());
            loop {
                let began = Instant::now();
                let part = search(&fake, before).await.expect("a search");
                let took = began.elapsed();
                assert!(took < SEARCH_MAX + SPAN_TIME_MAX * 2 + SPAN_TIME, "{revision_time:?}: {took:?}");
                assert!(part.revisions.0 <= part.revisions.1, "{revision_time:?}: nothing was searched");
                found.extend(revisions(&part));
                before = part.revisions.0;
                if !part.has_older {
                    break;
                }
            }
            let newest_first: Vec<i64> = (1..=1_000).rev().filter(|revision| is_deletion(*revision)).collect();
            assert_eq!((found, before), (newest_first, 1), "{revision_time:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn spans_with_many_bytes_become_no_longer() {
        for (value_len, longest) in [(0, SPAN_MAX), (8 << 10, 4_000), (64 << 10, SPAN_FIRST)] {
            let fake = Fake { value_len, ..Fake::new(200_000) };
            assert!(!search(&fake, 0).await.expect("a search").has_older);
            assert_eq!(fake.longest.get(), longest, "values of {value_len} bytes");
        }
    }

    /// The first span has the revisions from 1,501 on.
    #[tokio::test(start_paused = true)]
    async fn compacted_revisions_are_not_called_searched() {
        let missing = Failure::Missing("compacted".to_owned());
        for (readable, then, expected) in [
            (1_200, 1_200, Ok((1_200, 2_000))),
            (1_800, 1_800, Ok((1_800, 2_000))),
            // A searched revision is compacted, too.
            (1_501, 1_800, Ok((1_800, 2_000))),
            // It is for another reason that they cannot be read.
            (1_200, 1, Err(missing)),
        ] {
            let fake = Fake { readable, then, ..Fake::new(2_000) };
            let found = search(&fake, 0).await.map(|found| {
                assert!(!found.has_older, "{readable} {then}");
                found.revisions
            });
            assert_eq!(found, expected, "{readable} {then}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failure_leaves_what_was_found() {
        let fake = Fake { broken: 400, ..Fake::new(2_000) };
        let found = search(&fake, 0).await.expect("a search");
        assert_eq!((found.revisions, found.has_older), ((501, 2_000), true));
        assert_eq!(revisions(&found), [1_000, 950, 900, 850, 800, 750, 700, 650, 600, 550]);
        let failure = search(&fake, 501).await.err();
        assert_eq!(failure, Some(Failure::Unavailable("broken".to_owned())));
    }

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
