//! The index of a log, saved in a file beside the database: `FILE-index`.
//!
//! ```text
//! magic      20 bytes
//! blocks     each: length and CRC-32C of the block, 4 bytes each; the block
//!            the first block: mark, head, compact revision (0: none), number of keys; 8 bytes each
//!            the last block is empty
//! ```
//!
//! All numbers are little-endian. The mark is a random number, which the database has as a fact of `meta` from the moment
//! on at which the file is complete. So a database with the mark of the file is the one beside which it was written, or a
//! copy of it, and has all changes that are in the file. A database that was restored from an older copy, or another one,
//! has another mark.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufReader, Read as _, Write as _},
    path::{Path, PathBuf},
};

use async_trait::async_trait;
use orlop_core::{
    files::rename_durably,
    log::{Error, Result, SAVED_INDEX_MARK, SavedIndex, SavedIndexReader, SavedIndexState, SavedIndexWriter},
    private,
    types::Revision,
};
use tokio::task::spawn_blocking;
use tracing::info;

use super::{SqliteLog, append::SET_FACT, load::with_suffix, writer};
use crate::error::unavailable;

const MAGIC: &[u8; 20] = b"orlop saved index 1\n";
/// Bytes that are synced at once. The sync of a commit may have to wait for it.
const UNSYNCED_BYTES_MAX: usize = 1 << 20;
/// Bytes of the disk that a saved index leaves to commits.
const DISK_FREE_MIN: u64 = 256 << 20;
/// Expected bytes of a key, its length included.
const KEY_BYTES: u64 = 256;
/// A longer block is none of ours.
const BLOCK_BYTES_MAX: u32 = 1 << 30;

#[async_trait]
impl SavedIndex for SqliteLog {
    async fn open(&self) -> Result<Option<Box<dyn SavedIndexReader>>> {
        let name = with_suffix(self.options.get_filename(), "-index");
        let Some(file) = blocking(move || open(&name)).await? else { return Ok(None) };
        let mut reader =
            Reader { file: Some(file), state: SavedIndexState { head: Revision(0), compact_revision: None, keys: 0 } };
        let first = reader.next().await?.ok_or_else(damaged)?;
        let numbers = numbers(&first).ok_or_else(damaged)?;
        let mark: Option<i64> = sqlx::query_scalar("SELECT value FROM meta WHERE name = ?")
            .bind(SAVED_INDEX_MARK)
            .fetch_optional(&mut *self.reader().await?)
            .await
            .map_err(unavailable)?;
        let [of_file, head, compacted, keys] = numbers;
        if mark != Some(of_file) {
            info!("the saved index is not of this database; reading the whole log");
            return Ok(None);
        }
        reader.state = SavedIndexState {
            head: Revision(head),
            compact_revision: (compacted != 0).then_some(Revision(compacted)),
            keys: usize::try_from(keys).map_err(|_| damaged())?,
        };
        Ok(Some(Box::new(reader)))
    }

    async fn create(&self, state: SavedIndexState, _: i64) -> Result<Option<Box<dyn SavedIndexWriter + '_>>> {
        let needed = DISK_FREE_MIN.saturating_add(KEY_BYTES.saturating_mul(state.keys as u64));
        if self.disk_free().is_some_and(|free| free < needed) {
            return Err(Error::Full(format!("less than {needed} bytes are free for a saved index")));
        }
        let target = with_suffix(self.options.get_filename(), "-index");
        let temporary = with_suffix(&target, ".new");
        let mark: i64 =
            sqlx::query_scalar("SELECT random()").fetch_one(&mut *self.reader().await?).await.map_err(unavailable)?;
        let compacted = state.compact_revision.map_or(0, |revision| revision.0);
        let keys = i64::try_from(state.keys).unwrap_or(i64::MAX);
        let first = [mark, state.head.0, compacted, keys].map(i64::to_le_bytes).concat();
        let file = blocking({
            let temporary = temporary.clone();
            move || {
                let mut file = private::file_options().write(true).truncate(true).open(temporary)?;
                file.write_all(MAGIC)?;
                write_block(&mut file, &first)?;
                Ok(file)
            }
        });
        let file = Some(file.await?);
        let temporary = Temporary(temporary);
        Ok(Some(Box::new(Writer { log: self, file, unsynced: 0, temporary, target, mark })))
    }
}

struct Reader {
    file: Option<BufReader<File>>,
    state: SavedIndexState,
}

#[async_trait]
impl SavedIndexReader for Reader {
    fn state(&self) -> SavedIndexState {
        self.state
    }

    async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        let Some(mut file) = self.file.take() else { return Ok(None) };
        let (file, block) = blocking(move || {
            let block = read_block(&mut file)?;
            Ok((file, block))
        })
        .await?;
        self.file = Some(file);
        let block = block.ok_or_else(damaged)?;
        Ok((!block.is_empty()).then_some(block))
    }
}

struct Writer<'a> {
    log: &'a SqliteLog,
    /// `None` after an error.
    file: Option<File>,
    /// Bytes.
    unsynced: usize,
    temporary: Temporary,
    target: PathBuf,
    mark: i64,
}

/// A file that is removed unless it was renamed.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[async_trait]
impl SavedIndexWriter for Writer<'_> {
    async fn add(&mut self, block: Vec<u8>) -> Result<()> {
        if block.is_empty() {
            return Ok(());
        }
        let mut file = self.file.take().ok_or_else(damaged)?;
        self.unsynced += block.len();
        let is_sync_due = self.unsynced >= UNSYNCED_BYTES_MAX;
        if is_sync_due {
            self.unsynced = 0;
        }
        let write = move || {
            write_block(&mut file, &block)?;
            if is_sync_due {
                file.sync_data()?;
            }
            Ok(file)
        };
        self.file = Some(blocking(write).await?);
        Ok(())
    }

    async fn finish(mut self: Box<Self>) -> Result<()> {
        let mut file = self.file.take().ok_or_else(damaged)?;
        let (temporary, target) = (self.temporary.0.clone(), self.target.clone());
        blocking(move || {
            write_block(&mut file, &[])?;
            file.sync_all()?;
            rename_durably(&temporary, &target)
        })
        .await?;
        let writer = self.log.writer.lock().await.map_err(writer::unavailable)?;
        let mark = self.mark;
        let marked = writer.run(move |writer| writer.execute(SET_FACT, (SAVED_INDEX_MARK, mark)));
        marked.await.map(drop).map_err(writer::unavailable)
    }
}

/// Runs work on files on a thread where it may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T> {
    let failed = |error: io::Error| Error::Unavailable(format!("the file of the saved index: {error}"));
    spawn_blocking(work).await.map_err(|error| failed(io::Error::other(error)))?.map_err(failed)
}

fn damaged() -> Error {
    Error::Corrupt("the file of the saved index is damaged".to_owned())
}

fn open(name: &Path) -> io::Result<Option<BufReader<File>>> {
    let file = match OpenOptions::new().read(true).open(name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut file = BufReader::new(file);
    let mut magic = [0; MAGIC.len()];
    file.read_exact(&mut magic)?;
    if magic != *MAGIC {
        return Err(io::Error::other("it was written by another version of Orlop, or is damaged"));
    }
    Ok(Some(file))
}

fn write_block(file: &mut File, block: &[u8]) -> io::Result<()> {
    let len = u32::try_from(block.len()).ok().filter(|len| *len <= BLOCK_BYTES_MAX);
    let len = len.ok_or_else(|| io::Error::other("the history of a key is too long"))?;
    let mut head = [0; 8];
    head[..4].copy_from_slice(&len.to_le_bytes());
    head[4..].copy_from_slice(&crc32c::crc32c(block).to_le_bytes());
    file.write_all(&head)?;
    file.write_all(block)
}

/// Returns the next block; `None` if it is damaged.
fn read_block(file: &mut BufReader<File>) -> io::Result<Option<Vec<u8>>> {
    let (mut len, mut sum) = ([0; 4], [0; 4]);
    file.read_exact(&mut len)?;
    file.read_exact(&mut sum)?;
    let (len, sum) = (u32::from_le_bytes(len), u32::from_le_bytes(sum));
    if len > BLOCK_BYTES_MAX {
        return Ok(None);
    }
    let mut block = Vec::new();
    file.take(u64::from(len)).read_to_end(&mut block)?;
    Ok((block.len() as u64 == u64::from(len) && crc32c::crc32c(&block) == sum).then_some(block))
}

fn numbers(block: &[u8]) -> Option<[i64; 4]> {
    let (numbers, []) = block.as_chunks::<8>() else { return None };
    let numbers = <[[u8; 8]; 4]>::try_from(numbers).ok()?;
    Some(numbers.map(i64::from_le_bytes))
}
