//! Limits of what visitors can make the process do at the same time. In a server, the page shares the process, and on
//! small machines the only thread of the runtime, with the requests of clients.

use std::{io, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::{FromRequest, Request},
};
use http::StatusCode;
use http_body_util::BodyExt as _;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;

use super::{backend::Failure, server::Console};
use orlop_core::supervise::blocking;

/// Maximum number of requests at the same time on one connection to the page. Each can have a response that is not read.
pub(super) const CONNECTION_REQUESTS_MAX: u32 = 32;
/// Interval of HTTP/2's keepalive pings. Longer than the idle limit of the page, so that pings do not keep idle connections
/// open.
pub(super) const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(120);
/// Maximum size of a form in bytes.
const FORM_BYTES_MAX: usize = 64 << 10;
/// Maximum number of forms that are received or in memory at the same time. Further ones are refused.
const FORMS_MAX: usize = 32;
/// Maximum time in which a browser sends a form.
const FORM_TIME_MAX: Duration = Duration::from_secs(10);
/// Maximum number of passwords that are checked at the same time.
const LOG_INS_MAX: usize = 4;
/// Maximum number of log-ins that wait until their password is checked. Further ones are refused.
const LOG_INS_WAITING_MAX: usize = 32;
/// Maximum number of large pages that are made at the same time.
const MADE_MAX: usize = 4;
/// Maximum number of large pages that are made, or that browsers have not read yet.
const UNREAD_MAX: usize = 16;
/// Maximum time for which a request waits until it may make a large page.
const TURN_TIME_MAX: Duration = Duration::from_secs(40);
/// Maximum time in which a browser reads a large page.
const READ_TIME_MAX: Duration = Duration::from_secs(60);
/// Size in bytes of the parts in which a large page is sent. Smaller pages count as read at once.
const PART_BYTES: usize = 16 << 10;
/// Values that are longer together, in bytes, are rendered on a blocking thread.
const INLINE_BYTES_MAX: usize = 16 << 10;
/// Maximum number of blocking threads that render values.
const RENDERERS_MAX: usize = 2;

/// Limits forms, which a visitor can send without a session.
pub(super) struct Forms(Arc<Semaphore>);

/// The text of a form. It counts toward the limit until it is dropped.
pub(super) struct Form {
    pub text: Vec<u8>,
    _permit: OwnedSemaphorePermit,
}

/// The response to a form that is not accepted.
type Refusal = (StatusCode, &'static str);

impl Default for Forms {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(FORMS_MAX)))
    }
}

impl Forms {
    async fn receive(&self, body: Body) -> Result<Form, Refusal> {
        const BUSY: Refusal =
            (StatusCode::SERVICE_UNAVAILABLE, "Too many forms are sent at the same time. Try again.\n");
        const LATE: Refusal = (StatusCode::REQUEST_TIMEOUT, "The form took too long. Try again.\n");
        let permit = Arc::clone(&self.0).try_acquire_owned().map_err(|_| BUSY)?;
        let text = timeout(FORM_TIME_MAX, read(body)).await.unwrap_or(Err(LATE))?;
        Ok(Form { text, _permit: permit })
    }
}

impl FromRequest<Console> for Form {
    type Rejection = Refusal;

    async fn from_request(request: Request, console: &Console) -> Result<Self, Refusal> {
        console.forms.receive(request.into_body()).await
    }
}

/// Reads a whole form. Its parts are copied at once, because even a part of one byte keeps the buffer from which it was
/// read.
async fn read(mut body: Body) -> Result<Vec<u8>, Refusal> {
    let mut text = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| (StatusCode::BAD_REQUEST, "The form is not complete.\n"))?;
        let Ok(part) = frame.into_data() else { continue };
        if text.len() + part.len() > FORM_BYTES_MAX {
            return Err((StatusCode::PAYLOAD_TOO_LARGE, "The form is too long.\n"));
        }
        text.extend_from_slice(&part);
    }
    Ok(text)
}

/// Limits log-ins, which need no session.
pub(super) struct LogIns {
    /// Permits to wait for a check, and for the check itself.
    admitted: Arc<Semaphore>,
    /// Permits to check a password.
    checked: Arc<Semaphore>,
}

/// The permission to check one password. It outlives the request: a browser that leaves does not shorten a check.
pub(super) struct LogIn {
    _admitted: OwnedSemaphorePermit,
    _checked: OwnedSemaphorePermit,
}

impl Default for LogIns {
    fn default() -> Self {
        let permits = |count| Arc::new(Semaphore::new(count));
        Self { admitted: permits(LOG_INS_MAX + LOG_INS_WAITING_MAX), checked: permits(LOG_INS_MAX) }
    }
}

impl LogIns {
    /// Waits until a password may be checked. Returns `None` at once if too many log-ins already wait.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a cancelled call leaves the queue.
    pub async fn begin(&self) -> Option<LogIn> {
        let admitted = Arc::clone(&self.admitted).try_acquire_owned().ok()?;
        let checked = Arc::clone(&self.checked).acquire_owned().await.ok()?;
        Some(LogIn { _admitted: admitted, _checked: checked })
    }
}

/// Limits the pages that contain values or many names. Values stay in memory until the page is rendered, and the page
/// until the browser has read it.
pub(super) struct LargePages {
    /// Permits to make a page.
    made: Arc<Semaphore>,
    /// Permits to keep a page in memory.
    unread: Arc<Semaphore>,
}

/// The permission to make one page, and to keep it in memory.
pub(super) struct LargePage {
    made: OwnedSemaphorePermit,
    unread: OwnedSemaphorePermit,
}

impl Default for LargePages {
    fn default() -> Self {
        Self { made: Arc::new(Semaphore::new(MADE_MAX)), unread: Arc::new(Semaphore::new(UNREAD_MAX)) }
    }
}

impl LargePages {
    /// Waits until a page may be made. The caller must hold no values while it waits.
    ///
    /// # Errors
    ///
    /// [`Failure::Busy`] after [`TURN_TIME_MAX`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a cancelled call leaves the queue.
    pub async fn begin(&self) -> Result<LargePage, Failure> {
        timeout(TURN_TIME_MAX, self.turn()).await.unwrap_or(Err(Failure::Busy))
    }

    async fn turn(&self) -> Result<LargePage, Failure> {
        // In this order: a page that waits for others to be read does not hinder those that are made.
        let unread = Arc::clone(&self.unread).acquire_owned().await.map_err(|_| stopping())?;
        let made = Arc::clone(&self.made).acquire_owned().await.map_err(|_| stopping())?;
        Ok(LargePage { made, unread })
    }
}

impl LargePage {
    /// Returns the page as a body. It counts as unread until the browser has read it, or for [`READ_TIME_MAX`]; then the
    /// body ends with an error.
    pub fn body(self, text: String) -> Body {
        if text.len() <= PART_BYTES {
            return Body::from(text);
        }
        let Self { made, unread } = self;
        drop(made);
        let (parts, body) = mpsc::channel(1);
        // A task, because nobody polls the body of a browser that does not read.
        tokio::spawn(async move {
            let is_late = timeout(READ_TIME_MAX, send(&parts, &text)).await.is_err();
            drop((text, unread));
            if is_late {
                let error = io::Error::new(io::ErrorKind::TimedOut, "the browser did not read the page");
                // Fails if the browser has left.
                let _ = parts.send(Err(error)).await;
            }
        });
        Body::from_stream(ReceiverStream::new(body))
    }
}

/// Sends a page in parts until the browser leaves.
async fn send(parts: &mpsc::Sender<io::Result<Bytes>>, text: &str) {
    for part in text.as_bytes().chunks(PART_BYTES) {
        // A copy, because a slice would keep the whole page in memory.
        if parts.send(Ok(Bytes::copy_from_slice(part))).await.is_err() {
            return;
        }
    }
}

/// Runs work whose duration depends on the size of values: to read, to render and to compare them.
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
    /// Renders values of `bytes` bytes together: short ones here, long ones as [`Renderer::run_elsewhere`].
    ///
    /// # Errors
    ///
    /// [`Failure::Unavailable`] if the process stops.
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        if bytes <= INLINE_BYTES_MAX { Ok(work()) } else { self.run_elsewhere(work).await }
    }

    /// Runs `work` on a blocking thread, so that it does not delay other requests. Waits while [`RENDERERS_MAX`] threads
    /// are busy.
    ///
    /// # Errors
    ///
    /// [`Failure::Unavailable`] if the process stops.
    pub async fn run_elsewhere<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let permit = Arc::clone(&self.threads).acquire_owned().await.map_err(|_| stopping())?;
        let running = blocking(move || {
            // The thread holds the permit, because it continues if the browser no longer waits.
            let _permit = permit;
            work()
        });
        running.await.ok_or_else(stopping)
    }
}

fn stopping() -> Failure {
    Failure::Unavailable("the process stops".to_owned())
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, sync::mpsc, task::Poll, thread};

    use axum::body::to_bytes;
    use futures_util::{StreamExt as _, poll, stream};
    use tokio::time::sleep;

    use super::*;

    /// Returns a body that arrives in parts and does not end.
    fn unfinished(parts: &[&'static str]) -> Body {
        let parts = stream::iter(parts.to_vec()).map(Ok::<_, io::Error>);
        Body::from_stream(parts.chain(stream::pending()))
    }

    #[tokio::test(start_paused = true)]
    async fn forms_are_bounded_in_size_and_time() {
        let forms = Forms::default();
        let broken = stream::iter([Ok("a"), Err(io::Error::from(io::ErrorKind::UnexpectedEof))]);
        for (what, body, want) in [
            ("empty", Body::empty(), Ok(0)),
            ("the longest", Body::from("x".repeat(FORM_BYTES_MAX)), Ok(FORM_BYTES_MAX)),
            ("in parts", Body::from_stream(stream::iter(["a=", "b"]).map(Ok::<_, io::Error>)), Ok(3)),
            ("too long", Body::from("x".repeat(FORM_BYTES_MAX + 1)), Err(StatusCode::PAYLOAD_TOO_LARGE)),
            ("unfinished", unfinished(&["a", "b"]), Err(StatusCode::REQUEST_TIMEOUT)),
            ("broken", Body::from_stream(broken), Err(StatusCode::BAD_REQUEST)),
        ] {
            let received = forms.receive(body).await;
            assert_eq!(received.map(|form| form.text.len()).map_err(|(status, _)| status), want, "{what}");
        }
        assert_eq!(forms.0.available_permits(), FORMS_MAX);
    }

    #[tokio::test]
    async fn forms_at_the_same_time_are_bounded() {
        let forms = Forms::default();
        let mut unread: Vec<_> = (1..FORMS_MAX).map(|_| Box::pin(forms.receive(unfinished(&["a"])))).collect();
        for form in &mut unread {
            assert!(poll!(form).is_pending());
        }
        let complete = forms.receive(Body::from("a")).await;
        let refused = forms.receive(Body::from("a")).await.err().expect("one too many");
        assert_eq!(refused.0, StatusCode::SERVICE_UNAVAILABLE);
        // A form counts until it is dropped, or until its visitor leaves.
        drop(complete);
        let complete = forms.receive(Body::from("a")).await;
        unread.clear();
        assert_eq!(forms.0.available_permits(), FORMS_MAX - 1);
        drop(complete);
    }

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
        // A visitor who leaves makes room for another one, who waits for the end of a check.
        drop(waiting.pop());
        let mut next = pin!(log_ins.begin());
        assert!(poll!(&mut next).is_pending());
        waiting.clear();
        drop(checked.pop());
        assert!(next.await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn large_pages_are_bounded() {
        let (pages, page) = (LargePages::default(), || "x".repeat(4 * PART_BYTES));
        let mut made = Vec::new();
        for _ in 0..MADE_MAX {
            made.push(pages.begin().await.expect("a permit"));
        }
        assert!(matches!(pages.begin().await, Err(Failure::Busy)));
        let mut unread: Vec<Body> = made.drain(..).map(|made| made.body(page())).collect();
        while unread.len() < UNREAD_MAX {
            unread.push(pages.begin().await.expect("a permit").body(page()));
        }
        let mut waiting = pin!(pages.begin());
        assert!(poll!(&mut waiting).is_pending());
        let read = to_bytes(unread.pop().expect("a page"), usize::MAX).await.expect("the whole page");
        assert_eq!(read.len(), page().len());
        assert!(waiting.await.is_ok());
        // A small page is not counted.
        let small = pages.begin().await.expect("a permit").body("small".to_owned());
        assert!(pages.begin().await.is_ok());
        assert_eq!(to_bytes(small, usize::MAX).await.expect("the page"), "small");
    }

    #[tokio::test(start_paused = true)]
    async fn page_that_is_not_read_ends() {
        let pages = LargePages::default();
        let body = pages.begin().await.expect("a permit").body("x".repeat(4 * PART_BYTES));
        assert_eq!(pages.unread.available_permits(), UNREAD_MAX - 1);
        sleep(READ_TIME_MAX + Duration::from_secs(1)).await;
        assert_eq!(pages.unread.available_permits(), UNREAD_MAX);
        assert!(to_bytes(body, usize::MAX).await.is_err(), "it must not look complete");
    }

    #[tokio::test]
    async fn long_values_are_rendered_on_another_thread() {
        let (renderer, here) = (Renderer::default(), thread::current().id());
        for (bytes, is_here) in [(0, true), (INLINE_BYTES_MAX, true), (INLINE_BYTES_MAX + 1, false)] {
            let thread = renderer.run(bytes, || thread::current().id()).await.expect("a result");
            assert_eq!(thread == here, is_here, "{bytes} bytes");
        }
        let thread = renderer.run_elsewhere(|| thread::current().id()).await.expect("a result");
        assert_ne!(thread, here, "comparisons take long also with short values");
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
