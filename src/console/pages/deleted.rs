//! The keys below a prefix that were deleted, with links to their history, from which they can be put back.

use axum::response::Response;
use maud::{Markup, html};

use super::{
    Tab, Visit,
    names::{href, key_link, path},
    object::when,
    prefix_form, table,
};
use crate::console::{
    backend::{
        Failure,
        deleted::{DeletedKeys, KEYS_MAX, SEARCH_MAX, deleted_keys},
    },
    query::encoded,
};

const TITLE: &str = "Deleted keys";

pub(in crate::console) async fn page(mut visit: Visit) -> Response {
    let prefix = visit.query.bytes("prefix");
    let content = content(&mut visit, &prefix).await;
    visit.page_with_form(Tab::Keys, TITLE, prefix_form("/deleted", &prefix, "Search"), content)
}

async fn content(visit: &mut Visit, prefix: &[u8]) -> Result<Markup, Failure> {
    visit.begin_large().await?;
    let found = deleted_keys(&visit.visitor.client, prefix, visit.query.number("before")).await?;
    Ok(html! {
        (path("/deleted", prefix))
        p { "Keys with this prefix that were deleted and do not exist now, the newest deletion first." }
        @if found.keys.is_empty() { p { "There are none in these revisions." } } @else { (list(&found)) }
        (limits(&found))
        nav.pages aria-label="Pages" {
            @if found.has_older {
                a.button rel="next" href=(format!("/deleted?prefix={}&before={}", encoded(prefix), found.revisions.0)) {
                    "Older deletions"
                }
            }
            @if let Some(keys) = href("/keys?prefix=", prefix) {
                a.button href=(keys) { "Keys with this prefix" }
            }
        }
    })
}

fn list(found: &DeletedKeys) -> Markup {
    let rows = html! {
        @for found in &found.keys {
            tr {
                td.wide { (key_link(&found.key)) }
                td.number { (found.deletion.mod_revision) }
                td.number { @if found.deletion.unix_ms.is_some() { (when(&found.deletion)) } @else { "unknown" } }
            }
        }
    };
    table(TITLE, &["Key", "Revision", "Deleted"], rows)
}

/// Returns what was searched, and why not more.
fn limits(found: &DeletedKeys) -> Markup {
    let (first, last) = found.revisions;
    html! {
        p.muted {
            @if first <= last { "Revisions " (first) " to " (last) " were searched. " }
            @if found.is_cut { "More keys were deleted at revision " (first) ": search for a longer prefix. " }
            @if found.has_older {
                "A search ends after " (KEYS_MAX) " keys or " (SEARCH_MAX.as_secs()) " s."
            } @else {
                "The history that the server can read begins at revision " (first) "."
            }
        }
    }
}
