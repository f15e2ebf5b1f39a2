//! Snapshots that the server takes of itself at an interval. If several instances share the log, only the leader takes
//! them.
//!
//! The files are as those that clients receive, so `orlop snapshot restore` accepts them. The names contain the time, so
//! a restart neither delays the next snapshot nor takes an additional one.

use std::{
    io::Write as _,
    num::NonZeroUsize,
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tempfile::NamedTempFile;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tracing::{info, warn};

use super::{Content, Error, Export, Result, dated::DatedFolder, file_error, new_file_in, on_blocking_thread, publish};
use orlop_core::{
    clock::now,
    private,
    store::{PastError, Store},
    supervise::catch_panics,
};

/// Maximum time until a failed snapshot is repeated.
const RETRY_MAX: Duration = Duration::from_secs(10 * 60);
/// Interval at which an instance checks whether it has become the leader.
const LEADER_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// When snapshots are taken, where they are, and how many are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    pub interval: Duration,
    pub folder: DatedFolder,
    pub keep: NonZeroUsize,
    pub content: Content,
}

impl Schedule {
    /// Takes snapshots until `stopping` becomes true. A snapshot that is being taken then is removed.
    pub async fn run(self, store: Arc<Store>, mut stopping: watch::Receiver<bool>) {
        tokio::select! {
            biased;
            _ = stopping.wait_for(|stopping| *stopping) => {}
            () = self.take_forever(&store) => {}
        }
    }

    async fn take_forever(&self, store: &Store) {
        let metrics = &store.metrics().maintenance;
        metrics.snapshot_interval.set(i64::try_from(self.interval.as_secs()).unwrap_or(i64::MAX));
        let mut wait = Duration::ZERO;
        loop {
            sleep(wait).await;
            // Before its first heartbeat, an instance knows no other one.
            store.members().await;
            if store.leader() != store.identity().member_id {
                wait = self.interval.min(LEADER_CHECK_INTERVAL);
                continue;
            }
            // The newest snapshot may be that of an earlier process or, in a shared folder, of another instance.
            wait = self.time_until_due(store);
            if !wait.is_zero() {
                continue;
            }
            let started = Instant::now();
            let taken = match catch_panics(self.take(store)).await {
                // A compaction takes long to copy its rows.
                Ok(Err(Error::History(PastError::Copying { .. }))) => continue,
                Ok(taken) => taken.map_err(|error| error.to_string()),
                Err(panic) => Err(panic.to_string()),
            };
            wait = match taken {
                Ok((file, bytes)) => {
                    let elapsed_ms = started.elapsed().as_millis();
                    info!(file = %file.display(), bytes, elapsed_ms, "scheduled snapshot taken");
                    metrics.set_last_snapshot(now());
                    self.interval.saturating_sub(started.elapsed())
                }
                Err(error) => {
                    warn!(%error, "cannot take the scheduled snapshot; trying again later");
                    metrics.snapshot_failures.inc();
                    self.interval.min(RETRY_MAX)
                }
            };
        }
    }

    /// Returns the time until a snapshot is due, which depends on the newest one in the folder.
    fn time_until_due(&self, store: &Store) -> Duration {
        let metrics = &store.metrics().maintenance;
        match self.folder.newest(now()) {
            Ok(Some(newest)) => {
                if metrics.snapshot_last.get() == 0 {
                    metrics.set_last_snapshot(newest);
                }
                // If the clock was set back, the newest snapshot is in the future, and the next one is due.
                now().duration_since(newest).map_or(Duration::ZERO, |age| self.interval.saturating_sub(age))
            }
            Ok(None) => Duration::ZERO,
            Err(error) => {
                warn!(%error, "cannot read the folder of snapshots");
                Duration::ZERO
            }
        }
    }

    /// Takes a snapshot and deletes old ones. Returns its path and its size in bytes.
    async fn take(&self, store: &Store) -> Result<(PathBuf, u64)> {
        let time = now();
        let mut export = Export::of(store, self.content).await?;
        let folder = self.folder.path().to_owned();
        let mut file = on_blocking_thread(move || {
            private::make_folder(&folder).map_err(|error| file_error("create", &folder, &error))?;
            new_file_in(&folder)
        })
        .await?;
        let path = self.folder.file_at(time);
        while let Some(piece) = export.next().await? {
            let path = path.clone();
            file = on_blocking_thread(move || {
                file.write_all(&piece).map_err(|error| file_error("write", &path, &error))?;
                Ok(file)
            })
            .await?;
        }
        let schedule = self.clone();
        on_blocking_thread(move || schedule.finish(file, path, time)).await
    }

    fn finish(&self, file: NamedTempFile, path: PathBuf, time: SystemTime) -> Result<(PathBuf, u64)> {
        let bytes = file.as_file().metadata().map_err(|error| file_error("read", &path, &error))?.len();
        publish(file, &path)?;
        if let Err(error) = self.folder.prune(&path, self.keep, time) {
            warn!(%error, "old snapshots remain");
        }
        Ok((path, bytes))
    }
}
