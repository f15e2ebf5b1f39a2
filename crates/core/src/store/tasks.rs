//! How the store's tasks are started: on tokio's runtime or, where the core is simulated, by the simulation's scheduler.

use tokio::task::JoinHandle;

use crate::supervise;

/// All of them are such that the server cannot be without. A panic of a simulated one is the simulation's.
pub(super) fn vital(name: &'static str, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    #[cfg(test)]
    if let Some(start) = simulated::START.get() {
        return simulated::spawn(task, start);
    }
    supervise::vital(name, task)
}

#[cfg(test)]
pub(crate) mod simulated {
    use std::{cell::Cell, pin::Pin};

    use tokio::{sync::oneshot, task::JoinHandle};

    pub(crate) type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

    thread_local! {
        /// What starts a task on this thread instead of tokio.
        pub(crate) static START: Cell<Option<fn(Task)>> = const { Cell::new(None) };
    }

    /// The handle is of a task of tokio's that waits for the end of the simulated one.
    pub(super) fn spawn(task: impl Future<Output = ()> + Send + 'static, start: fn(Task)) -> JoinHandle<()> {
        let (end, ended) = oneshot::channel::<()>();
        start(Box::pin(async move {
            task.await;
            drop(end);
        }));
        tokio::spawn(async move { drop(ended.await) })
    }
}
