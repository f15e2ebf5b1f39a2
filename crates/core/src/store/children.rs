//! The path segments below a prefix, page by page, for a person who browses the keys.
//!
//! The index is searched once for each child, and a child's own keys are skipped, so a page costs the same whether a
//! child has one key or a million. Names are not of one moment: each is of the time at which it was found. No values are
//! read.

use std::ops::Bound;

use super::{error::Result, handle::Store, sizes::ChildKind};
use crate::{
    auth::Caller,
    index::{First, TreeIndex},
    types::{Key, KeyRange, child_prefix},
};

/// Size in bytes at which a page ends. Its last name may exceed it, because a name can be as long as a request.
const PAGE_BYTES: usize = 1 << 20;
/// Maximum number of keys without a live version that are visited while the index is locked.
const STEP_KEYS: usize = 2_000;

/// A path segment below a prefix, or a key without a further `/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedChild {
    /// The whole key or prefix.
    pub name: Vec<u8>,
    pub kind: ChildKind,
}

/// A page of children in the order of their names.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ChildrenPage {
    pub children: Vec<NamedChild>,
    /// Whether there are children after the last one.
    pub more: bool,
}

impl Store {
    /// Returns at most `limit` children of a prefix after the child `after`; empty: from the first one. Returns fewer if
    /// their names reach [`PAGE_BYTES`]. The caller needs the right to read all keys below the prefix.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn children(&self, caller: &Caller, prefix: &[u8], after: &[u8], limit: usize) -> Result<ChildrenPage> {
        self.confirm().await?;
        let mut search = Search::new(prefix, after, limit);
        self.shared.check_read(caller, &search.range)?;
        while !search.step(&self.shared.index.read(), STEP_KEYS) {
            self.shared.steps.request().await;
        }
        Ok(search.finish())
    }
}

/// A search for children, in steps between which the index is not locked.
struct Search {
    prefix_len: usize,
    range: KeyRange,
    start: Bound<Vec<u8>>,
    limit: usize,
    found: Vec<NamedChild>,
    /// Length of the names found.
    bytes: usize,
    /// Whether there are children behind a full page.
    more: bool,
}

impl Search {
    fn new(prefix: &[u8], after: &[u8], limit: usize) -> Self {
        let start = match after.strip_prefix(prefix) {
            None | Some([]) => Bound::Included(prefix.to_vec()),
            Some([.., b'/']) => behind(after),
            Some(_) => Bound::Excluded(after.to_vec()),
        };
        let range = KeyRange::of_prefix(prefix);
        Self { prefix_len: prefix.len(), range, start, limit, found: Vec::new(), bytes: 0, more: false }
    }

    /// Visits at most `budget` keys. Returns whether the search has ended.
    fn step(&mut self, index: &TreeIndex, budget: usize) -> bool {
        let mut left = budget;
        loop {
            let start = match &self.start {
                Bound::Included(key) => Bound::Included(key.as_slice()),
                Bound::Excluded(key) => Bound::Excluded(key.as_slice()),
                Bound::Unbounded => return true,
            };
            let end = self.range.bounds().1;
            let is_past = |start: &[u8]| matches!(end, Bound::Excluded(end) if start >= end);
            if matches!(start, Bound::Included(start) | Bound::Excluded(start) if is_past(start)) {
                return true;
            }
            match index.first((start, end), index.head(), &mut left) {
                First::Found(_) if self.is_full() => {
                    self.more = true;
                    return true;
                }
                First::Found(key) => {
                    let (child, next) = self.child_of(key);
                    self.bytes += child.name.len();
                    self.found.push(child);
                    self.start = next;
                }
                First::Paused(key) => {
                    self.start = Bound::Excluded(key.to_vec());
                    return false;
                }
                First::End => return true,
            }
        }
    }

    fn is_full(&self) -> bool {
        self.found.len() >= self.limit || self.bytes >= PAGE_BYTES
    }

    /// Returns the child to which a key belongs, and where the next one starts.
    fn child_of(&self, key: &Key) -> (NamedChild, Bound<Vec<u8>>) {
        match child_prefix(key, self.prefix_len) {
            Some(name) => (NamedChild { name: name.to_vec(), kind: ChildKind::Prefix }, behind(name)),
            None => (NamedChild { name: key.to_vec(), kind: ChildKind::Key }, Bound::Excluded(key.to_vec())),
        }
    }

    fn finish(self) -> ChildrenPage {
        ChildrenPage { children: self.found, more: self.more }
    }
}

/// Returns the start of the keys behind all those with this prefix.
fn behind(prefix: &[u8]) -> Bound<Vec<u8>> {
    match KeyRange::of_prefix(prefix) {
        KeyRange::Span { end: Some(end), .. } => Bound::Included(end.to_vec()),
        KeyRange::Span { end: None, .. } | KeyRange::Single(_) => Bound::Unbounded,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Change, ChangeKind, EncodedKv, Revision, RowId, Version};

    /// Returns an index with these keys; a name that begins with `-` is deleted again.
    fn index(keys: &[&str]) -> TreeIndex {
        let mut index = TreeIndex::new();
        for (key, revision) in keys.iter().zip((2..).step_by(2)) {
            let name = key.trim_start_matches('-').as_bytes();
            let row = RowId::new(Revision(revision), 0);
            let version = Version { row, create_revision: Revision(revision), version: 1 };
            let kind = ChangeKind::put(EncodedKv::new(name, version, b"", None));
            index.apply(&Change { row, key: name.into(), kind, prev: None, prev_lease: None });
            if key.starts_with('-') {
                let row = RowId::new(Revision(revision + 1), 0);
                index.apply(&Change { row, key: name.into(), kind: ChangeKind::Delete, prev: None, prev_lease: None });
            }
        }
        index
    }

    /// Checks the pages of all children, and that the size of a step does not matter.
    #[track_caller]
    fn check(keys: &[&str], prefix: &str, limit: usize, want: &[&[&str]]) {
        let index = index(keys);
        for budget in [1, 2, 1_000] {
            let (mut after, mut pages) = (Vec::new(), Vec::new());
            loop {
                let mut search = Search::new(prefix.as_bytes(), &after, limit);
                while !search.step(&index, budget) {}
                let page = search.finish();
                let names: Vec<String> =
                    page.children.iter().map(|child| String::from_utf8_lossy(&child.name).into_owned()).collect();
                after = page.children.last().map(|child| child.name.clone()).unwrap_or_default();
                pages.push(names);
                if !page.more {
                    break;
                }
            }
            assert_eq!(pages, want, "{keys:?} below {prefix} with budget {budget}");
        }
    }

    #[test]
    fn children_are_paged_in_the_order_of_names() {
        check(&[], "", 2, &[&[]]);
        check(&["/r/a/1", "/r/a/2", "/r/b"], "", 2, &[&["/"]]);
        let keys = ["/r/a/1", "/r/a/2", "/r/a", "/r/b/x/y", "/r/c", "/s"];
        check(&keys, "/r/", 2, &[&["/r/a", "/r/a/"], &["/r/b/", "/r/c"]]);
        check(&keys, "/r/", 3, &[&["/r/a", "/r/a/", "/r/b/"], &["/r/c"]]);
        check(&keys, "/r/a", 9, &[&["/r/a", "/r/a/"]]);
        check(&["-a/1", "-a/2", "-b", "c", "-d/1", "d/2"], "", 1, &[&["c"], &["d/"]]);
    }

    #[test]
    fn pages_of_long_names_are_short() {
        let names = ["a", "b", "c", "d"].map(|letter| letter.repeat(PAGE_BYTES / 2));
        let [a, b, c, d] = names.each_ref().map(String::as_str);
        check(&[a, b, c, d], "", 100, &[&[a, b], &[c, d]]);
        let long = "b".repeat(2 * PAGE_BYTES);
        check(&["a", &long, "c"], "", 100, &[&["a", &long], &["c"]]);
    }
}
