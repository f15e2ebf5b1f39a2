//! etcd's messages and services, generated from `proto/`.
//!
//! The server uses [`server`], in which stored key-value pairs and events are `bytes` fields that contain encoded
//! messages (see `build.rs`). Clients (the commands, the web page, `orlop bench` and the tests) use [`client`], the
//! plain types. Both have the same wire format.

#![allow(clippy::all, clippy::pedantic, missing_docs, rustdoc::all, reason = "generated code")]

/// Encoded `FileDescriptorSet` of every proto file, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

macro_rules! packages {
    ($set:literal, $($package:ident),+) => {
        $(pub mod $package {
            include!(concat!(env!("OUT_DIR"), "/", $set, "/", stringify!($package), ".rs"));
        })+
    };
}

pub mod server {
    packages!("server", mvccpb, authpb, leasepb, etcdserverpb, v3lockpb, v3electionpb, orlopb);
}

pub mod client {
    packages!("client", mvccpb, authpb, leasepb, etcdserverpb, v3lockpb, v3electionpb, orlopb);
}
