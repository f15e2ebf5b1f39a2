//! Encoded events, made once and shared by every watch that gets them.

use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

use super::Flavor;
use crate::types::{Change, EncodedEvent, Revision};

/// Events after which a chunk ends with its revision, in bytes.
const CHUNK_BYTES_MAX: usize = if cfg!(test) { 64 } else { 1 << 20 };

/// Bytes of all chunks that some watch has not sent yet, and of those in a run with them. The process has one memory,
/// whatever it is used for.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// Counted as long as anything refers to them.
struct Counted(Vec<u8>);

impl Counted {
    fn new(bytes: Vec<u8>) -> Self {
        WAITING.fetch_add(bytes.len(), Ordering::Relaxed);
        Self(bytes)
    }
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        WAITING.fetch_sub(self.0.len(), Ordering::Relaxed);
    }
}

/// The events of one or more whole revisions, encoded one behind the other as `WatchResponse.events`.
#[derive(Debug)]
pub struct Chunk {
    bytes: Bytes,
    /// Where each event ends in `bytes`.
    ends: Box<[usize]>,
    first: Revision,
}

impl Chunk {
    /// Cuts the changes that the flavor admits into chunks, at borders of revisions.
    pub fn cut<'a>(
        changes: impl IntoIterator<Item = &'a Change>,
        flavor: Flavor,
        mut encode: impl FnMut(&'a Change, Flavor) -> EncodedEvent,
    ) -> Vec<Self> {
        let mut chunks = Vec::new();
        let mut open = Open::default();
        for change in changes {
            if !flavor.admits(change) {
                continue;
            }
            let revision = change.row.revision;
            if open.last.is_some_and(|last| last != revision) && open.bytes.len() >= CHUNK_BYTES_MAX {
                chunks.extend(std::mem::take(&mut open).close());
            }
            open.push(encode(change, flavor).as_bytes(), revision);
        }
        chunks.extend(open.close());
        chunks
    }

    /// Of one event.
    #[cfg(test)]
    pub(super) fn of(event: &[u8], revision: Revision) -> Self {
        let mut open = Open::default();
        open.push(event, revision);
        open.close().expect("it has an event")
    }

    /// What all chunks take together, each counted once.
    pub fn waiting_bytes() -> usize {
        WAITING.load(Ordering::Relaxed)
    }

    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The oldest revision in it.
    pub fn first(&self) -> Revision {
        self.first
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Its events in pieces of at most `limit` bytes where single events allow it.
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

impl Flavor {
    pub(super) fn admits(self, change: &Change) -> bool {
        if change.is_delete() { self.deletes } else { self.puts }
    }
}

#[derive(Default)]
struct Open {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    first: Option<Revision>,
    last: Option<Revision>,
}

impl Open {
    fn push(&mut self, event: &[u8], revision: Revision) {
        self.bytes.extend_from_slice(event);
        self.ends.push(self.bytes.len());
        self.first.get_or_insert(revision);
        self.last = Some(revision);
    }

    fn close(self) -> Option<Chunk> {
        let (first, bytes) = (self.first?, Bytes::from_owner(Counted::new(self.bytes)));
        Some(Chunk { bytes, ends: self.ends.into(), first })
    }
}
