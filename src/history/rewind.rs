//! `orlop rewind`: writes a past state of a range again, as new revisions.
//!
//! Two streams, of the newest state and of the past one, are compared twice: to show what would be done, and to do it. So
//! memory does not depend on the number of keys. Each write compares the mod_revision that the plan saw, so that a key
//! which somebody has changed since then is not overwritten. After the last write, the changes of the range since the
//! plan are read, to name those of others. Nothing is taken out of the log.

use std::{
    collections::{HashMap, HashSet},
    io::{IsTerminal as _, Write as _},
};

use orlop_client::describe;
use orlop_wire::proto::client::{
    etcdserverpb::{
        Compare, DeleteRangeRequest, LeaseTimeToLiveRequest, PutRequest, RangeRequest, RangeResponse, RequestOp,
        ResponseOp, TxnRequest,
        compare::{CompareResult, CompareTarget, TargetUnion},
        request_op::Request,
        response_op::Response,
    },
    mvccpb::KeyValue,
    orlopb::HistoryChangesRequest,
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tonic::Status;

use super::{
    Ending, Result,
    compare::{Difference, Differences, described},
    selection::Selection,
    source::{Session, Source, SourceFlags, failed},
    text::{OutputFlags, key_json},
    time::{Found, Point},
};
use crate::{
    output::{Format, json_line, print},
    text::{shown_key, shown_time},
};

/// Size of a transaction in bytes after which it ends; etcd's servers accept 1.5 MiB.
const TXN_BYTES: usize = 1 << 20;
/// Maximum number of bytes that an operation, its compare and its read take in addition to keys and the value.
const FRAMING_BYTES: usize = 64;

#[derive(Debug, clap::Args)]
#[command(mut_arg("selected_key", |key| key.required(true)))]
pub struct RewindArgs {
    #[command(flatten)]
    selection: Selection,

    /// Point in time: a revision, a duration before now (2h) or a time in UTC
    #[arg(long, value_name = "REV|TIME")]
    to: Point,

    /// Only show what would be written
    #[arg(long)]
    dry_run: bool,

    /// Write without asking
    #[arg(short, long, conflicts_with = "dry_run")]
    yes: bool,

    /// Only the keys, without what changes in their values
    #[arg(long)]
    keys_only: bool,

    /// Maximum number of operations in a transaction, at most the server's --max-txn-ops
    #[arg(long, default_value_t = 128, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    txn_ops: u32,

    #[command(flatten)]
    output: OutputFlags,

    #[command(flatten)]
    source: SourceFlags,
}

/// Runs `orlop rewind`.
///
/// # Errors
///
/// A text for the operator.
pub async fn run(args: RewindArgs) -> Result<Ending> {
    args.selection.check()?;
    let source = args.source.open().await?;
    let ending = Rewind::new(&args, &source).await;
    let ending = match ending {
        Ok(rewind) => rewind.run().await,
        Err(error) => Err(error),
    };
    source.close().await?;
    ending
}

struct Rewind<'a> {
    args: &'a RewindArgs,
    source: &'a Source,
    /// The connection of all requests while the streams of the two states are read, which may occupy all of theirs.
    session: Session,
    /// The revision whose state is written again.
    to: Found,
    /// The revision of the state that is replaced.
    head: i64,
    /// Whether the leases of past pairs still exist. A list of all leases would need the right to read all their keys.
    leases: Mutex<HashMap<i64, bool>>,
}

/// What a rewind would do or did.
#[derive(Default)]
struct Count {
    puts: usize,
    deletes: usize,
    /// Keys that others have changed since the plan.
    conflicts: HashSet<Vec<u8>>,
    /// The revisions of the transactions, ascending.
    revisions: Vec<i64>,
}

impl<'a> Rewind<'a> {
    async fn new(args: &'a RewindArgs, source: &'a Source) -> Result<Self> {
        let to = source.resolve(args.to).await?;
        let head = source.state().await?.revision;
        Ok(Self { args, source, session: source.connect_again().await?, to, head, leases: Mutex::default() })
    }

    async fn run(self) -> Result<Ending> {
        let planned = self.plan().await?;
        let Count { puts, deletes, .. } = planned;
        if puts + deletes == 0 {
            self.report(&format!("nothing to do: the state is that of {}", self.to), &planned)?;
            return Ok(Ending::Success);
        }
        let what = format!("{puts} puts and {deletes} deletes bring back the state of {}", self.to);
        if self.args.dry_run {
            self.report(&what, &planned)?;
            return Ok(Ending::Otherwise);
        }
        if !self.args.yes && !confirmed(&what)? {
            return Err("nothing was written".into());
        }
        let mut done = self.write().await?;
        self.find_changes_of_others(&mut done).await?;
        let text = format!(
            "{} puts and {} deletes written, up to revision {}, to bring back the state of {}",
            done.puts,
            done.deletes,
            done.revisions.last().unwrap_or(&0),
            self.to
        );
        if done.conflicts.is_empty() {
            self.report(&text, &done)?;
            return Ok(Ending::Success);
        }
        let conflicts = done.conflicts.len();
        let again = self.again();
        self.report(&format!("{text}; {conflicts} keys were changed meanwhile: {again} to write the rest"), &done)?;
        Ok(Ending::Otherwise)
    }

    /// Tells how to go on. A time such as `1h` before now would mean another revision then.
    fn again(&self) -> String {
        format!("run the command again with --to {}", self.to.revision)
    }

    fn report(&self, text: &str, count: &Count) -> Result<()> {
        let line = match self.args.output.write_out {
            Format::Simple => format!("{text}\n"),
            Format::Json => {
                let Count { puts, deletes, conflicts, revisions } = count;
                let mut object = json!({
                    "type": "summary", "to": self.to.revision, "puts": puts, "deletes": deletes,
                    "conflicts": conflicts.len(), "revision": revisions.last().unwrap_or(&self.head),
                });
                if let Some(ms) = self.to.unix_ms {
                    object["toTime"] = json!(shown_time(ms));
                }
                json_line(&object)
            }
        };
        Ok(print(line.as_bytes())?)
    }

    /// Compares the newest state with the past one.
    async fn differences(&self) -> Result<Differences> {
        let range = self.args.selection.range();
        let now = self.source.pairs(range.clone(), self.head).await?;
        Differences::new(now, self.source.pairs(range, self.to.revision).await?).await
    }

    /// Returns the lease with which a pair is written: its own one, if that still exists.
    fn lease(&self, pair: &KeyValue) -> i64 {
        if self.leases.lock().get(&pair.lease) == Some(&true) { pair.lease } else { 0 }
    }

    /// Asks whether the lease of a past pair exists, unless that is known.
    async fn look_up_lease(&self, id: i64) -> Result<()> {
        if id == 0 || self.leases.lock().contains_key(&id) {
            return Ok(());
        }
        let request = LeaseTimeToLiveRequest { id, keys: false };
        let answer = self.session.send(async |client| client.leases().lease_time_to_live(request).await).await;
        // The TTL of a lease that does not exist is -1.
        let exists = answer.map_err(|status| describe(&status))?.into_inner().ttl >= 0;
        self.leases.lock().insert(id, exists);
        Ok(())
    }

    async fn needs_write(&self, difference: &Difference) -> Result<bool> {
        let Some(wanted) = &difference.new else { return Ok(true) };
        let now = difference.old.as_ref();
        if now.is_some_and(|now| (&now.value, now.lease) == (&wanted.value, wanted.lease)) {
            return Ok(false);
        }
        self.look_up_lease(wanted.lease).await?;
        Ok(now.is_none_or(|now| now.value != wanted.value || now.lease != self.lease(wanted)))
    }

    /// Shows what is to be written, and counts it.
    async fn plan(&self) -> Result<Count> {
        let mut count = Count::default();
        let mut differences = self.differences().await?;
        while let Some(difference) = differences.next().await? {
            if !self.needs_write(&difference).await? {
                continue;
            }
            if difference.new.is_some() {
                count.puts += 1;
            } else {
                count.deletes += 1;
            }
            print(described(&difference, self.args.output, self.args.keys_only).as_bytes())?;
        }
        Ok(count)
    }

    /// Writes what differs.
    async fn write(&self) -> Result<Count> {
        let mut count = Count::default();
        let mut differences = self.differences().await?;
        let (mut batch, mut bytes) = (Vec::new(), 0);
        loop {
            let next = differences.next().await.map_err(|error| self.interrupted(&error.to_string(), &count))?;
            let Some(difference) = next else { break };
            let needed = self.needs_write(&difference).await;
            if !needed.map_err(|error| self.interrupted(&error.to_string(), &count))? {
                continue;
            }
            // The compare, the operation and the read each have the key.
            let len =
                difference.key().len() * 3 + difference.new.as_ref().map_or(0, |pair| pair.value.len()) + FRAMING_BYTES;
            if batch.len() == self.args.txn_ops as usize || (bytes + len > TXN_BYTES && !batch.is_empty()) {
                self.commit(std::mem::take(&mut batch), &mut count).await?;
                bytes = 0;
            }
            bytes += len;
            batch.push(difference);
        }
        if !batch.is_empty() {
            self.commit(batch, &mut count).await?;
        }
        Ok(count)
    }

    /// Writes some keys in one transaction, or none of them if one was changed since the plan.
    async fn commit(&self, batch: Vec<Difference>, count: &mut Count) -> Result<()> {
        let request = self.transaction(&batch);
        let answer = self.session.send(async |client| client.kv().txn(request.clone()).await).await;
        let refused = |status: Status| self.interrupted(&with_remedy(&describe(&status), &batch), count);
        let answer = answer.map_err(refused)?.into_inner();
        if answer.succeeded {
            let puts = batch.iter().filter(|difference| difference.new.is_some()).count();
            count.puts += puts;
            count.deletes += batch.len() - puts;
            count.revisions.extend(answer.header.map(|header| header.revision));
            return Ok(());
        }
        let found = self.found_revisions(&batch, answer.responses).await;
        let found = found.map_err(|status| self.interrupted(&describe(&status), count))?;
        for (difference, found) in batch.iter().zip(found) {
            let planned = difference.old.as_ref().map_or(0, |pair| pair.mod_revision);
            // A key that was created and deleted again is found among the changes of others.
            if found != planned {
                count.conflicts.insert(difference.key().to_vec());
                print(self.conflict(difference.key(), planned, found).as_bytes())?;
            }
        }
        Ok(())
    }

    /// Returns the transaction that writes some keys. If a compare fails, it reads all of them, to find the changed ones.
    /// That of a single key does not: beside the longest values there is no room for a read. See
    /// [`Self::found_revisions`].
    fn transaction(&self, batch: &[Difference]) -> TxnRequest {
        let compare = batch.iter().map(|difference| Compare {
            result: CompareResult::Equal.into(),
            target: CompareTarget::Mod.into(),
            key: difference.key().to_vec().into(),
            target_union: Some(TargetUnion::ModRevision(difference.old.as_ref().map_or(0, |pair| pair.mod_revision))),
            ..Default::default()
        });
        let success = batch.iter().map(|difference| match &difference.new {
            Some(pair) => Request::RequestPut(PutRequest {
                key: pair.key.clone(),
                value: pair.value.clone(),
                lease: self.lease(pair),
                ..Default::default()
            }),
            None => Request::RequestDeleteRange(DeleteRangeRequest {
                key: difference.key().to_vec().into(),
                ..Default::default()
            }),
        });
        let read: &[Difference] = if batch.len() == 1 { &[] } else { batch };
        let failure = read.iter().map(|difference| Request::RequestRange(newest(difference)));
        let op = |request| RequestOp { request: Some(request) };
        TxnRequest {
            compare: compare.collect(),
            success: success.map(op).collect(),
            failure: failure.map(op).collect(),
        }
    }

    /// Returns the present mod_revisions of the keys of a transaction whose compares have failed; 0: the key does not
    /// exist.
    async fn found_revisions(
        &self,
        batch: &[Difference],
        responses: Vec<ResponseOp>,
    ) -> std::result::Result<Vec<i64>, Status> {
        let ranges: Vec<RangeResponse> = if let [single] = batch {
            vec![self.session.send(async |client| client.kv().range(newest(single)).await).await?.into_inner()]
        } else {
            let range = |response: ResponseOp| match response.response {
                Some(Response::ResponseRange(range)) => range,
                _ => RangeResponse::default(),
            };
            responses.into_iter().map(range).collect()
        };
        Ok(ranges.iter().map(|range| range.kvs.first().map_or(0, |pair| pair.mod_revision)).collect())
    }

    /// Finds keys of the range that others have changed since the plan: after their transaction, or without one because
    /// the plan did not contain them.
    async fn find_changes_of_others(&self, count: &mut Count) -> Result<()> {
        let head = self.source.state().await.map_err(|error| self.interrupted(&error.to_string(), count))?.revision;
        if head <= self.head {
            return Ok(());
        }
        let (key, range_end) = self.args.selection.range();
        let request = HistoryChangesRequest {
            key: key.into(),
            range_end: range_end.into(),
            from_revision: self.head + 1,
            to_revision: head,
            newest_first: false,
            limit: 0,
        };
        let changes = self.source.changes(request).await;
        let mut changes = changes.map_err(|error| self.interrupted(&error.to_string(), count))?;
        loop {
            let page = changes.message().await.map_err(|status| self.interrupted(&failed(&status), count))?;
            let Some(page) = page else { return Ok(()) };
            for pair in page.changes.into_iter().filter_map(|change| change.kv) {
                let is_own = count.revisions.binary_search(&pair.mod_revision).is_ok();
                if !is_own && count.conflicts.insert(pair.key.to_vec()) {
                    print(self.changed_by_other(&pair).as_bytes())?;
                }
            }
        }
    }

    fn interrupted(&self, error: &str, count: &Count) -> String {
        format!(
            "{error}; {} puts and {} deletes were written before: {} to continue",
            count.puts,
            count.deletes,
            self.again()
        )
    }

    /// Describes a key that was changed since the plan and is not in a transaction that was refused for it.
    fn changed_by_other(&self, pair: &KeyValue) -> String {
        match self.args.output.write_out {
            Format::Simple => {
                format!("conflict  {}  was changed by others at revision {}\n", shown_key(&pair.key), pair.mod_revision)
            }
            Format::Json => {
                let mut object = key_json(&pair.key);
                object.insert("type".to_owned(), json!("conflict"));
                object.insert("foundRevision".to_owned(), json!(pair.mod_revision));
                json_line(&Value::from(object))
            }
        }
    }

    /// Describes a key that was changed since the plan. Revision 0: the key does not exist.
    fn conflict(&self, key: &[u8], planned: i64, found: i64) -> String {
        let shown = |revision: i64| if revision == 0 { "absent".to_owned() } else { format!("revision {revision}") };
        match self.args.output.write_out {
            Format::Simple => {
                let key = shown_key(key);
                format!(
                    "conflict  {key}  was {}, now {}: it and its transaction are not written\n",
                    shown(planned),
                    shown(found)
                )
            }
            Format::Json => {
                let mut object = key_json(key);
                object.insert("type".to_owned(), json!("conflict"));
                object.insert("plannedRevision".to_owned(), json!(planned));
                object.insert("foundRevision".to_owned(), json!(found));
                json_line(&Value::from(object))
            }
        }
    }
}

/// Returns the request that reads the newest revision of a key.
fn newest(difference: &Difference) -> RangeRequest {
    RangeRequest { key: difference.key().to_vec().into(), keys_only: true, ..Default::default() }
}

/// Returns the error about a transaction that the server has refused, with the flag that helps.
fn with_remedy(error: &str, batch: &[Difference]) -> String {
    match batch {
        [single] if error.contains("request is too large") => {
            format!("{error}: {} (see the server's --max-request-bytes)", shown_key(single.key()))
        }
        _ if ["too many operations", "request is too large"].iter().any(|text| error.contains(text)) => {
            format!("{error} (see --txn-ops)")
        }
        _ => error.to_owned(),
    }
}

/// Asks on the terminal.
fn confirmed(what: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Err("standard input is no terminal: use --yes to write, or --dry-run".into());
    }
    let mut stderr = std::io::stderr();
    write!(stderr, "{what}. Write them as new revisions? [y/N] ")?;
    stderr.flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}
