//! The tree of a bucket while it grows from its leaves up.

use bytes::Bytes;

use crate::format::{ELEMENT_BYTES, FIRST_PAGE, HEADER_BYTES, PAGE_BYTES};

/// Minimum number of children of a branch, except if the branch is alone on its level.
const CHILDREN_MIN: usize = 2;

/// What a page stores for a key.
pub(crate) trait Content {
    /// Bytes that the page needs for it in addition to the element and the key.
    fn len(&self) -> usize;
}

impl Content for Bytes {
    fn len(&self) -> usize {
        self.as_ref().len()
    }
}

/// A length stands for the value when a file is planned.
impl Content for usize {
    fn len(&self) -> usize {
        *self
    }
}

/// The page of a child. It is in the element.
#[derive(Clone, Copy)]
pub(crate) struct Child(pub(crate) u64);

impl Content for Child {
    fn len(&self) -> usize {
        0
    }
}

/// A page that has no place in the file yet.
pub(crate) struct Elements<C> {
    pub(crate) all: Vec<(Bytes, C)>,
    /// Bytes of the page with these elements.
    pub(crate) bytes: usize,
}

impl<C> Default for Elements<C> {
    fn default() -> Self {
        Self { all: Vec::new(), bytes: HEADER_BYTES }
    }
}

impl<C: Content> Elements<C> {
    fn fits(&self, key: &Bytes, content: &C) -> bool {
        self.bytes + ELEMENT_BYTES + key.len() + content.len() <= PAGE_BYTES
    }

    pub(crate) fn push(&mut self, key: Bytes, content: C) {
        self.bytes += ELEMENT_BYTES + key.len() + content.len();
        self.all.push((key, content));
    }

    fn pop(&mut self) -> Option<(Bytes, C)> {
        let (key, content) = self.all.pop()?;
        self.bytes -= ELEMENT_BYTES + key.len() + content.len();
        Some((key, content))
    }

    /// Returns the number of pages that it occupies.
    pub(crate) fn pages(&self) -> u64 {
        self.bytes.div_ceil(PAGE_BYTES) as u64
    }
}

/// Receives the pages of a tree in the order in which they are in the file.
pub(crate) trait Pages<V> {
    fn leaf(&mut self, id: u64, elements: Elements<V>);
    fn branch(&mut self, id: u64, elements: Elements<Child>);
    /// The last page of the file, a leaf of buckets.
    fn root(&mut self, id: u64, elements: Elements<V>);
}

/// The trees of all buckets, one after another. On each level one page is open: the leaf, its parent, and so on. Memory
/// is proportional to the height.
pub(crate) struct Trees<V> {
    /// The next page.
    next: u64,
    leaf: Elements<V>,
    /// The open branches, the parents of leaves first.
    branches: Vec<Elements<Child>>,
}

impl<V: Content> Trees<V> {
    pub(crate) fn new() -> Self {
        Self { next: FIRST_PAGE, leaf: Elements::default(), branches: Vec::new() }
    }

    /// Returns the number of pages, those of the metas included.
    pub(crate) fn pages(&self) -> u64 {
        self.next
    }

    pub(crate) fn add(&mut self, key: Bytes, value: V, out: &mut impl Pages<V>) {
        if !self.leaf.all.is_empty() && !self.leaf.fits(&key, &value) {
            self.close_leaf(out);
        }
        self.leaf.push(key, value);
    }

    /// Ends a tree. Returns its root.
    pub(crate) fn finish(&mut self, out: &mut impl Pages<V>) -> u64 {
        if self.branches.is_empty() {
            return self.place_leaf(out).1;
        }
        self.close_leaf(out);
        let mut level = 0;
        loop {
            let branch = std::mem::take(&mut self.branches[level]);
            let root = match branch.all.as_slice() {
                [(_, Child(only))] => *only,
                _ => {
                    let (first, id) = self.place_branch(branch, out);
                    if level + 1 < self.branches.len() {
                        self.add_child(level + 1, first, id, out);
                    }
                    id
                }
            };
            level += 1;
            if level == self.branches.len() {
                self.branches.clear();
                return root;
            }
        }
    }

    fn close_leaf(&mut self, out: &mut impl Pages<V>) {
        let (first, id) = self.place_leaf(out);
        self.add_child(0, first, id, out);
    }

    fn add_child(&mut self, level: usize, key: Bytes, id: u64, out: &mut impl Pages<V>) {
        if level == self.branches.len() {
            self.branches.push(Elements::default());
        }
        let branch = &mut self.branches[level];
        if branch.all.len() > CHILDREN_MIN && !branch.fits(&key, &Child(id)) {
            // The last child moves to the next branch, so that this branch never has one child only.
            let last = branch.pop();
            let full = std::mem::take(branch);
            if let Some((key, child)) = last {
                branch.push(key, child);
            }
            branch.push(key, Child(id));
            let (first, id) = self.place_branch(full, out);
            self.add_child(level + 1, first, id, out);
        } else {
            branch.push(key, Child(id));
        }
    }

    /// Gives the open leaf its place. Returns its first key, empty if there is none, and its page.
    fn place_leaf(&mut self, out: &mut impl Pages<V>) -> (Bytes, u64) {
        let leaf = std::mem::take(&mut self.leaf);
        let (first, id) = self.place(&leaf);
        out.leaf(id, leaf);
        (first, id)
    }

    fn place_branch(&mut self, branch: Elements<Child>, out: &mut impl Pages<V>) -> (Bytes, u64) {
        let (first, id) = self.place(&branch);
        out.branch(id, branch);
        (first, id)
    }

    fn place<C: Content>(&mut self, elements: &Elements<C>) -> (Bytes, u64) {
        let id = self.next;
        self.next += elements.pages();
        (elements.all.first().map_or_else(Bytes::new, |(key, _)| key.clone()), id)
    }
}
