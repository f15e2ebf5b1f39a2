//! What a start checks of the files of a database before SQLite opens them.

use std::{
    fs::File,
    io::{self, ErrorKind, Read as _},
    path::Path,
};

use orlop_core::log::{Error, Result};
use tracing::warn;

use super::{load::with_suffix, view::has_wal};

/// Checks that the files can be written, if they exist, and that the database is not truncated.
///
/// If SQLite may only read a database, it opens it for reads alone, and every write fails later. If it may not write the WAL
/// or its index, its error does not name the file.
pub(super) fn check(database: &Path) -> Result<()> {
    for suffix in ["-wal", "-shm"] {
        open(&with_suffix(database, suffix))?;
    }
    open(database)?.map_or(Ok(()), |file| check_length(file, database))
}

/// Opens a file for reads and writes; `None`: it does not exist.
fn open(path: &Path) -> Result<Option<File>> {
    match File::options().read(true).write(true).open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let is_of_another_user = error.kind() == ErrorKind::PermissionDenied;
            let hint = if is_of_another_user { "; it must belong to the user of the server" } else { "" };
            Err(Error::Open(format!("cannot write database {}: {error}{hint}", path.display())))
        }
    }
}

/// Checks that the file is not truncated, because SQLite detects a missing page only when it reads that page. If there
/// is a WAL, the file may be shorter than its header states, because the WAL contains the missing pages.
fn check_length(opened: File, file: &Path) -> Result<()> {
    const HEADER_BYTES: usize = 100;
    const MAGIC: &[u8] = b"SQLite format 3\0";
    let unreadable = |error: io::Error| Error::Open(format!("cannot read database {}: {error}", file.display()));
    let bytes = opened.metadata().map_err(unreadable)?.len();
    if bytes == 0 {
        if has_wal(file) {
            // A start writes the first page before the WAL has content. SQLite would delete the WAL with its commits.
            return Err(Error::Open(format!(
                "database {name} is empty, but its WAL is not: a copy to {name} has failed; restore a snapshot or a whole copy",
                name = file.display()
            )));
        }
        // A start creates the file after this check. So it is what an interrupted start, or a copy that failed, has left.
        warn!(database = %file.display(), "the database file is empty: creating a new store in it");
    }
    let mut header = Vec::new();
    opened.take(HEADER_BYTES as u64).read_to_end(&mut header).map_err(unreadable)?;
    // An empty file is a new database. SQLite also treats a file that is shorter than its first page as a new database;
    // Orlop rejects it.
    let has_magic = MAGIC.starts_with(&header[..header.len().min(MAGIC.len())]);
    if bytes == 0 || !has_magic || has_wal(file) {
        return Ok(());
    }
    if header.len() < HEADER_BYTES {
        let name = file.display();
        return Err(Error::Open(format!(
            "database {name} is truncated: it has {bytes} bytes; restore a snapshot or a copy of it"
        )));
    }
    // The value 1 means 65,536, which does not fit into 16 bits.
    let page = match u16::from_be_bytes([header[16], header[17]]) {
        1 => 65_536,
        page => u64::from(page),
    };
    let pages = u64::from(u32::from_be_bytes([header[28], header[29], header[30], header[31]]));
    if pages * page <= bytes {
        return Ok(());
    }
    Err(Error::Open(format!(
        "database {} is truncated: it has {bytes} bytes, but its header states {pages} pages of {page} bytes; \
         restore a snapshot or a copy of it",
        file.display()
    )))
}

#[cfg(test)]
mod tests {
    use orlop_core::{
        log::{Append, LeaseChange, Log as _, ReadLog as _},
        types::LeaseId,
    };

    use super::*;
    use crate::sqlite::SqliteLog;

    #[tokio::test]
    async fn file_that_cannot_be_written_is_named() {
        for suffix in ["", "-wal", "-shm"] {
            let folder = tempfile::tempdir().expect("a folder");
            let database = folder.path().join("orlop.db");
            let unwritable = with_suffix(&database, suffix);
            // The tests may run as root, who can write every file, but no folder.
            std::fs::create_dir(&unwritable).expect("a folder can be made");
            let error = SqliteLog::open(&database).await.err().expect("the start is refused").to_string();
            assert!(error.starts_with(&format!("cannot write database {}: ", unwritable.display())), "{error}");
        }
    }

    /// The writer opens another connection after a failure, and the file may belong to another user by then.
    #[tokio::test]
    async fn write_to_a_file_that_can_only_be_read_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let log = SqliteLog::open(&folder.path().join("orlop.db")).await.expect("a database");
        let writer = log.writer.lock().await.expect("a connection");
        writer.run(|writer| writer.pragma_update(None, "query_only", "ON")).await.expect("a setting");
        let expected = log.meta().await.expect("facts").position;
        let leases = &[LeaseChange::Grant { id: LeaseId(7), ttl_secs: 60 }];
        let grant = Append { expected, changes: &[], reads: None, leases, compact: None, fact: None, auth: None };
        let refused = log.append(grant).await;
        assert!(matches!(&refused, Err(Error::Unavailable(text)) if text.contains("orlop.db")), "{refused:?}");
    }
}
