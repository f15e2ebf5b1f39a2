//! Injects faults: instances are killed, stopped and paused at any point, the database is restarted, and notifications
//! are lost.

use std::{rc::Rc, sync::Arc};

use tokio::{
    sync::oneshot,
    time::{Duration, sleep, timeout},
};

use super::{
    random::{below, millis, pick},
    scheduler::{self, WORLD, spawn_in},
    truth::Sharing,
    world::World,
};

/// Starts faults until the end of the fault phase. Each fault is ended by a task of its own ([`World::mend`]).
pub(super) async fn break_things(world: Rc<World>) {
    loop {
        sleep(millis(world.profile.breaks / 10, world.profile.breaks)).await;
        if world.is_calm() {
            return;
        }
        let place = below(world.instances.len());
        match below(10) {
            0..3 => {
                world.kill(place);
                let group = world.instances[place].borrow().group;
                let task_world = Rc::clone(&world);
                world.mend(async move {
                    let world = task_world;
                    sleep(millis(0, 4_000)).await;
                    // Another task may have started the instance in the meantime.
                    let is_down = world.instances[place].borrow().group == group;
                    if is_down {
                        world.start(place);
                    }
                });
            }
            3 => {
                let Some((group, store)) = world.instance(place) else { continue };
                super::trace(|| format!("instance {place} is stopped"));
                let task_world = Rc::clone(&world);
                world.mend(async move {
                    let world = task_world;
                    let (stopped, is_stopped) = oneshot::channel();
                    spawn_in(group, async move {
                        store.stop().await;
                        let _ = stopped.send(());
                    });
                    // An instance that does not stop in time is killed, as an init system does.
                    let _ = timeout(Duration::from_secs(15), is_stopped).await;
                    if world.instances[place].borrow().group == group {
                        world.kill(place);
                        world.start(place);
                    }
                });
            }
            4..7 => world.pause(place, pick(&[millis(1, 300), millis(300, 3_000), millis(3_000, 14_000)])),
            7 if world.profile.sharing == Sharing::Shared => {
                world.restart_database(pick(&[millis(1, 300), millis(300, 6_000)]));
            }
            8 if world.profile.sharing == Sharing::Shared => world.lose_notifications(place, millis(300, 10_000)),
            _ => {}
        }
    }
}

impl World {
    fn kill(self: &Rc<Self>, place: usize) {
        super::trace(|| format!("instance {place} is killed"));
        let group = self.instances[place].borrow().group;
        scheduler::kill(group);
        self.instances[place].borrow_mut().store = None;
    }

    fn pause(self: &Rc<Self>, place: usize, time: Duration) {
        super::trace(|| format!("instance {place} is paused for {time:?}"));
        let group = self.instances[place].borrow().group;
        scheduler::pause(group);
        self.mend(async move {
            sleep(time).await;
            scheduler::resume(group);
        });
    }

    /// Spawns a task that waits and then ends a fault. Until then the fault is active.
    fn mend(self: &Rc<Self>, mend: impl Future<Output = ()> + 'static) {
        self.broken.set(self.broken.get() + 1);
        let world = Rc::clone(self);
        spawn_in(WORLD, async move {
            mend.await;
            world.broken.set(world.broken.get() - 1);
        });
    }

    fn restart_database(self: &Rc<Self>, time: Duration) {
        super::trace(|| format!("the database is down for {time:?}"));
        let mut database = self.database.lock();
        database.restart();
        database.is_up = false;
        drop(database);
        let database = Arc::clone(&self.database);
        self.mend(async move {
            sleep(time).await;
            database.lock().is_up = true;
        });
    }

    /// Drops all notifications to an instance for a limited time.
    fn lose_notifications(self: &Rc<Self>, place: usize, time: Duration) {
        let run = self.instances[place].borrow().group;
        let Some(notified) = self.database.lock().listeners.get_mut(&run).and_then(Option::take) else { return };
        super::trace(|| format!("instance {place} receives no notifications for {time:?}"));
        let database = Arc::clone(&self.database);
        self.mend(async move {
            sleep(time).await;
            if let Some(listener) = database.lock().listeners.get_mut(&run) {
                *listener = Some(notified);
            }
        });
    }
}
