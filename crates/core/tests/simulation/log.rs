//! One instance's connection to the simulated database: calls take time, fail before or after they are applied, and
//! some commits are applied after the caller has received an unknown outcome.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::{
    sync::{OwnedMutexGuard, oneshot, watch},
    time::{sleep, timeout},
};

use super::{
    database::{Database, Owned},
    random, scheduler,
    truth::Sharing,
};
use orlop_core::{
    auth::AuthState,
    log::{
        Append, Appended, Connections, Error, LeaseScope, Log, LoggedLease, Member, Meta, Page, Position, Precision,
        ReadLog, Reclaim, Reclaimed, Result, SavedIndex, SharedLog, Size, Touch, Visit, WithPrev,
    },
    types::{EncodedKv, KeyRange, LeaseId, Revision, RowId},
};

/// Timeout of a call.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// The server closes a connection that holds the append lock and is idle for longer than this.
const APPEND_LOCK_IDLE_MAX: Duration = Duration::from_secs(2);

pub(super) struct SimulatedLog {
    database: Arc<Mutex<Database>>,
    sharing: Sharing,
    member: Member,
    run: u64,
    poll_interval: Duration,
    notified: watch::Receiver<Revision>,
    append_lock: Arc<Mutex<AppendLock>>,
}

/// Whether the connection for appends holds the append lock.
enum AppendLock {
    None,
    Held {
        lock: OwnedMutexGuard<()>,
        server: i64,
        /// Identifies this acquisition of the lock.
        number: u64,
    },
    /// The server has closed the connection.
    Lost,
}

/// The outcome of an append.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Answered,
    /// The response is lost. The append is applied immediately, applied later or never applied.
    Lost,
    Refused,
}

impl SimulatedLog {
    pub fn new(database: &Arc<Mutex<Database>>, member: Member, run: u64, poll_interval: Duration) -> Self {
        let (sender, notified) = watch::channel(Revision(0));
        let mut state = database.lock();
        let sharing = state.sharing;
        state.listeners.insert(run, Some(sender));
        drop(state);
        let append_lock = Arc::new(Mutex::new(AppendLock::None));
        Self { database: Arc::clone(database), sharing, member, run, poll_interval, notified, append_lock }
    }

    /// The network delay in one direction.
    pub async fn network_delay(&self) {
        let is_slow = random::permille(self.database.lock().faults.slow);
        match random::below(10) {
            _ if is_slow => sleep(random::millis(200, 6_000)).await,
            0..3 => sleep(random::millis(1, 8)).await,
            3 => tokio::task::yield_now().await,
            _ => {}
        }
    }

    pub fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// Returns whether there is no space for a copy of rows.
    pub fn is_full(&self) -> bool {
        random::permille(self.database.lock().faults.full)
    }

    /// Changes tables other than the log. If the answer is lost, the change is made at once, later or never.
    pub async fn write<T: Send + 'static>(
        &self,
        change: impl FnOnce(&mut Database) -> T + Send + 'static,
    ) -> Result<T> {
        let fate = self.fate();
        if fate != Fate::Lost || self.sharing == Sharing::Own {
            return self.ask(change).await;
        }
        let server = self.database.lock().server;
        let database = Arc::clone(&self.database);
        scheduler::spawn_in(scheduler::DATABASE, async move {
            sleep(random::millis(0, 4_000)).await;
            let mut database = database.lock();
            if database.server == server && random::percent(70) {
                change(&mut database);
            }
        });
        Err(unavailable("answer lost"))
    }

    pub async fn ask<T>(&self, query: impl FnOnce(&mut Database) -> T) -> Result<T> {
        timeout(ANSWER_MAX, async {
            self.network_delay().await;
            let (answer, server) = {
                let mut database = self.database.lock();
                if !database.is_up || random::permille(database.faults.refused) {
                    return Err(unavailable("refused"));
                }
                let answer = query(&mut database);
                if random::permille(database.faults.lost) {
                    return Err(unavailable("answer lost"));
                }
                (answer, database.server)
            };
            self.network_delay().await;
            if self.database.lock().server == server { Ok(answer) } else { Err(unavailable("connection lost")) }
        })
        .await
        .unwrap_or_else(|_| Err(unavailable("no answer")))
    }

    fn fate(&self) -> Fate {
        let database = self.database.lock();
        if !database.is_up || random::permille(database.faults.refused) {
            Fate::Refused
        } else if random::permille(database.faults.lost) {
            Fate::Lost
        } else {
            Fate::Answered
        }
    }

    /// Appends within this process, as SQLite does.
    async fn append_own(&self, append: Owned) -> Result<Appended> {
        let fate = self.fate();
        let is_done = fate == Fate::Answered || (fate == Fate::Lost && random::percent(50));
        if is_done {
            let appended = self.database.lock().append(&append);
            self.network_delay().await;
            if fate == Fate::Answered {
                return Ok(appended);
            }
        }
        Err(Error::OutcomeUnknown("disk I/O error".to_owned()))
    }

    /// Appends with a statement, which the server executes even if the client has disconnected.
    async fn append_shared(&self, append: Owned, append_lock: AppendLock) -> Result<Appended> {
        let fate = self.fate();
        if fate == Fate::Refused {
            return Err(unavailable("refused"));
        }
        let server = self.database.lock().server;
        let lock = match append_lock {
            AppendLock::Held { lock, server: lock_server, .. } if lock_server == server => Some(lock),
            AppendLock::None => None,
            AppendLock::Held { .. } | AppendLock::Lost => return Err(unavailable("the append lock was lost")),
        };
        if fate == Fate::Lost && random::percent(30) {
            return Err(Error::OutcomeUnknown("the connection broke before the request arrived".to_owned()));
        }
        let (answer, answered) = oneshot::channel();
        let database = Arc::clone(&self.database);
        // A statement may be delayed in the network or in the server.
        let delay = if fate == Fate::Lost && random::percent(50) { random::millis(1, 4_000) } else { Duration::ZERO };
        scheduler::spawn_in(scheduler::DATABASE, async move {
            sleep(delay).await;
            let server_lock = Arc::clone(&database.lock().lock);
            let _lock = match lock {
                Some(lock) => lock,
                None => server_lock.lock_owned().await,
            };
            if random::percent(30) {
                sleep(random::millis(1, 5)).await;
            }
            let mut database = database.lock();
            if database.server == server {
                let _ = answer.send(database.append(&append));
            }
        });
        if fate == Fate::Lost {
            sleep(random::millis(0, 50)).await;
            return Err(Error::OutcomeUnknown("the connection broke before the response arrived".to_owned()));
        }
        let Ok(Ok(appended)) = timeout(ANSWER_MAX, answered).await else {
            return Err(Error::OutcomeUnknown("no answer".to_owned()));
        };
        self.network_delay().await;
        Ok(appended)
    }
}

fn unavailable(why: &str) -> Error {
    Error::Unavailable(why.to_owned())
}

impl Drop for SimulatedLog {
    fn drop(&mut self) {
        self.database.lock().listeners.remove(&self.run);
    }
}

#[async_trait]
impl ReadLog for SimulatedLog {
    async fn meta(&self) -> Result<Meta> {
        let meta = self.ask(|database| database.meta()).await?;
        Ok(Meta { member_id: self.member.id, ..meta })
    }

    async fn auth(&self) -> Result<AuthState> {
        self.ask(|database| database.truth.auth.newest().clone()).await
    }

    async fn replay(&self, from: Revision, visit: &mut Visit<'_>) -> Result<Meta> {
        let (meta, rows) = self.ask(|database| (database.meta(), database.rows())).await?;
        let begin = rows.partition_point(|change| change.row.revision < from);
        for rows in rows[begin..].chunks(7) {
            visit(&meta, rows.to_vec())?;
        }
        Ok(Meta { member_id: self.member.id, ..meta })
    }

    async fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Result<Page> {
        self.ask(|database| database.changes(from, to, range, prev)).await
    }
}

#[async_trait]
impl Log for SimulatedLog {
    async fn freeze(&self) -> Result<Box<dyn ReadLog>> {
        Err(unavailable("snapshots are not simulated"))
    }

    async fn append(&self, append: Append<'_>) -> Result<Appended> {
        let append_lock = std::mem::replace(&mut *self.append_lock.lock(), AppendLock::None);
        if append.is_empty() {
            // Nothing to do except to release the lock.
            self.network_delay().await;
            return match append_lock {
                AppendLock::Held { .. } | AppendLock::None => Ok(Appended::Done),
                AppendLock::Lost => Err(Error::OutcomeUnknown("the append lock was lost".to_owned())),
            };
        }
        let append = Owned::from(append);
        self.network_delay().await;
        match self.sharing {
            Sharing::Own => self.append_own(append).await,
            Sharing::Shared => self.append_shared(append, append_lock).await,
        }
    }

    async fn values(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>> {
        self.ask(|database| rows.iter().filter_map(|row| Some((*row, database.value(*row)?))).collect()).await
    }

    async fn token_key(&self) -> Result<Vec<u8>> {
        Err(unavailable("tokens are not simulated"))
    }

    async fn reclaim(&self, what: Reclaim<'_>) -> Result<Reclaimed> {
        let Reclaim::Rows { rows, compacted, server } = what else { return Ok(Reclaimed::All) };
        if self.ask(|database| database.purge(rows, compacted, server)).await? {
            Ok(Reclaimed::All)
        } else {
            Err(unavailable("another server is connected to the database"))
        }
    }

    async fn size(&self, _: Precision) -> Result<Size> {
        Ok(Size { total: 0, in_use: 0, disk_free: None, wal: None })
    }

    fn connections(&self) -> Connections {
        Connections { idle: 0, used: 0 }
    }

    fn saved_index(&self) -> Option<&dyn SavedIndex> {
        Some(self)
    }

    async fn close(&self, _: &[LoggedLease]) {
        // An instance that cannot deregister is considered stopped after a timeout.
        let _ = self.ask(|database| database.leave(self.member.id, self.run)).await;
    }

    fn shared(&self) -> Option<&dyn SharedLog> {
        (self.sharing == Sharing::Shared).then_some(self)
    }
}

#[async_trait]
impl SharedLog for SimulatedLog {
    async fn position(&self) -> Result<Position> {
        self.ask(|database| database.position()).await
    }

    async fn meta_since(&self, known: Position) -> Result<(Meta, LeaseScope)> {
        let (meta, scope) = self.ask(|database| database.meta_since(known)).await?;
        Ok((Meta { member_id: self.member.id, ..meta }, scope))
    }

    async fn wait_for_append(&self, seen: Revision) -> Option<Revision> {
        let mut notified = self.notified.clone();
        timeout(self.poll_interval, async {
            let head = notified.wait_for(|notified| *notified > seen).await.map(|notified| *notified);
            match head {
                Ok(head) => head,
                Err(_) => std::future::pending().await,
            }
        })
        .await
        .ok()
    }

    async fn lock_appends(&self) -> Result<()> {
        self.network_delay().await;
        if self.fate() != Fate::Answered {
            return Err(unavailable("no append lock"));
        }
        let (lock, server) = {
            let database = self.database.lock();
            (Arc::clone(&database.lock), database.server)
        };
        let lock = timeout(ANSWER_MAX, lock.lock_owned()).await.map_err(|_| unavailable("no append lock"))?;
        let number = random::between(0, i64::MAX - 1).cast_unsigned();
        *self.append_lock.lock() = AppendLock::Held { lock, server, number };
        let append_lock = Arc::clone(&self.append_lock);
        scheduler::spawn_in(scheduler::DATABASE, async move {
            sleep(APPEND_LOCK_IDLE_MAX).await;
            let mut append_lock = append_lock.lock();
            if matches!(*append_lock, AppendLock::Held { number: held, .. } if held == number) {
                *append_lock = AppendLock::Lost;
            }
        });
        self.network_delay().await;
        Ok(())
    }

    async fn leases(&self, ids: &[LeaseId], touch: Touch) -> Result<Vec<LoggedLease>> {
        let logged = self.ask(|database| database.leases(ids, touch)).await;
        super::trace(|| format!("{}: {touch:?} {ids:?} gives {logged:?}", self.member.name));
        logged
    }

    async fn beat(&self) -> Result<Vec<Member>> {
        self.ask(|database| database.beat(&self.member, self.run)).await
    }
}
