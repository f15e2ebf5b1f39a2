//! The difference of two versions of a key.

use axum::{body::Bytes, response::Response};
use maud::{Markup, html};
use orlop_objects::{Change, Diff, Hunk, Shown, diff};

use super::{Hideable, Space, Tab, Visit, names, view_links, view_parameters};
use crate::{
    console::{
        backend::{Failure, pair},
        query::encoded,
    },
    text::shown_key,
};

/// Number of unchanged lines around a change.
const CONTEXT_LINES: usize = 3;

pub(in crate::console) async fn page(mut visit: Visit) -> Response {
    let content = content(&mut visit).await;
    let title = format!("Difference of {}", shown_key(&visit.query.bytes("key")));
    visit.page(Tab::Keys, &title, content)
}

async fn content(visit: &mut Visit) -> Result<Markup, Failure> {
    let key = visit.query.bytes("key");
    let (from, to) = (visit.query.number("from"), visit.query.number("to"));
    if key.is_empty() || from == 0 || to == 0 {
        return Err(Failure::Invalid("choose an old and a new version".to_owned()));
    }
    let (from, to) = (from.min(to), from.max(to));
    visit.begin_large().await?;
    let client = &visit.visitor.client;
    let (old, new) = (pair(client, &key, from).await?, pair(client, &key, to).await?);
    let view = visit.view();
    let has_old = old.is_some();
    let changes = compare(visit, old.map(|kv| kv.value), new.map(|kv| kv.value)).await?;
    let place = format!("/diff?key={}&from={from}&to={to}", encoded(&key));
    let put_back = format!("/put-back?key={}&revision={from}{}", encoded(&key), view_parameters(view));
    Ok(html! {
        (names::path("/keys", &key))
        h1 { "Revision " (from) " and revision " (to) }
        p { (names::key_link(&key)) }
        div.head {
            @if has_old { a.button href=(put_back) { "Put revision " (from) " back" } }
            div.actions { (view_links(&place, view, changes.hideable)) }
        }
        (changes.markup)
    })
}

/// What differs between two values.
pub(super) struct Changes {
    pub markup: Markup,
    pub hideable: Hideable,
}

/// Compares two values of a key; `None`: the key does not exist.
pub(super) async fn compare(visit: &Visit, old: Option<Bytes>, new: Option<Bytes>) -> Result<Changes, Failure> {
    let view = visit.view();
    let work = move || {
        let shown = |value: &Option<Bytes>| value.as_ref().map(|value| Shown::of(value, view));
        let (old, new) = (shown(&old), shown(&new));
        let values: Vec<&Shown> = [&old, &new].into_iter().flatten().collect();
        Changes { markup: difference(old.as_ref(), new.as_ref()), hideable: Hideable::of(&values) }
    };
    // Also short values can have many lines, and the search for their smallest difference takes long.
    visit.console.renderer.run_elsewhere(work).await
}

/// Returns the changed lines from `old` to `new`; `None`: the key does not exist.
fn difference(old: Option<&Shown>, new: Option<&Shown>) -> Markup {
    let found = diff(old, new, CONTEXT_LINES);
    let (removed, added) = found.counts();
    html! {
        p { "Removed lines: " (removed) ", added lines: " (added) "." }
        @if old.is_none() { p.notice { "The key does not exist at the old revision." } }
        @if new.is_none() { p.notice { "The key does not exist at the new revision." } }
        @if found.hunks.is_empty() {
            p.notice {
                @if found.bytes_differ { "The stored bytes differ, but nothing that is shown." }
                @else { "Both versions are equal." }
            }
        } @else {
            (hunks(&found))
        }
    }
}

fn hunks(found: &Diff) -> Markup {
    let mut space = Space::new();
    let mut rest = 0;
    html! {
        div.diff tabindex="0" role="region" aria-label="Difference" {
            @for found in &found.hunks {
                @let lines = found.lines.iter().take_while(|line| space.take(&line.text)).count();
                @if lines > 0 { (hunk(found, lines)) }
                @let () = rest += found.lines.len() - lines;
            }
        }
        @if rest > 0 { p.muted { (rest) " more lines are not shown." } }
    }
}

/// Returns the first lines of a hunk.
fn hunk(hunk: &Hunk, lines_shown: usize) -> Markup {
    let Hunk { old_start, old_lines, new_start, new_lines, lines } = hunk;
    html! {
        div.place { "@@ -" (old_start) "," (old_lines) " +" (new_start) "," (new_lines) " @@" }
        @for line in lines.iter().take(lines_shown) {
            @match line.change {
                Change::Same => div { "  " (line.text) },
                Change::Removed => del { "- " (line.text) },
                Change::Added => ins {
                    "+ " (line.text)
                    @if line.hidden_change { span.muted { "  # changed" } }
                }
            }
        }
    }
}
