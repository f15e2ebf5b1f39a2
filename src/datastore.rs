//! Opens, creates and deletes the database that the settings name, in SQLite or Postgres: the log of a server with its
//! archive, an empty database to be filled, and a database to be read. Only `orlop defrag`, which is for SQLite alone, opens
//! one elsewhere.

use std::{path::PathBuf, sync::Arc, time::Duration};

use crate::config::{Datastore, Settings};
use orlop_core::{
    files::folder_of,
    log::{self, Archive, Inspect, Load, Log, ReadLog as _},
    metrics::Metrics,
    store::{HistorySettings, Keep},
};
use orlop_sql::{
    Durability, PostgresLoader, PostgresLog, PostgresSettings, PostgresView, SqliteLoader, SqliteLog, SqliteView,
};

/// Returns which compacted rows a server with these settings keeps.
pub(crate) fn keep(settings: &Settings) -> Keep {
    match (settings.history_retention.0, settings.history_bytes) {
        (Duration::ZERO, _) => Keep::Nothing,
        (retention, 0) => Keep::Rows { retention, bytes_max: u64::MAX },
        (retention, bytes_max) => Keep::Rows { retention, bytes_max },
    }
}

/// What to do if rows are to be kept and the database has no archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MissingArchive {
    Create,
    /// The caller does not know yet whose database it is.
    Ignore,
}

/// Returns whether the database exists. One of Postgres counts as existing.
pub(crate) fn exists(datastore: &Datastore) -> bool {
    match datastore {
        Datastore::Sqlite(file) => file.exists(),
        Datastore::Postgres(_) => true,
    }
}

/// Returns the folder for temporary files that are as large as the database.
pub(crate) fn scratch_folder(datastore: &Datastore) -> PathBuf {
    match datastore {
        Datastore::Sqlite(file) => folder_of(file).to_owned(),
        Datastore::Postgres(_) => std::env::temp_dir(),
    }
}

/// Returns whether an older version of Orlop uses the database, whose schema [`open_with_archive`] would migrate.
/// Writes nothing, unless a crash has interrupted a transaction of SQLite, which is rolled back.
///
/// # Errors
///
/// If a database of Postgres cannot be reached or read, or a file of SQLite cannot be rolled back.
pub(crate) async fn is_of_older_version(datastore: &Datastore) -> log::Result<bool> {
    match datastore {
        Datastore::Sqlite(file) => SqliteLog::is_of_older_version(file).await,
        Datastore::Postgres(endpoint) => PostgresLog::is_of_older_version(endpoint).await,
    }
}

/// Opens the log of a server with these settings, and its archive.
pub(crate) async fn open_with_archive(
    settings: &Settings,
    datastore: &Datastore,
    client_urls: Vec<String>,
    durability: Durability,
    metrics: Option<Arc<Metrics>>,
    keep: Keep,
    missing: MissingArchive,
) -> log::Result<(Arc<dyn Log>, Option<HistorySettings>)> {
    let (log, archive): (Arc<dyn Log>, Option<Arc<dyn Archive>>) = match datastore {
        Datastore::Sqlite(file) => {
            let log = SqliteLog::open_with(file, durability).await?;
            let create = matches!(keep, Keep::Rows { .. }) && missing == MissingArchive::Create;
            let archive = if create || log.has_archive() {
                let unreadable = |error| log::Error::Open(format!("cannot read database {}: {error}", file.display()));
                let meta = log.meta().await.map_err(unreadable)?;
                log.archive(&meta, create).await
            } else {
                None
            };
            (Arc::new(log), archive.map(|archive| Arc::new(archive) as _))
        }
        Datastore::Postgres(endpoint) => {
            let settings = PostgresSettings {
                endpoint: endpoint.clone(),
                poll_interval: settings.datastore_poll_interval.0,
                connections_max: settings.datastore_connections,
                name: settings.member_name(),
                client_urls,
                durability,
            };
            let log = PostgresLog::open(settings).await?;
            let archive = log.archive();
            let log = match metrics {
                Some(metrics) => log.with_metrics(metrics),
                None => log,
            };
            (Arc::new(log), Some(Arc::new(archive)))
        }
    };
    Ok((log, archive.map(|archive| HistorySettings { archive, keep })))
}

/// Creates the empty database of a new server.
///
/// # Errors
///
/// If the database is not empty, or cannot be written.
pub async fn empty_database(datastore: &Datastore) -> log::Result<Box<dyn Load>> {
    Ok(match datastore {
        Datastore::Sqlite(file) => Box::new(SqliteLoader::database(file).await?),
        Datastore::Postgres(endpoint) => Box::new(PostgresLoader::open(endpoint).await?),
    })
}

/// Opens an existing database for reading, as of one moment.
///
/// # Errors
///
/// If the database cannot be read or contains no log of this version.
pub async fn view(datastore: &Datastore) -> log::Result<Box<dyn Inspect>> {
    Ok(match datastore {
        Datastore::Sqlite(file) => Box::new(SqliteView::of_database(file).await?),
        Datastore::Postgres(endpoint) => Box::new(PostgresView::of_database(endpoint).await?),
    })
}

/// Makes room for a copy where a server that was started and stopped has left a database. The caller has checked that it
/// has no rows: a file of SQLite is deleted without a look at its contents. On Postgres it can be filled as it is.
pub(crate) fn discard_empty(datastore: &Datastore) -> log::Result<()> {
    match datastore {
        Datastore::Sqlite(file) => SqliteLoader::discard(file),
        Datastore::Postgres(_) => Ok(()),
    }
}

/// Deletes the unfinished copy of a cluster, which is not open.
///
/// # Errors
///
/// If another process uses the database or it cannot be written; on Postgres also if it is not that copy.
pub(crate) async fn discard_copy(datastore: &Datastore, source: u64) -> log::Result<()> {
    match datastore {
        Datastore::Sqlite(file) => SqliteLoader::discard(file),
        Datastore::Postgres(endpoint) => PostgresLoader::discard(endpoint, source).await,
    }
}
