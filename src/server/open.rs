//! Opens the store of a server with its settings.

use std::{sync::Arc, thread::available_parallelism};

use tokio::runtime::{Handle, RuntimeFlavor};
use tracing::warn;

use super::Error;
use crate::{
    config::{Datastore, Retention, Settings},
    datastore::{MissingArchive, open_with_archive},
};
use orlop_core::{
    metrics::Metrics,
    store::{self, AutoCompaction, CompactionRate, Keep, ReadProgress, SlowThresholds, Store},
};
use orlop_sql::Durability;

/// Opens and reads the log.
pub(super) async fn open_store(
    settings: &Settings,
    client_urls: Vec<String>,
    metrics: Arc<Metrics>,
    keep: Keep,
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
        expires_leases: keep != Keep::AsBefore,
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
    Store::open(log, store_settings).await.map_err(read)
}
