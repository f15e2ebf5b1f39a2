//! A key: its value at a revision, and its history.

use axum::response::Response;
use maud::{Markup, html};
use orlop_objects::{Form, ManagedFields, Secrets, Shown, View};
use orlop_wire::proto::client::mvccpb::KeyValue;

use super::{Hideable, Space, Tab, Visit, bytes, key_field, names, time, view_links, view_parameters};
use crate::{
    console::{
        backend::{Failure, Timeline, Version, pair, timeline},
        query::encoded,
    },
    text::{shown_key, shown_managers},
};

/// Number of versions on a page.
const VERSIONS_MAX: usize = 50;

pub(in crate::console) async fn page(mut visit: Visit) -> Response {
    let content = content(&mut visit).await;
    let key = visit.query.bytes("key");
    visit.page(Tab::Keys, &shown_key(&key), content)
}

async fn content(visit: &mut Visit) -> Result<Markup, Failure> {
    let key = visit.query.bytes("key");
    let (revision, before) = (visit.query.number("revision"), visit.query.number("before"));
    if key.is_empty() {
        return Err(Failure::Invalid("there is no key".to_owned()));
    }
    visit.begin_large().await?;
    let client = &visit.visitor.client;
    let newest = pair(client, &key, 0).await?;
    let found = if revision == 0 { newest.clone() } else { pair(client, &key, revision).await? };
    // A value is shown even if its history cannot be read.
    let timeline = timeline(client, &key, before, VERSIONS_MAX, &visit.console.renderer).await;
    if found.is_none() && newest.is_none() && matches!(&timeline, Ok(timeline) if timeline.versions.is_empty()) {
        return Err(Failure::Missing(format!("there is no key {} and no history of it", shown_key(&key))));
    }
    let view = visit.view();
    let written = visit.query.number("written");
    let shown_value = match found.clone() {
        Some(kv) => {
            let (key, bytes) = (key.clone(), kv.value.len());
            let work = move || value(&key, &kv, revision, view);
            Some(visit.console.renderer.run(bytes, work).await?)
        }
        None => None,
    };
    Ok(html! {
        (names::path("/keys", &key))
        h1.key { (names::name(&key)) }
        @if written > 0 {
            p.success role="status" { "The version was put back, at revision " (written) "." }
        }
        @if revision > 0 && newest.as_ref().map(|kv| kv.mod_revision) != found.as_ref().map(|kv| kv.mod_revision) {
            p.notice {
                "This is the state at revision " (revision) ". "
                a href=(format!("/key?key={}{}", encoded(&key), view_parameters(view))) { "Show the newest one" }
            }
        }
        @match shown_value {
            Some(value) => (value),
            None => p.notice { "The key does not exist" @if revision > 0 { " at revision " (revision) } "." }
        }
        (history(&key, &timeline, newest.as_ref(), view))
    })
}

fn value(key: &[u8], kv: &KeyValue, revision: i64, view: View) -> Markup {
    let value = Shown::of(&kv.value, view);
    let at = if revision > 0 { format!("&revision={revision}") } else { String::new() };
    let facts = [
        ("Content", form(&value)),
        ("Size", bytes(kv.value.len() as u64)),
        ("Version", kv.version.to_string()),
        ("Changed at revision", kv.mod_revision.to_string()),
        ("Created at revision", kv.create_revision.to_string()),
        ("Lease", if kv.lease == 0 { "none".to_owned() } else { format!("{:x}", kv.lease) }),
    ];
    html! {
        dl.facts { @for (name, fact) in facts { div { dt { (name) } dd { (fact) } } } }
        section aria-labelledby="value" {
            div.head {
                h2 id="value" { "Value" }
                div.actions { (view_links(&format!("/key?key={}{at}", encoded(key)), view, Hideable::of(&[&value]))) }
            }
            (lines(&value))
        }
    }
}

fn form(value: &Shown) -> String {
    match &value.form {
        Form::Kubernetes { api_version, kind } => format!("{kind} ({api_version})"),
        Form::Json => "JSON".to_owned(),
        Form::Text => "text".to_owned(),
        Form::Binary => "bytes".to_owned(),
        Form::Encrypted { provider } => format!("encrypted by Kubernetes ({provider})"),
    }
}

fn lines(value: &Shown) -> Markup {
    let (mut text, mut space, mut rest) = (String::new(), Space::new(), 0);
    for line in value.lines() {
        if space.take(line) {
            text.push_str(line);
            text.push('\n');
        } else {
            rest += 1;
        }
    }
    html! {
        // The first line break of a pre is not shown.
        pre.value tabindex="0" aria-label="Value" { "\n" (text) }
        @if rest > 0 { p.muted { (rest) " more lines are not shown." } }
    }
}

fn history(key: &[u8], timeline: &Result<Timeline, Failure>, newest: Option<&KeyValue>, view: View) -> Markup {
    let newest = newest.map_or(0, |kv| kv.mod_revision);
    html! {
        section aria-labelledby="history" {
            h2 id="history" { "History" }
            @match timeline {
                Ok(timeline) => (versions(key, timeline, newest, view)),
                Err(failure) => p.notice { "The history cannot be read. " (failure.texts().1) }
            }
        }
    }
}

fn versions(key: &[u8], timeline: &Timeline, newest: i64, view: View) -> Markup {
    let encoded_key = encoded(key);
    html! {
        form method="get" action="/diff" {
            (key_field(key))
            @if view.secrets == Secrets::Show { input type="hidden" name="secrets" value="show"; }
            @if view.managed_fields == ManagedFields::Show { input type="hidden" name="managed-fields" value="show"; }
            ol.timeline {
                @for (at, version) in timeline.versions.iter().enumerate() {
                    (entry(&encoded_key, at, version, newest, view))
                }
            }
            @if timeline.versions.len() > 1 {
                button type="submit" { "Compare the chosen versions" }
            }
        }
        nav.pages aria-label="Pages of the history" {
            @if let Some(last) = timeline.versions.last().filter(|_| timeline.more) {
                @let before = last.mod_revision - 1;
                a.button href=(format!("/key?key={encoded_key}&before={before}{}", view_parameters(view))) {
                    "Older versions"
                }
            }
        }
        @if timeline.since_creation {
            p.muted { "This server has no history service: versions are shown back to the key's creation or the last compaction." }
        }
    }
}

/// Returns when a version was written; nothing if that is not known.
pub(super) fn when(version: &Version) -> Markup {
    html! {
        @if let Some(unix_ms) = version.unix_ms {
            @if version.time_is_latest { "by " }
            (time(unix_ms))
        }
    }
}

fn entry(encoded_key: &str, at: usize, version: &Version, newest: i64, view: View) -> Markup {
    let (revision, read_at) = (version.mod_revision, version.read_at);
    let what = if version.is_delete {
        "deleted"
    } else if version.version == 1 {
        "created"
    } else {
        "changed"
    };
    html! {
        li {
            span.choice {
                label {
                    input type="radio" name="from" value=(read_at) checked[at == 1]; " old"
                    span.hidden { " revision " (revision) }
                }
                label {
                    input type="radio" name="to" value=(read_at) checked[at == 0]; " new"
                    span.hidden { " revision " (revision) }
                }
            }
            span class=(format!("badge {what}")) { (what) }
            " revision " (revision) " "
            (when(version))
            @if !version.is_delete {
                span.muted { " version " (version.version) ", " (bytes(version.value_len)) }
                @if !version.managers.is_empty() { span { " by " (shown_managers(&version.managers)) } }
                span.actions {
                    a href=(format!("/key?key={encoded_key}&revision={read_at}{}", view_parameters(view))) { "Show" span.hidden { " revision " (revision) } }
                    @if revision != newest {
                        a href=(format!("/put-back?key={encoded_key}&revision={read_at}{}", view_parameters(view))) { "Put back" span.hidden { " revision " (revision) } }
                    }
                }
            }
        }
    }
}
