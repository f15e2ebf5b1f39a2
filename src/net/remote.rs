//! The address of a client, for the log of requests.

use std::sync::Arc;

use http::Request;
use hyper::service::Service;
use orlop_core::trace;

/// The address of a client; `@` on a unix socket.
#[derive(Clone, Debug)]
pub struct Remote(Arc<str>);

impl Remote {
    pub(super) fn new(address: &str) -> Self {
        Self(address.into())
    }

    pub fn text(&self) -> &str {
        &self.0
    }
}

/// Services of one connection. If requests are logged, each request gets the client's address as an extension.
pub(super) struct WithRemote<S> {
    services: S,
    remote: Remote,
}

impl<S> WithRemote<S> {
    pub(super) fn new(services: S, remote: Remote) -> Self {
        Self { services, remote }
    }
}

impl<S: Service<Request<B>>, B> Service<Request<B>> for WithRemote<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn call(&self, mut request: Request<B>) -> S::Future {
        if trace::are_requests_logged() {
            request.extensions_mut().insert(self.remote.clone());
        }
        self.services.call(request)
    }
}
