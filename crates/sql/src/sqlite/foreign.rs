//! Stores of other programs, in whose place a server would create a database or open one of theirs.

use std::path::Path;

use sqlx::{ConnectOptions as _, Connection as _, SqliteConnection, sqlite::SqliteConnectOptions};

use super::{BUSY_TIMEOUT, cannot_open, view::journal_of};
use crate::migrations::foreign_table;
use orlop_core::{
    files::folder_of,
    log::{Error, Result},
};

/// The name of kine's database file.
const KINES_FILE: &str = "state.db";
const HAS_KINES_TABLE: &str = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'kine'";

/// Refuses to create a database in the data directory of an etcd server: it would lack the keys of etcd.
pub(super) fn refuse_etcd(file: &Path) -> Result<()> {
    let folder = folder_of(file);
    if file.exists() || !folder.join("member/snap").is_dir() {
        return Ok(());
    }
    Err(Error::Open(format!(
        "{} is the data directory of an etcd server, which Orlop cannot serve: choose another data-dir, and move \
         the store there with orlop migrate",
        folder.display()
    )))
}

/// Refuses to create an empty database beside that of kine: it would lack the keys of kine.
pub(super) async fn refuse_kine(file: &Path) -> Result<()> {
    let folder = folder_of(file);
    let kines = folder.join(KINES_FILE);
    if file.exists() || !kines.is_file() || !is_of_kine(&kines).await {
        return Ok(());
    }
    Err(Error::Open(format!(
        "{} contains {KINES_FILE}, the database of kine, which Orlop cannot serve: choose another data-dir, and fill \
         it with orlop import kine --from {}",
        folder.display(),
        kines.display()
    )))
}

/// Returns whether a file is a database with kine's table. Neither writes nor creates a file, so it does not see what is
/// only in the WAL.
async fn is_of_kine(file: &Path) -> bool {
    let options = SqliteConnectOptions::new().filename(file).read_only(true).immutable(true);
    match options.disable_statement_logging().connect().await {
        Ok(mut connection) => has_kines_table(&mut connection).await,
        Err(_) => false,
    }
}

/// Returns whether a database has kine's table, as far as it can be read.
pub(super) async fn has_kines_table(connection: &mut SqliteConnection) -> bool {
    let tables: sqlx::Result<i64> = sqlx::query_scalar(HAS_KINES_TABLE).fetch_one(connection).await;
    tables.is_ok_and(|tables| tables > 0)
}

/// Refuses a file that contains only tables of other applications, before anything is written to it.
pub(super) async fn refuse_other_tables(file: &Path) -> Result<()> {
    if !file.metadata().is_ok_and(|metadata| metadata.len() > 0) {
        return Ok(());
    }
    let failed = |error: sqlx::Error| cannot_open(file, &error);
    // A transaction that a crash interrupted must be rolled back before anything can be read.
    let is_interrupted = journal_of(file).exists();
    let options = SqliteConnectOptions::new()
        .filename(file)
        .read_only(!is_interrupted)
        .busy_timeout(BUSY_TIMEOUT)
        .disable_statement_logging();
    let mut connection = options.connect().await.map_err(failed)?;
    const TABLES: &str = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY 1";
    let tables: Vec<String> = sqlx::query_scalar(TABLES).fetch_all(&mut connection).await.map_err(failed)?;
    connection.close().await.map_err(failed)?;
    foreign_table(&tables).map_or(Ok(()), |table| {
        let remedy = if table == "kine" { ", and fill it with orlop import kine" } else { "" };
        Err(Error::Open(format!(
            "{} is the database of another application: it has the table {table}; choose another file{remedy}",
            file.display()
        )))
    })
}
