//! The table of kine, read from SQLite, Postgres or MySQL in one transaction that writes nothing.
//!
//! The table has one row per change: `id` is the revision, `name` the key, `lease` a TTL in seconds. The types of its
//! columns depend on the version of kine that created it, so all columns are converted in SQL. NULL is read as 0 or as
//! an empty text. What the rows mean is not decided here.

mod address;
#[cfg(test)]
mod tests;

use std::{fs::File, path::Path, time::Duration};

use futures_util::TryStreamExt as _;
use rustix::fs::{FlockOperation, fcntl_lock};
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, MySqlConnection, PgConnection, SqliteConnection,
    sqlite::SqliteConnectOptions,
};
use tokio::time::timeout;

use self::address::Address;
use crate::{
    error::describe,
    rows::LogRow,
    sqlite::{is_not_a_database, may_be_immutable, refuse_damage},
};
use orlop_core::log::{Error, Result};

/// Maximum time to connect to a database server, and to wait for a lock of SQLite.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum number of rows of a page.
const PAGE_ROWS: usize = 1_000;
/// Bytes of names and values after which a page ends.
const PAGE_BYTES_MAX: usize = 4 << 20;
/// The name of the rows in which kine keeps the version and value of kube-apiserver's key `compact_rev_key`.
pub const APISERVER_COMPACTION: &str = "compact_rev_key_apiserver";

/// The SQL of one kind of database.
struct Dialect {
    begin: &'static str,
    /// The columns of [`KineRow`] without the value, all numbers as 64-bit integers.
    columns: &'static str,
    value: &'static str,
    /// The parameter of the id after which a page begins.
    after: &'static str,
    /// Number of rows, the newest id, the compact revision, and the number of rows whose id does not fit.
    state: &'static str,
    /// The number of other sessions that use the table.
    sessions: Option<&'static str>,
}

const SQLITE: Dialect = Dialect {
    // The first read of the transaction opens the file.
    begin: "BEGIN; SELECT 1 FROM sqlite_master LIMIT 1",
    columns: "id, CAST(name AS BLOB), typeof(name) IS 'text', CAST(ifnull(created, 0) AS INTEGER), \
        CAST(ifnull(deleted, 0) AS INTEGER), CAST(ifnull(create_revision, 0) AS INTEGER), \
        CAST(ifnull(prev_revision, 0) AS INTEGER), CAST(ifnull(lease, 0) AS INTEGER)",
    value: "CAST(value AS BLOB)",
    after: "?",
    state: "SELECT count(*), ifnull(max(id), 0), ifnull(max(CASE WHEN name = 'compact_rev_key' \
        THEN CAST(prev_revision AS INTEGER) END), 0), 0 FROM kine",
    sessions: None,
};

const POSTGRES: Dialect = Dialect {
    begin: "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL statement_timeout = 0; \
        SET LOCAL lock_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0",
    columns: "id::bigint, convert_to(name::text, 'UTF8'), 1::bigint, coalesce(created, 0)::bigint, \
        coalesce(deleted, 0)::bigint, coalesce(create_revision, 0)::bigint, coalesce(prev_revision, 0)::bigint, \
        coalesce(lease, 0)::bigint",
    value: "value",
    after: "$1",
    state: "SELECT count(*), coalesce(max(id), 0)::bigint, coalesce(max(CASE WHEN name = 'compact_rev_key' \
        THEN prev_revision END), 0)::bigint, 0::bigint FROM kine",
    // The statement of an idle session is its last one. kine asks for new rows every second.
    sessions: Some(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
        AND backend_type = 'client backend' AND application_name <> 'orlop' AND query ILIKE '%kine%'",
    ),
};

const MYSQL: Dialect = Dialect {
    begin: "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY",
    columns: "CAST(id AS SIGNED), CAST(name AS BINARY), 1, CAST(COALESCE(created, 0) AS SIGNED), \
        CAST(COALESCE(deleted, 0) AS SIGNED), CAST(LEAST(COALESCE(create_revision, 0), 9223372036854775807) AS SIGNED), \
        CAST(LEAST(COALESCE(prev_revision, 0), 9223372036854775807) AS SIGNED), CAST(COALESCE(lease, 0) AS SIGNED)",
    value: "value",
    after: "?",
    state: "SELECT COUNT(*), CAST(LEAST(COALESCE(MAX(id), 0), 9223372036854775807) AS SIGNED), \
        CAST(LEAST(COALESCE(MAX(CASE WHEN name = 'compact_rev_key' THEN prev_revision END), 0), 9223372036854775807) \
        AS SIGNED), CAST(COALESCE(SUM(id > 9223372036854775807), 0) AS SIGNED) FROM kine",
    sessions: Some(
        "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()",
    ),
};

const SQLITE_SEQUENCE: &str = "SELECT ifnull(max(seq), 0) FROM sqlite_sequence WHERE name = 'kine'";
const HAS_SQLITE_SEQUENCE: &str = "SELECT count(*) FROM sqlite_master WHERE name = 'sqlite_sequence'";
const POSTGRES_SEQUENCE: &str =
    "SELECT coalesce(pg_get_serial_sequence('kine', 'id'), to_regclass('kine_id_seq')::text)";
const MYSQL_SEQUENCE: &str = "SELECT CAST(LEAST(COALESCE(MAX(auto_increment), 1), 9223372036854775807) AS SIGNED) - 1 \
    FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 'kine'";

const NEEDS_TLS: &str =
    "the user can log in only over TLS: the server must offer it, and the address must not disable it";

/// Whether a page contains the values of all rows, or only those of [`APISERVER_COMPACTION`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    Read,
    Omit,
}

/// A row of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KineRow {
    /// The revision.
    pub id: i64,
    pub name: Vec<u8>,
    /// Whether the name is stored as a text; SQLite may have converted it to a number.
    pub is_text: bool,
    pub created: bool,
    pub deleted: bool,
    /// 0 if the row creates the key.
    pub create_revision: i64,
    pub prev_revision: i64,
    /// A TTL in seconds; 0: none.
    pub lease: i64,
    pub value: Vec<u8>,
}

/// What the table as a whole says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KineState {
    pub rows: i64,
    /// The newest id; 0 without rows.
    pub newest: i64,
    /// 0: the table was never compacted.
    pub compact_revision: i64,
    /// The newest id that the database has given, also to a row that was not committed.
    pub sequence: i64,
}

/// A connection with a read transaction on a database of kine.
pub struct KineTable {
    connection: Connection,
    address: Address,
}

enum Connection {
    Sqlite(SqliteConnection),
    Postgres(PgConnection),
    MySql(MySqlConnection),
}

/// Runs an expression on the connection of whichever database.
macro_rules! on {
    ($connection:expr, $bound:ident => $work:expr) => {
        match $connection {
            Connection::Sqlite($bound) => $work,
            Connection::Postgres($bound) => $work,
            Connection::MySql($bound) => $work,
        }
    };
}

impl KineTable {
    /// Opens the database at kine's URL or at the path of a SQLite file.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if the address is invalid, the database cannot be read, has no table of kine, or is in use by
    /// kine as far as that can be seen.
    pub async fn open(from: &str) -> Result<Self> {
        let address = Address::parse(from)?;
        if let Address::Sqlite(file) = &address {
            refuse_folder(file)?;
            refuse_open_file(file)?;
        }
        let mut table = Self::begin(address).await?;
        table.refuse_damage().await?;
        table.refuse_sessions().await?;
        table.check_columns().await?;
        Ok(table)
    }

    /// Returns the name of the database for messages, without a password.
    pub fn name(&self) -> String {
        self.address.name()
    }

    pub async fn state(&mut self) -> Result<KineState> {
        let sql = self.connection.dialect().state;
        let counted: sqlx::Result<(i64, i64, i64, i64)> =
            on!(&mut self.connection, connection => sqlx::query_as(sql).fetch_one(connection).await);
        let (rows, newest, compact_revision, too_large) = counted.map_err(|error| self.unreadable(&error))?;
        if too_large > 0 {
            return Err(Error::Open(format!(
                "{}: {too_large} rows have an id above {}, the highest revision of etcd's API",
                self.name(),
                i64::MAX
            )));
        }
        let sequence = self.connection.sequence().await.map_err(|error| self.unreadable(&error))?;
        Ok(KineState { rows, newest, compact_revision, sequence })
    }

    /// Returns rows with ids above `after` in order; none at the end of the table. Memory: at most 4 MiB and one row.
    pub async fn page(&mut self, after: i64, values: Values) -> Result<Vec<KineRow>> {
        let Dialect { columns, value, after: parameter, .. } = self.connection.dialect();
        let value = match values {
            Values::Read => (*value).to_owned(),
            Values::Omit => format!("CASE WHEN name = '{APISERVER_COMPACTION}' THEN {value} END"),
        };
        // The parts of the text are constants. A converted column may have the name `id` too; only the table's has an index.
        let sql = AssertSqlSafe(format!(
            "SELECT {columns}, {value} FROM kine WHERE kine.id > {parameter} ORDER BY kine.id LIMIT {PAGE_ROWS}"
        ));
        let read = on!(&mut self.connection, connection => read(sqlx::query(sql).bind(after).fetch(connection)).await);
        read.map_err(|error| self.unreadable(&error))
    }

    /// Ends the transaction, and compares the table as it is now with what it was. Pages are not checked again: the
    /// database that is filled waits meanwhile, in a transaction.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if it has changed, cannot be read, or is in use by kine as far as that can be seen.
    pub async fn check_unchanged(self, before: &KineState) -> Result<()> {
        let Self { connection, address } = self;
        // The connection was used for reads alone.
        let _ = on!(connection, connection => connection.close().await);
        if let Address::Sqlite(file) = &address {
            refuse_open_file(file)?;
        }
        let mut again = Self::begin(address).await?;
        let now = again.state().await?;
        if now == *before {
            return Ok(());
        }
        Err(Error::Open(format!(
            "{}: the table has changed while it was read (newest row {} before, {} now): stop kine or k3s first",
            again.name(),
            before.newest,
            now.newest
        )))
    }

    async fn begin(address: Address) -> Result<Self> {
        let failed = |error: &sqlx::Error| {
            if matches!(address, Address::Sqlite(_)) && is_not_a_database(error) {
                return Error::Open(format!("{} is not a SQLite database", address.name()));
            }
            let why = if needs_tls(error) { NEEDS_TLS.to_owned() } else { describe(error) };
            Error::Open(format!("cannot open {}, the database of kine: {why}", address.name()))
        };
        let connecting = Connection::open(&address);
        let mut connection = match timeout(CONNECT_TIMEOUT, connecting).await {
            Ok(connected) => connected.map_err(|error| failed(&error))?,
            Err(_) => return Err(failed(&sqlx::Error::PoolTimedOut)),
        };
        let begin = connection.dialect().begin;
        let begun = on!(&mut connection, connection => sqlx::raw_sql(begin).execute(connection).await.map(drop));
        begun.map_err(|error| failed(&error))?;
        Ok(Self { connection, address })
    }

    /// Checks each page of a SQLite file, which takes minutes for a large one.
    async fn refuse_damage(&mut self) -> Result<()> {
        let Connection::Sqlite(connection) = &mut self.connection else { return Ok(()) };
        refuse_damage(connection).await.map_err(|error| {
            // The whole text of this error speaks of the log of Orlop.
            let what = if let Error::Corrupt(what) = &error { format!("damaged: {what}") } else { error.to_string() };
            Error::Open(format!("{}: {what}", self.address.name()))
        })
    }

    async fn refuse_sessions(&mut self) -> Result<()> {
        let Some(sql) = self.connection.dialect().sessions else { return Ok(()) };
        let counted: sqlx::Result<i64> =
            on!(&mut self.connection, connection => sqlx::query_scalar(sql).fetch_one(connection).await);
        match counted.map_err(|error| self.unreadable(&error))? {
            0 => Ok(()),
            sessions => Err(Error::Open(format!(
                "{} is in use by {sessions} other sessions: stop kine or k3s on all machines, and end other sessions",
                self.name()
            ))),
        }
    }

    async fn check_columns(&mut self) -> Result<()> {
        let Dialect { columns, value, .. } = self.connection.dialect();
        // The parts of the text are constants.
        let sql = AssertSqlSafe(format!("SELECT {columns}, {value}, old_value FROM kine LIMIT 0"));
        let read = on!(&mut self.connection, connection => sqlx::raw_sql(sql).execute(connection).await.map(drop));
        read.map_err(|error| Error::Open(format!("{} has no table of kine: {}", self.name(), describe(&error))))
    }

    fn unreadable(&self, error: &sqlx::Error) -> Error {
        Error::Open(format!("cannot read kine's table in {}: {}", self.name(), describe(error)))
    }
}

/// Returns whether sqlx was to encrypt the password of a user of MySQL itself, which it is built without.
fn needs_tls(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Configuration(text) if text.to_string().starts_with("RSA auth backend disabled"))
}

impl Connection {
    async fn open(address: &Address) -> sqlx::Result<Self> {
        Ok(match address {
            Address::Sqlite(file) => {
                let options =
                    SqliteConnectOptions::new().filename(file).read_only(true).immutable(may_be_immutable(file));
                let options = options.busy_timeout(CONNECT_TIMEOUT).disable_statement_logging();
                Self::Sqlite(options.connect().await?)
            }
            Address::Postgres(options) => Self::Postgres(options.connect().await?),
            Address::MySql(options) => {
                let mut connection = options.connect().await?;
                sqlx::raw_sql("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                    .execute(&mut connection)
                    .await?;
                // MySQL 8 otherwise returns a sequence value of up to a day ago. MariaDB does not know the variable.
                let _ = sqlx::raw_sql("SET SESSION information_schema_stats_expiry = 0").execute(&mut connection).await;
                Self::MySql(connection)
            }
        })
    }

    fn dialect(&self) -> &'static Dialect {
        match self {
            Self::Sqlite(_) => &SQLITE,
            Self::Postgres(_) => &POSTGRES,
            Self::MySql(_) => &MYSQL,
        }
    }

    /// Returns the newest id that the database has given; 0 if it does not count them.
    async fn sequence(&mut self) -> sqlx::Result<i64> {
        match self {
            Self::Sqlite(connection) => {
                let has: i64 = sqlx::query_scalar(HAS_SQLITE_SEQUENCE).fetch_one(&mut *connection).await?;
                if has == 0 {
                    return Ok(0);
                }
                sqlx::query_scalar(SQLITE_SEQUENCE).fetch_one(connection).await
            }
            Self::Postgres(connection) => {
                let name: Option<String> = sqlx::query_scalar(POSTGRES_SEQUENCE).fetch_one(&mut *connection).await?;
                let Some(name) = name else { return Ok(0) };
                // Postgres returns the name quoted.
                let sql = format!("SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM {name}");
                sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(connection).await
            }
            Self::MySql(connection) => sqlx::query_scalar(MYSQL_SEQUENCE).fetch_one(connection).await,
        }
    }
}

/// Reads rows until the page is full.
async fn read<R: LogRow>(mut rows: futures_util::stream::BoxStream<'_, sqlx::Result<R>>) -> sqlx::Result<Vec<KineRow>> {
    let (mut page, mut bytes) = (Vec::new(), 0);
    while let Some(row) = rows.try_next().await? {
        let row = kine_row(&row).map_err(|error| sqlx::Error::Decode(error.to_string().into()))?;
        bytes += row.name.len() + row.value.len();
        page.push(row);
        if bytes >= PAGE_BYTES_MAX {
            break;
        }
    }
    Ok(page)
}

fn kine_row(row: &impl LogRow) -> Result<KineRow> {
    Ok(KineRow {
        id: row.int(0)?,
        name: row.bytes(1)?,
        is_text: row.int(2)? != 0,
        created: row.int(3)? != 0,
        deleted: row.int(4)? != 0,
        create_revision: row.int(5)?,
        prev_revision: row.int(6)?,
        lease: row.int(7)?,
        value: row.bytes(8)?,
    })
}

/// Refuses a folder, and names the file that was probably meant.
fn refuse_folder(path: &Path) -> Result<()> {
    if !path.is_dir() {
        return Ok(());
    }
    // Where the file is in the folders of k3s.
    let usual = ["state.db", "db/state.db", "server/db/state.db"].map(|name| path.join(name));
    let file = usual.iter().find(|file| file.is_file()).map(|file| file.display().to_string());
    let file = file.as_deref().unwrap_or("usually state.db in it");
    Err(Error::Open(format!("{} is a folder; give the file, {file}", path.display())))
}

/// Refuses a file that another process has open. A process with the file open in WAL mode, as kine has it, holds a
/// shared lock on it, so that an exclusive lock cannot be had.
fn refuse_open_file(path: &Path) -> Result<()> {
    // Without the permission to write the file, its locks cannot be seen.
    let Ok(file) = File::options().read(true).write(true).open(path) else { return Ok(()) };
    match fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
        // Closing the file releases the lock.
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) => {
            Err(Error::Open(format!("{} is in use by another process: stop kine or k3s first", path.display())))
        }
        // A file system without locks.
        Err(_) => Ok(()),
    }
}
