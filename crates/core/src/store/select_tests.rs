//! Tests selections against the model's naive implementation: filters, sorts, limits, projections, `more` and `count`.

use bytes::Bytes;
use proptest::{collection::vec, option, prelude::*};

use super::{
    model::{Pair, select},
    request::{
        Consistency, Projection, RangeRequest, RangeResponse, RevisionFilter, Sort, SortOrder, SortScope, SortTarget,
    },
    select::Selection,
};
use crate::{
    index::{Entry, Lease, ReadAt},
    types::{EncodedKv, Key, KeyRange, LeaseId, Revision, RowId, Version},
};

const TARGETS: [SortTarget; 5] =
    [SortTarget::Key, SortTarget::Version, SortTarget::CreateRevision, SortTarget::ModRevision, SortTarget::Value];
const ORDERS: [SortOrder; 2] = [SortOrder::Ascend, SortOrder::Descend];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn selection_equals_the_model(pairs in pairs(), request in ranges(), leases_known: bool) {
        let expected = select(pairs.clone(), &request, Revision(9));
        prop_assert_eq!(run(&pairs, &request, leases_known), expected, "{:?} of {:?}", request, pairs);
    }
}

#[test]
fn more_is_set_only_if_the_limit_cut_keys_off() {
    let pairs: Vec<Pair> = (0..3).map(|number| pair(number, [number + 2, number + 2, 1], "x", 0)).collect();
    let check = |limit, projection, more, kvs, count| {
        let request = RangeRequest { limit, projection, ..read_of_all_keys() };
        let response = run(&pairs, &request, true);
        assert_eq!((response.more, response.kvs.len(), response.count), (more, kvs, count), "{request:?}");
    };
    check(None, Projection::Full, false, 3, 3);
    check(Some(3), Projection::Full, false, 3, 3);
    check(Some(2), Projection::Full, true, 2, 3);
    check(Some(2), Projection::KeysOnly, true, 2, 3);
    check(Some(2), Projection::CountOnly, false, 0, 3);
}

#[test]
fn count_ignores_the_filter_and_the_limit_applies_after_it() {
    let pairs: Vec<Pair> = (0..4).map(|number| pair(number, [number + 2, number + 2, 1], "x", 0)).collect();
    let filter = RevisionFilter { mod_min: Some(Revision(4)), ..RevisionFilter::default() };
    let response = run(&pairs, &RangeRequest { filter, limit: Some(1), ..read_of_all_keys() }, true);
    assert_eq!((response.kvs, response.more, response.count), (vec![pairs[2].encoded()], true, 4));
    let response = run(&pairs, &RangeRequest { filter, limit: Some(2), ..read_of_all_keys() }, true);
    assert_eq!((response.kvs.len(), response.more, response.count), (2, false, 4));
}

#[test]
fn limited_sorts_are_the_beginning_of_a_stable_sort() {
    const KEYS: i64 = 60;
    // The fields of the keys are in another order than the keys, and several keys have the same.
    let values = ["", "a", "ab", "b"].into_iter().cycle().step_by(3);
    let numbered = (0..KEYS).zip(values);
    let pairs: Vec<Pair> =
        numbered.map(|(n, value)| pair(n, [n * 7 % 11 + 2, n * 5 % 13 + 2, n * 3 % 4 + 1], value, 0)).collect();
    for (target, order) in TARGETS.into_iter().flat_map(|target| ORDERS.map(|order| (target, order))) {
        let sort = Some(Sort { target, order, scope: SortScope::All });
        for limit in (1..=pairs.len() + 1).map(Some).chain([None]) {
            let request = RangeRequest { limit, sort, ..read_of_all_keys() };
            let expected = select(pairs.clone(), &request, Revision(9));
            assert_eq!(run(&pairs, &request, true), expected, "{target:?} {order:?} {limit:?}");
        }
    }
}

/// Runs a selection as the reader and an evaluation do.
fn run(pairs: &[Pair], request: &RangeRequest, leases_known: bool) -> RangeResponse {
    let mut selection = Selection::new(request);
    for pair in pairs {
        let lease = if leases_known { Lease::Known(pair.lease) } else { Lease::InRow };
        selection.offer(&pair.key, Entry { version: pair.version, lease });
    }
    let count = selection.count();
    let stored = |row| pairs.iter().find(|pair| pair.version.row == row).expect("a pair that was offered").encoded();
    let taken = selection.take().into_iter().map(|selected| {
        selected.pair_without_value(request.projection).unwrap_or_else(|| stored(selected.entry.version.row))
    });
    let (mut kvs, more) = selection.finish(taken.collect());
    if request.projection == Projection::KeysOnly {
        kvs.iter_mut().for_each(|kv| *kv = EncodedKv::without_value(kv));
    }
    RangeResponse { revision: Revision(9), kvs, more, count }
}

fn read_of_all_keys() -> RangeRequest {
    RangeRequest {
        range: KeyRange::from_wire(b"\0", b"\0"),
        at: ReadAt::Latest,
        limit: None,
        sort: None,
        filter: RevisionFilter::default(),
        projection: Projection::Full,
        consistency: Consistency::Linearizable,
    }
}

fn pair(number: i64, [modified, created, version]: [i64; 3], value: &str, lease: i64) -> Pair {
    let row = RowId::new(Revision(modified), u32::try_from(number).unwrap());
    Pair {
        key: Key::from(format!("key {number:03}").as_bytes()),
        version: Version { row, create_revision: Revision(created), version },
        value: Bytes::copy_from_slice(value.as_bytes()),
        lease: LeaseId::from_wire(lease),
    }
}

/// Pairs in key order; numbers and values often repeat.
fn pairs() -> impl Strategy<Value = Vec<Pair>> {
    let fields = (2..8_i64, 2..8_i64, 1..4_i64, prop::sample::select(vec!["", "a", "ab", "b"]), 0..3_i64);
    vec(fields, 0..9).prop_map(|fields| {
        let numbered = (0..).zip(fields);
        numbered.map(|(number, (m, c, v, value, lease))| pair(number, [m, c, v], value, lease)).collect()
    })
}

/// Requests with all kinds of selection.
pub(super) fn ranges() -> impl Strategy<Value = RangeRequest> {
    let bound = || option::weighted(0.2, (0..9_i64).prop_map(Revision));
    let filter = (bound(), bound(), bound(), bound()).prop_map(|(mod_min, mod_max, create_min, create_max)| {
        RevisionFilter { mod_min, mod_max, create_min, create_max }
    });
    let projection =
        prop_oneof![3 => Just(Projection::Full), 2 => Just(Projection::KeysOnly), 1 => Just(Projection::CountOnly)];
    let limit = option::of(1..5_usize);
    (filter, projection, limit, option::of(sorts())).prop_map(|(filter, projection, limit, sort)| {
        // The server never combines a filter with `SortScope::FirstKeys`: with a filter, etcd sorts all keys.
        let scope = if filter == RevisionFilter::default() { None } else { Some(SortScope::All) };
        let sort = sort.map(|sort| Sort { scope: scope.unwrap_or(sort.scope), ..sort });
        RangeRequest { limit, sort, filter, projection, ..read_of_all_keys() }
    })
}

fn sorts() -> impl Strategy<Value = Sort> {
    let target = prop::sample::select(TARGETS.to_vec());
    let order = prop::sample::select(ORDERS.to_vec());
    let scope = prop::sample::select(vec![SortScope::All, SortScope::FirstKeys]);
    (target, order, scope).prop_map(|(target, order, scope)| Sort { target, order, scope })
}
