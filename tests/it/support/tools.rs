//! Finds etcd's own programs.

use std::{
    env,
    fmt::{self, Display, Formatter},
    path::{Path, PathBuf},
};

/// An etcd with its tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Etcd {
    /// The one that all tests use.
    Reference,
    /// The one that `scripts/fetch-etcd` unpacked into this folder of `target/tools`.
    Fetched(&'static str),
}

impl Etcd {
    /// etcd 3.4, which differs from later versions.
    pub const V3_4: Self = Self::Fetched("etcd-bookworm");
    /// The versions between which stores are moved: 3.4, and two of 3.5.
    pub const ALL: [Self; 3] = [Self::V3_4, Self::Reference, Self::Fetched("etcd-forky")];

    pub fn server(self) -> Option<PathBuf> {
        self.program("etcd", "ORLOP_ETCD")
    }

    pub fn etcdctl(self) -> Option<PathBuf> {
        self.program("etcdctl", "ORLOP_ETCDCTL")
    }

    /// Returns the program that restores snapshots: etcdutl, or etcdctl of a version that has no etcdutl.
    pub fn etcdutl(self) -> Option<PathBuf> {
        self.program("etcdutl", "ORLOP_ETCDUTL").or_else(|| self.etcdctl())
    }

    fn program(self, name: &str, variable: &str) -> Option<PathBuf> {
        match self {
            Self::Reference => etcd_tool(name, variable),
            Self::Fetched(folder) => Some(fetched(folder, name)).filter(|path| path.is_file()),
        }
    }
}

impl Display for Etcd {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Reference => "etcd",
            Self::Fetched(folder) => folder,
        })
    }
}

/// Returns the path of an etcd program: the variable's value, else the one that `scripts/fetch-etcd` unpacked, else the
/// one on the PATH.
pub fn etcd_tool(name: &str, variable: &str) -> Option<PathBuf> {
    if let Some(path) = env::var_os(variable) {
        let path = PathBuf::from(path);
        assert!(path.is_file(), "{variable} names {}, which is not a file", path.display());
        return Some(path);
    }
    let on_path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&on_path).map(|dir| dir.join(name));
    std::iter::once(fetched("etcd", name)).chain(on_path).find(|path| path.is_file())
}

fn fetched(folder: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tools").join(folder).join("usr/bin").join(name)
}
