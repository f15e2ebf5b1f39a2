//! A snapshot of a log as it is written: a stream from the first byte to the last, without a copy on disk.

use bytes::Bytes;
use orlop_bolt::{Layout, Planner, Unordered, Writer};
use sha2::{Digest as _, Sha256};
use tokio::task::spawn_blocking;

use super::{
    Error, Result,
    buckets::{self, Target},
};
use crate::api::STORAGE_VERSION;
use orlop_core::{
    log::{self, History, Meta, WithPrev},
    types::{Change, KeyRange, Revision},
};

/// A snapshot of one moment of a log. The log is read twice: to compute where everything will be in the file, and to
/// write it.
pub struct Export {
    history: Box<dyn History>,
    meta: Meta,
    layout: Layout,
    /// The next revision to write.
    next: Revision,
    stage: Stage,
}

enum Stage {
    Rows(Box<Output>),
    Checksum(Bytes),
    Complete,
}

/// The file, and the checksum of what was written of it.
struct Output {
    writer: Writer,
    hash: Sha256,
}

impl Export {
    /// Computes the layout of a log that does not change.
    ///
    /// # Errors
    ///
    /// If the log cannot be read.
    pub async fn new(history: Box<dyn History>) -> Result<Self> {
        let (meta, auth) = (history.meta().await?, history.auth().await?);
        let mut planner = Planner::default();
        buckets::begin(&auth, &mut planner)?;
        let mut next = Revision::EMPTY.next();
        while let Some(changes) = page(&*history, &meta, &mut next).await? {
            planner = on_blocking_thread(move || planned(planner, changes)).await?;
        }
        buckets::end(&meta, STORAGE_VERSION, &mut planner)?;
        let layout = planner.finish();
        let mut writer = Writer::new(layout);
        buckets::begin(&auth, &mut writer)?;
        let stage = Stage::Rows(Box::new(Output { writer, hash: Sha256::new() }));
        Ok(Self { history, meta, layout, next: Revision::EMPTY.next(), stage })
    }

    /// Returns the size in bytes, without the checksum.
    pub fn bytes(&self) -> u64 {
        self.layout.bytes()
    }

    /// Returns the next piece, about as long as a page of the log. The last one is the checksum alone.
    ///
    /// # Errors
    ///
    /// If the log cannot be read. There are no further pieces then.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        match std::mem::replace(&mut self.stage, Stage::Complete) {
            Stage::Complete => Ok(None),
            Stage::Checksum(checksum) => Ok(Some(checksum)),
            Stage::Rows(output) => match page(&*self.history, &self.meta, &mut self.next).await? {
                Some(changes) => {
                    let (output, piece) = on_blocking_thread(move || output.rows(changes)).await?;
                    self.stage = Stage::Rows(output);
                    Ok(Some(piece))
                }
                None => {
                    let (piece, checksum) = output.end(&self.meta)?;
                    self.stage = Stage::Checksum(checksum);
                    Ok(Some(piece))
                }
            },
        }
    }
}

fn planned(mut planner: Planner, changes: Vec<Change>) -> Result<Planner> {
    buckets::rows(changes, &mut planner)?;
    Ok(planner)
}

impl Output {
    fn rows(mut self: Box<Self>, changes: Vec<Change>) -> Result<(Box<Self>, Bytes)> {
        buckets::rows(changes, &mut self.writer)?;
        let piece = self.writer.take();
        self.hash.update(&piece);
        Ok((self, piece))
    }

    fn end(mut self: Box<Self>, meta: &Meta) -> Result<(Bytes, Bytes)> {
        buckets::end(meta, STORAGE_VERSION, &mut self.writer)?;
        let failed = |error| Error::Log(log::Error::Corrupt(format!("{error}")));
        let piece = self.writer.finish().map_err(failed)?;
        self.hash.update(&piece);
        Ok((piece, self.hash.finalize().to_vec().into()))
    }
}

/// Reads the next rows; `None` at the end.
async fn page(history: &dyn History, meta: &Meta, next: &mut Revision) -> Result<Option<Vec<Change>>> {
    let head = meta.position.head;
    if *next > head {
        return Ok(None);
    }
    let page = history.changes(*next, head, &KeyRange::all(), WithPrev::No).await?;
    *next = page.next;
    Ok(Some(page.changes))
}

/// Runs what takes milliseconds, such as encoding a page, or waits for the disk.
pub(super) async fn on_blocking_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    spawn_blocking(work).await.unwrap_or_else(|error| Err(Error::File(error.to_string())))
}

impl From<Unordered> for Error {
    fn from(error: Unordered) -> Self {
        Self::Log(log::Error::Corrupt(error.to_string()))
    }
}

impl Target for Planner {
    fn bucket(&mut self, name: &'static str) -> std::result::Result<(), Unordered> {
        self.bucket(name)
    }

    fn add(&mut self, key: Bytes, value: Bytes) -> std::result::Result<(), Unordered> {
        self.add(key, value.len())
    }
}

impl Target for Writer {
    fn bucket(&mut self, name: &'static str) -> std::result::Result<(), Unordered> {
        self.bucket(name)
    }

    fn add(&mut self, key: Bytes, value: Bytes) -> std::result::Result<(), Unordered> {
        self.add(key, value)
    }
}
