//! `orlop import kine`: fills an empty database from the table of a kine that has stopped.
//!
//! A row of kine is one change of one key, and its id is the revision that clients got, so revisions stay as they are.
//! [`chain`] gives each row its create revision and version; [`survey`] reads the table once to find what a log cannot
//! have, and with it the compact revision; [`crate::load`] makes the rows of the log; [`report`] says what was taken.
//!
//! Memory: an index of all keys and one page of rows. The table is read three times, in one transaction of the database;
//! values are read the last time only.

mod chain;
mod report;
mod survey;

use clap::Subcommand;
use orlop_core::{
    auth::AuthState,
    index::{RowKind, ValidatedColumns},
    log,
    store::quota_of,
    types::{ChangeKind, EncodedKv, Key, LeaseId, Revision, RowId, Version},
};
use orlop_sql::{KineRow, KineState, KineTable, Values};

use self::{
    chain::{Chain, Taken},
    survey::Survey,
};
use crate::{
    config::{DatastoreFlags, Flags, Secret, Settings},
    datastore::empty_database,
    load::{Bounds, NewestRows, Rows, StoredRow},
    output::print,
};

/// The store to import.
#[derive(Debug, Subcommand)]
pub enum Args {
    /// Import the keys, history and TTLs of kine, with which k3s keeps its data in SQLite, Postgres or MySQL
    ///
    /// Stop kine, or k3s on all servers, first. The source is read in one transaction and not changed. The target is a
    /// new SQLite file or an empty Postgres database. Revisions stay as they are, so clients of kine go on with those
    /// that they know. Each key with a TTL gets a lease of its own, which begins when the server starts. kine stores no
    /// versions; they are computed. The command prints what it has taken, and lists rows that make no sense.
    Kine(KineArgs),
}

#[derive(Debug, clap::Args)]
pub struct KineArgs {
    /// Database of kine: sqlite://PATH or the path of a file (k3s: /var/lib/rancher/k3s/server/db/state.db),
    /// postgres://USER:PASSWORD@HOST:PORT/DATABASE or mysql://USER:PASSWORD@tcp(HOST:PORT)/DATABASE
    #[arg(long, value_name = "URL")]
    from: Secret,

    #[command(flatten)]
    datastore: DatastoreFlags,
}

/// Errors of an import.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// A text for the operator.
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    Log(#[from] log::Error),
}

type Result<T> = std::result::Result<T, Error>;

/// Runs the command and prints its report.
///
/// # Errors
///
/// A text for the operator. The database is then as empty as before.
pub async fn run(args: Args) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let Args::Kine(KineArgs { from, datastore }) = args;
    let settings = Settings::load(&Flags::from(datastore))?;
    let datastore = settings.datastore()?;
    let mut table = KineTable::open(from.text()).await?;
    let name = table.name();
    let mut import = Import::new(&mut table).await?;
    let mut into = empty_database(&datastore).await?;
    let rows = import.add_rows(&mut table, &mut *into).await?;
    // The database becomes visible only if the table is what it was.
    table.check_unchanged(&import.state).await?;
    let auth = AuthState::default();
    into.finish(&import.bounds.meta(import.survey.leases(), &auth), &auth).await?;
    let report = report::text(&import, rows, quota_of(settings.quota_backend_bytes));
    Ok(print(format!("imported {name} into {}\n{report}", datastore.name()).as_bytes())?)
}

/// What the table contains, and the log that is made from it.
struct Import {
    state: KineState,
    survey: Survey,
    bounds: Bounds,
    /// The newest row of each key at the compact revision.
    newest: NewestRows,
}

/// The rows in the log: numbers and size.
struct Added {
    /// Changes above the compact revision.
    history: usize,
    /// Live keys at the compact revision.
    compacted: usize,
    /// Bytes, about, as they count toward the quota.
    bytes: i64,
}

impl Import {
    /// Reads the table without values.
    async fn new(table: &mut KineTable) -> Result<Self> {
        let state = table.state().await?;
        let mut survey = Survey::new(&state);
        let mut after = i64::MIN;
        while let Some(rows) = page(table, &mut after, Values::Omit).await? {
            for row in &rows {
                survey.take(row)?;
            }
        }
        let bounds = survey.finish(&state)?;
        let newest = newest_at(table, bounds.compacted, &state).await?;
        Ok(Self { state, survey, bounds, newest })
    }

    /// Reads the table with values, and adds the rows of the log.
    async fn add_rows(&mut self, table: &mut KineTable, into: &mut dyn log::Load) -> Result<Added> {
        let live = self.newest.values().filter(|newest| matches!(newest.kind, RowKind::Put { .. })).count();
        let mut added = Added { history: 0, compacted: live, bytes: 0 };
        let mut rows = Rows::new(std::mem::take(&mut self.newest), self.bounds.compacted);
        let mut chain = Chain::new(&self.state);
        let mut after = i64::MIN;
        while let Some(page) = page(table, &mut after, Values::Read).await? {
            for row in page {
                let Taken::Change { key, kind, .. } = chain.take(&row) else { continue };
                added.history += usize::from(Some(Revision(row.id)) > self.bounds.compacted);
                rows.add(self.stored(row, key, kind))
                    .map_err(|what| Error::Refused(format!("kine's table contradicts itself: {what}")))?;
                rows.flush_full(into).await?;
            }
        }
        added.bytes = rows.size();
        rows.finish(into).await?;
        Ok(added)
    }

    fn stored(&self, row: KineRow, key: Key, kind: chain::Kind) -> StoredRow {
        let id = RowId::new(Revision(row.id), 0);
        let chain::Kind::Put { create_revision, version, value } = kind else {
            return StoredRow { row: id, change: Some((key, ChangeKind::Delete)) };
        };
        let lease = self.survey.lease_of(row.id);
        let value = value.unwrap_or(row.value);
        let kv = EncodedKv::new(&key, Version { row: id, create_revision, version }, &value, lease);
        StoredRow { row: id, change: Some((key, ChangeKind::put(kv))) }
    }
}

/// Returns the ID of the lease that a key of row `id` gets. kine's clients know TTLs as IDs, to which it must not be
/// equal.
fn lease_id(id: i64) -> LeaseId {
    LeaseId(id ^ (1 << 62))
}

/// Returns the newest row of each key at or below the compact revision.
async fn newest_at(table: &mut KineTable, compacted: Option<Revision>, state: &KineState) -> Result<NewestRows> {
    let mut newest = NewestRows::new();
    let Some(compacted) = compacted else { return Ok(newest) };
    let (mut chain, mut after) = (Chain::new(state), i64::MIN);
    while let Some(rows) = page(table, &mut after, Values::Omit).await? {
        for row in rows {
            if row.id > compacted.0 {
                return Ok(newest);
            }
            let Taken::Change { key, kind, .. } = chain.take(&row) else { continue };
            let id = RowId::new(Revision(row.id), 0);
            newest.insert(key, ValidatedColumns { row: id, kind: kind.columns(), prev_revision: Revision(0) });
        }
    }
    Ok(newest)
}

/// Returns the next rows; `None` at the end of the table.
async fn page(table: &mut KineTable, after: &mut i64, values: Values) -> Result<Option<Vec<KineRow>>> {
    let rows = table.page(*after, values).await?;
    *after = rows.last().map_or(*after, |row| row.id);
    Ok((!rows.is_empty()).then_some(rows))
}
