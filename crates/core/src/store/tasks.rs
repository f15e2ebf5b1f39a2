//! Starts the store's tasks on tokio's runtime, or in a simulation on the simulation's scheduler.

use std::{cell::Cell, pin::Pin, sync::Arc};

use tokio::{
    sync::{oneshot, watch},
    task::JoinHandle,
};

use crate::{
    metrics::Metrics,
    supervise::{self, catch_panics, log_request_panic},
};

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

/// Does work of a request. Returns its result, or `None` if it panics. `what` names it in messages.
///
/// # Cancel safety
///
/// If the future is dropped after its first poll, the work goes on, and its result is dropped.
pub(super) async fn finish<T: Send + 'static>(
    metrics: &Arc<Metrics>,
    what: &'static str,
    work: impl Future<Output = T> + Send + 'static,
) -> Option<T> {
    let (sender, result) = oneshot::channel();
    match SPAWNER.get() {
        Some(spawn) => spawn(Box::pin(async move {
            let _ = sender.send(work.await);
        })),
        None => {
            let metrics = Arc::clone(metrics);
            tokio::spawn(async move {
                match catch_panics(work).await {
                    Ok(done) => drop(sender.send(done)),
                    Err(panic) => log_request_panic(&metrics.rpc.panics, what, &panic),
                }
            });
        }
    }
    result.await.ok()
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
