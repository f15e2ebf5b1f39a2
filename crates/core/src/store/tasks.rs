//! Starts the store's tasks on tokio's runtime, or in a simulation on the simulation's scheduler.

use std::{cell::Cell, pin::Pin};

use tokio::{
    sync::{oneshot, watch},
    task::JoinHandle,
};

use crate::supervise;

/// A task of the store.
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

thread_local! {
    static SPAWNER: Cell<Option<fn(Task)>> = const { Cell::new(None) };
}

/// Makes `spawner` start the tasks of every store that is opened on this thread; `None` restores tokio's runtime. For
/// simulations, which decide when each task runs.
pub fn set_spawner(spawner: Option<fn(Task)>) {
    SPAWNER.set(spawner);
}

/// Starts a task that the server needs. A panic in it ends the process, or is handled by the simulation's spawner.
pub(super) fn vital(name: &'static str, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    match SPAWNER.get() {
        Some(spawn) => simulated(task, spawn),
        None => supervise::vital(name, task),
    }
}

/// Completes with `work`, or drops it when `stop` becomes true.
pub(super) async fn until_stopped(mut stop: watch::Receiver<bool>, work: impl Future<Output = ()>) {
    tokio::select! {
        biased;
        () = work => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

/// Starts a simulated task and returns the handle of a tokio task that waits for it.
fn simulated(task: impl Future<Output = ()> + Send + 'static, spawn: fn(Task)) -> JoinHandle<()> {
    let (end, ended) = oneshot::channel::<()>();
    spawn(Box::pin(async move {
        task.await;
        drop(end);
    }));
    tokio::spawn(async move { drop(ended.await) })
}
