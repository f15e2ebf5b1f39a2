//! A read-only snapshot of a log.

use std::future::Future;

use async_trait::async_trait;
use sqlx::PgConnection;
use tokio::sync::Mutex;

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
    log::{Error, History, Meta, Page, Result, Visit, WithPrev},
    types::{KeyRange, Revision, RowId},
};

/// The first read takes the snapshot. The server closes the connection if it is idle for longer than the timeout.
const BEGIN: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL statement_timeout = 0; \
    SET LOCAL idle_in_transaction_session_timeout = '60s'; SELECT 1 FROM meta";

/// The migration that created the archive.
const ARCHIVE_SCHEMA: i64 = 2;

/// A connection with a read-only transaction, and so a fixed snapshot of the database.
pub struct PostgresView {
    pub(super) connection: Mutex<PgConnection>,
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
        Ok(Self { connection: Mutex::new(connection), database: database.clone(), generation, member_id, schema })
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

#[async_trait]
impl History for PostgresView {
    async fn meta(&self) -> Result<Meta> {
        let meta = self.limited(read::meta(&mut *self.connection.lock().await)).await?;
        Ok(Meta { member_id: self.member_id, ..meta })
    }

    async fn auth(&self) -> Result<AuthState> {
        if self.schema < auth::SCHEMA {
            return Ok(AuthState::default());
        }
        self.limited(read::auth(&mut *self.connection.lock().await)).await
    }

    async fn replay(&self, from: Revision, visit: &mut Visit<'_>) -> Result<Meta> {
        let meta = self.meta().await?;
        let connection = &mut *self.connection.lock().await;
        let mut next = RowId::new(from, 0);
        loop {
            let changes = self.limited(read::replay_page(connection, next)).await?;
            let Some(last) = changes.last() else { return Ok(meta) };
            next = last.row.next();
            visit(&meta, changes)?;
        }
    }

    async fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Result<Page> {
        self.limited(read::changes(&mut *self.connection.lock().await, from, to, range, prev)).await
    }
}
