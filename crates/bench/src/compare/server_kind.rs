//! The kinds of servers that are compared.

use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ServerKind {
    Etcd,
    Sqlite,
    Postgres,
}

impl ServerKind {
    /// Returns the maximum number of instances.
    pub fn instances_max(self) -> usize {
        match self {
            Self::Etcd | Self::Postgres => usize::MAX,
            Self::Sqlite => 1,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::Sqlite => "Orlop, SQLite",
            Self::Postgres => "Orlop, Postgres",
        }
    }
}
