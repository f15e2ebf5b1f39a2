//! The store: etcd's data model over a [`Log`](crate::log::Log).
//!
//! ```text
//! put, delete, txn,  ─▶ queue ─▶ writer ─▶ log.append ─▶ applier ─▶ index, value cache, leases, watch hub
//! grant, revoke,                 (batch)                   │
//! compact                                                  └─▶ responses
//! range ─▶ reader ─▶ index, value cache, log.values
//! ```
//!
//! [`Store`] is the handle that the server uses. One writer task evaluates write requests in batches ([`txn`], pure)
//! and commits each batch with one append. A request is answered after its commit is durable and applied to the index
//! and the watchers. Reads run concurrently on the index.
//!
//! If several instances share the log, a linearizable read first asks the database for the log's position
//! ([`Store::confirm`]; concurrent reads share one query). [`catch_up`] applies the changes that other instances
//! append.
//!
//! Lock order: the hub, then the index, then the lease table, then alarms or users and roles. No lock is held across an
//! await. docs/explanation/internals.md lists what threads share.

mod applier;
mod authority;
mod auto_compact;
pub mod batch;
mod busy_poll;
mod catch_up;
pub mod children;
mod compactor;
mod defragment;
mod error;
mod expiry;
mod handle;
pub mod hash;
mod heartbeat;
mod history;
mod leases;
mod members;
mod open;
mod page_check;
mod permissions;
mod queries;
mod queue;
mod quota;
mod reader;
mod rebase;
mod replay;
mod replication;
pub mod request;
mod saved_index;
mod select;
mod shared;
pub mod shared_query;
pub mod sizes;
mod space;
mod state;
pub mod tasks;
mod timing;
pub mod txn;
pub mod values;
mod write_outage;
mod write_request;
mod writer;

pub use self::{
    auto_compact::AutoCompaction,
    compactor::CompactionRate,
    error::{Error, Result},
    handle::Store,
    history::{
        FoundMoment, FrozenStore, HistoryKeeper, HistorySettings, HistoryState, Keep, PastChange, PastChanges,
        PastError, PastPairs, delete_rows,
    },
    open::{Role, Settings},
    reader::RangePieces,
    replay::{ReadProgress, Replayed, replay},
    saved_index::Saving,
    shared::Identity,
    space::{ROW_BYTES, quota_of},
    timing::SlowThresholds,
};

#[cfg(test)]
mod batch_tests;
#[cfg(test)]
mod compactor_tests;
#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod generators;
#[cfg(test)]
#[path = "../tests/model/mod.rs"]
mod model;
#[cfg(all(test, feature = "shuttle"))]
mod races;
#[cfg(test)]
mod rebase_tests;
#[cfg(test)]
mod select_tests;
#[cfg(test)]
mod txn_tests;
