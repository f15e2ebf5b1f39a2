//! The composition root: opens the log and the store, binds the listeners, serves, drains. The only module that knows all
//! the others.

use std::{fmt, io::Write as _, path::Path, sync::Arc, time::Duration};

use tokio::{
    net::{TcpListener, UnixListener, UnixStream},
    sync::watch,
    task::JoinSet,
    time::timeout,
};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{
    service::Routes,
    transport::{Server, server::TcpIncoming},
};
use tracing::{info, warn};

use crate::{
    api,
    config::{Datastore, ListenUrl, MetricsDetail, Retention, Settings},
    http,
    log::{Log, PostgresLog, PostgresSettings, SqliteLog},
    metrics::{self, Metrics},
    store::{self, AutoCompaction, Pace, Patience, Store},
};

/// How long clients have to finish their requests once the server goes down.
const DRAIN_MAX: Duration = Duration::from_secs(5);
/// What a client may send on a stream, and on a connection, before it is read. Bytes.
const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// As etcd: a connection that is silent for this long is asked whether it is still there.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2 * 60 * 60);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Why the server did not start or stopped by itself; a text for the operator.
#[derive(Debug)]
pub struct Error(String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Error {}

/// Serves until `shutdown` is done, then drains: writes that were taken are finished and answered, streams end with a
/// status, and the log is closed.
///
/// # Errors
///
/// If an address cannot be bound or the database cannot be opened or read.
pub async fn serve(settings: Settings, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let mut listeners = Vec::new();
    for url in &settings.listen_client_urls.0 {
        listeners.push(Listener::bind(url).await?);
    }
    let metrics = Arc::new(Metrics::new(match settings.metrics {
        MetricsDetail::Basic => metrics::Detail::Basic,
        MetricsDetail::Extensive => metrics::Detail::Extensive,
    }));
    let store = Arc::new(open_store(&settings, advertised_urls(&settings, &listeners), metrics).await?);

    let (stop, stopping) = watch::channel(false);
    let routes = api::routes(Arc::clone(&store), api_settings(&settings), stopping.clone())
        .map_err(|error| Error(format!("cannot build the services: {error}")))?;
    let routes = http::routes(routes, &store);
    let mut servers = JoinSet::new();
    for listener in listeners {
        announce(&listener.url);
        servers.spawn(listener.serve(routes.clone(), stopping.clone()));
    }
    drop(routes);

    let mut outcome = Ok(());
    tokio::select! {
        () = shutdown => info!("going down"),
        failure = store.failed() => outcome = Err(Error(format!("the log has another history than this instance: {failure}"))),
        Some(ended) = servers.join_next() => outcome = Err(Error(match ended {
            Ok(Ok(())) => "a listener ended by itself".to_owned(),
            Ok(Err(error)) => format!("a listener failed: {error}"),
            Err(error) => format!("a listener failed: {error}"),
        })),
    }
    stop.send_replace(true);
    if timeout(DRAIN_MAX, async { while servers.join_next().await.is_some() {} }).await.is_err() {
        warn!("some clients did not finish in time; closing their connections");
        servers.shutdown().await;
    }
    store.stop().await;
    info!("stopped");
    outcome
}

fn advertised_urls(settings: &Settings, listeners: &[Listener]) -> Vec<String> {
    match settings.advertise_client_urls.0.as_slice() {
        [] => listeners.iter().map(|listener| listener.url.to_string()).collect(),
        urls => urls.iter().map(ToString::to_string).collect(),
    }
}

/// Opens the log and reads it.
async fn open_store(settings: &Settings, client_urls: Vec<String>, metrics: Arc<Metrics>) -> Result<Store, Error> {
    let store_settings = store::Settings {
        value_cache_bytes: settings.value_cache_bytes,
        poll_interval: settings.datastore_poll_interval.0,
        name: settings.member_name(),
        client_urls: client_urls.clone(),
        metrics,
        patience: Patience {
            apply: settings.warning_apply_duration.0,
            request: settings.warning_unary_request_duration.0,
        },
        quota_bytes: settings.quota_backend_bytes,
        auto_compaction: settings.auto_compaction().map_err(Error)?.map(|retention| match retention {
            Retention::Time(time) => AutoCompaction::Periodic(time),
            Retention::Revisions(revisions) => AutoCompaction::Revision(revisions),
        }),
        compaction: Pace { rows: settings.compaction_batch_limit, pause: settings.compaction_sleep_interval.0 },
    };
    let log: Arc<dyn Log> = match settings.datastore().map_err(Error)? {
        Datastore::Sqlite(file) => Arc::new(SqliteLog::open(&file).await.map_err(|error| Error(error.to_string()))?),
        Datastore::Postgres(endpoint) => {
            let settings = PostgresSettings {
                endpoint,
                poll_interval: settings.datastore_poll_interval.0,
                connections_max: settings.datastore_connections,
                name: settings.member_name(),
                client_urls,
            };
            Arc::new(PostgresLog::open(settings).await.map_err(|error| Error(error.to_string()))?)
        }
    };
    Store::open(log, store_settings).await.map_err(|error| Error(format!("cannot read the database: {error}")))
}

fn api_settings(settings: &Settings) -> api::Settings {
    api::Settings {
        max_request_bytes: settings.max_request_bytes,
        max_txn_ops: settings.max_txn_ops,
        watch_progress_notify_interval: settings.watch_progress_notify_interval.0,
    }
}

/// Tells, on standard output, where clients can come to; a port of 0 has become a real one.
fn announce(url: &ListenUrl) {
    info!(%url, "ready to serve client requests");
    // Nobody may be reading; that is no reason to stop.
    let _ = writeln!(std::io::stdout(), "orlop: serving client requests on {url}");
}

/// A bound address.
struct Listener {
    url: ListenUrl,
    socket: Socket,
}

enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    async fn bind(url: &ListenUrl) -> Result<Self, Error> {
        let failed = |error: std::io::Error| Error(format!("cannot listen on {url}: {error}"));
        match url {
            ListenUrl::Http(address) => {
                let socket = TcpListener::bind(address).await.map_err(failed)?;
                let port = socket.local_addr().map_err(failed)?.port();
                // The host stays as it was written, so that clients are told a name that fits their certificates.
                let host = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host);
                Ok(Self { url: ListenUrl::Http(format!("{host}:{port}")), socket: Socket::Tcp(socket) })
            }
            ListenUrl::Unix(path) => {
                remove_stale(path).await.map_err(failed)?;
                let socket = UnixListener::bind(path).map_err(failed)?;
                Ok(Self { url: url.clone(), socket: Socket::Unix(socket) })
            }
        }
    }

    async fn serve(self, routes: Routes, mut stopping: watch::Receiver<bool>) -> Result<(), tonic::transport::Error> {
        let stopped = async move {
            // A sender that is gone means the same.
            let _ = stopping.wait_for(|stopping| *stopping).await;
        };
        let server = Server::builder()
            .accept_http1(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_concurrent_streams(u32::MAX)
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .add_routes(routes);
        match self.socket {
            Socket::Tcp(socket) => {
                let incoming = TcpIncoming::from(socket).with_nodelay(Some(true));
                server.serve_with_incoming_shutdown(incoming, stopped).await
            }
            Socket::Unix(socket) => {
                let outcome = server.serve_with_incoming_shutdown(UnixListenerStream::new(socket), stopped).await;
                if let ListenUrl::Unix(path) = &self.url {
                    // What is left over is cleared at the next start.
                    let _ = std::fs::remove_file(path);
                }
                outcome
            }
        }
    }
}

/// Clears a socket that a killed server left behind; one that is in use stays, and binding it fails.
async fn remove_stale(path: &Path) -> std::io::Result<()> {
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        Ok(_) | Err(_) => Ok(()),
    }
}
