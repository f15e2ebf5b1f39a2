//! `orlop check`: checks whether a server could have written a store, with or without a server running. It reads the
//! whole store as of one moment and writes nothing.
//!
//! A violation is a state that no sequence of requests, compactions and stops produces. [`rows`] compares rows with
//! each other, [`facts`] checks the other data, and [`orlop_core::index`] validates the rows of each key. A
//! store without violations is finally read as a server reads it at its start, and the index is compared.
//!
//! There is no repair: a server never leaves a state that needs one, and a violation does not tell what was lost.
//! docs/how-to/check.md explains each kind.
//!
//! Known limits: values have no checksum, so changed bytes in them are not found; rows missing at the end of the log
//! are not found; below the compact revision rows may be missing, and a wrong but possible number is not found. The
//! newest row of each key is kept in memory.

mod command;
mod facts;
mod progress;
mod rows;

use std::{
    fmt,
    time::{Duration, Instant},
};

pub use self::command::{Args, Verdict, run};
use self::rows::Rows;
use orlop_core::{
    index::Lease,
    log::{Depth, Error, Facts, Inspect, Result, StoredRow},
    store::{Replayed, replay},
    types::{KeyRange, LeaseId, Revision, shown},
};

/// Options of a check.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Maximum number of violations to report; the rest is counted.
    pub limit: usize,
    pub depth: Depth,
}

/// The result of a check.
#[derive(Debug, Default)]
pub struct Report {
    /// The database's name.
    pub name: String,
    pub rows: u64,
    /// Keys that have a row.
    pub keys: usize,
    pub live_keys: usize,
    /// The smallest and the largest id.
    pub revisions: Option<(i64, i64)>,
    pub compact_revision: Option<i64>,
    pub leases: usize,
    /// Compacted rows that still exist and that the next start deletes. `None`: not counted, because the store is
    /// damaged.
    pub rows_to_purge: Option<usize>,
    pub bytes: i64,
    pub took: Duration,
    pub findings: Findings,
}

/// A violation and its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The table, or `database`.
    pub table: &'static str,
    pub row: Option<Place>,
    /// The found and the expected content.
    pub what: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    Row {
        id: i64,
        sub: i64,
        /// Escaped and truncated.
        key: String,
    },
    Lease(i64),
    Member(i64),
    Fact(String),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.table)?;
        match &self.row {
            Some(Place::Row { id, sub, key }) => write!(f, " id={id} sub={sub} key=\"{key}\"")?,
            Some(Place::Lease(id)) => write!(f, " id={id:x}")?,
            Some(Place::Member(id)) => write!(f, " id={id:x}")?,
            Some(Place::Fact(name)) => write!(f, " name={name:?}")?,
            None => {}
        }
        write!(f, ": {}", self.what)
    }
}

/// Violations: the first ones are kept, the rest is counted.
#[derive(Debug, Default)]
pub struct Findings {
    limit: usize,
    pub reported: Vec<Violation>,
    pub total: u64,
}

impl Findings {
    fn new(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    fn add(&mut self, table: &'static str, row: Option<Place>, what: impl Into<String>) {
        self.total += 1;
        if self.reported.len() < self.limit {
            self.reported.push(Violation { table, row, what: what.into() });
        }
    }

    fn add_row(&mut self, row: &StoredRow, what: impl Into<String>) {
        let place = Place::Row { id: row.id, sub: row.sub, key: shown(&row.key) };
        self.add(row.table.name(), Some(place), what);
    }

    pub fn is_empty(&self) -> bool {
        self.total == 0
    }
}

/// Checks a store. `progress` receives the current and the last revision.
///
/// # Errors
///
/// If it cannot be read. Content that is unreadable because of damage is a violation.
pub async fn check(store: &dyn Inspect, plan: Plan, mut progress: impl FnMut(Revision, Revision)) -> Result<Report> {
    let begun = Instant::now();
    let mut report = Report { name: store.name().to_owned(), findings: Findings::new(plan.limit), ..Report::default() };
    match look(store, plan, &mut report, &mut progress).await {
        Err(Error::Corrupt(what)) => report.findings.add("database", None, what),
        looked => looked?,
    }
    store.finish().await?;
    report.took = begun.elapsed();
    Ok(report)
}

async fn look(
    store: &dyn Inspect,
    plan: Plan,
    report: &mut Report,
    progress: &mut impl FnMut(Revision, Revision),
) -> Result<()> {
    for what in store.integrity(plan.depth, plan.limit).await? {
        report.findings.add("database", None, what);
    }
    let facts = store.facts().await?;
    report.revisions = facts.ids;
    report.leases = facts.leases.len();
    report.bytes = facts.bytes;
    let compacted = facts::check(&facts, &mut report.findings);
    report.compact_revision = compacted.map(|revision| revision.0);

    let mut rows = Rows::new(&facts, compacted);
    let walked = walk(store, &facts, &mut rows, &mut report.findings, progress).await;
    report.rows = rows.count();
    report.keys = rows.newest().len();
    report.live_keys = rows.live().count();
    walked?;
    rows.finish(&facts, &mut report.findings);
    if report.findings.is_empty() {
        let replayed = replay(store).await?;
        compare(&replayed, &rows, &mut report.findings);
        report.rows_to_purge = Some(replayed.garbage.len());
    }
    Ok(())
}

async fn walk(
    store: &dyn Inspect,
    facts: &Facts,
    rows: &mut Rows,
    findings: &mut Findings,
    progress: &mut impl FnMut(Revision, Revision),
) -> Result<()> {
    let head = Revision(facts.ids.map_or(0, |(_, last)| last));
    let mut place = (i64::MIN, i64::MIN);
    loop {
        let page = match store.rows_after(place).await {
            Ok(page) => page,
            Err(Error::Corrupt(error)) if place.0 > i64::MIN => {
                return Err(Error::Corrupt(format!("cannot read the rows after id={}: {error}", place.0)));
            }
            Err(error) => return Err(error),
        };
        let Some(last) = page.last() else { return Ok(()) };
        place = last.place();
        page.iter().for_each(|row| rows.take(row, findings));
        progress(Revision(place.0), head);
    }
}

/// Compares the rows with what a server would restore.
fn compare(replayed: &Replayed, rows: &Rows, findings: &mut Findings) {
    let index = &replayed.index;
    let mut served = 0;
    for (key, entry) in index.range(KeyRange::all().bounds(), index.head()) {
        served += 1;
        let lease = match entry.lease {
            Lease::Known(lease) => LeaseId::to_wire(lease),
            Lease::InRow => 0,
        };
        let found = (entry.version.row, entry.version.create_revision, entry.version.version, lease);
        if rows.live_version(key) != Some(found) {
            let what = format!("a server reads key \"{}\" differently from its rows", shown(key));
            findings.add("kv_log", None, what);
        }
    }
    let live = rows.live().count();
    if served != live {
        findings.add("kv_log", None, format!("a server reads {served} live keys, expected {live}"));
    }
}
