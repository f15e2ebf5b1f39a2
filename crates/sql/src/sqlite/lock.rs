//! The lock that prevents a second Orlop process on a database file.

use std::{
    fs::{File, TryLockError},
    io::{Read as _, Write as _},
    path::Path,
};

use orlop_core::{
    log::{Error, Result},
    private,
};

use super::load::with_suffix;

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
        let path = with_suffix(database, ".lock");
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
        Ok(Self(file))
    }
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
