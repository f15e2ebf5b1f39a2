//! Overload protection: bounds on time and memory that limit the effect of hostile clients on other clients.
//!
//! Guarantee: under attack the server stays up, its memory stays below a stated bound, and the p99 latency of other
//! clients stays below 25 ms (docs/explanation/overload.md has the attacks and the figures).
//!
//! | resource | limiter | what happens at the limit |
//! |---|---|---|
//! | time of a runtime thread | [`Steps`]: long work runs one short step at a time | the work waits for its next step |
//! | time to read a connection | [`paced`]: after 0.1 ms of reading, the next poll is a step | the connection waits |
//! | values, and keys of leases, read for responses | [`ReadMemory`]: bytes not yet sent | the read waits, then fails |
//! | requests not yet complete | [`PartialRequests`]: bytes received, and a deadline | the request fails |
//!
//! Other limits are in other modules: HTTP/2 limits in hyper's builder (`net`), the number of connections and their
//! timeouts in `net`, the fields of one request in `api::grpc`, the write queue in [`crate::store`], the queue of a
//! watch stream in [`crate::watch`].

mod pacing;
mod partial_requests;
mod read_memory;
mod steps;

pub use self::{
    pacing::{PacedReader, Pacer, paced},
    partial_requests::{Full, Late, PartialRequest, PartialRequests, REQUEST_TIME_MAX},
    read_memory::{Exhausted, ListPermit, ReadMemory},
    steps::{PacedStream, Step, Steps},
};
