//! The page that shows changes as they happen.

use axum::response::Response;
use maud::html;

use super::{Tab, Visit, prefix_field, table};
use crate::console::query::encoded;

pub(in crate::console) async fn page(visit: Visit) -> Response {
    let prefix = visit.query.bytes("prefix");
    let content = html! {
        h1 { "Events" }
        form.search method="get" action="/events" role="search" {
            (prefix_field(&prefix))
            button type="submit" { "Filter" }
        }
        div.events data-events=(format!("/events/stream?prefix={}", encoded(&prefix))) {
            div.head {
                p role="status" data-status { "Connecting" }
                button type="button" data-pause { "Pause" }
            }
            noscript { p.notice { "Events need a browser with scripts." } }
            (table("Events, the newest first", &["Revision", "Event", "Key", "Version", "Size"], html! {}))
        }
        p.muted { "The last 200 events are shown." }
    };
    visit.page(Tab::Events, "Events", Ok(content))
}
