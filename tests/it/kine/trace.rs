//! The recorded control plane in kine's table: each recorded read has the recorded answer after the import.

use orlop_wire::proto::client::etcdserverpb::{
    PutRequest, RangeResponse, TxnRequest, TxnResponse, request_op::Request as Op, response_op::Response as OpAnswer,
};

use super::*;
use crate::kube_trace::trace::{Answer, Exchange, Request, Step, load};

/// A key's newest row: its id, whether it is live, its create revision and its version.
type Newest = (i64, bool, i64, i64);

/// kine's table, as recorded writes fill it.
#[derive(Default)]
struct Table {
    rows: Vec<Row>,
    newest: std::collections::HashMap<Vec<u8>, Newest>,
}

impl Table {
    fn txn(&mut self, request: &TxnRequest, answer: &TxnResponse) {
        let revision = answer.header.as_ref().expect("a header").revision;
        let ops = if answer.succeeded { &request.success } else { &request.failure };
        for (op, answer) in ops.iter().zip(&answer.responses) {
            match (&op.request, &answer.response) {
                (Some(Op::RequestPut(put)), _) => self.put(revision, put),
                (Some(Op::RequestDeleteRange(delete)), Some(OpAnswer::ResponseDeleteRange(answer))) => {
                    assert!(answer.deleted <= 1, "kine deletes one key");
                    if answer.deleted == 1 {
                        let (prev, ..) = self.newest[&delete.key.to_vec()];
                        self.add(Row { name: delete.key.to_vec(), ..Row::delete(revision, "", prev) });
                        self.newest.insert(delete.key.to_vec(), (revision, false, 0, 0));
                    }
                }
                _ => {}
            }
        }
    }

    fn put(&mut self, revision: i64, put: &PutRequest) {
        let key = put.key.to_vec();
        let newest = self.newest.get(&key).copied().unwrap_or((0, false, 0, 0));
        let (prev, live, create_revision, version) = newest;
        let (create_revision, version) = if live { (create_revision, version + 1) } else { (revision, 1) };
        let row = match live {
            true => Row::update(revision, "", create_revision, prev, ""),
            false => Row::create(revision, "", prev, ""),
        };
        let (name, value) = match &key[..] {
            // kine gives kube-apiserver's key another name.
            b"compact_rev_key" => {
                let value = [format!("{version}|").as_bytes(), &put.value].concat();
                (b"compact_rev_key_apiserver".to_vec(), value)
            }
            _ => (key.clone(), put.value.to_vec()),
        };
        let lease = if put.lease == 0 { 0 } else { 3_600 };
        self.add(Row { name, value: Some(value), ..row.lease(lease) });
        self.newest.insert(key, (revision, true, create_revision, version));
    }

    fn add(&mut self, row: Row) {
        assert!(self.rows.last().is_none_or(|last| last.id < row.id), "one change per revision: {row:?}");
        self.rows.push(row);
    }

    /// Deletes the rows that kine's compaction deletes.
    fn compact(&mut self, at: i64) {
        let replaced: Vec<i64> = self.rows.iter().filter(|row| row.id <= at).map(|row| row.prev_revision).collect();
        self.rows.retain(|row| !(replaced.contains(&row.id) || row.deleted && row.id <= at));
    }
}

/// The recorded reads, each at the revision in its answer.
fn recorded() -> (Table, Vec<(RangeRequest, RangeResponse)>) {
    let (mut table, mut reads) = (Table::default(), Vec::new());
    for step in load() {
        let Step::Call { exchange: Exchange { request, answer, .. }, .. } = step else { continue };
        match (request, answer) {
            (Request::Txn(request), Answer::Txn(answer)) => table.txn(&request, &answer),
            (Request::Range(mut request), Answer::Range(answer)) => {
                if request.revision == 0 {
                    request.revision = answer.header.as_ref().expect("a header").revision;
                }
                reads.push((request, answer));
            }
            _ => {}
        }
    }
    (table, reads)
}

/// Returns the comparable part of an answer. Leases have other IDs, and kine does not store versions.
fn comparable(mut answer: RangeResponse, versions: bool) -> (Vec<KeyValue>, i64, bool) {
    for kv in &mut answer.kvs {
        kv.lease = 0;
        kv.version = if versions { kv.version } else { 0 };
    }
    (answer.kvs, answer.count, answer.more)
}

async fn check(backend: Backend, kind: Kind, compacted: Option<i64>) {
    let (mut table, reads) = recorded();
    table.rows.insert(0, Row::compaction(1, compacted.unwrap_or(0)));
    if let Some(at) = compacted {
        let first = table.rows.remove(0);
        table.compact(at);
        table.rows.insert(0, first);
    }
    let Some(source) = Source::of(kind, &table.rows).await else { return };
    let Some(mut imported) = Imported::from(backend, &source.url).await else { return };
    imported.check_compacted(compacted.unwrap_or(0)).await;
    let mut compared = 0;
    for (request, answer) in reads {
        if request.revision < compacted.unwrap_or(0) {
            continue;
        }
        let found = imported.client.kv.range(request.clone()).await.expect("a range").into_inner();
        let versions = compacted.is_none();
        assert_eq!(comparable(found, versions), comparable(answer, versions), "{request:?}\n{}", imported.report);
        compared += 1;
    }
    assert!(compared > 100, "{compared} reads were compared");
    println!("{compared} reads, {}", imported.report);
    imported.check_next(table.rows.last().expect("rows").id + 1).await;
}

async fn recorded_control_plane_reads_the_same(backend: Backend) {
    for kind in Kind::ALL {
        check(backend, kind, None).await;
    }
}

async fn compacted_control_plane_reads_the_same(backend: Backend) {
    let (table, _) = recorded();
    let middle = table.rows[table.rows.len() / 2].id;
    for kind in Kind::ALL {
        check(backend, kind, Some(middle)).await;
    }
}

on_both_backends!(recorded_control_plane_reads_the_same, compacted_control_plane_reads_the_same,);
