//! Inputs of the benchmarks: keys below `/registry/pods/`, named as kube-apiserver names them. They are the same in
//! every run.

use std::{
    collections::HashMap,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http_body::Body as _;

use orlop::api::grpc::response_body::ResponseBody;
use orlop_core::{
    index::{CompactionCursor, TreeIndex},
    lease,
    overload::ReadMemory,
    store::{
        batch::Batch,
        request::{Compare, CompareTarget, Op, PutLease, PutRequest, PutValue, Relation, TxnRequest},
        txn::Evaluation,
        values::ValueCache,
    },
    types::{Change, ChangeKind, EncodedKv, Key, KeyRange, Revision, RowId, Version},
    watch::intervals::Intervals,
};
use orlop_wire::proto::server::etcdserverpb as pb;

const KEYS_PER_NAMESPACE: usize = 1_000;
/// Distance between keys that are visited one after the other, so that visits have no cache locality. A prime, so that
/// all keys are visited before one is repeated.
const STRIDE: usize = 7_919;

fn key(number: usize) -> Key {
    let (namespace, pod) = (number / KEYS_PER_NAMESPACE, number % KEYS_PER_NAMESPACE);
    Key::from(format!("/registry/pods/namespace-{namespace:05}/pod-{pod:03}").as_bytes())
}

/// Returns `count` numbers of keys, spread over a store of `keys` keys.
fn scattered(keys: usize, count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |number| number * STRIDE % keys)
}

fn put(key: Key, revision: i64, create_revision: Revision, version: i64, value: &[u8]) -> Change {
    let row = RowId::new(Revision(revision), 0);
    let kind = ChangeKind::put(EncodedKv::new(&key, Version { row, create_revision, version }, value, None));
    Change { row, key, kind, prev: None, prev_lease: None }
}

/// An index of keys with one version each.
#[derive(Clone)]
pub struct Index {
    index: TreeIndex,
    keys: usize,
}

impl Index {
    pub fn new(keys: usize) -> Self {
        let mut index = TreeIndex::new();
        for number in 0..keys {
            let revision = Revision(number as i64 + 2);
            index.apply(&put(key(number), revision.0, revision, 1, b""));
        }
        Self { index, keys }
    }

    /// Returns puts of `count` existing keys.
    pub fn puts(&self, count: usize) -> Vec<Change> {
        let head = self.index.head().0;
        let change = |(place, number): (usize, usize)| {
            put(key(number), head + 1 + place as i64, Revision(number as i64 + 2), 2, b"")
        };
        scattered(self.keys, count).enumerate().map(change).collect()
    }

    pub fn apply(&mut self, changes: &[Change]) {
        changes.iter().for_each(|change| self.index.apply(change));
    }

    /// Returns `count` existing keys.
    pub fn wanted(&self, count: usize) -> Vec<Key> {
        scattered(self.keys, count).map(key).collect()
    }

    /// Looks up each of the keys. Returns the number of live ones.
    pub fn get(&self, keys: &[Key]) -> usize {
        keys.iter().filter(|key| self.index.get(key, self.index.head()).is_some()).count()
    }

    /// Returns the number of keys in the first `namespaces` namespaces.
    pub fn range(&self, namespaces: usize) -> usize {
        let range = KeyRange::from_wire(&key(0), &key(namespaces * KEYS_PER_NAMESPACE));
        self.index.range(range.bounds(), self.index.head()).count()
    }

    /// Removes all versions but the newest. Returns the number removed.
    pub fn compact(&mut self) -> usize {
        self.index.begin_compaction(self.index.head());
        let (mut cursor, mut removed) = (CompactionCursor::default(), Vec::new());
        while self.index.compact_step(&mut cursor, usize::MAX, &mut removed) {}
        removed.len()
    }
}

/// A store's state, and transactions that update a key if it has not changed, as kube-apiserver sends them.
pub struct Transactions {
    index: Index,
    leases: lease::Table,
    values: ValueCache,
    requests: Vec<TxnRequest>,
}

impl Transactions {
    pub fn new(keys: usize, count: usize) -> Self {
        let update = |number| {
            let (key, value) = (key(number), Bytes::from_static(&[b'x'; 512]));
            let unchanged = Compare {
                range: KeyRange::Single(key.clone()),
                relation: Relation::Equal,
                target: CompareTarget::ModRevision(number as i64 + 2),
            };
            let key = Bytes::copy_from_slice(&key);
            let put = PutRequest { key, value: PutValue::New(value), lease: PutLease::Set(None), prev_kv: false };
            TxnRequest { compares: vec![unchanged], success: vec![Op::Put(put)], failure: Vec::new() }
        };
        Self {
            index: Index::new(keys),
            leases: lease::Table::default(),
            values: ValueCache::new(0),
            requests: scattered(keys, count).map(update).collect(),
        }
    }

    /// Evaluates the updates in one batch. Returns the number that succeed.
    pub fn evaluate(&self) -> usize {
        let fetched = HashMap::new();
        let memory = ReadMemory::new(0);
        let mut batch = Batch::new(self.index.index.head());
        let mut succeeded = 0;
        for request in &self.requests {
            let (index, leases, values) = (&self.index.index, &self.leases, &self.values);
            let evaluation = Evaluation::new(index, leases, values, &memory, &fetched, &mut batch).txn(request);
            succeeded += usize::from(evaluation.is_ok_and(|response| response.succeeded));
        }
        succeeded
    }
}

/// The response to a list.
#[derive(Clone)]
pub struct Answer(pb::RangeResponse);

impl Answer {
    pub fn new(pairs: usize, value_bytes: usize) -> Self {
        let value = vec![b'x'; value_bytes];
        let kvs = (0..pairs).map(|number| {
            let revision = number as i64 + 2;
            match put(key(number), revision, Revision(revision), 1, &value).kind {
                ChangeKind::Put { kv, .. } => kv.into_bytes(),
                ChangeKind::Delete => Bytes::new(),
            }
        });
        Self(pb::RangeResponse { kvs: kvs.collect(), count: pairs as i64, ..Default::default() })
    }

    /// Encodes the response and reads all of it; returns whether both succeeded.
    pub fn encode(self) -> bool {
        let Ok(mut body) = ResponseBody::new(self.0) else { return false };
        let mut context = Context::from_waker(Waker::noop());
        loop {
            match Pin::new(&mut body).poll_frame(&mut context) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(None) => return true,
                Poll::Ready(Some(Err(_))) | Poll::Pending => return false,
            }
        }
    }
}

/// Watchers: one on each key, and one on each namespace.
pub struct Watchers {
    intervals: Intervals<usize>,
    keys: usize,
}

impl Watchers {
    pub fn new(watchers: usize) -> Self {
        let mut intervals = Intervals::new();
        for number in 0..watchers {
            *intervals.get_or_insert_with(&KeyRange::Single(key(number)), || 0) += 1;
        }
        for namespace in 0..watchers.div_ceil(KEYS_PER_NAMESPACE) {
            let first = namespace * KEYS_PER_NAMESPACE;
            let range = KeyRange::from_wire(&key(first), &key(first + KEYS_PER_NAMESPACE));
            *intervals.get_or_insert_with(&range, || 0) += 1;
        }
        Self { intervals, keys: watchers }
    }

    /// Returns `count` watched keys.
    pub fn changed(&self, count: usize) -> Vec<Key> {
        scattered(self.keys, count).map(key).collect()
    }

    /// Returns the number of watchers of these keys.
    pub fn visit(&self, keys: &[Key]) -> usize {
        let mut found = 0;
        for key in keys {
            self.intervals.visit(key, &mut |count| found += count);
        }
        found
    }
}
