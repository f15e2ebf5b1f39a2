//! `cors`: the origins whose pages may read responses.

use std::{fmt, str::FromStr};

use super::ListenUrl;

/// An origin, or `*` for all. As in etcd, it has a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Any,
    /// `SCHEME://HOST:PORT`.
    Url(String),
}

impl FromStr for Origin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse::<ListenUrl>()) {
            ("*", _) => Ok(Self::Any),
            (_, Ok(url)) => Ok(Self::Url(url.to_string())),
            (_, Err(_)) => Err(format!("{text:?} is not an origin; use * or http://HOST:PORT or https://HOST:PORT")),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Any => "*",
            Self::Url(url) => url,
        })
    }
}
