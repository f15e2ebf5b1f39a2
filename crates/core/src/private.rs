//! What only the server's user is to see, whatever the umask: folders with the mode 0700 and files with 0600, as etcd makes
//! them. What is there already keeps its mode; that a folder lets others in is for its user to tell.

use std::{
    fs::{DirBuilder, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
};

const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// Makes a folder, and those that it lies in, if they are not there.
///
/// # Errors
///
/// If they cannot be made.
pub fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder)
}

/// For a file that is made if it is not there.
pub fn file_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.create(true).mode(FILE_MODE);
    options
}

/// Makes an empty file if there is nothing by its name.
///
/// # Errors
///
/// If it cannot be made.
pub fn make_file(file: &Path) -> io::Result<()> {
    match OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(file) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// The mode of a folder into which others than its user can look, if they can.
///
/// A volume that Kubernetes gave to a pod's group has the setgid bit, and lets others read names, which the server's user
/// could not change.
pub fn exposed(folder: &Path) -> Option<u32> {
    const SETGID: u32 = 0o2000;
    const OTHERS: u32 = 0o007;
    const OTHERS_WRITE: u32 = 0o002;
    const GROUP: u32 = 0o070;
    let mode = folder.metadata().ok()?.permissions().mode();
    let is_a_groups_volume = mode & SETGID != 0 && mode & OTHERS_WRITE == 0;
    (mode & (GROUP | OTHERS) != 0 && !is_a_groups_volume).then_some(mode & 0o7777)
}
