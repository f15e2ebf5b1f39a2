//! Watches: committed changes on their way to those who asked for them.
//!
//! ```text
//! applier ─▶ Hub ─▶ Outbox (one a stream) ─▶ client
//!             ▲        ▲
//!     joins   │        │ what the log has from the start revision on
//!             └ Session (one a stream) ◀─ create, cancel, progress
//! ```
//!
//! A watch is *synced*, when the hub feeds it, or *catching up*, when its session reads the log in revision order until it
//! meets the hub. A client that reads slowly fills its outbox, which is bounded; its watches then catch up from the log at
//! the client's pace. So a watch loses nothing short of compaction and holds up nobody.
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

/// What a client wants to watch.
#[derive(Clone, Debug)]
pub struct Spec {
    /// `None`: the stream gives it one.
    pub id: Option<WatchId>,
    /// Not empty.
    pub range: KeyRange,
    /// The first revision of interest; `None`: the next one.
    pub start: Option<Revision>,
    pub flavor: Flavor,
    /// Bytes of events above which a message is cut, if the client wants that.
    pub fragment: Option<usize>,
    pub progress_notify: bool,
}

/// What an event of a watch holds; watches of one flavor and range share what is encoded for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flavor {
    pub prev_kv: bool,
    pub puts: bool,
    pub deletes: bool,
}

/// The id of a message that is about no single watch.
pub const NO_WATCH: WatchId = WatchId(-1);

#[cfg(test)]
mod delivery_tests;
