//! The headers that the gateway passes on to the services.

use axum::http::{HeaderMap, HeaderName, header};
use tonic::Status;

use crate::api::grpc::deadline;

/// gRPC's header with the time that a client waits.
const TIMEOUT: &str = "grpc-timeout";
/// Start of the names of headers that are passed on without it.
const PREFIX: &str = "grpc-metadata-";

/// Returns the gRPC metadata: the headers `authorization` and `grpc-timeout`, and those with the prefix `grpc-metadata-`.
///
/// # Errors
///
/// If the timeout is one that the services would ignore. The text is etcd's.
pub(super) fn metadata(headers: &HeaderMap) -> Result<HeaderMap, Status> {
    let mut metadata = HeaderMap::new();
    for (name, value) in headers {
        if name == TIMEOUT && value.to_str().ok().and_then(deadline::parse).is_none() {
            let text = String::from_utf8_lossy(value.as_bytes());
            return Err(Status::invalid_argument(format!("invalid grpc-timeout: {text}")));
        }
        let name = match name.as_str().strip_prefix(PREFIX) {
            Some(name) => HeaderName::try_from(name).ok(),
            None => (name == header::AUTHORIZATION || name == TIMEOUT).then(|| name.clone()),
        };
        if let Some(name) = name {
            metadata.append(name, value.clone());
        }
    }
    Ok(metadata)
}
