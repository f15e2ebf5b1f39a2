//! The log in a Postgres database, to which any number of Orlop instances append.
//!
//! Connections: one for appends, one for position queries, one that listens for notifications, and a pool for all other
//! reads. A batch is one call of a function that a migration creates: `orlop_append_at`, or `orlop_append_behind` for a
//! batch that may be appended behind rows of other instances. Both are a compare-and-append under an advisory lock, in
//! one round trip and one commit. A read of rows that compaction may delete concurrently also returns, from the same
//! snapshot, the revision below which rows may be missing.
//!
//! After a restart or a failover of Postgres, or when the table of the log was created again, [`Position::server`] has
//! another value, and the store compares the end of the log before the next append.

mod append;
mod archive;
mod connect_error;
mod connection;
mod dedicated;
mod hosts;
mod inspect;
mod listener;
mod load;
mod passfile;
mod pool;
mod primary;
mod read;
mod replication;
mod saved_index;
mod schema;
mod space;
mod tls_files;
mod view;

use std::{
    hash::{BuildHasher as _, RandomState},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use sqlx::{PgConnection, Row as _, postgres::PgRow};
use tokio::{
    task::JoinHandle,
    time::{Instant, timeout},
};
use tracing::{debug, warn};

pub(crate) use self::connection::has_unescaped_password;
use self::{
    append::Appender,
    connection::{Database, KEPT_ANSWER_MAX, SERVER_WAIT_MAX, STATEMENT_TIMEOUT, read, with_timeout, within},
    dedicated::Dedicated,
    listener::Listener,
    space::Counted,
};
pub use self::{
    archive::PostgresArchive, hosts::PARAMETERS as POSTGRES_PARAMETERS, load::PostgresLoader, view::PostgresView,
};
use crate::{Durability, auth, error::corrupt, rows::LogRow as _};
use orlop_core::auth::AuthState;
use orlop_core::log::{
    Append, Appended, Connections, Error, HEARTBEAT_TIMEOUT, LeaseScope, Log, LoggedLease, Member, Meta, Page,
    Position, Precision, ReadLog, Reclaim, Reclaimed, Result, SavedIndex, SharedLog, Size, Touch, Visit, WithPrev,
};
use orlop_core::metrics::Metrics;
use orlop_core::supervise::vital;
use orlop_core::types::{EncodedKv, KeyRange, LeaseId, Revision, RowId};

/// Settings of the log.
#[derive(Debug, Clone)]
pub struct PostgresSettings {
    /// `postgres://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=...`
    pub endpoint: String,
    /// Maximum time between two checks for new rows if no notification arrives.
    pub poll_interval: Duration,
    /// Number of connections for reads.
    pub connections_max: u32,
    /// The name of this instance, unique among the instances on one database.
    pub name: String,
    pub client_urls: Vec<String>,
    pub durability: Durability,
}

/// The log in Postgres.
pub struct PostgresLog {
    database: Database,
    appender: Appender,
    /// The connection for position queries. Every linearizable read waits for such a query.
    position_connection: Dedicated,
    listener: Listener,
    poll_interval: Duration,
    member: Member,
    /// A random number that identifies this start of the instance.
    run: i64,
    /// Whether the last heartbeat found another run under the name of this instance.
    found_other_run: AtomicBool,
    /// Until then a start waits for the database.
    start_deadline: Instant,
    has_beaten: AtomicBool,
    replication: replication::Monitor,
    /// Asks all hosts. The address of a single one may lead to another server later.
    search: JoinHandle<()>,
    counted: Mutex<Counted>,
}

impl PostgresLog {
    /// Connects to the database and migrates the schema. Retries for up to five minutes if the database does not
    /// respond or accepts no writes.
    ///
    /// # Errors
    ///
    /// [`orlop_core::log::Error::Open`] if the database cannot be reached, stays a standby, or denies a permission. The
    /// text contains the address of the database without the password.
    pub async fn open(settings: PostgresSettings) -> Result<Self> {
        let database = Database::new(&settings.endpoint, settings.connections_max, settings.durability)?;
        let start_deadline = Instant::now() + SERVER_WAIT_MAX;
        let mut first = database.connect_within(SERVER_WAIT_MAX).await?;
        database.migrate(&mut first.connection).await?;
        let facts = async {
            let facts = sqlx::query_as(FACTS).fetch_one(&mut first.connection).await?;
            Ok((facts, replication::state(&mut first.connection).await?))
        };
        let failed = |error: sqlx::Error| database.open_error("read", &error);
        let ((cluster_id, channel), state): ((i64, String), _) = with_timeout(facts).await.map_err(failed)?;
        let replication = replication::Monitor::default();
        replication.update(state);
        let member = Member {
            id: member_id(cluster_id, &settings.name),
            name: settings.name,
            client_urls: settings.client_urls,
        };
        let run = (RandomState::new().hash_one(0) >> 1).cast_signed();
        let appender = with_timeout(Appender::new(first, run)).await.map_err(failed)?;
        Ok(Self {
            appender,
            position_connection: Dedicated::default(),
            listener: Listener::start(database.clone(), channel),
            replication,
            search: search(database.clone()),
            database,
            poll_interval: settings.poll_interval,
            member,
            run,
            found_other_run: AtomicBool::new(false),
            start_deadline,
            has_beaten: AtomicBool::new(false),
            counted: Mutex::default(),
        })
    }

    /// Returns the archive of this log. It uses the same connections.
    pub fn archive(&self) -> PostgresArchive {
        PostgresArchive::new(self.database.clone(), self.member.id)
    }

    /// Reports the state of the replication in metrics.
    #[must_use]
    pub fn with_metrics(mut self, metrics: Arc<Metrics>) -> Self {
        self.replication.report_to(metrics);
        self
    }
}

impl Drop for PostgresLog {
    fn drop(&mut self) {
        self.search.abort();
    }
}

fn search(database: Database) -> JoinHandle<()> {
    vital("the search for another primary", async move { match database.look_for_primary(SEARCH_INTERVAL).await {} })
}

/// Returns the ID of a member: stable for one name in one cluster.
fn member_id(cluster_id: i64, name: &str) -> u64 {
    // FNV-1a, implemented here so that the result never changes.
    let bytes = cluster_id.to_le_bytes().into_iter().chain(name.bytes());
    let hash = bytes
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    // 0 means no member, and the database's integers are signed.
    (hash >> 1).max(1)
}

fn position(row: &PgRow) -> Result<Position> {
    Ok(Position { head: Revision(row.int(0)?), epoch: row.int(1)?, server: row.int(2)? })
}

fn logged_lease(row: &PgRow) -> sqlx::Result<LoggedLease> {
    Ok(LoggedLease { id: LeaseId(row.try_get(0)?), ttl_secs: row.try_get(1)?, left_secs: Some(row.try_get(2)?) })
}

/// Time without an answer to a heartbeat after which all hosts are asked which is the primary.
const HEARTBEAT_ANSWER_MAX: Duration = Duration::from_secs(3);
/// The cause of a heartbeat that takes long although the server answers, if replication is synchronous.
const COMMITS_WAIT: &str = "commits do not complete; is a synchronous standby connected?";
/// Pause between two searches while a heartbeat is not answered.
const SEARCH_PAUSE: Duration = Duration::from_secs(1);
/// Pause between two searches at all times. A former primary that still answers is left after this time.
const SEARCH_INTERVAL: Duration = Duration::from_secs(10);

const FACTS: &str = "SELECT value, orlop_channel() FROM meta WHERE name = 'cluster_id'";
const POSITION: &str = "SELECT (SELECT coalesce(max(id), 1) FROM kv_log), \
    (SELECT value FROM meta WHERE name = 'epoch'), orlop_server()";
const LEASES: &str = "SELECT id, ttl, secs_left FROM orlop_leases($1, $2)";
const HEARTBEAT: &str = "SELECT orlop_heartbeat($1, $2, $3, $4)";
const DEREGISTER: &str = "DELETE FROM member WHERE id = $1 AND run = $2";
const LIVE_MEMBERS: &str = "SELECT id, name, client_urls FROM member \
    WHERE beat > clock_timestamp() - make_interval(secs => $1) \
    ORDER BY cardinality(client_urls) = 0, started, id";

#[async_trait]
impl ReadLog for PostgresLog {
    async fn meta(&self) -> Result<Meta> {
        let meta = read!(self.database, connection => read::meta(connection))?;
        Ok(Meta { member_id: self.member.id, ..meta })
    }

    async fn auth(&self) -> Result<AuthState> {
        read!(self.database, connection => read::auth(connection))
    }

    async fn replay(&self, from: Revision, visit: &mut Visit<'_>) -> Result<Meta> {
        self.freeze().await?.replay(from, visit).await
    }

    async fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Result<Page> {
        read!(self.database, connection => read::changes(connection, from, to, range, prev))
    }
}

#[async_trait]
impl Log for PostgresLog {
    async fn freeze(&self) -> Result<Box<dyn ReadLog>> {
        Ok(Box::new(PostgresView::now(&self.database, self.member.id).await?))
    }

    async fn append(&self, append: Append<'_>) -> Result<Appended> {
        self.listener.note_append();
        self.appender.append(&self.database, append).await
    }

    async fn values(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>> {
        read!(self.database, connection => read::values(connection, rows))
    }

    async fn value_lengths(&self, rows: &[RowId]) -> Result<Vec<(RowId, u64)>> {
        read!(self.database, connection => read::value_lengths(connection, rows))
    }

    async fn token_key(&self) -> Result<Vec<u8>> {
        read!(self.database, connection => sqlx::query_scalar(auth::SELECT_TOKEN_KEY).fetch_one(connection))
    }

    async fn reclaim(&self, what: Reclaim<'_>) -> Result<Reclaimed> {
        match what {
            Reclaim::Rows { rows, compacted, server } => {
                let purged = read!(self.database, connection => append::purge(connection, server, rows, compacted))?;
                if !purged {
                    return Err(other_server());
                }
            }
            Reclaim::Space => space::vacuum(&self.database).await?,
        }
        Ok(Reclaimed::All)
    }

    async fn size(&self, precision: Precision) -> Result<Size> {
        let total = read!(self.database, connection => space::total(connection))?;
        if precision == Precision::Fresh {
            let in_use = read!(self.database, connection => space::in_use(connection))?;
            *self.counted.lock() = Counted { total, in_use: in_use.min(total) };
        }
        let in_use = self.counted.lock().in_use_of(total);
        Ok(Size { total, in_use, disk_free: None, wal: None })
    }

    fn connections(&self) -> Connections {
        self.database.connections()
    }

    fn saved_index(&self) -> Option<&dyn SavedIndex> {
        Some(self)
    }

    async fn close(&self, _: &[LoggedLease]) {
        self.listener.stop();
        self.search.abort();
        let deregistered = read!(self.database, connection => {
            sqlx::query(DEREGISTER).bind(self.member.id.cast_signed()).bind(self.run).execute(connection)
        });
        if let Err(error) = deregistered {
            warn!(%error, "cannot deregister this instance; the other instances remove it after a timeout");
        }
        self.appender.close().await;
        self.position_connection.close().await;
        self.database.close().await;
    }

    fn shared(&self) -> Option<&dyn SharedLog> {
        Some(self)
    }
}

#[async_trait]
impl SharedLog for PostgresLog {
    async fn position(&self) -> Result<Position> {
        let reading = async {
            let mut connection = self.position_connection.take(&self.database).await?;
            let query = sqlx::query(POSITION);
            let answer_max = if connection.is_new { STATEMENT_TIMEOUT } else { KEPT_ANSWER_MAX };
            let reading = within(answer_max, query.fetch_one(&mut connection.connection));
            let row = self.database.unless_superseded(connection.generation, reading).await?;
            connection.keep();
            Ok(row)
        };
        position(&reading.await.map_err(|error| self.database.unavailable(&error))?)
    }

    async fn meta_since(&self, known: Position) -> Result<(Meta, LeaseScope)> {
        match read!(self.database, connection => read::meta_since(connection, known))? {
            Some((meta, changed)) => Ok((Meta { member_id: self.member.id, ..meta }, LeaseScope::Changed(changed))),
            None => Ok((self.meta().await?, LeaseScope::All)),
        }
    }

    async fn wait_for_append(&self, seen: Revision) -> Option<Revision> {
        self.listener.notified_above(seen, self.poll_interval).await
    }

    async fn lock_appends(&self) -> Result<()> {
        self.appender.lock_appends(&self.database).await
    }

    async fn leases(&self, ids: &[LeaseId], touch: Touch) -> Result<Vec<LoggedLease>> {
        let ids: Vec<i64> = ids.iter().map(|id| id.0).collect();
        let query = || sqlx::query(LEASES).bind(&ids).bind(touch == Touch::Renew);
        let rows = read!(self.database, connection => query().fetch_all(connection))?;
        rows.iter().map(logged_lease).collect::<sqlx::Result<_>>().map_err(corrupt)
    }

    /// Repeats the first heartbeat, which is the first commit of a start, while it seems to wait for a standby.
    async fn beat(&self) -> Result<Vec<Member>> {
        loop {
            let began = Instant::now();
            let cause = match self.beat_on_the_primary().await {
                Err(Error::Unavailable(cause)) => cause,
                answer => {
                    self.has_beaten.fetch_or(answer.is_ok(), Ordering::Relaxed);
                    return answer;
                }
            };
            if self.has_beaten.load(Ordering::Relaxed) || !self.waits_for_standby(began).await {
                return Err(Error::Unavailable(cause));
            }
            if Instant::now() > self.start_deadline {
                let text = format!("cannot send the first heartbeat: {COMMITS_WAIT} ({cause})");
                return Err(Error::Unavailable(text));
            }
            warn!(error = cause, "cannot send the first heartbeat: {COMMITS_WAIT}");
        }
    }
}

impl PostgresLog {
    /// Returns the state as the session that was asked has it.
    async fn check_replication(&self) -> Option<replication::State> {
        match read!(self.database, connection => replication::state(connection)) {
            Ok(state) => {
                let is_synchronous = state.is_synchronous && self.appender.waits_for_standby();
                self.replication.update(replication::State { is_synchronous, ..state });
                Some(state)
            }
            Err(error) => {
                debug!(%error, "cannot read the state of the replication; trying again");
                None
            }
        }
    }

    /// Returns whether a heartbeat that failed seems to have waited for a standby: it took long, and the server answers.
    async fn waits_for_standby(&self, began: Instant) -> bool {
        let took_long = began.elapsed() > HEARTBEAT_ANSWER_MAX;
        took_long && self.check_replication().await.is_some_and(|state| state.is_synchronous)
    }

    async fn beat_on_the_primary(&self) -> Result<Vec<Member>> {
        let mut beating = pin!(self.send_heartbeat());
        match timeout(HEARTBEAT_ANSWER_MAX, &mut beating).await {
            Ok(answer) => answer,
            // The server may be gone without a trace, or wait for a standby that follows its successor.
            Err(_) => tokio::select! {
                answer = beating => answer,
                never = self.database.look_for_primary(SEARCH_PAUSE) => match never {},
            },
        }
    }

    async fn send_heartbeat(&self) -> Result<Vec<Member>> {
        if self.replication.is_due() {
            self.check_replication().await;
        }
        type Row = (i64, String, Vec<String>);
        let (previous_run, rows): (Option<i64>, Vec<Row>) = read!(self.database, connection => async {
            let previous_run = sqlx::query_scalar(HEARTBEAT)
                .bind(self.member.id.cast_signed())
                .bind(&self.member.name)
                .bind(&self.member.client_urls)
                .bind(self.run)
                .fetch_one(&mut *connection)
                .await?;
            let live = sqlx::query_as(LIVE_MEMBERS).bind(HEARTBEAT_TIMEOUT.as_secs_f64());
            Ok((previous_run, live.fetch_all(connection).await?))
        })?;
        let is_other_run = previous_run.is_some_and(|run| run != self.run);
        // An earlier run of this instance, also one in a table that was restored, is found once.
        if self.found_other_run.swap(is_other_run, Ordering::Relaxed) && is_other_run {
            warn!(
                name = self.member.name,
                "another instance has the same name; start each instance with a different --name"
            );
        }
        let member = |(id, name, client_urls): Row| Member { id: id.cast_unsigned(), name, client_urls };
        Ok(rows.into_iter().map(member).collect())
    }
}

/// The error of a call for one server, if another one answers, for example after a failover.
fn other_server() -> Error {
    Error::Unavailable("another server is connected to the database".to_owned())
}
