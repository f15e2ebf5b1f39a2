//! A run: starts the instances, their clients and the faults, and checks the result.

use std::{cell::Cell, rc::Rc};

use tokio::time::{Duration, sleep};

use super::{
    breaks, clients,
    scheduler::{WORLD, spawn_in},
    world::{Profile, World},
};

/// Counts of a run.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Tally {
    pub revisions: i64,
    /// Number of requests per outcome: done, refused, unknown.
    pub answers: [usize; 3],
    pub events: usize,
    /// Number of reads of the past, and of those that were refused.
    pub past: [usize; 2],
    /// Number of times that an instance opened a saved index.
    pub saved_indexes: u64,
}

/// Executes a whole run.
pub(super) async fn run(tally: Rc<Cell<Tally>>) {
    let profile = Profile::draw();
    super::trace(|| format!("{profile:?}"));
    let world = Rc::new(World::new(profile));
    (0..profile.instances).for_each(|place| world.start(place));
    for place in 0..world.watches.len() {
        spawn_in(WORLD, clients::watch(Rc::clone(&world), place));
    }
    for _ in 0..profile.clients {
        spawn_in(WORLD, clients::call(Rc::clone(&world)));
    }
    spawn_in(WORLD, breaks::break_things(Rc::clone(&world)));
    while world.busy.get() > 0 {
        sleep(Duration::from_millis(500)).await;
        world.check_indexes();
    }
    world.finish().await;
    let (revisions, saved_indexes) = {
        let database = world.database.lock();
        (database.truth.head.0, database.saved_index.opened)
    };
    tally.set(Tally {
        revisions,
        answers: world.ledger.borrow().answers,
        past: world.ledger.borrow().past,
        saved_indexes,
        events: world.watches.iter().map(|watches| watches.borrow().events).sum(),
    });
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.revisions += other.revisions;
        self.events += other.events;
        self.saved_indexes += other.saved_indexes;
        self.past.iter_mut().zip(other.past).for_each(|(sum, count)| *sum += count);
        self.answers.iter_mut().zip(other.answers).for_each(|(sum, count)| *sum += count);
    }
}
