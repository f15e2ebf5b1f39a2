//! Finds etcd's own programs.

use std::{
    env,
    path::{Path, PathBuf},
};

/// Returns the path of an etcd program: the variable's value, else the one that `scripts/fetch-etcd` unpacked, else the
/// one on the PATH.
pub fn etcd_tool(name: &str, variable: &str) -> Option<PathBuf> {
    if let Some(path) = env::var_os(variable) {
        let path = PathBuf::from(path);
        assert!(path.is_file(), "{variable} names {}, which is not a file", path.display());
        return Some(path);
    }
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tools/etcd/usr/bin").join(name);
    let on_path = env::var_os("PATH").unwrap_or_default();
    std::iter::once(fetched).chain(env::split_paths(&on_path).map(|dir| dir.join(name))).find(|path| path.is_file())
}
