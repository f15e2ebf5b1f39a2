//! Puts the modules of a server together: opens the log and the store, binds addresses, serves, and drains.

mod listeners;
mod open;

use std::{
    fmt,
    num::NonZeroUsize,
    path::PathBuf,
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tracing::{info, warn};

use crate::{
    api,
    auth::{Authenticator, BCRYPT_COST, BCRYPT_COSTS, Keys, Passwords, SignMethod, Tokens},
    config::{AuthToken, List, ListenUrl, MetricsDetail, Scheme, Settings, Tls},
    http::{self, Access, Pprof, Starting},
    logging,
    net::{Listener, tls},
    snapshot::{Content, DatedFolder, Schedule},
    telemetry::{self, Exporter},
};
use orlop_core::{
    metrics::{self, Metrics},
    overload::PartialRequests,
    store::{Role, Store},
    supervise::vital,
    watchdog::{Pulse, Watching},
};

use self::{
    listeners::{Listeners, urls},
    open::open_store,
};

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
    serve_as(settings, Role::Server, shutdown).await
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
    // The configuration may be that of a server, with files that the user of a command cannot read. So only the settings of
    // the database and of the sizes of requests apply.
    let settings = Settings {
        name: format!("orlop-{}", std::process::id()),
        listen_client_urls: List(vec![ListenUrl::Unix(socket, Scheme::Plain)]),
        // A command does not know the quota of the servers.
        quota_backend_bytes: -1,
        data_dir: settings.data_dir,
        datastore_endpoint: settings.datastore_endpoint,
        datastore_poll_interval: settings.datastore_poll_interval,
        datastore_connections: settings.datastore_connections,
        unsafe_no_fsync: settings.unsafe_no_fsync,
        value_cache_bytes: settings.value_cache_bytes,
        // It deletes the rows that a killed server left.
        compaction_batch_limit: settings.compaction_batch_limit,
        compaction_sleep_interval: settings.compaction_sleep_interval,
        max_request_bytes: settings.max_request_bytes,
        max_txn_ops: settings.max_txn_ops,
        ..Settings::default()
    };
    serve_as(settings, Role::Local, shutdown).await
}

async fn serve_as(settings: Settings, role: Role, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let tls = acceptor(&settings)?;
    let mut listeners = Listeners::bind(&settings, tls.as_ref()).await.map_err(Error)?;
    let metrics = new_metrics(&settings);
    let mut shutdown = pin!(shutdown);
    let (stop, stopping) = watch::channel(false);
    let mut servers = JoinSet::new();
    let starting = Starting::default();
    listeners.serve_probes(&settings, &starting, &stopping, &mut servers);
    let progress = Arc::clone(&starting.progress);
    let client_urls = advertised_urls(role, &settings, &listeners.clients);
    let opening = open_store(&settings, role, client_urls, metrics, progress);
    let Some(store) = unless(shutdown.as_mut(), opening).await else { return Ok(()) };
    let mut server = Server { settings, role, store: Arc::new(store?), stopping, servers };
    let (outcome, serving) = match server.begin(listeners, tls, &starting).await {
        Ok(serving) => (server.run(shutdown).await, Some(serving)),
        Err(error) => (Err(error), None),
    };
    stop.send_replace(true);
    // Also after a start that failed: the log records what the next start needs, and deregisters this instance.
    server.end().await;
    if let Some(exporter) = serving.and_then(|serving| serving.exporter) {
        // `finish` blocks its thread until tasks of this runtime have run.
        let _ = tokio::task::spawn_blocking(move || exporter.finish()).await;
    }
    info!("stopped");
    outcome
}

/// A server whose store is open.
struct Server {
    settings: Settings,
    role: Role,
    store: Arc<Store>,
    /// True once the server stops.
    stopping: watch::Receiver<bool>,
    /// The tasks that serve at addresses.
    servers: JoinSet<()>,
}

/// What a server that serves clients has until its end.
struct Serving {
    _watching: Watching,
    exporter: Option<Arc<Exporter>>,
}

impl Server {
    /// Begins to serve clients.
    async fn begin(
        &mut self,
        mut listeners: Listeners,
        tls: Option<Arc<tls::Acceptor>>,
        starting: &Starting,
    ) -> Result<Serving, Error> {
        let Self { settings, role, store, stopping, servers } = self;
        let watching = start_watchdog(store)?;
        if let Some(schedule) = snapshot_schedule(settings) {
            vital("the schedule of snapshots", schedule.run(Arc::clone(store), stopping.clone()));
        }
        let exporter = exporter(settings)?;
        let partial_requests = Arc::<PartialRequests>::default();
        let api_settings = api_settings(settings, exporter.clone());
        let max_message_bytes = api_settings.max_message_bytes();
        let authenticator = authenticator(settings, store).await?;
        let partial = Arc::clone(&partial_requests);
        let services = api::services(Arc::clone(store), api_settings, authenticator, partial, stopping.clone())
            .map_err(|error| Error(format!("cannot build the services: {error}")))?;
        let pprof = if settings.enable_pprof { Pprof::Served } else { Pprof::Absent };
        let access = Access::new(&settings.cors.0, &settings.host_whitelist.0);
        let endpoints = http::Settings { store: Arc::clone(store), tls, pprof, access, max_message_bytes };
        let has_http_urls = !listeners.http.is_empty();
        let routes = http::routes(services.routes(), &endpoints, partial_requests, has_http_urls)
            .map_err(|error| Error(format!("cannot build the JSON gateway: {error}")))?;
        log_start(settings, &listeners, store).await?;
        starting.is_ready(http::probe_routes(&endpoints));
        if *role == Role::Server {
            listeners.clients.iter().flat_map(|listener| &listener.urls).for_each(announce);
        }
        listeners.serve_console(settings, &endpoints, &services, stopping, servers).map_err(Error)?;
        listeners.serve(settings, &endpoints, services.with(routes.main), routes.http, stopping, servers);
        notify_service_manager(*role, "READY=1");
        Ok(Serving { _watching: watching, exporter })
    }

    /// Serves until `shutdown` completes or the server cannot go on.
    async fn run(&mut self, shutdown: Pin<&mut impl Future<Output = ()>>) -> Result<(), Error> {
        let mut outcome = Ok(());
        tokio::select! {
            () = shutdown => info!("shutting down"),
            failure = self.store.failed() => outcome = Err(Error(format!(
                "the history in the database differs from the history that this instance has read: {failure}"
            ))),
            Some(ended) = self.servers.join_next() => outcome = Err(Error(match ended {
                Ok(()) => "a listener ended unexpectedly".to_owned(),
                Err(error) => format!("a listener failed: {error}"),
            })),
        }
        notify_service_manager(self.role, "STOPPING=1");
        outcome
    }

    /// Lets clients finish their requests for a while, and closes the log.
    async fn end(mut self) {
        if timeout(DRAIN_MAX, async { while self.servers.join_next().await.is_some() {} }).await.is_err() {
            warn!("some clients did not finish in time; closing their connections");
            self.servers.shutdown().await;
        }
        self.store.stop().await;
    }
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

/// Notifies systemd (`Type=notify`) about a server, with a datagram to its socket.
fn notify_service_manager(role: Role, state: &str) {
    use std::os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixDatagram},
    };

    if role != Role::Server {
        return;
    }
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
    logging::print(&format!("orlop: serving client requests on {url}"));
}
