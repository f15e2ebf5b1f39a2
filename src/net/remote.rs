//! The other side of a connection: the address of the client, and the user of its certificate.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use http::{Request, Version};
use hyper::service::Service;
use orlop_core::{
    auth::{Credential, Identity},
    trace,
};

use crate::config::Scheme;

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

/// The user whom the common name of a client's verified certificate names. Shared by all requests of the connection.
#[derive(Clone, Debug)]
pub struct CertificateUser(pub Arc<Identity>);

impl CertificateUser {
    pub(super) fn new(user: String) -> Self {
        Self(Arc::new(Identity { user, credential: Credential::Certificate }))
    }
}

/// Marks requests of HTTP/1 that arrive with TLS.
#[derive(Clone, Copy, Debug)]
pub struct WithTls;

/// The start of the paths of calls that check or hash a password, over gRPC and through the gateway. The rest of a path
/// of the gateway may be percent-encoded, so it is not compared.
const PASSWORD_PATHS: [&str; 3] = ["/etcdserverpb.Auth/", "/v3/", "/v3beta/"];

/// The other side of a connection.
pub(super) struct Client {
    pub(super) remote: Remote,
    pub(super) certificate: Option<CertificateUser>,
    pub(super) scheme: Scheme,
}

/// Services of one connection. Requests get the user of the client's certificate as an extension, if there is one, and
/// the client's address, if requests are logged or the request may need it to check or hash a password.
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
        if let Some(user) = &self.client.certificate {
            request.extensions_mut().insert(user.clone());
        }
        let path = request.uri().path();
        if trace::are_requests_logged() || PASSWORD_PATHS.iter().any(|start| path.starts_with(start)) {
            request.extensions_mut().insert(self.client.remote.clone());
        }
        // With HTTP/2, the request itself names its scheme.
        if self.client.scheme == Scheme::Tls && request.version() < Version::HTTP_2 {
            request.extensions_mut().insert(WithTls);
        }
        self.services.call(request)
    }
}
