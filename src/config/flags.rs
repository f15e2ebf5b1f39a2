//! The server's flags. Their help texts are the reference for `--help` and the manual page.

use std::{
    any::TypeId,
    collections::{BTreeMap, HashMap},
    error::Error as _,
    ffi::{OsStr, OsString},
    num::ParseIntError,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use clap::{
    Args as _, Command, FromArgMatches as _,
    builder::{OsStringValueParser, PathBufValueParser, TypedValueParser},
    error::{ContextKind, ContextValue, ErrorKind},
};
use figment::{
    Metadata, Profile, Provider,
    providers::Serialized,
    value::{Dict, Map, Value},
};
use serde::Serialize;

use super::{
    AuthToken, AutoCompactionMode, CipherSuite, FileMode, HostName, Interval, List, LogFormat, MetricsDetail, Origin,
    Secret, TlsVersion, Urls,
    etcd_only::ignored_flag_definitions,
    values::{parse_bytes, parse_switch},
};

// Headings of `--help`.
const DATASTORE: &str = "Datastore";
const SNAPSHOTS: &str = "Scheduled snapshots";
const ADDRESSES: &str = "Addresses";
const REQUESTS: &str = "Requests";
const AUTH: &str = "Users and roles";
const TLS: &str = "TLS";
const TELEMETRY: &str = "Log, metrics, traces";

/// The flags of the server. If a flag is not given, its setting comes from the variable, the file or the default.
#[derive(Clone, Debug, Default, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Flags {
    /// Name of this member in MemberList; must be unique among instances on one database [default: default, and
    /// on Postgres HOSTNAME-PORT]
    #[arg(help_heading = ADDRESSES, long, value_name = "NAME")]
    name: Option<String>,

    #[command(flatten)]
    #[serde(flatten)]
    pub(super) datastore: DatastoreFlags,

    /// Maximum time between two checks of a Postgres log for new rows; notifications arrive earlier [default: 100ms]
    #[arg(help_heading = DATASTORE, long, value_name = "DURATION")]
    datastore_poll_interval: Option<Interval>,

    /// Connections to Postgres for reads; appends, notifications and position queries use three more [default: 8]
    #[arg(help_heading = DATASTORE, long, value_name = "COUNT")]
    datastore_connections: Option<u32>,

    /// Addresses to listen on for clients, separated by commas: http://HOST:PORT, https://HOST:PORT, unix://PATH or,
    /// with TLS, unixs://PATH
    /// [default: http://127.0.0.1:2379]
    #[arg(help_heading = ADDRESSES, long, value_name = "URLS")]
    listen_client_urls: Option<Urls>,

    /// Address to listen on for clients, HOST:PORT, with TLS if a certificate is set; a flag of kine
    #[arg(help_heading = ADDRESSES, long, value_name = "ADDRESS")]
    listen_address: Option<String>,

    /// File mode of unix sockets, octal [default: 0600, only the server's user can connect]
    #[arg(help_heading = ADDRESSES, long, value_name = "MODE")]
    unix_socket_mode: Option<FileMode>,

    /// Addresses that MemberList reports to clients, separated by commas [default: listen-client-urls]
    #[arg(help_heading = ADDRESSES, long, value_name = "URLS")]
    advertise_client_urls: Option<Urls>,

    /// Addresses for HTTP; listen-client-urls then serve gRPC alone [default: none]
    #[arg(help_heading = ADDRESSES, long, value_name = "URLS")]
    listen_client_http_urls: Option<Urls>,

    /// Addresses of the web page about this server, separated by commas, for example http://127.0.0.1:2382 [default: none]
    #[arg(help_heading = ADDRESSES, long, value_name = "URLS")]
    console_listen_url: Option<Urls>,

    /// Names, without ports, under which browsers may request the web page, in addition to localhost and its address,
    /// separated by commas
    #[arg(help_heading = ADDRESSES, long, value_name = "HOSTS")]
    console_allowed_hosts: Option<List<HostName>>,

    /// File with the password of the web page, with which visitors log in if Auth is disabled; without it, the page then
    /// only reads
    #[arg(help_heading = ADDRESSES, long, value_name = "FILE")]
    console_password_file: Option<PathBuf>,

    /// Origins whose pages may read responses of HTTP, separated by commas, such as http://HOST:PORT [default: *, all]
    #[arg(help_heading = ADDRESSES, long, value_name = "ORIGINS")]
    cors: Option<List<Origin>>,

    /// Hosts for which HTTP is served without TLS, separated by commas [default: *, all]
    #[arg(help_heading = ADDRESSES, long, value_name = "HOSTS")]
    host_whitelist: Option<List<String>>,

    /// Maximum size of a write request, in bytes or with a unit such as 4MiB [default: 1572864]
    #[arg(help_heading = REQUESTS, long, value_name = "BYTES", value_parser = parse_bytes::<usize>)]
    max_request_bytes: Option<usize>,

    /// Maximum number of operations in a transaction [default: 128]
    #[arg(help_heading = REQUESTS, long, value_name = "COUNT")]
    max_txn_ops: Option<usize>,

    /// Interval of progress notifications for watches without events that set progress_notify [default: 10m]
    #[arg(help_heading = REQUESTS, long, value_name = "DURATION", alias = "experimental-watch-progress-notify-interval")]
    watch_progress_notify_interval: Option<Interval>,

    /// Memory for values; 0 disables the cache [default: 256MiB]
    #[arg(help_heading = DATASTORE, long, value_name = "BYTES", value_parser = parse_bytes::<u64>)]
    value_cache_bytes: Option<u64>,

    /// Do not sync commits to the disk: a crash of the machine loses acknowledged writes or damages the database
    #[arg(help_heading = DATASTORE, long, value_name = "BOOL", value_parser = parse_switch, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    unsafe_no_fsync: Option<bool>,

    /// Threads that serve requests; 0: one thread on up to two cores, else one per core [default: 0]
    #[arg(help_heading = REQUESTS, long, value_name = "COUNT")]
    worker_threads: Option<usize>,

    /// Log level: error, warn, info, debug, trace or off, or a filter such as info,orlop_core::watch=debug
    /// [default: info]
    #[arg(help_heading = TELEMETRY, long, value_name = "LEVEL")]
    log_level: Option<String>,

    /// Format of the log; auto: text on a terminal, JSON otherwise [default: auto]
    #[arg(help_heading = TELEMETRY, long, value_name = "FORMAT")]
    log_format: Option<LogFormat>,

    /// Where the log is written: stderr (also as default or systemd/journal), stdout or paths of files, separated by
    /// commas [default: default]
    #[arg(help_heading = TELEMETRY, long, value_name = "PLACES")]
    log_outputs: Option<List<String>>,

    /// Rotate the log; requires one file in log-outputs
    #[arg(help_heading = TELEMETRY, long, value_name = "BOOL", value_parser = parse_switch, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    enable_log_rotation: Option<bool>,

    /// Limits of rotated files as in etcd: maxsize in MiB, maxage in days, maxbackups
    /// [default: {"maxsize": 100, "maxage": 0, "maxbackups": 0}]
    #[arg(help_heading = TELEMETRY, long, value_name = "JSON")]
    log_rotation_config_json: Option<String>,

    /// Maximum bytes in use, for example 8GiB; above it writes fail and the alarm NOSPACE is raised. 0: 2 GiB, negative:
    /// no quota [default: 0]
    #[arg(help_heading = DATASTORE, long, value_name = "BYTES", value_parser = parse_bytes::<i64>, allow_negative_numbers = true)]
    quota_backend_bytes: Option<i64>,

    /// Unit of auto-compaction-retention [default: periodic]
    #[arg(help_heading = DATASTORE, long, value_name = "MODE")]
    auto_compaction_mode: Option<AutoCompactionMode>,

    /// History that automatic compaction keeps: a duration such as 30m, a number of hours or, with auto-compaction-mode
    /// revision, a number of revisions; 0 disables it [default: 0]
    #[arg(help_heading = DATASTORE, long, value_name = "RETENTION")]
    auto_compaction_retention: Option<String>,

    /// Number of rows that compaction deletes in one step [default: 1000]
    #[arg(help_heading = DATASTORE, long, value_name = "COUNT", alias = "experimental-compaction-batch-limit")]
    compaction_batch_limit: Option<usize>,

    /// Pause between two steps of compaction [default: 10ms]
    #[arg(help_heading = DATASTORE, long, value_name = "DURATION", alias = "experimental-compaction-sleep-interval")]
    compaction_sleep_interval: Option<Interval>,

    /// Interval at which the server saves a snapshot of its store, such as 6h; 0: off [default: 0]
    #[arg(help_heading = SNAPSHOTS, long, value_name = "DURATION")]
    snapshot_interval: Option<Interval>,

    /// Number of these snapshots that are kept; older ones are deleted [default: 7]
    #[arg(help_heading = SNAPSHOTS, long, value_name = "COUNT")]
    snapshot_retention: Option<usize>,

    /// Folder of these snapshots, created if it does not exist [default: snapshots in the data directory]
    #[arg(help_heading = SNAPSHOTS, long, value_name = "FOLDER", value_parser = utf8_path())]
    snapshot_dir: Option<PathBuf>,

    /// Include the history in these snapshots (history-retention)
    #[arg(help_heading = SNAPSHOTS, long, value_name = "BOOL", value_parser = parse_switch, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    snapshot_history: Option<bool>,

    /// Time for which compacted rows are kept for orlop history, diff, get and rewind, such as 7d; 0: not at all
    /// [default: 0]
    #[arg(help_heading = DATASTORE, long, value_name = "DURATION")]
    history_retention: Option<Interval>,

    /// Maximum size of these rows, for example 10GiB; the oldest are deleted first. 0: no limit [default: 0]
    #[arg(help_heading = DATASTORE, long, value_name = "BYTES", value_parser = parse_bytes::<u64>)]
    history_bytes: Option<u64>,

    /// Maximum number of concurrent calls on one connection; 0: no limit [default: 4294967295]
    #[arg(help_heading = REQUESTS, long, value_name = "COUNT")]
    max_concurrent_streams: Option<u32>,

    /// Time without traffic after which the server sends a keepalive ping on a connection. 0: no pings [default: 2h]
    #[arg(help_heading = REQUESTS, long, value_name = "DURATION")]
    grpc_keepalive_interval: Option<Interval>,

    /// Maximum time for the response to a keepalive ping before the connection is closed. 0: no pings [default: 20s]
    #[arg(help_heading = REQUESTS, long, value_name = "DURATION")]
    grpc_keepalive_timeout: Option<Interval>,

    /// Write batches that take longer are counted as slow [default: 100ms]
    #[arg(help_heading = TELEMETRY, long, value_name = "DURATION", alias = "experimental-warning-apply-duration")]
    warning_apply_duration: Option<Interval>,

    /// Requests that take longer are logged with the time of each phase [default: 300ms]
    #[arg(help_heading = TELEMETRY, long, value_name = "DURATION", alias = "experimental-warning-unary-request-duration")]
    warning_unary_request_duration: Option<Interval>,

    /// Metrics to export; extensive adds latency histograms of gRPC calls per method [default: basic]
    #[arg(help_heading = TELEMETRY, long, value_name = "DETAIL")]
    metrics: Option<MetricsDetail>,

    /// Serve CPU profiles and memory statistics on /debug/pprof/ of the client URLs
    #[arg(help_heading = TELEMETRY, long, value_name = "BOOL", value_parser = parse_switch, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    enable_pprof: Option<bool>,

    /// Export requests as OpenTelemetry spans
    #[arg(help_heading = TELEMETRY, long, value_name = "BOOL", value_parser = parse_switch, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        alias = "experimental-enable-distributed-tracing")]
    enable_distributed_tracing: Option<bool>,

    /// Address of the OTLP collector (gRPC), HOST:PORT [default: localhost:4317]
    #[arg(help_heading = TELEMETRY, long, value_name = "ADDRESS", alias = "experimental-distributed-tracing-address")]
    distributed_tracing_address: Option<String>,

    /// Service name in the spans [default: orlop]
    #[arg(help_heading = TELEMETRY, long, value_name = "NAME", alias = "experimental-distributed-tracing-service-name")]
    distributed_tracing_service_name: Option<String>,

    /// Instance ID in the spans
    #[arg(help_heading = TELEMETRY, long, value_name = "ID", alias = "experimental-distributed-tracing-instance-id")]
    distributed_tracing_instance_id: Option<String>,

    /// Number of requests per million to sample, in addition to those whose caller's span is sampled [default: 0]
    #[arg(help_heading = TELEMETRY, long, value_name = "COUNT", alias = "experimental-distributed-tracing-sampling-rate")]
    distributed_tracing_sampling_rate: Option<u32>,

    /// Additional addresses for metrics and health, separated by commas
    #[arg(help_heading = ADDRESSES, long, value_name = "URLS")]
    listen_metrics_urls: Option<Urls>,

    /// Certificate chain of the server, PEM; reloaded when the file changes
    #[arg(help_heading = TLS, long, value_name = "FILE", alias = "server-cert-file", value_parser = utf8_path())]
    cert_file: Option<PathBuf>,

    /// Key of the server's certificate, PEM
    #[arg(help_heading = TLS, long, value_name = "FILE", alias = "server-key-file", value_parser = utf8_path())]
    key_file: Option<PathBuf>,

    /// Require client certificates signed by trusted-ca-file
    #[arg(help_heading = TLS, long, value_name = "BOOL", value_parser = parse_switch, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    client_cert_auth: Option<bool>,

    /// Root certificates for verifying clients, PEM; if set, every client must present a certificate
    #[arg(help_heading = TLS, long, value_name = "FILE", value_parser = utf8_path())]
    trusted_ca_file: Option<PathBuf>,

    /// Certificate revocation list for clients, PEM or DER; reloaded when the file changes
    #[arg(help_heading = TLS, long, value_name = "FILE", value_parser = utf8_path())]
    client_crl_file: Option<PathBuf>,

    /// Accepted names of client certificates, separated by commas
    #[arg(help_heading = TLS, long, value_name = "NAMES")]
    client_cert_allowed_hostname: Option<List<String>>,

    /// Generate a self-signed certificate if none is given; clients cannot verify it
    #[arg(help_heading = TLS, long, value_name = "BOOL", value_parser = parse_switch, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    auto_tls: Option<bool>,

    /// Validity of the self-signed certificate in years [default: 1]
    #[arg(help_heading = TLS, long, value_name = "YEARS")]
    self_signed_cert_validity: Option<u32>,

    /// Cipher suites to offer, separated by commas [default: all supported]
    #[arg(help_heading = TLS, long, value_name = "SUITES")]
    cipher_suites: Option<List<CipherSuite>>,

    /// Minimum TLS version [default: TLS1.2]
    #[arg(help_heading = TLS, long, value_name = "VERSION")]
    tls_min_version: Option<TlsVersion>,

    /// Maximum TLS version [default: TLS1.3]
    #[arg(help_heading = TLS, long, value_name = "VERSION")]
    tls_max_version: Option<TlsVersion>,

    /// Tokens: simple, or jwt,sign-method=METHOD,pub-key=FILE,priv-key=FILE,ttl=DURATION [default: simple]
    #[arg(help_heading = AUTH, long, value_name = "TOKENS")]
    auth_token: Option<AuthToken>,

    /// Time in seconds after which an unused simple token expires [default: 300]
    #[arg(help_heading = AUTH, long, value_name = "SECS")]
    auth_token_ttl: Option<u64>,

    /// Cost of the bcrypt hashes of new passwords, 4 to 31 [default: 10]
    #[arg(help_heading = AUTH, long, value_name = "COST")]
    bcrypt_cost: Option<u64>,
}

/// Returns a parser of paths. Settings are text, so they must be UTF-8.
fn utf8_path() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| {
        let is_text = path.to_str().is_some();
        is_text.then_some(path).ok_or("the path is not UTF-8")
    })
}

/// Provides the settings of the flags that are given.
impl Provider for Flags {
    fn metadata(&self) -> Metadata {
        Serialized::defaults(self).metadata()
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        let mut data = Serialized::defaults(self).data()?;
        data.values_mut().for_each(|settings| settings.retain(|_, value| !matches!(value, Value::Empty(..))));
        Ok(data)
    }
}

/// All flags of the server, also those that it ignores.
static COMMAND: LazyLock<Command> = LazyLock::new(|| {
    Flags::augment_args(Command::new("orlop")).args(ignored_flag_definitions()).args_override_self(true)
});

/// The setting of each name of a flag.
static SETTINGS: LazyLock<HashMap<String, String>> = LazyLock::new(|| {
    let command = Flags::augment_args(Command::new("orlop"));
    let mut settings = HashMap::new();
    for flag in command.get_arguments() {
        let Some(setting) = flag.get_long().filter(|name| *name != "config-file") else { continue };
        for name in flag.get_all_aliases().unwrap_or_default().into_iter().chain([setting]) {
            settings.insert(name.to_owned(), setting.to_owned());
        }
    }
    settings
});

/// Returns the setting that a flag with this name, or with it as an alias, sets.
pub(super) fn setting_of(name: &str) -> Option<&'static String> {
    SETTINGS.get(name)
}

/// Returns the names of all settings, with their aliases.
pub(super) fn setting_names() -> impl Iterator<Item = &'static str> {
    SETTINGS.keys().map(String::as_str)
}

/// Returns whether the value of a setting is a duration.
pub(super) fn is_duration(setting: &str) -> bool {
    let flag = COMMAND.get_arguments().find(|flag| flag.get_long() == Some(setting));
    flag.is_some_and(|flag| flag.get_value_parser().type_id() == TypeId::of::<Interval>())
}

/// Flags that are not given on the command line but elsewhere: by the setting, the name of their place and the flag with its
/// value.
#[derive(Default)]
pub(super) struct Given(BTreeMap<String, (String, OsString)>);

impl Given {
    /// Adds a flag with its value; `source` is the name of their place in an error. Refuses a second flag for one setting, as
    /// an alias is: which of them counts would be a guess.
    pub(super) fn add(&mut self, flag: &str, text: &OsStr, source: &str) -> Result<(), String> {
        let mut word = OsString::from(format!("--{flag}="));
        word.push(text);
        let invalid = |error| invalid_value(&error, text, source);
        COMMAND.clone().try_get_matches_from([OsStr::new("orlop"), &word]).map_err(invalid)?;
        let setting = setting_of(flag).map_or(flag, String::as_str);
        match self.0.insert(setting.to_owned(), (source.to_owned(), word)) {
            Some((other, _)) => Err(format!("{other} and {source} are the same setting: set one of them")),
            None => Ok(()),
        }
    }

    pub(super) fn flags(self) -> Result<Flags, String> {
        let words = [OsString::from("orlop")].into_iter().chain(self.0.into_values().map(|(_, word)| word));
        let matches = COMMAND.clone().try_get_matches_from(words).map_err(|error| error.to_string())?;
        Flags::from_arg_matches(&matches).map_err(|error| error.to_string())
    }
}

fn invalid_value(error: &clap::Error, text: &OsStr, source: &str) -> String {
    if error.kind() == ErrorKind::InvalidUtf8 {
        return format!("the value of {source} is not UTF-8");
    }
    let reason = match (error.source(), error.get(ContextKind::ValidValue)) {
        (Some(reason), _) if reason.is::<ParseIntError>() => "it must be a whole number".to_owned(),
        (Some(reason), _) => reason.to_string(),
        (None, Some(ContextValue::Strings(values))) => format!("use {}", values.join(" or ")),
        (None, _) => error.kind().to_string(),
    };
    format!("invalid value {text:?} for {source}: {reason}")
}

/// The location of the log.
#[derive(Clone, Debug, Default, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DatastoreFlags {
    /// Configuration file in TOML or, with the extension .yaml or .yml, YAML; its keys are the flags' names
    #[arg(help_heading = DATASTORE, long, value_name = "FILE", env = "ORLOP_CONFIG_FILE",
        value_parser = OsStringValueParser::new().map(PathBuf::from))]
    #[serde(skip)]
    config_file: Option<PathBuf>,

    /// Directory of the SQLite database; a server creates it if it does not exist [default: orlop-data]
    #[arg(help_heading = DATASTORE, long, value_name = "FOLDER", value_parser = utf8_path())]
    data_dir: Option<PathBuf>,

    /// URL of the database: sqlite://PATH or postgres://USER:PASSWORD@HOST:PORT,.../DATABASE, with parameters of libpq
    /// such as sslmode and sslrootcert [default: orlop.db in the data directory]
    #[arg(help_heading = DATASTORE, long, value_name = "URL", alias = "endpoint")]
    datastore_endpoint: Option<Secret>,
}

impl DatastoreFlags {
    /// Returns the configuration file. As in etcd, an empty name counts as not set.
    pub(super) fn config_file(&self) -> Option<&Path> {
        self.config_file.as_deref().filter(|file| !file.as_os_str().is_empty())
    }

    /// Returns whether one of these flags is given.
    pub fn is_given(&self) -> bool {
        self.config_file().is_some() || self.data_dir.is_some() || self.datastore_endpoint.is_some()
    }
}

impl From<DatastoreFlags> for Flags {
    fn from(datastore: DatastoreFlags) -> Self {
        Self { datastore, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;

    /// Flags whose default in the help describes what happens if nothing is set.
    const DESCRIBED: [&str; 9] = [
        "name",
        "datastore-endpoint",
        "advertise-client-urls",
        "listen-client-http-urls",
        "console-listen-url",
        "cors",
        "host-whitelist",
        "snapshot-dir",
        "cipher-suites",
    ];

    #[test]
    fn defaults_in_the_help_are_those_of_the_settings() {
        let mut described = Vec::new();
        for flag in Flags::augment_args(Command::new("orlop")).get_arguments() {
            let help = flag.get_help().expect("each flag has a help text").to_string();
            let Some((_, default)) = help.split_once("[default: ") else { continue };
            let name = flag.get_long().expect("each flag has a long name");
            if DESCRIBED.contains(&name) {
                described.push(name.to_owned());
                continue;
            }
            let default = default.strip_suffix(']').unwrap_or_else(|| panic!("{name}: {help}"));
            let value = default.split_once(", only ").map_or(default, |(value, _)| value);
            let mut given = Given::default();
            given.add(name, value.as_ref(), "the help").unwrap_or_else(|error| panic!("{name}: {error}"));
            let flags = given.flags().expect("a flag");
            assert_eq!(Settings::of_texts(None, None, &[], &flags), Ok(Settings::default()), "{name}");
        }
        assert_eq!(described.len(), DESCRIBED.len(), "{described:?}");
    }
}
