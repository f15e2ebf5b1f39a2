//! Writes an old version of a key again: shows what would change, and then writes it unless the key has changed meanwhile.

use axum::response::Response;
use http::StatusCode;
use maud::{Markup, html};
use orlop_wire::proto::client::mvccpb::KeyValue;

use super::{Tab, Visit, diff::compare, key_field, login::redirect, names, view_links, view_parameters};
use crate::{
    console::{
        backend::{Failure, Written, pair, put_if},
        limits::Form,
        query::encoded,
        session::Who,
    },
    text::shown_key,
};

const TITLE: &str = "Put back";
/// Why a visitor who has not logged in cannot write.
const READ_ONLY: &str = "This page only reads, because nobody can log in: the server has no users, and the page has no \
    password. Start it with console-password-file to write.";

pub(in crate::console) async fn page(mut visit: Visit) -> Response {
    let content = content(&mut visit).await;
    visit.page(Tab::Keys, TITLE, content)
}

async fn content(visit: &mut Visit) -> Result<Markup, Failure> {
    let (key, revision) = (visit.query.bytes("key"), visit.query.number("revision"));
    visit.begin_large().await?;
    let version = version(visit, &key, revision).await?;
    let newest = pair(&visit.visitor.client, &key, 0).await?;
    let view = visit.view();
    let place = format!("/put-back?key={}&revision={revision}", encoded(&key));
    let may_write = visit.visitor.who != Who::Anyone;
    let is_same = newest.as_ref().is_some_and(|kv| kv.value == version.value);
    let changes = compare(visit, newest.as_ref().map(|kv| kv.value.clone()), Some(version.value)).await?;
    Ok(html! {
        (names::path("/keys", &key))
        h1 { "Put revision " (revision) " back?" }
        p { (names::key_link(&key)) }
        @match &newest {
            Some(kv) => p { "This writes the value of revision " (revision) " over the newest one, of revision "
                (kv.mod_revision) ". The key keeps its lease. Other versions stay in the history." },
            None => p { "The key does not exist now. This creates it again, without a lease." }
        }
        form.actions method="post" action="/put-back" {
            input type="hidden" name="token" value=(visit.visitor.form.token);
            (key_field(&key))
            input type="hidden" name="revision" value=(revision);
            input type="hidden" name="expected" value=(newest.as_ref().map_or(0, |kv| kv.mod_revision));
            @if !is_same && may_write { button.danger type="submit" { "Put this version back" } }
            a.button href=(format!("/key?key={}{}", encoded(&key), view_parameters(view))) { "Cancel" }
            (view_links(&place, view, changes.hideable))
        }
        @if !may_write { p.muted { (READ_ONLY) } }
        h2 { "What changes" }
        (changes.markup)
    })
}

/// Returns the version that is put back.
async fn version(visit: &Visit, key: &[u8], revision: i64) -> Result<KeyValue, Failure> {
    if key.is_empty() || revision == 0 {
        return Err(Failure::Invalid("there is no key or no revision".to_owned()));
    }
    let version = pair(&visit.visitor.client, key, revision).await?;
    version.ok_or_else(|| Failure::Missing(format!("{} does not exist at revision {revision}", shown_key(key))))
}

pub(in crate::console) async fn write(visit: Visit, sent: Form) -> Response {
    let form = match visit.form(&sent.text) {
        Ok(form) => form,
        Err(failure) => return visit.page(Tab::Keys, TITLE, Err(failure)),
    };
    if visit.visitor.who == Who::Anyone {
        return visit.page(Tab::Keys, TITLE, Err(Failure::Denied(READ_ONLY.to_owned())));
    }
    let (key, revision) = (form.bytes("key"), form.number("revision"));
    let written = async {
        let _value = visit.console.large_pages.begin().await?;
        let version = version(&visit, &key, revision).await?;
        put_if(&visit.visitor.client, &key, &version.value, form.number("expected")).await
    };
    match written.await {
        Ok(Written::At(written)) => {
            let user = if let Who::User(name) = &visit.visitor.who { name } else { "" };
            tracing::info!(key = orlop_core::types::shown(&key), revision, written, user, "put a version back");
            redirect(&format!("/key?key={}&written={written}", encoded(&key)), None)
        }
        Ok(Written::Changed) => {
            let again = format!("/put-back?key={}&revision={revision}", encoded(&key));
            let content = html! {
                div.failure role="alert" {
                    h1 { "The key has changed meanwhile. Nothing was written." }
                    p { a.button href=(again) { "Look at the difference again" } }
                }
            };
            visit.page_with(StatusCode::CONFLICT, Tab::Keys, TITLE, content)
        }
        Err(failure) => visit.page(Tab::Keys, TITLE, Err(failure)),
    }
}
