//! Routes calls: calls of the KV service directly to that service, all others through tonic's router.
//!
//! tonic's router matches the path against all registered paths and boxes the bodies several times. This was a tenth of
//! the CPU time of a put (docs/adr/0008).

use std::{
    convert::Infallible,
    future::{Ready, ready},
    pin::Pin,
    task::{Context, Poll},
};

use http::{HeaderMap, Method, Request, Response, StatusCode, Version, header::CONTENT_TYPE};
use http_body_util::Either;
use hyper::body::Incoming;
use tonic::{body::Body, service::Routes};
use tower::Service as _;

use super::metering::{Metered, MeteredCall, SentBody};
use crate::api::kv::KvService;

const KV: &str = "/etcdserverpb.KV/";

/// All services of a server. Cloned for every call.
#[derive(Clone)]
pub struct Router {
    kv: Metered<KvService>,
    others: Routes,
}

impl Router {
    pub(in crate::api) fn new(kv: Metered<KvService>, others: Routes) -> Self {
        Self { kv, others }
    }

    /// Returns tonic's router, which contains all services.
    pub fn routes(&self) -> Routes {
        self.others.clone()
    }

    /// Replaces tonic's router.
    pub fn with(self, others: Routes) -> Self {
        Self { others: others.prepare(), ..self }
    }
}

impl hyper::service::Service<Request<Incoming>> for Router {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = Call;

    fn call(&self, request: Request<Incoming>) -> Call {
        let path = request.uri().path();
        if is_method(path) && !is_grpc(&request) {
            let mut response = Response::new(Body::new("404 page not found\n".to_owned()));
            *response.status_mut() = StatusCode::NOT_FOUND;
            Call::Refused(ready(Ok(response)))
        } else if path.starts_with(KV) {
            Call::Kv(self.kv.clone().call(request))
        } else {
            Call::Others(Box::new(self.others.clone().call(request)))
        }
    }
}

/// Returns whether a path is that of a gRPC method: its first part contains a dot, which no path of HTTP has there.
fn is_method(path: &str) -> bool {
    let mut parts = path.split('/').skip(1);
    parts.next().is_some_and(|service| service.contains('.')) && parts.next().is_some()
}

/// Returns whether a request is a call of gRPC. A method answers no other request: a browser sends those to any server,
/// for every web page that asks it to.
fn is_grpc<B>(request: &Request<B>) -> bool {
    request.version() == Version::HTTP_2 && request.method() == Method::POST && has_grpc_type(request.headers())
}

/// gRPC-Web has a type of its own.
fn has_grpc_type(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.as_bytes().strip_prefix(b"application/grpc"));
    kind.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
}

type ResponseBody = Either<Either<SentBody<Body>, Body>, Body>;

/// A call until its response begins.
pub enum Call {
    Kv(MeteredCall<Body>),
    Others(Box<<Routes as tower::Service<Request<Incoming>>>::Future>),
    Refused(Ready<Result<Response<Body>, Infallible>>),
}

impl Future for Call {
    type Output = Result<Response<ResponseBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::Kv(served) => Pin::new(served).poll(context).map_ok(|response| response.map(Either::Left)),
            Self::Others(served) => Pin::new(served).poll(context).map_ok(|response| response.map(Either::Right)),
            Self::Refused(served) => Pin::new(served).poll(context).map_ok(|response| response.map(Either::Right)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_grpc_reaches_methods() {
        for (path, want) in [
            ("/etcdserverpb.KV/Put", true),
            ("/grpc.health.v1.Health/Check", true),
            ("/etcdserverpb.KV", false),
            ("/v3/kv/put", false),
            ("/health", false),
            ("/", false),
        ] {
            assert_eq!(is_method(path), want, "{path}");
        }
        for (version, method, kind, want) in [
            (Version::HTTP_2, "POST", "application/grpc", true),
            (Version::HTTP_2, "POST", "application/grpc+proto", true),
            (Version::HTTP_2, "POST", "application/grpc;x=y", true),
            (Version::HTTP_2, "POST", "application/grpc-web", false),
            (Version::HTTP_2, "POST", "text/plain", false),
            (Version::HTTP_2, "PUT", "application/grpc", false),
            (Version::HTTP_11, "POST", "application/grpc", false),
        ] {
            let request =
                Request::builder().version(version).method(method).header(CONTENT_TYPE, kind).body(()).unwrap();
            assert_eq!(is_grpc(&request), want, "{version:?} {method} {kind}");
        }
    }
}
