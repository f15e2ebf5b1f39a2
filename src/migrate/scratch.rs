//! The folder for the snapshot of the source. A migration deletes it when it has restored the snapshot. The next migration
//! deletes the folder of a killed one.

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::Path,
};

use tempfile::TempDir;

use super::{Failure, Result};

/// Start of the names of such folders.
const PREFIX: &str = "orlop-migrate-";

/// A folder that is locked as long as this exists, and deleted then.
pub(super) struct Scratch {
    folder: TempDir,
    /// `None`: the file system does not lock folders, so no migration deletes that of another one.
    _lock: Option<File>,
}

impl Scratch {
    /// Creates a folder in `parent`, and deletes those that no migration uses any more.
    pub(super) fn new(parent: &Path) -> Result<Self> {
        let failed = |error| Failure::Fatal(format!("cannot create a folder in {}: {error}", parent.display()));
        delete_abandoned(parent);
        loop {
            let only_owner = Permissions::from_mode(0o700);
            let folder = tempfile::Builder::new().prefix(PREFIX).permissions(only_owner).tempdir_in(parent);
            let folder = folder.map_err(failed)?;
            let lock = lock(folder.path());
            // Otherwise a migration that starts at the same time deleted it before it was locked.
            if folder.path().exists() {
                return Ok(Self { _lock: lock, folder });
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Locks a folder; `None` if that is not possible.
fn lock(folder: &Path) -> Option<File> {
    let folder = File::open(folder).ok()?;
    folder.try_lock().ok()?;
    Some(folder)
}

/// Deletes folders that are not locked. Those of other users, for example in `/tmp`, remain.
fn delete_abandoned(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let is_scratch = entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes())
            && entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_scratch && let Some(_lock) = lock(&entry.path()) {
            // The next migration tries again.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_abandoned_folders_are_deleted() {
        let home = tempfile::tempdir().expect("a folder");
        let names = || {
            let entries = fs::read_dir(home.path()).expect("a folder");
            let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
            names.sort();
            names
        };
        let abandoned = home.path().join("orlop-migrate-killed");
        fs::create_dir(&abandoned).expect("a folder can be created");
        fs::write(abandoned.join("orlop-snapshot-x"), "a part").expect("a file can be written");
        let others = ["orlop-migrate-file", "orlop-snapshot-y", "orlop.db"].map(|name| home.path().join(name));
        for file in &others {
            fs::write(file, "").expect("a file can be written");
        }
        let first = Scratch::new(home.path()).expect("a folder");
        fs::write(first.path().join("orlop-snapshot-z"), "a part").expect("a file can be written");
        let second = Scratch::new(home.path()).expect("a folder");
        let mut used = [&others[..], &[first.path().to_owned(), second.path().to_owned()]].concat();
        used.sort();
        assert_eq!(names(), used, "the folder of the killed migration is deleted, the others are in use");
        drop((first, second));
        assert_eq!(names(), others, "a folder is deleted at the end");
    }
}
