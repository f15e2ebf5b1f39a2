//! Rebuilds the index from the log and checks that the log is consistent.

use std::{
    fmt,
    sync::atomic::{AtomicI64, Ordering},
    time::{Duration, Instant as StdInstant},
};

use tracing::info;

use crate::{
    index::{CompactionCursor, Contradiction, TreeIndex},
    log::{Error, Meta, ReadLog, Result},
    types::{Change, Revision, RowId, Superseded, shown},
};

/// Interval of progress messages while the log is read.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// How far a start has read the log.
#[derive(Debug, Default)]
pub struct ReadProgress {
    revision: AtomicI64,
    head: AtomicI64,
}

impl fmt::Display for ReadProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match [&self.revision, &self.head].map(|number| number.load(Ordering::Relaxed)) {
            [_, 0] => f.write_str("it opens the database"),
            [revision, head] => write!(f, "it has read the log up to revision {revision} of {head}"),
        }
    }
}

/// The state that is rebuilt from a log.
pub struct Replayed {
    pub meta: Meta,
    pub index: TreeIndex,
    pub rows: usize,
    /// Rows that a compaction made unreadable and that are not deleted yet.
    pub garbage: Vec<Superseded>,
}

/// Reads a whole log and rebuilds the index from it.
///
/// # Errors
///
/// [`Error::Corrupt`] if the log is inconsistent.
pub async fn replay(log: &dyn ReadLog) -> Result<Replayed> {
    replay_onto(log, TreeIndex::new(), &ReadProgress::default()).await
}

/// Reads a log from the head of an index on, and brings the index up to date.
pub(super) async fn replay_onto(log: &dyn ReadLog, mut index: TreeIndex, progress: &ReadProgress) -> Result<Replayed> {
    let started = StdInstant::now();
    let mut reported = started;
    let mut rows = 0_usize;
    // The changes of the index's head may be in it in part. A whole log is read from below its first revision, so that
    // rows that do not belong there are found.
    let from = if index.is_empty() { Revision(i64::MIN) } else { index.head() };
    let mut last = RowId::new(index.head().prev().max(Revision::EMPTY), 0);
    let meta = log
        .replay(from, &mut |meta, changes| {
            for change in &changes {
                check_order(meta, last, change.row)?;
                index.restore(change, meta.compact_revision).map_err(|error| inconsistent_row(change, error))?;
                last = change.row;
            }
            rows += changes.len();
            progress.revision.store(index.head().0, Ordering::Relaxed);
            progress.head.store(meta.position.head.0, Ordering::Relaxed);
            if reported.elapsed() > PROGRESS_INTERVAL {
                reported = StdInstant::now();
                info!(rows, revision = index.head().0, head = meta.position.head.0, "reading the log");
            }
            Ok(())
        })
        .await?;
    let head = meta.position.head;
    if index.head() != head {
        return Err(Error::Corrupt(format!("the log ends at revision {}, its head is {head}", index.head())));
    }
    let mut garbage = Vec::new();
    if let Some(revision) = meta.compact_revision {
        if revision > head {
            return Err(Error::Corrupt(format!("compact revision {revision} is above the head {head}")));
        }
        index.begin_compaction(revision);
        let mut cursor = CompactionCursor::default();
        while index.compact_step(&mut cursor, usize::MAX, &mut garbage) {}
    }
    info!(
        rows,
        keys = index.len(),
        revision = index.head().0,
        compact_revision = index.compact_revision().map(|revision| revision.0),
        elapsed_ms = started.elapsed().as_millis(),
        "log read"
    );
    Ok(Replayed { meta, index, rows, garbage })
}

/// Checks that a row follows the one before: above the compact revision no revision is skipped, and the changes of each
/// revision are numbered without gaps.
fn check_order(meta: &Meta, last: RowId, row: RowId) -> Result<()> {
    if row.revision <= Revision::EMPTY || row.revision > meta.position.head {
        return Err(Error::Corrupt(format!(
            "row {} is outside the log, whose head is {}",
            row.revision, meta.position.head
        )));
    }
    let compacted = meta.compact_revision.unwrap_or(Revision::EMPTY).max(Revision::EMPTY);
    if row.revision <= compacted {
        return Ok(());
    }
    let whole_until = last.revision.max(compacted);
    if row.revision > whole_until.next() {
        return Err(Error::Corrupt(format!("revisions between {whole_until} and {} are missing", row.revision)));
    }
    let sub = if last.revision == row.revision { last.sub + 1 } else { 0 };
    if row.sub != sub {
        return Err(Error::Corrupt(format!(
            "revision {}: change {sub} is missing before change {}",
            row.revision, row.sub
        )));
    }
    Ok(())
}

fn inconsistent_row(change: &Change, contradiction: Contradiction) -> Error {
    let RowId { revision, sub } = change.row;
    Error::Corrupt(format!("row id={revision} sub={sub} key=\"{}\": {contradiction}", shown(&change.key)))
}
