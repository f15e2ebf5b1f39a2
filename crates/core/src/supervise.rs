//! Panic handling: a panic ends either one request or the process.
//!
//! A panic is a bug. In a request it ends that request ([`catch_panics`]), which fails with Internal. In a task that
//! the server cannot run without ([`vital`]), or while a lock on shared state is held ([`Lock`]), it ends the process:
//! the log is consistent at any moment, but a server without its writer or with a partly applied change is not. Every
//! panic is logged with its place.
//!
//! Only the panic hook ([`log_panics`]) knows the place of a panic; the code that catches it knows the request.
//!
//! An error of the disk that only a restart can repair ends the process too ([`disk_failed`]), and so does a database file that
//! was replaced.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    fmt,
    io::{self, Write as _},
    ops::{Deref, DerefMut},
    panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, resume_unwind},
    pin::Pin,
    sync::mpsc,
    task::{Context, Poll},
    thread,
    time::Duration,
};

use prometheus::IntCounter;
use tokio::task::{JoinHandle, spawn_blocking};
use tracing::error;

use crate::sync::{Mutex, MutexGuard};

/// Exit status of a process that a panic ended: EX_SOFTWARE of sysexits.h.
pub const EXIT_PANICKED: i32 = 70;
/// Exit status of a process that a failure of its disk ended: EX_IOERR of sysexits.h.
pub const EXIT_DISK_FAILED: i32 = 74;

thread_local! {
    /// Number of active [`catch_panic`] calls.
    static CATCHING: Cell<u32> = const { Cell::new(0) };
    /// The newest panic of this thread that a caller will catch.
    static NEWEST: RefCell<Option<Panic>> = const { RefCell::new(None) };
}

/// A caught panic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panic {
    /// File, line and column.
    pub place: String,
    pub message: String,
}

impl Panic {
    fn of(info: &PanicHookInfo<'_>) -> Self {
        let place = info.location().map_or_else(|| "unknown".to_owned(), ToString::to_string);
        Self { place, message: message(info.payload()) }
    }

    /// Returns the panic that was caught on this thread, and forgets it.
    fn take(payload: &(dyn Any + Send)) -> Self {
        let newest = NEWEST.with_borrow_mut(Option::take);
        newest.unwrap_or_else(|| Self { place: "unknown".to_owned(), message: message(payload) })
    }
}

fn message(payload: &dyn Any) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

impl fmt::Display for Panic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "panic at {}: {}", self.place, self.message)
    }
}

/// Installs the panic hook, which logs panics. A panic that is caught is logged by the code that catches it. In a thread
/// whose name begins with `vital_threads`, a panic would end only the thread, so the hook ends the process.
pub fn log_panics(vital_threads: &'static str) {
    std::panic::set_hook(Box::new(move |info| {
        let panic = Panic::of(info);
        if CATCHING.get() > 0 {
            NEWEST.set(Some(panic));
            return;
        }
        let thread = thread::current();
        let thread = thread.name().unwrap_or("unnamed");
        if thread.starts_with(vital_threads) {
            end_process(thread, &panic);
        }
        error!(place = panic.place, message = panic.message, thread, "panic outside of requests and tasks");
    }));
}

/// Runs `f` and catches a panic. State that `f` shares with others must be consistent wherever it can panic, or be
/// behind a [`Lock`].
pub fn catch_panic<T>(f: impl FnOnce() -> T) -> Result<T, Panic> {
    CATCHING.set(CATCHING.get() + 1);
    let outcome = catch_unwind(AssertUnwindSafe(f));
    CATCHING.set(CATCHING.get() - 1);
    outcome.map_err(|payload| Panic::take(&*payload))
}

/// Like [`catch_panic`], for a future.
pub fn catch_panics<F: Future>(work: F) -> CatchPanics<F> {
    CatchPanics(Box::pin(work))
}

/// A future that returns its panic as an error.
#[must_use]
pub struct CatchPanics<F>(Pin<Box<F>>);

impl<F: Future> Future for CatchPanics<F> {
    type Output = Result<F::Output, Panic>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match catch_panic(|| self.0.as_mut().poll(context)) {
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Ok(Poll::Pending) => Poll::Pending,
            Err(panic) => Poll::Ready(Err(panic)),
        }
    }
}

/// Counts and logs a request that panicked.
pub fn log_request_panic(panics: &IntCounter, request: &str, panic: &Panic) {
    panics.inc();
    error!(request, place = panic.place, message = panic.message, "a request panicked; only this request failed");
}

/// Spawns a task that the server cannot run without. If it panics, the process ends at once.
pub fn vital(task: &'static str, work: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    tokio::spawn(handle_panic(work, move |panic| end_process(task, panic)))
}

async fn handle_panic(work: impl Future<Output = ()>, panicked: impl FnOnce(&Panic)) {
    if let Err(panic) = catch_panics(work).await {
        panicked(&panic);
    }
}

/// Runs `work` on a thread where it may block. Returns `None` if the runtime ends. A panic of `work` continues in the
/// caller.
///
/// # Cancel safety
///
/// If the future is dropped, work that has begun goes on.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    match spawn_blocking(work).await {
        Ok(done) => Some(done),
        Err(ended) => match ended.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            Err(_) => None,
        },
    }
}

/// Acknowledged writes are durable at any moment, so the process ends without cleaning up.
fn end_process(task: &str, panic: &Panic) -> ! {
    const WHY: &str = "the server cannot continue without this task and exits. All acknowledged writes are in the log: \
                       restart the server, and report this error";
    error!(task, place = panic.place, message = panic.message, "{task} panicked; {WHY}");
    print_last(format!("orlop: {task}: {panic}; {WHY}"));
    std::process::exit(EXIT_PANICKED)
}

/// Ends the process because of its disk or files. After an error of the disk, as after a panic, all acknowledged writes are
/// in the log.
pub fn disk_failed(error: &std::io::Error, what: &str) -> ! {
    error!(%error, "{what}");
    print_last(format!("orlop: {what}: {error}"));
    std::process::exit(EXIT_DISK_FAILED)
}

/// Prints why the process ends to standard error. Waits at most a second for a reader, who may have stopped.
pub fn print_last(text: String) {
    const WAIT: Duration = Duration::from_secs(1);
    let (printed, is_printed) = mpsc::channel();
    let print = move || {
        // If standard error is closed, nobody can read the text.
        let _ = writeln!(io::stderr(), "{text}");
        let _ = printed.send(());
    };
    if thread::Builder::new().spawn(print).is_ok() {
        // Whether it was printed or not, the process ends.
        let _ = is_printed.recv_timeout(WAIT);
    }
}

/// A lock on state that must not be observed partly changed: if its holder panics, the process ends.
///
/// This applies only where panics are caught; elsewhere the panic ends the holder's task or thread.
#[derive(Debug, Default)]
pub struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    pub fn lock(&self) -> Held<'_, T> {
        Held { guard: self.0.lock(), was_panicking: thread::panicking() }
    }
}

/// The guard of a [`Lock`].
pub struct Held<'a, T> {
    guard: MutexGuard<'a, T>,
    /// The guard was acquired while a panic was already unwinding. That panic does not end the process.
    was_panicking: bool,
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T> Drop for Held<'_, T> {
    fn drop(&mut self) {
        if !self.was_panicking && thread::panicking() && CATCHING.get() > 0 {
            let panic = NEWEST.with_borrow_mut(Option::take);
            let panic = panic.unwrap_or_else(|| Panic { place: "unknown".to_owned(), message: "unknown".to_owned() });
            end_process(std::any::type_name::<T>(), &panic);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Output};

    use super::*;

    #[tokio::test]
    async fn panic_of_a_future_is_its_outcome_and_other_work_continues() {
        assert_eq!(catch_panics(async { 7 }).await, Ok(7));
        let late = async {
            tokio::task::yield_now().await;
            panic!("at the {} poll", "second")
        };
        let outcome: Result<(), Panic> = catch_panics(late).await;
        assert_eq!(outcome.map_err(|panic| panic.message), Err("at the second poll".to_owned()));
        assert_eq!(CATCHING.get(), 0);
    }

    #[tokio::test]
    async fn only_a_panic_calls_the_handler() {
        let handled = |work: Pin<Box<dyn Future<Output = ()>>>| async {
            let mut handled = None;
            handle_panic(work, |panic| handled = Some(panic.message.clone())).await;
            handled
        };
        assert_eq!(handled(Box::pin(async {})).await, None);
        assert_eq!(handled(Box::pin(async { panic!("oh") })).await.as_deref(), Some("oh"));
    }

    #[tokio::test]
    async fn panic_on_a_blocking_thread_continues_in_the_caller() {
        assert_eq!(blocking(|| 7).await, Some(7));
        let outcome: Result<Option<()>, Panic> = catch_panics(blocking(|| panic!("oh"))).await;
        assert_eq!(outcome.map_err(|panic| panic.message), Err("oh".to_owned()));
    }

    /// Each case runs in its own process: this test binary with one of the tests below.
    #[test]
    fn process_exits_with_a_text_or_continues() {
        for (victim, code, said) in [
            (
                "a_vital_task",
                Some(EXIT_PANICKED),
                &["the writer", "src/supervise.rs:", "no such row", "restart the server"][..],
            ),
            ("a_held_lock", Some(EXIT_PANICKED), &["i32", "partly changed", "restart the server"]),
            ("a_vital_thread", Some(EXIT_PANICKED), &["database-3", "oh no"]),
            ("a_request", Some(0), &[]),
            ("a_lock_taken_while_cleaning_up", Some(0), &[]),
        ] {
            let Output { status, stderr, .. } = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "--ignored", "--nocapture", &format!("supervise::tests::victim::{victim}")])
                .output()
                .unwrap();
            let stderr = String::from_utf8_lossy(&stderr);
            assert_eq!(status.code(), code, "{victim}: {stderr}");
            for said in said {
                assert!(stderr.contains(said), "{victim}: {said}: {stderr}");
            }
        }
    }

    mod victim {
        use super::*;

        const VITAL_THREADS: &str = "database";

        #[tokio::test]
        #[ignore = "ends its process"]
        async fn a_vital_task() {
            log_panics(VITAL_THREADS);
            vital("the writer", async { panic!("no such row") });
            std::future::pending().await
        }

        #[tokio::test]
        #[ignore = "ends its process"]
        async fn a_held_lock() {
            log_panics(VITAL_THREADS);
            let lock = Lock::new(1_i32);
            let _ = catch_panics(async {
                let mut held = lock.lock();
                *held += 1;
                panic!("partly changed")
            })
            .await;
        }

        #[test]
        #[ignore = "ends its process"]
        fn a_vital_thread() {
            log_panics(VITAL_THREADS);
            let thread = thread::Builder::new().name("database-3".to_owned()).spawn(|| panic!("oh no"));
            let _ = thread.unwrap().join();
        }

        #[tokio::test]
        #[ignore = "installs its own panic hook"]
        async fn a_request() {
            log_panics(VITAL_THREADS);
            let outcome: Result<(), Panic> = catch_panics(async { panic!("only this one") }).await;
            let panic = outcome.unwrap_err();
            assert!(panic.place.contains("src/supervise.rs:"), "{panic}");
            assert_eq!(panic.message, "only this one");
        }

        #[tokio::test]
        #[ignore = "installs its own panic hook"]
        async fn a_lock_taken_while_cleaning_up() {
            struct CleansUp<'a>(&'a Lock<i32>);
            impl Drop for CleansUp<'_> {
                fn drop(&mut self) {
                    *self.0.lock() += 1;
                }
            }
            log_panics(VITAL_THREADS);
            let lock = Lock::new(1_i32);
            let outcome: Result<(), Panic> = catch_panics(async {
                let _cleans_up = CleansUp(&lock);
                panic!("elsewhere")
            })
            .await;
            assert!(outcome.is_err());
            assert_eq!(*lock.lock(), 2);
        }
    }
}
