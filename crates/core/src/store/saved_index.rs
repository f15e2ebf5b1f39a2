//! Saves the index beside the log ([`SavedIndex`]), and starts with it.
//!
//! A saved index can be used as long as no compaction above its head was recorded: such a compaction deletes tombstones
//! that the index has not seen. So the index is saved after a compaction, and again when much was written since. If several
//! instances share the log, the one that deleted the rows of the compaction saves the index for all.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};
use tracing::{info, warn};

use super::{
    replay::{ReadProgress, Replayed, replay_onto},
    shared::Shared,
    tasks::until_stopped,
};
use crate::{
    index::{SavedIndexLoader, TreeIndex},
    log::{self, Error, Log, Result, SavedIndex, SavedIndexState},
    types::{Key, Revision},
};

/// Interval at which the task looks whether the index should be saved.
const INTERVAL: Duration = Duration::from_secs(10);
/// Pause after the index could not be saved, for example because the disk is almost full.
const RETRY_PAUSE: Duration = Duration::from_secs(300);
/// Pause after an attempt, relative to its time.
const PAUSE_FACTOR: u32 = 4;
/// Maximum time to save the index when the store stops. If it takes longer, the next start reads more of the log.
const LAST_SAVE_MAX: Duration = Duration::from_secs(10);
/// A saved index of this many keys is not saved again to spare a start the read of one row.
const KEYS_PER_ROW: usize = 5;

/// When and how the index is saved.
#[derive(Clone, Copy, Debug)]
pub struct Saving {
    /// Number of rows that a start reads rather than that the index is saved.
    pub rows_min: usize,
    /// Keys that are saved while the index is locked.
    pub step_keys: usize,
}

impl Default for Saving {
    fn default() -> Self {
        // A start reads the rows in about 0.1 s.
        Self { rows_min: 100_000, step_keys: 1_000 }
    }
}

/// Reads the log, from the head of the saved index on if there is one.
///
/// # Errors
///
/// [`Error::Corrupt`] if the log is inconsistent.
pub(super) async fn replay_with_saved(log: &dyn Log, progress: &ReadProgress) -> Result<(Replayed, Option<Revision>)> {
    let whole = || replay_onto(log, TreeIndex::new(), progress);
    let Some(saved) = log.saved_index() else { return Ok((whole().await?, None)) };
    let server = log.meta().await?.position.server;
    match load(log, saved).await {
        Ok(Some(index)) => {
            let head = index.head();
            match replay_onto(log, index, progress).await {
                Err(Error::Corrupt(reason)) => {
                    warn!(reason, "the saved index contradicts the log; reading the whole log")
                }
                // Another instance can compact while this one starts. Another server may have another log.
                Ok(Replayed { meta, .. }) if meta.compact_revision > Some(head) || meta.position.server != server => {
                    info!("the log was compacted, or moved to another server; reading the whole log");
                }
                replayed => {
                    let replayed = replayed?;
                    // A later start would find the same garbage again, and should not use this index.
                    let is_current = replayed.garbage.is_empty();
                    return Ok((replayed, is_current.then_some(head)));
                }
            }
        }
        Ok(None) => {}
        Err(error) => warn!(%error, "cannot use the saved index; reading the whole log"),
    }
    Ok((whole().await?, None))
}

/// Loads the saved index; `None` if there is none that the log's rows from its head on bring up to date.
async fn load(log: &dyn Log, saved: &dyn SavedIndex) -> Result<Option<TreeIndex>> {
    let began = Instant::now();
    let Some(mut reader) = saved.open().await? else { return Ok(None) };
    let state = reader.state();
    let meta = log.meta().await?;
    if !is_usable(state, meta.compact_revision) || state.head > meta.position.head {
        return Ok(None);
    }
    let mut loader = SavedIndexLoader::new(state.keys);
    while let Some(block) = reader.next().await? {
        loader.add(&block).map_err(|error| Error::Corrupt(error.to_string()))?;
    }
    if loader.newest() > meta.position.head {
        return Err(Error::Corrupt(format!(
            "it has revision {}, the log ends at {}",
            loader.newest(),
            meta.position.head
        )));
    }
    let index = loader.finish(state.head, state.compact_revision);
    if index.is_empty() {
        return Ok(None);
    }
    info!(
        keys = index.len(),
        revision = state.head.0,
        head = meta.position.head.0,
        elapsed_ms = began.elapsed().as_millis(),
        "saved index loaded"
    );
    Ok(Some(index))
}

/// Returns whether a log of this compact revision can bring a saved index up to date.
fn is_usable(state: SavedIndexState, compacted: Option<Revision>) -> bool {
    (state.compact_revision..=Some(state.head)).contains(&compacted)
}

/// What a start would have to do with the index that was saved last.
#[derive(Clone, Copy)]
pub(super) struct Unread {
    /// The head of the saved index, if there is one.
    head: Option<Revision>,
    /// The number of applied changes ([`changes`]) at which a start had nothing to read.
    read_at: i64,
    /// An index that was saved up to this revision is the one of `head`, or was found unusable at the start.
    known: Revision,
    /// Number of rows that a start may read in addition, because saving takes a time in proportion to the index.
    more: usize,
}

impl Unread {
    /// After a start up to `head` that used the index saved at `saved`, and read `rows` rows.
    pub(super) fn after_start(saved: Option<Revision>, head: Revision, rows: usize) -> Self {
        let read_at = i64::try_from(rows).map_or(i64::MIN, |rows| -rows);
        Self { head: saved, read_at, known: saved.unwrap_or(head), more: 0 }
    }

    /// After an index was saved, when [`changes`] was `read_at`.
    fn after_save(state: SavedIndexState, read_at: i64) -> Self {
        Self { head: Some(state.head), read_at, known: state.head, more: state.keys / KEYS_PER_ROW }
    }

    /// After another instance may have saved the index; `None` if none did.
    async fn after_other_instances(&self, shared: &Shared) -> log::Result<Option<Self>> {
        let (Some(_), Some(saved)) = (shared.log.shared(), shared.log.saved_index()) else { return Ok(None) };
        let Some(reader) = saved.open().await? else { return Ok(None) };
        let state = reader.state();
        let index = shared.index.read();
        let is_new = self.known < state.head && state.head <= index.head();
        // A few changes are newer than that index. Not counting them lets a start read at most twice as much.
        let current = Self::after_save(state, changes(shared));
        Ok((is_new && is_usable(state, index.compact_revision())).then_some(current))
    }

    /// Returns whether a start would have to read the whole log, of at least `rows` rows, or more than it may.
    fn exceeds(&self, shared: &Shared, rows: usize, pace: Pace) -> bool {
        let more = if pace == Pace::Fast { 0 } else { self.more };
        let (keys, compacted) = {
            let index = shared.index.read();
            (index.len(), index.compact_revision())
        };
        let is_usable = self.head.is_some_and(|head| compacted <= Some(head));
        let unread = usize::try_from(changes(shared).saturating_sub(self.read_at)).unwrap_or(0);
        unread >= rows.saturating_add(more) || (!is_usable && keys >= rows)
    }
}

/// Returns the number of changes that were applied since the start.
fn changes(shared: &Shared) -> i64 {
    shared.metrics.store.events.get().cast_signed()
}

/// Saves the index from time to time, and when the store stops.
pub(super) async fn run(shared: Arc<Shared>, saving: Saving, mut unread: Unread, stop: watch::Receiver<bool>) {
    let work = async {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let began = Instant::now();
            let saved = save_if_due(&shared, saving, &mut unread, Pace::BesideWrites).await;
            // Compactions may come faster than a large index is saved, and each one ends an attempt.
            let mut pause = began.elapsed() * PAUSE_FACTOR;
            if let Err(error) = saved {
                warn!(%error, "cannot save the index; the next start reads more of the log");
                pause = pause.max(RETRY_PAUSE);
            }
            sleep(pause).await;
        }
    };
    until_stopped(stop, work).await;
    match timeout(LAST_SAVE_MAX, save_if_due(&shared, saving, &mut unread, Pace::Fast)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(%error, "cannot save the index; the next start reads more of the log"),
        Err(_) => warn!("saving the index takes too long; the next start reads more of the log"),
    }
}

/// Saves the index if a start would have to read much.
async fn save_if_due(shared: &Shared, saving: Saving, unread: &mut Unread, pace: Pace) -> log::Result<()> {
    if !unread.exceeds(shared, saving.rows_min, pace) {
        return Ok(());
    }
    // An instance that may not save need not ask the database.
    if !may_save(shared, shared.position().server) {
        return Ok(());
    }
    if let Some(current) = unread.after_other_instances(shared).await? {
        *unread = current;
        if !unread.exceeds(shared, saving.rows_min, pace) {
            return Ok(());
        }
    }
    if let Some(saved) = save(shared, saving.step_keys, pace).await? {
        *unread = saved;
    }
    Ok(())
}

/// How fast the index is saved.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pace {
    /// Half of the time is left to syncs of the log.
    BesideWrites,
    /// The store stops.
    Fast,
}

/// Returns whether no compacted row is left on the server: a start finds such rows only because they are in the index, and
/// compactions remove them from it before they delete them. Other instances may have to delete them.
fn may_save(shared: &Shared, server: i64) -> bool {
    // In this order: an instance that leaves rows to others does so before the compaction is done.
    let is_done = *shared.compaction_done.borrow() == shared.index.read().compact_revision();
    is_done && shared.rows_left_to_others.lock().is_empty() && *shared.purged_on.lock() == Some(server)
}

/// Saves the index. Returns `None` if compacted rows are left, or if another instance is saving the index.
async fn save(shared: &Shared, step_keys: usize, pace: Pace) -> log::Result<Option<Unread>> {
    let Some(saved) = shared.log.saved_index() else { return Ok(None) };
    let (began, read_at) = (Instant::now(), changes(shared));
    let server = shared.position().server;
    let state = {
        let index = shared.index.read();
        SavedIndexState { head: index.head(), compact_revision: index.compact_revision(), keys: index.len() }
    };
    if !may_save(shared, server) {
        return Ok(None);
    }
    let is_compacting = || shared.index.read().compact_revision() != state.compact_revision;
    let Some(mut writer) = saved.create(state, server).await? else { return Ok(None) };
    let mut after: Option<Key> = None;
    loop {
        let mut block = Vec::new();
        after = shared.index.read().save_step(after.as_ref(), step_keys, &mut block);
        let writing = Instant::now();
        writer.add(block).await?;
        if is_compacting() {
            return Ok(None);
        }
        if after.is_none() {
            break;
        }
        if pace == Pace::BesideWrites {
            sleep(writing.elapsed()).await;
        }
    }
    // What was applied to the index is durable in the log.
    writer.finish().await?;
    if is_compacting() {
        // The state of the file tells a start that it cannot be used.
        return Ok(None);
    }
    info!(keys = state.keys, revision = state.head.0, elapsed_ms = began.elapsed().as_millis(), "index saved");
    Ok(Some(Unread::after_save(state, read_at)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        store::fixtures::shared,
        types::{RowId, Superseded},
    };

    /// A start with a saved index does not find the rows that the index no longer has, so they would never be deleted.
    #[test]
    fn index_is_saved_only_if_no_compacted_row_is_left() {
        let shared = shared(0);
        let server = shared.position().server;
        assert!(!may_save(&shared, server), "rows that the start found may be left");
        *shared.purged_on.lock() = Some(server);
        assert!(may_save(&shared, server));
        assert!(!may_save(&shared, server + 1), "another server may have lost deletions");
        let left = Superseded { row: RowId::new(Revision(2), 0), end: Revision(3) };
        shared.rows_left_to_others.lock().push(left);
        assert!(!may_save(&shared, server), "another instance may have to delete a row");
        shared.rows_left_to_others.lock().clear();
        shared.note_compaction(Revision(5));
        assert!(!may_save(&shared, server), "the compaction has not finished");
        shared.compaction_done.send_replace(Some(Revision(5)));
        assert!(may_save(&shared, server));
    }
}
