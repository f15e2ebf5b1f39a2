//! `orlop migrate`: copies a running etcd or Orlop into this server's database, follows it, and takes over from it.
//!
//! ```text
//! snapshot ─▶ restore ─▶ follow a watch ─▶ compare hashes ─▶ serve
//!    ▲                        │
//!    └────────────────────────┘ the source has compacted revisions that the copy lacks
//! ```
//!
//! The copy has the revisions of the source, so a client goes on with those that it knows. While it is unfinished, the
//! log is marked with the source's cluster ID: no server serves it, and only a migration from the same cluster continues
//! with it or replaces it.

mod after_cut;
mod command;
mod follow;
mod scratch;
mod source;
mod target;

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use parking_lot::Mutex;
use tokio::time::{interval, sleep};

pub use self::command::Args;
use self::{
    after_cut::AfterCut,
    scratch::Scratch,
    source::{Session, Source},
    target::{Place, Target},
};
use crate::{
    config::Settings,
    datastore::MissingArchive,
    progress::Progress,
    server,
    snapshot::{self, Content, HashCheck, Purpose, Restored},
    text::bytes,
};
use orlop_core::types::{LeaseId, Revision};

/// Pause before a lost connection is opened again.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Interval at which the progress of a restore is shown.
const RESTORE_INTERVAL: Duration = Duration::from_millis(250);

/// Follows the error of a server that did not start, or failed, after the cut over. The alarm at the source is not cleared:
/// the server may have accepted writes.
const STILL_FENCED: &str = "; the source still refuses writes: start the server again, or, if no client has written to \
    the copy, run `etcdctl alarm disarm` at the source";

/// Warning of a process that ends without clearing the alarm of its source.
pub const ALARM_REMAINS: &str = "the source may still refuse writes: run `etcdctl alarm disarm` at the source";

/// When a migration ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    /// At a signal.
    Follow,
    /// When the copy has the revision that the source has now.
    Once,
    /// When the copy has the newest revision of the source; then it is served.
    CutOver,
}

/// Why a step of a migration failed, by what follows from it.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// The source does not answer. It may later.
    #[error("{0}")]
    Source(String),
    /// The database of the copy does not answer. It may later.
    #[error("{0}")]
    Target(String),
    /// The source has compacted a revision that is needed; 0: it does not tell its compact revision.
    #[error("the source was compacted")]
    Compacted(Revision),
    /// The copy must be made anew.
    #[error("{0}")]
    StartOver(String),
    #[error("the source does not have what was asked for")]
    Missing,
    #[error("the source lacks a call: {0}")]
    Unimplemented(String),
    /// Trying again does not help; a text for the operator.
    #[error("{0}")]
    Fatal(String),
}

type Result<T> = std::result::Result<T, Failure>;

/// Completes at the first signal to stop.
type Stop = Shared<BoxFuture<'static, ()>>;

/// The members of the source whose alarm may be raised by this process. An alarm belongs to a member; any member can
/// clear it. The handler of signals reads the set.
pub type Alarmed = Arc<Mutex<BTreeSet<u64>>>;

/// The state of a migration that outlives a connection.
struct Migration {
    goal: Goal,
    /// Whether the source is made to refuse writes before the goal is reached.
    fence: bool,
    /// The revision at which [`Goal::Once`] is reached, once it is known.
    end: Option<Revision>,
    /// The leases that the source had before its last revision was read, with their TTLs in seconds.
    leases: BTreeMap<LeaseId, i64>,
    /// Whether the hashes were compared for [`Goal::CutOver`].
    is_verified: bool,
    alarmed: Alarmed,
    /// Whether the source has confirmed that it refuses writes.
    is_fenced: bool,
    progress: Progress,
}

/// What a copy took over.
struct Arrival {
    cluster_id: u64,
    head: Revision,
    leases: BTreeMap<LeaseId, i64>,
}

/// Migrates until `stop` completes or the goal is reached. After a cut over it serves until `stop` completes.
///
/// # Errors
///
/// A text for the operator, also if `stop` completes before a migration with `--once` has reached its goal.
pub async fn run(
    args: Args,
    settings: Settings,
    alarmed: Alarmed,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let stop = stop.boxed().shared();
    let datastore = settings.datastore()?;
    let place = Place { settings: &settings, datastore: &datastore };
    if args.goal() == Goal::CutOver {
        // After the cut over it would be too late to learn this.
        server::check_listeners(&settings).await?;
        crate::logging::start(&settings)?;
    }
    let source = Source { endpoints: args.from.clone(), credentials: args.credentials.clone() };
    let mut migration = Migration {
        goal: args.goal(),
        fence: args.fence,
        end: None,
        leases: BTreeMap::new(),
        is_verified: false,
        alarmed,
        is_fenced: false,
        progress: Progress::new(),
    };
    let migrated = tokio::select! {
        biased;
        migrated = migration.migrate(&source, &place, &stop) => migrated,
        // Other migrations go on to a revision at which source and copy are compared.
        () = stop.clone(), if args.goal() == Goal::Once => Err(stopped()),
    };
    let Arrival { cluster_id, head, leases } = match migrated {
        Ok(arrival) => arrival,
        Err(failure) => {
            migration.give_up(&source).await;
            return Err(failure.into());
        }
    };
    if migration.goal != Goal::CutOver {
        migration.progress.say(&format!("{} is at revision {head} of the source", datastore.name()));
        return Ok(());
    }
    migration.progress.say(&format!("cut over at revision {head}: from now on {} is written", datastore.name()));
    let after_failure = if migration.is_fenced { STILL_FENCED } else { "" };
    // The alarm must stay: clients may write to the copy from now on.
    migration.alarmed.lock().clear();
    drop(migration);
    let leases = leases.into_keys().collect();
    let after_cut = AfterCut { source, cluster_id, next: head.next(), leases, writes: 0 };
    tokio::select! {
        served = server::serve(settings, stop) => {
            served.map_err(|error| Box::<dyn std::error::Error>::from(format!("{error}{after_failure}")))
        }
        never = after_cut.run() => match never {},
    }
}

/// The failure of a migration that a signal has ended.
fn stopped() -> Failure {
    Failure::Fatal("stopped before the copy was complete".to_owned())
}

impl Migration {
    /// Copies and follows until the goal is reached. The copy is closed then.
    async fn migrate(&mut self, source: &Source, place: &Place<'_>, stop: &Stop) -> Result<Arrival> {
        // What is wrong now will be wrong later.
        let mut session = source.connect().await?;
        let cluster_id = session.cluster_id;
        let mut is_last = false;
        loop {
            let ended = Box::pin(self.attempt(&session, place, stop)).await;
            match ended {
                Ok(arrival) => return Ok(arrival),
                Err(Failure::Source(what) | Failure::Target(what)) if is_last => {
                    return Err(Failure::Fatal(format!("stopped before source and copy were compared: {what}")));
                }
                Err(Failure::Source(what)) => {
                    self.progress.say_once(&format!("the connection to the source is lost: {what}; trying again"));
                }
                Err(Failure::Target(what)) => self.progress.say_once(&format!("{what}; trying again")),
                Err(failure @ (Failure::Compacted(_) | Failure::StartOver(_))) => {
                    self.progress.say(&format!("{failure}; starting again with a new snapshot"));
                    self.unfence(&session).await?;
                    place.discard(cluster_id).await?;
                    (self.is_verified, self.end) = (false, None);
                }
                Err(failure @ (Failure::Missing | Failure::Unimplemented(_) | Failure::Fatal(_))) => {
                    return Err(failure);
                }
            }
            // After the signal to stop, one more attempt is made.
            is_last = stop.clone().now_or_never().is_some();
            session = self.reconnect(source, cluster_id, stop).await?;
        }
    }

    /// Lets the source accept writes after an error.
    async fn give_up(&mut self, source: &Source) {
        if self.alarmed.lock().is_empty() {
            return;
        }
        self.progress.say("clearing the alarm at the source; a second signal ends the process at once");
        let cleared = match source.connect().await {
            Ok(session) => self.unfence(&session).await,
            Err(failure) => Err(failure),
        };
        if let Err(failure) = cleared {
            self.progress.say(&format!("{ALARM_REMAINS}: its alarm could not be cleared: {failure}"));
        }
    }

    /// Connects to the source again, as long as it takes, but only once more after the signal to stop.
    async fn reconnect(&mut self, source: &Source, cluster_id: u64, stop: &Stop) -> Result<Session> {
        loop {
            let is_stopped = tokio::select! {
                () = stop.clone() => true,
                () = sleep(RETRY_PAUSE) => false,
            };
            match source.connect().await {
                Ok(session) if session.cluster_id == cluster_id => return Ok(session),
                Ok(session) => {
                    return Err(Failure::Fatal(format!(
                        "another cluster answers at the source's address: {:x} instead of {cluster_id:x}",
                        session.cluster_id
                    )));
                }
                Err(failure) if is_stopped => {
                    return Err(Failure::Fatal(format!("stopped before source and copy were compared: {failure}")));
                }
                Err(failure) => self.progress.show(0, 1, || format!("the source does not answer: {failure}")),
            }
        }
    }

    /// Opens the copy, or makes it, and follows the source with it.
    async fn attempt(&mut self, session: &Session, place: &Place<'_>, stop: &Stop) -> Result<Arrival> {
        let mut target = match place.open(MissingArchive::Ignore).await? {
            Some(target) => self.resume(target, session, place).await?,
            None => Box::pin(self.copy(session, place, stop)).await?,
        };
        let followed = match target.begin().await {
            Ok(()) => self.follow(session, &mut target, stop).await,
            Err(failure) => Err(failure),
        };
        let marked = match &followed {
            Ok(()) => target.mark(None).await,
            Err(_) => Ok(()),
        };
        let arrival = Arrival { cluster_id: session.cluster_id, head: target.head(), leases: target.leases().clone() };
        target.close().await;
        followed.and(marked).map(|()| arrival)
    }

    /// Continues with a copy that exists.
    ///
    /// # Errors
    ///
    /// [`Failure::Fatal`] if the database contains anything else.
    async fn resume(&mut self, mut target: Target, session: &Session, place: &Place<'_>) -> Result<Target> {
        let (name, at, cluster) = (place.datastore.name(), target.head(), session.cluster_id);
        let refused = match target.source {
            Some(source) if source == cluster => None,
            Some(source) => {
                Some(format!("it is the unfinished copy of cluster {source:x}, and the source is cluster {cluster:x}"))
            }
            None => self.refusal(&mut target, session).await?,
        };
        if let Some(why) = refused {
            target.close().await;
            return Err(Failure::Fatal(format!("{name} contains other data: {why}; use an empty database")));
        }
        self.progress.say(&format!("continuing with {name} at revision {at}"));
        Ok(target)
    }

    /// Returns why a finished copy, or what looks like one, cannot be continued with.
    async fn refusal(&mut self, target: &mut Target, session: &Session) -> Result<Option<String>> {
        if target.is_served().await? {
            return Ok(Some("a server uses it".to_owned()));
        }
        let (at, head) = (target.head(), session.head().await?);
        if at > head {
            return Ok(Some(format!("it is at revision {at}, and the source at {head}")));
        }
        let compacted = target.compact_revision().filter(|_| at == head);
        let theirs = match session.hash(at, compacted).await {
            Ok(theirs) => theirs,
            Err(Failure::Compacted(_)) => {
                return Ok(Some(format!("it is at revision {at}, which the source has compacted")));
            }
            Err(failure) => return Err(failure),
        };
        Ok(match target.has_hash(&theirs).await? {
            true => {
                target.mark(Some(session.cluster_id)).await?;
                None
            }
            false => Some(format!("its history up to revision {at} is not the source's")),
        })
    }

    /// Makes a copy from a snapshot of the source.
    async fn copy(&mut self, session: &Session, place: &Place<'_>, stop: &Stop) -> Result<Target> {
        let scratch = Scratch::new(&place.scratch_folder()?)?;
        let content = if place.keeps_history() { Content::LogAndArchive } else { Content::Log };
        let receiving = session.snapshot(content, scratch.path(), |received, to_come| {
            let text = || format!("receiving a snapshot: {}", bytes(i64::try_from(received).unwrap_or(i64::MAX)));
            self.progress.show(received, received + to_come, text);
        });
        let file = tokio::select! {
            () = stop.clone(), if self.goal != Goal::Once => return Err(stopped()),
            file = receiving => file?,
        };
        let rows = Arc::new(AtomicU64::new(0));
        let source = session.cluster_id;
        let load = async { Ok::<_, snapshot::Error>(place.load(source, Arc::clone(&rows)).await?) };
        let mut restoring = pin!(snapshot::restore(file.path(), HashCheck::Verify, content, Purpose::Copy, load));
        let mut ticks = interval(RESTORE_INTERVAL);
        let Restored { head, history } = loop {
            tokio::select! {
                () = stop.clone(), if self.goal != Goal::Once => return Err(stopped()),
                restored = &mut restoring => break restored.map_err(|error| match error {
                    snapshot::Error::File(_) | snapshot::Error::Server(_) => Failure::Fatal(error.to_string()),
                    snapshot::Error::History(_) => Failure::Fatal(error.to_string()),
                    snapshot::Error::Log(error) => error.into(),
                })?,
                _ = ticks.tick() => {
                    let rows = rows.load(Ordering::Relaxed);
                    self.progress.show(0, 1, || format!("restoring the snapshot: {rows} rows"));
                }
            }
        };
        let rows = rows.load(Ordering::Relaxed);
        self.progress.say(&format!("restored a snapshot of the source: revision {head}, {rows} rows{history}"));
        match place.open(MissingArchive::Create).await? {
            Some(target) => Ok(target),
            None => Err(Failure::Fatal("the copy is gone".to_owned())),
        }
    }
}
