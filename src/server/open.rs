//! Opens the store of a server with its settings.

use std::{
    sync::Arc,
    thread::available_parallelism,
    time::{Duration, Instant},
};

use tokio::{
    runtime::{Handle, RuntimeFlavor},
    time::sleep,
};
use tracing::warn;

use super::Error;
use crate::{
    config::{Datastore, Retention, Settings},
    datastore::{MissingArchive, keep, open_with_archive},
};
use orlop_core::{
    log::{self, Log},
    metrics::Metrics,
    store::{self, AutoCompaction, CompactionRate, Keep, ReadProgress, Role, SlowThresholds, Store},
};
use orlop_sql::Durability;

/// Time for which reads of a shared log are repeated at a start, after the first that failed.
const READ_WAIT_MAX: Duration = Duration::from_secs(60);
const READ_PAUSE: Duration = Duration::from_secs(1);

/// Opens and reads the log.
pub(super) async fn open_store(
    settings: &Settings,
    role: Role,
    client_urls: Vec<String>,
    metrics: Arc<Metrics>,
    progress: Arc<ReadProgress>,
) -> Result<Store, Error> {
    let store_settings = store::Settings {
        value_cache_bytes: settings.value_cache_bytes,
        poll_interval: settings.datastore_poll_interval.0,
        name: settings.member_name(),
        client_urls: client_urls.clone(),
        metrics,
        slow_thresholds: SlowThresholds {
            apply: settings.warning_apply_duration.0,
            request: settings.warning_unary_request_duration.0,
        },
        quota_bytes: settings.quota_backend_bytes,
        auto_compaction: settings.auto_compaction().map_err(Error)?.map(|retention| match retention {
            Retention::Time(time) => AutoCompaction::Periodic(time),
            Retention::Revisions(revisions) => AutoCompaction::Revision(revisions),
        }),
        compaction: CompactionRate {
            rows: settings.compaction_batch_limit,
            pause: settings.compaction_sleep_interval.0,
        },
        // On a runtime with several threads, busy polling would wake the other threads.
        busy_poll: Handle::current().runtime_flavor() == RuntimeFlavor::CurrentThread
            && available_parallelism().is_ok_and(|cores| cores.get() > 1),
        role,
        progress,
        ..store::Settings::default()
    };
    let datastore = settings.datastore().map_err(Error)?;
    store_settings.metrics.state.database.with_label_values(&[datastore.kind()]).set(1);
    let durability = if settings.unsafe_no_fsync {
        warn!("unsafe-no-fsync: commits are not synced; a crash of the machine loses acknowledged writes");
        Durability::Unsynced
    } else {
        Durability::Synced
    };
    let metrics = Some(Arc::clone(&store_settings.metrics));
    let keep = match role {
        Role::Server => keep(settings),
        Role::Local => Keep::AsBefore,
    };
    let missing = MissingArchive::Create;
    let opened = open_with_archive(settings, &datastore, client_urls, durability, metrics, keep, missing).await;
    let (log, history) = opened.map_err(|error| Error(error.to_string()))?;
    let store_settings = store::Settings { history, ..store_settings };
    // Errors of Postgres already contain the name of the database.
    let location = match &datastore {
        Datastore::Sqlite(file) => format!(" {}", file.display()),
        Datastore::Postgres(_) => String::new(),
    };
    let read = |error| Error(format!("cannot read the database{location}: {error}"));
    let is_shared = log.shared().is_some();
    let opened =
        if is_shared { read_patiently(log, store_settings).await } else { Store::open(log, store_settings).await };
    opened.map_err(read)
}

/// Reads the log. Begins again if the database does not respond for a while.
async fn read_patiently(log: Arc<dyn Log>, settings: store::Settings) -> log::Result<Store> {
    // Not since the start: the first read may have waited minutes for a standby.
    let mut failing_since = None;
    loop {
        match Store::open(Arc::clone(&log), settings.clone()).await {
            Err(log::Error::Unavailable(error))
                if failing_since.get_or_insert_with(Instant::now).elapsed() < READ_WAIT_MAX =>
            {
                warn!(error, "cannot read the log yet; trying again");
                sleep(READ_PAUSE).await;
            }
            opened => return opened,
        }
    }
}
