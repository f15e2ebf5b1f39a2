//! The saved index of a log that one process owns: a file beside the database, which is cut off, damaged, or of an earlier
//! state at times.

use std::sync::Arc;

use async_trait::async_trait;
use orlop_core::log::{Error, Result, SavedIndex, SavedIndexReader, SavedIndexState, SavedIndexWriter};

use super::{
    log::SimulatedLog,
    random::{between, percent},
};

/// The file, and the mark in the database.
#[derive(Default)]
pub(super) struct Saved {
    file: Option<Arc<File>>,
    mark: Option<u64>,
    /// Number of times that a start opened the file.
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
            let saved = &mut database.saved_index;
            let file = saved.file.clone().filter(|file| saved.mark == Some(file.mark));
            saved.opened += u64::from(file.is_some());
            file
        });
        let reader = file.await?.map(|file| Reader { file, next: 0 });
        Ok(reader.map(|reader| Box::new(reader) as Box<dyn SavedIndexReader>))
    }

    async fn create(&self, state: SavedIndexState) -> Result<Box<dyn SavedIndexWriter + '_>> {
        self.network_delay().await;
        let mark = between(0, i64::MAX - 1).cast_unsigned();
        Ok(Box::new(Writer { log: self, file: File { mark, state, blocks: Vec::new() } }))
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
}

#[async_trait]
impl SavedIndexWriter for Writer<'_> {
    async fn add(&mut self, block: Vec<u8>) -> Result<()> {
        self.log.network_delay().await;
        self.file.blocks.push(block);
        Ok(())
    }

    /// The process may be killed between the two steps.
    async fn finish(self: Box<Self>) -> Result<()> {
        let Self { log, file } = *self;
        let mark = file.mark;
        log.ask(|database| database.saved_index.file = Some(Arc::new(file))).await?;
        log.ask(|database| database.saved_index.mark = Some(mark)).await
    }
}
