//! Changes as they happen: a watch of the server, sent to the browser as Server-Sent Events.
//!
//! A message contains rows of a table. At most [`ROWS_MAX`] rows are sent every [`PAUSE`]; of more events, only the number
//! is shown. Values are not sent. The id of a message is the revision up to which changes were sent: a browser that
//! connects again sends it, and receives the changes after it. Without changes, the id advances with the progress of the
//! watch: otherwise a compaction would seem to have removed changes that the browser has not received.
//!
//! ```text
//! server ── watch ──▶ reading task ── Unread: at most ROWS_MAX rows ──▶ Events ──▶ browser
//! ```
//!
//! A task reads the watch as fast as the server sends, also while the browser reads nothing: events that the page leaves
//! unread fill the flow-control window of the connection to the server, which all visitors share. The task ends with the
//! response, and after [`STREAM_MAX`].

use std::{collections::VecDeque, convert::Infallible, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::State,
    response::{IntoResponse as _, Response},
};
use futures_util::stream;
use http::{HeaderMap, header};
use maud::html;
use orlop_client::Client;
use orlop_core::clock;
use orlop_wire::proto::client::{
    etcdserverpb::WatchResponse,
    mvccpb::{Event, event::EventType},
};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, watch},
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};

use super::{
    backend::{self, Failure, Watch},
    pages,
    query::Query,
    server::Console,
    session::{Access, Visitor, Who},
};
use crate::text::time_of_day;

/// Maximum number of rows per message.
const ROWS_MAX: usize = 50;
/// Minimum time between two messages.
const PAUSE: Duration = Duration::from_millis(250);
/// Number of columns of the table.
const COLUMNS: usize = pages::events::COLUMNS.len();
/// Time after which the session and its rights are checked. The message that follows shows that the connection is alive.
const CHECK_PAUSE: Duration = Duration::from_secs(15);
/// Maximum time of a stream. Browsers connect again.
const STREAM_MAX: Duration = Duration::from_secs(60 * 60);

/// Responds with the changes below a prefix.
pub(super) async fn stream(
    State(console): State<Console>,
    headers: HeaderMap,
    visitor: Visitor,
    query: Query,
) -> Response {
    match begin(console.clone(), headers.clone(), visitor, &query).await {
        Ok(events) => {
            let body = stream::unfold(events, |mut events| async {
                let text = events.next().await?;
                Some((Ok::<_, Infallible>(Bytes::from(text)), events))
            });
            let kind = [(header::CONTENT_TYPE, "text/event-stream")];
            (kind, Body::from_stream(body)).into_response()
        }
        Err(failure) => {
            console.sessions.end_if_refused(&headers, &failure);
            pages::plain(&failure)
        }
    }
}

/// An open stream.
struct Events {
    console: Console,
    /// The request's, to check its session again.
    headers: HeaderMap,
    who: Who,
    prefix: Vec<u8>,
    watched: Arc<Watched>,
    next_message: Instant,
    next_check: Instant,
    stopping: watch::Receiver<bool>,
    /// The task that reads the watch. It ends when the set is dropped.
    _reading: JoinSet<()>,
    _permit: OwnedSemaphorePermit,
}

/// The state that the reading task and the response share.
struct Watched {
    unread: Mutex<Unread>,
    changed: Notify,
}

/// What the browser has not received yet.
#[derive(Default)]
struct Unread {
    /// The newest events, at most [`ROWS_MAX`]; the oldest first.
    rows: VecDeque<String>,
    /// Number of events before them.
    skipped: usize,
    /// The revision up to which changes were read.
    revision: i64,
    is_over: bool,
    /// Why the watch ended; `None`: the browser should connect again.
    reason: Option<String>,
}

async fn begin(console: Console, headers: HeaderMap, visitor: Visitor, query: &Query) -> Result<Events, Failure> {
    let permit = console.streams.clone().try_acquire_owned().map_err(|_| Failure::TooMany)?;
    let prefix = query.bytes("prefix");
    let mut begin = after(&headers, query);
    let mut watch = backend::watch(&visitor.client, &prefix, begin).await?;
    if begin > watch.head {
        // The store is another one, or older: a backup.
        watch = backend::watch(&visitor.client, &prefix, 0).await?;
        begin = 0;
    }
    if begin == 0 {
        begin = watch.head;
    }
    let watched = Arc::new(Watched::after(begin));
    let mut reading = JoinSet::new();
    reading.spawn(read(visitor.client, prefix.clone(), watch, Arc::clone(&watched)));
    let now = Instant::now();
    let stopping = console.stopping.clone();
    Ok(Events {
        console,
        headers,
        who: visitor.who,
        prefix,
        watched,
        next_message: now,
        next_check: now,
        stopping,
        _reading: reading,
        _permit: permit,
    })
}

/// Returns the revision up to which a browser has received the changes; 0 if it connects for the first time. Browsers send
/// the id of the last message when they connect again, and the script when it does.
fn after(headers: &HeaderMap, query: &Query) -> i64 {
    let last: Option<i64> = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok());
    last.filter(|last| *last > 0).unwrap_or_else(|| query.number("after"))
}

/// Reads a watch until it ends, or for [`STREAM_MAX`].
async fn read(client: Client, prefix: Vec<u8>, mut watch: Watch, watched: Arc<Watched>) {
    let reading = async {
        loop {
            match watch.responses.message().await {
                Ok(Some(response)) if !response.canceled => watched.add(&response),
                Ok(Some(response)) if response.compact_revision > 0 => {
                    // The watch begins again at the first revision that is left.
                    watched.add_compaction(response.compact_revision);
                    let after = response.compact_revision - 1;
                    let Ok(next) = backend::watch(&client, &prefix, after).await else { return None };
                    watch = next;
                }
                Ok(Some(response)) => return Some(response.cancel_reason),
                // The server stops, or the connection to it was lost.
                Ok(None) | Err(_) => return None,
            }
        }
    };
    let reason = timeout(STREAM_MAX, reading).await.unwrap_or_default();
    watched.end(reason);
}

impl Watched {
    /// Returns the state at a revision after which the changes begin.
    fn after(revision: i64) -> Self {
        Self { unread: Mutex::new(Unread { revision, ..Unread::default() }), changed: Notify::new() }
    }

    fn add(&self, response: &WatchResponse) {
        self.unread.lock().add(response);
        self.changed.notify_one();
    }

    fn add_compaction(&self, revision: i64) {
        self.unread.lock().add_compaction(revision);
        self.changed.notify_one();
    }

    fn end(&self, reason: Option<String>) {
        {
            let mut unread = self.unread.lock();
            unread.is_over = true;
            unread.reason = reason;
        }
        self.changed.notify_one();
    }
}

impl Unread {
    fn add(&mut self, response: &WatchResponse) {
        let events = &response.events;
        let skipped = events.len().saturating_sub(ROWS_MAX);
        self.skipped += skipped;
        let received_ms = clock::unix_ms(clock::now());
        for event in &events[skipped..] {
            self.push(row(event, received_ms));
        }
        let read = match events.last() {
            Some(event) => event.kv.as_ref().map_or(0, |kv| kv.mod_revision),
            // The progress of the watch.
            None => response.header.as_ref().map_or(0, |header| header.revision),
        };
        self.revision = self.revision.max(read);
    }

    fn add_compaction(&mut self, revision: i64) {
        let row = html! {
            tr { td.muted colspan=(COLUMNS) { "Changes before revision " (revision) " are compacted and cannot be shown." } }
        };
        self.push(row.0);
        self.revision = self.revision.max(revision - 1);
    }

    fn push(&mut self, row: String) {
        if self.rows.len() == ROWS_MAX {
            self.rows.pop_front();
            self.skipped += 1;
        }
        self.rows.push_back(row);
    }

    /// Removes the rows, and returns them as a message; without rows, a message with the revision.
    fn take(&mut self) -> String {
        if self.rows.is_empty() {
            return message("begin", self.revision, "");
        }
        // The newest first, as the table shows them.
        let rows: String = self.rows.drain(..).rev().collect();
        let skipped = std::mem::take(&mut self.skipped);
        let note = html! {
            @if skipped > 0 {
                tr { td.muted colspan=(COLUMNS) { (skipped) " more events, which are not shown" } }
            }
        };
        message("rows", self.revision, &format!("{rows}{}", note.0))
    }
}

impl Events {
    /// Returns the next text for the browser; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        loop {
            if *self.stopping.borrow() {
                return None;
            }
            let (has_rows, is_over) = {
                let unread = self.watched.unread.lock();
                (!unread.rows.is_empty(), unread.is_over)
            };
            if is_over && !has_rows {
                let reason = self.watched.unread.lock().reason.take()?;
                return Some(message("failed", 0, &html! { (reason) }.0));
            }
            tokio::select! {
                biased;
                () = sleep_until(self.next_check) => {
                    self.next_check = Instant::now() + CHECK_PAUSE;
                    return if self.is_permitted().await { Some(self.take()) } else { None };
                }
                () = sleep_until(self.next_message), if has_rows => return Some(self.take()),
                // Cancel safe: the state was read before, and is read again in each round.
                () = self.watched.changed.notified() => {}
                _ = self.stopping.changed() => return None,
            }
        }
    }

    fn take(&mut self) -> String {
        self.next_message = Instant::now() + PAUSE;
        self.watched.unread.lock().take()
    }

    /// Returns whether the session still exists, or visitors still need not log in, and the user may still read what is
    /// watched. Ends the session if the server refuses its token.
    async fn is_permitted(&self) -> bool {
        let Ok(visitor) = self.console.visitor(&self.headers, Access::Check).await else { return false };
        if visitor.who != self.who {
            return false;
        }
        // Servers check the rights of a watch only when it begins, so another one is opened. A read of the range would
        // count all of its keys.
        let Err(failure) = backend::watch(&visitor.client, &self.prefix, 0).await else { return true };
        self.console.sessions.end_if_refused(&self.headers, &failure);
        !matches!(failure, Failure::LoggedOut | Failure::Denied(_))
    }
}

/// Formats a message with the revision as its id; 0: it has none. Its text must not contain line breaks, so they are
/// replaced.
fn message(name: &str, revision: i64, text: &str) -> String {
    let id = if revision > 0 { format!("id: {revision}\n") } else { String::new() };
    format!("event: {name}\n{id}data: {}\n\n", text.replace(['\n', '\r'], " "))
}

/// Returns the row of an event. The server does not send the time of a change, so the row has the time at which the page
/// received it, in milliseconds since 1970.
fn row(event: &Event, received_ms: i64) -> String {
    let kv = event.kv.clone().unwrap_or_default();
    let (what, is_put) = match event.r#type() {
        EventType::Put if kv.version == 1 => ("created", true),
        EventType::Put => ("changed", true),
        EventType::Delete => ("deleted", false),
    };
    html! {
        tr {
            td.number { (kv.mod_revision) }
            td.number { (time_of_day(received_ms)) }
            td { span class=(format!("badge {what}")) { (what) } }
            td.wide { (pages::names::key_link(&kv.key)) }
            td.number { @if is_put { (kv.version) } }
            td.number { @if is_put { (pages::bytes(kv.value.len() as u64)) } }
        }
    }
    .0
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use orlop_wire::proto::client::{etcdserverpb::ResponseHeader, mvccpb::KeyValue};

    use super::*;

    #[test]
    fn keys_are_escaped_and_stay_on_a_line() {
        let key = b"/a<script>\ndata: x\r\n\n\x1b[2J\xff";
        let kv = KeyValue { key: key.to_vec().into(), mod_revision: 7, version: 1, ..KeyValue::default() };
        let text = message("rows", 0, &row(&Event { kv: Some(kv), ..Event::default() }, 86_399_000));
        assert!(text.contains("<td class=\"number\">7</td><td class=\"number\">23:59:59</td>"), "{text}");
        assert!(!text.contains("<script>") && text.contains("&lt;script&gt;"), "{text}");
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(!text.contains(['\x1b', '\r']), "{text}");
    }

    #[test]
    fn newest_unread_events_are_kept_and_the_others_counted() {
        for (batches, rows, skipped) in [
            (&[1][..], 1, 0),
            (&[ROWS_MAX], ROWS_MAX, 0),
            (&[ROWS_MAX, 1], ROWS_MAX, 1),
            (&[3, ROWS_MAX + 7, 2], ROWS_MAX, 12),
        ] {
            let (mut unread, mut revision) = (Unread::default(), 0);
            for batch in batches {
                let next = |_| {
                    revision += 1;
                    let kv = KeyValue { key: "/a".into(), mod_revision: revision, ..KeyValue::default() };
                    Event { kv: Some(kv), ..Event::default() }
                };
                let events: Vec<Event> = (0..*batch).map(next).collect();
                unread.add(&WatchResponse { events, ..WatchResponse::default() });
            }
            let text = unread.take();
            assert_eq!(text.matches("<td class=\"wide\">").count(), rows, "{text}");
            assert!(text.contains(&format!("data: <tr><td class=\"number\">{revision}</td>")), "{text}");
            assert!(text.contains(&format!("\nid: {revision}\n")), "{text}");
            assert_eq!(text.contains("which are not shown"), skipped > 0, "{text}");
            assert_eq!(text.contains(&format!(">{skipped} more events")), skipped > 0, "{text}");
            assert!(unread.rows.is_empty() && unread.skipped == 0, "the next message begins anew");
        }
    }

    #[test]
    fn id_is_the_revision_up_to_which_events_were_read() {
        let response = |revision, changed: &[i64]| {
            let event = |revision: &i64| {
                let kv = KeyValue { key: "/a".into(), mod_revision: *revision, ..KeyValue::default() };
                Event { kv: Some(kv), ..Event::default() }
            };
            let header = Some(ResponseHeader { revision, ..ResponseHeader::default() });
            WatchResponse { header, events: changed.iter().map(event).collect(), ..WatchResponse::default() }
        };
        for (responses, name, id) in [
            (&[][..], "begin", 5),
            (&[response(8, &[])], "begin", 8),
            // The header of events can be ahead of them.
            (&[response(9, &[6, 7])], "rows", 7),
            (&[response(9, &[6, 7]), response(9, &[])], "rows", 9),
            (&[response(3, &[])], "begin", 5),
        ] {
            let mut unread = Unread { revision: 5, ..Unread::default() };
            responses.iter().for_each(|response| unread.add(response));
            let text = unread.take();
            assert!(text.starts_with(&format!("event: {name}\nid: {id}\n")), "{text}");
        }
    }

    #[test]
    fn rows_of_long_keys_are_short() {
        for len in [1_000, 5_000, 1_500_000] {
            let kv = KeyValue { key: vec![0xff; len].into(), mod_revision: 7, ..KeyValue::default() };
            let row = row(&Event { kv: Some(kv), ..Event::default() }, 0);
            assert!(row.len() < 24_000, "a key of {len} bytes: {} bytes", row.len());
            assert_eq!(row.contains("href="), len <= 5_000, "{len} bytes");
        }
    }

    #[test]
    fn browser_that_connects_again_receives_the_changes_after_the_last() {
        for (last, query, want) in [
            (None, "prefix=/a", 0),
            (None, "after=7", 7),
            (Some("9"), "after=7", 9),
            (Some("x"), "after=7", 7),
            (Some("-1"), "after=-1", 0),
        ] {
            let mut headers = HeaderMap::new();
            if let Some(last) = last {
                headers.insert("last-event-id", HeaderValue::from_static(last));
            }
            assert_eq!(after(&headers, &Query::parse(query.as_bytes())), want, "{last:?} {query}");
        }
    }
}
