//! `orlop history`: the versions of keys, who wrote them, and what changed from each to the next.

use std::collections::HashMap;

use orlop_client::describe;
use orlop_objects::{LastManagers, Manager, Managers, Shown, diff};
use orlop_wire::proto::client::{
    etcdserverpb::WatchCreateRequest,
    mvccpb::{KeyValue, event::EventType},
    orlopb::{HistoryChange, HistoryChangesRequest, HistoryStateResponse},
};
use serde_json::json;

use super::{
    Ending, Result,
    selection::Selection,
    source::{NO_TIMES, Source, SourceFlags, TooEarly, failed, retention_hint},
    text::{OutputFlags, heading, indented, key_json, pair_json},
    time::Point,
};
use crate::{
    output::{Format, Reader, json_line, print_to_reader},
    text::shown_time,
};

/// Lines around a change.
const CONTEXT_LINES: usize = 2;
/// Maximum number of versions that are kept to be compared with the next ones of their keys, and of their bytes.
const KNOWN_MAX: usize = 10_000;
const KNOWN_BYTES_MAX: usize = 64 << 20;
/// Bytes that a line of a kept version takes in addition to its text.
const LINE_BYTES: usize = 64;

#[derive(Debug, clap::Args)]
pub struct HistoryArgs {
    #[command(flatten)]
    selection: Selection,

    /// First point: a revision, a duration before now (2h) or a time in UTC [default: the oldest that is known]
    #[arg(long, value_name = "REV|TIME")]
    since: Option<Point>,

    /// Only the newest versions of a single key
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,

    /// Only one line for each version
    #[arg(long)]
    brief: bool,

    /// Go on with new versions as they come
    #[arg(short, long)]
    follow: bool,

    #[command(flatten)]
    output: OutputFlags,

    #[command(flatten)]
    source: SourceFlags,
}

/// Runs `orlop history`.
///
/// # Errors
///
/// A text for the operator.
pub async fn run(args: HistoryArgs) -> Result<Ending> {
    args.selection.check()?;
    if args.limit.is_some() && args.selection.is_prefix() {
        return Err("--limit is for a single key; use --since for a prefix".into());
    }
    let source = args.source.open().await?;
    let ending = Printer { known: Known::default(), args: &args, source: &source }.run().await;
    source.close().await?;
    ending
}

struct Printer<'a> {
    args: &'a HistoryArgs,
    source: &'a Source,
    known: Known,
}

/// What is known of each key, to compare the next version with.
#[derive(Default)]
struct Known {
    versions: HashMap<Vec<u8>, Last>,
    /// Approximate size of the versions.
    bytes: usize,
}

/// What is known of the versions of a key before the next one.
#[derive(Default)]
struct Last {
    /// The version before; `None`: the key did not exist, or what changed is not printed.
    shown: Option<Shown>,
    managers: LastManagers,
}

impl Known {
    fn take(&mut self, key: &[u8]) -> Option<Last> {
        let last = self.versions.remove(key)?;
        self.bytes -= size(key, &last);
        Some(last)
    }

    /// Keeps a version. If there are too many, all others are forgotten, and are read again when they are needed.
    fn keep(&mut self, key: &[u8], mut last: Last) {
        if let Some(shown) = &mut last.shown {
            // Only the lines are compared.
            shown.json = serde_json::Value::Null;
        }
        self.take(key);
        let bytes = size(key, &last);
        if self.versions.len() == KNOWN_MAX || self.bytes + bytes > KNOWN_BYTES_MAX {
            *self = Self::default();
        }
        self.bytes += bytes;
        self.versions.insert(key.to_vec(), last);
    }
}

fn size(key: &[u8], last: &Last) -> usize {
    let lines = last.shown.iter().flat_map(Shown::lines);
    key.len() + lines.map(|line| line.len() + LINE_BYTES).sum::<usize>() + last.managers.bytes()
}

impl Printer<'_> {
    async fn run(mut self) -> Result<Ending> {
        let state = self.source.state().await?;
        let from_revision = self.start_revision(&state).await?;
        let (mut found, mut reader) = (0, Reader::Present);
        if from_revision <= state.revision {
            (found, reader) = self.print_past(from_revision, state.revision).await?;
        }
        if found > 0 {
            self.explain_unknown_times(&state);
        }
        if self.args.follow && reader == Reader::Present {
            found += self.follow(state.revision + 1).await?;
        }
        if found == 0 {
            self.args.selection.report_nothing_found(None);
            return Ok(Ending::Otherwise);
        }
        Ok(Ending::Success)
    }

    /// Names the reason on standard error if no version has a time.
    fn explain_unknown_times(&self, state: &HistoryStateResponse) {
        // A server that keeps the history makes its first record soon after its start.
        let are_known = state.first_moment.is_some() || state.retention_seconds > 0;
        let is_explained = matches!(self.args.since, Some(Point::Ago(_) | Point::UnixMs(_)));
        if !are_known && !is_explained {
            eprintln!("orlop: {NO_TIMES}");
        }
    }

    /// Returns the first revision to print.
    async fn start_revision(&self, state: &HistoryStateResponse) -> Result<i64> {
        match self.args.since {
            // With this revision, the error of a follower tells to go on.
            Some(Point::Revision(next)) if self.args.follow && next == state.revision + 1 => Ok(next),
            // The state at a point contains changes up to it.
            Some(point @ (Point::Ago(_) | Point::UnixMs(_))) => match self.source.revision_at(point).await {
                Ok(revision) => Ok(revision + 1),
                Err(error) if error.is::<TooEarly>() => {
                    eprintln!("orlop: {error}; all known versions are printed");
                    Ok(state.first_revision)
                }
                Err(error) => Err(error),
            },
            Some(point) => self.source.revision_at(point).await,
            None => {
                if self.args.selection.is_prefix() && state.first_revision > 1 {
                    eprintln!(
                        "orlop: the history begins at revision {}; keys not changed since then are not printed",
                        state.first_revision
                    );
                }
                Ok(state.first_revision)
            }
        }
    }

    /// Returns the version of a single key at the first readable revision, if its change is compacted.
    async fn oldest(&self, first_revision: i64) -> Result<Option<HistoryChange>> {
        if self.args.since.is_some() || self.args.selection.is_prefix() {
            return Ok(None);
        }
        let pair = self.source.pair(&self.args.selection.range().0, first_revision).await?;
        let pair = pair.filter(|pair| pair.mod_revision < first_revision);
        Ok(pair.map(|pair| HistoryChange { kv: Some(pair), ..HistoryChange::default() }))
    }

    /// Prints the versions in [from, to] as long as there is a reader. Returns the number of versions.
    async fn print_past(&mut self, from_revision: i64, to_revision: i64) -> Result<(usize, Reader)> {
        let request = self.changes_request(from_revision, to_revision);
        let oldest = self.oldest(from_revision).await?;
        if let Some(limit) = self.args.limit {
            let mut newest = Vec::new();
            let request = HistoryChangesRequest { newest_first: true, limit: i64::from(limit), ..request };
            let mut stream = self.source.changes(request).await?;
            while let Some(page) = stream.message().await.map_err(|status| failed(&status))? {
                newest.extend(page.changes);
            }
            newest.extend(oldest.filter(|_| newest.len() < limit as usize));
            let found = newest.len();
            for change in newest.into_iter().rev() {
                if self.print(change).await? == Reader::Gone {
                    return Ok((found, Reader::Gone));
                }
            }
            return Ok((found, Reader::Present));
        }
        let mut found = 0;
        if let Some(oldest) = oldest {
            found += 1;
            if self.print(oldest).await? == Reader::Gone {
                return Ok((found, Reader::Gone));
            }
        }
        let (changes, reader) = self.print_changes(request).await?;
        Ok((found + changes, reader))
    }

    /// Returns the request for the changes in [from, to].
    fn changes_request(&self, from_revision: i64, to_revision: i64) -> HistoryChangesRequest {
        let (key, range_end) = self.args.selection.range();
        HistoryChangesRequest {
            key: key.into(),
            range_end: range_end.into(),
            from_revision,
            to_revision,
            newest_first: false,
            limit: 0,
        }
    }

    /// Prints changes as long as there is a reader. Returns the number of versions.
    async fn print_changes(&mut self, request: HistoryChangesRequest) -> Result<(usize, Reader)> {
        let mut found = 0;
        let mut stream = self.source.changes(request).await?;
        while let Some(page) = stream.message().await.map_err(|status| failed(&status))? {
            for change in page.changes {
                found += 1;
                if self.print(change).await? == Reader::Gone {
                    return Ok((found, Reader::Gone));
                }
            }
        }
        Ok((found, Reader::Present))
    }

    /// Prints new versions until the reader of the output is gone; the end of the server is an error. If the output is
    /// read so slowly that a compaction overtakes the watch, prints the versions meanwhile from the history. Returns the
    /// number of versions.
    async fn follow(&mut self, mut next_revision: i64) -> Result<usize> {
        let mut found = 0;
        loop {
            let watched = self.watch(&mut next_revision).await;
            let watched = watched.map_err(|error| format!("{error}; go on with --since {next_revision}"));
            let (versions, reader) = watched?;
            found += versions;
            if reader == Reader::Gone {
                return Ok(found);
            }
            let state = self.source.state().await?;
            if next_revision < state.first_revision {
                return Err(format!(
                    "revisions {next_revision} to {} were compacted meanwhile, and their versions are not known{}",
                    state.first_revision - 1,
                    retention_hint(&state)
                )
                .into());
            }
            let request = self.changes_request(next_revision, state.revision);
            let (versions, reader) = self.print_changes(request).await?;
            found += versions;
            if reader == Reader::Gone {
                return Ok(found);
            }
            next_revision = state.revision + 1;
        }
    }

    /// Prints new versions until the reader of the output is gone, or a compaction overtakes the watch. A reader that is
    /// gone is noticed when the next version is printed. Returns the number of versions. Then, and after an error,
    /// everything before `next_revision` is printed.
    async fn watch(&mut self, next_revision: &mut i64) -> Result<(usize, Reader)> {
        // The token may have expired while the output was read.
        self.source.log_in_again().await?;
        let (key, range_end) = self.args.selection.range();
        let create = WatchCreateRequest {
            key: key.into(),
            range_end: range_end.into(),
            start_revision: *next_revision,
            ..Default::default()
        };
        let mut events = self.source.client().open_watch(create).await.map_err(|status| describe(&status))?;
        let mut found = 0;
        while let Some(answer) = events.message().await.map_err(|status| describe(&status))? {
            if answer.canceled && answer.compact_revision > 0 {
                return Ok((found, Reader::Present));
            }
            if answer.canceled {
                return Err(format!("the server has ended the watch: {}", answer.cancel_reason).into());
            }
            // All events of a revision come together.
            let next = answer.events.last().and_then(|event| event.kv.as_ref()).map(|pair| pair.mod_revision + 1);
            for event in answer.events {
                let deleted = event.r#type() == EventType::Delete;
                let Some(pair) = event.kv else { continue };
                *next_revision = pair.mod_revision;
                // It may have been written some time ago, as after a pause of the network.
                let unix_ms = super::time::now_ms();
                let change = HistoryChange { kv: Some(pair), deleted, unix_ms, time_is_latest: true };
                found += 1;
                if self.print(change).await? == Reader::Gone {
                    return Ok((found, Reader::Gone));
                }
            }
            *next_revision = next.unwrap_or(*next_revision);
        }
        Err("the server has ended the watch".into())
    }

    async fn print(&mut self, mut change: HistoryChange) -> Result<Reader> {
        let Some(pair) = change.kv.take() else { return Ok(Reader::Present) };
        let args = self.args;
        let mut last = self.last(&pair).await?;
        let managers = writers(&mut last.managers, &pair, &change);
        let shown = || (!change.deleted).then(|| Shown::of(&pair.value, args.output.view()));
        let text = match args.output.write_out {
            Format::Json => json_line(&version_json(&pair, shown().as_ref(), &change, &managers)),
            Format::Simple if args.brief => heading(&pair, &change, &managers),
            Format::Simple => {
                let before = std::mem::replace(&mut last.shown, shown());
                heading(&pair, &change, &managers) + &indented(&self.changed(before.as_ref(), last.shown.as_ref()))
            }
        };
        self.known.keep(&pair.key, last);
        Ok(print_to_reader(text.as_bytes())?)
    }

    /// Describes what changed from the version before to this one. `None`: the key does not exist.
    fn changed(&self, before: Option<&Shown>, shown: Option<&Shown>) -> String {
        match (before, shown) {
            (_, None) => String::new(),
            (None, Some(new)) => new.text(),
            (Some(_), Some(_)) => diff(before, shown, CONTEXT_LINES).render(self.args.output.style()),
        }
    }

    /// Returns what is known of the versions before this one. Reads the one before only to print what changed.
    async fn last(&mut self, pair: &KeyValue) -> Result<Last> {
        if let Some(known) = self.known.take(&pair.key) {
            return Ok(known);
        }
        let prints_changes = self.args.output.write_out == Format::Simple && !self.args.brief;
        if !prints_changes || pair.version <= 1 || pair.mod_revision <= 1 {
            return Ok(Last::default());
        }
        let before = self.source.pair(&pair.key, pair.mod_revision - 1).await?;
        Ok(before.map_or_else(Last::default, |before| Last {
            shown: Some(Shown::of(&before.value, self.args.output.view())),
            managers: LastManagers::Known(Managers::of(&before.value)),
        }))
    }
}

/// Returns the field managers that wrote a version, as far as that is known.
fn writers(last: &mut LastManagers, pair: &KeyValue, change: &HistoryChange) -> Vec<Manager> {
    if change.deleted {
        return Vec::new();
    }
    if pair.version == 1 {
        last.begin();
    }
    last.advance(Managers::of(&pair.value), (change.unix_ms != 0).then_some(change.unix_ms))
}

fn version_json(
    pair: &KeyValue,
    shown: Option<&Shown>,
    change: &HistoryChange,
    managers: &[Manager],
) -> serde_json::Value {
    let mut object = match shown {
        Some(shown) => pair_json(pair, shown),
        None => {
            let mut object = key_json(&pair.key);
            object.insert("modRevision".to_owned(), json!(pair.mod_revision));
            object
        }
    };
    object.insert("type".to_owned(), json!(if shown.is_some() { "put" } else { "delete" }));
    if change.unix_ms != 0 {
        object.insert("time".to_owned(), json!(shown_time(change.unix_ms)));
    }
    if change.time_is_latest {
        object.insert("timeIsLatest".to_owned(), json!(true));
    }
    if !managers.is_empty() {
        object.insert("managers".to_owned(), json!(managers));
    }
    object.into()
}

#[cfg(test)]
mod tests {
    use orlop_objects::Secrets;

    use super::*;

    #[test]
    fn known_versions_are_bounded() {
        let shown = Shown::of("a line\n".repeat(100_000).as_bytes(), Secrets::Mask);
        let mut known = Known::default();
        let mut kept = 0_usize;
        for number in 0..KNOWN_MAX * 2 {
            let shown = (number < 20).then(|| shown.clone());
            known.keep(&number.to_be_bytes(), Last { shown, managers: LastManagers::Unknown });
            kept = kept.max(known.bytes);
            assert!(known.versions.len() <= KNOWN_MAX && known.bytes <= KNOWN_BYTES_MAX);
        }
        assert!(kept > KNOWN_BYTES_MAX / 2, "{kept}");
        let newest = (KNOWN_MAX * 2 - 1).to_be_bytes();
        assert!(known.take(&newest).is_some_and(|last| last.shown.is_none()));
        assert!(known.take(&newest).is_none());
        let keys: Vec<Vec<u8>> = known.versions.keys().cloned().collect();
        keys.iter().for_each(|key| assert!(known.take(key).is_some()));
        assert_eq!(known.bytes, 0);

        // Without the values, as for `--brief`, the managers can take as much.
        let managers = many_managers();
        let managers_bytes = managers.bytes();
        assert!(managers_bytes * KNOWN_MAX > KNOWN_BYTES_MAX, "{managers_bytes}");
        let mut kept = 0_usize;
        for number in 0..KNOWN_MAX {
            known.keep(&number.to_be_bytes(), Last { shown: None, managers: managers.clone() });
            kept = kept.max(known.versions.len());
        }
        let kept_max = KNOWN_BYTES_MAX / managers_bytes;
        assert!(kept <= kept_max && kept > kept_max / 2, "{kept}, at most {kept_max}");
        assert!(known.bytes <= KNOWN_BYTES_MAX);
    }

    /// Returns managers with long names, half of them without a time.
    fn many_managers() -> LastManagers {
        let subresource = "s".repeat(128);
        let entry = |number: usize| {
            let time = number.is_multiple_of(2).then_some("2020-02-03T04:05:00Z");
            let manager = format!("{number:0128}");
            json!({"manager": manager, "operation": "Update", "subresource": subresource, "time": time})
        };
        let entries: Vec<_> = (0..64).map(entry).collect();
        let value = json!({"apiVersion": "v1", "kind": "T", "metadata": {"managedFields": entries}});
        LastManagers::Known(Managers::of(value.to_string().as_bytes()))
    }
}
