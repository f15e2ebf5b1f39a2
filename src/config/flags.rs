//! The server's command line. What a setting means is said here once: `--help` and the manual page print it.

use std::path::PathBuf;

use serde::Serialize;

use super::{
    AutoCompactionMode, CipherSuite, FileMode, Interval, List, LogFormat, MetricsDetail, Secret, TlsVersion, Urls,
};

// What `--help` groups them by.
const DATASTORE: &str = "Datastore";
const ADDRESSES: &str = "Addresses";
const REQUESTS: &str = "Requests";
const TLS: &str = "TLS";
const TELEMETRY: &str = "Log, metrics, traces";

/// The flags of the server. What is not given is left to the other sources.
#[derive(Clone, Debug, Default, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Flags {
    /// Name of this member, as MemberList shows it; instances on one database each need their own [default: default, and
    /// on Postgres HOSTNAME-PORT]
    #[arg(help_heading = ADDRESSES, long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,

    #[command(flatten)]
    #[serde(flatten)]
    pub(super) datastore: DatastoreFlags,

    /// How often a Postgres log is looked at when no notification tells of new rows [default: 100ms]
    #[arg(help_heading = DATASTORE, long, value_name = "DURATION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    datastore_poll_interval: Option<Interval>,

    /// Connections to Postgres for reading; three more are for appending, listening and asking [default: 8]
    #[arg(help_heading = DATASTORE, long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    datastore_connections: Option<u32>,

    /// Addresses to serve clients on, separated by commas: http://HOST:PORT, https://HOST:PORT, unix://PATH or,
    /// with TLS, unixs://PATH
    /// [default: http://127.0.0.1:2379]
    #[arg(help_heading = ADDRESSES, long, value_name = "URLS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    listen_client_urls: Option<Urls>,

    /// As kine has it: HOST:PORT to serve clients on, with TLS if there is a certificate
    #[arg(help_heading = ADDRESSES, long, value_name = "ADDRESS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    listen_address: Option<String>,

    /// Who may connect to unix sockets: their mode, in octal [default: 0600, the server's user alone]
    #[arg(help_heading = ADDRESSES, long, value_name = "MODE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    unix_socket_mode: Option<FileMode>,

    /// Addresses that clients are told to use, separated by commas [default: those that are listened on]
    #[arg(help_heading = ADDRESSES, long, value_name = "URLS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    advertise_client_urls: Option<Urls>,

    /// Longest request that writes, in bytes [default: 1572864]
    #[arg(help_heading = REQUESTS, long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_request_bytes: Option<usize>,

    /// Most operations in a transaction [default: 128]
    #[arg(help_heading = REQUESTS, long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_txn_ops: Option<usize>,

    /// How long a watch with progress_notify is silent before it is sent its revision [default: 10m]
    #[arg(help_heading = REQUESTS, long, value_name = "DURATION", alias = "experimental-watch-progress-notify-interval")]
    #[serde(skip_serializing_if = "Option::is_none")]
    watch_progress_notify_interval: Option<Interval>,

    /// Memory for values of live keys, in bytes; 0 turns the cache off [default: 268435456]
    #[arg(help_heading = DATASTORE, long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    value_cache_bytes: Option<u64>,

    /// Threads that serve requests; 0: one on a machine of two cores or fewer, else one a core [default: 0]
    #[arg(help_heading = REQUESTS, long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    worker_threads: Option<usize>,

    /// What is logged: error, warn, info, debug or trace, or a filter like info,orlop::watch=debug [default: info]
    #[arg(help_heading = TELEMETRY, long, value_name = "LEVEL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    log_level: Option<String>,

    /// How the log is written, to standard error [default: text]
    #[arg(help_heading = TELEMETRY, long, value_name = "FORMAT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    log_format: Option<LogFormat>,

    /// Bytes in use beyond which writes are refused and the alarm NOSPACE is raised; 0 is 2 GiB, below 0 none [default: 0]
    #[arg(help_heading = DATASTORE, long, value_name = "BYTES", allow_negative_numbers = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    quota_backend_bytes: Option<i64>,

    /// How auto-compaction-retention is meant [default: periodic]
    #[arg(help_heading = DATASTORE, long, value_name = "MODE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    auto_compaction_mode: Option<AutoCompactionMode>,

    /// History that automatic compaction keeps: a duration like 30m or a number of hours or, with the mode revision, a number
    /// of revisions; 0 turns it off [default: 0]
    #[arg(help_heading = DATASTORE, long, value_name = "RETENTION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    auto_compaction_retention: Option<String>,

    /// Rows that compaction deletes in one step [default: 1000]
    #[arg(help_heading = DATASTORE, long, value_name = "COUNT", alias = "experimental-compaction-batch-limit")]
    #[serde(skip_serializing_if = "Option::is_none")]
    compaction_batch_limit: Option<usize>,

    /// Pause between steps of compaction [default: 10ms]
    #[arg(help_heading = DATASTORE, long, value_name = "DURATION", alias = "experimental-compaction-sleep-interval")]
    #[serde(skip_serializing_if = "Option::is_none")]
    compaction_sleep_interval: Option<Interval>,

    /// Most calls at the same time on one connection [default: 4294967295]
    #[arg(help_heading = REQUESTS, long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_concurrent_streams: Option<u32>,

    /// A connection that is silent for this long is asked whether it is still there [default: 2h]
    #[arg(help_heading = REQUESTS, long, value_name = "DURATION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    grpc_keepalive_interval: Option<Interval>,

    /// One that then does not answer for this long is closed [default: 20s]
    #[arg(help_heading = REQUESTS, long, value_name = "DURATION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    grpc_keepalive_timeout: Option<Interval>,

    /// Batches of writes that take longer are counted as slow [default: 100ms]
    #[arg(help_heading = TELEMETRY, long, value_name = "DURATION", alias = "experimental-warning-apply-duration")]
    #[serde(skip_serializing_if = "Option::is_none")]
    warning_apply_duration: Option<Interval>,

    /// Requests that take longer are logged with their parts [default: 300ms]
    #[arg(help_heading = TELEMETRY, long, value_name = "DURATION", alias = "experimental-warning-unary-request-duration")]
    #[serde(skip_serializing_if = "Option::is_none")]
    warning_unary_request_duration: Option<Interval>,

    /// What is measured: extensive adds the time of each gRPC call, by method [default: basic]
    #[arg(help_heading = TELEMETRY, long, value_name = "DETAIL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<MetricsDetail>,

    /// Send requests as OpenTelemetry spans to a collector
    #[arg(help_heading = TELEMETRY, long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        alias = "experimental-enable-distributed-tracing")]
    #[serde(skip_serializing_if = "Option::is_none")]
    enable_distributed_tracing: Option<bool>,

    /// The collector's address, HOST:PORT, for OTLP over gRPC [default: localhost:4317]
    #[arg(help_heading = TELEMETRY, long, value_name = "ADDRESS", alias = "experimental-distributed-tracing-address")]
    #[serde(skip_serializing_if = "Option::is_none")]
    distributed_tracing_address: Option<String>,

    /// What the spans say of whose they are [default: orlop]
    #[arg(help_heading = TELEMETRY, long, value_name = "NAME", alias = "experimental-distributed-tracing-service-name")]
    #[serde(skip_serializing_if = "Option::is_none")]
    distributed_tracing_service_name: Option<String>,

    /// And of which instance
    #[arg(help_heading = TELEMETRY, long, value_name = "ID", alias = "experimental-distributed-tracing-instance-id")]
    #[serde(skip_serializing_if = "Option::is_none")]
    distributed_tracing_instance_id: Option<String>,

    /// Requests of a million that are sent, beside those whose callers' spans are [default: 0]
    #[arg(help_heading = TELEMETRY, long, value_name = "COUNT", alias = "experimental-distributed-tracing-sampling-rate")]
    #[serde(skip_serializing_if = "Option::is_none")]
    distributed_tracing_sampling_rate: Option<u32>,

    /// Addresses to serve metrics and health on as well, separated by commas
    #[arg(help_heading = ADDRESSES, long, value_name = "URLS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    listen_metrics_urls: Option<Urls>,

    /// The certificate for https addresses, PEM, with those between it and its root; read anew when it changes
    #[arg(help_heading = TLS, long, value_name = "FILE", alias = "server-cert-file")]
    #[serde(skip_serializing_if = "Option::is_none")]
    cert_file: Option<PathBuf>,

    /// The certificate's key, PEM
    #[arg(help_heading = TLS, long, value_name = "FILE", alias = "server-key-file")]
    #[serde(skip_serializing_if = "Option::is_none")]
    key_file: Option<PathBuf>,

    /// Serve only clients with a certificate of trusted-ca-file
    #[arg(help_heading = TLS, long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    client_cert_auth: Option<bool>,

    /// Roots of clients' certificates, PEM; with it every client needs a certificate
    #[arg(help_heading = TLS, long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    trusted_ca_file: Option<PathBuf>,

    /// Certificates of clients that were revoked, PEM or DER; read anew when it changes
    #[arg(help_heading = TLS, long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    client_crl_file: Option<PathBuf>,

    /// Names, separated by commas, of which a client's certificate must be for one
    #[arg(help_heading = TLS, long, value_name = "NAMES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    client_cert_allowed_hostname: Option<List<String>>,

    /// Make a certificate for https addresses where none is given; clients cannot check it
    #[arg(help_heading = TLS, long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    auto_tls: Option<bool>,

    /// Years that such a certificate is valid for [default: 1]
    #[arg(help_heading = TLS, long, value_name = "YEARS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    self_signed_cert_validity: Option<u32>,

    /// Ciphers that are spoken, separated by commas; without them all that are known to be safe
    #[arg(help_heading = TLS, long, value_name = "SUITES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    cipher_suites: Option<List<CipherSuite>>,

    /// Oldest TLS that is spoken [default: TLS1.2]
    #[arg(help_heading = TLS, long, value_name = "VERSION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_min_version: Option<TlsVersion>,

    /// Newest TLS that is spoken [default: TLS1.3]
    #[arg(help_heading = TLS, long, value_name = "VERSION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_max_version: Option<TlsVersion>,
}

/// Where the log is.
#[derive(Clone, Debug, Default, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DatastoreFlags {
    /// A file of settings, TOML or, if its name ends in .yaml or .yml, YAML; keys are the flags' names
    #[arg(help_heading = DATASTORE, long, value_name = "FILE", env = "ORLOP_CONFIG_FILE")]
    #[serde(skip)]
    pub(super) config_file: Option<PathBuf>,

    /// Folder of the SQLite database, made if it is not there [default: orlop-data]
    #[arg(help_heading = DATASTORE, long, value_name = "FOLDER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    data_dir: Option<PathBuf>,

    /// Where the log is kept: sqlite://PATH-OF-FILE or postgres://USER:PASSWORD@HOST:PORT/DATABASE, with ?sslmode= and
    /// ?sslrootcert= as libpq has them [default: orlop.db in the data folder]
    #[arg(help_heading = DATASTORE, long, value_name = "URL", alias = "endpoint")]
    #[serde(skip_serializing_if = "Option::is_none")]
    datastore_endpoint: Option<Secret>,
}

impl From<DatastoreFlags> for Flags {
    fn from(datastore: DatastoreFlags) -> Self {
        Self { datastore, ..Self::default() }
    }
}
