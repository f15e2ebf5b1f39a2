//! Files and directories that only the server's user can access, regardless of the umask: directories with mode 0700,
//! files with 0600, as in etcd. Existing ones keep their mode; the caller warns about directories that others can read.

use std::{
    fs::{DirBuilder, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
};

use crate::files::sync_folder_of;

const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// Creates a directory and its parents, if they do not exist. Returns when the names of those that it created are on disk:
/// a crash of the machine may remove a new name with all below it until the directory that contains it is synced.
///
/// # Errors
///
/// If a directory cannot be created or synced.
pub fn make_folder(folder: &Path) -> io::Result<()> {
    let is_missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
    let missing: Vec<&Path> = folder.ancestors().take_while(is_missing).collect();
    DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder)?;
    for folder in missing {
        match sync_folder_of(folder) {
            // This user may not read the parent, or its file system cannot sync directories.
            Err(error) if matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput) => {}
            synced => synced?,
        }
    }
    Ok(())
}

/// Returns the options to open a file, creating it if it does not exist.
pub fn file_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.create(true).mode(FILE_MODE);
    options
}

/// Creates an empty file if none with this name exists.
///
/// # Errors
///
/// If it cannot be created.
pub fn make_file(file: &Path) -> io::Result<()> {
    match OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(file) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Returns the mode of a directory that users other than its owner can read; `None` if they cannot.
///
/// Also returns `None` for a volume that belongs to a Kubernetes pod's group (`fsGroup`). Such a volume has the setgid
/// bit and may be readable by others, which the server's user cannot change.
pub fn exposed(folder: &Path) -> Option<u32> {
    const SETGID: u32 = 0o2000;
    const OTHERS: u32 = 0o007;
    const OTHERS_WRITE: u32 = 0o002;
    const GROUP: u32 = 0o070;
    let mode = folder.metadata().ok()?.permissions().mode();
    let is_a_groups_volume = mode & SETGID != 0 && mode & OTHERS_WRITE == 0;
    (mode & (GROUP | OTHERS) != 0 && !is_a_groups_volume).then_some(mode & 0o7777)
}
