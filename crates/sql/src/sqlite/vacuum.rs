//! Vacuum: returns free pages of the file to the file system, a few at a time, when a compaction has ended.
//!
//! It does not run after each step of the compaction, because it moves the last pages of the file into free pages. That
//! writes as many bytes as the deletes, while other writes wait. Some pages remain free, because the next writes reuse
//! them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rusqlite::Connection;
use tokio::{
    sync::{Mutex, Notify},
    task::JoinHandle,
    time::{sleep, timeout},
};
use tracing::warn;

use super::{
    checkpoint::Checkpointer,
    integrity::unreadable,
    writer::{Writer, unavailable},
};
use orlop_core::{log::Result, supervise::vital};

/// Returns up to 64 pages, while other writes wait. It returns a row for each page.
const STEP_SQL: &str = "PRAGMA incremental_vacuum(64)";
/// Time after which a step ends before it has returned all its pages. In a large file of which most is free, SQLite reads
/// a large part of the list of free pages to move a single page.
const STEP_TIME_MAX: Duration = Duration::from_millis(3);
/// Minimum pause between two steps. A step that takes longer is followed by a pause as long as the step.
const STEP_PAUSE: Duration = Duration::from_millis(5);
/// The value of the pragma `auto_vacuum` of a file that never returns free pages.
const AUTO_VACUUM_NONE: i64 = 0;
/// Time without deletes after which a compaction counts as ended. It is longer than the pause between two steps of a
/// compaction.
const COMPACTION_IDLE_TIME: Duration = Duration::from_secs(1);
/// Minimum number of pages that remain free in the file.
const KEEP_PAGES: i64 = 256;
/// The file keeps 1 / `KEEP_DIVISOR` of its pages free, if that is more than [`KEEP_PAGES`].
const KEEP_DIVISOR: i64 = 8;

pub(super) struct Vacuum {
    shared: Arc<Shared>,
    task: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    writer: Arc<Writer>,
    /// Dropped after the writer, because it has a descriptor of the writer's file ([`super::checkpoint`]).
    checkpointer: Arc<Checkpointer>,
    freed: Notify,
    stop: Notify,
    /// Whether the log says why no pages can be returned.
    has_warned: AtomicBool,
}

/// The result of a step.
struct Step {
    /// Number of pages that are still free and can be returned.
    free: i64,
    /// Time for which other writes had to wait.
    took: Duration,
}

impl Vacuum {
    pub(super) fn start(writer: Arc<Writer>, checkpointer: Arc<Checkpointer>) -> Self {
        let (freed, stop, has_warned) = (Notify::new(), Notify::new(), AtomicBool::new(false));
        let shared = Arc::new(Shared { writer, checkpointer, freed, stop, has_warned });
        let task = vital("the vacuum", run(Arc::clone(&shared)));
        Self { shared, task: Mutex::new(Some(task)) }
    }

    /// Notifies the background task that rows were deleted.
    pub(super) fn freed(&self) {
        self.shared.freed.notify_one();
    }

    /// Runs one step. Returns the number of pages that are still free and can be returned.
    pub(super) async fn step(&self) -> Result<i64> {
        Ok(self.shared.step(STEP_TIME_MAX).await?.free)
    }

    /// Stops the background task and waits for its end.
    pub(super) async fn finish(&self) {
        self.shared.stop.notify_one();
        if let Some(task) = self.task.lock().await.take()
            && let Err(error) = task.await
        {
            warn!(%error, "vacuum task failed");
        }
    }
}

async fn run(shared: Arc<Shared>) {
    let work = async {
        loop {
            shared.freed.notified().await;
            while timeout(COMPACTION_IDLE_TIME, shared.freed.notified()).await.is_ok() {}
            if let Err(error) = shared.shrink().await {
                warn!(%error, "cannot return free pages to the file system; trying again after the next compaction");
            }
        }
    };
    // The work can be dropped at any await. SQLite leaves the file consistent, and a connection in an unknown state is
    // not used again ([`super::writer`]).
    tokio::select! {
        () = work => {}
        () = shared.stop.notified() => {}
    }
}

impl Shared {
    async fn shrink(&self) -> Result<()> {
        let writer = self.writer.lock().await.map_err(unavailable)?;
        let pages = writer.run(|writer| Ok((pragma(writer, "page_count")?, pragma(writer, "freelist_count")?)));
        let (all, mut free) = pages.await.map_err(unreadable)?;
        let keep = KEEP_PAGES.max(all / KEEP_DIVISOR);
        while free > keep {
            let step = self.step(STEP_TIME_MAX).await?;
            free = step.free;
            sleep(STEP_PAUSE.max(step.took)).await;
        }
        Ok(())
    }

    async fn step(&self, time_max: Duration) -> Result<Step> {
        let writer = self.writer.lock().await.map_err(unavailable)?;
        let begun = Instant::now();
        let step = writer.run(move |writer| {
            let before = pragma(writer, "freelist_count")?;
            let returned = return_pages(writer, time_max)?;
            Ok((before, returned, pragma(writer, "freelist_count")?, pragma(writer, "auto_vacuum")?))
        });
        let (before, returned, free, auto_vacuum) = step.await.map_err(unreadable)?;
        let took = begun.elapsed();
        if before > 0 && free >= before {
            self.warn_of_useless_step(auto_vacuum);
            return Ok(Step { free: 0, took });
        }
        self.checkpointer.purged(returned);
        Ok(Step { free, took })
    }

    /// Another program may have created the file again, for example from a dump.
    fn warn_of_useless_step(&self, auto_vacuum: i64) {
        if auto_vacuum == AUTO_VACUUM_NONE && !self.has_warned.swap(true, Ordering::Relaxed) {
            warn!(
                "the database file was created without auto_vacuum, so its free pages are reused but never returned to \
                 the file system; to change that, stop the server and run in sqlite3: PRAGMA auto_vacuum = 2; VACUUM"
            );
        }
    }
}

/// Returns free pages to the file system until `time_max` has passed, at least one. Returns their number.
fn return_pages(writer: &mut Connection, time_max: Duration) -> rusqlite::Result<usize> {
    let begun = Instant::now();
    // Without it, the end of a statement that has more rows commits, and its error would be lost.
    let transaction = writer.transaction()?;
    let mut returned = 0;
    {
        let mut statement = transaction.prepare_cached(STEP_SQL)?;
        let mut pages = statement.query([])?;
        while pages.next()?.is_some() {
            returned += 1;
            if begun.elapsed() >= time_max {
                break;
            }
        }
    }
    transaction.commit()?;
    Ok(returned)
}

fn pragma(connection: &Connection, name: &str) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, name, |row| row.get(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqlite::SqliteLog;

    /// Leaves about a hundred free pages, fewer than those that remain free.
    const FREE_PAGES: &str = "CREATE TABLE t (bytes); INSERT INTO t VALUES (zeroblob(400000)); DROP TABLE t";

    #[tokio::test]
    async fn step_ends_when_its_time_is_up_after_at_least_one_page() {
        let folder = tempfile::tempdir().expect("a folder");
        let log = SqliteLog::open(&folder.path().join("orlop.db")).await.expect("a database");
        let run = async |sql: &'static str| {
            let writer = log.writer.lock().await.expect("a connection");
            let pages = writer.run(move |writer| {
                writer.execute_batch(sql)?;
                Ok((pragma(writer, "page_count")?, pragma(writer, "freelist_count")?))
            });
            pages.await.expect("the numbers of pages")
        };
        let (all, mut free) = run(FREE_PAGES).await;
        assert!(free > 80, "{free} pages are free");
        for (time_max, pages) in [(Duration::ZERO, 1), (Duration::ZERO, 1), (Duration::MAX, 64), (Duration::ZERO, 1)] {
            let step = log.vacuum.shared.step(time_max).await.expect("a step");
            free -= pages;
            assert_eq!(step.free, free, "a step of {time_max:?}");
            assert_eq!(run("").await.1, free, "a step of {time_max:?} is committed");
        }
        while free > 0 {
            let step = log.vacuum.shared.step(Duration::ZERO).await.expect("a step");
            assert_eq!(step.free, free - 1);
            free = step.free;
        }
        let (left, _) = run("").await;
        assert!(left < all - 80, "the file had {all} pages and has {left}");
    }
}
