//! etcd's messages and services, generated from `proto/`.
//!
//! [`server`] is what Orlop answers with: stored pairs and events are `bytes` fields there, filled with what is already
//! encoded (see `build.rs`). [`client`] is the plain set, for `orlop bench` and the tests. Both have the same wire form.

#![allow(clippy::all, clippy::pedantic, missing_docs, rustdoc::all, reason = "generated code")]

/// Serialised `FileDescriptorSet` of every proto file, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

macro_rules! packages {
    ($set:literal, $($package:ident),+) => {
        $(pub mod $package {
            include!(concat!(env!("OUT_DIR"), "/", $set, "/", stringify!($package), ".rs"));
        })+
    };
}

pub mod server {
    packages!("server", mvccpb, authpb, etcdserverpb, v3lockpb, v3electionpb);
}

pub mod client {
    packages!("client", mvccpb, authpb, etcdserverpb, v3lockpb, v3electionpb);
}
