//! What a [`Snapshot`] consists of.

use std::collections::BTreeMap;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use orlop_core::types::prefix_end;
use serde::{Serialize, Serializer};
use tokio::time::Instant;

use super::Counters;
use crate::text::{bytes, shown_key};

/// The state of a server at one time. `None`: the server does not report this part; `missing` has the reason by name of
/// the part.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    #[serde(skip)]
    pub taken_at: Instant,
    pub unix_ms: i64,
    pub endpoint: String,
    pub server: ServerState,
    #[serde(skip)]
    pub counters: Option<Counters>,
    pub members: Option<Members>,
    pub watchers: Option<Watchers>,
    pub leases: Option<Leases>,
    pub slow_requests: Option<SlowRequests>,
    pub sizes: Option<Sizes>,
    pub missing: BTreeMap<&'static str, String>,
}

/// The properties of a server. `None`: unknown.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerState {
    /// Orlop's version; `None` for etcd.
    pub orlop_version: Option<String>,
    /// The etcd version whose API is served.
    pub version: String,
    pub database: Option<String>,
    pub member_id: String,
    pub leader_id: String,
    pub revision: i64,
    /// -1: the store has never been compacted.
    pub compact_revision: Option<i64>,
    pub keys: Option<i64>,
    pub db_size: i64,
    pub db_size_in_use: i64,
    /// 0: there is no quota.
    pub db_size_quota: Option<i64>,
    /// Bytes of the compacted rows that `--history-retention` keeps. Only the leader measures them.
    pub history_bytes: Option<i64>,
    pub watchers: Option<i64>,
    pub slow_watchers: Option<i64>,
    pub watch_streams: Option<i64>,
    pub leases: Option<i64>,
    /// Alarms and other errors.
    pub alarms: Vec<String>,
}

impl ServerState {
    /// Returns the version of a server that is not known to be an Orlop. Both have this version of etcd's API, and only
    /// their metrics tell them apart.
    pub(crate) fn unnamed_version(&self) -> String {
        let has_metrics = self.keys.is_some();
        if has_metrics { format!("etcd {}", self.version) } else { format!("API of etcd {}, no metrics", self.version) }
    }

    /// Returns the sizes and the used part of the quota as text. `unknown`: the word for a quota that is not reported.
    pub(crate) fn size_text(&self, unknown: &str) -> String {
        let quota = match self.db_size_quota {
            None => format!("quota {unknown}"),
            Some(0) => "no quota".to_owned(),
            Some(quota) => {
                format!("{:.1} % of the quota {}", self.db_size_in_use as f64 * 100.0 / quota as f64, bytes(quota))
            }
        };
        format!("{}, in use {}, {quota}", bytes(self.db_size), bytes(self.db_size_in_use))
    }

    /// Returns the size of the kept history as text. `unknown`: the word for one that is not reported.
    pub(crate) fn history_text(&self, unknown: &str) -> String {
        match self.history_bytes {
            None => unknown.to_owned(),
            Some(0) => "none".to_owned(),
            Some(kept) => format!("{} of compacted rows", bytes(kept)),
        }
    }
}

/// The live members, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Members {
    pub members: Vec<Member>,
    /// Milliseconds since the heartbeat of which this is the result; `None`: not reported.
    pub since_heartbeat_ms: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Member {
    pub id: String,
    pub name: String,
    pub client_urls: Vec<String>,
    /// Whether it expires leases first; with etcd, the leader.
    pub leads_expiry: bool,
    /// Whether it is the one at the endpoint.
    pub responds: bool,
}

/// Watchers by range.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Watchers {
    /// The slowest first.
    pub ranges: Vec<WatchedRange>,
    pub ranges_total: u64,
    pub watchers_total: u64,
    /// Whether lags and queued events may be higher, because there are too many watchers.
    pub is_partial: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchedRange {
    pub key: KeyName,
    /// Empty: a single key.
    pub range_end: KeyName,
    /// The range in words: a key, `PREFIX*`, or `[KEY, END)`.
    pub text: String,
    pub watchers: u64,
    pub catching_up: u64,
    pub queued: u64,
    pub revision_lag: i64,
}

/// The leases that expire next.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Leases {
    pub leases: Vec<Lease>,
    pub total: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    pub id: String,
    pub ttl_secs: i64,
    pub remaining_ms: i64,
    pub keys: u64,
}

/// Slow requests of the last hour, the newest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SlowRequests {
    pub requests: Vec<SlowRequest>,
    /// Number since the start of the server.
    pub total: u64,
    pub threshold_us: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SlowRequest {
    pub id: String,
    pub ended_unix_ms: i64,
    pub method: String,
    pub request: String,
    pub code: String,
    pub took_us: u64,
    pub phases: Vec<Phase>,
    pub response_bytes: u64,
    pub pairs: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Phase {
    pub name: String,
    pub took_us: u64,
}

/// The sizes below a prefix.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Sizes {
    pub prefix: KeyName,
    pub total: PairSizes,
    /// The few pairs that are not below `prefix`, if the prefix was not chosen but found.
    pub rest: PairSizes,
    /// The largest first.
    pub children: Vec<Sized>,
    pub children_total: u64,
    /// The largest first. If the prefix was not chosen but found, they are the largest of all keys.
    pub largest_keys: Vec<Sized>,
    pub age_ms: u64,
    /// Processing time that the server needed; `None`: the figures are from a listing of keys.
    pub cost_us: Option<u64>,
    /// Whether there are more keys than were counted.
    pub is_partial: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Sized {
    pub name: KeyName,
    pub is_prefix: bool,
    pub sizes: PairSizes,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PairSizes {
    pub keys: u64,
    pub key_bytes: u64,
    /// `None`: not reported.
    pub value_bytes: Option<u64>,
}

impl PairSizes {
    pub fn bytes(&self) -> u64 {
        self.key_bytes + self.value_bytes.unwrap_or_default()
    }

    /// Returns the number by which sizes are compared: bytes, or keys if the lengths of values are not reported.
    pub fn amount(&self) -> u64 {
        if self.value_bytes.is_some() { self.bytes() } else { self.keys }
    }

    pub fn plus(&self, other: &Self) -> Self {
        let value_bytes = match (self.value_bytes, other.value_bytes) {
            (Some(one), Some(other)) => Some(one.saturating_add(other)),
            (one, other) => one.or(other),
        };
        Self {
            keys: self.keys.saturating_add(other.keys),
            key_bytes: self.key_bytes.saturating_add(other.key_bytes),
            value_bytes,
        }
    }

    pub fn minus(&self, part: &Self) -> Self {
        Self {
            keys: self.keys.saturating_sub(part.keys),
            key_bytes: self.key_bytes.saturating_sub(part.key_bytes),
            value_bytes: self.value_bytes.map(|all| all.saturating_sub(part.value_bytes.unwrap_or_default())),
        }
    }
}

impl Sizes {
    /// Returns the sizes of all pairs, below the prefix or not.
    pub fn all(&self) -> PairSizes {
        self.total.plus(&self.rest)
    }
}

/// A key or a part of one. Serialised as its text and its bytes in base64.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyName(pub Vec<u8>);

impl KeyName {
    /// Returns the key as text, in the form that commands read.
    pub fn text(&self) -> String {
        shown_key(&self.0)
    }
}

impl Serialize for KeyName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Shown {
            text: String,
            base64: String,
        }
        Shown { text: self.text(), base64: BASE64_STANDARD.encode(&self.0) }.serialize(serializer)
    }
}

/// Returns a text of a server without control characters, which could change the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

impl WatchedRange {
    /// Describes a range as in a request.
    pub(super) fn describe(key: &KeyName, range_end: &KeyName) -> String {
        match (key.0.as_slice(), range_end.0.as_slice()) {
            (_, []) => key.text(),
            ([] | [0], [0]) => "all keys".to_owned(),
            (_, [0]) => format!("from {}", key.text()),
            (start, end) if prefix_end(start) == end => format!("{}*", key.text()),
            _ => format!("[{}, {})", key.text(), range_end.text()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_described_as_operators_write_them() {
        for (key, end, want) in [
            (&b"a"[..], &b""[..], "a"),
            (b"a/", b"a0", "a/*"),
            (b"\0", b"\0", "all keys"),
            (b"b", b"\0", "from b"),
            (b"a", b"c", "[a, c)"),
            (b"a\xff", b"b", "a\\xff*"),
            (b"a\x1b[2J", b"", "a\\x1b[2J"),
            (b"a\\", b"", "a\\\\"),
        ] {
            assert_eq!(WatchedRange::describe(&KeyName(key.into()), &KeyName(end.into())), want);
        }
    }
}
