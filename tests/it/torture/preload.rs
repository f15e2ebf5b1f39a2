//! Disk and clock faults inside a server's process: [preload.c](preload.c), compiled here and controlled through a
//! shared file.

use std::{
    ffi::OsString,
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use tempfile::TempDir;

/// The fields of the shared file, in the order of `enum field` in preload.c.
#[derive(Clone, Copy, Debug)]
pub enum Field {
    SyncFiles,
    SyncErrno,
    WriteFiles,
    WriteErrno,
    SyncDelayMs,
    ClockSecs,
    WriteBack,
    SyncsFailed,
    WritesFailed,
    SyncsDelayed,
    ClocksShifted,
}

/// Bits for the affected files, as in `enum file` in preload.c.
pub const WAL: i64 = 1;
pub const DATABASE: i64 = 2;

pub const EIO: i64 = 5;
pub const ENOSPC: i64 = 28;

const FIELD_BYTES: u64 = 8;
const CONTROL_BYTES: u64 = 4_096;

/// A folder with the compiled library, its shared file, and the data that a power cut would leave.
pub struct Preload {
    home: TempDir,
    control: File,
}

impl Preload {
    pub fn build() -> Self {
        let home = tempfile::tempdir().expect("a temporary directory can be made");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/torture/preload.c");
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O2", "-pthread", "-o"])
            .args([&home.path().join("preload.so"), &source])
            .output()
            .expect("cc can be started");
        assert!(built.status.success(), "cc: {}", String::from_utf8_lossy(&built.stderr));
        let path = home.path().join("control");
        let control = File::options().read(true).write(true).create_new(true).open(path).expect("a file can be made");
        control.set_len(CONTROL_BYTES).expect("a file can be made longer");
        fs::create_dir(home.path().join("shadow")).expect("a folder can be made");
        // Postgres may run as another user.
        for path in [home.path().to_owned(), home.path().join("control"), home.path().join("preload.so")] {
            let opened = Command::new("chmod").arg("a+rwX").arg(path).status();
            assert!(opened.is_ok_and(|status| status.success()), "other users can use the library");
        }
        Self { home, control }
    }

    /// Returns the environment variables of a process that can be struck. They load the library.
    pub fn environment(&self) -> Vec<(String, OsString)> {
        let path = |name: &str| self.home.path().join(name).into_os_string();
        vec![
            ("LD_PRELOAD".to_owned(), path("preload.so")),
            ("TORTURE_CONTROL".to_owned(), path("control")),
            ("TORTURE_SHADOW".to_owned(), path("shadow")),
            // The allocator takes memory when it needs it. A reserve would outlast the limit of a test.
            ("MIMALLOC_ARENA_RESERVE".to_owned(), "0".into()),
        ]
    }

    /// Returns the environment variables of a process whose syncs are listed.
    pub fn listing_environment(&self) -> Vec<(String, OsString)> {
        let list = ("TORTURE_SYNCS".to_owned(), self.home.path().join("syncs").into_os_string());
        self.environment().into_iter().chain([list]).collect()
    }

    /// Returns the files and folders that were synced, in order, with their size at that time.
    pub fn syncs(&self) -> Vec<(PathBuf, u64)> {
        let list = fs::read_to_string(self.home.path().join("syncs")).unwrap_or_default();
        let sync = |line: &str| line.split_once(' ').and_then(|(size, path)| Some((path.into(), size.parse().ok()?)));
        list.lines().map(|line| sync(line).expect("a line has a size and a path")).collect()
    }

    pub fn set(&self, field: Field, value: i64) {
        self.control.write_all_at(&value.to_le_bytes(), field as u64 * FIELD_BYTES).expect("the file exists");
    }

    pub fn get(&self, field: Field) -> i64 {
        let mut bytes = [0; 8];
        self.control.read_exact_at(&mut bytes, field as u64 * FIELD_BYTES).expect("the file exists");
        i64::from_le_bytes(bytes)
    }

    /// Replaces the files in `data` with the contents that a power cut would leave. The server must have ended.
    pub fn cut_power(&self, data: &Path) {
        for name in ["orlop.db", "orlop.db-wal"] {
            // The files are on the disk as they are from now on.
            let _ = fs::remove_file(self.home.path().join("shadow").join(format!("{name}.pages")));
            let (left, file): (PathBuf, PathBuf) = (self.home.path().join("shadow").join(name), data.join(name));
            if left.exists() {
                fs::copy(left, file).expect("a file can be written");
            } else {
                // The file was never synced. It may not exist.
                let _ = fs::remove_file(file);
            }
        }
        // SQLite never syncs the shared memory file, and rebuilds it.
        let _ = fs::remove_file(data.join("orlop.db-shm"));
    }
}
