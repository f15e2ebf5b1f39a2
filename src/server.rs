//! Puts the modules of a server together: opens the log and the store, binds listeners, serves, and drains.

mod open;

use std::{fmt, io::Write as _, num::NonZeroUsize, path::PathBuf, pin::pin, sync::Arc, time::Duration};

use hyper_util::service::TowerToHyperService;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tonic::service::Routes;
use tracing::{info, warn};

use crate::{
    api,
    auth::{Authenticator, BCRYPT_COST, BCRYPT_COSTS, Keys, Passwords, SignMethod, Tokens},
    config::{AuthToken, Interval, List, ListenUrl, MetricsDetail, Scheme, Settings, Tls, Urls},
    console::embedded::Page,
    datastore::keep,
    http::{self, Access, Pprof, Starting},
    net::{self, ConnectionLimit, Listener, tls},
    snapshot::{Content, DatedFolder, Schedule},
    telemetry::{self, Exporter},
};
use orlop_core::{
    metrics::{self, Metrics},
    overload::{PartialRequests, Steps},
    store::{Keep, Store},
    supervise::vital,
    watchdog::{Pulse, Watching},
};

use self::open::open_store;

/// Maximum time for clients to finish their requests when the server stops.
const DRAIN_MAX: Duration = Duration::from_secs(5);
/// Interval at which a task of the runtime reports to the watchdog.
const RUNTIME_BEAT: Duration = Duration::from_secs(1);

/// The reason why the server did not start, or stopped by itself; a text for the operator.
#[derive(Debug)]
pub struct Error(String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Error {}

/// Serves until `shutdown` completes, then drains: accepted writes are finished and answered, streams end with a
/// status, and the log is closed.
///
/// # Errors
///
/// If an address cannot be bound or the database cannot be opened or read.
pub async fn serve(settings: Settings, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let keep = keep(&settings);
    serve_as(settings, Role::Server, keep, shutdown).await
}

/// Serves a database to this process alone, at a socket, until `shutdown` completes. Does nothing else that a server does
/// by schedule or announces.
///
/// # Errors
///
/// The same as [`serve`].
pub(crate) async fn serve_locally(
    settings: Settings,
    socket: PathBuf,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let settings = Settings {
        name: format!("orlop-{}", std::process::id()),
        listen_client_urls: List(vec![ListenUrl::Unix(socket, Scheme::Plain)]),
        listen_client_http_urls: List::default(),
        listen_metrics_urls: List::default(),
        console_listen_url: Default::default(),
        host_whitelist: List::default(),
        listen_address: String::new(),
        auto_compaction_retention: "0".to_owned(),
        snapshot_interval: Interval(Duration::ZERO),
        enable_distributed_tracing: false,
        ..settings
    };
    serve_as(settings, Role::Local, Keep::AsBefore, shutdown).await
}

/// Why a process serves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Server,
    /// For a command in the same process.
    Local,
}

impl Role {
    /// Notifies systemd about a server.
    fn notify(self, state: &str) {
        if self == Self::Server {
            notify_service_manager(state);
        }
    }
}

async fn serve_as(settings: Settings, role: Role, keep: Keep, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let tls = acceptor(&settings)?;
    let mut listeners = Listeners::bind(&settings, tls.as_ref()).await.map_err(Error)?;
    let metrics = new_metrics(&settings);
    let mut shutdown = pin!(shutdown);
    let (stop, stopping) = watch::channel(false);
    let mut servers = JoinSet::new();
    let starting = Starting::default();
    listeners.serve_probes(&settings, &starting, &stopping, &mut servers);
    let progress = Arc::clone(&starting.progress);
    let opening = open_store(&settings, advertised_urls(role, &settings, &listeners.clients), metrics, keep, progress);
    let Some(store) = unless(shutdown.as_mut(), opening).await else { return Ok(()) };
    let store = Arc::new(store?);
    let _watching = start_watchdog(&store)?;

    if let Some(schedule) = snapshot_schedule(&settings) {
        vital("the schedule of snapshots", schedule.run(Arc::clone(&store), stopping.clone()));
    }
    let exporter = exporter(&settings)?;
    let partial_requests = Arc::<PartialRequests>::default();
    let api_settings = api_settings(&settings, exporter.clone());
    let max_message_bytes = api_settings.max_message_bytes();
    let authenticator = authenticator(&settings, &store).await?;
    let services =
        api::services(Arc::clone(&store), api_settings, authenticator, Arc::clone(&partial_requests), stopping.clone())
            .map_err(|error| Error(format!("cannot build the services: {error}")))?;
    let pprof = if settings.enable_pprof { Pprof::Served } else { Pprof::Absent };
    let access = Access::new(&settings.cors.0, &settings.host_whitelist.0);
    let endpoints = http::Settings { store: Arc::clone(&store), tls, pprof, access, max_message_bytes };
    let has_http_urls = !listeners.http.is_empty();
    let routes = http::routes(services.routes(), &endpoints, partial_requests, has_http_urls)
        .map_err(|error| Error(format!("cannot build the JSON gateway: {error}")))?;
    log_start(&settings, &listeners, &store).await?;
    starting.is_ready(http::probe_routes(&endpoints));
    if role == Role::Server {
        listeners.clients.iter().flat_map(|listener| &listener.urls).for_each(announce);
    }
    listeners.serve_console(&settings, &endpoints, &services, &stopping, &mut servers).map_err(Error)?;
    listeners.serve(&settings, &endpoints, services.with(routes.main), routes.http, &stopping, &mut servers);
    role.notify("READY=1");

    let mut outcome = Ok(());
    tokio::select! {
        () = &mut shutdown => info!("shutting down"),
        failure = store.failed() => outcome = Err(Error(format!(
            "the history in the database differs from the history that this instance has read: {failure}"
        ))),
        Some(ended) = servers.join_next() => outcome = Err(Error(match ended {
            Ok(()) => "a listener ended unexpectedly".to_owned(),
            Err(error) => format!("a listener failed: {error}"),
        })),
    }
    role.notify("STOPPING=1");
    stop.send_replace(true);
    if timeout(DRAIN_MAX, async { while servers.join_next().await.is_some() {} }).await.is_err() {
        warn!("some clients did not finish in time; closing their connections");
        servers.shutdown().await;
    }
    store.stop().await;
    if let Some(exporter) = exporter {
        // `finish` blocks its thread until tasks of this runtime have run.
        let _ = tokio::task::spawn_blocking(move || exporter.finish()).await;
    }
    info!("stopped");
    outcome
}

/// Checks that a server with these settings can listen: its certificates can be read and its addresses bound.
///
/// # Errors
///
/// The same as [`serve`].
pub(crate) async fn check_listeners(settings: &Settings) -> Result<(), Error> {
    let tls = acceptor(settings)?;
    Listeners::bind(settings, tls.as_ref()).await.map(drop).map_err(Error)
}

/// Returns the source of the server's certificate; `None` without TLS.
fn acceptor(settings: &Settings) -> Result<Option<Arc<tls::Acceptor>>, Error> {
    let Some(files) = settings.tls().map_err(Error)? else { return Ok(None) };
    tls::Acceptor::new(files).map(|acceptor| Some(Arc::new(acceptor))).map_err(Error)
}

/// Logs what an operator wants to know about a start, in one line.
async fn log_start(settings: &Settings, listeners: &Listeners, store: &Store) -> Result<(), Error> {
    let tls = match settings.tls().map_err(Error)? {
        None => "off",
        Some(Tls { clients: None, .. }) => "server certificate",
        Some(Tls { clients: Some(_), .. }) => "server and client certificates",
    };
    let size = store.size().await.map_or(0, |size| size.total);
    info!(
        version = crate::VERSION,
        "data-dir" = %settings.data_dir.display(),
        database = settings.datastore().map_err(Error)?.name(),
        bytes = size,
        "listen-client-urls" = urls(&listeners.clients),
        "listen-client-http-urls" = urls(&listeners.http),
        "listen-metrics-urls" = listeners.metrics_urls,
        tls,
        "started"
    );
    Ok(())
}

/// Returns the result of `opening`, or `None` if the server shall stop before.
async fn unless<T>(shutdown: impl Future<Output = ()>, opening: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        opened = opening => Some(opened),
        () = shutdown => {
            info!("stopped before the database was open");
            None
        }
    }
}

/// Starts the watchdog for the store's loops and for the runtime.
fn start_watchdog(store: &Store) -> Result<Watching, Error> {
    let (watchdog, pulse) = (Arc::clone(store.watchdog()), Arc::new(Pulse::default()));
    watchdog.follow("runtime", &pulse);
    vital("the runtime's pulse", async move {
        loop {
            pulse.beat();
            sleep(RUNTIME_BEAT).await;
        }
    });
    let gauge = store.metrics().health.stuck.clone();
    watchdog.start(gauge).map_err(|error| Error(format!("cannot start the watchdog: {error}")))
}

/// Notifies systemd (`Type=notify`) with a datagram to its socket.
fn notify_service_manager(state: &str) {
    use std::os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixDatagram},
    };

    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match path.to_str().and_then(|path| path.strip_prefix('@')) {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = sent {
        warn!(%error, state, "cannot notify the service manager");
    }
}

/// The bound addresses.
struct Listeners {
    /// gRPC, and HTTP unless `http` has addresses.
    clients: Vec<Listener>,
    http: Vec<Listener>,
    metrics: Vec<Listener>,
    metrics_urls: String,
    /// The web page.
    console: Vec<Listener>,
}

impl Listeners {
    async fn bind(settings: &Settings, tls: Option<&Arc<tls::Acceptor>>) -> Result<Self, String> {
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
    fn serve_console(
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
        let page = Page { services: &services, about, allowed_hosts: &settings.console_allowed_hosts.0 };
        let settings = connections(settings, ConnectionLimit::for_pages(), endpoints.store.steps());
        page.serve(listeners, &settings, stopping, servers)
    }

    /// Serves at all other addresses until `stopping` becomes true.
    fn serve(
        self,
        settings: &Settings,
        endpoints: &http::Settings,
        services: api::Router,
        http: Routes,
        stopping: &watch::Receiver<bool>,
        servers: &mut JoinSet<()>,
    ) {
        let clients = connections(settings, ConnectionLimit::for_clients(), endpoints.store.steps());
        for listener in self.clients {
            servers.spawn(listener.serve(services.clone(), clients.clone(), stopping.clone()));
        }
        for listener in self.http {
            let service = TowerToHyperService::new(http.clone());
            servers.spawn(listener.serve(service, clients.clone(), stopping.clone()));
        }
    }

    /// Serves probes and metrics at their addresses, from the beginning of a start on, until `stopping` becomes true.
    fn serve_probes(
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

fn urls(listeners: &[Listener]) -> String {
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

/// Returns the URLs for clients of all instances. A member without URLs leads only if there is no other one.
fn advertised_urls(role: Role, settings: &Settings, listeners: &[Listener]) -> Vec<String> {
    match (role, settings.advertise_client_urls.0.as_slice()) {
        (Role::Local, _) => Vec::new(),
        (Role::Server, []) => listeners.iter().flat_map(|listener| &listener.urls).map(ToString::to_string).collect(),
        (Role::Server, urls) => urls.iter().map(ToString::to_string).collect(),
    }
}

fn new_metrics(settings: &Settings) -> Arc<Metrics> {
    Arc::new(Metrics::new(match settings.metrics {
        MetricsDetail::Basic => metrics::Detail::Basic,
        MetricsDetail::Extensive => metrics::Detail::Extensive,
    }))
}

/// Returns when the server takes snapshots of itself; `None`: never.
fn snapshot_schedule(settings: &Settings) -> Option<Schedule> {
    let interval = settings.snapshot_interval.0;
    let keep = NonZeroUsize::new(settings.snapshot_retention).filter(|_| !interval.is_zero())?;
    let folder = if settings.snapshot_dir.as_os_str().is_empty() {
        settings.data_dir.join("snapshots")
    } else {
        settings.snapshot_dir.clone()
    };
    let content = if settings.snapshot_history { Content::LogAndArchive } else { Content::Log };
    Some(Schedule { interval, folder: DatedFolder::new(folder), keep, content })
}

fn exporter(settings: &Settings) -> Result<Option<Arc<Exporter>>, Error> {
    if !settings.enable_distributed_tracing {
        return Ok(None);
    }
    let tracing = telemetry::Settings {
        address: settings.distributed_tracing_address.clone(),
        service_name: settings.distributed_tracing_service_name.clone(),
        instance_id: settings.distributed_tracing_instance_id.clone(),
        sampling_rate: settings.distributed_tracing_sampling_rate,
    };
    let exporter = Exporter::new(&tracing)
        .map_err(|error| Error(format!("distributed-tracing-address {:?}: {error}", tracing.address)))?;
    info!(address = tracing.address, sampling_rate = tracing.sampling_rate, "sending spans");
    Ok(Some(Arc::new(exporter)))
}

/// Creates what identifies callers, from the settings and the secret key in the database.
async fn authenticator(settings: &Settings, store: &Store) -> Result<Authenticator, Error> {
    let tokens = match &settings.auth_token {
        AuthToken::Simple => {
            let key = store.log().token_key().await;
            let key = key.map_err(|error| Error(format!("cannot read the key that signs tokens: {error}")))?;
            let secs = match settings.auth_token_ttl {
                0 => Settings::AUTH_TOKEN_TTL_SECS,
                secs => secs,
            };
            Tokens::simple(&key, Duration::from_secs(secs)).map_err(Error)?
        }
        AuthToken::Jwt(jwt) => {
            let failed = |error: String| Error(format!("auth-token: {error}"));
            let read = |file: &PathBuf| {
                std::fs::read(file).map_err(|error| failed(format!("cannot read {}: {error}", file.display())))
            };
            let public = jwt.pub_key.as_ref().map(read).transpose()?;
            let private = jwt.priv_key.as_ref().map(read).transpose()?;
            let method = SignMethod::of_name(&jwt.sign_method).map_err(failed)?;
            let keys = Keys::new(method, public.as_deref(), private.as_deref()).map_err(failed)?;
            Tokens::jwt(keys, jwt.ttl)
        }
    };
    let cost = u32::try_from(settings.bcrypt_cost).ok().filter(|cost| BCRYPT_COSTS.contains(cost));
    if cost.is_none() {
        warn!(given = settings.bcrypt_cost, used = BCRYPT_COST, "bcrypt-cost is not between 4 and 31");
    }
    let passwords = Passwords::start(cost.unwrap_or(BCRYPT_COST))
        .map_err(|error| Error(format!("cannot start the threads that check passwords: {error}")))?;
    Ok(Authenticator::new(tokens, passwords, settings.client_cert_auth))
}

fn api_settings(settings: &Settings, exporter: Option<Arc<Exporter>>) -> api::Settings {
    api::Settings {
        max_request_bytes: settings.max_request_bytes,
        max_txn_ops: settings.max_txn_ops,
        watch_progress_notify_interval: settings.watch_progress_notify_interval.0,
        slow_threshold: settings.warning_unary_request_duration.0,
        exporter,
    }
}

/// What an address for clients serves, in etcd's words.
const TRAFFIC: &str = "grpc+http";

/// Prints the address for clients to standard output, with the actual port if port 0 was requested.
fn announce(url: &ListenUrl) {
    info!(%url, "ready to serve client requests");
    if let ListenUrl::Tcp(address, scheme) = url {
        // etcd's messages and fields.
        match scheme {
            Scheme::Plain => {
                info!(traffic = TRAFFIC, address, "serving client traffic insecurely; this is strongly discouraged!")
            }
            Scheme::Tls => info!(traffic = TRAFFIC, address, "serving client traffic securely"),
        }
    }
    // The server continues if standard output is closed.
    let _ = writeln!(std::io::stdout(), "orlop: serving client requests on {url}");
}
