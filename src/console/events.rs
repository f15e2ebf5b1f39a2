//! Changes as they happen: a watch of the server, sent to the browser as Server-Sent Events.
//!
//! A message contains rows of a table. At most [`ROWS_MAX`] rows are sent every [`PAUSE`]; of more events, only the number
//! is shown. A browser that does not read stops the stream, and the server then handles the watch as that of any slow
//! client. Values are not sent.

use std::{collections::VecDeque, convert::Infallible, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::State,
    response::{IntoResponse as _, Response},
};
use futures_util::stream;
use http::{HeaderMap, header};
use maud::html;
use orlop_core::types::prefix_end;
use orlop_wire::proto::client::{
    etcdserverpb::{WatchCreateRequest, WatchRequest, WatchResponse, watch_request::RequestUnion},
    mvccpb::{Event, event::EventType},
};
use tokio::{
    sync::{OwnedSemaphorePermit, watch},
    time::{Instant, sleep_until},
};
use tokio_stream::StreamExt as _;
use tonic::Streaming;

use super::{backend::Failure, pages, query::Query, server::Console, session::Visitor};

/// Maximum number of rows per message.
const ROWS_MAX: usize = 50;
/// Minimum time between two messages.
const PAUSE: Duration = Duration::from_millis(250);
/// Time after which the session is checked, and a comment shows that the connection is alive.
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
    match begin(console, headers, visitor, &query).await {
        Ok(events) => {
            let body = stream::unfold(events, |mut events| async {
                let text = events.next().await?;
                Some((Ok::<_, Infallible>(Bytes::from(text)), events))
            });
            let kind = [(header::CONTENT_TYPE, "text/event-stream")];
            (kind, Body::from_stream(body)).into_response()
        }
        Err(failure) => pages::plain(&failure),
    }
}

/// An open stream.
struct Events {
    console: Console,
    /// The request's, to check its session again.
    headers: HeaderMap,
    user: Option<String>,
    watch: Streaming<WatchResponse>,
    rows: VecDeque<String>,
    skipped: u64,
    next_message: Instant,
    next_check: Instant,
    end: Instant,
    stopping: watch::Receiver<bool>,
    _permit: OwnedSemaphorePermit,
}

async fn begin(console: Console, headers: HeaderMap, visitor: Visitor, query: &Query) -> Result<Events, Failure> {
    let permit = console.streams.clone().try_acquire_owned().map_err(|_| Failure::TooMany)?;
    let prefix = query.bytes("prefix");
    let create = WatchCreateRequest {
        key: if prefix.is_empty() { vec![0].into() } else { prefix.clone().into() },
        range_end: prefix_end(&prefix).into(),
        ..WatchCreateRequest::default()
    };
    let request = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    // The end of the requests would end the watch.
    let requests = tokio_stream::once(request).chain(tokio_stream::pending());
    let mut watch = visitor.client.watch().watch(requests).await?.into_inner();
    let created = watch.message().await?.ok_or_else(|| Failure::Unavailable("the watch ended".to_owned()))?;
    if created.canceled {
        return Err(if created.cancel_reason.contains("permission denied") {
            Failure::Denied(created.cancel_reason)
        } else {
            Failure::Unavailable(created.cancel_reason)
        });
    }
    let now = Instant::now();
    let stopping = console.stopping.clone();
    Ok(Events {
        console,
        headers,
        user: visitor.user,
        watch,
        rows: VecDeque::new(),
        skipped: 0,
        next_message: now,
        next_check: now,
        end: now + STREAM_MAX,
        stopping,
        _permit: permit,
    })
}

impl Events {
    /// Returns the next text for the browser; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        loop {
            if *self.stopping.borrow() || Instant::now() >= self.end {
                return None;
            }
            let has_rows = !self.rows.is_empty();
            tokio::select! {
                biased;
                () = sleep_until(self.next_check) => {
                    self.next_check = Instant::now() + CHECK_PAUSE;
                    return self.is_permitted().await.then(|| ": alive\n\n".to_owned());
                }
                () = sleep_until(self.next_message), if has_rows => return Some(self.message()),
                // Cancel safe: a message that was not returned stays in the stream.
                read = self.watch.message() => match read {
                    Ok(Some(response)) if !response.canceled => self.add(response.events),
                    Ok(Some(response)) => return Some(self.last(&response.cancel_reason)),
                    Ok(None) => return None,
                    Err(status) => return Some(self.last(status.message())),
                },
                _ = self.stopping.changed() => return None,
            }
        }
    }

    /// Returns whether the session still exists, or authentication is still disabled.
    async fn is_permitted(&self) -> bool {
        self.console.visitor(&self.headers).await.is_ok_and(|visitor| visitor.user == self.user)
    }

    fn add(&mut self, events: Vec<Event>) {
        for event in events {
            if self.rows.len() == ROWS_MAX {
                self.rows.pop_front();
                self.skipped += 1;
            }
            self.rows.push_back(row(&event));
        }
    }

    fn message(&mut self) -> String {
        self.next_message = Instant::now() + PAUSE;
        // The newest first, as the table shows them.
        let rows: String = self.rows.drain(..).rev().collect();
        let skipped = std::mem::take(&mut self.skipped);
        let note = html! {
            @if skipped > 0 {
                tr { td colspan="5" .muted { (skipped) " more events, which came too fast to be shown" } }
            }
        };
        message("rows", &format!("{rows}{}", note.0))
    }

    /// Returns the reason of the end, and ends the stream.
    fn last(&mut self, reason: &str) -> String {
        self.end = Instant::now();
        message("failed", &html! { (reason) }.0)
    }
}

/// Formats a message. Its text must not contain line breaks, so they are replaced.
fn message(name: &str, text: &str) -> String {
    format!("event: {name}\ndata: {}\n\n", text.replace(['\n', '\r'], " "))
}

fn row(event: &Event) -> String {
    let kv = event.kv.clone().unwrap_or_default();
    let (what, is_put) = match event.r#type() {
        EventType::Put if kv.version == 1 => ("created", true),
        EventType::Put => ("changed", true),
        EventType::Delete => ("deleted", false),
    };
    html! {
        tr {
            td.number { (kv.mod_revision) }
            td { span class=(format!("badge {what}")) { (what) } }
            td.wide { (pages::key_link(&kv.key)) }
            td.number { @if is_put { (kv.version) } }
            td.number { @if is_put { (pages::bytes(kv.value.len() as u64)) } }
        }
    }
    .0
}

#[cfg(test)]
mod tests {
    use orlop_wire::proto::client::mvccpb::KeyValue;

    use super::*;

    #[test]
    fn keys_are_escaped_and_stay_on_a_line() {
        let key = b"/a<script>\ndata: x\r\n\n\x1b[2J\xff";
        let kv = KeyValue { key: key.to_vec().into(), mod_revision: 7, version: 1, ..KeyValue::default() };
        let text = message("rows", &row(&Event { kv: Some(kv), ..Event::default() }));
        assert!(!text.contains("<script>") && text.contains("&lt;script&gt;"), "{text}");
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(!text.contains(['\x1b', '\r']), "{text}");
    }
}
