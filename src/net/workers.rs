//! The threads that serve connections. Each has a runtime of its own, and a connection stays on one thread.
//!
//! So a request is read, evaluated and answered without another thread, except that writes are committed by the writer,
//! which runs on the first thread with all other tasks of the store. A new connection goes to the thread that has the
//! fewest. Known limit: if a few connections have most of the load, other threads cannot take over requests of theirs.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use tokio::runtime::{Builder, Handle};

/// The threads of a server. The first one is the thread of the listeners.
#[derive(Clone, Debug)]
pub struct Workers(Arc<[Worker]>);

#[derive(Debug)]
struct Worker {
    runtime: Handle,
    connections: Arc<AtomicUsize>,
}

impl Workers {
    /// Returns the current thread and `threads - 1` new ones, which run as long as the process.
    ///
    /// # Errors
    ///
    /// If a thread cannot be started.
    pub fn start(threads: usize) -> io::Result<Self> {
        let mut workers = vec![Worker::new(Handle::current())];
        for number in 1..threads {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            workers.push(Worker::new(runtime.handle().clone()));
            let run = move || runtime.block_on(std::future::pending::<()>());
            thread::Builder::new().name(format!("orlop-worker-{number}")).spawn(run)?;
        }
        Ok(Self(workers.into()))
    }

    /// Returns the current thread alone.
    pub fn this_thread() -> Self {
        Self(Arc::new([Worker::new(Handle::current())]))
    }

    /// Returns the runtimes of all threads.
    pub fn runtimes(&self) -> impl Iterator<Item = &Handle> {
        self.0.iter().map(|worker| &worker.runtime)
    }

    /// Returns a place for a connection on the thread that has the fewest; on the first one of these.
    pub(super) fn seat(&self) -> Seat {
        let fewest = (0..self.0.len()).min_by_key(|place| self.0[*place].connections.load(Relaxed)).unwrap_or(0);
        let Worker { runtime, connections } = &self.0[fewest];
        connections.fetch_add(1, Relaxed);
        let elsewhere = (fewest > 0).then(|| runtime.clone());
        Seat { elsewhere, connections: Arc::clone(connections) }
    }
}

impl Worker {
    fn new(runtime: Handle) -> Self {
        Self { runtime, connections: Arc::default() }
    }
}

/// A place for a connection on a thread. Dropped when the connection ends.
pub(super) struct Seat {
    /// The thread's runtime; `None`: that of the listeners.
    elsewhere: Option<Handle>,
    connections: Arc<AtomicUsize>,
}

impl Seat {
    /// Returns the runtime of the connection's tasks.
    pub(super) fn runtime(&self) -> Handle {
        self.elsewhere.clone().unwrap_or_else(Handle::current)
    }

    /// Returns the runtime to which a socket that was accepted has to be moved.
    pub(super) fn elsewhere(&self) -> Option<&Handle> {
        self.elsewhere.as_ref()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.connections.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connection_goes_to_the_thread_with_the_fewest() {
        let workers = Workers::start(3).expect("threads");
        let counts = || workers.0.iter().map(|worker| worker.connections.load(Relaxed)).collect::<Vec<_>>();
        let mut seats: Vec<Seat> = (0..5).map(|_| workers.seat()).collect();
        assert_eq!(counts(), [2, 2, 1]);
        // The first and the fourth are on the first thread.
        drop((seats.remove(3), seats.remove(0)));
        assert_eq!(counts(), [0, 2, 1]);
        let seat = workers.seat();
        assert_eq!((counts(), seat.elsewhere().is_none()), (vec![1, 2, 1], true));
        let name = seats[0].runtime().spawn(async { thread::current().name().map(str::to_owned) });
        assert_eq!(name.await.expect("the thread runs").as_deref(), Some("orlop-worker-1"));
    }
}
