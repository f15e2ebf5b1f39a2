//! Connections: how they are made and set up, when they are given up, and what an error says.

use std::{future::Future, str::FromStr as _, time::Duration};

use sqlx::{
    ConnectOptions as _, Connection as _, PgConnection, PgPool, Postgres, Row as _,
    migrate::MigrateError,
    pool::PoolConnection,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::{
    sync::{Mutex, MutexGuard},
    time::{Instant, sleep, timeout},
};
use tracing::warn;

use crate::migrations;
use crate::rows::{cannot_migrate, connections};
use orlop_core::log::{Connections, Error, Result};

/// How long the server has to take a connection.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// How long a start waits for a server that is not there yet.
const FIRST_CONNECT_MAX: Duration = Duration::from_secs(15);
/// The server ends a statement that takes too long ([`SET_UP`]); a server that does not even do that is given up.
const GIVE_UP: Duration = Duration::from_secs(12);
/// Reads go on with another connection where theirs broke, for this long.
const READ_AGAIN_MAX: Duration = Duration::from_secs(2);
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// What every connection is told first.
///
/// Whoever set `synchronous_commit` to off for the role did not mean us; stricter settings stay. The idle limit ends a
/// turn (see [`super::append`]) whose instance was paused. A standby, to which an address may lead for a while, would
/// answer with what was true a moment ago.
const SET_UP: &str = "\
    DO $$ BEGIN IF pg_is_in_recovery() THEN RAISE 'the server is a standby, which takes no writes' \
    USING ERRCODE = '25006'; END IF; END $$; \
    SET default_transaction_isolation = 'read committed'; \
    SET statement_timeout = '10s'; \
    SET lock_timeout = '5s'; \
    SET idle_in_transaction_session_timeout = '2s'; \
    SET client_min_messages = 'warning'; \
    SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'";

/// The database, by its address. Clones share the pool.
#[derive(Clone)]
pub(super) struct Database {
    options: PgConnectOptions,
    pool: PgPool,
    /// For people: host, port and database, never the password.
    name: String,
}

impl Database {
    pub(super) fn new(endpoint: &str, connections_max: u32) -> Result<Self> {
        if is_cut_by_its_password(endpoint) {
            return Err(Error::Open(
                "datastore-endpoint has an @ behind its host: characters that mean something in a URL have to be \
                 percent-encoded in the password (/ is %2F, ? is %3F, # is %23, @ is %40)"
                    .to_owned(),
            ));
        }
        let options = PgConnectOptions::from_str(endpoint)
            // The error's text may hold a part of the address, but not the password, which is parsed last and is any text.
            .map_err(|error| Error::Open(format!("datastore-endpoint is no postgres URL: {error}")))?
            .application_name("orlop")
            .disable_statement_logging();
        let place = match options.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => format!("{}:{}", options.get_host(), options.get_port()),
        };
        let name = format!("{} at {place}", options.get_database().unwrap_or_else(|| options.get_username()));
        let pool = PgPoolOptions::new()
            .max_connections(connections_max)
            .acquire_timeout(READ_AGAIN_MAX)
            .test_before_acquire(false)
            .idle_timeout(Duration::from_secs(600))
            .max_lifetime(None)
            .after_connect(|connection, _| Box::pin(set_up(connection)))
            .connect_lazy_with(options.clone());
        Ok(Self { options, pool, name })
    }

    /// For people.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn connections(&self) -> Connections {
        connections(self.pool.size(), self.pool.num_idle())
    }

    pub(super) fn options(&self) -> PgConnectOptions {
        self.options.clone()
    }

    pub(super) fn unavailable(&self, error: &sqlx::Error) -> Error {
        Error::Unavailable(format!("{}: {error}", self.name))
    }

    /// What it means that the server refused to write.
    pub(super) fn refusal(&self, error: &sqlx::Error) -> Error {
        let is_full = sqlstate(error).as_deref() == Some("53100");
        if is_full { Error::Full(format!("{}: {error}", self.name)) } else { self.unavailable(error) }
    }

    pub(super) fn open_error(&self, what: &str, error: &sqlx::Error) -> Error {
        Error::Open(format!("cannot {what} database {}: {error}", self.name))
    }

    /// A connection of the caller's own, set up.
    pub(super) async fn connect(&self) -> sqlx::Result<PgConnection> {
        let connecting = async {
            let mut connection = self.options.connect().await?;
            set_up(&mut connection).await?;
            Ok(connection)
        };
        timeout(CONNECT_MAX, connecting).await.unwrap_or_else(|_| Err(silence(CONNECT_MAX)))
    }

    /// The first connection of a start, which waits for a database that is just coming up.
    pub(super) async fn connect_first(&self) -> Result<PgConnection> {
        let deadline = Instant::now() + FIRST_CONNECT_MAX;
        let mut pause = PAUSE_MIN;
        let mut connection = loop {
            match self.connect().await {
                Ok(connection) => break connection,
                Err(error) if answered(&error) || Instant::now() + pause > deadline => {
                    return Err(self.open_error("connect to", &error));
                }
                Err(error) => warn!(%error, database = self.name, "no connection yet; trying again"),
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        };
        let row = sqlx::query("SELECT current_setting('fsync')::bool, current_schema()::text")
            .fetch_one(&mut connection)
            .await
            .map_err(|error| self.open_error("read", &error))?;
        if row.get::<Option<String>, _>(1).is_none() {
            return Err(Error::Open(format!(
                "in database {} no schema of the search path exists for the role {}; create one, for example with \
                 CREATE SCHEMA AUTHORIZATION {}",
                self.name,
                self.options.get_username(),
                self.options.get_username()
            )));
        }
        if !row.get::<bool, _>(0) {
            warn!(
                database = self.name,
                "the server runs with fsync = off: a crash of its machine loses acknowledged writes"
            );
        }
        Ok(connection)
    }

    pub(super) async fn migrate(&self, connection: &mut PgConnection) -> Result<()> {
        let migrated = migrations::postgres().run(connection).await;
        migrated.map_err(|error| {
            let refusal = if let MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) = &error {
                sqlstate(error)
            } else {
                None
            };
            let lacks_right = refusal.as_deref() == Some("42501");
            let hint = if lacks_right {
                format!(
                    "; the role {0} needs the right to create tables and functions in its schema: give it one of its own \
                     (CREATE SCHEMA AUTHORIZATION {0}) or GRANT USAGE, CREATE ON SCHEMA ... TO {0}",
                    self.options.get_username()
                )
            } else {
                String::new()
            };
            Error::Open(cannot_migrate(&self.name, &error) + &hint)
        })
    }

    /// For [`read`].
    pub(super) fn attempts(&self) -> Attempts<'_> {
        Attempts { database: self, deadline: Instant::now() + READ_AGAIN_MAX }
    }

    pub(super) async fn close(&self) {
        // A connection whose server is gone says no good-bye.
        let _ = timeout(Duration::from_secs(1), self.pool.close()).await;
    }
}

/// Whether the password has a letter that ends it, so that its rest would be taken for a part of the address, which is shown.
fn is_cut_by_its_password(endpoint: &str) -> bool {
    let address = endpoint.split_once("://").map_or(endpoint, |(_, address)| address);
    let (host, rest) = address.split_at(address.find(['/', '?', '#']).unwrap_or(address.len()));
    // A parameter's value may hold one.
    !host.contains('@') && rest.split('=').next().is_some_and(|rest| rest.contains('@'))
}

async fn set_up(connection: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::raw_sql(SET_UP).execute(connection).await.map(drop)
}

/// Whether the server itself refused, rather than that nothing was heard of it or that it went down.
pub(super) fn answered(error: &sqlx::Error) -> bool {
    match sqlstate(error).as_deref() {
        // Going down, starting up, a connection that broke, too many connections.
        Some(code) => !code.starts_with("57P") && !code.starts_with("08") && !code.starts_with("53"),
        None => {
            matches!(error, sqlx::Error::Configuration(_) | sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_))
        }
    }
}

pub(super) fn sqlstate(error: &sqlx::Error) -> Option<String> {
    error.as_database_error()?.code().map(std::borrow::Cow::into_owned)
}

/// Runs a query, a read or a write that may be done twice, on a connection of the pool; again on another if that one broke.
/// Gives a [`Result`]. A macro, as a closure could not borrow both the connection and what is around it.
macro_rules! read {
    ($database:expr, $connection:ident => $query:expr) => {{
        let attempts = $database.attempts();
        loop {
            let mut pooled = match attempts.connection().await {
                Ok(pooled) => pooled,
                Err(error) => break Err(error),
            };
            let $connection: &mut PgConnection = &mut pooled;
            let answer = $crate::postgres::connection::bounded($query).await;
            if let Some(done) = attempts.judge(pooled, answer) {
                break done;
            }
        }
    }};
}
pub(super) use read;

/// The tries of one query.
pub(super) struct Attempts<'a> {
    database: &'a Database,
    deadline: Instant,
}

impl Attempts<'_> {
    pub(super) async fn connection(&self) -> Result<PoolConnection<Postgres>> {
        self.database.pool.acquire().await.map_err(|error| self.database.unavailable(&error))
    }

    /// `None`: try again.
    pub(super) fn judge<T>(
        &self,
        mut connection: PoolConnection<Postgres>,
        answer: sqlx::Result<T>,
    ) -> Option<Result<T>> {
        match answer {
            Ok(found) => Some(Ok(found)),
            Err(error) if answered(&error) => Some(Err(self.database.unavailable(&error))),
            Err(error) => {
                connection.close_on_drop();
                (Instant::now() > self.deadline).then(|| Err(self.database.unavailable(&error)))
            }
        }
    }
}

/// One connection for one kind of work, made when it is first needed and again after it broke.
#[derive(Default)]
pub(super) struct Lane(Mutex<Option<PgConnection>>);

/// The right to use a lane. The connection is given up unless it is kept, so that nothing of what failed or was cut off is
/// left for the next.
pub(super) struct Occupied<'a> {
    lane: MutexGuard<'a, Option<PgConnection>>,
    pub(super) connection: PgConnection,
}

impl Lane {
    pub(super) async fn occupy(&self, database: &Database) -> sqlx::Result<Occupied<'_>> {
        let mut lane = self.0.lock().await;
        let connection = match lane.take() {
            Some(connection) => connection,
            None => database.connect().await?,
        };
        Ok(Occupied { lane, connection })
    }

    pub(super) async fn close(&self) {
        if let Some(connection) = self.0.lock().await.take() {
            let _ = timeout(Duration::from_secs(1), connection.close()).await;
        }
    }
}

impl Occupied<'_> {
    pub(super) fn keep(self) {
        let Self { mut lane, connection } = self;
        *lane = Some(connection);
    }
}

/// Gives up on a server that does not answer.
pub(super) async fn bounded<T>(work: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
    timeout(GIVE_UP, work).await.unwrap_or_else(|_| Err(silence(GIVE_UP)))
}

fn silence(patience: Duration) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, format!("no answer within {patience:?}")))
}
