//! The flags that all scenarios share, and the plan they make.

use std::time::Duration;

use super::{
    Error,
    closed_loop::Limits,
    endpoint::{Endpoint, Identity, Place},
};

/// Flags that are given to any scenario.
#[derive(Debug, clap::Args)]
pub struct Common {
    /// Servers to load, separated by commas: http://host:port, https://host:port, unix://path or unixs://path [default:
    /// http://127.0.0.1:2379]
    #[arg(long, global = true, value_delimiter = ',', value_name = "URLS")]
    endpoints: Vec<Endpoint>,

    #[command(flatten)]
    pub identity: Identity,

    /// Clients, each with one operation in flight [default: 64; range, catch-up: 1; watch: 8]
    #[arg(long, global = true, value_parser = at_least_one, value_name = "N")]
    clients: Option<usize>,

    /// Connections, which clients (for watch: streams) share in turn [default: one each, at most 8]
    #[arg(long, global = true, value_parser = at_least_one, value_name = "N")]
    connections: Option<usize>,

    /// End after this many operations, those of the warm-up not counted
    #[arg(long, global = true, conflicts_with = "duration", value_parser = clap::value_parser!(u64).range(1..), value_name = "N")]
    total: Option<u64>,

    /// End after this time, the warm-up not counted: 500ms, 10s, 2m [default: 10s, without --total]
    #[arg(long, global = true, value_parser = duration, value_name = "TIME")]
    pub duration: Option<Duration>,

    /// Measure nothing before this time has passed [default: 1s]
    #[arg(long, global = true, value_parser = duration, value_name = "TIME")]
    warmup: Option<Duration>,

    /// Prefix of all keys written; it must hold none before
    #[arg(long, global = true, default_value = "orlop-bench/")]
    pub prefix: String,

    /// Delete what the prefix holds first, instead of refusing to run
    #[arg(long, global = true)]
    pub purge: bool,

    /// Leave the keys in place afterwards
    #[arg(long, global = true)]
    pub keep: bool,

    /// Work with the keys that an earlier run with --keep left, instead of writing them first
    #[arg(long, global = true, conflicts_with = "purge")]
    pub existing: bool,

    /// Print one JSON object instead of a table
    #[arg(long, global = true)]
    pub json: bool,
}

const DURATION_DEFAULT: Duration = Duration::from_secs(10);
const WARMUP_DEFAULT: Duration = Duration::from_secs(1);

/// The flags with the scenario's defaults filled in.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub clients: usize,
    /// Shared by `sharers` clients or streams.
    pub connections: usize,
    pub limits: Limits,
}

impl Common {
    pub fn endpoints(&self) -> Vec<Endpoint> {
        if self.has_endpoints() {
            return self.endpoints.clone();
        }
        vec![Endpoint { place: Place::Tcp("127.0.0.1:2379".to_owned()), has_tls: false }]
    }

    pub fn has_endpoints(&self) -> bool {
        !self.endpoints.is_empty()
    }

    /// `clients_default` is the scenario's; `sharers` is how many share the connections, where that is not the clients.
    pub fn plan(&self, clients_default: usize, sharers: Option<usize>) -> Result<Plan, Error> {
        if self.prefix.is_empty() {
            return Err(Error::Flags(
                "--prefix must not be empty: all keys below it are deleted in the end".to_owned(),
            ));
        }
        let clients = self.clients.unwrap_or(clients_default);
        let endpoints = self.endpoints().len();
        let connections =
            self.connections.unwrap_or_else(|| sharers.unwrap_or(clients).min(CONNECTIONS_DEFAULT_MAX).max(endpoints));
        if connections < endpoints {
            let text =
                format!("--connections must reach every endpoint, connections={connections} endpoints={endpoints}");
            return Err(Error::Flags(text));
        }
        let duration = self.duration.or(if self.total.is_some() { None } else { Some(DURATION_DEFAULT) });
        let limits = Limits { total: self.total, duration, warmup: self.warmup.unwrap_or(WARMUP_DEFAULT) };
        Ok(Plan { clients, connections, limits })
    }

    /// For a command that says otherwise how long it takes, and clears up in any case.
    pub fn refuse_limits(&self, instead: &str) -> Result<(), Error> {
        let given = [
            ("--total", self.total.is_some()),
            ("--duration", self.duration.is_some()),
            ("--warmup", self.warmup.is_some()),
            ("--keep", self.keep),
            ("--existing", self.existing),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => {
                Err(Error::Flags(format!("{flag} means nothing here: {instead} says how long it takes")))
            }
            None => Ok(()),
        }
    }

    /// For a command that has servers and loads of its own.
    pub fn refuse_a_target(&self) -> Result<(), Error> {
        let given = [
            ("--endpoints", self.has_endpoints()),
            ("--clients", self.clients.is_some()),
            ("--connections", self.connections.is_some()),
            ("--total", self.total.is_some()),
            ("--warmup", self.warmup.is_some()),
            ("--purge", self.purge),
            ("--keep", self.keep),
            ("--existing", self.existing),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => Err(Error::Flags(format!(
                "{flag} means nothing here: servers and loads are chosen by --servers and --groups"
            ))),
            None => Ok(()),
        }
    }
}

const CONNECTIONS_DEFAULT_MAX: usize = 8;

/// Far above what one process drives well; below it no product of two counts overflows.
const COUNT_MAX: usize = 1_000_000;

/// A count of clients, connections, keys and the like.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=COUNT_MAX) => Ok(count),
        _ => Err(format!("must be a number from 1 to {COUNT_MAX}")),
    }
}

/// etcd takes requests of 1.5 MiB unless it is told otherwise; a server may be told to take more.
const VALUE_SIZE_MAX: usize = 64 << 20;

/// Bytes of a value.
pub fn value_size(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(size @ 0..=VALUE_SIZE_MAX) => Ok(size),
        _ => Err(format!("must be a number of bytes from 0 to {VALUE_SIZE_MAX}")),
    }
}

const DURATION_MAX: Duration = Duration::from_secs(24 * 3600);

fn duration(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if duration > DURATION_MAX { Err("must be a day at most".to_owned()) } else { Ok(duration) }
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
    fn plan(flags: &str, sharers: Option<usize>) -> Result<Plan, String> {
        let cli = Cli::try_parse_from(["bench"].into_iter().chain(flags.split_whitespace()));
        let common = cli.map_err(|error| error.to_string())?.common;
        common.plan(64, sharers).map_err(|error| error.to_string())
    }

    #[track_caller]
    fn check_connections(flags: &str, sharers: Option<usize>, want: usize) {
        assert_eq!(plan(flags, sharers).unwrap().connections, want, "{flags}");
    }

    #[track_caller]
    fn check_limits(flags: &str, total: Option<u64>, duration_secs: Option<u64>) {
        let limits = plan(flags, None).unwrap().limits;
        assert_eq!((limits.total, limits.duration), (total, duration_secs.map(Duration::from_secs)), "{flags}");
    }

    #[track_caller]
    fn check_refused(flags: &str, want: &str) {
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
    fn bad_flags_are_refused() {
        check_refused("--total 5 --duration 1s", "cannot be used with");
        check_refused("--total 0", "0 is not in 1..");
        check_refused("--clients 0", "must be a number from 1");
        check_refused("--duration 10", "time unit needed");
        check_refused("--duration s", "expected number");
        check_refused("--duration 25h", "a day at most");
        check_refused("--cert a.pem", "--key");
        check_refused("--password x", "--user");
        check_refused("--endpoints http://a:1,http://b:2 --connections 1", "must reach every endpoint");
        check_refused("--prefix=", "must not be empty");
    }
}
