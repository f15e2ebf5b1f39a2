//! The deadline of a call: the client says how long it waits (gRPC's header `grpc-timeout`).

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http::HeaderMap;
use tokio::time::{Sleep, sleep};
use tonic::Status;

use crate::api::status::DEADLINE_EXCEEDED;

/// The time until which a call may last; `None` if the client named none.
pub struct Deadline(Option<Pin<Box<Sleep>>>);

impl Deadline {
    /// Reads the headers of a request.
    pub fn of(headers: &HeaderMap) -> Self {
        Self(timeout(headers).map(|time| Box::pin(sleep(time))))
    }

    /// Returns whether the deadline has passed; `context` is woken when it does.
    pub fn has_passed(&mut self, context: &mut Context<'_>) -> bool {
        self.0.as_mut().is_some_and(|sleep| sleep.as_mut().poll(context).is_ready())
    }

    /// Serves a call until the deadline. A call that is answered at once needs no timer.
    ///
    /// # Errors
    ///
    /// The status of a call that is too late.
    pub async fn limit<T>(&mut self, served: impl Future<Output = T>) -> Result<T, Status> {
        let mut served = std::pin::pin!(served);
        std::future::poll_fn(|context| {
            let polled = served.as_mut().poll(context);
            if polled.is_pending() && self.has_passed(context) {
                Poll::Ready(Err(DEADLINE_EXCEEDED.into()))
            } else {
                polled.map(Ok)
            }
        })
        .await
    }
}

/// Returns the client's timeout, which has up to eight digits and a unit in gRPC; `None` for any other text.
fn timeout(headers: &HeaderMap) -> Option<Duration> {
    parse(headers.get("grpc-timeout")?.to_str().ok()?)
}

/// Parses up to eight digits and a unit.
pub fn parse(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if number.len() > 8 || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number = number.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_hours(number)),
        "M" => Some(Duration::from_mins(number)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_parsed() {
        for (text, want) in [
            ("1H", Some(Duration::from_secs(3_600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("99999999m", Some(Duration::from_millis(99_999_999))),
            ("5u", Some(Duration::from_micros(5))),
            ("06n", Some(Duration::from_nanos(6))),
            ("", None),
            ("S", None),
            ("3", None),
            ("-3S", None),
            ("+3S", None),
            ("3 S", None),
            ("3s", None),
            ("123456789S", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", text.parse().expect("a header value"));
            assert_eq!(timeout(&headers), want, "{text}");
        }
        assert_eq!(timeout(&HeaderMap::new()), None);
    }
}
