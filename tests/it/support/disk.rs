//! A small disk that a test can fill.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

use tempfile::TempDir;

use super::{run, skip};

static PIECE: [u8; 64 << 10] = [0; 64 << 10];

/// A file system in memory that is unmounted on drop.
pub struct Disk {
    folder: TempDir,
}

impl Disk {
    /// Returns `None`, and prints that the test is skipped, if this user may not mount.
    pub fn mount(megabytes: usize) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a temporary directory can be made");
        let size = format!("size={megabytes}m,mode=0755");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "torture"]).arg(folder.path()).output();
        let is_mounted = mounted.is_ok_and(|output| output.status.success());
        if !is_mounted {
            skip("right to mount a disk");
        }
        is_mounted.then_some(Self { folder })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Gives the disk another size.
    pub fn resize(&self, megabytes: usize) {
        let size = format!("remount,size={megabytes}m");
        let output = run(Command::new("mount").args(["-o", &size]).arg(self.folder.path()));
        assert!(output.status.success(), "{output:?}");
    }

    /// Writes until the disk is full.
    pub fn fill(&self) {
        let mut file = File::options().create(true).append(true).open(self.filling()).expect("a file can be made");
        // Writes large pieces first, then smaller ones, up to the last byte.
        for piece in [&PIECE[..], &PIECE[..4_096], &PIECE[..1]] {
            while file.write_all(piece).is_ok() {}
        }
    }

    /// Deletes what [`Disk::fill`] wrote.
    pub fn empty(&self) {
        fs::remove_file(self.filling()).expect("the disk was filled");
    }

    fn filling(&self) -> PathBuf {
        self.folder.path().join("filling")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // `--lazy`, because a process that was just killed may still have open files.
        let _ = Command::new("umount").arg("--lazy").arg(self.folder.path()).status();
    }
}
