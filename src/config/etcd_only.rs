//! Flags of etcd that have no meaning without Raft and Go. They are accepted, so that a command line written for etcd
//! (for example by kubeadm) starts Orlop, and the log lists them.

use clap::{Arg, ArgAction, ArgMatches, parser::ValueSource};

const WITH_VALUE: [&str; 34] = [
    "auth-token",
    "auth-token-ttl",
    "backend-batch-interval",
    "backend-batch-limit",
    "backend-bbolt-freelist-type",
    "bcrypt-cost",
    "compact-hash-check-time",
    "corrupt-check-time",
    "cors",
    "discovery",
    "discovery-srv",
    "election-timeout",
    "feature-gates",
    "grpc-keepalive-min-time",
    "heartbeat-interval",
    "host-whitelist",
    "initial-advertise-peer-urls",
    "initial-cluster",
    "initial-cluster-state",
    "initial-cluster-token",
    "listen-peer-urls",
    "log-outputs",
    "logger",
    "max-learners",
    "max-snapshots",
    "max-wals",
    "peer-cert-allowed-cn",
    "peer-cert-allowed-hostname",
    "peer-cert-file",
    "peer-crl-file",
    "peer-key-file",
    "peer-trusted-ca-file",
    "snapshot-count",
    "wal-dir",
];
const SWITCHES: [&str; 12] = [
    "compact-hash-check-enabled",
    "enable-grpc-gateway",
    "enable-pprof",
    "experimental-initial-corrupt-check",
    "force-new-cluster",
    "initial-election-tick-advance",
    "peer-auto-tls",
    "peer-client-cert-auth",
    "pre-vote",
    "socket-reuse-address",
    "socket-reuse-port",
    "strict-reconfig-check",
];

/// Returns the flags to add to the command; `--help` hides them.
pub fn ignored_flag_definitions() -> impl Iterator<Item = Arg> {
    let hidden = |name: &'static str| Arg::new(name).long(name).hide(true).action(ArgAction::Append);
    let with_value = WITH_VALUE.into_iter().map(hidden);
    // As in Go: --pre-vote or --pre-vote=false.
    let switch = move |name| hidden(name).num_args(0..=1).require_equals(true).default_missing_value("true");
    with_value.chain(SWITCHES.into_iter().map(switch))
}

/// Returns the ignored flags that were given.
pub fn ignored_flags(matches: &ArgMatches) -> Vec<&'static str> {
    let given = |name: &&str| matches.value_source(name) == Some(ValueSource::CommandLine);
    WITH_VALUE.into_iter().chain(SWITCHES).filter(given).collect()
}
