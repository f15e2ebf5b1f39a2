//! The state of a run: the database, the instances and the clients' watches. Checks the indexes during the run, and the
//! final state after the last fault.
//!
//! Instances and clients are numbered from 0; this number is called `place`.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::{
    sync::oneshot,
    time::{Duration, Instant, sleep, timeout},
};

use super::{
    archive::SimulatedArchive,
    auth::first_state,
    calls::{Answer, Call},
    database::{Database, Faults},
    ledger::Ledger,
    log::SimulatedLog,
    random::{below, between, millis, percent, pick},
    scheduler::{self, Group, WORLD, spawn_in},
    truth::Sharing,
    watches::Watches,
};
use orlop_core::{
    auth::{AuthState, Caller},
    log::{Error as LogError, Member, Order},
    store::{AutoCompaction, CompactionRate, Error, HistorySettings, Keep, Saving, Settings, Store, replay},
    types::{KeyRange, Revision},
};

/// After the last fault, the cluster must recover within this time.
const SETTLE_MAX: Duration = Duration::from_secs(60);
/// Maximum time until another instance copies the rows that one left.
const COPY_MAX: Duration = Duration::from_secs(90);
/// Longer than the store's own timeout of a request.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Which instances have an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ArchiveUse {
    Nobody,
    Everybody(Keep),
    /// Each instance draws it at each start.
    Random,
}

impl ArchiveUse {
    fn draw() -> Self {
        match below(10) {
            0..3 => Self::Nobody,
            3..5 => Self::Everybody(KEEP_ALL),
            5..7 => Self::Everybody(draw_keep()),
            _ => Self::Random,
        }
    }
}

const KEEP_ALL: Keep = Keep::Rows { retention: Duration::from_secs(3_600), bytes_max: u64::MAX };

fn draw_keep() -> Keep {
    let retention = Duration::from_secs(pick(&[1, 5, 3_600]));
    if percent(30) { Keep::Nothing } else { Keep::Rows { retention, bytes_max: pick(&[600, 4_000, u64::MAX]) } }
}

/// The parameters of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Profile {
    pub sharing: Sharing,
    pub instances: usize,
    faults: Faults,
    pub clients: usize,
    /// Number of calls of each client.
    pub calls: usize,
    /// Maximum pause between two calls of a client, in milliseconds.
    pub pause: i64,
    /// Maximum pause between two faults, in milliseconds.
    pub breaks: i64,
    cache_bytes: u64,
    poll_interval: Duration,
    auto_compaction: Option<AutoCompaction>,
    /// Chance of a call to read the past.
    pub past: usize,
    archive: ArchiveUse,
    /// Whether the run begins with users and roles, and Auth enabled.
    pub(super) has_auth: bool,
}

impl Profile {
    pub fn draw() -> Self {
        let sharing = pick(&[Sharing::Own, Sharing::Shared, Sharing::Shared, Sharing::Shared]);
        let faults_max = pick(&[0, 5, 20, 60]);
        Self {
            sharing,
            instances: if sharing == Sharing::Own { 1 } else { below(3) + 1 },
            faults: Faults {
                refused: below(faults_max + 1),
                lost: below(faults_max + 1),
                slow: below(faults_max / 3 + 1),
                unheard: below(10 * faults_max + 1),
                full: pick(&[0, 0, faults_max]),
            },
            clients: below(4) + 1,
            calls: below(80) + 20,
            pause: pick(&[2, 40, 300]),
            breaks: pick(&[300, 2_000, 8_000]),
            // Either no cache or one that never evicts, because eviction is not deterministic.
            cache_bytes: pick(&[0, 4 << 20]),
            poll_interval: Duration::from_millis(pick(&[100, 400, 1_000])),
            auto_compaction: percent(20).then_some(AutoCompaction::Periodic(Duration::from_secs(3))),
            has_auth: percent(40),
            past: pick(&[0, 10, 30]),
            archive: ArchiveUse::draw(),
        }
    }
}

#[derive(Default)]
pub(super) struct Instance {
    /// The group of the instance's tasks, a new one at each start. [`WORLD`] before the first start.
    pub group: Group,
    pub store: Option<Arc<Store>>,
}

pub(super) struct World {
    pub(super) profile: Profile,
    pub database: Arc<Mutex<Database>>,
    pub ledger: RefCell<Ledger>,
    pub watches: Vec<RefCell<Watches>>,
    pub(super) instances: Vec<RefCell<Instance>>,
    next_group: Cell<Group>,
    /// Number of clients that have not finished.
    pub(super) busy: Cell<usize>,
    /// Whether the fault phase has ended.
    is_calm: Cell<bool>,
    /// Number of faults that are active and will be ended.
    pub(super) broken: Cell<usize>,
}

impl World {
    pub fn new(profile: Profile) -> Self {
        Self {
            profile,
            database: Arc::new(Mutex::new(Database::new(
                profile.sharing,
                profile.faults,
                if profile.has_auth { first_state() } else { AuthState::default() },
            ))),
            ledger: RefCell::default(),
            watches: (0..below(3) + 1).map(|_| RefCell::new(Watches::draw())).collect(),
            instances: (0..profile.instances).map(|_| RefCell::default()).collect(),
            next_group: Cell::new(10),
            busy: Cell::new(profile.clients),
            is_calm: Cell::new(false),
            broken: Cell::new(0),
        }
    }

    pub fn is_calm(&self) -> bool {
        self.is_calm.get()
    }

    /// Returns a random running instance.
    pub fn any_instance(&self) -> Option<(Group, Arc<Store>)> {
        self.instance(below(self.instances.len()))
    }

    pub fn instance(&self, place: usize) -> Option<(Group, Arc<Store>)> {
        let instance = self.instances[place].borrow();
        Some((instance.group, Arc::clone(instance.store.as_ref()?)))
    }

    /// Sends a request to an instance and checks the response. Returns the response's revision if it succeeds. Sends
    /// nothing if the instance is down.
    pub async fn call(&self, place: usize, caller: Caller, call: Call, request_timeout: Duration) -> Option<Revision> {
        let (group, store) = self.instance(place)?;
        let first = self.database.lock().first();
        let number = self.ledger.borrow_mut().ask(caller.clone(), call.clone(), first);
        super::trace(|| format!("instance {place}: request {number} {call:?} by {caller:?}"));
        let (answer, answered) = oneshot::channel();
        let handler = spawn_in(group, async move {
            let _ = answer.send(call.serve(&store, &caller).await);
        });
        // The outcome is unknown if the client times out or its instance is killed.
        let outcome = timeout(request_timeout, answered).await.ok().and_then(Result::ok);
        scheduler::abort(handler);
        super::trace(|| format!("instance {place}: request {number} ended with {outcome:?}"));
        let revision = match &outcome {
            Some(Ok(Answer::Range(answer))) => Some(answer.revision),
            Some(Ok(Answer::Put(answer))) => Some(answer.revision),
            _ => None,
        };
        let mut database = self.database.lock();
        let first = database.first();
        self.ledger.borrow_mut().answered(number, outcome, first, &mut database.truth);
        revision
    }

    /// Lists all keys on a random instance and returns the revision of the list.
    pub async fn list(&self) -> Option<Revision> {
        self.call(below(self.instances.len()), Caller::Server, Call::list(), REQUEST_TIMEOUT).await
    }

    // Instances.

    /// Starts an instance and retries until it runs.
    pub fn start(self: &Rc<Self>, place: usize) {
        if self.instances[place].borrow().group != WORLD {
            scheduler::kill(self.instances[place].borrow().group);
        }
        let group = self.next_group.get();
        self.next_group.set(group + 1);
        *self.instances[place].borrow_mut() = Instance { group, store: None };
        let world = Rc::clone(self);
        spawn_in(group, async move {
            loop {
                match world.open(place, group).await {
                    Ok(store) => {
                        super::trace(|| format!("instance {place} is up at {}", store.head()));
                        let failed = store.failed();
                        world.instances[place].borrow_mut().store = Some(Arc::new(store));
                        // The simulation has no fault that stops an instance permanently.
                        let why = failed.await;
                        panic!("instance {place} stops: {why}");
                    }
                    Err(LogError::Unavailable(_)) => sleep(millis(100, 1_000)).await,
                    Err(error) => panic!("instance {place} cannot start: {error}"),
                }
            }
        });
    }

    async fn open(&self, place: usize, run: u64) -> Result<Store, LogError> {
        let name = format!("instance {place}");
        let member = Member { id: place as u64 + 1, name: name.clone(), client_urls: Vec::new() };
        let log = Arc::new(SimulatedLog::new(&self.database, member, run, self.profile.poll_interval));
        let history = self.history(&log);
        super::trace(|| format!("{name} keeps {:?}", history.as_ref().map(|history| history.keep)));
        let settings = Settings {
            value_cache_bytes: self.profile.cache_bytes,
            poll_interval: self.profile.poll_interval,
            name,
            // Not shared with runs on other threads: the number of applied changes decides when the index is saved.
            metrics: Arc::default(),
            quota_bytes: -1,
            auto_compaction: self.profile.auto_compaction,
            compaction: CompactionRate { rows: 3, pause: Duration::from_millis(10) },
            history,
            saving: Saving { rows_min: 1 + below(8), step_keys: 1 + below(4) },
            ..Settings::default()
        };
        Store::open(log, settings).await
    }

    /// Returns the history settings of an instance that starts. An archive in a file of its own is created by the first
    /// instance that keeps rows.
    fn history(&self, log: &Arc<SimulatedLog>) -> Option<HistorySettings> {
        let keep = match self.profile.archive {
            ArchiveUse::Nobody => return None,
            ArchiveUse::Everybody(keep) => keep,
            ArchiveUse::Random => draw_keep(),
        };
        let database = &mut *self.database.lock();
        database.archive.exists |= keep != Keep::Nothing || database.sharing == Sharing::Shared;
        let archive = Arc::new(SimulatedArchive(Arc::clone(log)));
        database.archive.exists.then_some(HistorySettings { archive, keep })
    }

    // Checks.

    pub fn check_indexes(&self) {
        for (_, store) in (0..self.instances.len()).filter_map(|place| self.instance(place)) {
            let index = store.index_snapshot();
            let truth = &self.database.lock().truth;
            assert!(index.head() <= truth.head && index.compact_revision() <= truth.compact_revision);
            let oldest = index.compact_revision().unwrap_or(Revision::EMPTY).0;
            truth.check_index(&index, index.head());
            truth.check_index(&index, Revision(oldest));
            truth.check_index(&index, Revision(between(oldest, index.head().0)));
        }
    }

    /// Waits until all activity has ended, and checks the final state.
    pub async fn finish(self: &Rc<Self>) {
        super::trace(|| "no more faults".to_owned());
        self.is_calm.set(true);
        self.database.lock().faults = Faults::default();
        self.settle().await;
        for place in 0..self.instances.len() {
            let number = self.ledger.borrow().next();
            let done = self.call(place, Caller::Server, Call::plain_put(number), Duration::from_secs(10)).await;
            assert!(done.is_some(), "instance {place} accepts no write after the last fault");
            let done = self.call(place, Caller::Server, Call::list(), Duration::from_secs(10)).await;
            assert!(done.is_some(), "instance {place} answers no read after the last fault");
        }
        self.settle().await;
        self.check_indexes();
        self.check_past().await;
        let truth = &self.database.lock().truth;
        self.ledger.borrow().check_all(truth);
    }

    /// Reads the past at every instance, at the first revision, before it, and at random ones.
    async fn check_past(&self) {
        let copies_until = Instant::now() + COPY_MAX;
        while self.database.lock().is_copying() {
            assert!(Instant::now() < copies_until, "{COPY_MAX:?} after the last fault, rows were not copied");
            sleep(Duration::from_secs(1)).await;
        }
        self.ledger.borrow_mut().is_calm = true;
        for place in 0..self.instances.len() {
            let (first, head) = {
                let database = self.database.lock();
                (database.first(), database.truth.head)
            };
            let at = [first, first.prev().max(Revision::EMPTY), Revision(between(first.0.min(head.0), head.0)), head];
            let mut calls: Vec<Call> = at.map(|at| Call::PastPairs(KeyRange::all(), at)).to_vec();
            calls.push(Call::PastChanges(KeyRange::all(), (first, head), Order::OldestFirst));
            calls.extend((0..4).map(|_| Call::draw_past(first, head)));
            for call in calls {
                self.call(place, Caller::Server, call, Duration::from_secs(15)).await;
            }
        }
        let database = self.database.lock();
        database.archive.check(&database.truth);
        let Profile { archive, faults, .. } = self.profile;
        if archive == ArchiveUse::Everybody(KEEP_ALL) && faults.full + faults.refused + faults.lost == 0 {
            assert_eq!(database.first(), Revision::EMPTY, "nothing is lost without a reason");
        }
    }

    async fn settle(&self) {
        let deadline = Instant::now() + SETTLE_MAX;
        while let Some(why) = self.unsettled() {
            assert!(Instant::now() < deadline, "{SETTLE_MAX:?} after the last fault, {why}");
            sleep(Duration::from_millis(500)).await;
        }
        self.check_log().await;
    }

    fn unsettled(&self) -> Option<String> {
        let truth = &self.database.lock().truth;
        if self.broken.get() > 0 {
            return Some("a fault is still active".to_owned());
        }
        for place in 0..self.instances.len() {
            let Some((_, store)) = self.instance(place) else { return Some(format!("instance {place} is not up")) };
            if store.head() != truth.head {
                return Some(format!("instance {place} is at {}, the log at {}", store.head(), truth.head));
            }
        }
        if truth.has_leases() {
            return Some("leases have not expired".to_owned());
        }
        self.watches.iter().find_map(|watches| watches.borrow().owed(truth))
    }

    /// Checks that an index can be built from the rows that compactions left, and that it equals the truth at every
    /// readable revision. Instances with the same compact revision must have the same hash.
    async fn check_log(&self) {
        let member = Member { id: 99, name: "final check".to_owned(), client_urls: Vec::new() };
        let log = SimulatedLog::new(&self.database, member, 0, Duration::from_secs(1));
        let index = replay(&log).await.expect("the log can be read").index;
        let (oldest, newest) = (index.compact_revision().unwrap_or(Revision::EMPTY), index.head());
        for at in oldest.0..=newest.0 {
            self.database.lock().truth.check_index(&index, Revision(at));
        }
        let mut hashes = Vec::new();
        for (_, store) in (0..self.instances.len()).filter_map(|place| self.instance(place)) {
            match store.hash(Some(newest)).await {
                Ok(hashed) => hashes.push((hashed.hash, hashed.compact_revision)),
                Err(Error::Compacted) => {}
                Err(error) => panic!("no hash: {error}"),
            }
        }
        assert!(hashes.windows(2).all(|pair| pair[0] == pair[1] || pair[0].1 != pair[1].1), "{hashes:?}");
    }
}
