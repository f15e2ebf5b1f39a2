//! The keys as a tree: the names below a prefix, page by page.

use axum::response::Response;
use maud::{Markup, html};

use super::{Tab, Visit, key_text, path};
use crate::console::{
    backend::{Failure, Names, names},
    query::encoded,
};

/// Number of names on a page.
const NAMES_MAX: u32 = 200;
/// Maximum number of prefixes with a single name that are skipped, such as `/` and `/registry/`.
const SKIPPED_MAX: usize = 3;

pub(in crate::console) async fn page(visit: Visit) -> Response {
    let content = content(&visit).await;
    visit.page(Tab::Keys, "Keys", content)
}

async fn content(visit: &Visit) -> Result<Markup, Failure> {
    let (typed, after) = (visit.query.bytes("prefix"), visit.query.bytes("after"));
    let mut prefix = typed.clone();
    let mut page = names(&visit.visitor.client, &prefix, &after, NAMES_MAX).await?;
    if after.is_empty() {
        for _ in 0..SKIPPED_MAX {
            let [only] = page.names.as_slice() else { break };
            if !only.is_prefix {
                break;
            }
            prefix = only.name.clone();
            page = names(&visit.visitor.client, &prefix, &after, NAMES_MAX).await?;
        }
    }
    Ok(html! {
        h1 { "Keys" }
        form.search method="get" action="/keys" role="search" {
            label for="prefix" { "Prefix" }
            input id="prefix" name="prefix" value=(String::from_utf8_lossy(&typed)) autocapitalize="none"
                spellcheck="false" placeholder="/registry/pods/";
            button type="submit" { "Search" }
        }
        (path(&prefix))
        (list(&prefix, &after, &page))
    })
}

fn list(prefix: &[u8], after: &[u8], page: &Names) -> Markup {
    html! {
        @if page.names.is_empty() {
            p { "There are no keys " @if !after.is_empty() { "after this one " } "with this prefix." }
        } @else {
            ul.names {
                @for name in &page.names {
                    li {
                        @let text = key_text(&name.name[prefix.len().min(name.name.len())..]);
                        @let text = if text.is_empty() { "(the prefix itself)".to_owned() } else { text };
                        @if name.is_prefix {
                            a.key.folder href=(format!("/keys?prefix={}", encoded(&name.name))) { (text) }
                        } @else {
                            a.key href=(format!("/key?key={}", encoded(&name.name))) { (text) }
                        }
                    }
                }
            }
        }
        nav.pages aria-label="Pages" {
            @if !after.is_empty() {
                a.button href=(format!("/keys?prefix={}", encoded(prefix))) { "First page" }
            }
            @if let Some(last) = page.names.last().filter(|_| page.more) {
                a.button rel="next" href=(format!("/keys?prefix={}&after={}", encoded(prefix), encoded(&last.name))) {
                    "Next page"
                }
            }
        }
    }
}
