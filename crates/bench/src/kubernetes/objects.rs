//! Node and Lease objects under the keys that kube-apiserver uses, and the transaction that renews a lease.

use std::sync::{
    Arc,
    atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
};

use bytes::Bytes;
use tonic::Status;

use super::LEASE_BYTES;
use crate::{
    bench::Bench,
    closed_loop::{Limits, OpCounts, Run, Worker},
    connection::Client,
    error::Error,
    keyspace::{incompressible_value, setup_request},
    progress,
    write::{swap, swap_result},
};
use orlop_wire::proto::client::etcdserverpb::{PutRequest, RangeRequest, RequestOp, TxnRequest, request_op};

/// Number of concurrent transactions that create objects.
const CREATORS: usize = 32;
/// Maximum number of puts in a transaction that creates objects: etcd's default limit.
const PUTS_MAX: usize = 128;
/// Maximum size of the values in a transaction that creates objects. etcd accepts 1.5 MiB by default.
const CREATED_BYTES_MAX: usize = 1 << 20;
/// Number of leases per page when existing leases are read.
const PAGE_LEASES: i64 = 10_000;

/// The node and the lease object of each node.
pub struct Objects {
    prefix: String,
    /// The last known mod revision of each lease.
    lease_revisions: Vec<AtomicI64>,
}

/// The kinds of objects, in the order in which they are created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Lease,
    Node,
}

impl Objects {
    pub fn new(prefix: String, nodes: usize) -> Self {
        Self { prefix, lease_revisions: (0..nodes).map(|_| AtomicI64::new(0)).collect() }
    }

    pub fn nodes(&self) -> usize {
        self.lease_revisions.len()
    }

    fn folder(&self, kind: Kind) -> String {
        match kind {
            Kind::Lease => format!("{}leases/kube-node-lease/", self.prefix),
            Kind::Node => format!("{}minions/", self.prefix),
        }
    }

    fn key(&self, kind: Kind, node: usize) -> Bytes {
        format!("{}node-{node:07}", self.folder(kind)).into()
    }

    /// Returns the range [start, end) of all leases.
    pub fn leases(&self) -> (Bytes, Bytes) {
        let folder = self.folder(Kind::Lease);
        // "0" follows "/".
        let end = format!("{}0", folder.trim_end_matches('/'));
        (folder.into(), end.into())
    }

    /// Creates all objects, several in one transaction. Values do not compress, because Postgres would compress them.
    pub async fn create(self: &Arc<Self>, bench: &Bench, node_bytes: usize) -> Result<(), Error> {
        for (kind, bytes, what) in [(Kind::Lease, LEASE_BYTES, "leases"), (Kind::Node, node_bytes, "nodes")] {
            let puts = (CREATED_BYTES_MAX / bytes.max(1)).clamp(1, PUTS_MAX);
            let created = Arc::new(AtomicU64::new(0));
            let next = Arc::new(AtomicU64::new(0));
            let creator = |number| Creator {
                client: bench.pool.client(number),
                objects: Arc::clone(self),
                kind,
                value: incompressible_value(bytes),
                puts,
                next: Arc::clone(&next),
                created: Arc::clone(&created),
            };
            let total = Some(self.nodes().div_ceil(puts) as u64);
            let limits = Limits { total, duration: None, warmup: std::time::Duration::ZERO };
            let run = Run::begin(limits);
            let driven = run.drive((0..CREATORS).map(creator).collect(), &bench.interrupt);
            if bench.shows_progress {
                progress::show_count(what, self.nodes() as u64, &created, driven).await;
            } else {
                driven.await;
            }
            if let Some(error) = run.finish().first_error {
                return Err(failed("creating nodes and leases", bench, error));
            }
            if bench.interrupt.is_set() {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }

    /// Reads the mod revisions of the leases that an earlier run has created.
    pub async fn read_revisions(&self, bench: &Bench) -> Result<(), Error> {
        let client = bench.pool.client(0);
        let (mut key, range_end) = self.leases();
        let mut found = 0;
        loop {
            let request = RangeRequest {
                key,
                range_end: range_end.clone(),
                limit: PAGE_LEASES,
                keys_only: true,
                ..RangeRequest::default()
            };
            let page = setup_request("reading existing leases", &client, client.kv.clone().range(request)).await?;
            for pair in &page.kvs {
                // Keys are sorted, so the leases of the first nodes are first.
                if let Some(revision) = self.lease_revisions.get(found)
                    && pair.key == self.key(Kind::Lease, found)
                {
                    revision.store(pair.mod_revision, Relaxed);
                    found += 1;
                }
            }
            match page.kvs.last() {
                Some(last) if page.more => key = [last.key.as_ref(), b"\0"].concat().into(),
                _ => break,
            }
        }
        if found == self.nodes() {
            return Ok(());
        }
        let error = format!("--existing needs the leases of all nodes, leases={found} nodes={}", self.nodes());
        Err(failed("reading existing leases", bench, error))
    }

    /// Renews the lease of the node as kube-apiserver does: a put if the mod revision is the last known one, otherwise a
    /// read. If it was changed in the meantime, repeats with the current mod revision.
    pub async fn renew(&self, client: &mut Client, node: usize, value: Bytes) -> Result<OpCounts, Status> {
        let known = &self.lease_revisions[node];
        let mut counts = OpCounts::default();
        loop {
            let request = swap(self.key(Kind::Lease, node), known.load(Relaxed), value.clone());
            match swap_result(&client.kv.txn(request).await?.into_inner()) {
                Ok(revision) => {
                    known.store(revision, Relaxed);
                    return Ok(counts);
                }
                Err(revision) => known.store(revision, Relaxed),
            }
            counts.retries += 1;
        }
    }
}

fn failed(step: &'static str, bench: &Bench, error: String) -> Error {
    Error::Step { step, endpoint: bench.pool.endpoints(), error }
}

/// Creates the objects of consecutive nodes, one transaction per step.
struct Creator {
    client: Client,
    objects: Arc<Objects>,
    kind: Kind,
    value: Bytes,
    /// Number of puts per transaction.
    puts: usize,
    /// Number of the next transaction, shared by all creators.
    next: Arc<AtomicU64>,
    /// Number of objects created, by all creators.
    created: Arc<AtomicU64>,
}

impl Worker for Creator {
    async fn step(&mut self, _started: u64) -> Result<OpCounts, Status> {
        let transaction = usize::try_from(self.next.fetch_add(1, Relaxed)).unwrap_or(usize::MAX);
        let first = transaction.saturating_mul(self.puts);
        let nodes = first..first.saturating_add(self.puts).min(self.objects.nodes());
        let put = |node| {
            let key = self.objects.key(self.kind, node);
            let put = PutRequest { key, value: self.value.clone(), ..PutRequest::default() };
            RequestOp { request: Some(request_op::Request::RequestPut(put)) }
        };
        let request = TxnRequest { success: nodes.clone().map(put).collect(), ..TxnRequest::default() };
        let response = self.client.kv.txn(request).await?.into_inner();
        let revision = response.header.map_or(0, |header| header.revision);
        self.created.fetch_add(nodes.len() as u64, Relaxed);
        if self.kind == Kind::Lease {
            for node in nodes {
                self.objects.lease_revisions[node].store(revision, Relaxed);
            }
        }
        Ok(OpCounts::default())
    }

    fn client(&self) -> &Client {
        &self.client
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_kubernetes() {
        let objects = Objects::new("/registry/".to_owned(), 1_000_000);
        assert_eq!(objects.key(Kind::Lease, 42), "/registry/leases/kube-node-lease/node-0000042");
        assert_eq!(objects.key(Kind::Node, 999_999), "/registry/minions/node-0999999");
        let (start, end) = objects.leases();
        for node in [0, 999_999] {
            let (lease, node) = (objects.key(Kind::Lease, node), objects.key(Kind::Node, node));
            assert!(start <= lease && lease < end, "{lease:?}");
            assert!(!(start <= node && node < end), "{node:?}");
        }
    }
}
