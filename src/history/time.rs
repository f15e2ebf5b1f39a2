//! Points in time as a command takes them: a revision, a time, or a duration before now.

use std::{fmt, str::FromStr, time::Duration};

use orlop_core::clock::{self, unix_ms};

use crate::{output::Format, text::shown_time};

/// A revision or a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Point {
    Revision(i64),
    /// Milliseconds since 1970.
    UnixMs(i64),
    Ago(Duration),
    Now,
}

impl FromStr for Point {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const ACCEPTED: &str =
            "use a revision (1234), a duration before now (2h, 30m), a time in UTC (2026-11-26T14:02:00Z) or now";
        if text == "now" {
            return Ok(Self::Now);
        }
        if let Ok(revision) = text.parse::<i64>() {
            return if revision > 0 { Ok(Self::Revision(revision)) } else { Err(ACCEPTED.to_owned()) };
        }
        if let Ok(age) = humantime::parse_duration(text) {
            return Ok(Self::Ago(age));
        }
        let with_seconds = match text.matches(':').count() {
            0 => format!("{text} 00:00:00"),
            1 => format!("{}:00", text.trim_end_matches('Z')),
            _ => text.to_owned(),
        };
        let time = humantime::parse_rfc3339_weak(&with_seconds).map_err(|_| ACCEPTED.to_owned())?;
        Ok(Self::UnixMs(unix_ms(time)))
    }
}

impl Point {
    /// Returns the time in milliseconds since 1970, as is `now_ms`; `None` for a revision.
    pub(super) fn unix_ms(self, now_ms: i64) -> Option<i64> {
        match self {
            Self::Revision(_) => None,
            Self::UnixMs(ms) => Some(ms),
            Self::Ago(age) => Some(now_ms.saturating_sub(i64::try_from(age.as_millis()).unwrap_or(i64::MAX))),
            Self::Now => Some(now_ms),
        }
    }
}

/// The revision of a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) revision: i64,
    /// The time in milliseconds since 1970, if the point is a time or a duration.
    pub(super) unix_ms: Option<i64>,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "revision {}", self.revision)?;
        self.unix_ms.map_or(Ok(()), |ms| write!(f, ", the newest one at {}", shown_time(ms)))
    }
}

impl Found {
    /// Names the revision of a time on standard error, after a preposition. JSON has it in its objects.
    pub(super) fn report(self, preposition: &str, format: Format) {
        if self.unix_ms.is_some() && format == Format::Simple {
            eprintln!("orlop: {preposition} {self}");
        }
    }
}

pub(super) fn now_ms() -> i64 {
    unix_ms(clock::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_before_the_given_now() {
        for (text, expected) in [("7", None), ("2s", Some(8_000)), ("now", Some(10_000)), ("1970-01-01", Some(0))] {
            let point: Point = text.parse().expect("a point");
            assert_eq!(point.unix_ms(10_000), expected, "{text}");
        }
    }

    #[test]
    fn points_are_parsed() {
        let minute = Point::UnixMs(1_795_701_720_000);
        for (text, expected) in [
            ("1234", Point::Revision(1234)),
            ("2h", Point::Ago(Duration::from_secs(7200))),
            ("1h 30m", Point::Ago(Duration::from_secs(5400))),
            ("now", Point::Now),
            ("2026-11-26T14:02:00Z", minute),
            ("2026-11-26 14:02:00", minute),
            ("2026-11-26 14:02", minute),
            ("2026-11-26T14:02Z", minute),
            ("2026-11-26", Point::UnixMs(1_795_651_200_000)),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for text in ["", "0", "-5", "yesterday", "14:02", "2026-13-01T00:00:00Z"] {
            assert!(text.parse::<Point>().is_err(), "{text}");
        }
    }
}
