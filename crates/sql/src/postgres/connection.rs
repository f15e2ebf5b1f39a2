//! Connections: opening, session settings, timeouts, retries and error texts.

use std::{collections::HashSet, convert::Infallible, future::Future, sync::Arc, time::Duration};

use parking_lot::Mutex;
use sqlx::{Connection as _, PgConnection, Row as _, migrate::MigrateError};
use tokio::time::{Instant, sleep, timeout};
use tracing::warn;

use super::{
    connect_error::{is_final, lacks_resources},
    pool::{Pool, Pooled},
    primary::{Found, Generation, Primary},
    schema::{Older, check_settings, quoted, refuse_missing_keys, refuse_other_tables, warn_of_rights},
};
use crate::{
    Durability,
    error::{describe, of_row},
    migrations::{self, cannot_migrate},
};
use orlop_core::log::{Connections, Error, Result};

/// Maximum time for a host to answer a search in the background. It is short, because the search is repeated.
const SEARCH_ANSWER_MAX: Duration = Duration::from_secs(2);
/// Maximum time to set up a new connection.
const SET_UP_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for which a command waits for a Postgres server that is not running yet.
const COMMAND_WAIT_MAX: Duration = Duration::from_secs(15);
/// Maximum time for which the start of a server waits. Kubernetes restarts a server that gave up after a pause that
/// grows to five minutes. The time leaves half of `TimeoutStartSec` of the unit of systemd to read the log.
pub(super) const SERVER_WAIT_MAX: Duration = Duration::from_secs(300);
/// Minimum interval between two messages of a start that waits, and about the lack of connections.
const WAIT_LOG_INTERVAL: Duration = Duration::from_secs(5);
/// Client-side timeout of a statement, for a server that does not respond. It is longer than the timeout that the
/// server enforces ([`SESSION_SETTINGS`]).
pub(super) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(12);
/// Client-side timeout of a read that takes milliseconds and waits for no lock, on a connection that was used before: the
/// network may have lost the connection. The repetition, on a new one, is in the 7 s for which requests wait. It has
/// [`STATEMENT_TIMEOUT`]: a new connection has just answered, so it is the server that is slow, and a server that hangs is not
/// asked more often.
pub(super) const KEPT_ANSWER_MAX: Duration = Duration::from_secs(3);
/// Client-side timeout of a statement that reads or writes a page of rows without a timeout on the server: the disk may be
/// slow.
pub(super) const PAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// The timeout of a statement on the server, see [`SESSION_SETTINGS`].
pub(super) const SERVER_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for which a read is retried on another connection after its connection failed. The store repeats reads
/// of values for longer.
const READ_RETRY_MAX: Duration = Duration::from_secs(2);
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);

/// The first statement on every connection to the primary.
///
/// It overrides `synchronous_commit = off` of a role, because an acknowledged write must be durable; other values
/// remain. Each session has a value of its own, so that a later change of the server's does not apply to it. The idle
/// timeout closes a connection that holds the append lock (see [`super::append`]) while its instance is paused. A start
/// and a snapshot may take longer than a limit on transactions (`transaction_timeout`, since Postgres 17). Connections
/// may be unused for long: the server does not close them, and its keepalives prevent firewalls and load balancers from
/// forgetting them. A plan that was made while a table was small and is kept would read the whole table once it is large, so
/// plans use indexes; the cost of one that cannot would start the JIT compiler. A bitmap scan, which Postgres chooses for a
/// table without statistics, would read all rows of a range for each page of it. Large values are compressed with lz4 if the
/// server has it and nobody has chosen otherwise, because Postgres' default takes two to six times as long (docs/adr/0015).
pub(super) const SESSION_SETTINGS: &str = "\
    SET default_transaction_isolation = 'read committed'; \
    SET statement_timeout = '10s'; \
    SET lock_timeout = '5s'; \
    SET idle_in_transaction_session_timeout = '2s'; \
    SET client_min_messages = 'warning'; \
    SET enable_seqscan = off; \
    SET enable_bitmapscan = off; \
    SET jit = off; \
    SET tcp_keepalives_idle = 60; \
    SELECT set_config('synchronous_commit', coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), false); \
    SELECT set_config('default_toast_compression', 'lz4', false) FROM pg_settings \
        WHERE name = 'default_toast_compression' AND source = 'default' AND 'lz4' = ANY (enumvals); \
    SELECT set_config(name, '0', false) FROM pg_settings \
        WHERE name IN ('idle_session_timeout', 'transaction_timeout')";

/// A database, identified by its address. Clones share the pool.
#[derive(Clone)]
pub(super) struct Database {
    primary: Arc<Primary>,
    pool: Arc<Pool>,
    user: String,
    /// Database, hosts and ports for messages, without the password.
    name: String,
    durability: Durability,
    /// When the lack of connections was logged last.
    lack_logged: Arc<Mutex<Option<Instant>>>,
}

impl Database {
    pub(super) fn new(endpoint: &str, connections_max: u32, durability: Durability) -> Result<Self> {
        if has_unescaped_password(endpoint) {
            return Err(Error::Open(
                "datastore-endpoint contains an @ after the host: special characters must be \
                 percent-encoded in the password (/ is %2F, ? is %3F, # is %23, @ is %40)"
                    .to_owned(),
            ));
        }
        let primary = Arc::new(Primary::new(endpoint)?);
        let options = primary.parse(0).map_err(|error| Error::Open(describe(&error)))?;
        let user = options.get_username().to_owned();
        let name = format!("{} at {}", options.get_database().unwrap_or(&user), primary.names());
        let pool = Pool::new(connections_max, Arc::clone(&primary));
        Ok(Self { primary, pool, user, name, durability, lack_logged: Arc::default() })
    }

    /// Returns the name of the database for messages.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the name of the role.
    pub(super) fn user(&self) -> &str {
        &self.user
    }

    pub(super) fn connections(&self) -> Connections {
        self.pool.connections()
    }

    /// Returns the generation of the current primary.
    pub(super) fn generation(&self) -> Generation {
        self.primary.generation()
    }

    /// Returns the error of the log: that of a damaged row, or that the database is unavailable.
    pub(super) fn unavailable(&self, error: &sqlx::Error) -> Error {
        of_row(error).unwrap_or_else(|| Error::Unavailable(format!("{}: {}", self.name, describe(error))))
    }

    /// Returns the error of a write that the server refused.
    pub(super) fn refusal(&self, error: &sqlx::Error) -> Error {
        let is_full = sqlstate(error).as_deref() == Some("53100");
        if is_full { Error::Full(format!("{}: {}", self.name, describe(error))) } else { self.unavailable(error) }
    }

    pub(super) fn open_error(&self, action: &str, error: &sqlx::Error) -> Error {
        Error::Open(format!("cannot {action} database {}: {}", self.name, describe(error)))
    }

    /// Asks all hosts repeatedly which is the primary. If it becomes another one, calls that wait for the former one end.
    pub(super) async fn look_for_primary(&self, pause: Duration) -> Infallible {
        loop {
            if let Ok(found) = self.primary.survey(SEARCH_ANSWER_MAX).await {
                let _ = timeout(Duration::from_secs(1), found.connection.close()).await;
            }
            sleep(pause).await;
        }
    }

    /// Waits until another server is the primary than in this generation.
    pub(super) async fn superseded(&self, generation: Generation) {
        self.primary.superseded(generation).await;
    }

    /// Opens a separate connection to the primary and sets it up.
    pub(super) async fn find(&self) -> sqlx::Result<Found> {
        let mut found = loop {
            let generation = self.generation();
            tokio::select! {
                biased;
                found = self.primary.connect() => break found?,
                // Another search has found the successor of a server that this one may still wait for.
                () = self.superseded(generation) => {}
            }
        };
        within(SET_UP_TIMEOUT, set_up(&mut found.connection, self.durability)).await?;
        Ok(found)
    }

    /// Like [`Database::find`], for a connection outside of the pool. If the server has no resources for it, closes the unused
    /// connections of the pool, so that the next attempt succeeds: as long as they are used now and then, the pool keeps them.
    pub(super) async fn find_dedicated(&self) -> sqlx::Result<Found> {
        self.find().await.inspect_err(|error| {
            if lacks_resources(error) {
                self.log_lack(error);
                self.pool.close_idle();
            }
        })
    }

    /// Logs that the server has no resources for a connection.
    fn log_lack(&self, error: &sqlx::Error) {
        let mut logged = self.lack_logged.lock();
        if logged.is_none_or(|logged| logged.elapsed() >= WAIT_LOG_INTERVAL) {
            warn!(error = describe(error), database = self.name, "the database has no free connection; trying again");
            *logged = Some(Instant::now());
        }
    }

    /// Opens the first connection of a command.
    pub(super) async fn connect_first(&self) -> Result<Found> {
        self.connect_within(COMMAND_WAIT_MAX).await
    }

    /// Opens the first connection within `wait_max`.
    pub(super) async fn connect_within(&self, wait_max: Duration) -> Result<Found> {
        let deadline = Instant::now() + wait_max;
        let mut found = self.find_before(deadline).await?;
        self.refuse_shared_sessions(&mut found.connection, deadline).await?;
        Ok(found)
    }

    /// Opens a connection. Retries until the deadline while the database cannot be reached, is starting, has no free
    /// connection or accepts no writes. Another refusal, such as that of a wrong password, is final.
    async fn find_before(&self, deadline: Instant) -> Result<Found> {
        let mut pause = RETRY_PAUSE_MIN;
        let mut logged: Option<Instant> = None;
        loop {
            match self.find().await {
                Ok(found) => return Ok(found),
                Err(error) if is_final(&error) || Instant::now() + pause > deadline => {
                    return Err(self.open_error("connect to", &error));
                }
                Err(error) => {
                    if logged.is_none_or(|logged| logged.elapsed() >= WAIT_LOG_INTERVAL) {
                        warn!(error = describe(&error), database = self.name, "cannot connect yet; trying again");
                        logged = Some(Instant::now());
                    }
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
    }

    /// Refuses a connection pooler that gives one session of the server to several clients in turn. Session settings,
    /// prepared statements and notifications do not work through it.
    ///
    /// Such a pooler gives the session that was used last to the next client, or uses its sessions in turn. The check fails
    /// if two connections have the same session, or one has several. It asks repeatedly, because a pooler that resets a session
    /// after each use has another one ready now and then.
    async fn refuse_shared_sessions(&self, connection: &mut PgConnection, deadline: Instant) -> Result<()> {
        let mut other = self.find_before(deadline).await?.connection;
        let (mut own, mut others) = (HashSet::new(), HashSet::new());
        for _ in 0..3 {
            for (sessions, connection) in [(&mut own, &mut *connection), (&mut others, &mut other)] {
                for _ in 0..2 {
                    let pid = session(&mut *connection).await;
                    sessions.insert(pid.map_err(|error| self.open_error("read", &error))?);
                }
            }
        }
        if own.len() > 1 || others.len() > 1 || own == others {
            return Err(Error::Open(format!(
                "database {} is behind a connection pooler in transaction mode, but Orlop needs sessions of its own: \
                 set pool_mode = session for this database in PgBouncer, or connect to Postgres directly",
                self.name
            )));
        }
        // The check has passed, even if this connection cannot be closed properly.
        let _ = with_timeout(other.close()).await;
        Ok(())
    }

    /// Migrates the schema, and logs that it was an older one.
    pub(super) async fn migrate(&self, connection: &mut PgConnection) -> Result<()> {
        refuse_other_tables(self, connection).await?;
        let owner = check_settings(self, connection).await?;
        // Before the migration, which would write to a database that is being restored. Without an owner, the tables are new,
        // or `kv_log` is that of another store.
        if owner.is_some() {
            refuse_missing_keys(self, connection).await?;
        }
        // If it cannot be read, the migration fails with the remedy.
        let older = Older::read(self, connection).await.unwrap_or_default();
        let migrated = migrations::postgres().run(&mut *connection).await;
        migrated.map_err(|error| {
            let refusal = if let MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) = &error {
                sqlstate(error)
            } else {
                None
            };
            let lacks_permission = refusal.as_deref() == Some("42501");
            let text = cannot_migrate(&self.name, &error);
            let role = quoted(&self.user);
            let hint = if !lacks_permission {
                String::new()
            } else if let Some((_, false)) = owner {
                format!(
                    "; another role owns the tables and functions of Orlop, for example because it restored them: use \
                     REASSIGN OWNED BY ... TO {role}, or ALTER ... OWNER TO {role} for each"
                )
            } else {
                // With a schema of its own, a role would get an empty store.
                let new_schema = format!("create a schema for it (CREATE SCHEMA AUTHORIZATION {role}) or ");
                format!(
                    "; the role {} must be able to create tables and functions in its schema: {}GRANT USAGE, CREATE ON \
                     SCHEMA ... TO {role}",
                    self.user,
                    if owner.is_some() { "" } else { &new_schema }
                )
            };
            Error::Open(text + &hint)
        })?;
        if let Some(older) = older {
            older.log_migration(self);
        }
        warn_of_rights(self, connection).await;
        Ok(())
    }

    /// Runs `work`, which uses a connection of the generation. Fails if another server has become the primary: the former
    /// one may never answer.
    pub(super) async fn unless_superseded<T>(
        &self,
        generation: Generation,
        work: impl Future<Output = sqlx::Result<T>>,
    ) -> sqlx::Result<T> {
        tokio::select! {
            biased;
            done = work => done,
            () = self.superseded(generation) => {
                Err(sqlx::Error::Io(std::io::Error::other("another server has become the primary")))
            }
        }
    }

    /// Starts the attempts of one query, for [`read`].
    pub(super) fn attempts(&self) -> Attempts<'_> {
        Attempts { database: self, deadline: Instant::now() + READ_RETRY_MAX }
    }

    pub(super) async fn close(&self) {
        // A closing handshake may hang if the server is gone.
        let _ = timeout(Duration::from_secs(1), self.pool.close()).await;
    }
}

/// Returns whether the password contains an unescaped character that ends the host part of the URL. The parser would
/// then treat the rest of the password as part of the address, which is logged.
pub(crate) fn has_unescaped_password(endpoint: &str) -> bool {
    let address = endpoint.split_once("://").map_or(endpoint, |(_, address)| address);
    let (host, rest) = address.split_at(address.find(['/', '?', '#']).unwrap_or(address.len()));
    // The value of a parameter may contain an @.
    !host.contains('@') && rest.split('=').next().is_some_and(|rest| rest.contains('@'))
}

async fn set_up(connection: &mut PgConnection, durability: Durability) -> sqlx::Result<()> {
    sqlx::raw_sql(SESSION_SETTINGS).execute(&mut *connection).await?;
    if durability == Durability::Unsynced {
        sqlx::raw_sql("SET synchronous_commit = off").execute(connection).await?;
    }
    Ok(())
}

/// Returns the process of the server that serves a connection at this moment. The query is a simple one, because a pooler
/// may not support prepared statements.
async fn session(connection: &mut PgConnection) -> sqlx::Result<i32> {
    let row = with_timeout(sqlx::raw_sql("SELECT pg_backend_pid()").fetch_one(connection)).await;
    row.and_then(|row| row.try_get(0))
}

/// Returns whether the server or sqlx refused the statement, or a row is damaged, so that retrying it does not help. It
/// helps if the server is unreachable, overloaded, starting or shutting down.
pub(super) fn is_refusal(error: &sqlx::Error) -> bool {
    match sqlstate(error).as_deref() {
        // The classes of shutdown and startup, connection failures, and insufficient resources.
        Some(code) => !code.starts_with("57P") && !code.starts_with("08") && !code.starts_with("53"),
        None => {
            matches!(error, sqlx::Error::Configuration(_) | sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_))
        }
    }
}

pub(super) fn sqlstate(error: &sqlx::Error) -> Option<String> {
    error.as_database_error()?.code().map(std::borrow::Cow::into_owned)
}

/// Runs an idempotent query on a connection of the pool, and retries on another connection if that one fails. Evaluates
/// to a [`Result`]. It is a macro, because a closure cannot borrow both the connection and the caller's variables.
macro_rules! read {
    ($database:expr, $connection:ident => $query:expr) => {{
        let attempts = $database.attempts();
        loop {
            let mut pooled = match attempts.connection().await {
                Ok(pooled) => pooled,
                Err(error) => break Err(error),
            };
            let generation = pooled.generation;
            let $connection: &mut PgConnection = &mut pooled;
            let answer = attempts.limited(generation, $query).await;
            if let Some(done) = attempts.outcome_or_retry(pooled, answer) {
                break done;
            }
        }
    }};
}
pub(super) use read;

/// The attempts of one query.
pub(super) struct Attempts<'a> {
    database: &'a Database,
    deadline: Instant,
}

impl Attempts<'_> {
    pub(super) async fn connection(&self) -> Result<Pooled> {
        let database = self.database;
        let Some(permit) = database.pool.permit(READ_RETRY_MAX).await else {
            return Err(database.unavailable(&sqlx::Error::PoolTimedOut));
        };
        let generation = database.generation();
        if let Some(connection) = database.pool.take_idle(generation).await {
            return Ok(Pooled::new(connection, generation, Arc::clone(&database.pool), permit));
        }
        let mut pause = RETRY_PAUSE_MIN;
        loop {
            match database.find().await {
                Ok(Found { connection, generation, .. }) => {
                    return Ok(Pooled::new(connection, generation, Arc::clone(&database.pool), permit));
                }
                // Refusals may end, too: those of the old password while it is replaced in the file and for the role,
                // and those of a standby that is being promoted.
                Err(error) if Instant::now() + pause > self.deadline => {
                    if lacks_resources(&error) {
                        database.log_lack(&error);
                    }
                    return Err(database.unavailable(&error));
                }
                Err(_) => sleep(pause).await,
            }
            pause *= 2;
        }
    }

    /// Runs a query with the client-side timeout. Ends it if another server has become the primary.
    pub(super) async fn limited<T>(
        &self,
        generation: Generation,
        query: impl Future<Output = sqlx::Result<T>>,
    ) -> sqlx::Result<T> {
        self.database.unless_superseded(generation, with_timeout(query)).await
    }

    /// Returns the result, or `None` to retry.
    pub(super) fn outcome_or_retry<T>(&self, connection: Pooled, answer: sqlx::Result<T>) -> Option<Result<T>> {
        match answer {
            Ok(found) => {
                connection.keep();
                Some(Ok(found))
            }
            Err(error) if is_refusal(&error) => Some(Err(self.database.unavailable(&error))),
            Err(error) => {
                connection.discard();
                // What has dropped this connection, such as a firewall, may have dropped the others.
                self.database.pool.close_idle();
                (Instant::now() > self.deadline).then(|| Err(self.database.unavailable(&error)))
            }
        }
    }
}

/// Runs `work` with the client-side timeout.
pub(super) fn with_timeout<T>(work: impl Future<Output = sqlx::Result<T>>) -> impl Future<Output = sqlx::Result<T>> {
    within(STATEMENT_TIMEOUT, work)
}

/// Like [`with_timeout`], for a statement that may take longer than others by `more`.
pub(super) fn with_longer_timeout<T>(
    more: Duration,
    work: impl Future<Output = sqlx::Result<T>>,
) -> impl Future<Output = sqlx::Result<T>> {
    within(STATEMENT_TIMEOUT + more, work)
}

/// Runs `work` with a client-side timeout.
pub(super) async fn within<T>(max: Duration, work: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
    timeout(max, work).await.unwrap_or_else(|_| Err(timed_out(max)))
}

pub(super) fn timed_out(after: Duration) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, format!("no response within {after:?}")))
}
