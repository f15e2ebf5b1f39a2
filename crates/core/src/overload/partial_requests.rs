//! Limits requests of which only a part has arrived: the bytes of all clients' partial requests together are bounded,
//! and each request has a deadline.
//!
//! Only bytes that have arrived count; the length that a client announces allocates nothing. A call with one request
//! message is partial until its client ends the stream, because its message is held until then.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::{Sleep, sleep};
use tracing::warn;

use crate::log_limit::LogLimit;

/// Maximum bytes of all partial requests together.
const BYTES_MAX: usize = 256 << 20;
/// Maximum time from the first byte of a request to its last: enough for 2 MiB at 35 KiB/s.
pub const REQUEST_TIME_MAX: Duration = Duration::from_secs(60);

/// Clients cause this message as often as they like.
static FULL_LOG: LogLimit = LogLimit::every(Duration::from_secs(10));

/// Counts the bytes of partial requests.
#[derive(Debug, Default)]
pub struct PartialRequests {
    bytes: AtomicUsize,
}

/// The partial request of one stream.
pub struct PartialRequest {
    all: Arc<PartialRequests>,
    bytes: usize,
    deadline: Option<Pin<Box<Sleep>>>,
}

/// There is no memory for more partial requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// The request was not complete within [`REQUEST_TIME_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Late;

impl PartialRequest {
    pub fn new(all: &Arc<PartialRequests>) -> Self {
        Self { all: Arc::clone(all), bytes: 0, deadline: None }
    }

    /// Sets the number of received bytes of the current request. 0 means that the request is complete; it then has no
    /// deadline.
    ///
    /// # Errors
    ///
    /// If the partial requests of all streams together exceed the limit. The bytes are counted even then, until the
    /// next call or until `self` is dropped.
    pub fn set_bytes(&mut self, bytes: usize) -> Result<(), Full> {
        if bytes == 0 {
            self.deadline = None;
        }
        let before = std::mem::replace(&mut self.bytes, bytes);
        if bytes <= before {
            self.all.bytes.fetch_sub(before - bytes, Ordering::Relaxed);
            return Ok(());
        }
        let total = self.all.bytes.fetch_add(bytes - before, Ordering::Relaxed) + bytes - before;
        let is_full = total > BYTES_MAX;
        if !is_full {
            return Ok(());
        }
        if let Some(count) = FULL_LOG.count() {
            warn!(
                bytes = total,
                count, "partial requests have too many bytes; others are refused until some are complete"
            );
        }
        Err(Full)
    }

    /// Ready when the current request is late. Never ready while no request is incomplete.
    pub fn poll_deadline(&mut self, context: &mut Context<'_>) -> Poll<Late> {
        if self.bytes == 0 {
            return Poll::Pending;
        }
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(sleep(REQUEST_TIME_MAX)));
        ready!(deadline.as_mut().poll(context));
        Poll::Ready(Late)
    }
}

impl Drop for PartialRequest {
    fn drop(&mut self) {
        self.all.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_shared_and_returned() {
        let all = Arc::new(PartialRequests::default());
        let mut requests: Vec<PartialRequest> = (0..4).map(|_| PartialRequest::new(&all)).collect();
        for request in &mut requests {
            assert_eq!(request.set_bytes(BYTES_MAX / 4), Ok(()));
        }
        let mut another = PartialRequest::new(&all);
        assert_eq!(another.set_bytes(1), Err(Full));
        assert_eq!(requests[0].set_bytes(10), Ok(()));
        assert_eq!(another.set_bytes(2), Ok(()), "the first request has freed most of its bytes");
        drop((requests, another));
        assert_eq!(all.bytes.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn each_request_has_its_own_deadline() {
        let mut request = PartialRequest::new(&Arc::default());
        let mut is_late = async |bytes: usize, time: Duration| {
            request.set_bytes(bytes).expect("memory is free");
            tokio::time::timeout(time, std::future::poll_fn(|context| request.poll_deadline(context))).await.is_ok()
        };
        assert!(!is_late(5, REQUEST_TIME_MAX / 2).await);
        assert!(!is_late(0, REQUEST_TIME_MAX * 2).await, "no request has begun");
        assert!(!is_late(5, REQUEST_TIME_MAX / 2).await);
        assert!(is_late(6, REQUEST_TIME_MAX).await, "another byte does not extend the deadline");
    }
}
