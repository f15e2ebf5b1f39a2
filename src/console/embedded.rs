//! The page in a server, about itself.
//!
//! The server connects to itself through a pipe in memory, without TLS and addresses, so that it needs no certificate of
//! its own. Such a connection has no client certificate: a user is known only by a token.

use std::{path::Path, sync::Arc};

use hyper::server::conn::http2;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use orlop_client::{Address, Endpoint};
use tokio::{io::DuplexStream, sync::watch, task::JoinSet};
use tracing::info;

use super::{
    Console,
    backend::{Place, ServePipe},
    limits::{CONNECTION_REQUESTS_MAX, KEEPALIVE_INTERVAL},
    routes,
};
use crate::{
    api,
    config::{HostName, ListenUrl, Scheme},
    logging,
    net::{self, Listener},
};

/// The page of a server.
pub struct Page<'a> {
    /// The services of the server, with `/metrics`.
    pub services: &'a api::Router,
    /// An address of the server, which the page shows as its name.
    pub about: Option<ListenUrl>,
    pub allowed_hosts: &'a [HostName],
    /// Empty: the page has no password.
    pub password_file: &'a Path,
}

impl Page<'_> {
    /// Serves the page at all addresses until `stopping` becomes true.
    ///
    /// # Errors
    ///
    /// If there are no random numbers, or the file with the password cannot be used.
    pub fn serve(
        &self,
        listeners: Vec<Listener>,
        settings: &net::Settings,
        stopping: &watch::Receiver<bool>,
        servers: &mut JoinSet<()>,
    ) -> Result<(), String> {
        // The server's own settings are for clients, which may send any number of calls and be idle for any time.
        let settings = net::Settings {
            max_concurrent_streams: settings.max_concurrent_streams.min(CONNECTION_REQUESTS_MAX),
            keepalive_interval: KEEPALIVE_INTERVAL,
            ..settings.clone()
        };
        for listener in listeners {
            let Some(listen) = listener.urls.first().cloned() else { continue };
            let console =
                Console::new(self.place(), &listen, self.allowed_hosts, self.password_file, stopping.clone())?;
            announce(&listen);
            let service = TowerToHyperService::new(routes(console));
            servers.spawn(listener.serve(service, settings.clone(), stopping.clone()));
        }
        Ok(())
    }

    fn place(&self) -> Place {
        let services = self.services.clone();
        let serve: ServePipe = Arc::new(move |pipe: DuplexStream| {
            let connection = http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .serve_connection(TokioIo::new(pipe), services.clone());
            // It ends with the pipe, and an error ends the pipe, too.
            tokio::spawn(async { drop(connection.await) });
        });
        Place::Local(self.about.as_ref().map_or_else(Endpoint::default, endpoint), serve)
    }
}

/// Prints the address of the page, with the actual port if port 0 was requested.
pub(super) fn announce(url: &ListenUrl) {
    info!(%url, "serving the web page");
    logging::print(&format!("orlop: the web page is at {url}"));
}

fn endpoint(url: &ListenUrl) -> Endpoint {
    let address = match url {
        ListenUrl::Tcp(address, _) => Address::Tcp(address.clone()),
        ListenUrl::Unix(path, _) => Address::Unix(path.clone()),
    };
    Endpoint { address, has_tls: url.scheme() == Scheme::Tls }
}
