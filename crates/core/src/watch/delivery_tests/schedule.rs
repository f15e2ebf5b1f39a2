//! Random schedules of the operations of clients and the store.

use proptest::{collection::vec, option, prelude::*, sample::select};

use crate::{types::KeyRange, watch::Flavor};

pub(super) const KEYS: [&str; 5] = ["a", "a\0", "ab", "b", "c"];

pub(super) const STREAMS: usize = 2;

#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Transactions of one append. Each puts keys, or deletes them if they exist. A watch may be created after the
    /// append began and before its changes are published.
    Publish {
        txns: Vec<Vec<(usize, bool)>>,
        concurrent: Option<(usize, Create)>,
    },
    Stream(usize, Action),
    Compact {
        back: i64,
        purge: bool,
    },
}

#[derive(Clone, Debug)]
pub(super) enum Action {
    Create(Create),
    /// A watch, by its position among the created ones.
    Cancel(usize),
    Progress,
    Tick,
    Read(usize),
    HandleNotifications,
    /// Advances a watch. The given operations run before and after its read of the log, and the call may be canceled
    /// before the read.
    Advance {
        concurrent: [Vec<Concurrent>; 2],
        cancel_before_read: bool,
    },
}

/// Operations of other tasks while a session waits for the log.
#[derive(Clone, Debug)]
pub(super) enum Concurrent {
    Publish(Vec<(usize, bool)>),
    Compact { back: i64, purge: bool },
    Read(usize),
}

#[derive(Clone, Debug)]
pub(super) struct Create {
    pub(super) id: Option<i64>,
    pub(super) range: KeyRange,
    /// The distance of the start revision below the head.
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
fn txns() -> impl Strategy<Value = Vec<(usize, bool)>> {
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
