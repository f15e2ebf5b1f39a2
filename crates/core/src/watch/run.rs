//! Runs: consecutive chunks of one range and flavor, behind one reference.
//!
//! A stream that is not read queues every chunk. With runs, one queue slot refers to all consecutive chunks of a run,
//! so ten thousand streams that wait for the same range need little more memory than one.

use std::sync::{Arc, Weak};

use bytes::Bytes;

use super::chunk::Chunk;
use crate::{sync::Mutex, types::Revision};

/// Maximum number of chunks per run. A stream that waits for one chunk of a run keeps all of them in memory.
const RUN_CHUNKS_MAX: u16 = 256;
/// Maximum bytes per run. A larger chunk has a run of its own.
const RUN_BYTES_MAX: usize = if cfg!(test) { 512 } else { 16 << 10 };

/// Consecutive chunks of one range and flavor.
#[derive(Debug)]
pub struct ChunkRun {
    first: Published,
    more: Mutex<More>,
}

#[derive(Debug)]
struct More {
    chunks: Vec<Published>,
    /// Bytes of the whole run.
    bytes: usize,
}

/// A chunk and the revision in the header of its message.
#[derive(Debug)]
struct Published {
    chunk: Chunk,
    revision: Revision,
}

/// A reference to a chunk in a run.
#[derive(Debug)]
pub struct ChunkRef {
    pub run: Arc<ChunkRun>,
    /// The chunk's position in the run.
    pub number: u16,
    /// Bytes of the chunk.
    pub len: usize,
    /// The chunk's oldest revision.
    pub first: Revision,
    /// The revision in the header of its message, at or above the newest in the chunk.
    pub revision: Revision,
}

impl ChunkRef {
    /// Puts a chunk into a new run.
    pub fn in_new_run(chunk: Chunk, revision: Revision) -> Self {
        let (len, first) = (chunk.len(), chunk.first());
        let more = Mutex::new(More { chunks: Vec::new(), bytes: len });
        let run = ChunkRun { first: Published { chunk, revision }, more };
        Self { run: Arc::new(run), number: 0, len, first, revision }
    }

    /// Splits the chunk into pieces of at most `limit` bytes. An event above the limit is a piece of its own.
    pub fn pieces(&self, limit: usize) -> Vec<Bytes> {
        self.run.with(self.number, |published| published.chunk.pieces(limit).collect())
    }
}

impl ChunkRun {
    /// Returns the events of the chunk with this number, and the revision in the header of its message.
    pub fn events(&self, number: u16) -> (Bytes, Revision) {
        self.with(number, |published| (published.chunk.bytes().clone(), published.revision))
    }

    /// Returns the oldest revision of the chunk with this number.
    pub fn first_revision(&self, number: u16) -> Revision {
        self.with(number, |published| published.chunk.first())
    }

    fn with<T>(&self, number: u16, f: impl FnOnce(&Published) -> T) -> T {
        match number.checked_sub(1) {
            None => f(&self.first),
            Some(number) => f(&self.more.lock().chunks[usize::from(number)]),
        }
    }

    /// Adds a chunk, or returns it if the run is full.
    fn append(&self, chunk: Chunk, revision: Revision) -> Result<u16, Chunk> {
        let mut more = self.more.lock();
        match u16::try_from(more.chunks.len() + 1) {
            Ok(number) if number < RUN_CHUNKS_MAX && more.bytes + chunk.len() <= RUN_BYTES_MAX => {
                more.bytes += chunk.len();
                more.chunks.push(Published { chunk, revision });
                Ok(number)
            }
            _ => Err(chunk),
        }
    }
}

/// The run to which the next chunk of a range and flavor is added.
#[derive(Debug, Default)]
pub struct RunTail(Weak<ChunkRun>);

impl RunTail {
    /// Adds a chunk to the current run. If that run is full, or no stream waits for it, starts a new run.
    pub fn append(&mut self, chunk: Chunk, revision: Revision) -> ChunkRef {
        let (len, first) = (chunk.len(), chunk.first());
        let appended = match self.0.upgrade() {
            Some(run) => run.append(chunk, revision).map(|number| ChunkRef { run, number, len, first, revision }),
            None => Err(chunk),
        };
        appended.unwrap_or_else(|chunk| {
            let chunk = ChunkRef::in_new_run(chunk, revision);
            self.0 = Arc::downgrade(&chunk.run);
            chunk
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append(tail: &mut RunTail, bytes: usize, revision: i64) -> ChunkRef {
        tail.append(Chunk::of_event(&vec![7; bytes], Revision(revision)), Revision(revision))
    }

    #[test]
    fn chunks_share_a_run_while_it_is_in_use_and_not_full() {
        let (mut tail, mut waiting) = (RunTail::default(), Vec::new());
        // Bytes of a chunk, and its expected number in its run.
        for (bytes, number) in [(300, 0), (200, 1), (12, 2), (1, 0), (511, 1), (1, 0), (1_000, 0), (1, 0), (512, 0)] {
            let chunk = append(&mut tail, bytes, 2);
            assert_eq!((chunk.number, chunk.len), (number, bytes));
            assert_eq!(chunk.run.events(number).0.len(), bytes);
            waiting.push(chunk);
        }
        let mut tail = RunTail::default();
        let waiting = append(&mut tail, 0, 1);
        let numbers: Vec<u16> = (2..300).map(|revision| append(&mut tail, 0, revision).number).collect();
        assert_eq!((numbers[254], numbers[255]), (255, 0));
        assert_eq!(waiting.run.events(255).1, Revision(256));
    }

    #[test]
    fn runs_that_no_stream_needs_are_freed() {
        let before = Chunk::total_bytes();
        let mut tail = RunTail::default();
        for revision in 2..100 {
            assert_eq!(append(&mut tail, 1_000_000, revision).number, 0);
            assert!(Chunk::total_bytes() < before + 50_000_000, "after revision {revision}");
        }
    }
}
