//! The migrations of the schema, embedded from `migrations/`.
//!
//! They are listed here instead of with `sqlx::migrate!`, because its proc macro requires a second build of sqlx and
//! SQLite, for the compiler. A database stores the hash of each migration, including comments, so never change a
//! released migration.

use orlop_core::log::{Error, Result};
use sqlx::{
    SqlStr,
    migrate::{MigrateError, Migration, MigrationType, Migrator},
};
use tracing::{info, warn};

use crate::error::describe;

/// Version, description and SQL of a migration. The first two are those of the file name.
type File = (i64, &'static str, &'static str);

/// Reads the versions of the migrations that a database has.
pub(crate) const VERSIONS: &str = "SELECT version FROM _sqlx_migrations ORDER BY version";

const SQLITE: [File; 2] = [
    (1, "log", include_str!("../migrations/sqlite/0001_log.sql")),
    (2, "auth", include_str!("../migrations/sqlite/0002_auth.sql")),
];
const SQLITE_ARCHIVE: [File; 1] = [(1, "archive", include_str!("../migrations/sqlite-archive/0001_archive.sql"))];
const POSTGRES: [File; 2] = [
    (1, "log", include_str!("../migrations/postgres/0001_log.sql")),
    (2, "auth_append_archive_index", include_str!("../migrations/postgres/0002_auth_append_archive_index.sql")),
];

pub(crate) fn sqlite() -> Migrator {
    migrator(&SQLITE)
}

pub(crate) fn sqlite_archive() -> Migrator {
    migrator(&SQLITE_ARCHIVE)
}

pub(crate) fn postgres() -> Migrator {
    migrator(&POSTGRES)
}

fn migrator(files: &[File]) -> Migrator {
    let migration = |(version, description, sql): &File| {
        Migration::new(*version, (*description).into(), MigrationType::Simple, SqlStr::from_static(sql), false)
    };
    Migrator::with_migrations(files.iter().map(migration).collect())
}

/// Checks that this version can read a database without migrating it: the database has the migrations of this version
/// or the first of them. Returns its schema.
pub(crate) fn check_schema(name: &str, versions: &[i64], known: &Migrator) -> Result<i64> {
    let known: Vec<i64> = known.iter().map(|migration| migration.version).collect();
    if let Some(newest) = versions.last().filter(|_| known.starts_with(versions)) {
        return Ok(*newest);
    }
    Err(Error::Open(format!(
        "{name} was written by another version of Orlop: it has schema {}, this version reads schemas up to {}",
        versions.last().unwrap_or(&0),
        known.last().unwrap_or(&0),
    )))
}

/// Returns the newest schema of this version. A database that is open for writing has it.
pub(crate) fn newest(known: &Migrator) -> i64 {
    known.iter().map(|migration| migration.version).max().unwrap_or_default()
}

/// Returns whether this version has migrations that a database with this schema lacks.
pub(crate) fn is_older(schema: i64, known: &Migrator) -> bool {
    newest(known) > schema
}

/// Logs that a database with an older schema was migrated. `instance` uses it or has recently done so.
pub(crate) fn log_migration(database: &str, from: i64, known: &Migrator, instance: Option<&str>) {
    let to = newest(known);
    if let Some(instance) = instance {
        warn!(
            database,
            from,
            to,
            instance,
            "migrated the schema of a database that an instance uses or used seconds ago; stop the instance if its version \
             is older: it can no longer open this database"
        );
    } else {
        info!(database, from, to, "migrated the schema; older versions of Orlop can no longer open this database");
    }
}

/// Returns the first table of another application, or `None` if the tables are those of Orlop.
pub(crate) fn foreign_table(tables: &[String]) -> Option<&str> {
    if tables.iter().any(|table| table == "kv_log") {
        return None;
    }
    // Another instance may be creating Orlop's tables. The first of them is `_sqlx_migrations`.
    tables.iter().map(String::as_str).find(|table| *table != "_sqlx_migrations")
}

/// Returns the error text for a database whose schema cannot be migrated.
pub(crate) fn cannot_migrate(name: &str, error: &MigrateError) -> String {
    if let MigrateError::VersionMissing(version) = error {
        return format!(
            "database {name} was written by a newer version of Orlop: this version does not know schema {version}"
        );
    }
    if let MigrateError::VersionMismatch(version) = error {
        return format!(
            "database {name} was written by another version of Orlop: its schema {version} differs from this version's"
        );
    }
    let text = if let MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) = error {
        describe(error)
    } else {
        error.to_string()
    };
    format!("cannot migrate database {name}: {text}")
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    #[test]
    fn every_migration_is_embedded() {
        for (folder, files) in [("sqlite", &SQLITE[..]), ("sqlite-archive", &SQLITE_ARCHIVE), ("postgres", &POSTGRES)] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations").join(folder);
            let mut names: Vec<String> = fs::read_dir(path)
                .expect("the folder exists")
                .map(|entry| entry.expect("it can be read").file_name().to_string_lossy().into_owned())
                .collect();
            names.sort();
            let embedded: Vec<String> =
                files.iter().map(|(version, name, _)| format!("{version:04}_{name}.sql")).collect();
            assert_eq!(embedded, names, "{folder}");
        }
    }

    /// A database with another checksum of a migration is refused, even if only a comment differs. Each release adds rows for
    /// its migrations.
    #[test]
    fn released_migrations_have_not_changed() {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        for (release, folder, known, version, checksum) in [
            (
                "0.2.0",
                "sqlite",
                sqlite(),
                1,
                "54ecd33a9da47e31fcede10b4be18d4047b9908ec70746091dca7d1467baa5f5c696b26bf23e4c6e1a909d0d1949406a",
            ),
            (
                "0.2.0",
                "postgres",
                postgres(),
                1,
                "e29e5d3df608ceb6a9455430cf35b58f6b519856961ee797716e42d5d12b68fb449e9a7208adc2bba00d131226f42500",
            ),
        ] {
            let found = known.iter().find(|migration| migration.version == version).expect("it is embedded");
            assert_eq!(hex(&found.checksum), checksum, "{folder}/{version:04} was released with {release}");
        }
    }
}
