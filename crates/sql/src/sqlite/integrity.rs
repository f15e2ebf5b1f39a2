//! Damage of a database file: SQLite's own checks, and the errors of reading a damaged page.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use orlop_core::log::{Depth, Error, Result};
use sqlx::{AssertSqlSafe, SqliteConnection};

use super::has_code;
use crate::rows::{corrupt, unavailable};

/// Pages that are checked between two looks at [`Stop`].
const PAGES_AT_ONCE: i32 = 100;

/// Returns the inconsistencies of the file that SQLite finds, at most `limit`. A text may have several lines. Reads the
/// whole file.
///
/// # Errors
///
/// [`Error::Corrupt`] if SQLite cannot continue.
pub(super) async fn find_damage(connection: &mut SqliteConnection, depth: Depth, limit: usize) -> Result<Vec<String>> {
    let pragma = match depth {
        Depth::Whole => "integrity_check",
        Depth::Quick => "quick_check",
    };
    // A PRAGMA accepts no parameters. The text is safe: a constant and a number.
    let query = sqlx::query_scalar(AssertSqlSafe(format!("PRAGMA {pragma}({})", limit.max(1))));
    let mut found: Vec<String> = query.fetch_all(connection).await.map_err(unreadable)?;
    found.retain(|text| text != "ok");
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

/// Maps an error of a read: damage to [`Error::Corrupt`], any other error to [`Error::Unavailable`].
pub(super) fn unreadable(error: sqlx::Error) -> Error {
    if is_damage(&error) { corrupt(error) } else { unavailable(error) }
}

pub(super) fn is_damage(error: &sqlx::Error) -> bool {
    const SQLITE_CORRUPT: i32 = 11;
    has_code(error, SQLITE_CORRUPT)
}
