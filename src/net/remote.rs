//! The other side of a connection: the address of the client, and the name in its certificate.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

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

    pub fn ip(&self) -> Option<IpAddr> {
        self.0.parse::<SocketAddr>().ok().map(|address| address.ip())
    }
}

/// The common name of a client's verified certificate.
#[derive(Clone, Debug)]
pub struct CertificateName(pub Arc<str>);

/// The end of the paths of calls that check a password, over gRPC and through the gateway.
const LOG_IN: &str = "uthenticate";

/// The other side of a connection.
pub(super) struct Client {
    pub(super) remote: Remote,
    pub(super) certificate: Option<CertificateName>,
}

/// Services of one connection. Requests get the name in the client's certificate as an extension, if there is one, and
/// the client's address, if requests are logged or the request checks a password.
pub(super) struct WithClient<S> {
    services: S,
    client: Client,
}

impl<S> WithClient<S> {
    pub(super) fn new(services: S, client: Client) -> Self {
        Self { services, client }
    }
}

impl<S: Service<Request<B>>, B> Service<Request<B>> for WithClient<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn call(&self, mut request: Request<B>) -> S::Future {
        if let Some(name) = &self.client.certificate {
            request.extensions_mut().insert(name.clone());
        }
        if trace::are_requests_logged() || request.uri().path().ends_with(LOG_IN) {
            request.extensions_mut().insert(self.client.remote.clone());
        }
        self.services.call(request)
    }
}
