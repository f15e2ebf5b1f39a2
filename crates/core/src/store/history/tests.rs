//! Archives that cannot be written: how often an attempt is repeated, and when rows are given up.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;

use super::{HistoryKeeper, HistorySettings, Keep, rows_within};
use crate::{
    log::{
        Archive, ArchiveState, ArchivedChanges, ArchivedMoment, ClockStep, Error, FrozenArchive, Log, Moment, PastRow,
        ReadLog, Reclaimed, Result,
    },
    types::{EncodedKv, Key, KeyRange, Revision, RowId, Superseded},
};

/// An archive of which every call fails.
struct Broken {
    error: Error,
    shares_database: bool,
    /// What giving up returns.
    gives_up: Result<()>,
    given_up: AtomicU32,
}

#[async_trait]
impl Archive for Broken {
    async fn begin(&self, _: Option<Revision>) -> Result<()> {
        Err(self.error.clone())
    }

    fn shares_database(&self) -> bool {
        self.shares_database
    }

    async fn state(&self) -> Result<ArchiveState> {
        Err(self.error.clone())
    }

    async fn freeze(&self, _: &dyn Log) -> Result<(Arc<dyn ReadLog>, Arc<dyn FrozenArchive>)> {
        Err(self.error.clone())
    }

    async fn copy(&self, _: &[Superseded]) -> Result<()> {
        Err(self.error.clone())
    }

    async fn finish_copy(&self, _: Revision, _: i64) -> Result<()> {
        Err(self.error.clone())
    }

    async fn give_up(&self, _: Revision) -> Result<()> {
        self.given_up.fetch_add(1, Ordering::Relaxed);
        self.gives_up.clone()
    }

    async fn prune(&self, _: Revision, _: u64) -> Result<Reclaimed> {
        Err(self.error.clone())
    }

    async fn note_time(&self, _: Revision, _: bool) -> Result<()> {
        Err(self.error.clone())
    }

    async fn now_ms(&self) -> Result<i64> {
        Err(self.error.clone())
    }

    async fn first_moment(&self) -> Result<Option<Moment>> {
        Err(self.error.clone())
    }

    async fn moment_at(&self, _: i64) -> Result<Option<Moment>> {
        Err(self.error.clone())
    }

    async fn records(&self, _: &[Revision]) -> Result<Vec<Option<ArchivedMoment>>> {
        Err(self.error.clone())
    }

    async fn clock_steps(&self) -> Result<Vec<ClockStep>> {
        Err(self.error.clone())
    }

    async fn changes(&self, _: ArchivedChanges<'_>) -> Result<(Vec<PastRow>, Option<RowId>)> {
        Err(self.error.clone())
    }

    async fn pairs_at(
        &self,
        _: &KeyRange,
        _: Option<&Key>,
        _: Revision,
    ) -> Result<(Vec<(Key, EncodedKv)>, Option<Key>)> {
        Err(self.error.clone())
    }
}

fn unavailable() -> Error {
    Error::Unavailable("no answer".to_owned())
}

fn keeper(error: Error, shares_database: bool, gives_up: Result<()>) -> (HistoryKeeper, Arc<Broken>) {
    let archive = Arc::new(Broken { error, shares_database, gives_up, given_up: AtomicU32::new(0) });
    let keep = Keep::Rows { retention: Duration::from_secs(60), bytes_max: u64::MAX };
    (HistoryKeeper::new(HistorySettings { archive: Arc::clone(&archive) as Arc<dyn Archive>, keep }), archive)
}

/// (error, whether the archive is in the database of the log, number of the call that gives up)
fn cases() -> [(Error, bool, Option<u32>); 5] {
    let (full, corrupt) = (Error::Full("no space".to_owned()), Error::Corrupt("no table".to_owned()));
    [
        (unavailable(), false, Some(10)),
        // The outage of the database passes.
        (unavailable(), true, None),
        (corrupt, true, Some(10)),
        (full.clone(), false, Some(1)),
        (full, true, Some(1)),
    ]
}

#[tokio::test]
async fn rows_are_given_up_after_ten_failures_but_not_in_an_outage_of_the_log() {
    for (error, shares_database, expected) in cases() {
        let (keeper, archive) = keeper(error.clone(), shares_database, Ok(()));
        let mut kept = None;
        for call in 1..=40 {
            if kept.is_none() && keeper.keep(&[], Revision(9)).await.is_ok() {
                kept = Some(call);
            }
        }
        let given_up = u32::from(expected.is_some());
        assert_eq!((kept, archive.given_up.load(Ordering::Relaxed)), (expected, given_up), "{error} {shares_database}");
    }
}

#[tokio::test]
async fn a_compaction_ends_even_if_nothing_can_be_written_to_the_archive() {
    for (error, shares_database, expected) in cases() {
        for gives_up in [Ok(()), Err(unavailable())] {
            let (keeper, archive) = keeper(error.clone(), shares_database, gives_up);
            let mut finished = None;
            for call in 1..=40 {
                if finished.is_none() && keeper.finish(Revision(9), 1).await.is_ok() {
                    finished = Some(call);
                }
            }
            let given_up = u32::from(expected.is_some());
            let found = (finished, archive.given_up.load(Ordering::Relaxed));
            assert_eq!(found, (expected, given_up), "{error} {shares_database}");
        }
    }
}

#[test]
fn copies_end_at_a_number_of_bytes() {
    let rows: Vec<RowId> = (1..=4).map(|revision| RowId::new(Revision(revision), 0)).collect();
    // Lengths of values; `None`: a delete.
    let table: [([Option<u64>; 4], usize); 5] = [
        ([Some(1), Some(2), Some(3), Some(4)], 4),
        ([Some(50), Some(49), Some(1), Some(4)], 3),
        ([Some(50), None, Some(50), None], 3),
        ([Some(1_000), Some(1), None, Some(1)], 1),
        ([None, None, None, None], 4),
    ];
    for (lengths, expected) in table {
        let known: HashMap<RowId, u64> =
            rows.iter().zip(lengths).filter_map(|(row, length)| Some((*row, length?))).collect();
        assert_eq!(rows_within(100, &rows, &known), expected, "{lengths:?}");
    }
    assert_eq!(rows_within(100, &[], &HashMap::new()), 0);
}
