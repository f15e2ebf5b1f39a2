//! Folders of files, and changes of names that survive a crash of the machine.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

/// Returns the folder of a file: `.` for a name alone.
pub fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Syncs the folder of a file, so that the name of the file is on disk.
///
/// # Errors
///
/// If the folder cannot be opened or synced.
pub fn sync_folder_of(file: &Path) -> io::Result<()> {
    File::open(folder_of(file))?.sync_all()
}

/// Renames a file in its file system, and returns when the new name is on disk. A file that has the name is replaced.
///
/// # Errors
///
/// If the file cannot be renamed, or the folder of the new name cannot be synced.
pub fn rename_durably(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    sync_folder_of(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_of_a_name_alone_is_the_current_one() {
        for (file, folder) in [("a/b", "a"), ("/b", "/"), ("b", "."), ("./b", "."), ("/", ".")] {
            assert_eq!(folder_of(Path::new(file)), Path::new(folder), "{file}");
        }
    }
}
