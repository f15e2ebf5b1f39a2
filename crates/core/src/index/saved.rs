//! The index as bytes, in blocks of whole keys, so that a start need not read the whole log.
//!
//! The keys of a block are saved in one step, and changes may be applied between two steps. So the blocks show no single
//! revision: each key is as it was at the head of the first step or later. [`TreeIndex::restore`] skips the changes that a
//! key already has, so the index is exact once the log was read from that head on.
//!
//! ```text
//! key:        length, bytes
//! newest:     row, create_revision, version, lease
//! history:    number of closed generations, each: create_revision, first_version, number of puts, rows, tombstone;
//!             number of earlier puts, rows
//! row:        revision, sub
//! ```
//!
//! All numbers are varints, as in protobuf.

use std::{collections::BTreeMap, ops::Bound};

use prost::encoding::{decode_varint, encode_varint};

use super::{
    TreeIndex,
    key_index::{Generation, History, KeyIndex, Newest},
};
use crate::types::{Key, LeaseId, Revision, RowId};

/// Bytes at which a step ends. A key with a long history may exceed them.
const STEP_BYTES: usize = 1 << 18;
/// Each part copies the tree before it, so more parts need less memory and more time.
const PARTS: usize = 4;
const PART_KEYS_MIN: usize = 1 << 16;
/// The expected number of keys comes from a file, so it may be wrong.
const PART_KEYS_MAX: usize = 1 << 24;

/// The bytes are no block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a block of the saved index is damaged")]
pub struct InvalidBlock;

impl TreeIndex {
    /// Appends some of the keys after `after` to `block`, at most `keys_max`. Returns the last one if there may be more.
    pub fn save_step(&self, after: Option<&Key>, keys_max: usize, block: &mut Vec<u8>) -> Option<Key> {
        let start = after.map_or(Bound::Unbounded, |after| Bound::Excluded(after.as_slice()));
        for (number, (key, index)) in (1..).zip(self.keys.range::<[u8], _>((start, Bound::Unbounded))) {
            encode_varint(key.len() as u64, block);
            block.extend_from_slice(key);
            encode(index, block);
            if number == keys_max || block.len() >= STEP_BYTES {
                return Some(key.clone());
            }
        }
        None
    }
}

/// Builds an index from blocks.
///
/// A tree of full nodes is built from a sorted list, and a list of all keys would need as much memory again as the tree.
/// Therefore the keys move to the tree in [`PARTS`] parts.
#[derive(Debug)]
pub struct SavedIndexLoader {
    tree: BTreeMap<Key, KeyIndex>,
    /// The next part: keys behind those of the tree.
    part: Vec<(Key, KeyIndex)>,
    part_keys: usize,
    live: usize,
    /// The newest revision of all keys.
    newest: Revision,
}

impl SavedIndexLoader {
    /// Expects about this number of keys.
    pub fn new(keys: usize) -> Self {
        Self::in_parts_of((keys / PARTS + 1).clamp(PART_KEYS_MIN, PART_KEYS_MAX))
    }

    /// Moves the keys to the tree whenever there are this many.
    pub(super) fn in_parts_of(part_keys: usize) -> Self {
        let part = Vec::with_capacity(part_keys);
        Self { tree: BTreeMap::new(), part, part_keys, live: 0, newest: Revision::EMPTY }
    }

    /// Adds the keys of the next block.
    ///
    /// # Errors
    ///
    /// If the bytes are not what [`TreeIndex::save_step`] appended after the block before.
    pub fn add(&mut self, mut block: &[u8]) -> Result<(), InvalidBlock> {
        while !block.is_empty() {
            let len = usize::try_from(number(&mut block)?).map_err(|_| InvalidBlock)?;
            let key = Key::from(block.split_off(..len).ok_or(InvalidBlock)?);
            let last = self.part.last().map(|(last, _)| last);
            if last.or_else(|| Some(self.tree.last_key_value()?.0)).is_some_and(|last| *last >= key) {
                return Err(InvalidBlock);
            }
            let index = decode(&mut block)?;
            self.newest = self.newest.max(index.newest.row.revision);
            self.live += usize::from(index.is_live());
            self.part.push((key, index));
            if self.part.len() == self.part_keys {
                self.move_part();
                self.part.reserve_exact(self.part_keys);
            }
        }
        Ok(())
    }

    /// Returns the newest revision of the keys so far.
    pub fn newest(&self) -> Revision {
        self.newest
    }

    /// Returns the index, whose head is that of the first step, or lower.
    pub fn finish(mut self, head: Revision, compact_revision: Option<Revision>) -> TreeIndex {
        self.move_part();
        TreeIndex { keys: self.tree, live: self.live, head, compact_revision }
    }

    fn move_part(&mut self) {
        let mut part: BTreeMap<Key, KeyIndex> = std::mem::take(&mut self.part).into_iter().collect();
        if self.tree.is_empty() {
            self.tree = part;
        } else {
            self.tree.append(&mut part);
        }
    }
}

fn encode(index: &KeyIndex, block: &mut Vec<u8>) {
    let Newest { row, create_revision, version } = index.newest;
    let none = History::default();
    let History { lease, closed, earlier } = index.history.as_deref().unwrap_or(&none);
    encode_row(row, block);
    for number in [create_revision.0, version, LeaseId::to_wire(*lease)] {
        encode_varint(number.cast_unsigned(), block);
    }
    encode_varint(closed.len() as u64, block);
    for generation in closed {
        encode_varint(generation.create_revision.0.cast_unsigned(), block);
        encode_varint(generation.first_version.cast_unsigned(), block);
        encode_rows(&generation.puts, block);
        encode_row(generation.tombstone, block);
    }
    encode_rows(earlier, block);
}

fn encode_rows(rows: &[RowId], block: &mut Vec<u8>) {
    encode_varint(rows.len() as u64, block);
    for row in rows {
        encode_row(*row, block);
    }
}

fn encode_row(row: RowId, block: &mut Vec<u8>) {
    encode_varint(row.revision.0.cast_unsigned(), block);
    encode_varint(u64::from(row.sub), block);
}

fn decode(block: &mut &[u8]) -> Result<KeyIndex, InvalidBlock> {
    let newest = Newest { row: row(block)?, create_revision: Revision(number(block)?), version: number(block)? };
    let lease = LeaseId::from_wire(number(block)?);
    let mut closed = Vec::new();
    for _ in 0..number(block)? {
        closed.push(Generation {
            create_revision: Revision(number(block)?),
            first_version: number(block)?,
            puts: rows(block)?,
            tombstone: row(block)?,
        });
    }
    let earlier = rows(block)?;
    let has_history = lease.is_some() || !closed.is_empty() || !earlier.is_empty();
    Ok(KeyIndex { newest, history: has_history.then(|| Box::new(History { lease, closed, earlier })) })
}

fn rows(block: &mut &[u8]) -> Result<Vec<RowId>, InvalidBlock> {
    let len = number(block)?;
    (0..len).map(|_| row(block)).collect()
}

fn row(block: &mut &[u8]) -> Result<RowId, InvalidBlock> {
    let revision = Revision(number(block)?);
    Ok(RowId::new(revision, u32::try_from(number(block)?).map_err(|_| InvalidBlock)?))
}

fn number(block: &mut &[u8]) -> Result<i64, InvalidBlock> {
    decode_varint(block).map(u64::cast_signed).map_err(|_| InvalidBlock)
}
