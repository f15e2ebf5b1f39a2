//! Generates two sets of Rust types from `proto/`, with protox instead of protoc.
//!
//! The client set has the plain types. In the server set, the fields that contain stored key-value pairs have the type
//! `bytes`. On the wire an embedded message and a byte string are the same (tag, length, content), so the server sends
//! stored pairs and events without decoding and encoding them again.

use std::{env, error::Error, path::PathBuf};

use prost::Message as _;
use prost_types::{FileDescriptorSet, field_descriptor_proto::Type};

const PROTOS: &[&str] = &[
    "mvccpb/kv.proto",
    "authpb/auth.proto",
    "leasepb/lease.proto",
    "etcdserverpb/rpc.proto",
    "v3lockpb/v3lock.proto",
    "v3electionpb/v3election.proto",
    "orlopb/archive.proto",
    "orlopb/history.proto",
    "orlopb/insight.proto",
];

/// Fields of the server set that contain encoded messages: (message, field).
const ENCODED_FIELDS: [(&str, &str); 7] = [
    ("RangeResponse", "kvs"),
    ("PutResponse", "prev_kv"),
    ("DeleteRangeResponse", "prev_kvs"),
    ("WatchResponse", "events"),
    ("HistoryPairsResponse", "kvs"),
    ("HistoryChange", "kv"),
    ("ArchivedRow", "kv"),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=../../proto");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let plain = protox::compile(PROTOS, ["../../proto"])?;
    std::fs::write(out.join("descriptors.bin"), plain.encode_to_vec())?;

    let encoded = with_encoded_fields(plain.clone());
    for (name, descriptors, server) in [("server", encoded, true), ("client", plain, false)] {
        let dir = out.join(name);
        std::fs::create_dir_all(&dir)?;
        tonic_prost_build::configure()
            .out_dir(&dir)
            .build_server(server)
            .build_client(!server)
            .bytes(".")
            .compile_fds(descriptors)?;
    }
    Ok(())
}

fn with_encoded_fields(mut set: FileDescriptorSet) -> FileDescriptorSet {
    let messages = set
        .file
        .iter_mut()
        .filter(|file| ["etcdserverpb", "orlopb"].contains(&file.package()))
        .flat_map(|file| file.message_type.iter_mut());
    let mut changed = 0;
    for message in messages {
        let name = message.name().to_owned();
        for field in &mut message.field {
            if ENCODED_FIELDS.contains(&(name.as_str(), field.name())) {
                field.set_type(Type::Bytes);
                field.type_name = None;
                changed += 1;
            }
        }
    }
    assert_eq!(changed, ENCODED_FIELDS.len(), "every field of ENCODED_FIELDS exists in proto/");
    set
}
