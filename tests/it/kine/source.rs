//! Databases of kine, with the table as kine creates it in each kind of database.

use std::path::PathBuf;

use sqlx::{AssertSqlSafe, Connection as _, MySqlConnection, PgConnection, SqliteConnection};
use tempfile::TempDir;

use crate::support::{MySql, Postgres, home};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Sqlite,
    Postgres,
    /// Of MySQL or MariaDB.
    MySql,
}

/// The version of kine that created the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schema {
    Current,
    /// Before 0.11.5: narrow numbers, and in SQLite names with integer affinity.
    Old,
}

impl Kind {
    pub const ALL: [Self; 3] = [Self::Sqlite, Self::Postgres, Self::MySql];

    fn ddl(self, schema: Schema) -> String {
        let [id, name, revision, number, bytes] = match (self, schema) {
            (Self::Sqlite, Schema::Current) => {
                ["INTEGER PRIMARY KEY AUTOINCREMENT", "TEXT", "INTEGER", "INTEGER", "BLOB"]
            }
            (Self::Sqlite, Schema::Old) => {
                ["INTEGER PRIMARY KEY AUTOINCREMENT", "INTEGER", "INTEGER", "INTEGER", "BLOB"]
            }
            (Self::Postgres, Schema::Current) => {
                ["BIGSERIAL PRIMARY KEY", "text COLLATE \"C\"", "BIGINT", "INTEGER", "bytea"]
            }
            (Self::Postgres, Schema::Old) => ["SERIAL PRIMARY KEY", "VARCHAR(630)", "INTEGER", "INTEGER", "bytea"],
            (Self::MySql, Schema::Current) => [
                "BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY",
                "VARCHAR(630) CHARACTER SET ascii",
                "BIGINT UNSIGNED",
                "INTEGER",
                "MEDIUMBLOB",
            ],
            (Self::MySql, Schema::Old) => [
                "INTEGER AUTO_INCREMENT PRIMARY KEY",
                "VARCHAR(630) CHARACTER SET ascii",
                "INTEGER",
                "INTEGER",
                "MEDIUMBLOB",
            ],
        };
        format!(
            "CREATE TABLE kine (id {id}, name {name}, created {number}, deleted {number}, create_revision {revision}, \
             prev_revision {revision}, lease {number}, value {bytes}, old_value {bytes}); \
             CREATE INDEX kine_name_index ON kine (name); \
             CREATE UNIQUE INDEX kine_name_prev_revision_uindex ON kine (name, prev_revision)"
        )
    }
}

/// A row of the table. 0 and an empty value are written as NULL in some rows, as kine may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    pub id: i64,
    pub name: Vec<u8>,
    pub created: bool,
    pub deleted: bool,
    pub create_revision: i64,
    pub prev_revision: i64,
    pub lease: i64,
    pub value: Option<Vec<u8>>,
}

impl Row {
    fn new(id: i64, name: &str) -> Self {
        Self { id, name: name.into(), ..Self::default() }
    }

    pub fn create(id: i64, name: &str, prev_revision: i64, value: &str) -> Self {
        Self { created: true, prev_revision, value: Some(value.into()), ..Self::new(id, name) }
    }

    pub fn update(id: i64, name: &str, create_revision: i64, prev_revision: i64, value: &str) -> Self {
        Self { create_revision, prev_revision, value: Some(value.into()), ..Self::new(id, name) }
    }

    pub fn delete(id: i64, name: &str, prev_revision: i64) -> Self {
        Self { deleted: true, prev_revision, ..Self::new(id, name) }
    }

    /// kine's compact revision.
    pub fn compaction(id: i64, revision: i64) -> Self {
        Self { created: true, prev_revision: revision, value: Some(Vec::new()), ..Self::new(id, "compact_rev_key") }
    }

    pub fn gap(id: i64) -> Self {
        Self { deleted: true, ..Self::new(id, &format!("gap-{id}")) }
    }

    pub fn lease(self, lease: i64) -> Self {
        Self { lease, ..self }
    }

    fn insert(&self, kind: Kind) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let bytes = |bytes: &[u8]| match kind {
            Kind::Postgres => format!("'\\x{}'::bytea", hex(bytes)),
            Kind::Sqlite | Kind::MySql => format!("X'{}'", hex(bytes)),
        };
        let name = match kind {
            _ if self.name.is_empty() => "NULL".to_owned(),
            Kind::Sqlite => format!("CAST({} AS TEXT)", bytes(&self.name)),
            Kind::Postgres => format!("convert_from({}, 'UTF8')", bytes(&self.name)),
            Kind::MySql => bytes(&self.name),
        };
        // kine itself writes 0; tables that other tools have filled may have NULL.
        let number = |number: i64| if number == 0 && self.id % 2 == 0 { "NULL".to_owned() } else { number.to_string() };
        let value = self.value.as_ref().map_or_else(|| "NULL".to_owned(), |value| bytes(value));
        format!(
            "INSERT INTO kine (id, name, created, deleted, create_revision, prev_revision, lease, value) \
             VALUES ({}, {name}, {}, {}, {}, {}, {}, {value});",
            self.id,
            i64::from(self.created),
            i64::from(self.deleted),
            number(self.create_revision),
            // NULLs are never equal, so they would evade the unique index.
            self.prev_revision,
            number(self.lease),
        )
    }
}

/// A database with kine's table.
pub struct Source {
    kind: Kind,
    /// The address for `--from`.
    pub url: String,
    /// The address for sqlx.
    pub own: String,
    folder: Option<TempDir>,
}

impl Source {
    /// Creates a database with an empty table; `None` if the machine lacks the kind of database.
    pub async fn new(kind: Kind, schema: Schema) -> Option<Self> {
        let source = Self::empty(kind).await?;
        source.sql(&kind.ddl(schema)).await;
        Some(source)
    }

    /// Creates a database without tables.
    pub async fn empty(kind: Kind) -> Option<Self> {
        let (url, own, folder) = match kind {
            Kind::Sqlite => {
                let folder = home();
                let file = folder.path().join("state.db").display().to_string();
                (format!("sqlite://{file}?_journal=WAL"), format!("sqlite://{file}?mode=rwc"), Some(folder))
            }
            Kind::Postgres => {
                let url = Postgres::shared().await?.create_database();
                (url.clone(), url, None)
            }
            Kind::MySql => {
                let database = MySql::shared().await?.create_database().await;
                (database.go_url(), database.url(), None)
            }
        };
        Some(Self { kind, url, own, folder })
    }

    pub async fn add(&self, rows: &[Row]) {
        for rows in rows.chunks(200) {
            let inserts: String = rows.iter().map(|row| row.insert(self.kind)).collect();
            self.sql(&format!("BEGIN; {inserts} COMMIT")).await;
        }
    }

    /// Creates a source of a kind with these rows.
    pub async fn of(kind: Kind, rows: &[Row]) -> Option<Self> {
        let source = Self::new(kind, Schema::Current).await?;
        source.add(rows).await;
        Some(source)
    }

    /// Executes statements on a connection of their own, so that no session is left.
    pub async fn sql(&self, sql: &str) {
        // A session that has just ended may still be listed: no longer with the table, as one of kine would be.
        let (own, done) = (
            &self.own,
            match self.kind {
                Kind::Sqlite => execute::<SqliteConnection>(&self.own, sql, "SELECT 1").await,
                Kind::Postgres => execute::<PgConnection>(&self.own, sql, "SELECT 1").await,
                Kind::MySql => execute::<MySqlConnection>(&self.own, sql, "USE information_schema").await,
            },
        );
        done.unwrap_or_else(|error| panic!("{own}: {sql}: {error}"));
    }

    /// Opens the SQLite file.
    pub async fn sqlite(&self) -> SqliteConnection {
        SqliteConnection::connect(&self.own).await.expect("the file is opened")
    }

    /// Opens a session of the Postgres or MySQL database, and reads the table as kine does.
    pub async fn session(&self) -> Box<dyn std::any::Any + Send> {
        match self.kind {
            Kind::Postgres => Box::new(polling::<PgConnection>(&self.own).await),
            _ => Box::new(polling::<MySqlConnection>(&self.own).await),
        }
    }

    pub fn file(&self) -> PathBuf {
        self.folder.as_ref().expect("a SQLite file").path().join("state.db")
    }
}

async fn execute<C>(url: &str, sql: &str, last: &'static str) -> sqlx::Result<()>
where
    C: sqlx::Connection,
    for<'c> &'c mut C: sqlx::Executor<'c, Database = C::Database>,
{
    let mut connection = C::connect(url).await?;
    for sql in [sql, last] {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await?;
    }
    // MySQL closes the connection before the end of TLS is sent.
    let _ = connection.close().await;
    Ok(())
}

/// Reads the table as kine does, and returns the connection.
async fn polling<C>(url: &str) -> C
where
    C: sqlx::Connection,
    for<'c> &'c mut C: sqlx::Executor<'c, Database = C::Database>,
{
    let mut connection = C::connect(url).await.expect("the database is reached");
    sqlx::raw_sql("SELECT max(id) FROM kine").execute(&mut connection).await.expect("a statement");
    connection
}
