//! The lock that prevents a second Orlop process on a database file.
//!
//! It is a lock on a file beside the database: on some file systems, such as NFS, a lock of this kind on the database itself
//! would exclude all others, also SQLite's own.

use std::{
    fs::{File, Metadata, TryLockError},
    io::{ErrorKind, Read as _, Write as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use rustix::process::{Flock, FlockType, fcntl_getlk};
use tracing::warn;

use orlop_core::{
    log::{Error, Result},
    private,
};

use super::load::with_suffix;

/// End of the name of the lock file.
pub(super) const LOCK: &str = ".lock";

/// An exclusive lock on `<database file>.lock`, which contains the owner's process ID. The operating system releases it
/// when the process ends.
pub(super) struct FileLock(File);

impl Drop for FileLock {
    /// Unlocks explicitly, because a forked child that has not called exec yet also has the file open, so that closing
    /// it here does not release the lock.
    fn drop(&mut self) {
        // After an error, closing the file releases the lock.
        let _ = self.0.unlock();
    }
}

impl FileLock {
    pub(super) fn acquire(database: &Path) -> Result<Self> {
        let path = with_suffix(database, LOCK);
        let name = path.display();
        let failed =
            |action: &str, error: std::io::Error| Error::Open(format!("cannot {action} lock file {name}: {error}"));

        let mut file = private::file_options()
            .read(true)
            .write(true)
            .truncate(false)
            .open(&path)
            .map_err(|error| failed("open", error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut owner = String::new();
                // Only for the message. If the owner has not written its ID yet, the message does not contain it.
                let _ = file.read_to_string(&mut owner);
                let owner =
                    if owner.trim().is_empty() { String::new() } else { format!(" (process {})", owner.trim()) };
                return Err(Error::Open(format!(
                    "database {} is in use by another orlop process{owner}, which holds the lock {name}",
                    database.display()
                )));
            }
            Err(TryLockError::Error(error)) => return Err(failed("lock", error)),
        }
        file.set_len(0).map_err(|error| failed("write", error))?;
        writeln!(file, "{}", std::process::id()).map_err(|error| failed("write", error))?;
        let lock = Self(file);
        refuse_use_by_another_name(database)?;
        Ok(lock)
    }

    pub(super) fn metadata(&self) -> std::io::Result<Metadata> {
        self.0.metadata()
    }
}

/// Refuses a file with hard links that another process uses: beside its other name it has another lock file and another WAL.
///
/// A process that uses the database has a lock of SQLite on the file, by whatever name. Only a file with several names is
/// looked at, because others may read a database while a server starts.
fn refuse_use_by_another_name(database: &Path) -> Result<()> {
    let name = database.display();
    let failed = |error: std::io::Error| Error::Open(format!("cannot read database {name}: {error}"));
    let links = match database.metadata() {
        Ok(file) if file.is_file() => file.nlink(),
        Ok(_) => return Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    if links < 2 {
        return Ok(());
    }
    // This process has no connection to the database yet: closing the descriptor would release its locks.
    let file = File::open(database).map_err(failed)?;
    // Some network file systems do not report locks.
    let Ok(Some(lock)) = fcntl_getlk(&file, &Flock::from(FlockType::WriteLock)) else {
        warn!(
            links, database = %name,
            "the database file has several names (hard links): never use it by two of them, which damages it, and make \
             copies without links"
        );
        return Ok(());
    };
    let owner = lock.pid.map_or_else(String::new, |pid| format!(" (process {})", pid.as_raw_nonzero()));
    Err(Error::Open(format!(
        "database {name} is used or read by another process{owner}, and the file has {links} names (hard links): two servers \
         on two names of a file damage it; end the other process, or start on a copy of the database that is no link"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_lock_can_be_acquired_while_a_child_has_the_file_open() {
        let folder = tempfile::tempdir().expect("a folder");
        let database = folder.path().join("orlop.db");
        let lock = FileLock::acquire(&database).expect("the lock is free");
        let child = lock.0.try_clone().expect("a descriptor");
        assert!(FileLock::acquire(&database).is_err(), "the lock is held");
        drop(lock);
        assert!(FileLock::acquire(&database).is_ok(), "the lock is free again");
        drop(child);
    }
}
