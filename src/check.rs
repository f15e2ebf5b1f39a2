//! `orlop check`: checks the integrity of a store, while a server is running on it or not. It reads one consistent
//! snapshot of the whole store and writes nothing.
//!
//! A violation is a state that cannot be the result of requests, compactions, stops and crashes. [`rows`] compares rows
//! with each other, [`facts`] and [`auth`] check the other data, [`archive`] checks the archive of the history, and
//! [`orlop_core::index`] validates the rows of each key. If there are no violations, the store is then read as at the
//! start of a server, and the resulting index is compared with the rows.
//!
//! There is no repair, because the lost data cannot be derived from a violation. docs/how-to/check.md explains each
//! kind of violation.
//!
//! Known limits: changed bytes in values are not found, because values have no checksum. Rows missing at the end of the
//! log are not found. Below the compact revision, missing rows and wrong numbers that are possible after a compaction
//! are not found. The oldest and the newest row of each key, in the log and in the archive, are kept in memory.

mod archive;
mod auth;
mod command;
mod facts;
mod rows;

use std::{
    collections::HashMap,
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
    /// Maximum number of violations to report. All violations are counted.
    pub limit: usize,
    pub depth: Depth,
}

/// The result of a check.
#[derive(Debug, Default)]
pub struct Report {
    /// The database's name.
    pub name: String,
    pub rows: u64,
    /// Number of keys that have a row.
    pub keys: usize,
    pub live_keys: usize,
    /// The smallest and the largest id.
    pub revisions: Option<(i64, i64)>,
    pub compact_revision: Option<i64>,
    pub leases: usize,
    /// Number of rows in the archive; `None`: there is no archive, or it cannot be read.
    pub archived_rows: Option<u64>,
    /// Number of compacted rows that still exist; the next start deletes them. `None`: not counted, because the store
    /// is damaged.
    pub rows_to_purge: Option<usize>,
    pub bytes: i64,
    pub took: Duration,
    pub findings: Findings,
}

/// A violation and its location.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The name of the table, or `database`.
    pub table: &'static str,
    pub row: Option<Location>,
    /// The found and the expected content.
    pub what: String,
}

/// The location of a violation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
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
            Some(Location::Row { id, sub, key }) => write!(f, " id={id} sub={sub} key=\"{key}\"")?,
            Some(Location::Lease(id)) => write!(f, " id={id:x}")?,
            Some(Location::Member(id)) => write!(f, " id={id:x}")?,
            Some(Location::Fact(name)) => write!(f, " name={name:?}")?,
            None => {}
        }
        write!(f, ": {}", self.what)
    }
}

/// The first violations, and the number of all violations.
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

    fn add(&mut self, table: &'static str, row: Option<Location>, what: impl Into<String>) {
        self.total += 1;
        if self.reported.len() < self.limit {
            self.reported.push(Violation { table, row, what: what.into() });
        }
    }

    fn add_row(&mut self, row: &StoredRow, what: impl Into<String>) {
        let location = Location::Row { id: row.id, sub: row.sub, key: shown(&row.key) };
        self.add(row.table.name(), Some(location), what);
    }

    pub fn is_empty(&self) -> bool {
        self.total == 0
    }
}

/// Checks a store. `progress` is called with the current and the last revision.
///
/// # Errors
///
/// If the store cannot be read. Damage is not an error, but a violation.
pub async fn check(store: &dyn Inspect, plan: Plan, mut progress: impl FnMut(Revision, Revision)) -> Result<Report> {
    let begun = Instant::now();
    let mut report = Report { name: store.name().to_owned(), findings: Findings::new(plan.limit), ..Report::default() };
    match run_checks(store, plan, &mut report, &mut progress).await {
        Err(Error::Corrupt(what)) => report.findings.add("database", None, what),
        done => done?,
    }
    store.finish().await?;
    report.took = begun.elapsed();
    Ok(report)
}

async fn run_checks(
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
    auth::check(&store.auth().await?, &mut report.findings);

    let mut rows = Rows::new(&facts, compacted);
    let mut oldest = HashMap::new();
    let checked = check_rows(store, &facts, (&mut rows, &mut oldest), &mut report.findings, progress).await;
    report.rows = rows.count();
    report.keys = rows.newest().len();
    report.live_keys = rows.live().count();
    checked?;
    rows.finish(&facts, &mut report.findings);
    report.archived_rows = archive::check(store, (plan.depth, plan.limit), &oldest, &mut report.findings).await?;
    if report.findings.is_empty() {
        let replayed = replay(store).await?;
        compare(&replayed, &rows, &mut report.findings);
        report.rows_to_purge = Some(replayed.garbage.len());
    }
    Ok(())
}

async fn check_rows(
    store: &dyn Inspect,
    facts: &Facts,
    (rows, oldest): (&mut Rows, &mut HashMap<Vec<u8>, i64>),
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
        for row in &page {
            rows.check(row, findings);
            if !oldest.contains_key(&row.key) {
                oldest.insert(row.key.clone(), row.id);
            }
        }
        progress(Revision(place.0), head);
    }
}

/// Compares the rows with the index that a server would restore.
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
            let what = format!("the index that a server restores differs from the rows for key \"{}\"", shown(key));
            findings.add("kv_log", None, what);
        }
    }
    let live = rows.live().count();
    if served != live {
        findings.add(
            "kv_log",
            None,
            format!("the index that a server restores has {served} live keys, expected {live}"),
        );
    }
}
