//! Flags of etcd that have no meaning without Raft and Go. They are accepted, so that a command line written for etcd
//! (for example by kubeadm) starts Orlop, and the log lists them.

use std::ffi::OsString;

use clap::{Arg, ArgAction, ArgMatches, Command, parser::ValueSource};

const WITH_VALUE: &[&str] = &[
    "auth-token",
    "auth-token-ttl",
    "backend-batch-interval",
    "backend-batch-limit",
    "backend-bbolt-freelist-type",
    "bcrypt-cost",
    "bootstrap-defrag-threshold-megabytes",
    "client-cert-file",
    "client-key-file",
    "compact-hash-check-time",
    "corrupt-check-time",
    "cors",
    "discovery",
    "discovery-cacert",
    "discovery-cert",
    "discovery-dial-timeout",
    "discovery-endpoints",
    "discovery-fallback",
    "discovery-keepalive-time",
    "discovery-keepalive-timeout",
    "discovery-key",
    "discovery-password",
    "discovery-proxy",
    "discovery-request-timeout",
    "discovery-srv",
    "discovery-srv-name",
    "discovery-token",
    "discovery-user",
    "downgrade-check-time",
    "election-timeout",
    "experimental-bootstrap-defrag-threshold-megabytes",
    "experimental-compact-hash-check-time",
    "experimental-corrupt-check-time",
    "experimental-downgrade-check-time",
    "experimental-enable-v2v3",
    "experimental-max-learners",
    "experimental-snapshot-catchup-entries",
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
    "log-rotation-config-json",
    "logger",
    "max-learners",
    "max-snapshots",
    "max-wals",
    "peer-cert-allowed-cn",
    "peer-cert-allowed-hostname",
    "peer-cert-file",
    "peer-client-cert-file",
    "peer-client-key-file",
    "peer-crl-file",
    "peer-key-file",
    "peer-trusted-ca-file",
    "proxy",
    "proxy-dial-timeout",
    "proxy-failure-wait",
    "proxy-read-timeout",
    "proxy-refresh-interval",
    "proxy-write-timeout",
    "raft-read-timeout",
    "raft-write-timeout",
    "snapshot-catchup-entries",
    "snapshot-count",
    "v2-deprecation",
    "wal-dir",
];
const SWITCHES: &[&str] = &[
    "compact-hash-check-enabled",
    "discovery-insecure-skip-tls-verify",
    "discovery-insecure-transport",
    "enable-grpc-gateway",
    "enable-log-rotation",
    "enable-v2",
    "experimental-compact-hash-check-enabled",
    "experimental-enable-lease-checkpoint",
    "experimental-enable-lease-checkpoint-persist",
    "experimental-initial-corrupt-check",
    "experimental-memory-mlock",
    "experimental-peer-skip-client-san-verification",
    "experimental-set-member-localaddr",
    "experimental-stop-grpc-service-on-defrag",
    "experimental-txn-mode-write-with-shared-buffer",
    "force-new-cluster",
    "initial-election-tick-advance",
    "memory-mlock",
    "peer-auto-tls",
    "peer-client-cert-auth",
    "peer-skip-client-san-verification",
    "pre-vote",
    "set-member-localaddr",
    "socket-reuse-address",
    "socket-reuse-port",
    "strict-reconfig-check",
    "unsafe-no-fsync",
];

/// Returns the flags to add to the command; `--help` hides them.
pub fn ignored_flag_definitions() -> impl Iterator<Item = Arg> {
    let hidden = |name: &'static str| Arg::new(name).long(name).hide(true).action(ArgAction::Append);
    let with_value = WITH_VALUE.iter().copied().map(hidden);
    // As in Go: --pre-vote or --pre-vote=false.
    let switch = move |name| hidden(name).num_args(0..=1).require_equals(true).default_missing_value("true");
    with_value.chain(SWITCHES.iter().copied().map(switch))
}

/// Returns the ignored flags that were given.
pub fn ignored_flags(matches: &ArgMatches) -> Vec<&'static str> {
    let given = |name: &&str| matches.value_source(name) == Some(ValueSource::CommandLine);
    WITH_VALUE.iter().chain(SWITCHES).copied().filter(given).collect()
}

/// Adds the second dash to the command's flags that are written with one, as Go's flag package accepts them:
/// `-data-dir=x` becomes `--data-dir=x`.
pub fn with_two_dashes(command: &Command, words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let is_flag = |name: &str| {
        let mut flags = command.get_arguments();
        flags.any(|flag| flag.get_long() == Some(name) || flag.get_all_aliases().is_some_and(|all| all.contains(&name)))
    };
    let with_two = |word: OsString| {
        let flag = word.to_str().and_then(|word| word.strip_prefix('-'));
        match flag.map(|flag| flag.split_once('=').map_or(flag, |(name, _)| name)) {
            Some(name) if is_flag(name) => OsString::from(format!("-{}", word.to_string_lossy())),
            _ => word,
        }
    };
    words.map(with_two).collect()
}
