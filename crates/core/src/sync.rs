//! Locks and flags of state that several threads use: parking_lot's locks and the atomics of the standard library.
//!
//! With the feature `shuttle` they are those of the crate shuttle. It runs the threads of a test one at a time, and
//! chooses at each lock and each atomic which of them continues. The tests named `races` then run this crate's own code
//! under thousands of such schedules. Shuttle's types work only in such a test, so nothing else runs with the feature.

#[cfg(not(feature = "shuttle"))]
pub use self::real::*;
#[cfg(feature = "shuttle")]
pub use self::scheduled::*;

#[cfg(not(feature = "shuttle"))]
mod real {
    pub use parking_lot::{Mutex, MutexGuard, RwLock};
    pub use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize};
}

/// The same types, scheduled by shuttle. Known limit: every atomic is sequentially consistent.
#[cfg(feature = "shuttle")]
mod scheduled {
    use std::sync::PoisonError;

    use shuttle::sync;
    pub use shuttle::sync::{
        MutexGuard,
        atomic::{AtomicBool, AtomicI64, AtomicUsize},
    };
    use sync::{RwLockReadGuard, RwLockWriteGuard};

    #[derive(Debug, Default)]
    pub struct Mutex<T>(sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub const fn new(value: T) -> Self {
            Self(sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    #[derive(Debug, Default)]
    pub struct RwLock<T>(sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub const fn new(value: T) -> Self {
            Self(sync::RwLock::new(value))
        }

        pub fn read(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().unwrap_or_else(PoisonError::into_inner)
        }

        pub fn write(&self) -> RwLockWriteGuard<'_, T> {
            self.0.write().unwrap_or_else(PoisonError::into_inner)
        }
    }
}

#[cfg(all(test, feature = "shuttle"))]
pub mod schedules {
    //! Runs a test under many schedules.

    use std::{
        pin::pin,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering::Relaxed},
        },
        task::{Context, Poll, Wake},
    };

    use shuttle::{
        Config, Runner,
        scheduler::{PctScheduler, RandomScheduler},
        sync::{Condvar, Mutex},
    };
    use tokio::runtime::Builder;

    /// Maximum number of times that a schedule of the second half stops a thread that could run.
    const PREEMPTIONS_MAX: usize = 3;

    /// Runs `test` under this many schedules, half of them with a random choice of the thread at each lock, half with
    /// few changes of the thread, which keep a thread from running for long. Tokio's clock stands still.
    /// `ORLOP_SCHEDULES` multiplies the number. If the test fails, `SHUTTLE_RANDOM_SEED` with the printed seed repeats it.
    pub fn check(count: usize, test: impl Fn() + Clone + Send + Sync + 'static) {
        let factor: usize = std::env::var("ORLOP_SCHEDULES").map_or(1, |factor| factor.parse().expect("a number"));
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
        let _clock = runtime.enter();
        let mut config = Config::new();
        // The threads of a test are coroutines, which use a part of their stacks.
        config.stack_size = 1 << 20;
        let begun = Begun(Arc::default());
        let test = {
            let begun = Arc::clone(&begun.0);
            move || {
                begun.fetch_add(1, Relaxed);
                test();
            }
        };
        let each = count * factor / 2;
        Runner::new(RandomScheduler::new(each), config.clone()).run(test.clone());
        Runner::new(PctScheduler::new(PREEMPTIONS_MAX, each), config).run(test);
    }

    /// The number of schedules so far, which a failure prints.
    struct Begun(Arc<AtomicUsize>);

    impl Drop for Begun {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("schedule {} failed", self.0.load(Relaxed));
            }
        }
    }

    /// Runs a future on this thread, and polls it only after it was woken. Shuttle's function polls once more after each
    /// wake-up, which hides a lost one.
    pub fn block_on<T>(future: impl Future<Output = T>) -> T {
        #[derive(Default)]
        struct Woken(Mutex<bool>, Condvar);
        impl Woken {
            fn set(&self, is_woken: bool) {
                *self.0.lock().expect("no panic") = is_woken;
            }
        }
        impl Wake for Woken {
            fn wake(self: Arc<Self>) {
                self.set(true);
                self.1.notify_one();
            }
        }
        let woken = Arc::new(Woken::default());
        let waker = Arc::clone(&woken).into();
        let mut future = pin!(future);
        loop {
            woken.set(false);
            if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return output;
            }
            let is_woken = woken.0.lock().expect("no panic");
            drop(woken.1.wait_while(is_woken, |is_woken| !*is_woken).expect("no panic"));
        }
    }
}
