//! The pages: HTML made by a macro that escapes all text. Texts of keys and values are also freed from control characters.

pub(super) mod deleted;
pub(super) mod diff;
pub(super) mod events;
pub(super) mod keys;
pub(super) mod login;
pub(super) mod names;
pub(super) mod object;
pub(super) mod overview;
pub(super) mod put_back;
pub(super) mod sizes;

use axum::{
    body::Body,
    extract::{FromRequestParts, State},
    response::{Html, IntoResponse as _, Response},
};
use http::{HeaderMap, StatusCode, header, request::Parts};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use orlop_objects::{Form, ManagedFields, Secrets, Shown, View, escaped};

use super::{
    backend::Failure,
    limits::LargePage,
    query::{Query, base64},
    server::Console,
    session::{FormToken, Visitor, Who},
};
use crate::text::{self, shown_key, shown_time};

/// The style sheet. It is a part of each page, because a browser paints nothing before it has the style sheet.
pub(super) const STYLE: &str = include_str!("assets/style.css");
/// Maximum number of lines of a value or of a difference on a page, and of their bytes.
const LINES_MAX: usize = 20_000;
const TEXT_BYTES_MAX: usize = 1 << 20;
/// End of the paths of parts of pages.
const FRAGMENT: &str = "/live";

/// The views in the order of the navigation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Tab {
    Overview,
    Sizes,
    Keys,
    Events,
}

impl Tab {
    const ALL: [(Self, &str, &str); 4] = [
        (Self::Overview, "/", "Overview"),
        (Self::Sizes, "/sizes", "Sizes"),
        (Self::Keys, "/keys", "Keys"),
        (Self::Events, "/events", "Events"),
    ];
}

/// A request of a visitor who may see pages.
pub(super) struct Visit {
    pub console: Console,
    pub visitor: Visitor,
    pub query: Query,
    pub headers: HeaderMap,
    /// Path and query of a request for a page, to return to after a log in.
    path: String,
    /// Set if the page can be large.
    large: Option<LargePage>,
}

impl FromRequestParts<Console> for Visit {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, console: &Console) -> Result<Self, Response> {
        let visitor = Visitor::from_request_parts(parts, console).await?;
        let query = Query::parse(parts.uri.query().unwrap_or_default().as_bytes());
        let path = path_of(parts);
        Ok(Self { console: console.clone(), visitor, query, headers: parts.headers.clone(), path, large: None })
    }
}

impl Visit {
    /// Waits until a page that can be large may be made. It counts until the browser has read it.
    ///
    /// # Errors
    ///
    /// [`Failure::Busy`] if that takes too long.
    pub async fn begin_large(&mut self) -> Result<(), Failure> {
        self.large = Some(self.console.large_pages.begin().await?);
        Ok(())
    }

    /// Returns a whole page.
    pub fn page(self, tab: Tab, title: &str, content: Result<Markup, Failure>) -> Response {
        match content {
            Ok(content) => self.page_with(StatusCode::OK, tab, title, content),
            Err(Failure::LoggedOut) => {
                self.console.sessions.end(&self.headers);
                login::form(&self.console, &self.headers, StatusCode::UNAUTHORIZED, &self.path, login::Notice::None)
            }
            Err(failure) => self.page_with(failure.status(), tab, title, failure.markup()),
        }
    }

    pub fn page_with(self, status: StatusCode, tab: Tab, title: &str, content: Markup) -> Response {
        let Visitor { who, form, .. } = self.visitor;
        let frame = Frame { tab: Some(tab), title, endpoint: &self.console.backend.endpoint(), who: &who };
        frame.respond(status, form, content, self.large)
    }

    /// Returns a whole page that begins with a form for a prefix. The form is shown also if the rest cannot be read: the user
    /// may have the right to read another prefix.
    pub fn page_with_form(self, tab: Tab, title: &str, form: Markup, content: Result<Markup, Failure>) -> Response {
        let (status, rest) = match content {
            Ok(content) => (StatusCode::OK, content),
            Err(Failure::LoggedOut) => return self.page(tab, title, Err(Failure::LoggedOut)),
            Err(failure) => (failure.status(), failure.markup()),
        };
        self.page_with(status, tab, title, html! { h1 { (title) } (form) (rest) })
    }

    /// Returns a part of a page, which the script inserts.
    pub fn fragment(self, content: Result<Markup, Failure>) -> Response {
        match content {
            Ok(content) => Html(body(content, self.large)).into_response(),
            Err(failure) => {
                self.console.sessions.end_if_refused(&self.headers, &failure);
                failure.fragment()
            }
        }
    }

    /// Returns the fields of a form that a page of this process made for this browser.
    pub fn form(&self, body: &[u8]) -> Result<Query, Failure> {
        let form = Query::parse(body);
        let is_ours = self.console.sessions.is_form_token(&self.headers, &form.text("token"));
        if is_ours { Ok(form) } else { Err(Failure::Forged) }
    }

    /// Returns what of values is shown.
    pub fn view(&self) -> View {
        let is_shown = |name| self.query.raw(name) == b"show";
        View {
            secrets: if is_shown("secrets") { Secrets::Show } else { Secrets::Mask },
            managed_fields: if is_shown("managed-fields") { ManagedFields::Show } else { ManagedFields::Hide },
        }
    }
}

/// Returns a part of the query string that keeps the choices of [`Visit::view`].
pub(super) fn view_parameters(view: View) -> String {
    let secrets = match view.secrets {
        Secrets::Mask => "",
        Secrets::Show => "&secrets=show",
    };
    let managed_fields = match view.managed_fields {
        ManagedFields::Hide => "",
        ManagedFields::Show => "&managed-fields=show",
    };
    [secrets, managed_fields].concat()
}

fn path_of(parts: &Parts) -> String {
    let is_page = parts.method == http::Method::GET;
    parts.uri.path_and_query().filter(|_| is_page).map_or("/", http::uri::PathAndQuery::as_str).to_owned()
}

/// What surrounds the content of every page.
struct Frame<'a> {
    tab: Option<Tab>,
    title: &'a str,
    endpoint: &'a str,
    who: &'a Who,
}

impl Frame<'_> {
    fn respond(&self, status: StatusCode, form: FormToken, content: Markup, large: Option<LargePage>) -> Response {
        let page = self.render(&form.token, content);
        let mut response = (status, Html(body(page, large))).into_response();
        if let Some(cookie) = form.cookie {
            response.headers_mut().append(header::SET_COOKIE, cookie);
        }
        response
    }

    fn render(&self, token: &str, content: Markup) -> Markup {
        html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="color-scheme" content="light dark";
                    title { (self.title) " - Orlop" }
                    style { (PreEscaped(STYLE)) }
                    link rel="icon" type="image/svg+xml" href="/assets/icon.svg";
                    script src="/assets/script.js" defer {}
                }
                body {
                    a.skip href="#main" { "Skip to the content" }
                    header {
                        span.brand { "Orlop" }
                        nav aria-label="Views" {
                            @for (tab, path, name) in Tab::ALL {
                                a href=(path) aria-current=[(self.tab == Some(tab)).then_some("page")] { (name) }
                            }
                        }
                        span.endpoint { (self.endpoint) }
                        @if *self.who != Who::Anyone {
                            form method="post" action="/logout" {
                                input type="hidden" name="token" value=(token);
                                @if let Who::User(name) = self.who { span.muted { (escaped(name)) } }
                                button type="submit" { "Log out" }
                            }
                        }
                    }
                    main id="main" tabindex="-1" { (content) }
                }
            }
        }
    }
}

fn body(page: Markup, large: Option<LargePage>) -> Body {
    match large {
        Some(large) => large.body(page.0),
        None => Body::from(page.0),
    }
}

impl Failure {
    fn status(&self) -> StatusCode {
        match self {
            Self::LoggedOut => StatusCode::UNAUTHORIZED,
            Self::Denied(_) | Self::Forged => StatusCode::FORBIDDEN,
            Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::Unavailable(_) => StatusCode::BAD_GATEWAY,
            Self::Missing(_) => StatusCode::NOT_FOUND,
            Self::TooMany | Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Returns what happened, and the text of the server.
    fn texts(&self) -> (&'static str, &str) {
        match self {
            Self::LoggedOut => ("You are not logged in.", "Log in and try again."),
            Self::Denied(text) => ("Your user does not have the right to do this.", text),
            Self::Invalid(text) => ("This request is not valid.", text),
            Self::Unavailable(text) => ("The server does not answer.", text),
            Self::Missing(text) => ("This does not exist, or not any more.", text),
            Self::Forged => {
                ("This form was not made for this session. Nothing was done.", "Open the page again and repeat it.")
            }
            Self::TooMany => ("Too many pages show events.", "Close one and try again."),
            Self::Busy => ("Too many pages are loaded at the same time.", "Try again."),
        }
    }

    /// Returns a part of a page, which the script inserts.
    fn fragment(&self) -> Response {
        (self.status(), Html(self.markup().0)).into_response()
    }

    fn markup(&self) -> Markup {
        let (what, text) = self.texts();
        html! {
            div.failure role="alert" {
                h1 { (what) }
                p { (escaped(text)) }
            }
        }
    }
}

/// Returns the page, or the part of a page, for a failure before there is a visitor.
pub(super) fn failed(console: &Console, parts: &Parts, failure: &Failure) -> Response {
    if *failure == Failure::LoggedOut {
        return login::form(console, &parts.headers, StatusCode::UNAUTHORIZED, &path_of(parts), login::Notice::None);
    }
    if parts.uri.path().ends_with(FRAGMENT) {
        return failure.fragment();
    }
    let frame = Frame { tab: None, title: "Failed", endpoint: &console.backend.endpoint(), who: &Who::Anyone };
    frame.respond(failure.status(), console.sessions.form_token(&parts.headers), failure.markup(), None)
}

/// Returns a failure as text, for requests of the script.
pub(super) fn plain(failure: &Failure) -> Response {
    let (what, text) = failure.texts();
    (failure.status(), format!("{what} {}\n", escaped(text))).into_response()
}

/// Responds to a request for an unknown path.
pub(super) async fn unknown(State(console): State<Console>, headers: HeaderMap) -> Response {
    let frame = Frame { tab: None, title: "Not found", endpoint: &console.backend.endpoint(), who: &Who::Anyone };
    let content = html! { h1 { "There is no such page." } };
    frame.respond(StatusCode::NOT_FOUND, console.sessions.form_token(&headers), content, None)
}

/// Returns the form in which a prefix is typed. Its field is empty if the prefix cannot be shown as it is.
fn prefix_form(action: &str, prefix: &[u8], button: &str) -> Markup {
    let text = std::str::from_utf8(prefix).ok().filter(|text| shown_key(text.as_bytes()) == *text);
    html! {
        form.search method="get" action=(action) role="search" {
            label for="prefix" { "Prefix" }
            input id="prefix" name="prefix" value=(text.unwrap_or_default()) autocapitalize="none" autocomplete="off"
                spellcheck="false" placeholder="/registry/pods/";
            button type="submit" { (button) }
        }
    }
}

/// Returns a hidden field with a key.
fn key_field(key: &[u8]) -> Markup {
    html! { input type="hidden" name="key64" value=(base64(key)); }
}

pub(super) fn bytes(bytes: u64) -> String {
    text::bytes(i64::try_from(bytes).unwrap_or(i64::MAX))
}

/// Returns a time in UTC, to seconds.
fn time(unix_ms: i64) -> Markup {
    let text = shown_time(unix_ms);
    html! { time datetime=(text) { (text.replace('T', " ").replace('Z', " UTC")) } }
}

/// Returns a table that scrolls by itself if it is wider than the page.
fn table(name: &str, head: &[&str], rows: Markup) -> Markup {
    html! {
        div.scroll role="region" aria-label=(name) tabindex="0" {
            table {
                caption.hidden { (name) }
                thead { tr { @for title in head { th scope="col" { (title) } } } }
                tbody { (rows) }
            }
        }
    }
}

/// Remaining lines and bytes of a value or a difference on a page. After a line that does not fit, no line does.
struct Space {
    lines: usize,
    bytes: usize,
}

impl Space {
    fn new() -> Self {
        Self { lines: LINES_MAX, bytes: TEXT_BYTES_MAX }
    }

    /// Returns whether a line fits, and takes its space.
    fn take(&mut self, line: &str) -> bool {
        let fits = self.lines > 0 && line.len() <= self.bytes;
        (self.lines, self.bytes) = if fits { (self.lines - 1, self.bytes - line.len()) } else { (0, 0) };
        fits
    }
}

/// What the values on a page have that a visitor can choose to see.
#[derive(Clone, Copy)]
struct Hideable {
    secrets: bool,
    managed_fields: bool,
}

impl Hideable {
    fn of(values: &[&Shown]) -> Self {
        Self {
            secrets: values.iter().any(|value| value.masked > 0),
            managed_fields: values.iter().any(|value| matches!(value.form, Form::Kubernetes { .. })),
        }
    }
}

/// Returns links that show or hide the data of Secrets and the managed fields; `path` is the page without the choices.
fn view_links(path: &str, view: View, hideable: Hideable) -> Markup {
    let link = |view: View, text: &str| html! { a.button href=(format!("{path}{}", view_parameters(view))) { (text) } };
    html! {
        @if view.secrets == Secrets::Show {
            (link(View { secrets: Secrets::Mask, ..view }, "Hide secrets"))
        } @else if hideable.secrets {
            (link(View { secrets: Secrets::Show, ..view }, "Show secrets"))
        }
        @if view.managed_fields == ManagedFields::Show {
            (link(View { managed_fields: ManagedFields::Hide, ..view }, "Hide managed fields"))
        } @else if hideable.managed_fields {
            (link(View { managed_fields: ManagedFields::Show, ..view }, "Show managed fields"))
        }
    }
}
