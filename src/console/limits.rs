//! Limits of what visitors can make the process do at the same time. In a server, the page shares the process, and on
//! small machines the only thread of the runtime, with the requests of clients.

use std::{panic::resume_unwind, sync::Arc};

use tokio::{
    sync::{Semaphore, SemaphorePermit},
    task::spawn_blocking,
};

use super::backend::Failure;

/// Maximum number of requests at the same time on one connection to the page.
pub(super) const CONNECTION_REQUESTS_MAX: u32 = 100;
/// Maximum number of passwords that are checked at the same time.
const LOG_INS_MAX: usize = 4;
/// Maximum number of log-ins that wait until their password is checked. Further ones are refused.
const LOG_INS_WAITING_MAX: usize = 32;
/// Maximum number of pages that read values at the same time.
const VALUE_PAGES_MAX: usize = 4;
/// Values that are longer together, in bytes, are rendered on a blocking thread.
const INLINE_BYTES_MAX: usize = 256 << 10;
/// Maximum number of blocking threads that render values.
const RENDERERS_MAX: usize = 2;

/// Limits log-ins, which need no session.
pub(super) struct LogIns {
    /// Permits to wait for a check, and for the check itself.
    admitted: Semaphore,
    /// Permits to check a password.
    checked: Semaphore,
}

/// The permission to check one password.
pub(super) struct LogIn<'a> {
    _admitted: SemaphorePermit<'a>,
    _checked: SemaphorePermit<'a>,
}

impl Default for LogIns {
    fn default() -> Self {
        Self { admitted: Semaphore::new(LOG_INS_MAX + LOG_INS_WAITING_MAX), checked: Semaphore::new(LOG_INS_MAX) }
    }
}

impl LogIns {
    /// Waits until a password may be checked. Returns `None` at once if too many log-ins already wait.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a cancelled call leaves the queue.
    pub async fn begin(&self) -> Option<LogIn<'_>> {
        let admitted = self.admitted.try_acquire().ok()?;
        let checked = self.checked.acquire().await.ok()?;
        Some(LogIn { _admitted: admitted, _checked: checked })
    }
}

/// Limits the pages that read values of keys, which stay in memory until the page is rendered.
pub(super) struct ValuePages(Semaphore);

impl Default for ValuePages {
    fn default() -> Self {
        Self(Semaphore::new(VALUE_PAGES_MAX))
    }
}

impl ValuePages {
    /// Waits until a page may read values. It must hold no values while it waits.
    ///
    /// # Errors
    ///
    /// [`Failure::Unavailable`] if the process stops.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a cancelled call leaves the queue.
    pub async fn begin(&self) -> Result<SemaphorePermit<'_>, Failure> {
        self.0.acquire().await.map_err(|_| stopping())
    }
}

/// Runs work whose duration depends on the size of values: to render and to compare them.
pub(super) struct Renderer {
    /// Permits for blocking threads.
    threads: Arc<Semaphore>,
}

impl Default for Renderer {
    fn default() -> Self {
        Self { threads: Arc::new(Semaphore::new(RENDERERS_MAX)) }
    }
}

impl Renderer {
    /// Runs `work` on values of `bytes` bytes together. For long values it runs on a blocking thread, so that it does
    /// not delay other requests, and waits while [`RENDERERS_MAX`] threads are busy.
    ///
    /// # Errors
    ///
    /// [`Failure::Unavailable`] if the process stops.
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        if bytes <= INLINE_BYTES_MAX {
            return Ok(work());
        }
        let permit = Arc::clone(&self.threads).acquire_owned().await.map_err(|_| stopping())?;
        let running = spawn_blocking(move || {
            // The thread holds the permit, because it continues if the browser no longer waits.
            let _permit = permit;
            work()
        });
        match running.await {
            Ok(done) => Ok(done),
            Err(ended) => match ended.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                Err(_) => Err(stopping()),
            },
        }
    }
}

fn stopping() -> Failure {
    Failure::Unavailable("the process stops".to_owned())
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, sync::mpsc, task::Poll, thread};

    use futures_util::poll;

    use super::*;

    #[tokio::test]
    async fn log_ins_that_wait_are_bounded() {
        let log_ins = LogIns::default();
        let mut checked = Vec::new();
        for _ in 0..LOG_INS_MAX {
            checked.push(log_ins.begin().await.expect("a permit"));
        }
        let mut waiting: Vec<_> = (0..LOG_INS_WAITING_MAX).map(|_| Box::pin(log_ins.begin())).collect();
        for log_in in &mut waiting {
            assert!(poll!(log_in).is_pending());
        }
        assert!(matches!(poll!(Box::pin(log_ins.begin())), Poll::Ready(None)), "one too many");
        // A visitor who leaves makes place for another one, who waits for the end of a check.
        drop(waiting.pop());
        let mut next = pin!(log_ins.begin());
        assert!(poll!(&mut next).is_pending());
        waiting.clear();
        drop(checked.pop());
        assert!(next.await.is_some());
    }

    #[tokio::test]
    async fn pages_that_read_values_are_bounded() {
        let pages = ValuePages::default();
        let mut open = Vec::new();
        for _ in 0..VALUE_PAGES_MAX {
            open.push(pages.begin().await.expect("a permit"));
        }
        let mut waiting = pin!(pages.begin());
        assert!(poll!(&mut waiting).is_pending());
        drop(open.pop());
        assert!(waiting.await.is_ok());
    }

    #[tokio::test]
    async fn long_values_are_rendered_on_another_thread() {
        let (renderer, here) = (Renderer::default(), thread::current().id());
        for (bytes, is_here) in [(0, true), (INLINE_BYTES_MAX, true), (INLINE_BYTES_MAX + 1, false)] {
            let thread = renderer.run(bytes, || thread::current().id()).await.expect("a result");
            assert_eq!(thread == here, is_here, "{bytes} bytes");
        }
    }

    #[tokio::test]
    async fn a_thread_holds_its_permit_until_it_ends() {
        let renderer = Renderer::default();
        let (finish, finished) = mpsc::channel::<()>();
        {
            // It is dropped while the thread works, as the request of a browser that left.
            let mut running = pin!(renderer.run(INLINE_BYTES_MAX + 1, move || finished.recv().is_ok()));
            assert!(poll!(&mut running).is_pending());
        }
        assert_eq!(renderer.threads.available_permits(), RENDERERS_MAX - 1);
        finish.send(()).expect("the thread waits");
        let all = u32::try_from(RENDERERS_MAX).expect("a small number");
        drop(renderer.threads.acquire_many(all).await.expect("the thread has ended"));
    }

    #[tokio::test]
    async fn threads_that_render_are_bounded() {
        let renderer = Renderer::default();
        let mut held = Vec::new();
        for _ in 0..RENDERERS_MAX {
            held.push(renderer.threads.acquire().await.expect("a permit"));
        }
        let mut waiting = pin!(renderer.run(INLINE_BYTES_MAX + 1, || ()));
        assert!(poll!(&mut waiting).is_pending());
        assert_eq!(renderer.run(INLINE_BYTES_MAX, || 1).await, Ok(1), "short values do not wait");
        drop(held.pop());
        assert_eq!(waiting.await, Ok(()));
    }
}
