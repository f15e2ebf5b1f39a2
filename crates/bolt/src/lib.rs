//! Files of bbolt, the database in which etcd keeps its data and its snapshots.
//!
//! A [`Writer`] streams a new file from its first byte to its last. The first pages contain the numbers of the last
//! ones, so a [`Planner`] computes them before, from the lengths of all keys and values. A [`Reader`] reads a file that
//! anybody may have made: it checks everything before it uses it, and its memory does not depend on what the file
//! states.
//!
//! ```text
//!   page 0, 1   metas: page size, root, number of pages, checksum
//!   page 2 ...  of each bucket: leaves (keys with values), and branches (keys with pages) after their children
//!   last page   the root leaf: the buckets' names and the pages at their roots
//! ```
//!
//! Not supported: buckets in buckets, free lists, transactions, files of big-endian machines. The crate knows nothing of
//! what etcd stores.

mod format;
mod page;
mod reader;
#[cfg(test)]
mod tests;
mod tree;
mod writer;

pub use self::{
    reader::{Bucket, Cursor, Error, Reader, Result, Source},
    writer::{Layout, LayoutDiffers, Planner, Unordered, Writer},
};
