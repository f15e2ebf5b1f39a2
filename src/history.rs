//! `orlop history`, `diff`, `get` and `rewind`: the past of a store.
//!
//! Each command works on a running server (`--endpoints`) or on a database alone (`--data-dir` or
//! `--datastore-endpoint`), which a server in this process then serves at a private socket ([`source`]). Either way the
//! commands read with the service History of Orlop and write with etcd's KV.

mod compare;
mod get;
mod rewind;
mod selection;
mod source;
mod text;
mod time;
mod versions;

use std::process::ExitCode;

pub use self::{
    compare::{DiffArgs, run as diff},
    get::{GetArgs, run as get},
    rewind::{RewindArgs, run as rewind},
    versions::{HistoryArgs, run as history},
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// How a command ended, for scripts. An error has exit status 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Exit status 0.
    Success,
    /// Exit status 1: nothing was found, or there is a difference, or a conflict, as the command's help says.
    Otherwise,
}

impl From<Ending> for ExitCode {
    fn from(ending: Ending) -> Self {
        match ending {
            Ending::Success => Self::SUCCESS,
            Ending::Otherwise => Self::from(1),
        }
    }
}
