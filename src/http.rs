//! Plain HTTP on the same ports as gRPC: `/version`, health, metrics, `/debug` and the JSON gateway.
//!
//! These endpoints only call [`crate::api`] and [`orlop_core::store`]; no behaviour of etcd is implemented here.

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
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
    middleware::{Next, from_fn, from_fn_with_state, map_response},
    response::{IntoResponse as _, Response},
};
use tonic::{Status, service::Routes};

pub use self::{debug::Pprof, starting::Starting};
use crate::net::tls::Acceptor;
use orlop_core::{
    overload::PartialRequests,
    store::Store,
    supervise::{catch_panics, log_request_panic},
};

/// What the endpoints need besides the services.
#[derive(Clone)]
pub struct Settings {
    pub store: Arc<Store>,
    /// The source of the certificate in the metrics; `None` without TLS.
    pub tls: Option<Arc<Acceptor>>,
    pub pprof: Pprof,
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
    let gateway = gateway::routes(grpc.clone(), partial_requests, settings.max_message_bytes)?;
    let clients_only = with_common_layers(gateway.merge(debug::routes(settings.pprof)), settings);
    let http = http(settings).merge(clients_only);
    let main = if has_http_urls { grpc } else { grpc.merge(http.clone()) };
    Ok(ClientRoutes { main: main.fallback(unknown_path).into(), http: http.fallback(unknown_path).into() })
}

/// Returns the services that the web page of this server uses: gRPC, metrics and health.
pub fn console_routes(grpc: Routes, settings: &Settings) -> Routes {
    grpc.into_axum_router().merge(http(settings)).fallback(unknown_path).into()
}

/// Returns the endpoints for probes and Prometheus, for a separate address.
pub fn probe_routes(settings: &Settings) -> Routes {
    Routes::from(http(settings).fallback(unknown_path))
}

fn http(settings: &Settings) -> Router {
    let endpoints = Router::new()
        .merge(version::routes())
        .merge(metrics::routes(settings))
        .merge(health::routes(Arc::clone(&settings.store)));
    with_common_layers(endpoints, settings)
}

fn with_common_layers(endpoints: Router, settings: &Settings) -> Router {
    endpoints
        .layer(from_fn(respond_to_preflights))
        .layer(map_response(allow_all_origins))
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

/// Browsers ask with OPTIONS before they send a request to another origin. etcd answers it at every path.
async fn respond_to_preflights(request: Request, next: Next) -> Response {
    if request.method() == Method::OPTIONS { StatusCode::OK.into_response() } else { next.run(request).await }
}

/// Adds the headers that allow requests from all origins, the default of etcd's `--cors`.
async fn allow_all_origins(mut response: Response) -> Response {
    const HEADERS: [(HeaderName, HeaderValue); 3] = [
        (header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*")),
        (header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("POST, GET, OPTIONS, PUT, DELETE")),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("accept, content-type, authorization")),
    ];
    response.headers_mut().extend(HEADERS);
    response
}

/// Responds to a request for an unknown path: with a gRPC status to a gRPC request, otherwise with 404.
async fn unknown_path(headers: HeaderMap) -> Response {
    let is_grpc =
        headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    if is_grpc {
        Status::unimplemented("unknown service or method").into_http()
    } else {
        allow_all_origins(not_found()).await
    }
}

fn not_found() -> Response {
    (StatusCode::NOT_FOUND, "404 page not found\n").into_response()
}
