//! The saved index of a log. If one process owns the log, it is a file beside the database, which is damaged, or of an
//! earlier state at times. If instances share the log, it is a table of the database, which one of them replaces at a time.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use orlop_core::log::{Error, Result, SavedIndex, SavedIndexReader, SavedIndexState, SavedIndexWriter};
use tokio::{
    sync::{Mutex, OwnedMutexGuard},
    time::sleep,
};

use super::{
    log::SimulatedLog,
    random::{between, percent},
    truth::Sharing,
};

/// The file, and the mark in the database.
#[derive(Default)]
pub(super) struct Saved {
    file: Option<Arc<File>>,
    mark: Option<u64>,
    /// Held by who saves the index.
    lock: Arc<Mutex<()>>,
    /// Number of times that an instance opened it.
    pub opened: u64,
}

struct File {
    mark: u64,
    state: SavedIndexState,
    blocks: Vec<Vec<u8>>,
}

#[async_trait]
impl SavedIndex for SimulatedLog {
    async fn open(&self) -> Result<Option<Box<dyn SavedIndexReader>>> {
        let file = self.ask(|database| {
            let is_shared = database.sharing == Sharing::Shared;
            let saved = &mut database.saved_index;
            let file = saved.file.clone().filter(|file| is_shared || saved.mark == Some(file.mark));
            saved.opened += u64::from(file.is_some());
            file
        });
        let reader = file.await?.map(|file| Reader { file, next: 0 });
        Ok(reader.map(|reader| Box::new(reader) as Box<dyn SavedIndexReader>))
    }

    async fn create(&self, state: SavedIndexState, server: i64) -> Result<Option<Box<dyn SavedIndexWriter + '_>>> {
        self.network_delay().await;
        let mark = between(0, i64::MAX - 1).cast_unsigned();
        let lock = self.ask(|database| Arc::clone(&database.saved_index.lock)).await?;
        let Ok(lock) = lock.try_lock_owned() else { return Ok(None) };
        let file = File { mark, state, blocks: Vec::new() };
        Ok(Some(Box::new(Writer { log: self, file, server, _lock: lock })))
    }
}

struct Reader {
    file: Arc<File>,
    next: usize,
}

#[async_trait]
impl SavedIndexReader for Reader {
    fn state(&self) -> SavedIndexState {
        self.file.state
    }

    async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        if percent(5) {
            // A large one. Other instances compact meanwhile.
            sleep(Duration::from_secs(5)).await;
        }
        if percent(5) {
            return Err(Error::Corrupt("a damaged block".to_owned()));
        }
        let block = self.file.blocks.get(self.next).cloned();
        self.next += 1;
        Ok(block)
    }
}

struct Writer<'a> {
    log: &'a SimulatedLog,
    file: File,
    server: i64,
    _lock: OwnedMutexGuard<()>,
}

#[async_trait]
impl SavedIndexWriter for Writer<'_> {
    async fn add(&mut self, block: Vec<u8>) -> Result<()> {
        self.log.network_delay().await;
        self.file.blocks.push(block);
        Ok(())
    }

    /// The process may be killed between the two steps. A table is replaced in one.
    async fn finish(self: Box<Self>) -> Result<()> {
        let Self { log, file, server, .. } = *self;
        let mark = file.mark;
        if log.sharing() == Sharing::Shared {
            let replaced = log.ask(|database| {
                let is_same_server = database.server == server;
                if is_same_server {
                    database.saved_index.file = Some(Arc::new(file));
                }
                is_same_server
            });
            return replaced.await?.then_some(()).ok_or_else(|| Error::Unavailable("another server".to_owned()));
        }
        log.ask(|database| database.saved_index.file = Some(Arc::new(file))).await?;
        log.ask(|database| database.saved_index.mark = Some(mark)).await
    }
}
