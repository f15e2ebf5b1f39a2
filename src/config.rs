//! Settings: defaults, then a TOML or YAML file, then `ORLOP_*` variables, then flags; the later wins.
//!
//! Every setting is named as etcd names it. A flag `--max-txn-ops` is the key `max-txn-ops` in a file and the variable
//! `ORLOP_MAX_TXN_OPS`.

use std::{convert::Infallible, fmt, path::PathBuf, str::FromStr, time::Duration};

use clap::ValueEnum;
use figment::{
    Figment, Metadata, Profile, Provider,
    providers::{Env, Format as _, Serialized, Toml, Yaml},
    value::{Dict, Map, Value},
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// What every setting is where nothing says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// Empty: as [`Settings::member_name`] says.
    pub name: String,
    pub data_dir: PathBuf,
    /// Empty: SQLite in the data directory.
    pub datastore_endpoint: Secret,
    pub datastore_poll_interval: Interval,
    pub datastore_connections: u32,
    pub listen_client_urls: Urls,
    /// Where metrics and health are served as well.
    pub listen_metrics_urls: Urls,
    /// Empty: those that are listened on.
    pub advertise_client_urls: Urls,
    /// Bytes.
    pub max_request_bytes: usize,
    pub max_txn_ops: usize,
    pub watch_progress_notify_interval: Interval,
    /// Bytes.
    pub value_cache_bytes: u64,
    /// 0: by the number of cores.
    pub worker_threads: usize,
    pub log_level: String,
    pub log_format: LogFormat,
    /// Bytes; 0: etcd's 2 GiB, below 0: none.
    pub quota_backend_bytes: i64,
    pub auto_compaction_mode: AutoCompactionMode,
    /// As [`Settings::auto_compaction`] reads it.
    pub auto_compaction_retention: String,
    pub compaction_batch_limit: usize,
    pub compaction_sleep_interval: Interval,
    pub max_concurrent_streams: u32,
    pub grpc_keepalive_interval: Interval,
    pub grpc_keepalive_timeout: Interval,
    pub warning_apply_duration: Interval,
    pub warning_unary_request_duration: Interval,
    pub metrics: MetricsDetail,
    /// Empty: none, as with the other files.
    pub cert_file: PathBuf,
    pub key_file: PathBuf,
    pub client_cert_auth: bool,
    pub trusted_ca_file: PathBuf,
    pub tls_min_version: TlsVersion,
    pub tls_max_version: TlsVersion,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            name: String::new(),
            data_dir: "orlop-data".into(),
            datastore_endpoint: Secret::default(),
            datastore_poll_interval: Interval(Duration::from_millis(100)),
            datastore_connections: 8,
            listen_client_urls: Urls(vec![ListenUrl::Http("127.0.0.1:2379".to_owned())]),
            advertise_client_urls: Urls(Vec::new()),
            max_request_bytes: 1_572_864,
            max_txn_ops: 128,
            watch_progress_notify_interval: Interval(Duration::from_secs(600)),
            value_cache_bytes: 256 << 20,
            worker_threads: 0,
            log_level: "info".to_owned(),
            log_format: LogFormat::Text,
            quota_backend_bytes: 0,
            auto_compaction_mode: AutoCompactionMode::Periodic,
            auto_compaction_retention: "0".to_owned(),
            compaction_batch_limit: 1_000,
            compaction_sleep_interval: Interval(Duration::from_millis(10)),
            max_concurrent_streams: u32::MAX,
            grpc_keepalive_interval: Interval(Duration::from_secs(2 * 60 * 60)),
            grpc_keepalive_timeout: Interval(Duration::from_secs(20)),
            warning_apply_duration: Interval(Duration::from_millis(100)),
            warning_unary_request_duration: Interval(Duration::from_millis(300)),
            metrics: MetricsDetail::Basic,
            listen_metrics_urls: Urls(Vec::new()),
            cert_file: PathBuf::new(),
            key_file: PathBuf::new(),
            client_cert_auth: false,
            trusted_ca_file: PathBuf::new(),
            tls_min_version: TlsVersion::Tls12,
            tls_max_version: TlsVersion::Tls13,
        }
    }
}

/// The flags of the server. What is not given is left to the other sources.
#[derive(Clone, Debug, Default, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Flags {
    /// Name of this member, as MemberList shows it; instances on one database each need their own [default: default, and
    /// on Postgres HOSTNAME-PORT]
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,

    #[command(flatten)]
    #[serde(flatten)]
    datastore: DatastoreFlags,

    /// How often a Postgres log is looked at when no notification tells of new rows [default: 100ms]
    #[arg(long, value_name = "DURATION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    datastore_poll_interval: Option<Interval>,

    /// Connections to Postgres for reading; three more are for appending, listening and asking [default: 8]
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    datastore_connections: Option<u32>,

    /// Addresses to serve clients on, separated by commas: http://HOST:PORT, https://HOST:PORT or unix://PATH
    /// [default: http://127.0.0.1:2379]
    #[arg(long, value_name = "URLS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    listen_client_urls: Option<Urls>,

    /// Addresses that clients are told to use, separated by commas [default: those that are listened on]
    #[arg(long, value_name = "URLS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    advertise_client_urls: Option<Urls>,

    /// Longest request that writes, in bytes [default: 1572864]
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_request_bytes: Option<usize>,

    /// Most operations in a transaction [default: 128]
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_txn_ops: Option<usize>,

    /// How long a watch with progress_notify is silent before it is sent its revision [default: 10m]
    #[arg(long, value_name = "DURATION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    watch_progress_notify_interval: Option<Interval>,

    /// Memory for values of live keys, in bytes; 0 turns the cache off [default: 268435456]
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    value_cache_bytes: Option<u64>,

    /// Threads that serve requests; 0: one on a machine of two cores or fewer, else one a core [default: 0]
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    worker_threads: Option<usize>,

    /// What is logged: error, warn, info, debug or trace, or a filter like info,orlop::watch=debug [default: info]
    #[arg(long, value_name = "LEVEL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    log_level: Option<String>,

    /// How the log is written, to standard error [default: text]
    #[arg(long, value_name = "FORMAT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    log_format: Option<LogFormat>,

    /// Bytes in use beyond which writes are refused and the alarm NOSPACE is raised; 0 is 2 GiB, below 0 none [default: 0]
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    quota_backend_bytes: Option<i64>,

    /// How auto-compaction-retention is meant [default: periodic]
    #[arg(long, value_name = "MODE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    auto_compaction_mode: Option<AutoCompactionMode>,

    /// History that automatic compaction keeps: a duration like 30m or a number of hours or, with the mode revision, a number
    /// of revisions; 0 turns it off [default: 0]
    #[arg(long, value_name = "RETENTION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    auto_compaction_retention: Option<String>,

    /// Rows that compaction deletes in one step [default: 1000]
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    compaction_batch_limit: Option<usize>,

    /// Pause between steps of compaction [default: 10ms]
    #[arg(long, value_name = "DURATION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    compaction_sleep_interval: Option<Interval>,

    /// Most calls at the same time on one connection [default: 4294967295]
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_concurrent_streams: Option<u32>,

    /// A connection that is silent for this long is asked whether it is still there [default: 2h]
    #[arg(long, value_name = "DURATION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    grpc_keepalive_interval: Option<Interval>,

    /// One that then does not answer for this long is closed [default: 20s]
    #[arg(long, value_name = "DURATION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    grpc_keepalive_timeout: Option<Interval>,

    /// Batches of writes that take longer are counted as slow [default: 100ms]
    #[arg(long, value_name = "DURATION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    warning_apply_duration: Option<Interval>,

    /// Requests that take longer are logged with their parts [default: 300ms]
    #[arg(long, value_name = "DURATION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    warning_unary_request_duration: Option<Interval>,

    /// What is measured: extensive adds the time of each gRPC call, by method [default: basic]
    #[arg(long, value_name = "DETAIL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<MetricsDetail>,

    /// Addresses to serve metrics and health on as well, separated by commas
    #[arg(long, value_name = "URLS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    listen_metrics_urls: Option<Urls>,

    /// The certificate for https addresses, PEM, with those between it and its root; read anew when it changes
    #[arg(long, value_name = "FILE", alias = "server-cert-file")]
    #[serde(skip_serializing_if = "Option::is_none")]
    cert_file: Option<PathBuf>,

    /// The certificate's key, PEM
    #[arg(long, value_name = "FILE", alias = "server-key-file")]
    #[serde(skip_serializing_if = "Option::is_none")]
    key_file: Option<PathBuf>,

    /// Serve only clients with a certificate of trusted-ca-file
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    client_cert_auth: Option<bool>,

    /// Roots of clients' certificates, PEM; with it every client needs a certificate
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    trusted_ca_file: Option<PathBuf>,

    /// Oldest TLS that is spoken [default: TLS1.2]
    #[arg(long, value_name = "VERSION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_min_version: Option<TlsVersion>,

    /// Newest TLS that is spoken [default: TLS1.3]
    #[arg(long, value_name = "VERSION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_max_version: Option<TlsVersion>,
}

/// Where the log is.
#[derive(Clone, Debug, Default, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DatastoreFlags {
    /// A file of settings, TOML or, if its name ends in .yaml or .yml, YAML; keys are the flags' names
    #[arg(long, value_name = "FILE", env = "ORLOP_CONFIG_FILE")]
    #[serde(skip)]
    config_file: Option<PathBuf>,

    /// Folder of the SQLite database, made if it is not there [default: orlop-data]
    #[arg(long, value_name = "FOLDER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    data_dir: Option<PathBuf>,

    /// Where the log is kept: sqlite://PATH-OF-FILE or postgres://USER:PASSWORD@HOST:PORT/DATABASE, with ?sslmode= and
    /// ?sslrootcert= as libpq has them [default: orlop.db in the data folder]
    #[arg(long, value_name = "URL", alias = "endpoint")]
    #[serde(skip_serializing_if = "Option::is_none")]
    datastore_endpoint: Option<Secret>,
}

impl From<DatastoreFlags> for Flags {
    fn from(datastore: DatastoreFlags) -> Self {
        Self { datastore, ..Self::default() }
    }
}

/// `ORLOP_*` variables. One that is a text stays one, though it looks like a number.
struct Variables;

impl Variables {
    const TEXTS: [&'static str; 8] = [
        "name",
        "data-dir",
        "log-level",
        "auto-compaction-retention",
        "datastore-endpoint",
        "cert-file",
        "key-file",
        "trusted-ca-file",
    ];

    /// Other ORLOP_* variables are none of ours, those of tests and scripts for example.
    fn source() -> Env {
        Env::prefixed("ORLOP_")
            .map(|key| key.as_str().replace('_', "-").to_ascii_lowercase().into())
            .filter(|key| Settings::KEYS.contains(&key.as_str()))
    }
}

impl Provider for Variables {
    fn metadata(&self) -> Metadata {
        Self::source().metadata()
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        let value = |key: &str, text: String| {
            if Self::TEXTS.contains(&key) {
                Value::from(text)
            } else {
                text.parse().unwrap_or_else(|never: Infallible| match never {})
            }
        };
        let read = Self::source().iter().map(|(key, text)| (key.to_string(), value(key.as_str(), text))).collect();
        Ok(Profile::Default.collect(read))
    }
}

impl Settings {
    /// Every key, as files and flags spell it.
    const KEYS: [&'static str; 32] = [
        "name",
        "data-dir",
        "datastore-endpoint",
        "datastore-poll-interval",
        "datastore-connections",
        "listen-client-urls",
        "advertise-client-urls",
        "max-request-bytes",
        "max-txn-ops",
        "watch-progress-notify-interval",
        "value-cache-bytes",
        "worker-threads",
        "log-level",
        "log-format",
        "quota-backend-bytes",
        "auto-compaction-mode",
        "auto-compaction-retention",
        "compaction-batch-limit",
        "compaction-sleep-interval",
        "max-concurrent-streams",
        "grpc-keepalive-interval",
        "grpc-keepalive-timeout",
        "warning-apply-duration",
        "warning-unary-request-duration",
        "metrics",
        "listen-metrics-urls",
        "cert-file",
        "key-file",
        "client-cert-auth",
        "trusted-ca-file",
        "tls-min-version",
        "tls-max-version",
    ];

    /// Merges all sources and checks the result.
    ///
    /// # Errors
    ///
    /// A text for the operator that names the setting, where it came from and what it accepts.
    pub fn load(flags: &Flags) -> Result<Self, String> {
        let mut figment = Figment::from(Serialized::defaults(Self::default()));
        if let Some(file) = &flags.datastore.config_file {
            if !file.is_file() {
                return Err(format!("config-file {} is not a file that can be read", file.display()));
            }
            let yaml = file.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
            figment = if yaml { figment.merge(Yaml::file(file)) } else { figment.merge(Toml::file(file)) };
        }
        let settings: Self =
            figment.merge(Variables).merge(Serialized::defaults(flags)).extract().map_err(|error| error.to_string())?;
        settings.check()?;
        Ok(settings)
    }

    fn check(&self) -> Result<(), String> {
        if self.listen_client_urls.0.is_empty() {
            return Err("listen-client-urls names no address; give at least one, like http://127.0.0.1:2379".to_owned());
        }
        for (key, number) in [
            ("max-request-bytes", self.max_request_bytes),
            ("max-txn-ops", self.max_txn_ops),
            ("compaction-batch-limit", self.compaction_batch_limit),
        ] {
            if number == 0 {
                return Err(format!("{key} must be at least 1, got 0"));
            }
        }
        if self.watch_progress_notify_interval.0 < Interval::MIN {
            return Err(format!(
                "watch-progress-notify-interval must be at least 100ms, got {}",
                self.watch_progress_notify_interval
            ));
        }
        if self.datastore_poll_interval.0 < Interval::POLL_MIN {
            return Err(format!("datastore-poll-interval must be at least 1ms, got {}", self.datastore_poll_interval));
        }
        if self.datastore_connections == 0 {
            return Err("datastore-connections must be at least 1, got 0".to_owned());
        }
        self.auto_compaction()?;
        self.tls()?;
        self.datastore().map(drop)
    }

    /// The files for https addresses, if there are any.
    ///
    /// # Errors
    ///
    /// If some are given and others that they need are not.
    pub fn tls(&self) -> Result<Option<TlsFiles>, String> {
        let given = |file: &PathBuf| (!file.as_os_str().is_empty()).then(|| file.clone());
        let versions = (self.tls_min_version, self.tls_max_version);
        if versions == (TlsVersion::Tls13, TlsVersion::Tls12) {
            return Err("tls-min-version TLS1.3 is above tls-max-version TLS1.2".to_owned());
        }
        let trusted_ca_file = given(&self.trusted_ca_file);
        if self.client_cert_auth && trusted_ca_file.is_none() {
            return Err("client-cert-auth needs trusted-ca-file, the roots of clients' certificates".to_owned());
        }
        match (given(&self.cert_file), given(&self.key_file)) {
            (Some(cert_file), Some(key_file)) => Ok(Some(TlsFiles { cert_file, key_file, trusted_ca_file, versions })),
            (None, None) if trusted_ca_file.is_none() => Ok(None),
            (None, None) => Err("trusted-ca-file needs cert-file and key-file".to_owned()),
            (Some(_), None) => Err("cert-file needs key-file, the certificate's key".to_owned()),
            (None, Some(_)) => Err("key-file needs cert-file, the key's certificate".to_owned()),
        }
    }

    /// What automatic compaction keeps; `None`: there is none.
    ///
    /// # Errors
    ///
    /// If the retention is not what the mode takes.
    pub fn auto_compaction(&self) -> Result<Option<Retention>, String> {
        let text = self.auto_compaction_retention.trim();
        let number = text.parse::<u32>().ok();
        let retention = match (self.auto_compaction_mode, number) {
            (_, Some(0)) => return Ok(None),
            (AutoCompactionMode::Revision, Some(revisions)) => Retention::Revisions(i64::from(revisions)),
            (AutoCompactionMode::Periodic, Some(hours)) => {
                Retention::Time(Duration::from_secs(60 * 60 * u64::from(hours)))
            }
            (AutoCompactionMode::Revision, None) => {
                return Err(format!(
                    "auto-compaction-retention must be a number of revisions with auto-compaction-mode revision, got {text:?}"
                ));
            }
            (AutoCompactionMode::Periodic, None) => Retention::Time(
                text.parse::<Interval>().map_err(|error| format!("auto-compaction-retention: {error}"))?.0,
            ),
        };
        Ok(if retention == Retention::Time(Duration::ZERO) { None } else { Some(retention) })
    }

    /// The name that is set, or one that tells instances on one database apart and stays over restarts.
    pub fn member_name(&self) -> String {
        if !self.name.is_empty() {
            return self.name.clone();
        }
        if !matches!(self.datastore(), Ok(Datastore::Postgres(_))) {
            return "default".to_owned();
        }
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| std::env::var("HOSTNAME"));
        let host = host.as_deref().map_or("orlop", str::trim);
        match self.listen_client_urls.0.first() {
            Some(ListenUrl::Http(address) | ListenUrl::Https(address)) => {
                format!("{host}-{}", address.rsplit_once(':').map_or(address.as_str(), |(_, port)| port))
            }
            Some(ListenUrl::Unix(_)) | None => host.to_owned(),
        }
    }

    /// Where snapshots lie while they are sent: beside SQLite's file, which has room for one more of its size, or where the
    /// system has temporary files.
    ///
    /// # Errors
    ///
    /// As [`Settings::datastore`].
    pub fn snapshot_folder(&self) -> Result<PathBuf, String> {
        Ok(match self.datastore()? {
            Datastore::Sqlite(mut file) => {
                file.as_mut_os_string().push(".snapshots");
                file
            }
            Datastore::Postgres(_) => std::env::temp_dir().join(format!("orlop-{}", std::process::id())),
        })
    }

    /// Where the log is kept.
    ///
    /// # Errors
    ///
    /// If the endpoint is of a kind that is not served.
    pub fn datastore(&self) -> Result<Datastore, String> {
        let endpoint = &self.datastore_endpoint.0;
        if endpoint.is_empty() {
            return Ok(Datastore::Sqlite(self.data_dir.join("orlop.db")));
        }
        match endpoint.split_once("://") {
            Some(("sqlite", path)) if !path.is_empty() => Ok(Datastore::Sqlite(path.into())),
            Some(("postgres" | "postgresql", place)) if !place.is_empty() => Ok(Datastore::Postgres(endpoint.clone())),
            // Never the endpoint itself: it may hold a password.
            _ => Err("datastore-endpoint must be sqlite://PATH-OF-FILE or postgres://USER:PASSWORD@HOST:PORT/DATABASE"
                .to_owned()),
        }
    }
}

/// What automatic compaction keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    Time(Duration),
    Revisions(i64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum AutoCompactionMode {
    /// By time
    Periodic,
    /// By number of revisions
    Revision,
}

/// The files for https addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate and those between it and its root, PEM.
    pub cert_file: PathBuf,
    /// Its key, PEM.
    pub key_file: PathBuf,
    /// Roots of clients' certificates, PEM. With them every client must have a certificate, as in etcd.
    pub trusted_ca_file: Option<PathBuf>,
    /// The oldest and the newest that are spoken.
    pub versions: (TlsVersion, TlsVersion),
}

/// As etcd writes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub enum TlsVersion {
    #[value(name = "TLS1.2")]
    #[serde(rename = "TLS1.2")]
    Tls12,
    #[value(name = "TLS1.3")]
    #[serde(rename = "TLS1.3")]
    Tls13,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum MetricsDetail {
    Basic,
    Extensive,
}

/// A kind of database, and where it is.
#[derive(Clone, PartialEq, Eq)]
pub enum Datastore {
    Sqlite(PathBuf),
    /// A URL that may hold a password.
    Postgres(String),
}

/// A text that is never shown.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "none" } else { "not shown" })
    }
}

impl FromStr for Secret {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

/// An address to listen on, or one that clients are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenUrl {
    /// `host:port`.
    Http(String),
    /// `host:port`, with TLS.
    Https(String),
    Unix(PathBuf),
}

impl FromStr for ListenUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const ACCEPTED: &str = "use http://HOST:PORT, https://HOST:PORT or unix://PATH";
        match text.split_once("://") {
            Some((scheme @ ("http" | "https"), address)) => {
                let address = address.strip_suffix('/').unwrap_or(address);
                let port = address.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
                match port {
                    Some(Ok(_)) if scheme == "http" => Ok(Self::Http(address.to_owned())),
                    Some(Ok(_)) => Ok(Self::Https(address.to_owned())),
                    Some(Err(_)) | None => Err(format!("{text:?} has no port; {ACCEPTED}")),
                }
            }
            Some(("unix", path)) if !path.is_empty() => Ok(Self::Unix(path.into())),
            Some(("unixs", _)) => Err(format!("{text:?}: unix sockets are served without TLS; {ACCEPTED}")),
            _ => Err(format!("{text:?} is no address to listen on; {ACCEPTED}")),
        }
    }
}

impl fmt::Display for ListenUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http(address) => write!(f, "http://{address}"),
            Self::Https(address) => write!(f, "https://{address}"),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
        }
    }
}

/// URLs; in a file a list or, as in flags and variables, a text with commas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Urls(pub Vec<ListenUrl>);

impl FromStr for Urls {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.split(',').map(str::trim).filter(|url| !url.is_empty()).map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl Serialize for Urls {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(ToString::to_string))
    }
}

impl<'de> Deserialize<'de> for Urls {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a list of URLs or a text of URLs separated by commas")]
        enum Form {
            List(Vec<String>),
            Text(String),
        }
        let text = match Form::deserialize(deserializer)? {
            Form::List(urls) => urls.join(","),
            Form::Text(text) => text,
        };
        text.parse().map_err(de::Error::custom)
    }
}

/// A length of time, written like 10m, 1h30m or 500ms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval(pub Duration);

impl Interval {
    /// As short as a progress interval may be, as in etcd.
    const MIN: Duration = Duration::from_millis(100);
    /// Shorter ones would only keep the database busy.
    const POLL_MIN: Duration = Duration::from_millis(1);
}

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        humantime::parse_duration(text)
            .map(Self)
            .map_err(|error| format!("{text:?} is no duration ({error}); write it like 10m, 1h30m or 500ms"))
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(f)
    }
}

impl Serialize for Interval {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Interval {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines for people
    #[value(alias = "console")]
    #[serde(alias = "console")]
    Text,
    /// One JSON object a line
    Json,
}
