//! The form to log in.

use axum::{extract::State, response::Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use maud::html;
use orlop_objects::escaped;

use super::{Frame, Visit};
use crate::console::{
    backend::{Failure, LogInError},
    limits::Form,
    query::Query,
    server::Console,
    session::{Access, Who},
};

/// What the form says.
pub(in crate::console) enum Notice {
    None,
    Refused(String),
    Forged,
    /// Too many log-ins wait.
    Busy,
}

/// Returns the form. `next` is the page to return to.
pub(in crate::console) fn form(
    console: &Console,
    headers: &HeaderMap,
    status: StatusCode,
    next: &str,
    notice: Notice,
) -> Response {
    let form = console.sessions.form_token(headers);
    let user = console.backend.user().unwrap_or_default();
    let has_password = console.password.is_some();
    let notice = match notice {
        Notice::None => None,
        Notice::Refused(reason) => Some(reason),
        Notice::Forged => Some("The form was too old. Try again.".to_owned()),
        Notice::Busy => Some("Too many people log in at the same time. Try again.".to_owned()),
    };
    let content = html! {
        form.login method="post" action="/login" {
            h1 { "Log in" }
            @if has_password {
                p {
                    "Use the password of this page, without a name. If the server has users, use a name and a password "
                    "of the server."
                }
            } @else {
                p { "Use a name and a password of the server." }
            }
            @if let Some(notice) = notice { p.failure role="alert" { (notice) } }
            input type="hidden" name="token" value=(form.token);
            input type="hidden" name="next" value=(next);
            label for="name" { "Name" }
            input id="name" name="name" value=(user) autocomplete="username" autocapitalize="none" required[!has_password]
                autofocus;
            label for="password" { "Password" }
            input id="password" name="password" type="password" autocomplete="current-password";
            button type="submit" { "Log in" }
        }
    };
    let frame = Frame { tab: None, title: "Log in", endpoint: &console.backend.endpoint(), who: &Who::Anyone };
    frame.respond(status, form, content, None)
}

pub(in crate::console) async fn page(State(console): State<Console>, headers: HeaderMap, query: Query) -> Response {
    match console.visitor(&headers, Access::Use).await {
        Ok(_) => redirect("/", None),
        Err(_) => form(&console, &headers, StatusCode::OK, local(&query.text("next")), Notice::None),
    }
}

pub(in crate::console) async fn log_in(State(console): State<Console>, headers: HeaderMap, sent: Form) -> Response {
    let fields = Query::parse(&sent.text);
    let next = local(&fields.text("next")).to_owned();
    if !console.sessions.is_form_token(&headers, &fields.text("token")) {
        return form(&console, &headers, StatusCode::FORBIDDEN, &next, Notice::Forged);
    }
    let (name, password) = (fields.text("name"), fields.text("password"));
    // A log-in that waits does not keep the whole form in memory.
    drop((sent, fields));
    let Some(permit) = console.log_ins.begin().await else {
        return form(&console, &headers, StatusCode::SERVICE_UNAVAILABLE, &next, Notice::Busy);
    };
    // A browser that leaves does not end the check, which would shorten the pause after a wrong password.
    let check = tokio::spawn({
        let console = console.clone();
        async move {
            let _permit = permit;
            console.log_in(name, password).await
        }
    });
    let ended = |_| Err(LogInError::Failed(Failure::Unavailable("the check of the password ended".to_owned())));
    match check.await.unwrap_or_else(ended) {
        Ok((Who::Anyone, _)) => redirect(&next, None),
        Ok((who, token)) => {
            console.sessions.end(&headers);
            redirect(&next, Some(console.sessions.begin(who, token)))
        }
        Err(LogInError::Refused(reason)) => {
            form(&console, &headers, StatusCode::UNAUTHORIZED, &next, Notice::Refused(reason))
        }
        Err(LogInError::Failed(failure)) => super::plain(&failure),
    }
}

impl Console {
    /// Returns who logs in, with the token of a user. Users of the server come first: where there are any, the password
    /// of the page opens nothing.
    async fn log_in(&self, name: String, password: String) -> Result<(Who, Option<HeaderValue>), LogInError> {
        let refused = |reason: &str| Err(LogInError::Refused(reason.to_owned()));
        if let Some(token) = self.backend.log_in(name.clone(), password.clone()).await? {
            return Ok((Who::User(name), Some(token)));
        }
        match &self.password {
            None => Ok((Who::Anyone, None)),
            Some(_) if !name.is_empty() => refused("The server has no users. Leave the name empty."),
            Some(file) => match file.check(&password).await {
                Ok(()) => Ok((Who::PasswordHolder, None)),
                Err(reason) => refused(reason),
            },
        }
    }
}

pub(in crate::console) async fn log_out(visit: Visit, sent: Form) -> Response {
    match visit.form(&sent.text) {
        Ok(_) => redirect("/login", Some(visit.console.sessions.end(&visit.headers))),
        Err(failure) => super::plain(&failure),
    }
}

/// Returns the path if it is one of this page, otherwise the first page.
fn local(path: &str) -> &str {
    let is_local =
        path.starts_with('/') && !path.starts_with("//") && !path.contains(['\\', '\t']) && escaped(path) == path;
    if is_local { path } else { "/" }
}

/// Returns a redirection after a form.
pub(super) fn redirect(path: &str, cookie: Option<HeaderValue>) -> Response {
    let mut response = Response::new(axum::body::Body::empty());
    *response.status_mut() = StatusCode::SEE_OTHER;
    let location = HeaderValue::try_from(path).unwrap_or_else(|_| HeaderValue::from_static("/"));
    response.headers_mut().insert(header::LOCATION, location);
    if let Some(cookie) = cookie {
        response.headers_mut().append(header::SET_COOKIE, cookie);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_local_pages_follow_a_log_in() {
        for (path, want) in [
            ("/key?key=/a", "/key?key=/a"),
            ("//evil.example/", "/"),
            ("/\\evil.example", "/"),
            ("https://evil.example/", "/"),
            ("/a\x1b", "/"),
            ("/a\tb", "/"),
            ("", "/"),
        ] {
            assert_eq!(local(path), want);
        }
    }
}
