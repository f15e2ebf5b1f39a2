//! Checks the messages of one stream.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::history::{Committed, History, decode};
use crate::{
    types::{Revision, WatchId},
    watch::{Message, NO_WATCH, Spec},
};

pub(super) type Checked = Result<(), TestCaseError>;

/// Knows the messages that one stream must receive, and checks each message that was read.
#[derive(Default)]
pub(super) struct Reader {
    /// Requests whose responses were not read yet, the oldest first.
    requests: VecDeque<Request>,
    active: BTreeMap<WatchId, Watch>,
    /// The watch whose fragmented message continues.
    open: Option<WatchId>,
    /// The head at the last progress request, unless a response at or above that head was received since.
    progress_requested_at_head: Option<Revision>,
    /// Number of unanswered progress requests. One response may answer several.
    open_progress_requests: usize,
    /// Number of create and progress requests so far.
    clock: u64,
    /// The clock at the last progress request.
    progress_requested_at_clock: u64,
}

enum Request {
    Create { spec: Spec, head: Revision, at: u64 },
    Cancel(WatchId),
}

struct Watch {
    spec: Spec,
    /// The first revision whose events the watch must receive.
    from: Revision,
    /// The clock at its create request.
    created_at: u64,
    /// Number of changes of the history that were checked.
    cursor: usize,
    /// The revision of the last event.
    last: Option<Revision>,
    /// The revision in the last header.
    header: Revision,
}

impl Reader {
    pub(super) fn created(&mut self, spec: Spec, head: Revision) {
        self.clock += 1;
        self.requests.push_back(Request::Create { spec, head, at: self.clock });
    }

    pub(super) fn canceled(&mut self, id: WatchId) {
        self.requests.push_back(Request::Cancel(id));
    }

    pub(super) fn progress_requested(&mut self, head: Revision) {
        self.clock += 1;
        (self.progress_requested_at_head, self.progress_requested_at_clock) = (Some(head), self.clock);
        self.open_progress_requests += 1;
    }

    /// Returns the ids that may be in use.
    pub(super) fn ids(&self) -> impl Iterator<Item = WatchId> {
        let chosen = self.requests.iter().filter_map(|sent| match sent {
            Request::Create { spec, .. } => spec.id,
            Request::Cancel(_) => None,
        });
        self.active.keys().copied().chain(chosen)
    }

    /// Returns the next request that has a response. Canceling an unknown watch has none.
    fn next_request(&mut self) -> Option<Request> {
        while let Some(sent) = self.requests.pop_front() {
            match sent {
                Request::Cancel(id) if !self.active.contains_key(&id) => {}
                Request::Create { .. } | Request::Cancel(_) => return Some(sent),
            }
        }
        None
    }

    pub(super) fn check(&mut self, message: Message, history: &History) -> Checked {
        let text = format!("{message:?}");
        let head = history.index.head();
        if let Some(open) = self.open {
            prop_assert!(
                matches!(message, Message::Events { id, .. } if id == open),
                "{} within a fragmented message",
                text
            );
        }
        match message {
            Message::Created { id, revision } => {
                let Some(Request::Create { spec, head, at }) = self.next_request() else {
                    return Err(TestCaseError::fail(format!("{text} without a request")));
                };
                prop_assert!(!self.active.contains_key(&id) && spec.id.is_none_or(|chosen| chosen == id), "{}", text);
                prop_assert_eq!(revision, head);
                let from = spec.start.unwrap_or(head.next());
                let watch = Watch { spec, from, created_at: at, cursor: 0, last: None, header: head };
                self.active.insert(id, watch);
            }
            Message::Refused { .. } => {
                let request = self.next_request();
                let in_use = |id: &WatchId| self.active.contains_key(id);
                let refused =
                    matches!(&request, Some(Request::Create { spec, .. }) if spec.id.as_ref().is_some_and(in_use));
                prop_assert!(refused, "{}", text);
            }
            Message::Canceled { id, .. } => {
                let is_requested = matches!(self.next_request(), Some(Request::Cancel(canceled)) if canceled == id);
                prop_assert!(is_requested, "{}", text);
                self.active.remove(&id);
            }
            Message::Compacted { id, compact_revision } => {
                let Some(watch) = self.active.remove(&id) else { return Err(TestCaseError::fail(text)) };
                prop_assert!(Some(compact_revision) <= history.compact_revision, "{}", text);
                prop_assert!(watch.from < compact_revision && watch.last < Some(compact_revision), "{}", text);
            }
            Message::Progress { id: NO_WATCH, revision } => {
                prop_assert!(self.open_progress_requests > 0 && revision <= head, "{}", text);
                self.open_progress_requests -= 1;
                for watch in self.active.values() {
                    watch.check_progress(revision, history)?;
                }
                self.progress_requested_at_head = self.progress_requested_at_head.filter(|head| *head > revision);
            }
            Message::Progress { id, revision } => {
                let Some(watch) = self.active.get(&id) else { return Err(TestCaseError::fail(text)) };
                prop_assert!(watch.spec.progress_notify && revision <= head, "{}", text);
                watch.check_progress(revision, history)?;
            }
            Message::Events { id, revision, events, fragment } => {
                let Some(watch) = self.active.get_mut(&id) else { return Err(TestCaseError::fail(text)) };
                prop_assert!(revision >= watch.header && revision <= head, "{} after {}", text, watch.header);
                watch.header = revision;
                let bytes = events.concat();
                let limit = watch.spec.fragment.filter(|_| fragment || self.open.is_some());
                watch.check_events(&bytes, limit, history)?;
                prop_assert!(watch.last <= Some(revision), "{}", text);
                self.open = fragment.then_some(id);
                if !fragment {
                    let split = watch
                        .next_expected(history)
                        .is_some_and(|(_, next)| Some(next.change.row.revision) == watch.last);
                    prop_assert!(!split, "{} ends within a revision", text);
                }
            }
        }
        Ok(())
    }

    pub(super) fn check_nothing_is_missing(&mut self, history: &History) -> Checked {
        prop_assert!(self.next_request().is_none(), "every request was answered");
        prop_assert!(self.open.is_none());
        for (id, watch) in &self.active {
            let next_expected = watch.next_expected(history).map(|(_, committed)| &committed.change);
            prop_assert!(next_expected.is_none(), "{:?} was not sent to {:?}: {:?}", next_expected, id, watch.spec);
        }
        let has_started = |watch: &Watch| watch.spec.start.is_none_or(|start| start <= history.index.head());
        let existed_at_request = |watch: &Watch| watch.created_at < self.progress_requested_at_clock;
        let due = self.active.values().all(has_started) && self.active.values().any(existed_at_request);
        prop_assert!(
            self.progress_requested_at_head.is_none() || !due,
            "no progress notification since {:?}",
            self.progress_requested_at_head
        );
        Ok(())
    }
}

impl Watch {
    /// Returns the oldest event that was not read yet, with its position.
    fn next_expected<'a>(&self, history: &'a History) -> Option<(usize, &'a Committed)> {
        let rest = history.committed.iter().enumerate().skip(self.cursor);
        rest.into_iter().find(|(_, Committed { change, .. })| {
            let wanted = if change.is_delete() { self.spec.flavor.deletes } else { self.spec.flavor.puts };
            wanted && change.row.revision >= self.from && self.spec.range.contains(&change.key)
        })
    }

    /// Checks that all events up to the notification's revision were received and that the watch has started.
    fn check_progress(&self, revision: Revision, history: &History) -> Checked {
        prop_assert!(self.spec.start.is_none_or(|start| start <= revision), "{:?} at {}", self.spec, revision);
        let next_expected = self.next_expected(history).map(|(_, committed)| &committed.change);
        let overtaken = next_expected.filter(|change| change.row.revision <= revision);
        prop_assert!(overtaken.is_none(), "progress at {} overtakes {:?}", revision, overtaken);
        Ok(())
    }

    fn check_events(&mut self, bytes: &[u8], limit: Option<usize>, history: &History) -> Checked {
        let events = decode(bytes);
        prop_assert!(!events.is_empty());
        prop_assert!(limit.is_none_or(|limit| bytes.len() <= limit || events.len() == 1), "cut to {:?}", limit);
        for event in events {
            let Some((position, committed)) = self.next_expected(history) else {
                return Err(TestCaseError::fail(format!("{event:?} is unexpected for {:?}", self.spec)));
            };
            let revision = committed.change.row.revision;
            let prev = committed.shown_prev.as_ref().filter(|_| self.spec.flavor.prev_kv);
            let without_prev = prev.is_some() && Some(revision) <= history.compact_revision;
            prop_assert!(
                event == committed.event(prev) || (without_prev && event == committed.event(None)),
                "{:?} is not {:?}",
                event,
                committed
            );
            (self.cursor, self.last) = (position + 1, Some(revision));
        }
        Ok(())
    }
}
