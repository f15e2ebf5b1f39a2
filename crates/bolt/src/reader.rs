//! Reads a file that anybody may have made.

use std::{fs::File, io};

use bytes::Bytes;

use crate::{
    format::{BUCKET_BYTES, FIRST_PAGE, LEAF, META_END, Meta, header, u64_at},
    page::{Header, Kind, Page, Stored},
};

/// Maximum number of levels of a tree. A tree of full pages with that many levels exceeds every disk.
const DEPTH_MAX: usize = 64;
/// Maximum length in bytes of a page with its further pages. It bounds the memory for one value.
const PAGE_BYTES_MAX: u64 = 256 << 20;
/// Sizes of pages that bbolt knows: powers of two within these.
const PAGE_SIZES: std::ops::RangeInclusive<u32> = 1 << 10..=16 << 20;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it is not a file of bbolt: {0}")]
    NotBolt(String),
    #[error("it is damaged: page {page} {what}")]
    Damaged { page: u64, what: String },
    /// What a visitor of keys and values has found.
    #[error("it is damaged: {0}")]
    Content(String),
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn page(page: u64, what: impl Into<String>) -> Self {
        Self::Damaged { page, what: what.into() }
    }
}

/// Where the bytes of a file come from.
pub trait Source {
    /// Fills the buffer with the bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// If there are fewer bytes, or they cannot be read.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl Source for File {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, buffer, offset)
    }
}

impl Source for &[u8] {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(io::Error::other)?;
        let bytes = start.checked_add(buffer.len()).and_then(|end| self.get(start..end));
        buffer.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// A file.
#[derive(Debug)]
pub struct Reader<S> {
    source: S,
    page_bytes: u32,
    high_water: u64,
    root: Bucket,
}

/// The root of a bucket.
#[derive(Clone, Debug)]
pub enum Bucket {
    Page(u64),
    /// A leaf that is the value of the bucket's element.
    Inline(Bytes),
}

/// Buckets with their names, in order.
type NamedBuckets = Vec<(Bytes, Bucket)>;

impl Bucket {
    /// Returns a bucket without keys.
    pub fn empty() -> Self {
        Self::Inline(Bytes::copy_from_slice(&header(0, LEAF, 0, 0)))
    }
}

impl<S: Source> Reader<S> {
    /// Opens a file of `bytes` bytes; what follows them, such as a checksum, is not read.
    ///
    /// # Errors
    ///
    /// [`Error::NotBolt`] if there is no valid meta, or the file is shorter than the meta states.
    pub fn open(source: S, bytes: u64) -> Result<Self> {
        let meta = find_meta(&source, bytes)?;
        let not_bolt = |what: String| Err(Error::NotBolt(what));
        if !PAGE_SIZES.contains(&meta.page_bytes) || !meta.page_bytes.is_power_of_two() {
            return not_bolt(format!("its pages have {} bytes", meta.page_bytes));
        }
        let needed = meta.high_water.checked_mul(u64::from(meta.page_bytes));
        match needed {
            Some(needed) if needed <= bytes => {}
            Some(_) | None => {
                return not_bolt(format!(
                    "it has {bytes} bytes and states {} pages of {} bytes: it is truncated",
                    meta.high_water, meta.page_bytes
                ));
            }
        }
        Ok(Self { source, page_bytes: meta.page_bytes, high_water: meta.high_water, root: Bucket::Page(meta.root) })
    }

    /// Returns the bytes of the pages that the file may use.
    pub fn bytes(&self) -> u64 {
        self.high_water * u64::from(self.page_bytes)
    }

    /// Returns the buckets with their names, in order.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if something other than a bucket is among them.
    pub fn buckets(&self) -> Result<Vec<(Bytes, Bucket)>> {
        Ok(self.read_buckets()?.0)
    }

    /// Returns also the pages that were read.
    fn read_buckets(&self) -> Result<(NamedBuckets, Option<Used>)> {
        let mut cursor = Cursor::new(self.root.clone(), Expected::Buckets);
        cursor.used = Some(Used::default());
        let mut buckets = Vec::new();
        while let Some((name, value)) = cursor.next(self)? {
            let at = cursor.page();
            let root = u64_at(&value, 0).filter(|_| value.len() >= BUCKET_BYTES);
            let root = root.ok_or_else(|| Error::page(at, "has a bucket whose value is too short"))?;
            let bucket = if root == 0 { Bucket::Inline(value.slice(BUCKET_BYTES..)) } else { Bucket::Page(root) };
            buckets.push((name, bucket));
        }
        Ok((buckets, cursor.used))
    }

    /// Returns a cursor at the first key of a bucket.
    pub fn cursor(&self, bucket: &Bucket) -> Cursor {
        Cursor::new(bucket.clone(), Expected::Values)
    }

    /// Visits all keys of all buckets, in order, and checks that no page is used twice.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] with the first page that is wrong, or [`Error::Content`] with the visitor's text.
    pub fn visit(&self, mut visit: impl FnMut(&[u8], Bytes, Bytes) -> std::result::Result<(), String>) -> Result<()> {
        let (buckets, mut used) = self.read_buckets()?;
        for (name, bucket) in buckets {
            let mut cursor = Cursor { used, ..self.cursor(&bucket) };
            while let Some((key, value)) = cursor.next(self)? {
                visit(&name, key, value).map_err(Error::Content)?;
            }
            used = cursor.used;
        }
        Ok(())
    }

    fn page(&self, id: u64) -> Result<(Page, u32)> {
        if !(FIRST_PAGE..self.high_water).contains(&id) {
            return Err(Error::page(id, format!("is not between {FIRST_PAGE} and {}", self.high_water)));
        }
        let offset = id * u64::from(self.page_bytes);
        let first = self.page_bytes as usize;
        let mut page = vec![0; first];
        self.source.read_exact_at(&mut page, offset)?;
        let header = Header::read(&page, id, id)?;
        let pages = u64::from(header.overflow) + 1;
        if pages > self.high_water - id {
            return Err(Error::page(id, format!("is longer than the file: it has {pages} pages")));
        }
        let bytes = pages * u64::from(self.page_bytes);
        let len = usize::try_from(bytes).ok().filter(|_| bytes <= PAGE_BYTES_MAX);
        let len = len.ok_or_else(|| Error::page(id, format!("is longer than {} MiB", PAGE_BYTES_MAX >> 20)))?;
        if len > first {
            page.reserve_exact(len - first);
            page.resize(len, 0);
            self.source.read_exact_at(&mut page[first..], offset + first as u64)?;
        }
        Ok((Page::new(header, id, page.into())?, header.overflow))
    }
}

/// Finds the newest valid meta. The first one is at the start; the second one follows after one page, whose size is
/// unknown if the first one is damaged.
fn find_meta(source: &impl Source, bytes: u64) -> Result<Meta> {
    let read = |offset: u64| -> Result<Option<Meta>> {
        if bytes < offset + META_END as u64 {
            return Ok(None);
        }
        let mut page = [0; META_END];
        source.read_exact_at(&mut page, offset)?;
        Ok(Meta::decode(&page))
    };
    let first = read(0)?;
    let second = match first {
        Some(first) => read(u64::from(first.page_bytes))?,
        None => {
            let mut sizes = (10..=24).map(|power| 1_u64 << power);
            sizes.find_map(|offset| read(offset).transpose()).transpose()?
        }
    };
    let newest = first.into_iter().chain(second).max_by_key(|meta| meta.transaction);
    newest.ok_or_else(|| Error::NotBolt("neither of its first two pages is valid".to_owned()))
}

/// The pages that were read, one bit each.
#[derive(Default)]
struct Used(Vec<u64>);

impl Used {
    /// Adds a page. Returns false if it is there already.
    fn insert(&mut self, id: u64) -> bool {
        let (word, bit) = (usize::try_from(id / 64).unwrap_or(usize::MAX), 1 << (id % 64));
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        let is_new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        is_new
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Expected {
    Values,
    Buckets,
}

/// A position in a bucket. It holds one page of each level.
pub struct Cursor {
    expected: Expected,
    /// `None`: it was read.
    root: Option<Bucket>,
    /// The pages from the root to a leaf, each with the index of the next element.
    path: Vec<(Page, usize)>,
    /// The last key that was returned.
    last: Option<Bytes>,
    used: Option<Used>,
}

impl Cursor {
    fn new(root: Bucket, expected: Expected) -> Self {
        Self { expected, root: Some(root), path: Vec::new(), last: None, used: None }
    }

    /// Returns the next key and its value; `None` at the end of the bucket.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] with the first page that is wrong.
    pub fn next<S: Source>(&mut self, reader: &Reader<S>) -> Result<Option<(Bytes, Bytes)>> {
        if let Some(root) = self.root.take() {
            self.begin(reader, root)?;
        }
        loop {
            let Some((page, index)) = self.path.last_mut() else { return Ok(None) };
            if *index == page.len() {
                self.path.pop();
                continue;
            }
            let (at, key) = (*index, page.key(*index));
            *index += 1;
            let id = page.id;
            match (page.child(at), page.stored(at)) {
                (Some(child), _) => {
                    // The first key of a child may be above the key that its parent has for it, and not below.
                    if self.last.as_ref().is_some_and(|last| *last >= key) {
                        return Err(Error::page(id, "has a key that its child before exceeds"));
                    }
                    self.descend(reader, child, key)?;
                }
                (_, Some(stored)) => return self.stored(id, key, stored).map(Some),
                (None, None) => return Err(Error::page(id, "has an element without content")),
            }
        }
    }

    /// Returns the page of the key that was returned last.
    fn page(&self) -> u64 {
        self.path.last().map_or(0, |(page, _)| page.id)
    }

    fn stored(&mut self, id: u64, key: Bytes, stored: Stored) -> Result<(Bytes, Bytes)> {
        if self.last.as_ref().is_some_and(|last| *last >= key) {
            return Err(Error::page(id, "has a key that is not above those of the page before"));
        }
        self.last = Some(key.clone());
        match (stored, self.expected) {
            (Stored::Value(value), Expected::Values) | (Stored::Bucket(value), Expected::Buckets) => Ok((key, value)),
            (Stored::Bucket(_), Expected::Values) => Err(Error::page(id, "has a bucket in a bucket")),
            (Stored::Value(_), Expected::Buckets) => Err(Error::page(id, "has a value beside the buckets")),
        }
    }

    fn begin<S: Source>(&mut self, reader: &Reader<S>, root: Bucket) -> Result<()> {
        match root {
            Bucket::Page(id) => self.enter(reader, id),
            Bucket::Inline(bytes) => {
                let id = self.page();
                let header = Header::read(&bytes, id, 0)?;
                let page = Page::new(header, id, bytes)?;
                if page.kind != Kind::Leaf || header.overflow != 0 {
                    return Err(Error::page(id, "has an inline bucket that is not one leaf"));
                }
                self.path.push((page, 0));
                Ok(())
            }
        }
    }

    fn descend<S: Source>(&mut self, reader: &Reader<S>, id: u64, least: Bytes) -> Result<()> {
        self.enter(reader, id)?;
        match self.path.last() {
            Some((page, _)) if page.len() > 0 && page.key(0) < least => {
                Err(Error::page(id, "has a key below the one that its parent has for it"))
            }
            Some((page, _)) if page.len() == 0 => Err(Error::page(id, "is an empty leaf below a branch")),
            Some(_) | None => Ok(()),
        }
    }

    fn enter<S: Source>(&mut self, reader: &Reader<S>, id: u64) -> Result<()> {
        if self.path.len() == DEPTH_MAX {
            return Err(Error::page(id, format!("is deeper than {DEPTH_MAX} levels")));
        }
        let (page, overflow) = reader.page(id)?;
        if let Some(used) = &mut self.used {
            for id in id..=id + u64::from(overflow) {
                if !used.insert(id) {
                    return Err(Error::page(id, "is used twice"));
                }
            }
        }
        self.path.push((page, 0));
        Ok(())
    }
}
