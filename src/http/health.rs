//! `GET /health`, `/livez` and `/readyz`, as in etcd.
//!
//! `/livez` fails if a restart may help, `/readyz` if requests should go to another instance. The checks of reads run
//! real reads. The check `progress`, which etcd does not have, reports the result of the watchdog. The state of the
//! database does not affect `/livez`. A database that answers and accepts no writes fails only `/health`: another instance
//! could not write either, and this one serves reads.

use super::NO_SNIFF;
use crate::api::status::from_store;
use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Path, Query, State},
    http::StatusCode,
    response::{IntoResponse as _, Response},
    routing::get,
};
use tokio::time::timeout;
use tracing::warn;

use orlop_core::{
    log::{Alarm, AlarmKind},
    log_limit::LogLimit,
    store::{Error, Store, request::Consistency},
};

/// Maximum time of a check. It is shorter than the 7 s for which requests wait for the database, so that a prober
/// receives the result before its own timeout.
const CHECK_MAX: Duration = Duration::from_secs(5);
/// Minimum time between two messages about `/health`, and about each check.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

static HEALTH_LOG: LogLimit = LogLimit::every(LOG_INTERVAL);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Check {
    Progress,
    DataCorruption,
    SerializableRead,
    LinearizableRead,
    NonLearner,
}

/// One of the two sets of checks.
#[derive(Clone, Copy)]
struct Probe {
    name: &'static str,
    checks: &'static [Check],
}

const LIVEZ: Probe = Probe { name: "livez", checks: &[Check::Progress, Check::SerializableRead] };
const READYZ: Probe = Probe {
    name: "readyz",
    checks: &[Check::DataCorruption, Check::SerializableRead, Check::LinearizableRead, Check::NonLearner],
};

type Parameters = Query<Vec<(String, String)>>;

pub(super) fn routes(store: Arc<Store>) -> Router {
    let mut router = Router::new().route("/health", get(health));
    for probe in [LIVEZ, READYZ] {
        let all = move |State(store): State<Arc<Store>>, Query(parameters): Parameters| async move {
            probe.respond(&store, probe.checks, &parameters).await
        };
        let one = move |State(store): State<Arc<Store>>, Path(name): Path<String>, Query(parameters): Parameters| async move {
            match probe.checks.iter().position(|check| check.name() == name) {
                Some(index) => probe.respond(&store, &probe.checks[index..=index], &parameters).await,
                None => super::not_found(),
            }
        };
        router =
            router.route(&format!("/{}", probe.name), get(all)).route(&format!("/{}/{{check}}", probe.name), get(one));
    }
    router.with_state(store)
}

/// Serves `/health`. `?exclude=NOSPACE` ignores an alarm, `?serializable=true` skips the database.
async fn health(State(store): State<Arc<Store>>, Query(parameters): Parameters) -> Response {
    let named =
        |name: &'static str| parameters.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str());
    let excluded: Vec<&str> = named("exclude").collect();
    let serializable = named("serializable").any(|value| value == "true");
    let reason = unhealthy_reason(&store, &excluded, serializable).await;
    let metrics = &store.metrics().health;
    let status = match &reason {
        None => {
            metrics.success.inc();
            StatusCode::OK
        }
        Some(reason) => {
            if let Some(count) = HEALTH_LOG.count() {
                warn!(reason, count, "serving /health false");
            }
            metrics.failures.inc();
            StatusCode::SERVICE_UNAVAILABLE
        }
    };
    (status, [NO_SNIFF], body(reason.as_deref())).into_response()
}

/// Returns the body of `/health`, with the reason why the server is not healthy.
pub(super) fn body(reason: Option<&str>) -> String {
    format!("{{\"health\":\"{}\",\"reason\":{:?}}}", reason.is_none(), reason.unwrap_or_default())
}

/// Returns the reason why the server is not healthy.
async fn unhealthy_reason(store: &Store, excluded: &[&str], serializable: bool) -> Option<String> {
    for Alarm { kind, .. } in store.alarms() {
        if !excluded.contains(&kind.name()) {
            return Some(format!("ALARM {}", kind.name()));
        }
    }
    if !serializable && !store.accepts_writes() {
        // etcd's text for a member that has no leader.
        return Some("RAFT NO LEADER".to_owned());
    }
    let consistency = if serializable { Consistency::Serializable } else { Consistency::Linearizable };
    read(store, consistency).await.err().map(|error| format!("RANGE ERROR:{error}"))
}

/// Runs the read of a client.
async fn read(store: &Store, consistency: Consistency) -> Result<(), String> {
    match timeout(CHECK_MAX, store.probe(consistency)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(from_store(error).message().to_owned()),
        Err(_) => Err(from_store(Error::OutcomeUnknown).message().to_owned()),
    }
}

impl Check {
    fn name(self) -> &'static str {
        match self {
            Self::Progress => "progress",
            Self::DataCorruption => "data_corruption",
            Self::SerializableRead => "serializable_read",
            Self::LinearizableRead => "linearizable_read",
            Self::NonLearner => "non_learner",
        }
    }

    /// Returns the limit of messages about this check. Checks have separate limits, so that every check that fails is in
    /// the log.
    fn log_limit(self) -> &'static LogLimit {
        static LIMITS: [LogLimit; 5] = [const { LogLimit::every(LOG_INTERVAL) }; 5];
        &LIMITS[self as usize]
    }

    async fn run(self, store: &Store) -> Result<(), String> {
        match self {
            Self::Progress => {
                let stuck: Vec<String> = store.watchdog().stuck().iter().map(ToString::to_string).collect();
                if stuck.is_empty() { Ok(()) } else { Err(stuck.join(", ")) }
            }
            Self::DataCorruption => match store.alarms().iter().any(|alarm| alarm.kind == AlarmKind::Corrupt) {
                true => Err("alarm activated: CORRUPT".to_owned()),
                false => Ok(()),
            },
            Self::SerializableRead => read(store, Consistency::Serializable).await,
            Self::LinearizableRead => read(store, Consistency::Linearizable).await,
            // There are no learners.
            Self::NonLearner => Ok(()),
        }
    }
}

impl Probe {
    async fn respond(self, store: &Store, checks: &[Check], parameters: &[(String, String)]) -> Response {
        let metrics = &store.metrics().health;
        let excluded = |check: &Check| parameters.iter().any(|(key, value)| key == "exclude" && value == check.name());
        let mut lines = String::new();
        let mut failed = false;
        for check in checks.iter().copied().filter(|check| !excluded(check)) {
            let outcome = check.run(store).await;
            metrics.check.with_label_values(&[self.name, check.name()]).set(i64::from(outcome.is_ok()));
            let status = if outcome.is_ok() { "success" } else { "error" };
            metrics.checks.with_label_values(&[self.name, check.name(), status]).inc();
            match outcome {
                // etcd does not have this check. It is not listed while it succeeds, so that responses equal those of
                // etcd.
                Ok(()) if check == Check::Progress => {}
                Ok(()) => lines += &format!("[+]{} ok\n", check.name()),
                Err(error) => {
                    if let Some(count) = check.log_limit().count() {
                        warn!(probe = self.name, check = check.name(), error, count, "health check failed");
                    }
                    lines += &format!("[-]{} failed: {error}\n", check.name());
                    failed = true;
                }
            }
        }
        if failed {
            return (StatusCode::SERVICE_UNAVAILABLE, [NO_SNIFF], format!("{lines}{} check failed\n", self.name))
                .into_response();
        }
        let verbose = parameters.iter().any(|(key, _)| key == "verbose");
        ([NO_SNIFF], format!("{}ok\n", if verbose { lines.as_str() } else { "" })).into_response()
    }
}
