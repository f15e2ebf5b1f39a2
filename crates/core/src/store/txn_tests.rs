//! Tests evaluation, batches and their application against the naive store of `model`.
//!
//! Random requests run in batches on both. A batch is committed, dropped as after a conflict, or found in the log later
//! as after an append with unknown outcome. Compactions run in between. Revisions in requests are generated as
//! distances from the head, so that reads at old, current, future and compacted revisions all occur.

use std::collections::{BTreeSet, HashMap};

use proptest::{collection::vec, prelude::*, sample::select};
use tokio::time::Instant;

use super::{
    batch::Batch,
    error::Error,
    fixtures::shared,
    generators::{LEASES, anchored, requests},
    model::{Model, Row},
    request::{Compare, CompareTarget, PutLease, PutRequest, PutValue, Relation, TxnRequest},
    shared::Shared,
    txn::{Evaluation, Fetched, Stop},
    write_request::{Outcome, Request},
};
use crate::{
    index::{CompactionCursor, Lease},
    log::{Append, Appended, Reclaim},
    types::{ChangeKind, Key, KeyRange, LeaseId, Revision},
};

/// The fate of a batch.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Committed,
    /// The append lost a race.
    Dropped,
    /// The append succeeded but its outcome is unknown; the log is read again.
    FoundLater,
}

#[derive(Clone, Debug)]
struct Step {
    requests: Vec<Request>,
    fate: Fate,
    /// If set, compacts afterwards at this distance below the head.
    compact: Option<i64>,
}

type Checked = Result<(), TestCaseError>;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    #[test]
    fn requests_equal_the_model(steps in vec(steps(), 1..8), cache_bytes in select(vec![0, 400, 1 << 20])) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut world = World::new(cache_bytes);
            for step in steps {
                world.run(step).await?;
            }
            Ok::<_, TestCaseError>(())
        })?;
    }
}

#[tokio::test]
async fn lease_granted_again_has_its_new_ttl_after_catching_up() -> Checked {
    let id = LeaseId(1);
    let step = |requests, fate| Step { requests, fate, compact: None };
    let mut world = World::new(0);
    world.run(step(vec![Request::Grant { id, ttl_secs: 10 }], Fate::Committed)).await?;
    world.run(step(vec![Request::Revoke(id), Request::Grant { id, ttl_secs: 1_000 }], Fate::FoundLater)).await
}

#[tokio::test]
async fn values_of_compares_are_read_together() -> Checked {
    let keys: Vec<String> = (0..50).map(|number| format!("k{number}")).collect();
    let put = |key: &String| {
        let value = PutValue::New("v".into());
        Request::Put(PutRequest { key: key.clone().into(), value, lease: PutLease::Set(None), prev_kv: false })
    };
    let compare = |range, value: &'static str| {
        let target = CompareTarget::Value(value.into());
        Compare { range, relation: Relation::Equal, target }
    };
    let all = || KeyRange::from_wire(b"k", b"l");
    let single = |key: &String| compare(KeyRange::from_wire(key.as_bytes(), b""), "v");
    for compares in [
        vec![compare(all(), "v")],
        vec![compare(all(), "other")],
        keys.iter().map(single).collect(),
        keys.iter().map(single).chain([compare(all(), "other")]).collect(),
    ] {
        let mut world = World::new(0);
        world.run(Step { requests: keys.iter().map(put).collect(), fate: Fate::Committed, compact: None }).await?;
        let text = format!("{compares:?}");
        world.request(&Request::Txn(TxnRequest { compares, success: vec![], failure: vec![] })).await?;
        prop_assert_eq!(world.reads, 1, "{}", text);
    }
    Ok(())
}

/// The answer is not compared with the model: with so many keys that would take long.
#[test]
fn evaluations_of_a_compare_grow_with_the_logarithm_of_its_keys() {
    const KEYS: u32 = 50_000;
    let mut world = World::new(0);
    for number in 0..KEYS {
        let (key, value) = (format!("k{number:05}").into(), PutValue::New("v".into()));
        let put = PutRequest { key, value, lease: PutLease::Set(None), prev_kv: false };
        world.evaluate(&Request::Put(put)).expect("a put");
    }
    world.shared.apply_batch(&world.batch, world.shared.position(), Instant::now());
    let batch = std::mem::replace(&mut world.batch, Batch::new(world.shared.position().head));
    let log: HashMap<_, _> = batch.changes().iter().map(|change| (change.row, change.kv().cloned())).collect();
    for (value, succeeded, evaluations_max) in [("v", true, 8), ("other", false, 2)] {
        let target = CompareTarget::Value(value.into());
        let compare = Compare { range: KeyRange::all(), relation: Relation::Equal, target };
        let txn = Request::Txn(TxnRequest { compares: vec![compare], success: vec![], failure: vec![] });
        world.fetched.clear();
        let mut evaluations = 1;
        let outcome = loop {
            match world.evaluate(&txn) {
                Ok(outcome) => break outcome,
                Err(Stop::NeedsValues(rows)) => world.fetched.extend(rows.iter().map(|row| (*row, log[row].clone()))),
                Err(stop) => panic!("{stop:?}"),
            }
            evaluations += 1;
        };
        assert!(matches!(outcome, Outcome::Txn(response) if response.succeeded == succeeded), "{value}");
        assert!(evaluations <= evaluations_max, "{value}: {evaluations} evaluations");
    }
}

/// The store without its tasks, and the model.
struct World {
    shared: Shared,
    batch: Batch,
    fetched: Fetched,
    model: Model,
    /// The model of the log's contents.
    committed: Model,
    /// How many times an evaluation needed rows of the log.
    reads: usize,
}

impl World {
    fn new(cache_bytes: u64) -> Self {
        let model = Model::new();
        Self {
            shared: shared(cache_bytes),
            batch: Batch::new(Revision::EMPTY),
            fetched: Fetched::new(),
            committed: model.clone(),
            model,
            reads: 0,
        }
    }

    async fn run(&mut self, step: Step) -> Checked {
        for request in &step.requests {
            self.request(request).await?;
        }
        match step.fate {
            Fate::Committed => self.commit().await?,
            Fate::Dropped => {
                self.model = self.committed.clone();
                self.next_batch()?;
            }
            Fate::FoundLater => {
                self.append().await?;
                self.shared.catch_up().await.unwrap();
                self.next_batch()?;
            }
        }
        if let Some(back) = step.compact {
            self.compact(back).await;
        }
        self.check_applied()
    }

    /// Evaluates one request as the writer does, and checks the outcome.
    async fn request(&mut self, request: &Request) -> Checked {
        let request = anchored(request, self.model.head);
        let expected = self.on_model(&request);
        let outcome = loop {
            let before = format!("{:?}", self.batch);
            let savepoint = self.batch.savepoint();
            let stop = match self.evaluate(&request) {
                Ok(outcome) => {
                    let after = format!("{:?}", self.batch);
                    self.batch.roll_back(savepoint);
                    prop_assert_eq!(format!("{:?}", self.batch), before, "rollback restores the batch");
                    let again = self.evaluate(&request).map_err(|stop| TestCaseError::fail(format!("{stop:?}")))?;
                    prop_assert_eq!(&again, &outcome, "evaluation is repeatable");
                    prop_assert_eq!(format!("{:?}", self.batch), after);
                    break Ok(outcome);
                }
                Err(stop) => stop,
            };
            prop_assert_eq!(format!("{:?}", self.batch), before, "{:?} leaves the batch unchanged", stop);
            match stop {
                Stop::Failed(error) => break Err(error),
                Stop::NeedsValues(rows) => {
                    self.reads += 1;
                    prop_assert!(!rows.is_empty() && rows.iter().all(|row| !self.fetched.contains_key(row)));
                    let found: HashMap<_, _> = self.shared.log.values(&rows).await.unwrap().into_iter().collect();
                    prop_assert!(rows.iter().all(|row| found.contains_key(row)), "{:?} are in the log", rows);
                    self.fetched.extend(found.into_iter().map(|(row, kv)| (row, Some(kv))));
                }
                Stop::Outdated => prop_assert!(false, "no other instance writes"),
                Stop::NeedsCommit => {
                    prop_assert!(!self.batch.changes().is_empty(), "there is something to commit");
                    let after = self.model.clone();
                    self.model = self.before_request();
                    self.commit().await?;
                    self.model = after;
                }
            }
        };
        prop_assert_eq!(&outcome, &expected, "{:?}", request);
        self.check_batch()
    }

    fn evaluate(&mut self, request: &Request) -> Result<Outcome, Stop> {
        let (index, leases) = (self.shared.index.read(), self.shared.leases.lock());
        let mut evaluation = Evaluation::new(
            &index,
            &leases,
            &self.shared.values,
            &self.shared.read_memory,
            &self.fetched,
            &mut self.batch,
        );
        evaluation.evaluate(request, &self.shared.authority)
    }

    /// Runs the request on the model, which changes only if the request succeeds.
    fn on_model(&mut self, request: &Request) -> Result<Outcome, Error> {
        let mut model = self.model.clone();
        let outcome = match request {
            Request::Put(put) => model.put(put).map(Outcome::Put),
            Request::Delete(delete) => Ok(Outcome::Delete(model.delete(delete))),
            Request::Txn(txn) => model.txn(txn).map(Outcome::Txn),
            Request::Grant { id, ttl_secs } => model.grant(*id, *ttl_secs).map(Outcome::Revision),
            Request::Revoke(id) => model.revoke(*id).map(Outcome::Revision),
            Request::Expire(_) | Request::Compact(_) | Request::Alarm(_) | Request::Auth(_) => {
                unreachable!("not generated")
            }
        }?;
        self.model = model;
        Ok(outcome)
    }

    /// Returns the model with exactly the changes of the batch.
    fn before_request(&self) -> Model {
        let mut model = self.model.clone();
        model.rows.truncate(self.committed.rows.len() + self.batch.changes().len());
        model.lease_changes.truncate(self.committed.lease_changes.len() + self.batch.leases().len());
        model.head = self.batch.head();
        model
    }

    async fn append(&mut self) -> Checked {
        let append = Append { leases: self.batch.leases(), ..Append::rows(self.batch.base(), self.batch.changes()) };
        prop_assert_eq!(self.shared.log.append(append).await.unwrap(), Appended::Done);
        self.committed = self.model.clone();
        Ok(())
    }

    async fn commit(&mut self) -> Checked {
        self.append().await?;
        self.shared.fill_prev(self.batch.changes_mut(), &mut Fetched::new()).await;
        for (change, row) in self.batch.changes().iter().zip(self.new_rows(&self.batch)) {
            let prev = change.prev.as_ref().map(|prev| prev.kv.clone());
            let expected = row.prev.as_ref().map(|pair| Some(pair.encoded()));
            prop_assert_eq!(prev, expected, "{:?}", change);
        }
        self.shared.apply_batch(&self.batch, self.shared.position(), Instant::now());
        self.next_batch()
    }

    fn next_batch(&mut self) -> Checked {
        let head = self.shared.index.read().head();
        prop_assert_eq!(head, self.model.head);
        self.batch = Batch::new(head);
        self.fetched.clear();
        Ok(())
    }

    async fn compact(&mut self, back: i64) {
        let revision = Revision(self.model.head.0 - back);
        let mut removed = Vec::new();
        {
            let mut index = self.shared.index.write();
            index.begin_compaction(revision);
            while index.compact_step(&mut CompactionCursor::default(), usize::MAX, &mut removed) {}
        }
        let rows: Vec<_> = removed.iter().map(|superseded| superseded.row).collect();
        self.shared.log.reclaim(Reclaim::Rows { rows: &rows, compacted: revision, server: 0 }).await.unwrap();
        self.model.compact_revision = self.model.compact_revision.max(Some(revision));
        self.committed.compact_revision = self.model.compact_revision;
    }

    // Checks.

    fn new_rows(&self, batch: &Batch) -> Vec<Row> {
        let from = self.model.rows.iter().filter(|row| row.id.revision <= batch.base()).count();
        self.model.rows[from..].to_vec()
    }

    /// Checks that the batch contains the model's changes since its base.
    fn check_batch(&self) -> Checked {
        prop_assert_eq!(self.batch.head(), self.model.head);
        let rows = self.new_rows(&self.batch);
        prop_assert_eq!(self.batch.changes().len(), rows.len());
        for (change, row) in self.batch.changes().iter().zip(&rows) {
            prop_assert_eq!((change.row, &change.key, change.prev_lease), (row.id, &row.key, row.prev_lease));
            let prev = change.prev.as_ref().map(|prev| prev.row);
            prop_assert_eq!(prev, row.prev.as_ref().map(|pair| pair.version.row), "{:?}", change);
            if let Some(kv) = change.prev.as_ref().and_then(|prev| prev.kv.as_ref()) {
                prop_assert_eq!(kv, &row.prev.as_ref().unwrap().encoded());
            }
            match (&change.kind, &row.pair) {
                (ChangeKind::Put { kv, create_revision, version, lease }, Some(pair)) => {
                    prop_assert_eq!(kv, &pair.encoded());
                    let expected = (pair.version.create_revision, pair.version.version, pair.lease);
                    prop_assert_eq!((*create_revision, *version, *lease), expected);
                }
                (ChangeKind::Delete, None) => {}
                (ChangeKind::Put { .. } | ChangeKind::Delete, _) => prop_assert!(false, "{change:?} is {row:?}"),
            }
        }
        let lease_changes = &self.model.lease_changes[self.committed.lease_changes.len()..];
        prop_assert_eq!(self.batch.leases(), lease_changes);
        let leases = self.shared.leases.lock();
        let ranges = [KeyRange::from_wire(b"a", b""), KeyRange::from_wire(b"ab", b"bb"), KeyRange::all()];
        for id in LEASES.map(LeaseId) {
            let keys = self.model.lease_keys(id);
            prop_assert_eq!(self.batch.lease_exists(&leases, id), self.model.leases.contains_key(&id), "{:?}", id);
            prop_assert_eq!(&self.batch.lease_keys(&leases, id), &keys, "{:?}", id);
            for permitted in [&ranges[..0], &ranges[..1], &ranges[1..2], &ranges[..2], &ranges[..]] {
                let is_permitted = |key: &Key| permitted.iter().any(|range| range.contains(key));
                let has_key_outside = self.batch.has_lease_key_outside(&leases, id, &permitted.iter().collect());
                prop_assert_eq!(has_key_outside, !keys.iter().all(is_permitted), "{:?} {:?}", id, permitted);
            }
        }
        Ok(())
    }

    /// Checks that index, leases and cached values equal the model.
    fn check_applied(&self) -> Checked {
        let index = self.shared.index.read();
        let oldest = self.model.compact_revision.unwrap_or(Revision(0));
        for at in (oldest.0..=index.head().0).map(Revision) {
            let live: Vec<_> = index.range(.., at).map(|(key, entry)| (key.clone(), entry.version)).collect();
            let expected: Vec<_> = self.model.live_at(at).into_iter().map(|pair| (pair.key, pair.version)).collect();
            prop_assert_eq!(live, expected, "at {}", at);
        }
        for pair in self.model.live() {
            let entry = index.get(&pair.key, index.head()).expect("the model has the key");
            prop_assert_eq!(entry.lease, Lease::Known(pair.lease), "{:?}", &pair.key);
            if let Some(cached) = self.shared.values.get(pair.version.row) {
                prop_assert_eq!(cached, pair.encoded());
            }
        }
        let now = Instant::now();
        let leases = self.shared.leases.lock();
        let listed: BTreeSet<LeaseId> = leases.list(now).into_iter().collect();
        prop_assert_eq!(listed, self.model.leases.keys().copied().collect());
        for (id, ttl_secs) in &self.model.leases {
            let remaining = leases.remaining(*id, now).expect("a listed lease exists");
            let keys: Vec<_> = leases.keys(*id).iter().cloned().collect();
            prop_assert_eq!((remaining.granted_secs, keys), (*ttl_secs, self.model.lease_keys(*id)));
        }
        Ok(())
    }
}

fn steps() -> impl Strategy<Value = Step> {
    let fate = prop_oneof![6 => Just(Fate::Committed), 1 => Just(Fate::Dropped), 2 => Just(Fate::FoundLater)];
    let compact = prop::option::weighted(0.3, 0..4_i64);
    (vec(requests(), 0..6), fate, compact).prop_map(|(requests, fate, compact)| Step { requests, fate, compact })
}
