//! Sessions of visitors, their cookies, and the tokens against cross-site requests.
//!
//! A browser that logged in has a cookie with 256 random bits. The server's token stays here. Where authentication is
//! disabled, visitors log in with the page's own password; if it has none, there are no sessions, and nobody can write.
//!
//! A form contains a token: the HMAC, under a key of this process, of the session's cookie and of a second random cookie.
//! Another page can make a browser send both cookies, but cannot read them or compute the token. The second cookie
//! protects the form to log in, when there is no session yet; it is separate so that a response to a link from elsewhere,
//! with which browsers send no cookies, does not replace the session's.

use std::{collections::HashMap, sync::Arc, time::Duration};

use axum::extract::FromRequestParts;
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use http::{HeaderMap, HeaderValue, header, request::Parts};
use orlop_client::Client;
use parking_lot::Mutex;
use ring::{
    hmac,
    rand::{SecureRandom as _, SystemRandom},
};
use tokio::time::Instant;

use super::{backend::Failure, figures::Live, server::Console};
use crate::config::Scheme;

/// Maximum number of sessions. The one that was used least recently ends when there is another.
const SESSIONS_MAX: usize = 256;
/// Maximum time between two requests of a session.
const IDLE_MAX: Duration = Duration::from_secs(30 * 60);
/// Maximum time of a session.
const AGE_MAX: Duration = Duration::from_secs(12 * 60 * 60);

/// The sessions of one process.
pub(super) struct Sessions {
    key: hmac::Key,
    random: SystemRandom,
    /// Names of the cookies. They contain the port, because browsers send a host's cookies to all its ports.
    session_cookie: String,
    form_cookie: String,
    /// `; Secure` under TLS.
    secure: &'static str,
    /// By the HMAC of the cookie, so that the duration of a search reveals nothing about it.
    open: Mutex<HashMap<Vec<u8>, Session>>,
    /// The figures that are shown where nobody logs in.
    shared: Arc<Live>,
}

struct Session {
    who: Who,
    /// The server's, of a user.
    token: Option<HeaderValue>,
    begun: Instant,
    used: Instant,
    live: Arc<Live>,
}

/// Who a visitor is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Who {
    /// Somebody who has not logged in: the server has no users, and the page no password.
    Anyone,
    /// Somebody who has logged in with the password of the page.
    PasswordHolder,
    /// A user of the server.
    User(String),
}

/// Why a session is looked up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// A request, which keeps the session from being idle.
    Use,
    /// A request that writes, likewise.
    Write,
    /// A check during a response, which does not.
    Check,
}

/// The sender of a request, and what is needed for the response.
pub(super) struct Visitor {
    pub who: Who,
    pub client: Client,
    pub live: Arc<Live>,
    pub form: FormToken,
}

/// The token for the forms of a page, and the cookie that belongs to it.
pub(super) struct FormToken {
    pub token: String,
    /// Set if the browser has none yet.
    pub cookie: Option<HeaderValue>,
}

impl Sessions {
    pub fn new(scheme: Scheme, port: &str) -> Result<Self, ring::error::Unspecified> {
        let random = SystemRandom::new();
        Ok(Self {
            key: hmac::Key::generate(hmac::HMAC_SHA256, &random)?,
            random,
            session_cookie: format!("orlop-console-{port}"),
            form_cookie: format!("orlop-console-form-{port}"),
            secure: match scheme {
                Scheme::Plain => "",
                Scheme::Tls => "; Secure",
            },
            open: Mutex::default(),
            shared: Arc::default(),
        })
    }

    /// Begins a session. Returns its cookie.
    pub fn begin(&self, who: Who, token: Option<HeaderValue>) -> HeaderValue {
        let secret = self.secret();
        let now = Instant::now();
        let mut open = self.open.lock();
        open.retain(|_, session| !session.is_over(now));
        if open.len() >= SESSIONS_MAX {
            let oldest = open.iter().min_by_key(|(_, session)| session.used).map(|(id, _)| id.clone());
            oldest.map(|id| open.remove(&id));
        }
        open.insert(self.id(&secret), Session { who, token, begun: now, used: now, live: Arc::default() });
        self.cookie(&self.session_cookie, &secret, &format!("; Max-Age={}", AGE_MAX.as_secs()))
    }

    /// Ends the session of a request. Returns the cookie that removes the browser's.
    pub fn end(&self, headers: &HeaderMap) -> HeaderValue {
        if let Some(secret) = cookie(headers, &self.session_cookie) {
            self.open.lock().remove(&self.id(secret));
        }
        self.cookie(&self.session_cookie, "", "; Max-Age=0")
    }

    /// Ends the session of a request if the server has refused its token. Otherwise pages that need nothing of the server
    /// would not lead to the form to log in.
    pub fn end_if_refused(&self, headers: &HeaderMap, failure: &Failure) {
        if *failure == Failure::LoggedOut {
            self.end(headers);
        }
    }

    /// Returns who has begun a request's session, the token and the figures.
    fn find(&self, headers: &HeaderMap, access: Access) -> Option<(Who, Option<HeaderValue>, Arc<Live>)> {
        let id = self.id(cookie(headers, &self.session_cookie)?);
        let now = Instant::now();
        let mut open = self.open.lock();
        if open.get(&id)?.is_over(now) {
            open.remove(&id);
            return None;
        }
        let session = open.get_mut(&id)?;
        if access != Access::Check {
            session.used = now;
        }
        Some((session.who.clone(), session.token.clone(), Arc::clone(&session.live)))
    }

    /// Returns the token for forms of the response to a request.
    pub fn form_token(&self, headers: &HeaderMap) -> FormToken {
        match cookie(headers, &self.form_cookie) {
            Some(secret) => FormToken { token: encode(self.form_tag(headers, secret).as_ref()), cookie: None },
            None => {
                let secret = self.secret();
                let token = encode(self.form_tag(headers, &secret).as_ref());
                FormToken { token, cookie: Some(self.cookie(&self.form_cookie, &secret, "")) }
            }
        }
    }

    /// Returns whether a form was sent by a page of this process to this browser.
    pub fn is_form_token(&self, headers: &HeaderMap, token: &str) -> bool {
        let Some(secret) = cookie(headers, &self.form_cookie) else { return false };
        let Ok(token) = BASE64_URL_SAFE_NO_PAD.decode(token) else { return false };
        hmac::verify(&self.key, self.form_text(headers, secret).as_bytes(), &token).is_ok()
    }

    fn form_tag(&self, headers: &HeaderMap, secret: &str) -> hmac::Tag {
        hmac::sign(&self.key, self.form_text(headers, secret).as_bytes())
    }

    fn form_text(&self, headers: &HeaderMap, secret: &str) -> String {
        format!("form {secret} {}", cookie(headers, &self.session_cookie).unwrap_or_default())
    }

    fn id(&self, secret: &str) -> Vec<u8> {
        hmac::sign(&self.key, format!("session {secret}").as_bytes()).as_ref().to_vec()
    }

    fn secret(&self) -> String {
        let mut bytes = [0; 32];
        self.random.fill(&mut bytes).expect("the kernel has random numbers: a key was made of them");
        encode(&bytes)
    }

    fn cookie(&self, name: &str, value: &str, age: &str) -> HeaderValue {
        let text = format!("{name}={value}; Path=/; HttpOnly; SameSite=Strict{age}{}", self.secure);
        HeaderValue::try_from(text).expect("all parts are ASCII")
    }
}

impl Session {
    fn is_over(&self, now: Instant) -> bool {
        now.duration_since(self.used) > IDLE_MAX || now.duration_since(self.begun) > AGE_MAX
    }
}

fn encode(bytes: &[u8]) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(bytes)
}

/// Returns the value of a cookie.
fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let pairs = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = pairs.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(known, value)| *known == name && !value.is_empty()).map(|(_, value)| value)
}

impl Console {
    /// Returns who sent a request.
    ///
    /// # Errors
    ///
    /// [`Failure::LoggedOut`] if there is no session although visitors have to log in.
    pub async fn visitor(&self, headers: &HeaderMap, access: Access) -> Result<Visitor, Failure> {
        let (sessions, form) = (&self.sessions, self.sessions.form_token(headers));
        let client = self.backend.client().await?;
        let session = sessions.find(headers, access);
        let token = session.as_ref().and_then(|(_, token, _)| token.clone());
        // The server tells only root whether it has users, and counts a refused question as a failed request. So it is not
        // asked for each page of a user: only if the page has a password, and for writes.
        let is_user = matches!(session, Some((Who::User(_), ..)));
        let is_sure = is_user && self.password.is_none() && access != Access::Write;
        let has_users = is_sure || self.backend.is_auth_enabled(&client.with_token(token)).await?;
        // A session counts only while visitors log in as they did when it began.
        let session = session.filter(|(who, ..)| matches!(who, Who::User(_)) == has_users);
        if let Some((who, token, live)) = session {
            return Ok(Visitor { who, client: client.with_token(token), live, form });
        }
        if has_users || self.password.is_some() {
            return Err(Failure::LoggedOut);
        }
        Ok(Visitor { who: Who::Anyone, client, live: Arc::clone(&sessions.shared), form })
    }
}

impl FromRequestParts<Console> for Visitor {
    type Rejection = axum::response::Response;

    async fn from_request_parts(parts: &mut Parts, console: &Console) -> Result<Self, Self::Rejection> {
        let access = if parts.method == http::Method::POST { Access::Write } else { Access::Use };
        match console.visitor(&parts.headers, access).await {
            Ok(visitor) => Ok(visitor),
            Err(failure) => Err(super::pages::failed(console, parts, &failure)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(cookies: &[&HeaderValue]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for cookie in cookies {
            let pair = cookie.to_str().expect("ASCII").split(';').next().expect("a pair");
            headers.append(header::COOKIE, pair.parse().expect("a value"));
        }
        headers
    }

    fn sessions() -> Sessions {
        Sessions::new(Scheme::Tls, "2382").expect("random numbers")
    }

    fn user() -> Who {
        Who::User("a".to_owned())
    }

    fn token() -> Option<HeaderValue> {
        Some(HeaderValue::from_static("token"))
    }

    #[tokio::test(start_paused = true)]
    async fn sessions_end() {
        let sessions = sessions();
        let cookie = sessions.begin(user(), token());
        let text = cookie.to_str().expect("ASCII");
        assert!(text.starts_with("orlop-console-2382="), "{text}");
        assert!(text.ends_with("; Path=/; HttpOnly; SameSite=Strict; Max-Age=43200; Secure"), "{text}");
        let headers = headers(&[&cookie]);
        let is_open = || sessions.find(&headers, Access::Use).is_some();
        for _ in 0..25 {
            assert!(is_open());
            tokio::time::advance(Duration::from_secs(29 * 60)).await;
        }
        assert!(!is_open(), "after 12 hours");
        let cookie = sessions.begin(user(), token());
        let headers = self::headers(&[&cookie]);
        tokio::time::advance(IDLE_MAX + Duration::from_secs(1)).await;
        assert!(sessions.find(&headers, Access::Use).is_none(), "idle");
        let cookie = sessions.begin(user(), token());
        let headers = self::headers(&[&cookie]);
        for _ in 0..3 {
            assert!(sessions.find(&headers, Access::Check).is_some());
            tokio::time::advance(IDLE_MAX / 3 + Duration::from_secs(1)).await;
        }
        assert!(sessions.find(&headers, Access::Check).is_none(), "a check does not count as use");
        let cookie = sessions.begin(user(), token());
        let headers = self::headers(&[&cookie]);
        assert!(sessions.end(&headers).to_str().is_ok_and(|cookie| cookie.contains("Max-Age=0")));
        assert!(sessions.find(&headers, Access::Use).is_none(), "logged out");
    }

    #[tokio::test(start_paused = true)]
    async fn number_of_sessions_is_bounded() {
        let sessions = sessions();
        let mut cookies = Vec::new();
        for _ in 0..=SESSIONS_MAX {
            cookies.push(sessions.begin(user(), token()));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let open: Vec<bool> =
            cookies.iter().map(|cookie| sessions.find(&headers(&[cookie]), Access::Use).is_some()).collect();
        assert_eq!((open[0], open[1..].iter().all(|open| *open)), (false, true));
    }

    #[tokio::test]
    async fn form_tokens_belong_to_a_browser_and_a_session() {
        let sessions = sessions();
        let first = sessions.form_token(&HeaderMap::new());
        let form = first.cookie.expect("a cookie");
        let (alone, session) = (headers(&[&form]), sessions.begin(user(), token()));
        let both = headers(&[&form, &session]);
        let of_session = sessions.form_token(&both);
        assert!(of_session.cookie.is_none());
        for (request, token, want) in [
            (&alone, &first.token, true),
            (&both, &of_session.token, true),
            (&both, &first.token, false),
            (&alone, &of_session.token, false),
            (&HeaderMap::new(), &first.token, false),
            (&headers(&[&session]), &of_session.token, false),
            (&both, &String::new(), false),
            (&both, &"!".to_owned(), false),
        ] {
            assert_eq!(sessions.is_form_token(request, token), want);
        }
    }
}
