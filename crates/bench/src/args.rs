//! The flags that all scenarios share, and their defaults.

use std::time::Duration;

use orlop_client::{Credentials, Endpoint};

use crate::{closed_loop::Limits, error::Error};

/// Flags that every scenario accepts.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Common options")]
pub struct Common {
    /// Endpoints of the servers under load, separated by commas: http://host:port, https://host:port, unix://path or
    /// unixs://path [default: http://127.0.0.1:2379]
    #[arg(long, global = true, value_delimiter = ',', value_name = "URLS")]
    endpoints: Vec<Endpoint>,

    #[command(flatten)]
    pub credentials: Credentials,

    /// Number of clients; each has one operation in flight [default: 64; range, catch-up and idle: 1; watch: 8]
    #[arg(long, global = true, value_parser = parse_count, value_name = "N")]
    clients: Option<usize>,

    /// Number of connections, shared evenly by the clients (watch and idle: by the streams) [default: one per client or
    /// stream, at most 8]
    #[arg(long, global = true, value_parser = parse_count, value_name = "N")]
    connections: Option<usize>,

    /// Number of operations after which the run ends, not counting those of the warm-up
    #[arg(long, global = true, conflicts_with = "duration", value_parser = clap::value_parser!(u64).range(1..), value_name = "N")]
    total: Option<u64>,

    /// Duration of the run after the warm-up, such as 500ms, 10s or 2m [default: 10s unless --total is given]
    #[arg(long, global = true, value_parser = parse_duration, value_name = "TIME")]
    pub duration: Option<Duration>,

    /// Duration of the warm-up, which is not measured [default: 1s]
    #[arg(long, global = true, value_parser = parse_duration, value_name = "TIME")]
    warmup: Option<Duration>,

    /// Prefix of all keys; the run fails if keys with this prefix exist [default: orlop-bench/; kubernetes with
    /// --renewals or --find-nodes: /registry/]
    #[arg(long, global = true)]
    prefix: Option<String>,

    /// Delete all keys with the prefix first
    #[arg(long, global = true)]
    pub purge: bool,

    /// Do not delete the keys afterwards
    #[arg(long, global = true)]
    pub keep: bool,

    /// Use the keys that an earlier run with --keep has written, instead of writing keys; no keys are deleted
    /// afterwards
    #[arg(long, global = true, conflicts_with = "purge")]
    pub existing: bool,

    /// Also print the CPU time that each thread of the server used per operation; the processes must run on this
    /// machine. Add the PID of Postgres for a server that uses it: child processes are included
    #[arg(long, global = true, value_delimiter = ',', value_parser = clap::value_parser!(i32).range(1..), value_name = "PIDS")]
    pub server_pid: Vec<i32>,

    /// Print the results as one JSON object instead of a table
    #[arg(long, global = true)]
    pub json: bool,
}

const PREFIX_DEFAULT: &str = "orlop-bench/";
const DURATION_DEFAULT: Duration = Duration::from_secs(10);
const WARMUP_DEFAULT: Duration = Duration::from_secs(1);

/// The flags, completed with the defaults of the scenario.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub clients: usize,
    pub connections: usize,
    pub limits: Limits,
    /// The prefix of the keys unless `--prefix` is given.
    pub prefix_default: &'static str,
}

impl Common {
    pub fn endpoints(&self) -> Vec<Endpoint> {
        if self.has_endpoints() {
            return self.endpoints.clone();
        }
        vec![Endpoint::default()]
    }

    pub fn has_endpoints(&self) -> bool {
        !self.endpoints.is_empty()
    }

    /// Completes the flags with defaults. `streams` is the number of streams if the scenario distributes streams over
    /// the connections, and `None` if it distributes clients.
    pub fn plan(&self, clients_default: usize, streams: Option<usize>) -> Result<Plan, Error> {
        if self.prefix.as_deref() == Some("") {
            return Err(Error::Flags(
                "--prefix must not be empty: the run deletes all keys with the prefix".to_owned(),
            ));
        }
        let clients = self.clients.unwrap_or(clients_default);
        let endpoints = self.endpoints().len();
        let connections =
            self.connections.unwrap_or_else(|| streams.unwrap_or(clients).min(CONNECTIONS_DEFAULT_MAX).max(endpoints));
        if connections < endpoints {
            let text = format!("connections={connections} endpoints={endpoints}");
            return Err(Error::Flags(format!("--connections must be at least the number of endpoints, {text}")));
        }
        let duration = self.duration.or(if self.total.is_some() { None } else { Some(DURATION_DEFAULT) });
        let limits = Limits { total: self.total, duration, warmup: self.warmup.unwrap_or(WARMUP_DEFAULT) };
        Ok(Plan { clients, connections, limits, prefix_default: PREFIX_DEFAULT })
    }

    pub fn prefix(&self, plan: &Plan) -> String {
        self.prefix.clone().unwrap_or_else(|| plan.prefix_default.to_owned())
    }

    pub fn has_prefix(&self) -> bool {
        self.prefix.is_some()
    }

    pub fn has_total(&self) -> bool {
        self.total.is_some()
    }

    /// Rejects `--server-pid`, for a command that does not measure CPU time.
    fn reject_server_pid(&self) -> Result<(), Error> {
        if self.server_pid.is_empty() {
            return Ok(());
        }
        Err(Error::Flags("--server-pid has no effect here".to_owned()))
    }

    /// Rejects the flags that limit a run, keep its keys or use existing keys. They have no effect in a command that
    /// has the flag `instead` for the duration and always writes and deletes its own keys.
    pub fn reject_limits(&self, instead: &str) -> Result<(), Error> {
        let given = [
            ("--total", self.total.is_some()),
            ("--duration", self.duration.is_some()),
            ("--warmup", self.warmup.is_some()),
            ("--keep", self.keep),
            ("--existing", self.existing),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => Err(Error::Flags(format!(
                "{flag} has no effect here: {instead} sets the duration, and keys are never kept or reused"
            ))),
            None => self.reject_server_pid(),
        }
    }

    /// Rejects the flags that choose servers, keys and limits, for a command that starts its own servers.
    pub fn reject_target(&self) -> Result<(), Error> {
        // A user in the environment is meant for other servers.
        let has_user = self.credentials.user().is_some() && std::env::var_os("ETCDCTL_USER").is_none();
        let given = [
            ("--endpoints", self.has_endpoints()),
            ("--user", has_user),
            ("--prefix", self.has_prefix()),
            ("--clients", self.clients.is_some()),
            ("--connections", self.connections.is_some()),
            ("--total", self.total.is_some()),
            ("--warmup", self.warmup.is_some()),
            ("--purge", self.purge),
            ("--keep", self.keep),
            ("--existing", self.existing),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => {
                Err(Error::Flags(format!("{flag} has no effect here: --servers and --groups select servers and loads")))
            }
            None => self.reject_server_pid(),
        }
    }
}

const CONNECTIONS_DEFAULT_MAX: usize = 8;

/// Maximum number of clients, connections and so on. One process cannot run more.
const COUNT_MAX: usize = 1_000_000;
/// Maximum number of keys and operations. Its product with another count cannot overflow.
const KEYS_MAX: usize = 1_000_000_000;

/// Parses a number of clients, connections and so on.
pub fn parse_count(text: &str) -> Result<usize, String> {
    parse_up_to(text, COUNT_MAX)
}

/// Parses a number of keys or operations.
pub fn parse_keys(text: &str) -> Result<usize, String> {
    parse_up_to(text, KEYS_MAX)
}

fn parse_up_to(text: &str, max: usize) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| (1..=max).contains(count));
    count.ok_or_else(|| format!("must be a number from 1 to {max}"))
}

/// Maximum size of a value in bytes. etcd accepts requests of up to 1.5 MiB by default; operators can raise this limit.
const VALUE_SIZE_MAX: usize = 64 << 20;

/// Parses a number of bytes.
pub fn parse_value_size(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(size @ 0..=VALUE_SIZE_MAX) => Ok(size),
        _ => Err(format!("must be a number of bytes from 0 to {VALUE_SIZE_MAX}")),
    }
}

const DURATION_MAX: Duration = Duration::from_secs(24 * 3600);

/// Parses a duration such as 500ms, 10s or 2m.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if duration > DURATION_MAX { Err("must be at most 24h".to_owned()) } else { Ok(duration) }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        common: Common,
    }

    #[track_caller]
    fn plan(flags: &str, streams: Option<usize>) -> Result<Plan, String> {
        let cli = Cli::try_parse_from(["bench"].into_iter().chain(flags.split_whitespace()));
        let common = cli.map_err(|error| error.to_string())?.common;
        common.plan(64, streams).map_err(|error| error.to_string())
    }

    #[track_caller]
    fn check_connections(flags: &str, streams: Option<usize>, want: usize) {
        assert_eq!(plan(flags, streams).unwrap().connections, want, "{flags}");
    }

    #[track_caller]
    fn check_limits(flags: &str, total: Option<u64>, duration_secs: Option<u64>) {
        let limits = plan(flags, None).unwrap().limits;
        assert_eq!((limits.total, limits.duration), (total, duration_secs.map(Duration::from_secs)), "{flags}");
    }

    #[track_caller]
    fn check_rejected(flags: &str, want: &str) {
        let error = plan(flags, None).unwrap_err();
        assert!(error.contains(want), "{flags}: {error}");
    }

    #[test]
    fn connections_follow_clients_and_endpoints() {
        check_connections("", None, 8);
        check_connections("--clients 3", None, 3);
        check_connections("--clients 3 --connections 5", None, 5);
        check_connections("--clients 1 --endpoints http://a:1,http://b:2", None, 2);
        check_connections("", Some(2), 2);
    }

    #[test]
    fn run_ends_by_total_or_duration() {
        check_limits("", None, Some(10));
        check_limits("--total 5", Some(5), None);
        check_limits("--duration 2m", None, Some(120));
    }

    #[test]
    fn invalid_flags_are_rejected() {
        check_rejected("--total 5 --duration 1s", "cannot be used with");
        check_rejected("--total 0", "0 is not in 1..");
        check_rejected("--clients 0", "must be a number from 1");
        check_rejected("--duration 10", "time unit needed");
        check_rejected("--duration s", "expected number");
        check_rejected("--duration 25h", "must be at most 24h");
        check_rejected("--cert a.pem", "--key");
        check_rejected("--password x", "--user");
        check_rejected("--endpoints http://a:1,http://b:2 --connections 1", "must be at least the number of endpoints");
        check_rejected("--prefix=", "must not be empty");
    }
}
