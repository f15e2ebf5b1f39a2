//! What clients, probes and dashboards ask for by plain HTTP, on the same ports as gRPC: `/version`, health, metrics and the
//! JSON gateway.
//!
//! Everything here is a client of [`crate::api`] or [`crate::store`]; nothing of etcd's behaviour is decided here.

mod version;

use axum::{
    Router,
    http::{HeaderMap, StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse as _, Response},
};
use tonic::{Status, service::Routes};

/// The gRPC services and all HTTP endpoints.
pub fn routes(grpc: Routes) -> Routes {
    let http = Router::new().merge(version::routes());
    Routes::from(grpc.into_axum_router().merge(http).fallback(unknown))
}

/// What nobody serves, answered in the language of the question.
async fn unknown(headers: HeaderMap) -> Response {
    let is_grpc = headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    if is_grpc {
        Status::unimplemented("unknown service or method").into_http()
    } else {
        (StatusCode::NOT_FOUND, "404 page not found\n").into_response()
    }
}
