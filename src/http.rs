//! Plain HTTP on the same ports as gRPC: `/version`, health, metrics, `/debug` and the JSON gateway.
//!
//! These endpoints only call [`crate::api`] and [`orlop_core::store`]; no behaviour of etcd is implemented here.

mod access;
mod debug;
pub mod gateway;
mod health;
mod metrics;
mod starting;
mod version;

use std::sync::Arc;

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderName, StatusCode, header},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse as _, Response},
};
use tonic::{Status, service::Routes};
use tower::ServiceExt as _;

pub use self::{access::Access, debug::Pprof, starting::Starting};
use crate::net::tls::Acceptor;
use orlop_core::{
    overload::PartialRequests,
    store::Store,
    supervise::{catch_panics, log_request_panic},
};

/// Keeps browsers from guessing another content type.
const NO_SNIFF: (HeaderName, &str) = (HeaderName::from_static("x-content-type-options"), "nosniff");

/// What the endpoints need besides the services.
#[derive(Clone)]
pub struct Settings {
    pub store: Arc<Store>,
    /// The source of the certificate in the metrics; `None` without TLS.
    pub tls: Option<Arc<Acceptor>>,
    pub pprof: Pprof,
    pub access: Access,
    /// Maximum size of a gRPC message with keys and values in bytes.
    pub max_message_bytes: usize,
}

/// The routes for clients.
pub struct ClientRoutes {
    /// For `listen-client-urls`: gRPC, and HTTP unless it has its own addresses.
    pub main: Routes,
    /// For `listen-client-http-urls`: HTTP.
    pub http: Routes,
}

/// Returns the routes for clients. `has_http_urls`: HTTP has its own addresses.
///
/// # Errors
///
/// If the compiled-in descriptors cannot be read.
pub fn routes(
    grpc: Routes,
    settings: &Settings,
    partial_requests: Arc<PartialRequests>,
    has_http_urls: bool,
) -> Result<ClientRoutes, prost_reflect::DescriptorError> {
    let grpc = grpc.into_axum_router();
    let access = match &settings.tls {
        Some(tls) if tls.verifies_clients() => settings.access.with_client_certificates(),
        Some(_) | None => settings.access.clone(),
    };
    let access = Arc::new(access);
    let gateway = gateway::routes(grpc.clone(), partial_requests, settings.max_message_bytes)?;
    let clients_only = with_common_layers(gateway.merge(debug::routes(settings.pprof)), settings, &access);
    let http = http(settings, &access).merge(clients_only);
    let main = if has_http_urls { grpc } else { grpc.merge(http.clone()) };
    Ok(ClientRoutes { main: with_fallback(main, &access), http: with_fallback(http, &access) })
}

/// Returns the services that the web page of this server uses: gRPC, metrics and health.
pub fn console_routes(grpc: Routes, settings: &Settings) -> Routes {
    let access = Arc::new(settings.access.for_probes());
    with_fallback(grpc.into_axum_router().merge(http(settings, &access)), &access)
}

/// Returns the endpoints for probes and Prometheus, for a separate address.
pub fn probe_routes(settings: &Settings) -> Routes {
    let access = Arc::new(settings.access.for_probes());
    with_fallback(http(settings, &access), &access)
}

fn http(settings: &Settings, access: &Arc<Access>) -> Router {
    let endpoints = Router::new()
        .merge(version::routes())
        .merge(metrics::routes(settings))
        .merge(health::routes(Arc::clone(&settings.store)));
    with_common_layers(endpoints, settings, access)
}

fn with_common_layers(endpoints: Router, settings: &Settings, access: &Arc<Access>) -> Router {
    endpoints
        .layer(from_fn_with_state(Arc::clone(access), access::control))
        .layer(from_fn_with_state(Arc::clone(&settings.store), respond_to_panics))
}

/// Returns an error response if a request panics. Panics of gRPC calls are handled by the API's metering.
async fn respond_to_panics(State(store): State<Arc<Store>>, request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    match catch_panics(next.run(request)).await {
        Ok(response) => response,
        Err(panic) => {
            log_request_panic(&store.metrics().rpc.panics, &path, &panic);
            (StatusCode::INTERNAL_SERVER_ERROR, "internal error; see the server's log\n").into_response()
        }
    }
}

/// Responds to requests for unknown paths: with a gRPC status to a gRPC request, otherwise with 404.
fn with_fallback(endpoints: Router, access: &Arc<Access>) -> Routes {
    let control = from_fn_with_state(Arc::clone(access), access::control);
    let pages = Router::new().fallback(async || not_found()).layer(control);
    endpoints.fallback(move |request: Request| unknown_path(pages.clone(), request)).into()
}

async fn unknown_path(pages: Router, request: Request) -> Response {
    let kind = request.headers().get(header::CONTENT_TYPE);
    if kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc")) {
        return Status::unimplemented("unknown service or method").into_http();
    }
    let Ok(response) = pages.oneshot(request).await;
    response
}

fn not_found() -> Response {
    (StatusCode::NOT_FOUND, "404 page not found\n").into_response()
}
