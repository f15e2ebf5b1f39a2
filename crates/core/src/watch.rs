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
//! client does not delay the others.
//!
//! Guarantees: ordered, unique, atomic (the changes of one revision stay together), reliable, resumable; a progress
//! notification never overtakes an event that it covers.

mod chunk;
mod hub;
pub mod intervals;
mod message;
mod outbox;
mod queue;
mod reading;
mod run;
mod session;
mod spec;

pub use self::{
    chunk::Chunk,
    hub::{Hub, Survey, WatchedRange},
    message::{End, Message, NotCreated},
    outbox::{Messages, Outbox},
    session::Session,
    spec::{Flavor, NO_WATCH, Spec},
};

#[cfg(test)]
mod delivery_tests;
