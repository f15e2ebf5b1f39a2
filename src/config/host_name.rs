//! `console-allowed-hosts`: the names under which browsers may request the web page.

use std::{fmt, net::IpAddr, str::FromStr};

/// A name or an IP address without a scheme and a port: the page may be requested under it at any port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostName(String);

impl HostName {
    /// Returns the name in lower case, and an IPv6 address without brackets.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for HostName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bare = text.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
        let is_name = !bare.is_empty() && !bare.contains([':', '/', '@', '*', ' ']);
        if is_name || bare.parse::<IpAddr>().is_ok() {
            Ok(Self(bare))
        } else {
            Err(format!("{text:?} is not a name of a host; use HOST, without a scheme and a port"))
        }
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_no_scheme_and_no_port() {
        for (text, expected) in [
            ("Etcd.example", Some("etcd.example")),
            ("10.0.0.7", Some("10.0.0.7")),
            ("[fe80::1]", Some("fe80::1")),
            ("fe80::1", Some("fe80::1")),
            ("etcd.example:8443", None),
            ("10.0.0.7:2382", None),
            ("[fe80::1]:2382", None),
            ("https://etcd.example", None),
            ("etcd.example/", None),
            ("*.example", None),
            ("", None),
        ] {
            let host = text.parse::<HostName>().ok();
            assert_eq!(host.as_ref().map(HostName::as_str), expected, "{text}");
        }
    }
}
