//! The clients of a run, each a task.

use std::{rc::Rc, sync::Arc};

use futures_util::StreamExt as _;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Duration, sleep},
};

use super::{
    calls::Call,
    random::{below, millis, percent},
    scheduler::spawn_in,
    watches::{Command, State, serve},
    world::{REQUEST_TIMEOUT, World},
};
use orlop_core::{
    auth::Caller,
    types::{Revision, WatchId},
    watch::Messages,
};

/// Sends random requests one at a time.
pub(super) async fn call(world: Rc<World>) {
    for _ in 0..world.profile.calls {
        sleep(millis(0, world.profile.pause)).await;
        // Some clients time out early.
        let request_timeout = if percent(5) { millis(0, 40) } else { REQUEST_TIMEOUT };
        let place = below(world.instances.len());
        if world.instance(place).is_none() {
            sleep(millis(50, 500)).await;
        }
        let (number, has_auth) = (world.ledger.borrow().next(), world.profile.has_auth);
        let (head, first, caller) = {
            let database = world.database.lock();
            let truth = &database.truth;
            (truth.head, database.first(), if has_auth { truth.auth.draw_caller() } else { Caller::Server })
        };
        let is_past = percent(world.profile.past);
        let shown = world.ledger.borrow().shown().max(Revision::EMPTY);
        let call = if is_past { Call::draw_past(first, shown) } else { Call::draw(number, head, has_auth) };
        world.call(place, caller, call, request_timeout).await;
    }
    world.busy.set(world.busy.get() - 1);
}

/// Opens one stream after another until the run ends.
pub(super) async fn watch(world: Rc<World>, place: usize) {
    loop {
        let Some((group, store)) = world.any_instance() else {
            sleep(millis(50, 500)).await;
            continue;
        };
        let outbox = Arc::new(store.hub().outbox());
        let messages = Messages::new(Arc::clone(&outbox));
        let (commands, received) = mpsc::unbounded_channel();
        let (alive, gone) = oneshot::channel();
        spawn_in(group, serve(store, outbox, received, alive));
        read(&world, place, messages, &commands, gone).await;
        world.watches[place].borrow_mut().broken();
        sleep(millis(0, 300)).await;
    }
}

/// Reads until the stream breaks or the client closes it.
async fn read(
    world: &Rc<World>,
    place: usize,
    mut messages: Messages,
    commands: &mpsc::UnboundedSender<Command>,
    mut gone: oneshot::Receiver<()>,
) {
    let watches = &world.watches[place];
    let ids: Vec<WatchId> = watches.borrow().all.keys().copied().collect();
    loop {
        for id in &ids {
            let is_absent = watches.borrow().all[id].state == State::Absent;
            if is_absent {
                let begin = watches.borrow_mut().begin(*id, &world.database.lock().truth);
                let _ = commands.send(begin);
            }
        }
        let idle = if world.is_calm() { Duration::from_secs(3_600) } else { millis(1, 1_500) };
        tokio::select! {
            biased;
            _ = &mut gone => return,
            message = messages.next() => {
                let Some(Ok(message)) = message else { return };
                let mut shown = Revision(0);
                let must_list = watches.borrow_mut().take(message, &mut shown, &world.database.lock().truth);
                world.ledger.borrow_mut().show(shown, &world.database.lock().truth);
                if let Some(id) = must_list {
                    let Some(listed) = world.list().await else { return };
                    let mut watches = watches.borrow_mut();
                    let watch = watches.all.get_mut(&id).expect("a watch of this client");
                    watch.begin_at(listed.next(), &world.database.lock().truth);
                }
                // Some clients read slowly.
                if percent(10) && !world.is_calm() {
                    sleep(millis(1, 2_000)).await;
                }
            }
            () = sleep(idle) => match below(10) {
                // The client disconnects.
                0 => return,
                1 => {
                    let mut watches = watches.borrow_mut();
                    let id = ids[below(ids.len())];
                    let watch = watches.all.get_mut(&id).expect("a watch of this client");
                    if watch.state == State::Active {
                        watch.state = State::Cancelling;
                        let _ = commands.send(Command::Cancel(id));
                    }
                }
                2..5 => {
                    watches.borrow_mut().asked.push_back(world.ledger.borrow().shown());
                    let _ = commands.send(Command::Progress);
                }
                _ => {}
            },
        }
    }
}
