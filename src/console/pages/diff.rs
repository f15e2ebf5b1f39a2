//! The difference of two versions of a key.

use axum::response::Response;
use maud::{Markup, html};
use orlop_objects::{Change, Diff, Hunk, Shown, diff};
use orlop_wire::proto::client::mvccpb::KeyValue;

use super::{LINES_MAX, Tab, Visit, key_link, key_text, path, secrets_link, secrets_parameter, shown};
use crate::console::{
    backend::{Failure, pair},
    query::encoded,
};

/// Number of unchanged lines around a change.
const CONTEXT_LINES: usize = 3;

pub(in crate::console) async fn page(visit: Visit) -> Response {
    let content = content(&visit).await;
    let title = format!("Difference of {}", key_text(&visit.query.bytes("key")));
    visit.page(Tab::Keys, &title, content)
}

async fn content(visit: &Visit) -> Result<Markup, Failure> {
    let key = visit.query.bytes("key");
    let (from, to) = (visit.query.number("from"), visit.query.number("to"));
    if key.is_empty() || from == 0 || to == 0 {
        return Err(Failure::Invalid("choose an old and a new version".to_owned()));
    }
    let (from, to) = (from.min(to), from.max(to));
    let client = &visit.visitor.client;
    let (old, new) = (pair(client, &key, from).await?, pair(client, &key, to).await?);
    let secrets = visit.secrets();
    let view = |kv: &Option<KeyValue>| kv.as_ref().map(|kv| shown(&kv.value, secrets));
    let (before, after) = (view(&old), view(&new));
    let masked = [&before, &after].into_iter().flatten().any(|shown| shown.masked > 0);
    let place = format!("/diff?key={}&from={from}&to={to}", encoded(&key));
    let put_back = format!("/put-back?key={}&revision={from}{}", encoded(&key), secrets_parameter(secrets));
    Ok(html! {
        (path("/keys", &key))
        h1 { "Revision " (from) " and revision " (to) }
        p { (key_link(&key)) }
        div.head {
            @if old.is_some() { a.button href=(put_back) { "Put revision " (from) " back" } }
            @if masked || secrets == orlop_objects::Secrets::Show { (secrets_link(&place, secrets)) }
        }
        (difference(before.as_ref(), after.as_ref()))
    })
}

/// Returns the changed lines from `old` to `new`; `None`: the key does not exist.
pub(super) fn difference(old: Option<&Shown>, new: Option<&Shown>) -> Markup {
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
    let lines: usize = found.hunks.iter().map(|hunk| hunk.lines.len()).sum();
    let mut left = LINES_MAX;
    html! {
        div.diff tabindex="0" role="region" aria-label="Difference" {
            @for found in &found.hunks {
                @if left > 0 { (hunk(found, left)) }
                @let () = left = left.saturating_sub(found.lines.len());
            }
        }
        @if lines > LINES_MAX { p.muted { (lines - LINES_MAX) " more lines are not shown." } }
    }
}

fn hunk(hunk: &Hunk, lines_max: usize) -> Markup {
    let Hunk { old_start, old_lines, new_start, new_lines, lines } = hunk;
    html! {
        div.place { "@@ -" (old_start) "," (old_lines) " +" (new_start) "," (new_lines) " @@" }
        @for line in lines.iter().take(lines_max) {
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
