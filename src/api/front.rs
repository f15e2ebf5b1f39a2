//! The way in: calls of the KV service go straight to it, all others through the router.
//!
//! A router compares the path with all that it knows, and hands on bodies that it has boxed again and again. Of what a put
//! costs the server that was a tenth.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http::{HeaderMap, Request, Response};
use http_body_util::Either;
use hyper::body::Incoming;
use tokio::time::{Sleep, sleep};
use tonic::{Status, body::Body, service::Routes};
use tower::Service as _;

use super::{
    kv::KvService,
    meter::{Metered, Sent, Served},
};

const KV: &str = "/etcdserverpb.KV/";

/// See the module's page. It is cloned for every call.
#[derive(Clone)]
pub struct Front {
    kv: Metered<KvService>,
    others: Routes,
}

impl Front {
    pub(super) fn new(kv: Metered<KvService>, others: Routes) -> Self {
        Self { kv, others }
    }

    /// With `others` made of the services' router, which has the KV service as well.
    pub fn with<E>(self, others: impl FnOnce(Routes) -> Result<Routes, E>) -> Result<Self, E> {
        Ok(Self { others: others(self.others)?.prepare(), ..self })
    }
}

impl hyper::service::Service<Request<Incoming>> for Front {
    type Response = Response<AnswerBody>;
    type Error = Infallible;
    type Future = Answered;

    fn call(&self, request: Request<Incoming>) -> Answered {
        let deadline = timeout(request.headers()).map(|time| Box::pin(sleep(time)));
        let by = if request.uri().path().starts_with(KV) {
            By::Kv(self.kv.clone().call(request))
        } else {
            By::Others(Box::new(self.others.clone().call(request)))
        };
        Answered { by, deadline }
    }
}

type AnswerBody = Either<Either<Sent<Body>, Body>, Body>;

/// An answer under way.
pub struct Answered {
    by: By,
    /// The client's, from which on it does not wait for the head of an answer.
    deadline: Option<Pin<Box<Sleep>>>,
}

enum By {
    Kv(Served<Body>),
    Others(Box<<Routes as tower::Service<Request<Incoming>>>::Future>),
}

impl Future for Answered {
    type Output = Result<Response<AnswerBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = match &mut self.by {
            By::Kv(served) => Pin::new(served).poll(context).map_ok(|answer| answer.map(Either::Left)),
            By::Others(served) => Pin::new(served).poll(context).map_ok(|answer| answer.map(Either::Right)),
        };
        if answer.is_pending()
            && let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(context).is_ready()
        {
            let late = Status::deadline_exceeded("context deadline exceeded");
            return Poll::Ready(Ok(late.into_http::<Body>().map(Either::Right)));
        }
        answer
    }
}

/// How long the client waits, as gRPC's protocol has it: up to eight digits and a unit. What is not of that form is none.
fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
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
    fn timeouts_are_read() {
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
            headers.insert("grpc-timeout", text.parse().expect("a header's value"));
            assert_eq!(timeout(&headers), want, "{text}");
        }
        assert_eq!(timeout(&HeaderMap::new()), None);
    }
}
