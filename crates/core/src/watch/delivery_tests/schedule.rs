//! Random schedules of the operations of clients and the store.

use proptest::{collection::vec, option, prelude::*, sample::select};

use crate::{types::KeyRange, watch::Flavor};

pub(super) const KEYS: [&str; 5] = ["a", "a\0", "ab", "b", "c"];

pub(super) const STREAMS: usize = 2;

/// The changes of a transaction: an index in [`KEYS`], and whether to put the key. If not, the key is deleted, or put
/// if it does not exist.
pub(super) type Txn = Vec<(usize, bool)>;

#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Commits transactions in one append. `concurrent` is a watch that is created on a stream before the changes are
    /// published.
    Publish {
        txns: Vec<Txn>,
        concurrent: Option<(usize, Create)>,
    },
    Stream(usize, Action),
    /// Compacts at the revision `back` below the head. `purge` deletes the compacted rows.
    Compact {
        back: i64,
        purge: bool,
    },
}

#[derive(Clone, Debug)]
pub(super) enum Action {
    Create(Create),
    /// Cancels a watch. The number selects one of the ids that may be in use.
    Cancel(usize),
    Progress,
    Tick,
    /// Reads at most this number of messages.
    Read(usize),
    HandleNotifications,
    /// Advances a watch. The two lists of operations run before and after its read of the log. The call may be canceled
    /// before the read.
    Advance {
        concurrent: [Vec<Concurrent>; 2],
        cancel_before_read: bool,
    },
}

/// Operations of other tasks while a session waits for the log.
#[derive(Clone, Debug)]
pub(super) enum Concurrent {
    Publish(Txn),
    Compact { back: i64, purge: bool },
    Read(usize),
}

#[derive(Clone, Debug)]
pub(super) struct Create {
    pub(super) id: Option<i64>,
    pub(super) range: KeyRange,
    /// The distance of the start revision below the head; negative: above the head. `None`: no start revision.
    pub(super) back: Option<i64>,
    pub(super) flavor: Flavor,
    pub(super) fragment: Option<usize>,
    pub(super) progress_notify: bool,
}

pub(super) fn steps() -> impl Strategy<Value = Step> {
    let stream = || 0..STREAMS;
    let concurrent = option::weighted(0.1, (stream(), creates()));
    prop_oneof![
        6 => (vec(txns(), 1..4), concurrent).prop_map(|(txns, concurrent)| Step::Publish { txns, concurrent }),
        16 => (stream(), actions()).prop_map(|(stream, action)| Step::Stream(stream, action)),
        1 => (0..6_i64, any::<bool>()).prop_map(|(back, purge)| Step::Compact { back, purge }),
    ]
}

fn actions() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => creates().prop_map(Action::Create),
        1 => (0..8_usize).prop_map(Action::Cancel),
        2 => Just(Action::Progress),
        1 => Just(Action::Tick),
        3 => (1..4_usize).prop_map(Action::Read),
        1 => Just(Action::Read(usize::MAX)),
        3 => Just(Action::HandleNotifications),
        5 => ([vec(concurrent(), 0..2), vec(concurrent(), 0..3)], prop::bool::weighted(0.1))
            .prop_map(|(concurrent, cancel_before_read)| Action::Advance { concurrent, cancel_before_read }),
    ]
}

fn concurrent() -> impl Strategy<Value = Concurrent> {
    prop_oneof![
        3 => txns().prop_map(Concurrent::Publish),
        1 => (0..6_i64, any::<bool>()).prop_map(|(back, purge)| Concurrent::Compact { back, purge }),
        2 => (1..4_usize).prop_map(Concurrent::Read),
    ]
}

/// Changes of distinct keys.
fn txns() -> impl Strategy<Value = Txn> {
    vec((0..KEYS.len(), prop::bool::weighted(0.6)), 1..4).prop_map(|mut txn| {
        let mut seen = [false; KEYS.len()];
        txn.retain(|(key, _)| !std::mem::replace(&mut seen[*key], true));
        txn
    })
}

fn creates() -> impl Strategy<Value = Create> {
    let range =
        select(vec![("a", ""), ("b", ""), ("a", "b"), ("a\0", "c"), ("b", "\0"), ("\0", "\0"), ("never written", "")]);
    let back = prop_oneof![3 => Just(None), 3 => (-3..1_i64).prop_map(Some), 4 => (1..12_i64).prop_map(Some)];
    let flavor = prop_oneof![
        2 => Just((true, true)),
        1 => Just((true, false)),
        1 => Just((false, true)),
    ];
    let id = option::weighted(0.4, 1..4_i64);
    let fragment = option::weighted(0.2, select(vec![1_usize, 60, 150]));
    (id, range, back, (flavor, any::<bool>()), fragment, any::<bool>()).prop_map(
        |(id, (key, end), back, ((puts, deletes), prev_kv), fragment, progress_notify)| Create {
            id,
            range: KeyRange::from_wire(key.as_bytes(), end.as_bytes()),
            back,
            flavor: Flavor { prev_kv, puts, deletes },
            fragment,
            progress_notify,
        },
    )
}
