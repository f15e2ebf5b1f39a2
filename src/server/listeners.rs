//! The addresses of a server: binds them and serves at them.

use std::sync::Arc;

use hyper_util::service::TowerToHyperService;
use tokio::{sync::watch, task::JoinSet};
use tonic::service::Routes;

use crate::{
    api,
    config::{Settings, Urls},
    console::embedded::Page,
    http::{self, Starting},
    net::{self, ConnectionLimit, Listener, tls},
};
use orlop_core::{overload::Steps, supervise::vital};

/// The bound addresses.
pub(super) struct Listeners {
    /// gRPC, and HTTP unless `http` has addresses.
    pub(super) clients: Vec<Listener>,
    pub(super) http: Vec<Listener>,
    metrics: Vec<Listener>,
    pub(super) metrics_urls: String,
    /// The web page.
    console: Vec<Listener>,
}

impl Listeners {
    pub(super) async fn bind(settings: &Settings, tls: Option<&Arc<tls::Acceptor>>) -> Result<Self, String> {
        let bind = async |urls: &Urls| Listener::bind_all(&urls.0, tls, settings.unix_socket_mode).await;
        let metrics = bind(&settings.listen_metrics_urls).await?;
        Ok(Self {
            clients: bind(&settings.listen_client_urls).await?,
            http: bind(&settings.listen_client_http_urls).await?,
            metrics_urls: urls(&metrics),
            metrics,
            console: bind(&settings.console_listen_url).await?,
        })
    }

    /// Serves the web page at its addresses, if there are any, until `stopping` becomes true.
    pub(super) fn serve_console(
        &mut self,
        settings: &Settings,
        endpoints: &http::Settings,
        services: &api::Router,
        stopping: &watch::Receiver<bool>,
        servers: &mut JoinSet<()>,
    ) -> Result<(), String> {
        let listeners = std::mem::take(&mut self.console);
        let about = self.clients.first().and_then(|listener| listener.urls.first()).cloned();
        let services = services.clone().with(http::console_routes(services.routes(), endpoints));
        let page = Page {
            services: &services,
            about,
            allowed_hosts: &settings.console_allowed_hosts.0,
            password_file: &settings.console_password_file,
        };
        let settings = connections(settings, ConnectionLimit::for_pages(), endpoints.store.steps());
        page.serve(listeners, &settings, stopping, servers)
    }

    /// Serves at all other addresses until `stopping` becomes true.
    pub(super) fn serve(
        self,
        settings: &Settings,
        endpoints: &http::Settings,
        services: api::Router,
        http: Routes,
        stopping: &watch::Receiver<bool>,
        servers: &mut JoinSet<()>,
    ) {
        let page = (!settings.console_listen_url.0.is_empty()).then(ConnectionLimit::for_pages);
        let clients = connections(settings, ConnectionLimit::for_clients(page.as_ref()), endpoints.store.steps());
        for listener in self.clients {
            servers.spawn(listener.serve(services.clone(), clients.clone(), stopping.clone()));
        }
        for listener in self.http {
            let service = TowerToHyperService::new(http.clone());
            servers.spawn(listener.serve(service, clients.clone(), stopping.clone()));
        }
    }

    /// Serves probes and metrics at their addresses, from the beginning of a start on, until `stopping` becomes true.
    pub(super) fn serve_probes(
        &mut self,
        settings: &Settings,
        starting: &Starting,
        stopping: &watch::Receiver<bool>,
        servers: &mut JoinSet<()>,
    ) {
        // Probes have a separate queue, so that the load of clients does not delay them.
        let (probe_steps, grant_steps) = Steps::new();
        vital("the step scheduler for probes", grant_steps);
        for listener in std::mem::take(&mut self.metrics) {
            let probes = connections(settings, ConnectionLimit::for_metrics(), &probe_steps);
            let service = TowerToHyperService::new(starting.routes());
            servers.spawn(listener.serve(service, probes, stopping.clone()));
        }
    }
}

pub(super) fn urls(listeners: &[Listener]) -> String {
    let urls: Vec<String> = listeners.iter().flat_map(|listener| &listener.urls).map(ToString::to_string).collect();
    urls.join(",")
}

fn connections(settings: &Settings, connection_limit: ConnectionLimit, steps: &Arc<Steps>) -> net::Settings {
    net::Settings {
        // As in etcd, 0 means no limit.
        max_concurrent_streams: match settings.max_concurrent_streams {
            0 => u32::MAX,
            count => count,
        },
        keepalive_interval: settings.grpc_keepalive_interval.0,
        keepalive_timeout: settings.grpc_keepalive_timeout.0,
        connection_limit,
        steps: Arc::clone(steps),
    }
}
