//! etcd's `--cors` and `--host-whitelist`: whose pages may read responses, and under which names HTTP is served.
//!
//! The check of the host protects against DNS rebinding: a page in a browser whose name leads to this server. There is
//! no check with TLS, because the browser then refuses the certificate, and none of gRPC over HTTP/2, which browsers
//! use only with TLS.
//!
//! Unlike etcd, requests that pages from elsewhere send with a browser's client certificate are refused.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
};

use super::NO_SNIFF;
use crate::{config::Origin, net::WithTls};

/// The origins and hosts of requests that are served.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Empty: all.
    origins: Vec<Origin>,
    /// Empty: all.
    hosts: Vec<String>,
    certificates: ClientCertificates,
}

/// Whether clients with TLS have presented a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ClientCertificates {
    #[default]
    Absent,
    Required,
}

impl Access {
    /// Creates the rules from the settings `cors` and `host-whitelist`.
    pub fn new(origins: &[Origin], hosts: &[String]) -> Self {
        let any = hosts.iter().any(|host| host == "*");
        let hosts = if any { Vec::new() } else { hosts.to_vec() };
        Self { origins: origins.to_vec(), hosts, certificates: ClientCertificates::Absent }
    }

    /// Returns the rules for addresses whose clients with TLS must present a certificate.
    pub(super) fn with_client_certificates(&self) -> Self {
        Self { certificates: ClientCertificates::Required, ..self.clone() }
    }

    /// Returns the rules for addresses that serve only probes and metrics, under any name.
    pub(super) fn for_probes(&self) -> Self {
        Self { hosts: Vec::new(), ..self.clone() }
    }

    /// Returns the host of a request if it is not served.
    fn refused_host<'a>(&self, request: &'a Request) -> Option<&'a str> {
        if self.hosts.is_empty() || has_tls(request) {
            return None;
        }
        let sent = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
        let authority = request.uri().authority().map(|authority| authority.as_str());
        let host = hostname(authority.or(sent).unwrap_or_default());
        (!self.hosts.iter().any(|allowed| allowed == host)).then_some(host)
    }

    /// Returns the origin that may read the response to a request with these headers.
    fn allowed_origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        if self.origins.is_empty() || self.origins.contains(&Origin::Any) {
            return Some(HeaderValue::from_static("*"));
        }
        self.listed_origin(headers).cloned()
    }

    fn listed_origin<'a>(&self, headers: &'a HeaderMap) -> Option<&'a HeaderValue> {
        let sent = headers.get(header::ORIGIN)?;
        let is_sent = |origin: &Origin| matches!(origin, Origin::Url(url) if sent.as_bytes() == url.as_bytes());
        self.origins.iter().any(is_sent).then_some(sent)
    }

    /// Returns whether a page from elsewhere made a browser send this request with the certificate of its user. The
    /// page needs no permission for that: browsers do not ask the server before a POST whose content type is
    /// `text/plain`. Programs do not send `Sec-Fetch-Site`, and scripts cannot change it.
    fn is_forged(&self, request: &Request) -> bool {
        let site = request.headers().get(SEC_FETCH_SITE).map(HeaderValue::as_bytes);
        self.certificates == ClientCertificates::Required
            && request.method() == Method::POST
            && matches!(site, Some(b"cross-site" | b"same-site"))
            && has_tls(request)
            && self.listed_origin(request.headers()).is_none()
    }
}

fn has_tls(request: &Request) -> bool {
    request.extensions().get::<WithTls>().is_some() || request.uri().scheme_str() == Some("https")
}

/// The header in which browsers name the relation of a page to the server to which it sends a request.
const SEC_FETCH_SITE: &str = "sec-fetch-site";

/// Headers for allowed origins, in addition to the one that names them.
const HEADERS: [(HeaderName, HeaderValue); 2] = [
    (header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("POST, GET, OPTIONS, PUT, DELETE")),
    (header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("accept, content-type, authorization")),
];

/// Refuses requests for other hosts and forged ones, answers OPTIONS, which browsers send before a request to another
/// origin, and adds the headers for allowed origins. Like etcd, it does so at every path.
pub(super) async fn control(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    if let Some(refused) = access.refused_host(&request).map(misdirected) {
        return refused;
    }
    if access.is_forged(&request) {
        return forged();
    }
    let origin = access.allowed_origin(request.headers());
    let mut response =
        if request.method() == Method::OPTIONS { StatusCode::OK.into_response() } else { next.run(request).await };
    if let Some(origin) = origin {
        response.headers_mut().extend(HEADERS);
        response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    }
    response
}

/// Returns the host as Go's `net.SplitHostPort` does: without port and brackets, or all if there is no port.
fn hostname(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((host, _)) if !host.contains(':') => host,
        Some((host, _)) => host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(authority),
        None => authority,
    }
}

/// etcd's response.
fn misdirected(host: &str) -> Response {
    let text = format!(
        "\netcd received your request, but the Host header was unrecognized.\n\n\
         To fix this, choose one of the following options:\n\
         - Enable TLS, then any HTTPS request will be allowed.\n\
         - Add the hostname you want to use to the whitelist in settings.\n  \
         - e.g. etcd --host-whitelist {host:?}\n\n\
         This requirement has been added to help prevent \"DNS Rebinding\" attacks (CVE-2018-5702).\n\n"
    );
    (StatusCode::MISDIRECTED_REQUEST, [NO_SNIFF], text).into_response()
}

fn forged() -> Response {
    let text = "orlop: a web page of another site made the browser send this request with a client certificate; \
                only pages of the origins in --cors may\n";
    (StatusCode::FORBIDDEN, [NO_SNIFF], text).into_response()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    #[track_caller]
    fn check(hosts: &[&str], host: &str, refused: Option<&str>) {
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        let access = Access::new(&[], &hosts);
        let request = Request::builder().uri("/health").header(header::HOST, host).body(Body::empty()).expect("valid");
        assert_eq!(access.refused_host(&request), refused, "{hosts:?} {host}");
        assert_eq!(access.for_probes().refused_host(&request), None, "{hosts:?} {host}");
    }

    #[test]
    fn hosts_are_compared_as_by_etcd() {
        check(&[], "evil.example", None);
        check(&["a.example", "*"], "evil.example", None);
        let listed = ["a.example", "::1"];
        for host in ["a.example", "a.example:2379", "[::1]:2379", "::1"] {
            check(&listed, host, None);
        }
        check(&listed, "A.example:2379", Some("A.example"));
        check(&listed, "evil.example:2379", Some("evil.example"));
        check(&listed, "[::1]", Some("[::1]"));
        check(&listed, "[::2]:2379", Some("::2"));
        check(&listed, "", Some(""));
    }

    #[track_caller]
    fn check_forged(method: &str, url: &str, headers: &[(&str, &str)], want: bool) {
        let origins = "*,https://a.example:8443".parse::<crate::config::List<Origin>>().expect("origins").0;
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::empty()).expect("valid");
        let access = Access::new(&origins, &[]);
        assert_eq!(access.with_client_certificates().is_forged(&request), want, "{method} {url} {headers:?}");
        assert!(!access.is_forged(&request), "without certificates: {method} {url} {headers:?}");
    }

    #[test]
    fn pages_from_elsewhere_cannot_use_certificates() {
        let url = "https://etcd.example:2379/v3/kv/deleterange";
        let sent = |site, origin| [(SEC_FETCH_SITE, site), ("origin", origin)];
        for (site, origin, want) in [
            ("cross-site", "https://evil.example", true),
            ("cross-site", "null", true),
            ("same-site", "https://etcd.example:3000", true),
            ("cross-site", "https://a.example:8443", false),
            ("same-origin", "https://etcd.example:2379", false),
            ("none", "https://evil.example", false),
        ] {
            check_forged("POST", url, &sent(site, origin), want);
        }
        check_forged("POST", url, &[(SEC_FETCH_SITE, "cross-site")], true);
        // A link to a page without effects.
        check_forged("GET", "https://etcd.example:2379/version", &[(SEC_FETCH_SITE, "cross-site")], false);
        // Without TLS there is no certificate.
        check_forged("POST", "/v3/kv/put", &[(SEC_FETCH_SITE, "cross-site")], false);
        // A program.
        check_forged("POST", url, &[("origin", "https://evil.example")], false);
    }

    #[test]
    fn only_listed_origins_are_allowed() {
        let allowed = |origins: &str, sent: &str| {
            let origins = origins.parse::<crate::config::List<Origin>>().expect("origins").0;
            let headers = HeaderMap::from_iter([(header::ORIGIN, HeaderValue::from_str(sent).expect("valid"))]);
            Access::new(&origins, &[]).allowed_origin(&headers).map(|origin| origin.to_str().expect("text").to_owned())
        };
        let listed = "http://a.example:80,https://b.example:8443";
        for (origins, sent, want) in [
            ("", "http://x.example", Some("*")),
            ("*", "http://x.example", Some("*")),
            (listed, "http://a.example:80", Some("http://a.example:80")),
            (listed, "https://b.example:8443", Some("https://b.example:8443")),
            (listed, "http://b.example:8443", None),
            (listed, "null", None),
        ] {
            assert_eq!(allowed(origins, sent).as_deref(), want, "{origins} {sent}");
        }
    }
}
