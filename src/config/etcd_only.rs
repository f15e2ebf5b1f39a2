//! Flags of etcd that have no meaning without Raft and Go. They are accepted, so that a command line written for etcd
//! (for example by kubeadm) starts Orlop, and the log lists them.

use std::{
    collections::HashSet,
    ffi::{OsStr, OsString},
};

use clap::{
    Arg, ArgAction, ArgMatches, Command,
    builder::{PossibleValuesParser, ValueParser},
    parser::ValueSource,
    value_parser,
};
use figment::value::Value;

use super::{
    flags::{Given, setting_of},
    values::{Interval, Urls, parse_file_switch, parse_switch},
};

/// The kind of a flag's value. As in etcd, a value of another kind is refused.
#[derive(Clone, Copy)]
enum Kind {
    Text,
    Number,
    Duration,
    Switch,
    OneOf(&'static [&'static str]),
    PeerUrls,
}

use Kind::{Duration, Number, OneOf, PeerUrls, Switch, Text};

/// The setting with the members of a cluster. It is ignored too, unless the database cannot have several instances.
pub(super) const INITIAL_CLUSTER: &str = "initial-cluster";

/// Settings for which an empty text on the command line means the default, as in etcd. Some of the others may be empty,
/// and etcd refuses the rest too.
const EMPTY_IS_DEFAULT: [&str; 13] = [
    "auto-compaction-mode",
    "auto-compaction-retention",
    "cert-file",
    "client-crl-file",
    "data-dir",
    "key-file",
    "log-format",
    "log-level",
    "metrics",
    "snapshot-dir",
    "tls-max-version",
    "tls-min-version",
    "trusted-ca-file",
];

/// Prefix of the flags that etcd 3.6 has renamed.
const EXPERIMENTAL: &str = "experimental-";

const FLAGS: &[(&str, Kind)] = &[
    ("backend-batch-interval", Duration),
    ("backend-batch-limit", Number),
    ("backend-bbolt-freelist-type", Text),
    ("bootstrap-defrag-threshold-megabytes", Number),
    ("client-cert-file", Text),
    ("client-key-file", Text),
    ("compact-hash-check-enabled", Switch),
    ("compact-hash-check-time", Duration),
    ("corrupt-check-time", Duration),
    ("discovery", Text),
    ("discovery-cacert", Text),
    ("discovery-cert", Text),
    ("discovery-dial-timeout", Duration),
    ("discovery-endpoints", Text),
    ("discovery-fallback", OneOf(&["exit", "proxy"])),
    ("discovery-insecure-skip-tls-verify", Switch),
    ("discovery-insecure-transport", Switch),
    ("discovery-keepalive-time", Duration),
    ("discovery-keepalive-timeout", Duration),
    ("discovery-key", Text),
    ("discovery-password", Text),
    ("discovery-proxy", Text),
    ("discovery-request-timeout", Duration),
    ("discovery-srv", Text),
    ("discovery-srv-name", Text),
    ("discovery-token", Text),
    ("discovery-user", Text),
    ("downgrade-check-time", Duration),
    ("election-timeout", Number),
    ("enable-grpc-gateway", Switch),
    ("enable-v2", Switch),
    ("experimental-bootstrap-defrag-threshold-megabytes", Number),
    ("experimental-compact-hash-check-enabled", Switch),
    ("experimental-compact-hash-check-time", Duration),
    ("experimental-corrupt-check-time", Duration),
    ("experimental-downgrade-check-time", Duration),
    ("experimental-enable-lease-checkpoint", Switch),
    ("experimental-enable-lease-checkpoint-persist", Switch),
    ("experimental-enable-v2v3", Text),
    ("experimental-initial-corrupt-check", Switch),
    ("experimental-max-learners", Number),
    ("experimental-memory-mlock", Switch),
    ("experimental-peer-skip-client-san-verification", Switch),
    ("experimental-set-member-localaddr", Switch),
    ("experimental-snapshot-catchup-entries", Number),
    ("experimental-stop-grpc-service-on-defrag", Switch),
    ("experimental-txn-mode-write-with-shared-buffer", Switch),
    ("feature-gates", Text),
    ("force-new-cluster", Switch),
    ("grpc-keepalive-min-time", Duration),
    ("heartbeat-interval", Number),
    ("initial-advertise-peer-urls", PeerUrls),
    (INITIAL_CLUSTER, Text),
    ("initial-cluster-state", OneOf(&["new", "existing"])),
    ("initial-cluster-token", Text),
    ("initial-election-tick-advance", Switch),
    ("listen-peer-urls", PeerUrls),
    ("logger", OneOf(&["zap"])),
    ("max-learners", Number),
    ("max-snapshots", Number),
    ("max-wals", Number),
    ("memory-mlock", Switch),
    ("peer-auto-tls", Switch),
    ("peer-cert-allowed-cn", Text),
    ("peer-cert-allowed-hostname", Text),
    ("peer-cert-file", Text),
    ("peer-client-cert-auth", Switch),
    ("peer-client-cert-file", Text),
    ("peer-client-key-file", Text),
    ("peer-crl-file", Text),
    ("peer-key-file", Text),
    ("peer-skip-client-san-verification", Switch),
    ("peer-trusted-ca-file", Text),
    ("pre-vote", Switch),
    ("proxy", OneOf(&["off", "readonly", "on"])),
    ("proxy-dial-timeout", Number),
    ("proxy-failure-wait", Number),
    ("proxy-read-timeout", Number),
    ("proxy-refresh-interval", Number),
    ("proxy-write-timeout", Number),
    ("raft-read-timeout", Duration),
    ("raft-write-timeout", Duration),
    ("set-member-localaddr", Switch),
    ("snapshot-catchup-entries", Number),
    ("snapshot-count", Number),
    ("socket-reuse-address", Switch),
    ("socket-reuse-port", Switch),
    ("strict-reconfig-check", Switch),
    ("v2-deprecation", OneOf(&["not-yet", "write-only", "write-only-drop-data", "gone"])),
    ("wal-dir", Text),
];

/// Returns the flags to add to the command; `--help` hides them.
pub fn ignored_flag_definitions() -> impl Iterator<Item = Arg> {
    FLAGS.iter().map(|(name, kind)| {
        let flag = Arg::new(*name).long(*name).hide(true).action(ArgAction::Append);
        match kind {
            Text => flag,
            Number => flag.value_parser(value_parser!(u64)),
            Duration => flag.value_parser(ValueParser::new(str::parse::<Interval>)),
            PeerUrls => flag.value_parser(ValueParser::new(str::parse::<Urls>)),
            OneOf(values) => flag.value_parser(PossibleValuesParser::new(*values)),
            // As in Go: --pre-vote or --pre-vote=false.
            Switch => {
                flag.num_args(0..=1).require_equals(true).default_missing_value("true").value_parser(parse_switch)
            }
        }
    })
}

/// What the sources of the settings contain without effect, under another name, or without use for clients.
#[derive(Debug, Default)]
pub struct Notices {
    /// Names of etcd's settings that have no meaning here.
    pub ignored: Vec<String>,
    /// `ETCD_*` variables that etcd does not know either, and `ORLOP_*` variables that name no setting.
    pub unrecognized: Vec<String>,
    /// Names of etcd's settings that etcd has renamed or dropped.
    pub deprecated: Vec<String>,
    /// The members that `initial-cluster` names.
    pub initial_cluster: Option<String>,
    /// Advertised URLs that lead each client to its own machine.
    pub unspecified_urls: Vec<String>,
}

impl Notices {
    /// Returns the notices of a command line: of its matches, and of its words, because matches do not contain aliases.
    pub fn of_flags(matches: &ArgMatches, words: &[OsString]) -> Self {
        let is_given = |name: &&str| matches.value_source(name) == Some(ValueSource::CommandLine);
        let initial_cluster = matches.get_many::<String>(INITIAL_CLUSTER).and_then(|mut values| values.next_back());
        Self {
            ignored: FLAGS.iter().map(|(name, _)| *name).filter(is_given).map(str::to_owned).collect(),
            deprecated: deprecated_flags(words),
            initial_cluster: initial_cluster.cloned(),
            ..Self::default()
        }
    }

    /// Merges the notices of all sources, in the order in which they are logged. Of the members, those in variables
    /// override those in the file, and those in flags override both.
    pub(super) fn merged(flags: Self, file: Self, variables: Self) -> Self {
        Self {
            ignored: [flags.ignored, file.ignored, variables.ignored].concat(),
            unrecognized: variables.unrecognized,
            deprecated: [flags.deprecated, file.deprecated, variables.deprecated].concat(),
            initial_cluster: flags.initial_cluster.or(variables.initial_cluster).or(file.initial_cluster),
            unspecified_urls: Vec::new(),
        }
    }
}

/// Returns the number of members in the text of `initial-cluster`: `a=http://a:2380,b=http://b:2380`. A member may have
/// several URLs.
pub(super) fn members(initial_cluster: &str) -> usize {
    let members = initial_cluster.split(',').filter(|member| !member.is_empty());
    let names: HashSet<&str> = members.map(|member| member.split_once('=').map_or(member, |(name, _)| name)).collect();
    names.len()
}

/// Returns whether etcd has a flag with this name that Orlop ignores.
pub(super) fn is_ignored(name: &str) -> bool {
    FLAGS.iter().any(|(known, _)| *known == name)
}

/// Checks the value of an ignored setting in a file. As in etcd, a number as a duration counts nanoseconds.
pub(super) fn check_ignored(name: &str, value: &Value) -> Result<(), String> {
    let kind = FLAGS.iter().find(|(known, _)| *known == name).map(|(_, kind)| kind);
    let text = match (kind, value) {
        (Some(Switch), Value::String(_, text)) => return parse_file_switch(text).map(drop),
        (Some(Duration), Value::Num(_, number)) => number.to_u128().map(|nanos| format!("{nanos}ns")),
        (_, Value::String(_, text)) => Some(text.clone()),
        (_, Value::Bool(_, switch)) => Some(switch.to_string()),
        (_, Value::Num(_, number)) => {
            let whole = number.to_u128().map(|whole| whole.to_string());
            let signed = || number.to_i128().map(|whole| whole.to_string());
            whole.or_else(signed).or_else(|| number.to_f64().map(|real| real.to_string()))
        }
        (_, Value::Char(..) | Value::Empty(..) | Value::Dict(..) | Value::Array(..)) => None,
    };
    let text =
        text.ok_or_else(|| format!("invalid value for {name}: it is neither a text nor a number nor a switch"))?;
    Given::default().add(name, OsStr::new(&text), name)
}

/// Returns whether etcd has renamed or dropped the flag with this name.
pub(super) fn is_deprecated(name: &str) -> bool {
    name.starts_with(EXPERIMENTAL)
}

/// Returns the warning for a deprecated flag.
pub fn deprecation(name: &str) -> String {
    match name.strip_prefix(EXPERIMENTAL).filter(|name| is_ignored(name) || setting_of(name).is_some()) {
        Some(new) => format!("--{name} is deprecated; use --{new} instead"),
        None => format!("--{name} is deprecated"),
    }
}

/// Returns the deprecated flags among the words of a command line.
fn deprecated_flags(words: &[OsString]) -> Vec<String> {
    let flags = words.iter().filter_map(|word| word.to_str()?.strip_prefix("--"));
    let names = flags.map(|flag| flag.split_once('=').map_or(flag, |(name, _)| name));
    names.filter(|name| is_deprecated(name)).map(str::to_owned).collect()
}

/// Adds the second dash to the command's flags that are written with one, as Go's flag package accepts them:
/// `-data-dir=x` becomes `--data-dir=x`.
pub fn with_two_dashes(command: &Command, words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let is_flag = |name: &str| {
        let mut flags = command.get_arguments();
        // clap adds the first two when it reads the words.
        ["help", "version"].contains(&name)
            || flags.any(|flag| {
                flag.get_long() == Some(name) || flag.get_all_aliases().is_some_and(|all| all.contains(&name))
            })
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

/// Removes the server's flags whose value is empty and means the default: `--cert-file=`, or `--cert-file` and an empty
/// word.
pub fn without_empty_values(words: Vec<OsString>) -> Vec<OsString> {
    // Other commands begin with their name.
    if words.get(1).and_then(|word| word.to_str()).is_some_and(|word| !word.starts_with('-') && word != "serve") {
        return words;
    }
    let mut kept: Vec<OsString> = Vec::with_capacity(words.len());
    for word in words {
        let is_flag = |word: &OsString| may_be_empty(word.to_str().unwrap_or_default());
        if word.is_empty() && kept.last().is_some_and(is_flag) {
            kept.pop();
        } else if !word.to_str().and_then(|word| word.strip_suffix('=')).is_some_and(may_be_empty) {
            kept.push(word);
        }
    }
    kept
}

fn may_be_empty(flag: &str) -> bool {
    flag.strip_prefix("--").is_some_and(|name| EMPTY_IS_DEFAULT.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_words(words: &[&str], want: &[&str]) {
        let words = [&["orlop"][..], words].concat().into_iter().map(OsString::from).collect();
        assert_eq!(without_empty_values(words), [&["orlop"][..], want].concat());
    }

    #[test]
    fn empty_values_that_mean_the_default_are_removed() {
        check_words(&["--cert-file=", "--metrics=", "--name=a"], &["--name=a"]);
        check_words(&["--log-level", "", "--name", ""], &["--name", ""]);
        check_words(&["serve", "--data-dir", ""], &["serve"]);
        check_words(&["--cert-file=a", "--log-level", "info"], &["--cert-file=a", "--log-level", "info"]);
        // etcd refuses these.
        check_words(&["--initial-cluster-state=", "--max-txn-ops="], &["--initial-cluster-state=", "--max-txn-ops="]);
        check_words(&["check", "--data-dir="], &["check", "--data-dir="]);
    }

    #[test]
    fn notices_are_in_the_order_of_the_log_and_members_are_those_of_the_last_source() {
        let of = |name: &str, members: Option<&str>| Notices {
            ignored: vec![name.to_owned()],
            deprecated: vec![name.to_owned()],
            initial_cluster: members.map(str::to_owned),
            ..Notices::default()
        };
        for (flags, file, variables, want) in [
            (Some("flags"), Some("file"), Some("variables"), Some("flags")),
            (None, Some("file"), Some("variables"), Some("variables")),
            (None, Some("file"), None, Some("file")),
            (None, None, None, None),
        ] {
            let merged = Notices::merged(of("flags", flags), of("file", file), of("variables", variables));
            assert_eq!(merged.initial_cluster.as_deref(), want);
            assert_eq!(merged.ignored, ["flags", "file", "variables"]);
            assert_eq!(merged.deprecated, merged.ignored);
        }
    }

    #[test]
    fn members_are_counted_by_name() {
        for (text, want) in [
            ("", 0),
            ("default=http://localhost:2380", 1),
            ("a=http://a:2380,a=http://10.0.0.1:2380,", 1),
            ("a=http://a:2380,b=http://b:2380,c=http://c:2380", 3),
        ] {
            assert_eq!(members(text), want, "{text}");
        }
    }
}
