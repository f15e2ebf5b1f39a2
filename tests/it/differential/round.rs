//! A round: one seed, two fresh servers, several sequences of operations, and every response compared.

use std::{collections::VecDeque, fmt};

use orlop_wire::proto::client::{
    etcdserverpb::{DeleteRangeRequest, PutRequest, RequestOp, TxnRequest, request_op::Request},
    mvccpb::Event,
};

use super::{
    auth::{AuthOp, Caller, PASSWORDS, ROOT, first_ops, log_ins},
    exceptions,
    generate::{Generator, KEYS, Known},
    op::{Answer, On, Op},
    side::Side,
    watch::{WatchStream, Watermark},
};

/// Number of random operations in a sequence, at whose end all watch streams are closed.
const SEQUENCE_OPS: usize = 400;
/// Number of operations that a failure report shows.
const TAIL_OPS: usize = 20;

pub struct Round {
    seed: u64,
    etcd: Side,
    ours: Side,
    known: Known,
    performed: usize,
    tail: VecDeque<(Caller, Op)>,
    used: exceptions::Used,
}

/// The first difference of a round, with the data needed to reproduce it.
#[derive(Debug)]
pub struct Mismatch {
    seed: u64,
    op_index: usize,
    caller: Caller,
    op: Op,
    etcd: String,
    ours: String,
    tail: VecDeque<(Caller, Op)>,
}

impl Mismatch {
    /// Returns whether a response or an event did not come.
    pub fn is_stall(&self) -> bool {
        // The text of `Answer::Stalled`, and of an error of `Side::catch_up` or `Side::reach`.
        let is_stall = |text: &String| text.starts_with("Stalled(") || text.starts_with("Err(");
        is_stall(&self.etcd) || is_stall(&self.ours)
    }
}

impl Round {
    pub fn new(seed: u64, etcd: Side, ours: Side) -> Self {
        let known = Known { head: 1, compacted: -1, watches: Vec::new() };
        Self { seed, etcd, ours, known, performed: 0, tail: VecDeque::new(), used: exceptions::Used::new() }
    }

    /// Runs the round and returns the exceptions that it needed.
    pub async fn run(mut self, ops: usize) -> Result<exceptions::Used, Box<Mismatch>> {
        let mut generator = Generator::new(self.seed);
        if generator.has_auth {
            for op in first_ops() {
                self.step(Caller::Root, Op::Auth(op)).await?;
            }
        }
        while self.performed < ops {
            for _ in 0..SEQUENCE_OPS {
                let (caller, op) = generator.step(&self.known);
                let restarts_auth = matches!(op, Op::Auth(AuthOp::Disable));
                self.step(caller, op).await?;
                // All tokens are invalid now. The users may have changed, or root may have been deleted meanwhile.
                if restarts_auth && generator.chance(80) {
                    for op in [AuthOp::Enable].into_iter().chain(log_ins()) {
                        self.step(Caller::Root, Op::Auth(op)).await?;
                    }
                }
            }
            self.finish_sequence().await?;
        }
        Ok(self.used)
    }

    async fn step(&mut self, caller: Caller, op: Op) -> Result<(), Box<Mismatch>> {
        // A compaction or a cancel may end a watch. Which events the watch has received by then depends on timing,
        // unless it has received all of them.
        let waits_for_events = matches!(op, Op::Compact(_) | Op::CancelWatch { .. } | Op::Progress);
        self.performed += 1;
        if self.tail.len() == TAIL_OPS {
            self.tail.pop_front();
        }
        self.tail.push_back((caller, op.clone()));
        if waits_for_events {
            self.catch_up(&op).await?;
        }
        let (etcd, mut ours) = tokio::join!(self.etcd.perform(caller, &op), self.ours.perform(caller, &op));
        exceptions::allow(&op, &etcd, &mut ours, &mut self.used);
        if etcd != ours || etcd.is_failure() {
            return Err(self.mismatch(&op, &etcd, &ours));
        }
        self.learn(&op, &etcd);
        Ok(())
    }

    /// Updates the known state of the store from a response, which was the same on both servers.
    fn learn(&mut self, op: &Op, answer: &Answer) {
        self.known.head = self.known.head.max(answer.revision().unwrap_or(0));
        match (op, answer) {
            (Op::Compact(request), Answer::Compact(_)) => self.known.compacted = request.revision,
            (Op::Watch { on: On::Stream(stream), .. }, Answer::Watch(created)) if !created.canceled => {
                self.known.watches.push((*stream, created.watch_id));
            }
            (Op::CancelWatch { stream, id }, _) => self.known.watches.retain(|watch| *watch != (*stream, *id)),
            _ => {}
        }
    }

    async fn catch_up(&mut self, op: &Op) -> Result<(), Box<Mismatch>> {
        let head = self.known.head;
        let (etcd, ours) = tokio::join!(self.etcd.catch_up(head), self.ours.catch_up(head));
        if etcd.is_err() || ours.is_err() {
            return Err(self.mismatch(op, &etcd, &ours));
        }
        self.compare_watches(op)
    }

    /// Makes two changes that every watch sees, waits for them, compares all watches and closes them.
    async fn finish_sequence(&mut self) -> Result<(), Box<Mismatch>> {
        let log_in = AuthOp::LogIn { user: ROOT, password: PASSWORDS[0] };
        self.step(Caller::Root, Op::Auth(log_in)).await?;
        let put = |key: &[u8]| PutRequest { key: key.to_vec().into(), ..Default::default() };
        let success = KEYS.map(|key| RequestOp { request: Some(Request::RequestPut(put(key))) }).into_iter().collect();
        self.step(Caller::Root, Op::Txn(TxnRequest { success, ..Default::default() })).await?;
        let put = self.known.head;
        let all = bytes::Bytes::from_static(b"\0");
        let delete = Op::DeleteRange(DeleteRangeRequest { key: all.clone(), range_end: all, prev_kv: true });
        self.step(Caller::Root, delete.clone()).await?;
        let watermark = Watermark { put, delete: self.known.head };

        let (etcd, ours) = tokio::join!(self.etcd.reach(watermark), self.ours.reach(watermark));
        if etcd.is_err() || ours.is_err() {
            return Err(self.mismatch(&delete, &etcd, &ours));
        }
        self.compare_watches(&delete)?;
        self.etcd.forget_streams();
        self.ours.forget_streams();
        self.known.watches.clear();
        Ok(())
    }

    /// Compares all watches; both servers have sent every event up to the current revision.
    fn compare_watches(&mut self, op: &Op) -> Result<(), Box<Mismatch>> {
        let (compacted, used) = (self.known.compacted, &mut self.used);
        let difference = (self.etcd.streams.iter_mut().flatten())
            .zip(self.ours.streams.iter_mut().flatten())
            .find_map(|(etcd, ours)| difference(etcd, ours, compacted, used));
        match difference {
            Some((etcd, ours)) => Err(self.mismatch(op, &etcd, &ours)),
            None => Ok(()),
        }
    }

    fn mismatch(&self, op: &Op, etcd: &impl fmt::Debug, ours: &impl fmt::Debug) -> Box<Mismatch> {
        Box::new(Mismatch {
            seed: self.seed,
            op_index: self.performed - 1,
            caller: self.tail.back().map_or(Caller::Root, |(caller, _)| *caller),
            op: op.clone(),
            etcd: format!("{etcd:#?}"),
            ours: format!("{ours:#?}"),
            tail: self.tail.clone(),
        })
    }
}

/// Compares the responses since the last comparison and discards equal events.
fn difference(
    etcd: &mut WatchStream,
    ours: &mut WatchStream,
    compacted: i64,
    used: &mut exceptions::Used,
) -> Option<(String, String)> {
    if !etcd.violations.is_empty() || !ours.violations.is_empty() {
        return Some((format!("{:#?}", etcd.violations), format!("{:#?}", ours.violations)));
    }
    for (etcd, ours) in etcd.watches.iter_mut().zip(&mut ours.watches) {
        let say = |what: &dyn fmt::Debug| format!("{what:#?} for {:?}", etcd.create());
        if !etcd.violations.is_empty() || !ours.violations.is_empty() {
            return Some((say(&etcd.violations), say(&ours.violations)));
        }
        if etcd.end != ours.end {
            return Some((say(&etcd.end), say(&ours.end)));
        }
        exceptions::allow_events(compacted, &etcd.events, &mut ours.events, used);
        let common = etcd.events.iter().zip(&ours.events).take_while(|(etcd, ours)| etcd == ours).count();
        if common < etcd.events.len().max(ours.events.len()) {
            let first = |events: &VecDeque<Event>| events.get(common).map_or("nothing more".to_owned(), |it| say(it));
            return Some((first(&etcd.events), first(&ours.events)));
        }
        etcd.events.clear();
        ours.events.clear();
    }
    None
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, op_index, caller, op, etcd, ours, tail } = self;
        writeln!(f, "seed {seed} (ORLOP_SEED={seed} replays it), operation {op_index}:")?;
        writeln!(f, "  {caller:?}: {}", cut(&format!("{op:?}"), 6_000))?;
        writeln!(f, "etcd: {}\nours: {}", cut(etcd, 6_000), cut(ours, 6_000))?;
        writeln!(f, "the last {} operations:", tail.len())?;
        tail.iter().try_for_each(|op| writeln!(f, "  {}", cut(&format!("{op:?}"), 500)))
    }
}

/// Returns at most the first `chars_max` characters, because a report with a whole long transaction is hard to read.
fn cut(text: &str, chars_max: usize) -> String {
    let mut short: String = text.chars().take(chars_max).collect();
    if short.len() < text.len() {
        short.push_str(" ... (cut)");
    }
    short
}
