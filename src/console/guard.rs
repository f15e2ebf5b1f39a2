//! Checks of every request, and the headers of every response.
//!
//! A page in the same browser, but from elsewhere, can send requests here. It cannot read the responses, unless its name
//! was rebound to this address (DNS rebinding), so `Host` must be a known name. `Origin` and `Sec-Fetch-Site` name the
//! page that sent a request: only this one may, except that others may link here.

use std::sync::{Arc, LazyLock};

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header, uri::Authority};
use sha2::{Digest as _, Sha256};

use super::pages::STYLE;
use crate::config::{HostName, ListenUrl};

/// Scripts and requests only from here, and only our style sheet; nothing in frames; forms only to here.
static CONTENT_SECURITY_POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let style = STANDARD.encode(Sha256::digest(STYLE));
    let policy = format!(
        "default-src 'none'; script-src 'self'; style-src 'sha256-{style}'; img-src 'self'; connect-src 'self'; \
         form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    );
    HeaderValue::from_maybe_shared(policy).expect("the policy is visible ASCII")
});

const HEADERS: [(HeaderName, HeaderValue); 6] = [
    (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
    (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    // With "no-referrer", browsers would send "Origin: null" with this page's own forms; with "same-origin", up to 4 KiB of
    // the address, so that requests about long keys would be too large.
    (header::REFERRER_POLICY, HeaderValue::from_static("strict-origin")),
    (HeaderName::from_static("cross-origin-opener-policy"), HeaderValue::from_static("same-origin")),
    (HeaderName::from_static("cross-origin-resource-policy"), HeaderValue::from_static("same-origin")),
];

/// The names under which the page may be requested.
#[derive(Debug)]
pub(super) struct Hosts {
    names: Vec<String>,
    /// Those of `console-allowed-hosts`, under which a proxy may serve the page.
    allowed: Vec<HostName>,
    /// Whether any IP address is accepted: the page listens on all addresses. An attacker can rebind only names.
    any_address: bool,
}

impl Hosts {
    pub fn new(listen: &ListenUrl, allowed: &[HostName]) -> Self {
        let mut names: Vec<String> = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).to_vec();
        let host = listen.host().unwrap_or_default();
        names.push(host.to_lowercase());
        names.extend(allowed.iter().map(|name| name.as_str().to_owned()));
        names.retain(|name| !name.is_empty());
        let any_address = ["0.0.0.0", "::"].contains(&host);
        Self { names, allowed: allowed.to_vec(), any_address }
    }

    /// Returns whether the page may be requested under this host, with or without a port.
    fn allow(&self, authority: &str) -> bool {
        let Some(host) = host_of(authority) else { return false };
        self.names.contains(&host) || (self.any_address && host.parse::<std::net::IpAddr>().is_ok())
    }

    /// Returns whether an origin is this page, which was requested under `host`. The scheme is not compared: a proxy may
    /// add TLS.
    ///
    /// A proxy may also replace `Host`, or omit its port. So a name of `console-allowed-hosts` is accepted, too, with any
    /// port. Another server on another port of such a name could then send requests. Browsers name those `same-site`, which
    /// is refused, and without that a form needs its token, which other origins cannot read.
    fn is_origin(&self, origin: &str, host: &str) -> bool {
        let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        let is_allowed = |authority: &str| {
            host_of(authority).is_some_and(|host| self.allowed.iter().any(|name| name.as_str() == host))
        };
        authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host) || is_allowed(authority))
    }
}

/// Returns the host of an authority in lower case, without the brackets of an IPv6 address; `None` if the authority is
/// invalid or names a user.
fn host_of(authority: &str) -> Option<String> {
    let authority = authority.parse::<Authority>().ok().filter(|authority| !authority.as_str().contains('@'))?;
    Some(authority.host().trim_start_matches('[').trim_end_matches(']').to_lowercase())
}

/// Refuses requests that this page or a person did not send, and adds the headers to every response.
pub(super) async fn guard(State(hosts): State<Arc<Hosts>>, request: Request, next: Next) -> Response {
    let mut response = match check(&hosts, &request) {
        Ok(()) => next.run(request).await,
        Err(reason) => (StatusCode::FORBIDDEN, format!("{reason}\n")).into_response(),
    };
    let headers = response.headers_mut();
    headers.extend(HEADERS);
    headers.insert(header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY.clone());
    response
}

fn check(hosts: &Hosts, request: &Request) -> Result<(), String> {
    let headers = request.headers();
    let authority = request.uri().authority().map(Authority::as_str);
    let sent = headers.get_all(header::HOST).iter().map(|host| host.to_str().unwrap_or_default());
    let named: Vec<&str> = authority.into_iter().chain(sent).collect();
    let [host, ..] = named.as_slice() else { return Err("the request has no Host".to_owned()) };
    if !named.iter().all(|host| hosts.allow(host)) {
        return Err("the name of this host is not allowed; add it to console-allowed-hosts".to_owned());
    }
    match headers.get(header::ORIGIN).map(|origin| origin.to_str().unwrap_or_default()) {
        Some(origin) if !hosts.is_origin(origin, host) => return Err("the request is from another page".to_owned()),
        Some(_) | None => {}
    }
    let is_elsewhere = matches!(text(headers, "sec-fetch-site"), Some("cross-site" | "same-site"));
    let is_link = request.method() == Method::GET && text(headers, "sec-fetch-mode") == Some("navigate");
    if is_elsewhere && !is_link { Err("the request is from another page".to_owned()) } else { Ok(()) }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(allowed: &[&str]) -> Vec<HostName> {
        allowed.iter().map(|name| name.parse().expect("a name")).collect()
    }

    #[track_caller]
    fn hosts(listen: &str, allowed: &[&str], rows: &[(&str, bool)]) {
        let hosts = Hosts::new(&listen.parse().expect("a URL"), &names(allowed));
        for (host, want) in rows {
            assert_eq!(hosts.allow(host), *want, "{host} at {listen}");
        }
    }

    #[test]
    fn only_known_hosts_are_allowed() {
        let common = [("localhost:2382", true), ("LOCALHOST", true), ("127.0.0.1:1", true), ("[::1]:2382", true)];
        let foreign =
            [("evil.example:2382", false), ("localhost.evil.example", false), ("", false), ("a@localhost", false)];
        for (listen, allowed) in [("http://127.0.0.1:2382", &[][..]), ("http://0.0.0.0:2382", &["Etcd.example"])] {
            hosts(listen, allowed, &common);
            hosts(listen, allowed, &foreign);
        }
        hosts("http://127.0.0.1:1", &[], &[("10.0.0.7", false), ("etcd.example", false)]);
        hosts("http://10.0.0.7:1", &[], &[("10.0.0.7:1", true), ("10.0.0.8:1", false)]);
        hosts(
            "http://0.0.0.0:1",
            &["Etcd.example"],
            &[("10.0.0.7", true), ("[fe80::1]:1", true), ("etcd.Example:9", true)],
        );
    }

    #[track_caller]
    fn check_request(method: &str, headers: &[(&str, &str)], want: bool) {
        let hosts = Hosts::new(&"http://127.0.0.1:2382".parse().expect("a URL"), &names(&["etcd.example"]));
        let mut request = Request::builder().method(method).uri("/");
        if !headers.iter().any(|(name, _)| *name == "host") {
            request = request.header("host", "localhost:2382");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(axum::body::Body::empty()).expect("a request");
        assert_eq!(check(&hosts, &request).is_ok(), want, "{method} {headers:?}");
    }

    #[test]
    fn requests_of_other_pages_are_refused() {
        check_request("GET", &[], true);
        check_request("POST", &[("origin", "http://localhost:2382"), ("sec-fetch-site", "same-origin")], true);
        check_request("POST", &[("origin", "https://localhost:2382")], true);
        for origin in ["http://evil.example", "null", "http://localhost:2383", "localhost:2382", ""] {
            check_request("POST", &[("origin", origin)], false);
            check_request("GET", &[("origin", origin)], false);
        }
        let site = |site, mode| [("sec-fetch-site", site), ("sec-fetch-mode", mode)];
        check_request("GET", &site("cross-site", "navigate"), true);
        check_request("GET", &site("cross-site", "cors"), false);
        check_request("GET", &site("same-site", "no-cors"), false);
        check_request("POST", &site("same-site", "navigate"), false);
        check_request("GET", &[("host", "evil.example")], false);
        check_request("GET", &[("host", "localhost:2382"), ("host", "evil.example")], false);
    }

    #[test]
    fn forms_behind_a_proxy_are_accepted() {
        let form = |host, origin, site| [("host", host), ("origin", origin), ("sec-fetch-site", site)];
        for (host, origin, site, want) in [
            ("etcd.example", "https://etcd.example", "same-origin", true),
            // The proxy replaces the name, or omits the port.
            ("127.0.0.1:2382", "https://etcd.example", "same-origin", true),
            ("etcd.example", "https://Etcd.example:8443", "same-origin", true),
            ("etcd.example", "https://etcd.example:8443", "same-site", false),
            ("etcd.example", "https://etcd.example.evil.example", "same-origin", false),
            ("etcd.example", "https://etcd.example@evil.example", "same-origin", false),
            ("etcd.example", "ftp://etcd.example", "same-origin", false),
            // Not a name of `console-allowed-hosts`.
            ("127.0.0.1:2382", "http://localhost:8080", "same-origin", false),
        ] {
            check_request("POST", &form(host, origin, site), want);
        }
    }
}
