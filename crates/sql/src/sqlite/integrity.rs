//! Damage of a database file: SQLite's own checks, and the errors of reading a damaged page.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use futures_util::TryStreamExt as _;
use orlop_core::log::{Depth, Error, Result};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::watch;

use super::{
    result_code::{CODE_CORRUPT, CODE_NOT_A_DATABASE, ResultCode, disk_hint, has_code},
    wal,
};
use crate::error::unavailable;

/// Pages that are checked between two looks at [`Stop`].
const PAGES_AT_ONCE: i32 = 100;

/// Returns the inconsistencies of the file that SQLite finds, at most `limit`. A text may have several lines. Reads the
/// whole file. If SQLite cannot continue, that is an inconsistency only if it has found no other.
///
/// # Errors
///
/// [`Error::Unavailable`] if the file cannot be read.
pub(super) async fn find_damage(connection: &mut SqliteConnection, depth: Depth, limit: usize) -> Result<Vec<String>> {
    let pragma = match depth {
        Depth::Whole => "integrity_check",
        Depth::Quick => "quick_check",
    };
    // A PRAGMA accepts no parameters. The text is safe: a constant and a number.
    let query = sqlx::query_scalar::<_, String>(AssertSqlSafe(format!("PRAGMA {pragma}({})", limit.max(1))));
    let (mut texts, mut found) = (query.fetch(connection), Vec::new());
    loop {
        match texts.try_next().await {
            Ok(None) => return Ok(found),
            Ok(Some(text)) if text == "ok" => {}
            Ok(Some(text)) => found.push(text),
            Err(error) => return end_of_damage(found, unreadable(error)),
        }
    }
}

/// Returns what was found before an error that ended the search.
fn end_of_damage(mut found: Vec<String>, error: Error) -> Result<Vec<String>> {
    let Error::Corrupt(text) = error else { return Err(error) };
    if found.is_empty() {
        found.push(text);
    }
    Ok(found)
}

/// Checks each page. This finds damage that the rows do not show: if a damaged page hides rows, the log without these
/// rows may still be consistent.
///
/// # Errors
///
/// [`Error::Corrupt`] with the first inconsistency.
pub(crate) async fn refuse_damage(connection: &mut SqliteConnection) -> Result<()> {
    match find_damage(connection, Depth::Quick, 1).await?.into_iter().next() {
        None => Ok(()),
        Some(found) => Err(Error::Corrupt(found.lines().collect::<Vec<_>>().join(" "))),
    }
}

/// Checks each page beside writes, on a connection of its own, until the WAL has grown by `wal_growth_max` bytes: SQLite cannot
/// reuse the WAL while the check reads the database.
///
/// # Errors
///
/// [`Error::Corrupt`] with the first inconsistency; [`Error::Unavailable`] if the check cannot begin or has ended early.
pub(super) async fn check_beside_writes(options: &SqliteConnectOptions, wal_growth_max: u64) -> Result<()> {
    let mut pages = options.connect().await.map_err(unavailable)?;
    let stop = stop_when_dropped(&mut pages).await.map_err(unavailable)?;
    let growth = wal::Growth::of(options.get_filename()).await;
    let checked = tokio::select! {
        biased;
        () = growth.reach(wal_growth_max) => Err(Error::Unavailable(format!(
            "the WAL has grown by {} MiB since the check began",
            wal_growth_max >> 20
        ))),
        checked = refuse_damage(&mut pages) => checked,
    };
    drop(stop);
    let _ = pages.close().await;
    checked
}

/// Ends the statements of a connection when it is dropped: SQLite's thread goes on with a statement whose future was
/// dropped, and the last checkpoint of the WAL would wait for it.
pub(super) struct Stop(Arc<AtomicBool>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub(super) async fn stop_when_dropped(connection: &mut SqliteConnection) -> sqlx::Result<Stop> {
    let stop = Stop(Arc::default());
    let is_stopped = Arc::clone(&stop.0);
    let mut handle = connection.lock_handle().await?;
    handle.set_progress_handler(PAGES_AT_ONCE, move || !is_stopped.load(Ordering::Relaxed));
    Ok(stop)
}

/// Damage that statements have found while the database was used.
#[derive(Default)]
pub(super) struct Damage(watch::Sender<String>);

impl Damage {
    /// Takes note of an error.
    pub(super) fn see(&self, error: &Error) {
        if let Error::Corrupt(text) = error {
            self.0.send_replace(text.clone());
        }
    }

    /// Waits for damage.
    pub(super) async fn found(&self) -> String {
        let mut found = self.0.subscribe();
        // It fails only after the sender, which is in `self`, was dropped.
        found.wait_for(|text| !text.is_empty()).await.map(|text| text.clone()).unwrap_or_default()
    }
}

/// Maps an error: damage to [`Error::Corrupt`], any other error to [`Error::Unavailable`].
pub(super) fn unreadable(error: impl ResultCode) -> Error {
    classified(&error, "")
}

/// Like [`unreadable`], for an error of a write. Names the disk if it is the cause.
pub(super) fn unwritable(error: &impl ResultCode, file: &Path) -> Error {
    classified(error, disk_hint(error, file))
}

fn classified(error: &impl ResultCode, hint: &str) -> Error {
    if is_damage(error) || has_code(error, CODE_NOT_A_DATABASE) {
        Error::Corrupt(error.text())
    } else {
        Error::Unavailable(format!("{}{hint}", error.text()))
    }
}

pub(super) fn is_damage(error: &impl ResultCode) -> bool {
    has_code(error, CODE_CORRUPT)
}

/// Returns whether the file has another format than SQLite's.
pub(crate) fn is_not_a_database(error: &sqlx::Error) -> bool {
    has_code(error, CODE_NOT_A_DATABASE)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sqlx::sqlite::SqliteJournalMode;

    use super::*;

    #[tokio::test]
    async fn check_beside_writes_ends_when_the_wal_has_grown() {
        let folder = tempfile::tempdir().expect("a folder");
        let options = SqliteConnectOptions::new()
            .filename(folder.path().join("orlop.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal);
        let mut writer = options.connect().await.expect("a database");
        sqlx::query("CREATE TABLE pages (content BLOB)").execute(&mut writer).await.expect("a table");
        for (wal_growth_max, is_whole) in [(0, false), (1 << 30, true)] {
            let checked = tokio::time::timeout(Duration::from_secs(60), check_beside_writes(&options, wal_growth_max));
            let checked = checked.await.expect("the check ends");
            assert_eq!(checked.is_ok(), is_whole, "{wal_growth_max}");
            assert!(checked.is_ok() || matches!(checked, Err(Error::Unavailable(_))), "{checked:?}");
        }
    }
}
