//! Plans and writes a file.

use bytes::{Bytes, BytesMut};

use crate::{
    format::{BRANCH, ELEMENT_BYTES, HEADER_BYTES, IS_BUCKET, LEAF, Meta, PAGE_BYTES, header},
    tree::{Child, Content, Elements, Pages, Trees},
};

/// A key is not above the one before it in its bucket, or the bucket's name not above the name before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the keys of a bucket, or the buckets, are not in ascending order")]
pub struct Unordered;

/// The written content is not the planned one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the content of the file changed while it was written")]
pub struct LayoutDiffers;

/// Where the root is, and the number of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    root: u64,
    pages: u64,
}

impl Layout {
    /// Returns the size of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.pages * PAGE_BYTES as u64
    }
}

/// Computes the layout of a file from the lengths of its keys and values.
#[derive(Default)]
pub struct Planner(Buckets<usize>);

impl Planner {
    /// Begins the next bucket.
    ///
    /// # Errors
    ///
    /// [`Unordered`]: names have to ascend.
    pub fn bucket(&mut self, name: &'static str) -> Result<(), Unordered> {
        self.0.begin(name, &mut Nowhere)
    }

    /// Adds a key to the bucket that was begun last.
    ///
    /// # Errors
    ///
    /// [`Unordered`]: keys have to ascend.
    pub fn add(&mut self, key: Bytes, value_bytes: usize) -> Result<(), Unordered> {
        self.0.add(key, value_bytes, &mut Nowhere)
    }

    pub fn finish(self) -> Layout {
        self.0.finish(&mut Nowhere, |root| root.len())
    }
}

/// Writes a file with a layout. The bytes are taken with [`Writer::take`] from time to time.
pub struct Writer {
    buckets: Buckets<Bytes>,
    layout: Layout,
    written: Written,
}

impl Writer {
    pub fn new(layout: Layout) -> Self {
        let mut written = Written(BytesMut::new());
        for (id, transaction) in [(0, 1), (1, 0)] {
            let (root, high_water) = (layout.root, layout.pages);
            let meta = Meta { page_bytes: PAGE_BYTES as u32, root, high_water, transaction };
            written.0.extend_from_slice(&meta.encode(id));
        }
        Self { buckets: Buckets::default(), layout, written }
    }

    /// Begins the next bucket.
    ///
    /// # Errors
    ///
    /// [`Unordered`]: names have to ascend.
    pub fn bucket(&mut self, name: &'static str) -> Result<(), Unordered> {
        self.buckets.begin(name, &mut self.written)
    }

    /// Adds a key to the bucket that was begun last.
    ///
    /// # Errors
    ///
    /// [`Unordered`]: keys have to ascend.
    pub fn add(&mut self, key: Bytes, value: Bytes) -> Result<(), Unordered> {
        self.buckets.add(key, value, &mut self.written)
    }

    /// Returns the bytes that are complete and were not taken yet.
    pub fn take(&mut self) -> Bytes {
        self.written.0.split().freeze()
    }

    /// Returns the last bytes.
    ///
    /// # Errors
    ///
    /// [`LayoutDiffers`] if the content was not the planned one: the bytes before are those of no file.
    pub fn finish(mut self) -> Result<Bytes, LayoutDiffers> {
        let layout = self.buckets.finish(&mut self.written, |root| root);
        if layout != self.layout {
            return Err(LayoutDiffers);
        }
        Ok(self.written.0.freeze())
    }
}

/// The buckets of a file, in order.
struct Buckets<V> {
    trees: Trees<V>,
    /// The names and roots of those that are complete.
    complete: Vec<(Bytes, u64)>,
    /// The name of the one that was begun last.
    open: Option<Bytes>,
    /// The newest key of that bucket.
    last: Bytes,
}

impl<V: Content> Default for Buckets<V> {
    fn default() -> Self {
        Self { trees: Trees::new(), complete: Vec::new(), open: None, last: Bytes::new() }
    }
}

impl<V: Content> Buckets<V> {
    fn begin(&mut self, name: &'static str, out: &mut impl Pages<V>) -> Result<(), Unordered> {
        self.end(out);
        let name = Bytes::from_static(name.as_bytes());
        if self.complete.last().is_some_and(|(before, _)| *before >= name) {
            return Err(Unordered);
        }
        self.open = Some(name);
        Ok(())
    }

    fn add(&mut self, key: Bytes, value: V, out: &mut impl Pages<V>) -> Result<(), Unordered> {
        // No key is empty, so the first one of a bucket is above the empty one.
        if key <= self.last {
            return Err(Unordered);
        }
        self.last = key.clone();
        self.trees.add(key, value, out);
        Ok(())
    }

    fn end(&mut self, out: &mut impl Pages<V>) {
        if let Some(name) = self.open.take() {
            let root = self.trees.finish(out);
            self.complete.push((name, root));
        }
        self.last = Bytes::new();
    }

    /// Adds the leaf of the buckets, which is one page however long it is.
    fn finish(mut self, out: &mut impl Pages<V>, content: impl Fn(Bytes) -> V) -> Layout
    where
        V: Content,
    {
        self.end(out);
        let mut elements = Elements::default();
        for (name, root) in std::mem::take(&mut self.complete) {
            let sequence = 0_u64;
            let bucket = [root.to_le_bytes(), sequence.to_le_bytes()].concat();
            elements.push(name, content(Bytes::from(bucket)));
        }
        let root = self.trees.pages();
        let pages = root + elements.pages();
        out.root(root, elements);
        Layout { root, pages }
    }
}

/// Planned pages are not written.
struct Nowhere;

impl Pages<usize> for Nowhere {
    fn leaf(&mut self, _: u64, _: Elements<usize>) {}
    fn branch(&mut self, _: u64, _: Elements<Child>) {}
    fn root(&mut self, _: u64, _: Elements<usize>) {}
}

struct Written(BytesMut);

impl Pages<Bytes> for Written {
    fn leaf(&mut self, id: u64, elements: Elements<Bytes>) {
        self.write_leaf(id, 0, elements);
    }

    fn branch(&mut self, id: u64, elements: Elements<Child>) {
        let end = self.begin(id, BRANCH, &elements);
        let mut at = ELEMENT_BYTES * elements.all.len();
        for (key, Child(page)) in &elements.all {
            self.number(at);
            self.number(key.len());
            self.0.extend_from_slice(&page.to_le_bytes());
            at = at - ELEMENT_BYTES + key.len();
        }
        for (key, _) in &elements.all {
            self.0.extend_from_slice(key);
        }
        self.0.resize(end, 0);
    }

    fn root(&mut self, id: u64, elements: Elements<Bytes>) {
        self.write_leaf(id, IS_BUCKET, elements);
    }
}

impl Written {
    fn write_leaf(&mut self, id: u64, flags: u32, elements: Elements<Bytes>) {
        let end = self.begin(id, LEAF, &elements);
        // From the element to its key.
        let mut at = ELEMENT_BYTES * elements.all.len();
        for (key, value) in &elements.all {
            self.0.extend_from_slice(&flags.to_le_bytes());
            for number in [at, key.len(), value.len()] {
                self.number(number);
            }
            at = at - ELEMENT_BYTES + key.len() + value.len();
        }
        for (key, value) in &elements.all {
            self.0.extend_from_slice(key);
            self.0.extend_from_slice(value);
        }
        self.0.resize(end, 0);
    }

    /// Writes the header of a page. Returns where the page ends.
    fn begin<C: Content>(&mut self, id: u64, flags: u16, elements: &Elements<C>) -> usize {
        let start = self.0.len();
        self.0.reserve(elements.bytes.next_multiple_of(PAGE_BYTES));
        let count = u16::try_from(elements.all.len()).unwrap_or(u16::MAX);
        let overflow = u32::try_from(elements.pages() - 1).unwrap_or(u32::MAX);
        self.0.extend_from_slice(&header(id, flags, count, overflow));
        debug_assert_eq!(self.0.len(), start + HEADER_BYTES, "the header is complete");
        start + elements.bytes.next_multiple_of(PAGE_BYTES)
    }

    fn number(&mut self, number: usize) {
        self.0.extend_from_slice(&u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes());
    }
}
