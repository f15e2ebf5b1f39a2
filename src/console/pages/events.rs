//! The page that shows changes as they happen.

use axum::response::Response;
use maud::html;

use super::{Tab, Visit, prefix_form, table};
use crate::console::query::encoded;

/// The columns of the rows that are sent.
pub(in crate::console) const COLUMNS: [&str; 6] = ["Revision", "Received (UTC)", "Event", "Key", "Version", "Size"];

pub(in crate::console) async fn page(visit: Visit) -> Response {
    let prefix = visit.query.bytes("prefix");
    let content = html! {
        h1 { "Events" }
        (prefix_form("/events", &prefix, "Filter"))
        div.events data-events=(format!("/events/stream?prefix={}", encoded(&prefix))) {
            div.head {
                p role="status" data-status { "Connecting" }
                button type="button" data-pause { "Pause" }
            }
            noscript { p.notice { "Events need a browser with scripts." } }
            (table("Events, the newest first", &COLUMNS, html! {}))
        }
        p.muted { "The last 200 events are shown." }
    };
    visit.page(Tab::Events, "Events", Ok(content))
}
