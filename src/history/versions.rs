//! `orlop history`: the versions of keys, and what changed from each to the next.

use std::collections::HashMap;

use orlop_client::describe;
use orlop_objects::{Shown, diff};
use orlop_wire::proto::client::{
    etcdserverpb::{WatchCreateRequest, WatchRequest, watch_client::WatchClient, watch_request::RequestUnion},
    mvccpb::{KeyValue, event::EventType},
    orlopb::{HistoryChange, HistoryChangesRequest},
};
use serde_json::json;

use super::{
    Ending, Format, Result,
    selection::Selection,
    source::{Source, SourceFlags, failed},
    text::{OutputFlags, heading, indented, key_json, pair_json},
    time::Point,
};
use crate::output::{Reader, print_to_reader};

/// Lines around a change.
const CONTEXT_LINES: usize = 2;
/// Maximum number of versions that are kept to be compared with the next ones of their keys.
const KNOWN_MAX: usize = 10_000;

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

pub(super) async fn run(args: HistoryArgs) -> Result<Ending> {
    if args.limit.is_some() && args.selection.is_prefix() {
        return Err("--limit is for a single key; use --since for a prefix".into());
    }
    let source = args.source.open().await?;
    let ending = Printer { known: HashMap::new(), args: &args, source: &source }.run().await;
    source.close().await?;
    ending
}

struct Printer<'a> {
    args: &'a HistoryArgs,
    source: &'a Source,
    /// The newest known version of each key, to compare the next one with; `None`: the key was deleted.
    known: HashMap<Vec<u8>, Option<Shown>>,
}

impl Printer<'_> {
    async fn run(mut self) -> Result<Ending> {
        let state = self.source.state().await?;
        let from_revision = match self.args.since {
            // The state at a point contains changes up to it.
            Some(point @ (Point::Ago(_) | Point::UnixMs(_))) => match self.source.revision_at(point).await {
                Ok(revision) => revision + 1,
                Err(_) if state.first_moment.is_none_or(|first| point.unix_ms() < Some(first.unix_ms)) => {
                    state.first_revision
                }
                Err(error) => return Err(error),
            },
            Some(point) => self.source.revision_at(point).await?,
            None => state.first_revision,
        };
        let (mut found, mut reader) = (0, Reader::Present);
        if from_revision <= state.revision {
            (found, reader) = self.print_past(from_revision, state.revision).await?;
        }
        if self.args.follow && reader == Reader::Present {
            found += self.follow(state.revision + 1).await?;
        }
        Ok(if found == 0 { Ending::Otherwise } else { Ending::Success })
    }

    /// Prints the versions in [from, to] as long as there is a reader. Returns the number of versions.
    async fn print_past(&mut self, from_revision: i64, to_revision: i64) -> Result<(usize, Reader)> {
        let (key, range_end) = self.args.selection.range();
        let mut request = HistoryChangesRequest {
            key: key.into(),
            range_end: range_end.into(),
            from_revision,
            to_revision,
            newest_first: false,
            limit: 0,
        };
        let mut found = 0;
        if let Some(limit) = self.args.limit {
            (request.newest_first, request.limit) = (true, i64::from(limit));
            let mut newest = Vec::new();
            let mut stream = self.source.changes(request).await?;
            while let Some(page) = stream.message().await.map_err(|status| failed(&status))? {
                newest.extend(page.changes);
            }
            found = newest.len();
            for change in newest.into_iter().rev() {
                if self.print(change).await? == Reader::Gone {
                    return Ok((found, Reader::Gone));
                }
            }
            return Ok((found, Reader::Present));
        }
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

    /// Prints new versions until the server ends or the reader of the output is gone. A reader that is gone is noticed when the
    /// next version is printed. Returns the number of versions.
    async fn follow(&mut self, start_revision: i64) -> Result<usize> {
        let (key, range_end) = self.args.selection.range();
        let create =
            WatchCreateRequest { key: key.into(), range_end: range_end.into(), start_revision, ..Default::default() };
        let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        let client = self.source.client();
        let mut watch = WatchClient::with_origin(client.connection().clone(), client.origin().clone())
            .max_decoding_message_size(usize::MAX);
        // The request stream stays open, because its end ends the watch.
        let requests = tokio_stream::StreamExt::chain(tokio_stream::once(create), tokio_stream::pending());
        let mut events = watch.watch(requests).await.map_err(|status| describe(&status))?.into_inner();
        let mut found = 0;
        while let Some(answer) = events.message().await.map_err(|status| describe(&status))? {
            if answer.canceled {
                return Err(format!("the server has ended the watch: {}", answer.cancel_reason).into());
            }
            for event in answer.events {
                let deleted = event.r#type() == EventType::Delete;
                let unix_ms = super::time::now_ms();
                let change = HistoryChange { kv: event.kv, deleted, unix_ms, time_is_latest: false };
                found += 1;
                if self.print(change).await? == Reader::Gone {
                    return Ok(found);
                }
            }
        }
        Ok(found)
    }

    async fn print(&mut self, mut change: HistoryChange) -> Result<Reader> {
        let Some(pair) = change.kv.take() else { return Ok(Reader::Present) };
        let shown = (!change.deleted).then(|| Shown::of(&pair.value, self.args.output.view()));
        let text = match self.args.output.write_out {
            Format::Json => format!("{}\n", version_json(&pair, shown.as_ref(), &change)),
            Format::Simple if self.args.brief => heading(&pair, &change),
            Format::Simple => {
                let before = self.before(&pair).await?;
                let changed = match (&before, &shown) {
                    (_, None) => String::new(),
                    (None, Some(new)) => new.text(),
                    (Some(old), Some(new)) => {
                        diff(Some(old), Some(new), CONTEXT_LINES).render(self.args.output.style())
                    }
                };
                heading(&pair, &change) + &indented(&changed)
            }
        };
        if self.known.len() == KNOWN_MAX {
            self.known.clear();
        }
        self.known.insert(pair.key.to_vec(), shown);
        Ok(print_to_reader(text.as_bytes())?)
    }

    /// Returns the version before this one, if it is known or can be read.
    async fn before(&mut self, pair: &KeyValue) -> Result<Option<Shown>> {
        if let Some(known) = self.known.remove(&pair.key[..]) {
            return Ok(known);
        }
        if pair.version <= 1 || pair.mod_revision <= 1 {
            return Ok(None);
        }
        // It may be older than the history.
        let before = self.source.pair(&pair.key, pair.mod_revision - 1).await.ok().flatten();
        Ok(before.map(|before| Shown::of(&before.value, self.args.output.view())))
    }
}

fn version_json(pair: &KeyValue, shown: Option<&Shown>, change: &HistoryChange) -> serde_json::Value {
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
        object.insert("time".to_owned(), json!(super::time::shown_time(change.unix_ms)));
    }
    if change.time_is_latest {
        object.insert("timeIsLatest".to_owned(), json!(true));
    }
    object.into()
}
