//! Addresses to listen on or to advertise, in the forms of etcd and of kine.

use std::{fmt, net::IpAddr, path::PathBuf, str::FromStr};

/// Forms of a URL, for errors.
const URLS: &str = "http://HOST:PORT, https://HOST:PORT, unix://PATH or unixs://PATH";
/// Forms of `listen-address`, for errors.
const KINE_FORMS: &str = "HOST:PORT, http://HOST:PORT, https://HOST:PORT, unix://PATH or unixs://PATH";

/// An address to listen on or to advertise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenUrl {
    /// `host:port`.
    Tcp(String, Scheme),
    Unix(PathBuf, Scheme),
}

/// Whether an address uses TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    Plain,
    Tls,
}

impl ListenUrl {
    /// Parses `listen-address`. As in kine, its scheme may be absent or tcp and then is `scheme`. As in Go, an empty host
    /// means all addresses.
    ///
    /// # Errors
    ///
    /// A text that names the accepted forms.
    pub(super) fn of_kine(text: &str, scheme: Scheme) -> Result<Self, String> {
        let address = text.strip_prefix("tcp://").unwrap_or(text);
        if address.contains("://") {
            return parse(text, KINE_FORMS);
        }
        let address = address.strip_suffix('/').unwrap_or(address);
        check_address(address, text, "HOST:PORT")?;
        let host = if address.starts_with(':') { "0.0.0.0" } else { "" };
        Ok(Self::Tcp(format!("{host}{address}"), scheme))
    }

    pub fn scheme(&self) -> Scheme {
        match self {
            Self::Tcp(_, scheme) | Self::Unix(_, scheme) => *scheme,
        }
    }

    /// Returns the host without the brackets of an IPv6 address.
    pub fn host(&self) -> Option<&str> {
        match self {
            Self::Tcp(address, _) => {
                let host = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host);
                Some(host.trim_start_matches('[').trim_end_matches(']'))
            }
            Self::Unix(..) => None,
        }
    }

    /// Returns whether the host means all addresses of a machine.
    pub(super) fn is_unspecified(&self) -> bool {
        let is_unspecified = |host: &str| host.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified());
        self.host().is_some_and(|host| host.is_empty() || is_unspecified(host))
    }
}

impl FromStr for ListenUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse(text, URLS)
    }
}

/// Parses a URL; `forms` are the forms that an error names.
fn parse(text: &str, forms: &str) -> Result<ListenUrl, String> {
    let invalid = || format!("{text:?} is not an address to listen on; use {forms}");
    let (scheme, address) = text.split_once("://").ok_or_else(invalid)?;
    let security = if scheme.ends_with('s') { Scheme::Tls } else { Scheme::Plain };
    match scheme {
        "http" | "https" => {
            let address = address.strip_suffix('/').unwrap_or(address);
            check_address(address, text, forms)?;
            Ok(ListenUrl::Tcp(address.to_owned(), security))
        }
        "unix" | "unixs" if !address.is_empty() => Ok(ListenUrl::Unix(address.into(), security)),
        _ => Err(invalid()),
    }
}

/// Checks that `address` is `HOST:PORT`. `text` is what was given, with its scheme.
fn check_address(address: &str, text: &str, forms: &str) -> Result<(), String> {
    let no_port = || format!("{text:?} has no port; use {forms}");
    let (host, port) = address.rsplit_once(':').ok_or_else(no_port)?;
    if host.contains(':') && !host.starts_with('[') {
        let scheme = text.find("://").map_or("", |at| &text[..at + "://".len()]);
        return Err(format!(
            "the host of {text:?} contains a colon; an IPv6 address needs brackets: {scheme}[ADDRESS]:PORT"
        ));
    }
    // The last colon of an IPv6 address without a port is in the brackets.
    if port.is_empty() || port.ends_with(']') {
        return Err(no_port());
    }
    match port.parse::<u16>() {
        Ok(_) => Ok(()),
        Err(_) => Err(format!("the port of {text:?} is not a number from 0 to 65535")),
    }
}

impl fmt::Display for ListenUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address, Scheme::Plain) => write!(f, "http://{address}"),
            Self::Tcp(address, Scheme::Tls) => write!(f, "https://{address}"),
            Self::Unix(path, Scheme::Plain) => write!(f, "unix://{}", path.display()),
            Self::Unix(path, Scheme::Tls) => write!(f, "unixs://{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_what_is_wrong_with_a_url() {
        for (text, expected) in [
            ("http://localhost:99999", r#"the port of "http://localhost:99999" is not a number from 0 to 65535"#),
            ("http://localhost:http", r#"the port of "http://localhost:http" is not a number from 0 to 65535"#),
            ("http://localhost:1/path", r#"the port of "http://localhost:1/path" is not a number from 0 to 65535"#),
            ("https://localhost", r#""https://localhost" has no port; use http://HOST:PORT, "#),
            ("http://localhost:", r#""http://localhost:" has no port; use http://HOST:PORT, "#),
            ("http://[::1]", r#""http://[::1]" has no port; use http://HOST:PORT, "#),
            ("http://::1:2379", "an IPv6 address needs brackets: http://[ADDRESS]:PORT"),
            ("localhost:2379", r#""localhost:2379" is not an address to listen on; use http://HOST:PORT, "#),
            ("tcp://localhost:2379", "is not an address to listen on; use http://HOST:PORT, "),
            ("unix://", "is not an address to listen on; use http://HOST:PORT, "),
        ] {
            let error = text.parse::<ListenUrl>().expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn listen_address_has_the_forms_of_kine() {
        for (text, scheme, url) in [
            ("localhost:2379", Scheme::Plain, "http://localhost:2379"),
            (":2379", Scheme::Tls, "https://0.0.0.0:2379"),
            ("tcp://0.0.0.0:2379", Scheme::Plain, "http://0.0.0.0:2379"),
            ("tcp://[::1]:2379/", Scheme::Tls, "https://[::1]:2379"),
            ("http://localhost:2379", Scheme::Tls, "http://localhost:2379"),
            ("unix://kine.sock", Scheme::Plain, "unix://kine.sock"),
        ] {
            assert_eq!(ListenUrl::of_kine(text, scheme).map(|url| url.to_string()).as_deref(), Ok(url), "{text}");
        }
        for (text, expected) in [
            ("localhost", r#""localhost" has no port; use HOST:PORT"#),
            ("tcp://localhost", r#""tcp://localhost" has no port; use HOST:PORT"#),
            ("localhost:99999", r#"the port of "localhost:99999" is not a number from 0 to 65535"#),
            ("fd00::1:2379", "an IPv6 address needs brackets: [ADDRESS]:PORT"),
            ("udp://localhost:2379", r#""udp://localhost:2379" is not an address to listen on; use HOST:PORT, "#),
        ] {
            let error = ListenUrl::of_kine(text, Scheme::Plain).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
