//! Limits the memory of conversions between JSON and messages.
//!
//! A message that is converted is a tree of maps, which needs much more memory than its JSON or its encoding. The trees
//! of long messages, and the JSON of long responses until it is sent, have a limit together. A conversion waits until it
//! can reserve as much as it may need.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tonic::Status;

use crate::api::status::too_many_requests;
use orlop_core::supervise::blocking;

/// Longer messages are converted on a blocking thread, so that they do not delay other requests, and reserve memory.
/// Shorter ones need neither: at most one at a time is converted on each thread that serves requests.
const LONG_BYTES_MIN: usize = 256 << 10;
/// Maximum memory of all long messages together, in KiB. A message that may need more waits for all of it.
const KIB_MAX: usize = 512 << 10;
/// Maximum memory of a conversion as a multiple of the length of the JSON or of the encoded message. An object with one
/// field takes about 900 bytes, because its map has space for 11 fields. Short objects, such as `{"key":""},`, have 11
/// bytes of JSON; an encoded pair or lease is about as short.
const FACTOR: usize = 90;
/// Maximum time a conversion waits for memory.
const WAIT_MAX: Duration = Duration::from_secs(7);

/// The memory of all conversions.
#[derive(Clone)]
pub struct Memory(Arc<Semaphore>);

/// Reserved memory, until it is dropped. A short message needs none.
#[must_use]
pub struct Reserved(Option<OwnedSemaphorePermit>);

impl Default for Memory {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(KIB_MAX)))
    }
}

impl Memory {
    /// Waits for the memory to convert a message with this length.
    ///
    /// # Errors
    ///
    /// If too little memory becomes free in time.
    pub async fn reserve(&self, len: usize) -> Result<Reserved, Status> {
        if len <= LONG_BYTES_MIN {
            return Ok(Reserved(None));
        }
        let permit = timeout(WAIT_MAX, Arc::clone(&self.0).acquire_many_owned(kib(len.saturating_mul(FACTOR)))).await;
        permit.ok().and_then(Result::ok).map(|permit| Reserved(Some(permit))).ok_or_else(too_many_requests)
    }
}

/// Returns a number of bytes in KiB, at most [`KIB_MAX`].
fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1 << 10).min(KIB_MAX)).unwrap_or(u32::MAX)
}

impl Reserved {
    /// Converts the message for which the memory is reserved. The duration is proportional to the length of the message,
    /// so a long one is converted on a blocking thread.
    ///
    /// # Cancel safety
    ///
    /// A conversion on a blocking thread continues, and keeps its memory until its end.
    pub async fn convert<T: Send + 'static>(
        self,
        work: impl FnOnce() -> Result<T, Status> + Send + 'static,
    ) -> Result<(T, Self), Status> {
        if self.0.is_none() {
            return Ok((work()?, self));
        }
        let converted = blocking(move || work().map(|done| (done, self))).await;
        converted.unwrap_or_else(|| Err(Status::unavailable("orlop: the server is shutting down")))
    }

    /// Keeps at most this number of bytes.
    pub fn shrink(&mut self, bytes: usize) {
        if let Some(permit) = &mut self.0 {
            let excess = permit.num_permits().saturating_sub(kib(bytes) as usize);
            drop(permit.split(excess));
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tonic::Code;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn long_messages_share_the_memory() {
        let memory = Memory::default();
        let mut response = memory.reserve(usize::MAX).await.expect("a message that needs all memory is converted");
        assert!(memory.reserve(LONG_BYTES_MIN).now_or_never().is_some(), "a short message does not wait");
        let refused = memory.reserve(LONG_BYTES_MIN + 1).await.err().expect("no memory is free");
        assert_eq!(refused.code(), Code::ResourceExhausted);
        response.shrink((KIB_MAX << 10) / 2);
        let half = memory.reserve((KIB_MAX << 10) / FACTOR / 2).now_or_never().expect("half of the memory is free");
        let half = half.expect("half of the memory is free");
        assert!(memory.reserve(LONG_BYTES_MIN + 1).now_or_never().is_none(), "nothing is free");
        drop((response, half));
        assert_eq!(memory.0.available_permits(), KIB_MAX);
    }

    #[tokio::test]
    async fn abandoned_conversion_keeps_its_memory_until_its_end() {
        let memory = Memory::default();
        let reserved = memory.reserve(usize::MAX).await.expect("memory is free");
        let (finish, finished) = std::sync::mpsc::channel::<()>();
        let conversion = reserved.convert(move || finished.recv().map_err(|error| Status::internal(error.to_string())));
        assert!(conversion.now_or_never().is_none(), "the conversion is running");
        assert_eq!(memory.0.available_permits(), 0);
        finish.send(()).expect("the conversion is running");
        assert!(memory.reserve(usize::MAX).await.is_ok(), "the conversion has ended");
    }
}
