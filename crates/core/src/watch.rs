//! Watches: delivers committed changes to clients.
//!
//! ```text
//! applier ─▶ Hub ─▶ Outbox (one per stream) ─▶ client
//!             ▲        ▲
//!     joins   │        │ events read from the log, from the start revision on
//!             └ Session (one per stream) ◀─ create, cancel, progress
//! ```
//!
//! A watch is either *synced*, and the hub feeds it, or *catching up*, and its session reads the log in revision order
//! until it reaches the hub's head. Each stream's outbox is bounded. If a slow client fills it, the client's watches
//! catch up from the log at the client's pace. A watch therefore misses nothing that is not compacted, and a slow
//! client delays no other.
//!
//! Guarantees: ordered, unique, atomic (the changes of one revision stay together), reliable, resumable; a progress
//! notification never overtakes an event that it covers.

mod chunk;
mod hub;
pub mod intervals;
mod outbox;
mod run;
mod session;
mod waiting;

use crate::types::{KeyRange, Revision, WatchId};

pub use self::{
    chunk::Chunk,
    hub::Hub,
    outbox::{End, Message, Messages, Outbox},
    session::Session,
};

/// A request to create a watch.
#[derive(Clone, Debug)]
pub struct Spec {
    /// `None`: the stream assigns an id.
    pub id: Option<WatchId>,
    /// Not empty.
    pub range: KeyRange,
    /// The first revision to send; `None`: the next one.
    pub start: Option<Revision>,
    pub flavor: Flavor,
    /// Maximum bytes of events per message, if the client requested fragments.
    pub fragment: Option<usize>,
    pub progress_notify: bool,
}

/// The contents of a watch's events. Watches of one flavor and range share their encoded events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flavor {
    pub prev_kv: bool,
    pub puts: bool,
    pub deletes: bool,
}

/// The id in a message that is not about a single watch.
pub const NO_WATCH: WatchId = WatchId(-1);

#[cfg(test)]
mod delivery_tests;
