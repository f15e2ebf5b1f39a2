//! Fills an empty database from a snapshot.

use std::io::ErrorKind;

use async_trait::async_trait;
use sqlx::{Connection as _, PgConnection};

use super::{
    append::{Columns, bind},
    connection::{Database, PAGE_TIMEOUT, with_timeout, within},
    schema::{LIVE_MEMBER, has_table},
};
use crate::{
    Durability,
    archive::counted_bytes,
    auth::{self, bind_params},
    error::describe,
    rows::HAS_ROWS,
};
use orlop_core::{
    auth::AuthState,
    log::{
        ArchivePart, ArchiveState, Error, FactChange, HEARTBEAT_TIMEOUT, Load, LoggedLease, MIGRATION_SOURCE, Meta,
        Result,
    },
    types::Change,
};

/// One transaction without timeouts of statements and locks. Appends of other instances wait for it. It is idle while the
/// source is read: [`crate::KineTable::check_unchanged`] counts the rows of a large table for minutes.
const BEGIN: &str = "BEGIN; SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0; \
    SET LOCAL idle_in_transaction_session_timeout = '10min'; SELECT orlop_lock()";
/// Follows the error of a transaction that has not begun in time.
const LOCK_MAY_BE_HELD: &str =
    "; another restore, import or server may hold the lock that writes need (pg_stat_activity shows it)";
const HAS_USERS: &str = "SELECT EXISTS (SELECT 1 FROM auth_user) OR EXISTS (SELECT 1 FROM auth_role)";
const ADD_FIRST: &str = "INSERT INTO kv_log (key, value, lease, version, create_revision, prev_revision, deleted, id) \
    SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7, $8)";
const ADD_MORE: &str = "INSERT INTO kv_log_more \
    (key, value, lease, version, create_revision, prev_revision, deleted, id, sub) \
    SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9)";
const ADD_LEASES: &str = "INSERT INTO lease (id, ttl, deadline) \
    SELECT id, ttl, clock_timestamp() + make_interval(secs => left_secs) \
    FROM unnest($1, $2, $3) AS l (id, ttl, left_secs)";
/// Records the compact revision, and that rows below it may be missing.
const ADD_COMPACTION: &str = "INSERT INTO meta AS m (name, value) \
    VALUES ('compact_revision', $1), ('purged_revision', $1) ON CONFLICT (name) DO UPDATE SET value = excluded.value";
/// Gives the database a new cluster ID and the next epoch, and removes alarms. With `last_beat` set to now, the TTL of
/// leases starts when an instance starts.
const NEW_CLUSTER: &str = "DELETE FROM meta WHERE name LIKE 'alarm/%'; \
    UPDATE meta SET value = value + 1 WHERE name = 'epoch'; \
    UPDATE meta SET value = (extract(epoch FROM clock_timestamp()) * 1000000)::bigint WHERE name = 'last_beat'; \
    UPDATE meta SET value = ('x' || substr(md5(random()::text || clock_timestamp()::text), 1, 15))::bit(60)::bigint \
    WHERE name = 'cluster_id'";

/// A server that was started on the empty database may have begun an archive.
const EMPTY_ARCHIVE: &str = "TRUNCATE kv_archive, kv_time, saved_index; DELETE FROM meta WHERE name LIKE 'archive\\_%'";
const ARCHIVE_FACTS: &str = "INSERT INTO meta (name, value) VALUES ('archive_first', $1), ('archive_copied', $2), \
    ('archive_bytes', $3), ('archive_rows', $4)";
/// The last three parameters are the ids, subs and ends.
const ADD_ARCHIVED: &str = "INSERT INTO kv_archive \
    (key, value, lease, version, create_revision, prev_revision, deleted, id, sub, end_revision) \
    SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)";
const ADD_MOMENTS: &str = "INSERT INTO kv_time (id, at, gap, back) SELECT m.id, m.at, m.gap, \
    coalesce(lag(m.at, 1, (SELECT t.at FROM kv_time t ORDER BY t.id DESC LIMIT 1)) OVER (ORDER BY m.id) > m.at, false) \
    FROM unnest($1, $2, $3) AS m (id, at, gap)";

/// Empties the log. The secret key and the cluster ID stay.
const EMPTY: &str = "TRUNCATE kv_log, kv_log_more, lease, auth_user, auth_role, auth_user_role, auth_permission; \
    DELETE FROM meta WHERE name IN ('compact_revision', 'auth_enabled', 'auth_revision', 'migration_source'); \
    UPDATE meta SET value = 0 WHERE name = 'purged_revision'; UPDATE meta SET value = value + 1 WHERE name = 'epoch'";

/// Fills a database in one transaction that holds the append lock. The database gets a new cluster ID.
pub struct PostgresLoader {
    database: Database,
    connection: PgConnection,
    /// What was added of the archive; `None`: there is none.
    archive: Option<ArchiveState>,
}

impl PostgresLoader {
    /// Opens the database and migrates the schema.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if the database cannot be reached, contains rows, leases or users, or an instance is using it. A
    /// database with rows or leases, or with an instance, then has the same schema as before.
    pub async fn open(endpoint: &str) -> Result<Self> {
        let database = Database::new(endpoint, 1, Durability::Synced)?;
        let mut connection = database.connect_first().await?.connection;
        // An older version that uses the database could not open it again after a migration.
        if has_table(&database, &mut connection, "kv_log").await? {
            refuse_content(&database, &mut connection, HAS_ROWS).await?;
            refuse_if_served(&database, &mut connection).await?;
        }
        database.migrate(&mut connection).await?;
        begin(&database, &mut connection).await?;
        // Another process may have written before the lock was taken.
        for sql in [HAS_ROWS, HAS_USERS] {
            refuse_content(&database, &mut connection, sql).await?;
        }
        refuse_if_served(&database, &mut connection).await?;
        let mut loader = Self { database, connection, archive: None };
        loader.run(async |loader| sqlx::raw_sql(EMPTY_ARCHIVE).execute(&mut loader.connection).await).await?;
        Ok(loader)
    }

    /// Deletes the content of a database that no instance uses, if it is the unfinished copy of the cluster `source`.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if the database cannot be reached, contains another log, or an instance is using it.
    pub async fn discard(endpoint: &str, source: u64) -> Result<()> {
        let database = Database::new(endpoint, 1, Durability::Synced)?;
        let mut connection = database.connect_first().await?.connection;
        let failed = |error: sqlx::Error| database.open_error("write to", &error);
        begin(&database, &mut connection).await?;
        let recorded = sqlx::query_scalar::<_, i64>("SELECT value FROM meta WHERE name = $1").bind(MIGRATION_SOURCE);
        let recorded = with_timeout(recorded.fetch_optional(&mut connection)).await.map_err(failed)?;
        if recorded != Some(source.cast_signed()) {
            return Err(Error::Open(format!("database {} is not an unfinished copy", database.name())));
        }
        refuse_if_served(&database, &mut connection).await?;
        let mut loader = Self { database, connection, archive: None };
        for sql in [EMPTY, EMPTY_ARCHIVE] {
            loader.run(async |loader| sqlx::raw_sql(sql).execute(&mut loader.connection).await).await?;
        }
        loader.commit().await
    }

    /// Runs statements, each of which handles a page of rows at most.
    async fn run<T>(&mut self, work: impl AsyncFnOnce(&mut Self) -> sqlx::Result<T>) -> Result<T> {
        let done = within(PAGE_TIMEOUT, work(self)).await;
        done.map_err(|error| self.database.unavailable(&error))
    }

    /// Commits and closes the connection.
    async fn commit(self) -> Result<()> {
        let Self { database, mut connection, .. } = self;
        within(PAGE_TIMEOUT, sqlx::raw_sql("COMMIT").execute(&mut connection))
            .await
            .map_err(|error| Error::OutcomeUnknown(error.to_string()))?;
        // The transaction is committed already.
        let _ = with_timeout(connection.close()).await;
        database.close().await;
        Ok(())
    }

    /// Returns the database's name for messages.
    pub fn name(&self) -> &str {
        self.database.name()
    }

    async fn add_rows(&mut self, changes: &[Change]) -> sqlx::Result<()> {
        let (first, more): (Vec<&Change>, Vec<&Change>) = changes.iter().partition(|change| change.row.sub == 0);
        for (sql, rows) in [(ADD_FIRST, &first), (ADD_MORE, &more)] {
            if rows.is_empty() {
                continue;
            }
            let mut columns = Columns::with_capacity(rows.len());
            rows.iter().for_each(|change| columns.push(change));
            let ids: Vec<i64> = rows.iter().map(|change| change.row.revision.0).collect();
            let mut query = bind(sqlx::query(sql), columns).bind(ids);
            if sql == ADD_MORE {
                query = query.bind(rows.iter().map(|change| i64::from(change.row.sub)).collect::<Vec<_>>());
            }
            query.execute(&mut self.connection).await?;
        }
        Ok(())
    }

    async fn add_part(&mut self, part: &ArchivePart) -> sqlx::Result<()> {
        match part {
            ArchivePart::Begin { first, copied } => {
                self.archive = Some(ArchiveState { first: *first, copied: *copied, bytes: 0, rows: 0 });
                Ok(())
            }
            ArchivePart::Rows(rows) => {
                let mut columns = Columns::with_capacity(rows.len());
                rows.iter().for_each(|row| columns.push(&row.change));
                bind(sqlx::query(ADD_ARCHIVED), columns)
                    .bind(rows.iter().map(|row| row.change.row.revision.0).collect::<Vec<_>>())
                    .bind(rows.iter().map(|row| i64::from(row.change.row.sub)).collect::<Vec<_>>())
                    .bind(rows.iter().map(|row| row.end.0).collect::<Vec<_>>())
                    .execute(&mut self.connection)
                    .await?;
                if let Some(archive) = &mut self.archive {
                    archive.rows += rows.len() as u64;
                    archive.bytes += rows.iter().map(|row| counted_bytes(&row.change)).sum::<u64>();
                }
                Ok(())
            }
            ArchivePart::Moments(moments) => {
                let query = sqlx::query(ADD_MOMENTS)
                    .bind(moments.iter().map(|it| it.moment.revision.0).collect::<Vec<_>>())
                    .bind(moments.iter().map(|it| it.moment.unix_ms).collect::<Vec<_>>())
                    .bind(moments.iter().map(|it| it.has_gap).collect::<Vec<_>>());
                query.execute(&mut self.connection).await.map(drop)
            }
        }
    }

    async fn add_facts(&mut self, meta: &Meta, auth: &AuthState) -> sqlx::Result<()> {
        for statement in auth::all(auth) {
            bind_params!(statement).execute(&mut self.connection).await?;
        }
        let (ids, ttls): (Vec<i64>, Vec<i64>) = meta.leases.iter().map(|lease| (lease.id.0, lease.ttl_secs)).unzip();
        let left = |lease: &LoggedLease| lease.left_secs.unwrap_or(lease.ttl_secs as f64);
        let left: Vec<f64> = meta.leases.iter().map(left).collect();
        sqlx::query(ADD_LEASES).bind(ids).bind(ttls).bind(left).execute(&mut self.connection).await?;
        if let Some(revision) = meta.compact_revision {
            sqlx::query(ADD_COMPACTION).bind(revision.0).execute(&mut self.connection).await?;
        }
        if let Some((name, Some(value))) = meta.source.map(|source| FactChange::Source(Some(source)).fact()) {
            let insert = sqlx::query("INSERT INTO meta (name, value) VALUES ($1, $2)").bind(name).bind(value);
            insert.execute(&mut self.connection).await?;
        }
        if let Some(ArchiveState { first, copied, bytes, rows }) = self.archive {
            let facts = sqlx::query(ARCHIVE_FACTS).bind(first.0).bind(copied.0);
            let facts = facts.bind(bytes.cast_signed()).bind(rows.cast_signed());
            facts.execute(&mut self.connection).await?;
        }
        sqlx::raw_sql(NEW_CLUSTER).execute(&mut self.connection).await.map(drop)
    }
}

/// Refuses a database in which a query finds rows.
async fn refuse_content(database: &Database, connection: &mut PgConnection, sql: &'static str) -> Result<()> {
    let found = with_timeout(sqlx::query_scalar::<_, bool>(sql).fetch_one(connection)).await;
    if !found.map_err(|error| database.open_error("read", &error))? {
        return Ok(());
    }
    Err(Error::Open(format!("database {} already contains a log; use an empty database or schema", database.name())))
}

async fn refuse_if_served(database: &Database, connection: &mut PgConnection) -> Result<()> {
    let live = sqlx::query_scalar::<_, String>(LIVE_MEMBER).bind(HEARTBEAT_TIMEOUT.as_secs_f64());
    let live = within(PAGE_TIMEOUT, live.fetch_optional(connection)).await;
    match live.map_err(|error| database.unavailable(&error))? {
        Some(name) => Err(Error::Open(format!(
            "database {} is or was recently used by instance {name}; stop it and try again in {} seconds",
            database.name(),
            HEARTBEAT_TIMEOUT.as_secs()
        ))),
        None => Ok(()),
    }
}

/// Begins the transaction and takes the lock.
async fn begin(database: &Database, connection: &mut PgConnection) -> Result<()> {
    let begun = with_timeout(sqlx::raw_sql(BEGIN).execute(connection)).await;
    begun.map(drop).map_err(|error| {
        let is_late = matches!(&error, sqlx::Error::Io(error) if error.kind() == ErrorKind::TimedOut);
        let why = if is_late { LOCK_MAY_BE_HELD } else { "" };
        Error::Open(format!("cannot write to database {}: {}{why}", database.name(), describe(&error)))
    })
}

#[async_trait]
impl Load for PostgresLoader {
    async fn add(&mut self, changes: &[Change]) -> Result<()> {
        self.run(async |loader| loader.add_rows(changes).await).await
    }

    async fn add_archive(&mut self, part: ArchivePart) -> Result<()> {
        self.run(async |loader| loader.add_part(&part).await).await
    }

    async fn finish(mut self: Box<Self>, meta: &Meta, auth: &AuthState) -> Result<()> {
        self.run(async |loader| loader.add_facts(meta, auth).await).await?;
        refuse_if_served(&self.database, &mut self.connection).await?;
        self.commit().await
    }
}
