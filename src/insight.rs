//! Figures about a running server, Orlop or etcd, for `orlop top` and the web console.
//!
//! [`Source`] reads a [`Snapshot`] from an endpoint: Maintenance.Status, MemberList, `/metrics` and, from Orlop, the
//! service `orlopb.Insight`. [`Figures`] are computed from two snapshots, which is pure: rates and quantiles are
//! differences of counters and histograms. Figures are serialised as JSON in camelCase; IDs of members and leases are
//! hexadecimal, as etcdctl prints them. A part that the server does not report is `null`, and `missing` has the reason.
//!
//! The server's side of the service is `api::insight`.

mod counters;
mod figures;
mod parts;
mod sizes;
mod source;

pub(crate) use self::source::server_state;
pub use self::{
    counters::{Calls, Counters, Histogram},
    figures::{Figures, Operation, Rates},
    parts::{
        KeyName, Lease, Leases, Member, Members, PairSizes, Phase, ServerState, Sized, Sizes, SlowRequest,
        SlowRequests, Snapshot, WatchedRange, Watchers,
    },
    sizes::SizesReader,
    source::{BEING_COLLECTED, ONLY_ROOT, RootParts, SIZES_WAIT, SIZES_WAIT_MAX, Source, read},
};
