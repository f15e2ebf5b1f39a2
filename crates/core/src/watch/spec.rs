//! The parameters of a watch.

use crate::types::{Change, KeyRange, Revision, WatchId};

/// The id in a message that is not about a single watch.
pub const NO_WATCH: WatchId = WatchId(-1);

/// A request to create a watch.
#[derive(Clone, Debug)]
pub struct Spec {
    /// `None`: the stream assigns an id.
    pub id: Option<WatchId>,
    /// Not empty.
    pub range: KeyRange,
    /// The first revision to send; `None`: the one after the head.
    pub start: Option<Revision>,
    pub flavor: Flavor,
    /// Maximum bytes of events per message, if the client requested fragments.
    pub fragment: Option<usize>,
    pub progress_notify: bool,
}

impl Spec {
    /// Returns about how much memory a watch takes, without the events that wait to be sent. Its stream, its group and the
    /// tree of ranges have copies of the range.
    pub(super) fn watch_bytes(&self) -> usize {
        const WATCH_BYTES: usize = 512;
        const RANGE_COPIES: usize = 8;
        let (key, range_end) = self.range.to_wire();
        WATCH_BYTES + RANGE_COPIES * (key.len() + range_end.len())
    }
}

/// The options that determine which events a watch receives and what they contain. Watches of one flavor and range
/// share their encoded events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flavor {
    pub prev_kv: bool,
    pub puts: bool,
    pub deletes: bool,
}

impl Flavor {
    /// Returns whether watches of this flavor receive the change.
    pub(super) fn admits(self, change: &Change) -> bool {
        if change.is_delete() { self.deletes } else { self.puts }
    }
}
