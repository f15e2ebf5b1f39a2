//! Hand-written carriage of gRPC calls: how a request of the KV service becomes a message and its response leaves.
//!
//! tonic's generated services copy each request into a buffer, copy each response into a buffer that doubles as it grows,
//! and box every body several times. For KV, whose calls take tens of microseconds, that was a tenth of the server's time
//! (docs/adr/0008). All other services are tonic's.
//!
//! - [`router`]: sends calls of the KV service directly to it, all others through tonic's router
//! - [`metering`]: counts calls, messages and bytes, and traces slow calls
//! - [`unary`]: reads the one request of a unary call and builds the response
//! - [`request_limits`]: refuses requests with far too many fields before they are decoded
//! - [`response_body`]: sends a small response in one frame and a large one in pieces
//! - [`frame`]: gRPC's framing of messages

pub(super) mod frame;
pub(super) mod metering;
pub mod request_limits;
pub mod response_body;
pub(super) mod router;
pub(super) mod unary;
