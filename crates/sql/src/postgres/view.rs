//! A read-only snapshot of a log.

use std::{future::Future, time::Duration};

use async_trait::async_trait;
use sqlx::{Connection as _, PgConnection};
use tokio::{
    runtime::Handle,
    sync::{MappedMutexGuard, Mutex, MutexGuard},
    time::timeout,
};

use super::{
    connection::{Database, PAGE_TIMEOUT, with_timeout, within},
    primary::{Found, Generation},
    read,
};
use crate::{
    Durability, auth,
    migrations::{self, check_schema},
};
use orlop_core::{
    auth::AuthState,
    log::{Error, Meta, Page, ReadLog, Result, Visit, WithPrev},
    types::{KeyRange, Revision, RowId},
};

/// The first read takes the snapshot. The server closes the connection if it is idle for longer than the timeout.
const BEGIN: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL statement_timeout = 0; \
    SET LOCAL idle_in_transaction_session_timeout = '60s'; SELECT 1 FROM meta";

/// Maximum time to end the session of a view that is dropped.
const END_MAX: Duration = Duration::from_secs(1);

/// The migration that created the archive.
const ARCHIVE_SCHEMA: i64 = 2;

/// A connection with a read-only transaction, and so a fixed snapshot of the database.
///
/// When dropped, it ends the session in the background. Otherwise the server would log and count a lost connection.
pub struct PostgresView {
    /// `None` after [`PostgresView::end`].
    connection: Mutex<Option<PgConnection>>,
    pub(super) database: Database,
    generation: Generation,
    member_id: u64,
    /// The newest migration of the database.
    schema: i64,
}

impl PostgresView {
    /// Opens a snapshot of the current state of a database. Instances may be using it. Writes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] with the name of the database, if it cannot be reached or contains no log of this version.
    pub async fn of_database(endpoint: &str) -> Result<Self> {
        let database = Database::new(endpoint, 1, Durability::Synced)?;
        let mut found = database.connect_first().await?;
        let name = format!("database {}", database.name());
        let versions = sqlx::query_scalar(migrations::VERSIONS);
        let versions: Vec<i64> = with_timeout(versions.fetch_all(&mut found.connection))
            .await
            .map_err(|error| Error::Open(format!("{name} contains no Orlop log: {error}")))?;
        let schema = check_schema(&name, &versions, &migrations::postgres())?;
        Self::begin(found, &database, 0, schema).await
    }

    /// Returns whether the database has the tables of an archive.
    pub(super) fn has_archive(&self) -> bool {
        self.schema >= ARCHIVE_SCHEMA
    }

    pub(super) async fn now(database: &Database, member_id: u64) -> Result<Self> {
        let found = database.find().await.map_err(|error| database.unavailable(&error))?;
        Self::begin(found, database, member_id, migrations::newest(&migrations::postgres())).await
    }

    async fn begin(found: Found, database: &Database, member_id: u64, schema: i64) -> Result<Self> {
        let Found { mut connection, generation, .. } = found;
        let begun = with_timeout(sqlx::raw_sql(BEGIN).execute(&mut connection)).await;
        begun.map_err(|error| database.unavailable(&error))?;
        let connection = Mutex::new(Some(connection));
        Ok(Self { connection, database: database.clone(), generation, member_id, schema })
    }

    /// Returns the connection for a read.
    pub(super) async fn connection(&self) -> Result<MappedMutexGuard<'_, PgConnection>> {
        let ended = |_| Error::Unavailable("the snapshot of the database was closed".to_owned());
        MutexGuard::try_map(self.connection.lock().await, Option::as_mut).map_err(ended)
    }

    /// Ends the transaction and the session. Later reads fail.
    pub(super) async fn end(&self) -> Result<()> {
        let connection = self.connection.lock().await.take();
        match connection {
            Some(connection) => self.limited(end(connection)).await,
            None => Ok(()),
        }
    }

    /// Runs a read. Fails if another server has become the primary, or after [`PAGE_TIMEOUT`].
    pub(super) async fn limited<T>(&self, read: impl Future<Output = sqlx::Result<T>>) -> Result<T> {
        self.try_limited(read).await.map_err(|error| self.database.unavailable(&error))
    }

    /// The same as [`PostgresView::limited`], with the error of the read itself.
    pub(super) async fn try_limited<T>(&self, read: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
        self.database.unless_superseded(self.generation, within(PAGE_TIMEOUT, read)).await
    }
}

impl Drop for PostgresView {
    fn drop(&mut self) {
        let Some(connection) = self.connection.get_mut().take() else { return };
        // Without a runtime the connection is closed.
        let Ok(runtime) = Handle::try_current() else { return };
        runtime.spawn(timeout(END_MAX, end(connection)));
    }
}

/// Ends the transaction and the session. The rest of a response that nobody waits for is read before.
async fn end(mut connection: PgConnection) -> sqlx::Result<()> {
    sqlx::raw_sql("ROLLBACK").execute(&mut connection).await?;
    connection.close().await
}

#[async_trait]
impl ReadLog for PostgresView {
    async fn meta(&self) -> Result<Meta> {
        let meta = self.limited(read::meta(&mut *self.connection().await?)).await?;
        Ok(Meta { member_id: self.member_id, ..meta })
    }

    async fn auth(&self) -> Result<AuthState> {
        if self.schema < auth::SCHEMA {
            return Ok(AuthState::default());
        }
        self.limited(read::auth(&mut *self.connection().await?)).await
    }

    async fn replay(&self, from: Revision, visit: &mut Visit<'_>) -> Result<Meta> {
        let meta = self.meta().await?;
        let connection = &mut *self.connection().await?;
        let mut next = RowId::new(from, 0);
        loop {
            let changes = self.limited(read::replay_page(connection, next)).await?;
            let Some(last) = changes.last() else { return Ok(meta) };
            next = last.row.next();
            visit(&meta, changes)?;
        }
    }

    async fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Result<Page> {
        self.limited(read::changes(&mut *self.connection().await?, from, to, range, prev)).await
    }
}
