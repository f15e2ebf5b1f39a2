//! The index of the log, saved in the table `saved_index`.
//!
//! The table is replaced in one transaction, by one instance at a time. It is in the same database as the log, so every copy
//! of the database that has the saved index also has the changes that are in it. The table is unlogged: it costs no WAL, and
//! is empty after a crash of the server and on a standby that becomes the primary.

use std::collections::VecDeque;

use async_trait::async_trait;
use orlop_core::{
    log::{Error, Result, SavedIndex, SavedIndexReader, SavedIndexState, SavedIndexWriter},
    types::Revision,
};
use sqlx::{Connection as _, PgConnection};
use tracing::debug;

use super::{
    PostgresLog, PostgresView,
    connection::{Database, with_timeout},
    other_server,
    primary::{Found, Generation},
};
use crate::rows::LogRow as _;

/// The server closes the connection, and so releases the lock, if the instance stops in the middle.
const BEGIN: &str = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '60s'";
const TRY_LOCK: &str =
    "SELECT pg_try_advisory_xact_lock((1869771888::bigint << 32) | 'saved_index'::regclass::oid::bigint)";
const WRITE: &str = "INSERT INTO saved_index (part, head, compact_revision, keys, checksum, block) \
    VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (part) DO UPDATE SET (head, compact_revision, keys, checksum, block) = \
    (excluded.head, excluded.compact_revision, excluded.keys, excluded.checksum, excluded.block)";
/// The parts of a longer index before.
const DELETE_BEHIND: &str = "DELETE FROM saved_index WHERE part > $1";
const SERVER: &str = "SELECT orlop_server()";
const STATE: &str = "SELECT head, compact_revision, keys FROM saved_index WHERE part = 0";
const PARTS: &str = "SELECT part, checksum, block FROM saved_index WHERE part >= $1 ORDER BY part LIMIT $2";
/// The format of blocks. Versions of Orlop with another one may share the table during an update, and must not believe it.
const FORMAT: &[u8] = b"orlop saved index 1\n";
/// Parts that are read at once. A part has about 50 KiB.
const PARTS_PER_READ: i64 = 16;

#[async_trait]
impl SavedIndex for PostgresLog {
    async fn open(&self) -> Result<Option<Box<dyn SavedIndexReader>>> {
        let view = PostgresView::now(&self.database, self.member.id).await?;
        let found = view.limited(sqlx::query(STATE).fetch_optional(&mut *view.connection().await?)).await?;
        let Some(row) = found else { return Ok(None) };
        let state = SavedIndexState {
            head: Revision(row.int(0)?),
            compact_revision: row.int_or_null(1)?.map(Revision),
            keys: usize::try_from(row.int(2)?).map_err(|_| damaged())?,
        };
        Ok(Some(Box::new(Reader { view, state, next_part: 0, blocks: VecDeque::new() })))
    }

    async fn create(&self, state: SavedIndexState, server: i64) -> Result<Option<Box<dyn SavedIndexWriter + '_>>> {
        let found = self.database.find().await.map_err(|error| self.database.unavailable(&error))?;
        let Found { connection, generation, .. } = found;
        let mut writer = Writer { database: &self.database, connection, generation, state, server, part: 0 };
        writer.run(async |connection| sqlx::raw_sql(BEGIN).execute(connection).await).await?;
        if !writer.run(async |connection| sqlx::query_scalar(TRY_LOCK).fetch_one(connection).await).await? {
            // Nothing was written.
            let _ = with_timeout(writer.connection.close()).await;
            return Ok(None);
        }
        Ok(Some(Box::new(writer)))
    }
}

struct Reader {
    view: PostgresView,
    state: SavedIndexState,
    next_part: i64,
    /// Parts that were read.
    blocks: VecDeque<Vec<u8>>,
}

#[async_trait]
impl SavedIndexReader for Reader {
    fn state(&self) -> SavedIndexState {
        self.state
    }

    async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        if self.blocks.is_empty() {
            let query = sqlx::query(PARTS).bind(self.next_part).bind(PARTS_PER_READ);
            let rows = self.view.limited(query.fetch_all(&mut *self.view.connection().await?)).await?;
            for row in rows {
                let (part, checksum, block) = (row.int(0)?, row.int(1)?, row.bytes(2)?);
                if part != self.next_part || checksum != checksum_of(&block) {
                    return Err(damaged());
                }
                self.next_part += 1;
                self.blocks.push_back(block);
            }
        }
        let block = self.blocks.pop_front().ok_or_else(damaged)?;
        Ok((!block.is_empty()).then_some(block))
    }
}

fn checksum_of(block: &[u8]) -> i64 {
    crc32c::crc32c_append(crc32c::crc32c(FORMAT), block).into()
}

struct Writer<'a> {
    database: &'a Database,
    /// In a transaction. If it is dropped, the server rolls back.
    connection: PgConnection,
    generation: Generation,
    state: SavedIndexState,
    server: i64,
    /// The number of the next part.
    part: i64,
}

impl Writer<'_> {
    async fn run<T>(&mut self, work: impl AsyncFnOnce(&mut PgConnection) -> sqlx::Result<T>) -> Result<T> {
        let work = with_timeout(work(&mut self.connection));
        let done = self.database.unless_superseded(self.generation, work).await;
        done.map_err(|error| self.database.refusal(&error))
    }

    async fn write(&mut self, block: &[u8]) -> Result<()> {
        let SavedIndexState { head, compact_revision, keys } = self.state;
        let query = sqlx::query(WRITE)
            .bind(self.part)
            .bind(head.0)
            .bind(compact_revision.map(|revision| revision.0))
            .bind(i64::try_from(keys).unwrap_or(i64::MAX))
            .bind(checksum_of(block))
            .bind(block);
        self.run(async |connection| query.execute(connection).await).await?;
        self.part += 1;
        Ok(())
    }
}

#[async_trait]
impl SavedIndexWriter for Writer<'_> {
    async fn add(&mut self, block: Vec<u8>) -> Result<()> {
        if block.is_empty() { Ok(()) } else { self.write(&block).await }
    }

    async fn finish(mut self: Box<Self>) -> Result<()> {
        self.write(&[]).await?;
        let delete = sqlx::query(DELETE_BEHIND).bind(self.part - 1);
        self.run(async |connection| delete.execute(connection).await).await?;
        let server: i64 = self.run(async |connection| sqlx::query_scalar(SERVER).fetch_one(connection).await).await?;
        if server != self.server {
            return Err(other_server());
        }
        self.run(async |connection| sqlx::raw_sql("COMMIT").execute(connection).await).await?;
        if let Err(error) = with_timeout(self.connection.close()).await {
            debug!(%error, "cannot close the connection of a saved index");
        }
        Ok(())
    }
}

fn damaged() -> Error {
    Error::Corrupt("the table saved_index is damaged".to_owned())
}
