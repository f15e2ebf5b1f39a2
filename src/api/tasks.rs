//! Work of a call in a task of its own, which goes on while nobody polls the call.

use std::{sync::Arc, task::Poll};

use futures_util::{StreamExt as _, poll, stream};
use tokio::task::JoinError;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

use super::{
    Context, Responses,
    status::{from_store, panicked},
};
use orlop_core::{
    store,
    supervise::{Panic, catch_panics, log_request_panic},
};

/// Returns the responses that `next` makes of a state, one after the other, until it returns `None`. `call` names the call
/// in messages.
///
/// A response is polled only while its client takes data. A read of the database that waits in it would keep its
/// connection, and its permit for lists, for as long as the client likes. So each response that is not complete at once is
/// made in a task.
pub(super) fn unfold<S, T, F>(
    context: &Arc<Context>,
    call: &'static str,
    state: S,
    next: impl Fn(S) -> F + Send + 'static,
) -> Responses<T>
where
    S: Send + 'static,
    T: Send + 'static,
    F: Future<Output = Result<Option<(T, S)>, Status>> + Send + 'static,
{
    let context = Arc::clone(context);
    let responses = stream::try_unfold(state, move |state| {
        let (context, mut next) = (Arc::clone(&context), catch_panics(next(state)));
        async move {
            if let Poll::Ready(done) = poll!(&mut next) {
                return outcome(&context, call, Ok(done));
            }
            let joined = AbortOnDropHandle::new(tokio::spawn(next)).await;
            outcome(&context, call, joined)
        }
    });
    responses.boxed()
}

/// Runs `work` to its end.
///
/// # Cancel safety
///
/// If the future is dropped, the work goes on, and its result is dropped.
pub(super) async fn finish<T: Send + 'static>(
    context: &Context,
    call: &'static str,
    work: impl Future<Output = Result<T, Status>> + Send + 'static,
) -> Result<T, Status> {
    outcome(context, call, tokio::spawn(catch_panics(work)).await)
}

/// Returns the result of a task, and logs its panic.
fn outcome<T>(
    context: &Context,
    call: &str,
    joined: Result<Result<Result<T, Status>, Panic>, JoinError>,
) -> Result<T, Status> {
    match joined {
        Ok(Ok(done)) => done,
        Ok(Err(panic)) => {
            log_request_panic(&context.store.metrics().rpc.panics, call, &panic);
            Err(panicked())
        }
        Err(error) if error.is_panic() => Err(panicked()),
        // The runtime ends.
        Err(_) => Err(from_store(store::Error::Stopped)),
    }
}
