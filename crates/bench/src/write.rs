//! The scenarios that write: `put`, `create-txn` and `update`.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use tonic::Status;

use crate::{
    args::{parse_keys, parse_value_size},
    bench::Bench,
    closed_loop::{OpCounts, Worker},
    connection::Client,
    error::Error,
    keyspace::{KeySpace, filler_value},
    report::Report,
};
use orlop_wire::proto::client::etcdserverpb::{
    Compare, PutRequest, RangeRequest, RequestOp, TxnRequest, TxnResponse,
    compare::{CompareResult, CompareTarget, TargetUnion},
    request_op, response_op,
};

#[derive(Debug, clap::Args)]
pub struct Put {
    /// Size of each value in bytes
    #[arg(long, default_value = "256", value_parser = parse_value_size, value_name = "BYTES")]
    value_size: usize,

    /// Number of keys, divided among the clients and written repeatedly
    #[arg(long, default_value = "10000", value_parser = parse_keys, value_name = "N")]
    key_space: usize,
}

impl Put {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        let recorder = bench.drive(putters(bench, bench.plan.clients, self.key_space, self.value_size)).await;
        Ok(bench.report("put", self.value_size, &recorder, BTreeMap::new()))
    }
}

/// Returns `clients` workers, each of which repeatedly puts its share of the keys.
pub fn putters(bench: &Bench, clients: usize, key_space: usize, value_size: usize) -> Vec<impl Worker> {
    let value = filler_value(value_size);
    let putter = |number| Putter {
        client: bench.pool.client(number),
        keys: KeyCycle::new(&bench.keys, number, Some(key_space.div_ceil(clients))),
        value: value.clone(),
    };
    (0..clients).map(putter).collect()
}

#[derive(Debug, clap::Args)]
pub struct CreateTxn {
    /// Size of each value in bytes
    #[arg(long, default_value = "256", value_parser = parse_value_size, value_name = "BYTES")]
    value_size: usize,
}

impl CreateTxn {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        let value = filler_value(self.value_size);
        let creator = |number| Creator {
            client: bench.pool.client(number),
            keys: KeyCycle::new(&bench.keys, number, None),
            value: value.clone(),
        };
        let recorder = bench.drive(bench.workers(creator)).await;
        Ok(bench.report("create-txn", self.value_size, &recorder, BTreeMap::new()))
    }
}

#[derive(Debug, clap::Args)]
pub struct Update {
    /// Size of each value in bytes
    #[arg(long, default_value = "256", value_parser = parse_value_size, value_name = "BYTES")]
    value_size: usize,

    /// Number of keys, divided among the clients and updated repeatedly; the first update of a key creates it
    #[arg(long, default_value = "1000", value_parser = parse_keys, value_name = "N")]
    key_space: usize,
}

impl Update {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        let value = filler_value(self.value_size);
        let updater = |number| Updater {
            swap: CompareAndSwap::new(bench.pool.client(number)),
            keys: KeyCycle::new(&bench.keys, number, Some(bench.keys_per_client(self.key_space))),
            value: value.clone(),
        };
        let recorder = bench.drive(bench.workers(updater)).await;
        let extra = BTreeMap::from([("retries", recorder.counts.retries as f64)]);
        Ok(bench.report("update", self.value_size, &recorder, extra))
    }
}

/// Iterates over the keys of one client repeatedly.
pub struct KeyCycle {
    keys: Arc<KeySpace>,
    client: usize,
    next: u64,
    /// Number of keys in a cycle.
    len: u64,
}

impl KeyCycle {
    /// Cycles over `len` keys; `len` must not be 0. Without `len`, every key is new.
    pub fn new(keys: &Arc<KeySpace>, client: usize, len: Option<usize>) -> Self {
        let len = len.map_or(u64::MAX, |keys| keys as u64);
        Self { keys: Arc::clone(keys), client, next: 0, len }
    }

    pub fn next_key(&mut self) -> Bytes {
        let sequence = self.next;
        self.next = (sequence + 1) % self.len;
        self.keys.key(self.client, sequence)
    }
}

struct Putter {
    client: Client,
    keys: KeyCycle,
    value: Bytes,
}

impl Worker for Putter {
    async fn step(&mut self, _started: u64) -> Result<OpCounts, Status> {
        let request = PutRequest { key: self.keys.next_key(), value: self.value.clone(), ..PutRequest::default() };
        self.client.kv.put(request).await?;
        Ok(OpCounts::default())
    }

    fn client(&self) -> &Client {
        &self.client
    }
}

struct Creator {
    client: Client,
    keys: KeyCycle,
    value: Bytes,
}

impl Worker for Creator {
    async fn step(&mut self, _started: u64) -> Result<OpCounts, Status> {
        let request = put_if_unchanged(self.keys.next_key(), 0, self.value.clone());
        let response = self.client.kv.txn(request).await?.into_inner();
        if response.succeeded { Ok(OpCounts::default()) } else { Err(Status::already_exists("the key already exists")) }
    }

    fn client(&self) -> &Client {
        &self.client
    }
}

struct Updater {
    swap: CompareAndSwap,
    keys: KeyCycle,
    value: Bytes,
}

impl Worker for Updater {
    async fn step(&mut self, _started: u64) -> Result<OpCounts, Status> {
        self.swap.update(self.keys.next_key(), self.value.clone()).await
    }

    fn client(&self) -> &Client {
        &self.swap.client
    }
}

/// Updates keys, each in a transaction that compares the mod_revision with the last known one.
pub struct CompareAndSwap {
    pub client: Client,
    /// The last known mod revisions. A key that does not exist yet is absent.
    mod_revisions: BTreeMap<Bytes, i64>,
}

impl CompareAndSwap {
    pub fn new(client: Client) -> Self {
        Self { client, mod_revisions: BTreeMap::new() }
    }

    /// Records the mod revision of a key that another client has written.
    pub fn learn(&mut self, key: Bytes, mod_revision: i64) {
        self.mod_revisions.insert(key, mod_revision);
    }

    /// Updates or creates the key. If the comparison fails, repeats with the current mod_revision until it succeeds.
    pub async fn update(&mut self, key: Bytes, value: Bytes) -> Result<OpCounts, Status> {
        let mut expected = self.mod_revisions.get(&key).copied().unwrap_or_default();
        let mut counts = OpCounts::default();
        loop {
            let request = swap(key.clone(), expected, value.clone());
            match swap_result(&self.client.kv.txn(request).await?.into_inner()) {
                Ok(revision) => {
                    self.mod_revisions.insert(key, revision);
                    return Ok(counts);
                }
                Err(revision) => expected = revision,
            }
            counts.retries += 1;
        }
    }
}

/// Returns kube-apiserver's update: a put on the condition that the key has this mod revision, otherwise a read.
pub fn swap(key: Bytes, mod_revision: i64, value: Bytes) -> TxnRequest {
    let range = RangeRequest { key: key.clone(), ..RangeRequest::default() };
    let mut request = put_if_unchanged(key, mod_revision, value);
    request.failure.push(RequestOp { request: Some(request_op::Request::RequestRange(range)) });
    request
}

/// Returns the key's new mod revision; `Err` with its current one if it was not the expected one.
pub fn swap_result(response: &TxnResponse) -> Result<i64, i64> {
    if response.succeeded {
        return Ok(response.header.as_ref().map_or(0, |header| header.revision));
    }
    Err(found_mod_revision(response))
}

/// Returns a put on the condition that the key has this mod revision; 0 means that the key does not exist.
fn put_if_unchanged(key: Bytes, mod_revision: i64, value: Bytes) -> TxnRequest {
    let unchanged = Compare {
        result: CompareResult::Equal.into(),
        target: CompareTarget::Mod.into(),
        key: key.clone(),
        range_end: Bytes::new(),
        target_union: Some(TargetUnion::ModRevision(mod_revision)),
    };
    let put = PutRequest { key, value, ..PutRequest::default() };
    TxnRequest {
        compare: vec![unchanged],
        success: vec![RequestOp { request: Some(request_op::Request::RequestPut(put)) }],
        failure: Vec::new(),
    }
}

/// Returns the key's mod revision from the range in a failed transaction; 0 if the key does not exist.
fn found_mod_revision(response: &TxnResponse) -> i64 {
    let found = response.responses.first().and_then(|op| op.response.as_ref());
    let Some(response_op::Response::ResponseRange(range)) = found else { return 0 };
    range.kvs.first().map_or(0, |kv| kv.mod_revision)
}

#[cfg(test)]
mod tests {
    use super::*;
    use orlop_wire::proto::client::{
        etcdserverpb::{RangeResponse, ResponseOp},
        mvccpb::KeyValue,
    };

    #[test]
    fn keys_repeat_after_a_cycle() {
        let keys = Arc::new(KeySpace::new("p/".to_owned()));
        let mut cycle = KeyCycle { keys, client: 3, next: 0, len: 2 };
        let taken = [cycle.next_key(), cycle.next_key(), cycle.next_key()];
        assert_eq!(taken, ["p/000003/0000000000", "p/000003/0000000001", "p/000003/0000000000"].map(Bytes::from));
    }

    #[test]
    fn failed_transaction_returns_the_mod_revision() {
        let response = |kvs| {
            let range = RangeResponse { kvs, ..RangeResponse::default() };
            let op = Some(response_op::Response::ResponseRange(range));
            TxnResponse { responses: vec![ResponseOp { response: op }], ..TxnResponse::default() }
        };
        let kv = KeyValue { mod_revision: 42, ..KeyValue::default() };
        assert_eq!(found_mod_revision(&response(vec![kv])), 42);
        assert_eq!(found_mod_revision(&response(Vec::new())), 0);
        assert_eq!(found_mod_revision(&TxnResponse::default()), 0);
    }
}
