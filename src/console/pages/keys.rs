//! The keys as a tree: the names below a prefix, page by page.

use axum::response::Response;
use maud::{Markup, html};
use orlop_client::Client;

use super::{
    Tab, Visit,
    names::{LINKED_BYTES_MAX, href, link, name, path},
    prefix_form,
};
use crate::console::{
    backend::{Failure, Name, Names, names},
    query::encoded,
};

/// Number of names on a page.
const NAMES_MAX: u32 = 200;
/// A prefix with a single name that is a prefix is replaced by that one, at most this many times: `/` by `/registry/`.
const SKIPPED_MAX: usize = 4;
/// Only on pages with at most this number of names, because each needs a request.
const SKIPPING_NAMES_MAX: usize = 8;

pub(in crate::console) async fn page(mut visit: Visit) -> Response {
    let typed = visit.query.bytes("prefix");
    let content = content(&mut visit, &typed).await;
    visit.page_with_form(Tab::Keys, "Keys", prefix_form("/keys", &typed, "Search"), content)
}

async fn content(visit: &mut Visit, typed: &[u8]) -> Result<Markup, Failure> {
    visit.begin_large().await?;
    let after = visit.query.bytes("after");
    let client = &visit.visitor.client;
    let mut prefix = typed.to_vec();
    let mut page = names(client, &prefix, &after, NAMES_MAX).await?;
    if page.names.len() <= SKIPPING_NAMES_MAX {
        for name in page.names.iter_mut().filter(|name| name.is_prefix) {
            skip_single(client, name).await?;
        }
    }
    if let ([only], true) = (page.names.as_slice(), after.is_empty())
        && only.is_prefix
        && !page.more
    {
        prefix = only.name.clone();
        page = names(client, &prefix, &after, NAMES_MAX).await?;
    }
    Ok(html! {
        div.head {
            (path("/keys", &prefix))
            @if let Some(deleted) = href("/deleted?prefix=", typed).filter(|_| page.has_history) {
                a.button href=(deleted) { "Deleted keys" }
            }
        }
        (list(&prefix, &after, &page))
        @if let Some(history) = history_of_prefix(typed, &after, &page) {
            p.muted { "This prefix itself is not a key now. " a href=(history) { "Look at its history" } }
        }
    })
}

/// Returns the address of the page of a prefix that is not a key, but may have been one. A prefix that ends with `/` is most
/// likely none, unless there is no key below it.
fn history_of_prefix(typed: &[u8], after: &[u8], page: &Names) -> Option<String> {
    let is_key = page.names.first().is_some_and(|first| first.name == typed);
    let may_have_been_one = page.names.is_empty() || !typed.ends_with(b"/");
    let is_offered = page.has_history && after.is_empty() && !typed.is_empty() && !is_key && may_have_been_one;
    href("/key?key=", typed).filter(|_| is_offered)
}

/// Replaces a prefix with a single name, which is a prefix, by that one.
async fn skip_single(client: &Client, name: &mut Name) -> Result<(), Failure> {
    for _ in 0..SKIPPED_MAX {
        let below = names(client, &name.name, &[], 1).await?;
        match below.names.as_slice() {
            [only] if only.is_prefix && !below.more => *name = only.clone(),
            _ => break,
        }
    }
    Ok(())
}

fn list(prefix: &[u8], after: &[u8], page: &Names) -> Markup {
    html! {
        @if page.names.is_empty() {
            p { "There are no keys " @if !after.is_empty() { "after this one " } "with this prefix." }
        } @else {
            ul.names {
                @for child in &page.names {
                    li class=[child.is_prefix.then_some("folder")] {
                        @let below = &child.name[prefix.len().min(child.name.len())..];
                        @let text = if below.is_empty() { html! { "(the prefix itself)" } } else { name(below) };
                        @let place = if child.is_prefix { "/keys?prefix=" } else { "/key?key=" };
                        (link(place, &child.name, &text))
                    }
                }
            }
        }
        nav.pages aria-label="Pages" {
            @if !after.is_empty() {
                a.button href=(format!("/keys?prefix={}", encoded(prefix))) { "First page" }
            }
            @if let Some(last) = page.names.last().filter(|_| page.more) {
                @if prefix.len() + last.name.len() <= LINKED_BYTES_MAX {
                    a.button rel="next" href=(format!("/keys?prefix={}&after={}", encoded(prefix), encoded(&last.name))) {
                        "Next page"
                    }
                } @else {
                    p.muted { "There are more names. The last one is too long for a link to them: search for a longer prefix." }
                }
            }
        }
    }
}
