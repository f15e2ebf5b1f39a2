//! The archive as of one moment.

use async_trait::async_trait;
use futures_util::TryStreamExt as _;
use orlop_core::{
    log::{ARCHIVE_PAGE_MOMENTS, ARCHIVE_PAGE_ROWS, ArchiveState, ArchivedMoment, ArchivedRow, FrozenArchive, Result},
    types::{Revision, RowId},
};
use sqlx::{ConnectOptions as _, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::Mutex;

use super::sql::STATE;
use crate::{archive, error::unavailable};

const ROWS: &str = "SELECT id, sub, key, value, lease, version, create_revision, prev_revision, deleted, end_revision \
    FROM kv_archive WHERE (id, sub) >= (?1, ?2) ORDER BY id, sub LIMIT ?3";
const MOMENTS: &str = "SELECT id, at, gap FROM kv_time WHERE id > ?1 ORDER BY id LIMIT ?2";

/// A read transaction.
pub(super) struct Frozen(Mutex<SqliteConnection>);

impl Frozen {
    pub(super) async fn now(options: &SqliteConnectOptions) -> Result<Self> {
        let options = options.clone().pragma("query_only", "ON");
        let mut connection = options.connect().await.map_err(unavailable)?;
        // The first read of the transaction takes the snapshot.
        sqlx::raw_sql("BEGIN; SELECT 1 FROM meta").execute(&mut connection).await.map_err(unavailable)?;
        Ok(Self(Mutex::new(connection)))
    }
}

#[async_trait]
impl FrozenArchive for Frozen {
    async fn state(&self) -> Result<ArchiveState> {
        let connection = &mut *self.0.lock().await;
        sqlx::query_as(STATE).fetch_one(connection).await.map(archive::state).map_err(unavailable)
    }

    async fn rows(&self, from: RowId) -> Result<Vec<ArchivedRow>> {
        let connection = &mut *self.0.lock().await;
        let query = sqlx::query(ROWS).bind(from.revision.0).bind(i64::from(from.sub)).bind(ARCHIVE_PAGE_ROWS as i64);
        archive::archived_rows(query.fetch(connection)).await.map_err(unavailable)
    }

    async fn moments(&self, after: Revision) -> Result<Vec<ArchivedMoment>> {
        let connection = &mut *self.0.lock().await;
        let query = sqlx::query_as(MOMENTS).bind(after.0).bind(ARCHIVE_PAGE_MOMENTS as i64);
        query.fetch(connection).map_ok(archive::archived_moment).try_collect().await.map_err(unavailable)
    }
}
