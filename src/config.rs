//! Settings: defaults, then a TOML or YAML file, then `ETCD_*` and `ORLOP_*` variables, then flags; later sources override
//! earlier ones.
//!
//! Settings have etcd's names. The flag `--max-txn-ops` is the key `max-txn-ops` in a file and the variable
//! `ORLOP_MAX_TXN_OPS` or `ETCD_MAX_TXN_OPS`.

mod advertised;
mod auth_token;
mod endpoint;
mod etcd_only;
mod file;
mod flags;
mod host_name;
mod listen_url;
mod origin;
mod tls;
mod values;
mod variables;

use std::{path::PathBuf, time::Duration};

use figment::{Figment, providers::Serialized};
use orlop_core::store::{self, CompactionRate, SlowThresholds};
use serde::{Deserialize, Serialize};

pub use self::{
    auth_token::{AuthToken, Jwt},
    etcd_only::{Notices, deprecation, ignored_flag_definitions, with_two_dashes, without_empty_values},
    flags::{DatastoreFlags, Flags},
    host_name::HostName,
    listen_url::{ListenUrl, Scheme},
    origin::Origin,
    values::{
        AutoCompactionMode, CipherSuite, Datastore, FileMode, Interval, List, LogFormat, MetricsDetail, Retention,
        Secret, SelfSigned, Tls, TlsClients, TlsVersion, Urls,
    },
};
use self::{
    etcd_only::members,
    file::{ConfigFile, Language},
    variables::Variables,
};
use crate::auth::BCRYPT_COST;

/// All settings, with their defaults.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// Empty: see [`Settings::member_name`].
    pub name: String,
    pub data_dir: PathBuf,
    /// Empty: SQLite in the data directory.
    pub datastore_endpoint: Secret,
    pub datastore_poll_interval: Interval,
    pub datastore_connections: u32,
    #[serde(deserialize_with = "values::switch")]
    pub unsafe_no_fsync: bool,
    pub listen_client_urls: Urls,
    /// HTTP without gRPC. Empty: HTTP is served at the listen addresses.
    pub listen_client_http_urls: Urls,
    /// Empty: none. After loading it is included in `listen_client_urls`.
    pub listen_address: String,
    /// Mode of unix sockets.
    pub unix_socket_mode: FileMode,
    /// Additional addresses for metrics and health.
    pub listen_metrics_urls: Urls,
    /// Addresses of the web page. Empty: none.
    pub console_listen_url: Urls,
    /// Names under which browsers may request the page, in addition to its addresses.
    pub console_allowed_hosts: List<HostName>,
    /// File with the password of the page where the server has no users. Empty: none, and the page only reads.
    pub console_password_file: PathBuf,
    /// Origins whose pages may read responses of HTTP. Empty: all.
    pub cors: List<Origin>,
    /// Hosts of requests of HTTP without TLS. Empty or with `*`: all.
    pub host_whitelist: List<String>,
    /// Empty: the listen addresses.
    pub advertise_client_urls: Urls,
    /// Bytes.
    #[serde(deserialize_with = "values::bytes")]
    pub max_request_bytes: usize,
    pub max_txn_ops: usize,
    pub watch_progress_notify_interval: Interval,
    /// Bytes.
    #[serde(deserialize_with = "values::bytes")]
    pub value_cache_bytes: u64,
    /// 0: depends on the number of cores.
    pub worker_threads: usize,
    pub log_level: String,
    pub log_format: LogFormat,
    /// `default`, `stderr`, `stdout` or paths of files.
    pub log_outputs: List<String>,
    #[serde(deserialize_with = "values::switch")]
    pub enable_log_rotation: bool,
    /// JSON, read when rotation is enabled.
    pub log_rotation_config_json: String,
    /// Bytes; 0: etcd's 2 GiB, negative: no quota.
    #[serde(deserialize_with = "values::bytes")]
    pub quota_backend_bytes: i64,
    pub auto_compaction_mode: AutoCompactionMode,
    /// Parsed by [`Settings::auto_compaction`].
    pub auto_compaction_retention: String,
    pub compaction_batch_limit: usize,
    pub compaction_sleep_interval: Interval,
    /// Zero: no snapshots.
    pub snapshot_interval: Interval,
    pub snapshot_retention: usize,
    /// Empty: `snapshots` in the data directory.
    pub snapshot_dir: PathBuf,
    #[serde(deserialize_with = "values::switch")]
    pub snapshot_history: bool,
    /// Zero: compacted rows are not kept.
    pub history_retention: Interval,
    /// Bytes; 0: no limit.
    #[serde(deserialize_with = "values::bytes")]
    pub history_bytes: u64,
    /// 0: no limit.
    pub max_concurrent_streams: u32,
    pub grpc_keepalive_interval: Interval,
    pub grpc_keepalive_timeout: Interval,
    pub warning_apply_duration: Interval,
    pub warning_unary_request_duration: Interval,
    pub metrics: MetricsDetail,
    #[serde(deserialize_with = "values::switch")]
    pub enable_pprof: bool,
    #[serde(deserialize_with = "values::switch")]
    pub enable_distributed_tracing: bool,
    /// `HOST:PORT`.
    pub distributed_tracing_address: String,
    pub distributed_tracing_service_name: String,
    /// Empty: none.
    pub distributed_tracing_instance_id: String,
    /// Per million.
    pub distributed_tracing_sampling_rate: u32,
    /// Empty: none; the same applies to the other files.
    pub cert_file: PathBuf,
    pub key_file: PathBuf,
    #[serde(deserialize_with = "values::switch")]
    pub client_cert_auth: bool,
    pub trusted_ca_file: PathBuf,
    pub client_crl_file: PathBuf,
    pub client_cert_allowed_hostname: List<String>,
    #[serde(deserialize_with = "values::switch")]
    pub auto_tls: bool,
    pub self_signed_cert_validity: u32,
    pub cipher_suites: List<CipherSuite>,
    pub tls_min_version: TlsVersion,
    pub tls_max_version: TlsVersion,
    pub auth_token: AuthToken,
    /// Seconds; 0: the default.
    pub auth_token_ttl: u64,
    /// A cost that bcrypt does not accept means the default, as in etcd.
    pub bcrypt_cost: u64,
}

impl Default for Settings {
    fn default() -> Self {
        let (compaction, slow) = (CompactionRate::default(), SlowThresholds::default());
        Self {
            name: String::new(),
            data_dir: "orlop-data".into(),
            datastore_endpoint: Secret::default(),
            datastore_poll_interval: Interval(store::Settings::POLL_INTERVAL),
            datastore_connections: 8,
            unsafe_no_fsync: false,
            listen_client_urls: List(vec![ListenUrl::Tcp("127.0.0.1:2379".to_owned(), Scheme::Plain)]),
            listen_client_http_urls: List::default(),
            listen_address: String::new(),
            unix_socket_mode: FileMode(0o600),
            console_listen_url: List::default(),
            console_allowed_hosts: List::default(),
            console_password_file: PathBuf::new(),
            cors: List::default(),
            host_whitelist: List::default(),
            advertise_client_urls: List::default(),
            max_request_bytes: 1_572_864,
            max_txn_ops: 128,
            watch_progress_notify_interval: Interval(Duration::from_secs(600)),
            value_cache_bytes: store::Settings::VALUE_CACHE_BYTES,
            worker_threads: 0,
            log_level: "info".to_owned(),
            log_format: LogFormat::Auto,
            log_outputs: List(vec!["default".to_owned()]),
            enable_log_rotation: false,
            log_rotation_config_json: r#"{"maxsize": 100, "maxage": 0, "maxbackups": 0}"#.to_owned(),
            quota_backend_bytes: 0,
            auto_compaction_mode: AutoCompactionMode::Periodic,
            auto_compaction_retention: "0".to_owned(),
            compaction_batch_limit: compaction.rows,
            compaction_sleep_interval: Interval(compaction.pause),
            snapshot_interval: Interval(Duration::ZERO),
            snapshot_retention: 7,
            snapshot_dir: PathBuf::new(),
            snapshot_history: false,
            history_retention: Interval(Duration::ZERO),
            history_bytes: 0,
            max_concurrent_streams: u32::MAX,
            grpc_keepalive_interval: Interval(Duration::from_secs(2 * 60 * 60)),
            grpc_keepalive_timeout: Interval(Duration::from_secs(20)),
            warning_apply_duration: Interval(slow.apply),
            warning_unary_request_duration: Interval(slow.request),
            metrics: MetricsDetail::Basic,
            enable_pprof: false,
            enable_distributed_tracing: false,
            distributed_tracing_address: "localhost:4317".to_owned(),
            distributed_tracing_service_name: "orlop".to_owned(),
            distributed_tracing_instance_id: String::new(),
            distributed_tracing_sampling_rate: 0,
            listen_metrics_urls: List::default(),
            cert_file: PathBuf::new(),
            key_file: PathBuf::new(),
            client_cert_auth: false,
            trusted_ca_file: PathBuf::new(),
            client_crl_file: PathBuf::new(),
            client_cert_allowed_hostname: List::default(),
            auto_tls: false,
            self_signed_cert_validity: 1,
            cipher_suites: List::default(),
            tls_min_version: TlsVersion::Tls12,
            tls_max_version: TlsVersion::Tls13,
            auth_token: AuthToken::Simple,
            auth_token_ttl: Self::AUTH_TOKEN_TTL_SECS,
            bcrypt_cost: BCRYPT_COST.into(),
        }
    }
}

impl Settings {
    /// TTL of simple tokens if none is set, as in etcd.
    pub const AUTH_TOKEN_TTL_SECS: u64 = 300;

    /// Merges all sources and checks the result.
    ///
    /// # Errors
    ///
    /// A text for the operator that names the setting, its source and the accepted values.
    pub fn load(flags: &Flags) -> Result<Self, String> {
        Self::load_with_notices(flags, Notices::default()).map(|(settings, _)| settings)
    }

    /// Like [`Settings::load`], and returns what the operator should know about all sources. `of_flags`: what they should
    /// know about the flags.
    pub fn load_with_notices(flags: &Flags, of_flags: Notices) -> Result<(Self, Notices), String> {
        let variables = std::env::vars_os().filter_map(|(name, text)| Some((name.into_string().ok()?, text)));
        let variables = Variables::read(variables)?;
        let mut figment = Self::defaults(&variables);
        let default_urls: Urls = figment.extract_inner("listen-client-urls").map_err(|error| error.to_string())?;
        let mut of_file = Notices::default();
        let etcds_file = std::env::var_os("ETCD_CONFIG_FILE").filter(|file| !file.is_empty()).map(PathBuf::from);
        if let Some(file) = flags.datastore.config_file().or(etcds_file.as_deref()) {
            let file = ConfigFile::read(file)?;
            figment = figment.merge(&file);
            of_file = file.notices;
        }
        variables.check_flags(flags)?;
        let settings = Self::merge(figment, &variables, flags)?;
        let unspecified_urls = settings.unspecified_urls(&default_urls);
        Ok((settings, Notices { unspecified_urls, ..Notices::merged(of_flags, of_file, variables.notices) }))
    }

    /// Builds settings from texts instead of a file and the environment, for fuzzing.
    pub fn of_texts(
        toml: Option<&str>,
        yaml: Option<&str>,
        variables: &[(String, String)],
        flags: &Flags,
    ) -> Result<Self, String> {
        let variables = variables.iter().map(|(name, text)| (name.clone(), text.into()));
        let variables = Variables::read(variables)?;
        let mut figment = Self::defaults(&variables);
        if let Some(text) = toml {
            figment = figment.merge(ConfigFile::of(text, Language::Toml)?);
        }
        if let Some(text) = yaml {
            figment = figment.merge(ConfigFile::of(text, Language::Yaml)?);
        }
        Self::merge(figment, &variables, flags)
    }

    /// Returns the settings where nothing was set.
    fn defaults(variables: &Variables) -> Figment {
        Figment::from(Serialized::defaults(Self::default())).merge(&variables.defaults)
    }

    fn merge(earlier: Figment, variables: &Variables, flags: &Flags) -> Result<Self, String> {
        let sources = [&variables.etcd, &variables.orlop, flags];
        let figment = sources.into_iter().fold(earlier, |figment, source| figment.merge(source));
        let mut settings: Self = figment.extract().map_err(|error| error.to_string())?;
        if let Some(url) = settings.kine_url()? {
            if settings.listen_client_urls == Self::default().listen_client_urls {
                settings.listen_client_urls.0.clear();
            }
            settings.listen_client_urls.0.push(url);
        }
        settings.check()?;
        Ok(settings)
    }

    /// Returns `listen-address` as a URL.
    fn kine_url(&self) -> Result<Option<ListenUrl>, String> {
        if self.listen_address.is_empty() {
            return Ok(None);
        }
        let scheme = if self.cert_file.as_os_str().is_empty() { Scheme::Plain } else { Scheme::Tls };
        let url = ListenUrl::of_kine(&self.listen_address, scheme);
        url.map(Some).map_err(|error| format!("listen-address: {error}"))
    }

    fn check(&self) -> Result<(), String> {
        if self.listen_client_urls.0.is_empty() {
            return Err(
                "listen-client-urls is empty; it must contain at least one address, for example http://127.0.0.1:2379"
                    .to_owned(),
            );
        }
        for (key, number) in [
            ("max-request-bytes", self.max_request_bytes),
            ("max-txn-ops", self.max_txn_ops),
            ("compaction-batch-limit", self.compaction_batch_limit),
            ("snapshot-retention", self.snapshot_retention),
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
        let snapshot_interval = self.snapshot_interval.0;
        if !snapshot_interval.is_zero() && snapshot_interval < Interval::SNAPSHOT_MIN {
            return Err(format!(
                "snapshot-interval must be 0, which is off, or at least 1s, got {}",
                self.snapshot_interval
            ));
        }
        if self.snapshot_history && self.history_retention.0.is_zero() {
            return Err(
                "snapshot-history requires history-retention, the time for which the history is kept".to_owned()
            );
        }
        if self.datastore_poll_interval.0 < Interval::POLL_MIN {
            return Err(format!("datastore-poll-interval must be at least 1ms, got {}", self.datastore_poll_interval));
        }
        if !(1..=100).contains(&self.self_signed_cert_validity) {
            return Err(format!(
                "self-signed-cert-validity must be from 1 to 100 years, got {}",
                self.self_signed_cert_validity
            ));
        }
        if self.distributed_tracing_sampling_rate > 1_000_000 {
            return Err(format!(
                "distributed-tracing-sampling-rate is per million and must be at most 1000000, got {}",
                self.distributed_tracing_sampling_rate
            ));
        }
        if self.enable_distributed_tracing && self.distributed_tracing_address.contains("://") {
            return Err(format!(
                "distributed-tracing-address must be HOST:PORT without a scheme, got {:?}",
                self.distributed_tracing_address
            ));
        }
        if self.datastore_connections == 0 {
            return Err("datastore-connections must be at least 1, got 0".to_owned());
        }
        self.auto_compaction()?;
        self.tls()?;
        self.check_console()?;
        self.datastore().map(drop)
    }

    /// Checks that the web page does not let in those who need a certificate everywhere else.
    fn check_console(&self) -> Result<(), String> {
        let is_open = |url: &&ListenUrl| matches!(url, ListenUrl::Tcp(_, Scheme::Plain));
        match self.console_listen_url.0.iter().find(is_open) {
            Some(url) if !self.trusted_ca_file.as_os_str().is_empty() => Err(format!(
                "console-listen-url {url} must be https, because trusted-ca-file requires a certificate of every client"
            )),
            Some(_) | None => Ok(()),
        }
    }

    /// Returns the history that automatic compaction keeps; `None` if it is disabled.
    ///
    /// # Errors
    ///
    /// If the retention is invalid for the mode.
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

    /// Checks that the database may have as many instances as `initial-cluster` names members. An empty text names none.
    ///
    /// # Errors
    ///
    /// If it names several, and the database is SQLite: each instance would have a store of its own.
    pub fn check_members(&self, initial_cluster: &str) -> Result<(), String> {
        match (members(initial_cluster), self.datastore()?) {
            (0 | 1, _) | (_, Datastore::Postgres(_)) => Ok(()),
            (members, Datastore::Sqlite(_)) => Err(format!(
                "initial-cluster names {members} members, but SQLite serves one instance: set datastore-endpoint to a \
                 postgres:// URL, which instances share, or name one member"
            )),
        }
    }

    /// Returns the configured name, or one that is unique among instances on one database and survives restarts.
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
            Some(ListenUrl::Tcp(address, _)) => {
                format!("{host}-{}", address.rsplit_once(':').map_or(address.as_str(), |(_, port)| port))
            }
            Some(ListenUrl::Unix(..)) | None => host.to_owned(),
        }
    }

    /// Returns the location of the log.
    ///
    /// # Errors
    ///
    /// If the kind of endpoint, or a parameter of it, is unknown.
    pub fn datastore(&self) -> Result<Datastore, String> {
        endpoint::datastore(&self.datastore_endpoint.0, &self.data_dir)
    }
}
