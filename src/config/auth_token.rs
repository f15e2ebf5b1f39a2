//! The setting `auth-token`: which tokens are given and accepted.

use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::Interval;

/// The kind of tokens, as in etcd: `simple`, or `jwt` with options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AuthToken {
    #[default]
    Simple,
    Jwt(Jwt),
}

/// The options of `jwt`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Jwt {
    pub sign_method: String,
    pub pub_key: Option<PathBuf>,
    pub priv_key: Option<PathBuf>,
    pub ttl: Duration,
    /// The text of the setting.
    text: String,
}

/// etcd's default TTL of a JWT.
const TTL: Duration = Duration::from_secs(5 * 60);

impl FromStr for AuthToken {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, options) = text.split_once(',').unwrap_or((text, ""));
        match kind {
            // As for other settings, an empty text is the default.
            "simple" | "" => Ok(Self::Simple),
            "jwt" => jwt(text, options).map(Self::Jwt),
            _ => Err(format!(
                "{text:?} is neither simple nor jwt,sign-method=METHOD,pub-key=FILE,priv-key=FILE,ttl=DURATION"
            )),
        }
    }
}

fn jwt(text: &str, options: &str) -> Result<Jwt, String> {
    let mut jwt = Jwt { sign_method: String::new(), pub_key: None, priv_key: None, ttl: TTL, text: text.to_owned() };
    let mut seen = Vec::new();
    for option in options.split(',').filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').ok_or_else(|| format!("{option:?} is not OPTION=VALUE"))?;
        if seen.contains(&name) {
            return Err(format!("{name} is given twice"));
        }
        seen.push(name);
        match name {
            "sign-method" => value.clone_into(&mut jwt.sign_method),
            "pub-key" => jwt.pub_key = Some(value.into()).filter(|_| !value.is_empty()),
            "priv-key" => jwt.priv_key = Some(value.into()).filter(|_| !value.is_empty()),
            "ttl" => jwt.ttl = value.parse::<Interval>()?.0,
            _ => return Err(format!("unknown option {name:?}, expected sign-method, pub-key, priv-key or ttl")),
        }
    }
    if jwt.sign_method.is_empty() {
        return Err("jwt requires sign-method, for example sign-method=RS256".to_owned());
    }
    Ok(jwt)
}

impl fmt::Display for AuthToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Simple => "simple",
            Self::Jwt(jwt) => &jwt.text,
        })
    }
}

impl Serialize for AuthToken {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for AuthToken {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed() {
        let jwt = |text: &str| match text.parse() {
            Ok(AuthToken::Jwt(jwt)) => jwt,
            other => panic!("{text}: {other:?}"),
        };
        assert_eq!("simple".parse(), Ok(AuthToken::Simple));
        assert_eq!("".parse(), Ok(AuthToken::Simple));
        let all = jwt("jwt,pub-key=a.pem,priv-key=b.pem,sign-method=RS256,ttl=10m");
        let files = (all.pub_key.unwrap(), all.priv_key.unwrap());
        assert_eq!(files, ("a.pem".into(), "b.pem".into()));
        assert_eq!((all.sign_method.as_str(), all.ttl), ("RS256", Duration::from_secs(600)));
        assert_eq!(jwt("jwt,sign-method=HS256,priv-key=s").ttl, TTL);
        for (text, error) in [
            ("none", "neither simple nor jwt"),
            ("jwt", "requires sign-method"),
            ("jwt,sign-method", "not OPTION=VALUE"),
            ("jwt,sign-method=a,sign-method=a", "twice"),
            ("jwt,sign-method=a,ttl=x", "not a duration"),
            ("jwt,sign-method=a,keys=x", "unknown option"),
        ] {
            let parsed = text.parse::<AuthToken>();
            assert!(parsed.as_ref().is_err_and(|found| found.contains(error)), "{text}: {parsed:?}");
        }
    }
}
