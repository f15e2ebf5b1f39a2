//! Encoded events, shared by all watches that receive them.

use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

use super::spec::Flavor;
use crate::types::{Change, EncodedEvent, Revision};

/// Bytes of events after which a chunk should end at the next revision boundary.
pub(super) const CHUNK_BYTES_MAX: usize = if cfg!(test) { 64 } else { 1 << 20 };

/// Bytes of all chunks in memory. A chunk is in memory while a stream waits to send it or another chunk of the same run
/// ([`super::run`]). Global, because the memory limit applies to the whole process.
static CHUNK_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Bytes that [`CHUNK_BYTES`] counts until they are freed.
struct CountedBytes(Vec<u8>);

impl CountedBytes {
    fn new(bytes: Vec<u8>) -> Self {
        CHUNK_BYTES.fetch_add(bytes.len(), Ordering::Relaxed);
        Self(bytes)
    }
}

impl AsRef<[u8]> for CountedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        CHUNK_BYTES.fetch_sub(self.0.len(), Ordering::Relaxed);
    }
}

/// The events of one or more complete revisions, encoded one after another as `WatchResponse.events`.
#[derive(Debug)]
pub struct Chunk {
    bytes: Bytes,
    /// The end of each event in `bytes`.
    ends: Box<[usize]>,
    first: Revision,
}

impl Chunk {
    /// Encodes the changes that the flavor admits. A chunk ends at the first revision boundary after `bytes_max`.
    pub fn encode<'a>(
        changes: impl IntoIterator<Item = &'a Change>,
        flavor: Flavor,
        bytes_max: usize,
        mut encode: impl FnMut(&'a Change, Flavor) -> EncodedEvent,
    ) -> Vec<Self> {
        let mut chunks = Vec::new();
        let mut builder = ChunkBuilder::default();
        for change in changes {
            if !flavor.admits(change) {
                continue;
            }
            let revision = change.row.revision;
            if builder.last.is_some_and(|last| last != revision) && builder.bytes.len() >= bytes_max {
                chunks.extend(std::mem::take(&mut builder).build());
            }
            builder.push(encode(change, flavor).as_bytes(), revision);
        }
        chunks.extend(builder.build());
        chunks
    }

    /// Creates a chunk of one event.
    #[cfg(test)]
    pub(super) fn of_event(event: &[u8], revision: Revision) -> Self {
        let mut builder = ChunkBuilder::default();
        builder.push(event, revision);
        builder.build().expect("the chunk has an event")
    }

    /// Returns the bytes of all chunks, each counted once.
    pub fn total_bytes() -> usize {
        CHUNK_BYTES.load(Ordering::Relaxed)
    }

    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Returns the oldest revision in the chunk.
    pub fn first(&self) -> Revision {
        self.first
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Splits the events into pieces of at most `limit` bytes. An event above the limit is a piece of its own.
    pub fn pieces(&self, limit: usize) -> impl Iterator<Item = Bytes> {
        let mut start = 0;
        let mut ends = self.ends.iter().copied().peekable();
        std::iter::from_fn(move || {
            let mut end = ends.next()?;
            while let Some(next) = ends.next_if(|next| next - start <= limit) {
                end = next;
            }
            let piece = self.bytes.slice(start..end);
            start = end;
            Some(piece)
        })
    }
}

/// Collects the events of a chunk.
#[derive(Default)]
struct ChunkBuilder {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    first: Option<Revision>,
    last: Option<Revision>,
}

impl ChunkBuilder {
    fn push(&mut self, event: &[u8], revision: Revision) {
        self.bytes.extend_from_slice(event);
        self.ends.push(self.bytes.len());
        self.first.get_or_insert(revision);
        self.last = Some(revision);
    }

    fn build(self) -> Option<Chunk> {
        let (first, bytes) = (self.first?, Bytes::from_owner(CountedBytes::new(self.bytes)));
        Some(Chunk { bytes, ends: self.ends.into(), first })
    }
}
