//! Routes calls: calls of the KV service directly to that service, all others through tonic's router.
//!
//! tonic's router matches the path against all registered paths and boxes the bodies several times. This was a tenth of
//! the CPU time of a put (docs/adr/0008).

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

use super::metering::{Metered, MeteredCall, SentBody};
use crate::api::kv::KvService;

const KV: &str = "/etcdserverpb.KV/";

/// All services of a server. Cloned for every call.
#[derive(Clone)]
pub struct Router {
    kv: Metered<KvService>,
    others: Routes,
}

impl Router {
    pub(in crate::api) fn new(kv: Metered<KvService>, others: Routes) -> Self {
        Self { kv, others }
    }

    /// Returns tonic's router, which contains all services.
    pub fn routes(&self) -> Routes {
        self.others.clone()
    }

    /// Replaces tonic's router.
    pub fn with(self, others: Routes) -> Self {
        Self { others: others.prepare(), ..self }
    }
}

impl hyper::service::Service<Request<Incoming>> for Router {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = Call;

    fn call(&self, request: Request<Incoming>) -> Call {
        let deadline = timeout(request.headers()).map(|time| Box::pin(sleep(time)));
        let service = if request.uri().path().starts_with(KV) {
            Service::Kv(self.kv.clone().call(request))
        } else {
            Service::Others(Box::new(self.others.clone().call(request)))
        };
        Call { service, deadline }
    }
}

type ResponseBody = Either<Either<SentBody<Body>, Body>, Body>;

/// A call until its response begins.
pub struct Call {
    service: Service,
    /// The client's deadline for the beginning of the response.
    deadline: Option<Pin<Box<Sleep>>>,
}

enum Service {
    Kv(MeteredCall<Body>),
    Others(Box<<Routes as tower::Service<Request<Incoming>>>::Future>),
}

impl Future for Call {
    type Output = Result<Response<ResponseBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let response = match &mut self.service {
            Service::Kv(served) => Pin::new(served).poll(context).map_ok(|response| response.map(Either::Left)),
            Service::Others(served) => Pin::new(served).poll(context).map_ok(|response| response.map(Either::Right)),
        };
        if response.is_pending()
            && let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(context).is_ready()
        {
            let late = Status::deadline_exceeded("context deadline exceeded");
            return Poll::Ready(Ok(late.into_http::<Body>().map(Either::Right)));
        }
        response
    }
}

/// Returns the client's timeout, which has up to eight digits and a unit in gRPC; `None` for any other text.
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
