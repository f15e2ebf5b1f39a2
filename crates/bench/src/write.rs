//! The scenarios that write: put, create in a transaction, compare-and-swap.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use tonic::Status;

use super::{
    Bench, Error,
    args::{at_least_one, value_size},
    closed_loop::{Done, Worker},
    connection::Client,
    keyspace::KeySpace,
    report::Report,
};
use orlop_wire::proto::client::etcdserverpb::{
    Compare, PutRequest, RangeRequest, RequestOp, TxnRequest, TxnResponse,
    compare::{CompareResult, CompareTarget, TargetUnion},
    request_op, response_op,
};

#[derive(Debug, clap::Args)]
pub struct Put {
    /// Bytes of each value
    #[arg(long, default_value = "256", value_parser = value_size, value_name = "BYTES")]
    value_size: usize,

    /// Keys that are written again and again, split among the clients
    #[arg(long, default_value = "10000", value_parser = at_least_one, value_name = "N")]
    key_space: usize,
}

impl Put {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        let recorder = bench.drive(putters(bench, bench.plan.clients, self.key_space, self.value_size)).await;
        Ok(bench.report("put", self.value_size, &recorder, BTreeMap::new()))
    }
}

/// So many clients, each of which puts its share of the keys again and again.
pub fn putters(bench: &Bench, clients: usize, key_space: usize, value_size: usize) -> Vec<impl Worker> {
    let value = filler(value_size);
    let putter = |number| Putter {
        client: bench.pool.client(number),
        keys: OwnKeys::new(&bench.keys, number, Some(key_space.div_ceil(clients))),
        value: value.clone(),
    };
    (0..clients).map(putter).collect()
}

#[derive(Debug, clap::Args)]
pub struct CreateTxn {
    /// Bytes of each value
    #[arg(long, default_value = "256", value_parser = value_size, value_name = "BYTES")]
    value_size: usize,
}

impl CreateTxn {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        let value = filler(self.value_size);
        let creator = |number| Creator {
            client: bench.pool.client(number),
            keys: OwnKeys::new(&bench.keys, number, None),
            value: value.clone(),
        };
        let recorder = bench.drive(bench.workers(creator)).await;
        Ok(bench.report("create-txn", self.value_size, &recorder, BTreeMap::new()))
    }
}

#[derive(Debug, clap::Args)]
pub struct Update {
    /// Bytes of each value
    #[arg(long, default_value = "256", value_parser = value_size, value_name = "BYTES")]
    value_size: usize,

    /// Keys that are updated again and again, split among the clients; the first round creates them
    #[arg(long, default_value = "1000", value_parser = at_least_one, value_name = "N")]
    key_space: usize,
}

impl Update {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        let value = filler(self.value_size);
        let updater = |number| Updater {
            swap: CompareAndSwap::new(bench.pool.client(number)),
            keys: OwnKeys::new(&bench.keys, number, Some(bench.share(self.key_space))),
            value: value.clone(),
        };
        let recorder = bench.drive(bench.workers(updater)).await;
        let facts = BTreeMap::from([("retries", recorder.done.retries as f64)]);
        Ok(bench.report("update", self.value_size, &recorder, facts))
    }
}

pub fn filler(len: usize) -> Bytes {
    vec![b'x'; len].into()
}

/// A client's keys in turn.
pub struct OwnKeys {
    keys: Arc<KeySpace>,
    client: usize,
    next: u64,
    /// Keys before the first comes again.
    span: u64,
}

impl OwnKeys {
    /// `share` keys, one at least; new keys for ever without.
    pub fn new(keys: &Arc<KeySpace>, client: usize, share: Option<usize>) -> Self {
        let span = share.map_or(u64::MAX, |keys| keys as u64);
        Self { keys: Arc::clone(keys), client, next: 0, span }
    }

    pub fn take(&mut self) -> Bytes {
        let sequence = self.next;
        self.next = (sequence + 1) % self.span;
        self.keys.key(self.client, sequence)
    }
}

struct Putter {
    client: Client,
    keys: OwnKeys,
    value: Bytes,
}

impl Worker for Putter {
    async fn step(&mut self, _stamp: u64) -> Result<Done, Status> {
        let request = PutRequest { key: self.keys.take(), value: self.value.clone(), ..PutRequest::default() };
        self.client.kv.put(request).await?;
        Ok(Done::default())
    }

    fn client(&self) -> &Client {
        &self.client
    }
}

struct Creator {
    client: Client,
    keys: OwnKeys,
    value: Bytes,
}

impl Worker for Creator {
    async fn step(&mut self, _stamp: u64) -> Result<Done, Status> {
        let request = put_if_unchanged(self.keys.take(), 0, self.value.clone());
        let answer = self.client.kv.txn(request).await?.into_inner();
        if answer.succeeded { Ok(Done::default()) } else { Err(Status::already_exists("the key to create exists")) }
    }

    fn client(&self) -> &Client {
        &self.client
    }
}

struct Updater {
    swap: CompareAndSwap,
    keys: OwnKeys,
    value: Bytes,
}

impl Worker for Updater {
    async fn step(&mut self, _stamp: u64) -> Result<Done, Status> {
        self.swap.update(self.keys.take(), self.value.clone()).await
    }

    fn client(&self) -> &Client {
        &self.swap.client
    }
}

/// Updates keys, each in a transaction that compares mod_revision with the last one seen.
pub struct CompareAndSwap {
    pub client: Client,
    /// As last seen; a key that was not written yet is absent.
    mod_revisions: BTreeMap<Bytes, i64>,
}

impl CompareAndSwap {
    pub fn new(client: Client) -> Self {
        Self { client, mod_revisions: BTreeMap::new() }
    }

    /// Tries again with what it finds until it succeeds; creates a key that is not there.
    pub async fn update(&mut self, key: Bytes, value: Bytes) -> Result<Done, Status> {
        let mut expected = self.mod_revisions.get(&key).copied().unwrap_or_default();
        let mut done = Done::default();
        loop {
            let mut request = put_if_unchanged(key.clone(), expected, value.clone());
            let range = RangeRequest { key: key.clone(), ..RangeRequest::default() };
            request.failure.push(RequestOp { request: Some(request_op::Request::RequestRange(range)) });
            let answer = self.client.kv.txn(request).await?.into_inner();
            if answer.succeeded {
                let revision = answer.header.map_or(0, |header| header.revision);
                self.mod_revisions.insert(key, revision);
                return Ok(done);
            }
            expected = found_mod_revision(&answer);
            done.retries += 1;
        }
    }
}

/// A put under the condition that the key still has this mod revision, 0 for a key that does not exist.
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

/// The key's mod revision, from the range of a transaction that failed; 0 when there is no such key.
fn found_mod_revision(answer: &TxnResponse) -> i64 {
    let found = answer.responses.first().and_then(|op| op.response.as_ref());
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
    fn own_keys_come_again_after_the_span() {
        let keys = Arc::new(KeySpace::new("p/".to_owned()));
        let mut own = OwnKeys { keys, client: 3, next: 0, span: 2 };
        let taken = [own.take(), own.take(), own.take()];
        assert_eq!(taken, ["p/000003/0000000000", "p/000003/0000000001", "p/000003/0000000000"].map(Bytes::from));
    }

    #[test]
    fn failed_transaction_tells_the_mod_revision() {
        let answer = |kvs| {
            let range = RangeResponse { kvs, ..RangeResponse::default() };
            let response = Some(response_op::Response::ResponseRange(range));
            TxnResponse { responses: vec![ResponseOp { response }], ..TxnResponse::default() }
        };
        let kv = KeyValue { mod_revision: 42, ..KeyValue::default() };
        assert_eq!(found_mod_revision(&answer(vec![kv])), 42);
        assert_eq!(found_mod_revision(&answer(Vec::new())), 0);
        assert_eq!(found_mod_revision(&TxnResponse::default()), 0);
    }
}
