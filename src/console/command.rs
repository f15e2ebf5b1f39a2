//! `orlop console`: the page in a process of its own.

use std::{path::PathBuf, sync::Arc, time::Duration};

use hyper_util::service::TowerToHyperService;
use orlop_client::ServerFlags;
use orlop_core::{overload::Steps, supervise::vital};
use tokio::{sync::watch, time::timeout};

use super::{
    Console,
    backend::Place,
    embedded::announce,
    limits::{CONNECTION_REQUESTS_MAX, KEEPALIVE_INTERVAL},
    routes,
};
use crate::{
    config::{FileMode, HostName, List, ListenUrl, Scheme, Tls, TlsVersion},
    net::{self, ConnectionLimit, Listener, tls},
};

/// Maximum time for browsers to receive their last responses when the process stops.
const DRAIN_MAX: Duration = Duration::from_secs(2);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Address of the page: http://HOST:PORT, https://HOST:PORT or unix://PATH
    #[arg(long, default_value = "http://127.0.0.1:2382", value_name = "URL")]
    listen_url: ListenUrl,

    /// Names, without ports, under which browsers may request the page, in addition to localhost and the address,
    /// separated by commas
    #[arg(long, default_value = "", value_name = "HOSTS", hide_default_value = true)]
    console_allowed_hosts: List<HostName>,

    /// File with the password of the page, with which visitors log in where the server has no users; without it, such a
    /// page only reads
    #[arg(long, value_name = "FILE")]
    console_password_file: Option<PathBuf>,

    /// Certificate of the page for https, PEM
    #[arg(long, requires = "key_file", value_name = "FILE")]
    cert_file: Option<PathBuf>,

    /// Private key of the certificate, PEM
    #[arg(long, requires = "cert_file", value_name = "FILE")]
    key_file: Option<PathBuf>,

    #[command(flatten)]
    server: ServerFlags,
}

impl Args {
    fn tls(&self) -> Result<Option<Arc<tls::Acceptor>>, String> {
        let (Some(cert_file), Some(key_file)) = (self.cert_file.clone(), self.key_file.clone()) else {
            return Ok(None);
        };
        let files = Tls {
            cert_file,
            key_file,
            self_signed: None,
            clients: None,
            versions: (TlsVersion::Tls12, TlsVersion::Tls13),
            cipher_suites: Vec::new(),
        };
        Ok(Some(Arc::new(tls::Acceptor::new(files)?)))
    }
}

/// Serves the page until `shutdown` completes. The server need not run yet.
///
/// # Errors
///
/// If the address cannot be bound, or a file cannot be read.
pub async fn run(args: Args, shutdown: impl Future<Output = ()>) -> Result<(), Box<dyn std::error::Error>> {
    let tls = args.tls()?;
    if args.listen_url.scheme() == Scheme::Tls && tls.is_none() {
        return Err(
            format!("{} requires a certificate and its key: set --cert-file and --key-file", args.listen_url).into()
        );
    }
    let mut listeners =
        Listener::bind_all(std::slice::from_ref(&args.listen_url), tls.as_ref(), FileMode(0o600)).await?;
    let Some(listener) = listeners.pop() else { return Err("there is no address".into()) };
    let listen = listener.urls.first().unwrap_or(&args.listen_url).clone();
    let (stop, stopping) = watch::channel(false);
    let hosts = args.console_allowed_hosts.0.clone();
    let password_file = args.console_password_file.unwrap_or_default();
    let place = Place::Remote(Box::new(args.server));
    let console = Console::new(place, &listen, &hosts, &password_file, stopping.clone())?;
    let (steps, grant_steps) = Steps::new();
    vital("the step scheduler", grant_steps);
    let settings = net::Settings {
        max_concurrent_streams: CONNECTION_REQUESTS_MAX,
        keepalive_interval: KEEPALIVE_INTERVAL,
        keepalive_timeout: KEEPALIVE_TIMEOUT,
        connection_limit: ConnectionLimit::for_pages(),
        steps,
    };
    let service = TowerToHyperService::new(routes(console));
    let serving = tokio::spawn(listener.serve(service, settings, stopping));
    announce(&listen);
    shutdown.await;
    stop.send_replace(true);
    // Connections that are still open end with the process.
    let _ = timeout(DRAIN_MAX, serving).await;
    Ok(())
}
