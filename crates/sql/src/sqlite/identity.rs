//! Whether the files of an open database still have their names.
//!
//! A file that another process replaces or removes stays open: commits go to a file without a name, or with another one, and
//! a connection that is opened later reads another database, or the same with another WAL. Only a restart ends that, so the
//! process ends, after the checkpointer has copied the WAL ([`super::checkpoint`]). If the lock file is another one, a second
//! process can lock it.
//!
//! A file is recognized by its device and inode, as SQLite's own locks recognize it. Overlayfs gives a file another inode when
//! it is first opened for writing, so this must have happened before.

use std::{
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use orlop_core::{
    files::sync_folder_of,
    supervise::{blocking, disk_failed},
};
use tokio::sync::Notify;

use super::{
    load::with_suffix,
    lock::{FileLock, LOCK},
};

const REPLACED: &str = "the database file was replaced or removed while it was in use. The process exits: its last writes are \
                        in the file that was moved away, and lost if that was deleted";
const UNLOCKED: &str = "the lock file was replaced or removed while it was in use. The process exits, because two servers could \
                        use the database";
const DETACHED: &str = "the WAL or its index was replaced or removed while it was in use. The process exits, because its other \
                        connections would use another one; before, it copies the WAL into the database file";

/// Maximum time to wait for the checkpointer to end the process.
const END_TIME_MAX: Duration = Duration::from_secs(30);

/// The files of a database, as they were when it was opened.
pub(super) struct Identity {
    database: Identified,
    lock_file: Identified,
    wal: Identified,
    shm: Identified,
    /// Wakes the checkpointer when another task has found a loss.
    found: Notify,
    /// Set when the log ends. SQLite then deletes the WAL with the last connection, and the files may be removed.
    is_released: AtomicBool,
}

struct Identified {
    path: PathBuf,
    id: Id,
    /// What it means if no file or another one has the path.
    meaning: &'static str,
}

impl Identified {
    fn new(path: PathBuf, meaning: &'static str) -> io::Result<Self> {
        let id = Id::of(&path.metadata()?);
        Ok(Self { path, id, meaning })
    }

    fn is_in_place(&self) -> bool {
        self.path.metadata().is_ok_and(|found| Id::of(&found) == self.id)
    }

    /// Returns what became of it. A file that cannot be looked at counts as unchanged.
    fn loss(&self) -> Option<Loss> {
        let path = self.path.display();
        let file = match self.path.metadata() {
            Ok(found) if Id::of(&found) == self.id => return None,
            Ok(_) => io::Error::other(format!("{path} is another file")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                io::Error::new(error.kind(), format!("{path} does not exist"))
            }
            Err(_) => return None,
        };
        Some(Loss { file, meaning: self.meaning })
    }
}

/// A file that was replaced or removed.
pub(super) struct Loss {
    file: io::Error,
    meaning: &'static str,
}

impl Loss {
    /// Whether it is the database, and not only a file beside it.
    pub(super) fn is_of_database(&self) -> bool {
        self.meaning == REPLACED
    }

    pub(super) fn end_process(&self) -> ! {
        disk_failed(&self.file, self.meaning)
    }
}

/// Device and inode.
#[derive(Debug, PartialEq, Eq)]
struct Id(u64, u64);

impl Id {
    fn of(file: &Metadata) -> Self {
        Self(file.dev(), file.ino())
    }
}

impl Identity {
    /// Call it while a connection that may write is open: then there are a WAL and its index.
    ///
    /// # Errors
    ///
    /// If one of the files has no metadata.
    pub(super) fn new(database: &Path, lock: &FileLock) -> io::Result<Self> {
        let lock_id = Id::of(&lock.metadata()?);
        Ok(Self {
            database: Identified::new(database.to_owned(), REPLACED)?,
            lock_file: Identified { path: with_suffix(database, LOCK), id: lock_id, meaning: UNLOCKED },
            wal: Identified::new(with_suffix(database, "-wal"), DETACHED)?,
            shm: Identified::new(with_suffix(database, "-shm"), DETACHED)?,
            found: Notify::new(),
            is_released: AtomicBool::new(false),
        })
    }

    /// From now on, nothing is lost any more.
    pub(super) fn release(&self) {
        self.is_released.store(true, Ordering::Relaxed);
    }

    /// Returns only if no file was replaced or removed; otherwise the checkpointer ends the process. Call it after a connection
    /// was opened, and before it reads: it is one to the same file then. May block.
    #[expect(clippy::disallowed_methods, reason = "the thread only waits for the end of the process")]
    pub(super) fn check(&self) {
        if let Some(loss) = self.loss() {
            self.found.notify_one();
            thread::sleep(END_TIME_MAX);
            loss.end_process();
        }
    }

    /// Like [`Identity::check`]. A disk that stalls does not delay other tasks.
    pub(super) async fn check_async(self: &Arc<Self>) {
        let identity = Arc::clone(self);
        blocking(move || identity.check()).await;
    }

    /// Waits until another task has found a loss.
    pub(super) async fn found(&self) {
        self.found.notified().await;
    }

    pub(super) async fn loss_async(self: &Arc<Self>) -> Option<Loss> {
        let identity = Arc::clone(self);
        blocking(move || identity.loss()).await.flatten()
    }

    /// Removes the index of the WAL, and renames the WAL unless it is empty, so that no process takes them for those of another
    /// database: it would share the index with those who still read the file that was moved. Returns the new name of the WAL;
    /// `None` if it keeps its name or is no longer beside the name of the database.
    pub(super) fn leave_name(&self, is_wal_empty: bool) -> io::Result<Option<PathBuf>> {
        if self.shm.is_in_place() {
            fs::remove_file(&self.shm.path)?;
        }
        if is_wal_empty || !self.wal.is_in_place() {
            return Ok(None);
        }
        // An earlier one may contain the last writes to another file.
        let mut names = (0..).map(|number| with_suffix(&self.wal.path, &format!("-of-moved-file-{number}")));
        let Some(moved) = names.find(|name| !name.exists()) else { return Ok(None) };
        fs::rename(&self.wal.path, &moved)?;
        sync_folder_of(&moved)?;
        Ok(Some(moved))
    }

    /// Returns the first file that was replaced or removed.
    fn loss(&self) -> Option<Loss> {
        let files = [&self.database, &self.lock_file, &self.wal, &self.shm];
        let loss = files.into_iter().find_map(Identified::loss);
        // After the look at the files: they are removed later.
        loss.filter(|_| !self.is_released.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the identity of new files in a folder.
    fn identity(folder: &Path) -> Identity {
        let database = folder.join("orlop.db");
        fs::write(&database, "a database").expect("a file");
        for name in ["-wal", "-shm"] {
            fs::write(with_suffix(&database, name), name).expect("a file");
        }
        let lock = FileLock::acquire(&database).expect("the lock is free");
        Identity::new(&database, &lock).expect("there are four files")
    }

    type Change<'a> = (&'a dyn Fn(&Path), &'a str);

    #[test]
    fn file_that_was_replaced_or_removed_is_named() {
        let replace = |file: &Path| {
            let copy = file.with_extension("copy");
            fs::copy(file, &copy).and_then(|_| fs::rename(&copy, file)).expect("a file can be replaced");
        };
        let write = |file: &Path| fs::write(file, "other content").expect("a file can be written");
        let link = |file: &Path| fs::hard_link(file, file.with_extension("link")).expect("a link");
        let remove = |file: &Path| fs::remove_file(file).expect("a file can be removed");
        let changes: [Change<'_>; 4] =
            [(&write, ""), (&link, ""), (&replace, "is another file"), (&remove, "does not exist")];
        for (change, what) in changes {
            for (name, meaning) in [
                ("orlop.db", REPLACED),
                ("orlop.db.lock", UNLOCKED),
                ("orlop.db-wal", DETACHED),
                ("orlop.db-shm", DETACHED),
            ] {
                let folder = tempfile::tempdir().expect("a folder");
                let identity = identity(folder.path());
                assert!(identity.loss().is_none());
                let file = folder.path().join(name);
                change(&file);
                let found = identity.loss().map(|loss| (loss.file.to_string(), loss.meaning));
                let expected = (!what.is_empty()).then(|| (format!("{} {what}", file.display()), meaning));
                assert_eq!(found, expected, "{name}");
            }
        }
    }

    #[test]
    fn only_the_own_wal_and_index_leave_their_names() {
        for is_wal_empty in [false, true] {
            let folder = tempfile::tempdir().expect("a folder");
            let identity = identity(folder.path());
            let wal = identity.wal.path.clone();
            // A server has them open, so that no other file gets their inodes.
            let _open = [&wal, &identity.shm.path].map(|file| fs::File::open(file).expect("it exists"));
            let earlier = with_suffix(&wal, "-of-moved-file-0");
            fs::write(&earlier, "an earlier one").expect("a file");
            let moved = identity.leave_name(is_wal_empty).expect("nothing fails");
            assert_eq!(moved.is_none(), is_wal_empty);
            let kept = moved.as_ref().unwrap_or(&wal);
            assert_eq!(fs::read_to_string(kept).expect("it exists"), "-wal");
            assert_eq!(fs::read_to_string(&earlier).expect("it exists"), "an earlier one");
            assert!(!identity.shm.path.exists());
            // Those of another database.
            let others = [wal, identity.shm.path.clone()];
            for file in &others {
                fs::write(file.with_extension("new"), "other").expect("a file");
                fs::rename(file.with_extension("new"), file).expect("a file can be replaced");
            }
            assert_eq!(identity.leave_name(false).expect("nothing fails"), None);
            assert!(others.iter().all(|file| file.exists()));
        }
    }

    #[test]
    fn files_of_a_log_that_has_ended_may_be_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let identity = identity(folder.path());
        folder.close().expect("the folder can be removed");
        assert!(identity.loss().is_some());
        identity.release();
        assert!(identity.loss().is_none());
    }
}
