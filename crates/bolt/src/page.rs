//! Pages of a file that is read, checked when they are made.

use std::ops::Range;

use bytes::Bytes;

use crate::{
    format::{BRANCH, ELEMENT_BYTES, HEADER_BYTES, IS_BUCKET, LEAF, u16_at, u32_at, u64_at},
    reader::{Error, Result},
};

/// Maximum length of a key in bbolt.
const KEY_BYTES_MAX: usize = 32_768;

/// A leaf or a branch.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    pub(crate) id: u64,
    pub(crate) kind: Kind,
    bytes: Bytes,
    elements: Vec<Element>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Branch,
    Leaf,
}

#[derive(Clone, Debug)]
struct Element {
    key: Range<usize>,
    content: Content,
}

#[derive(Clone, Debug)]
enum Content {
    Child(u64),
    Value(Range<usize>),
    Bucket(Range<usize>),
}

/// What a leaf stores for a key.
#[derive(Clone, Debug)]
pub(crate) enum Stored {
    Value(Bytes),
    Bucket(Bytes),
}

/// The header of a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) id: u64,
    kind: Kind,
    count: u16,
    /// Number of further pages that it occupies.
    pub(crate) overflow: u32,
}

impl Header {
    /// Reads the header of the page `at`, which `id` must confirm.
    pub(crate) fn read(bytes: &[u8], at: u64, id: u64) -> Result<Self> {
        let short = || Error::page(at, "is cut off");
        let header = Self {
            id: u64_at(bytes, 0).ok_or_else(short)?,
            kind: match u16_at(bytes, 8).ok_or_else(short)? {
                BRANCH => Kind::Branch,
                LEAF => Kind::Leaf,
                flags => return Err(Error::page(at, format!("is neither leaf nor branch: its flags are {flags:#x}"))),
            },
            count: u16_at(bytes, 10).ok_or_else(short)?,
            overflow: u32_at(bytes, 12).ok_or_else(short)?,
        };
        if header.id != id {
            return Err(Error::page(at, format!("states that it is page {}", header.id)));
        }
        Ok(header)
    }
}

impl Page {
    /// Checks a page: its elements are inside of it, do not overlap, and have ascending keys.
    pub(crate) fn new(header: Header, at: u64, bytes: Bytes) -> Result<Self> {
        let Header { kind, count, .. } = header;
        let mut page = Self { id: at, kind, elements: Vec::with_capacity(count.into()), bytes };
        if kind == Kind::Branch && count == 0 {
            return Err(Error::page(at, "is a branch without children"));
        }
        let mut used = HEADER_BYTES + ELEMENT_BYTES * usize::from(count);
        let elements_end = used;
        for index in 0..usize::from(count) {
            let element = page.element(index, elements_end)?;
            used += element.key.len() + element.content.len();
            let before = page.elements.last().map(|before| &page.bytes[before.key.clone()]);
            if before.is_some_and(|before| before >= &page.bytes[element.key.clone()]) {
                return Err(Error::page(at, format!("has keys out of order at element {index}")));
            }
            page.elements.push(element);
        }
        if used > page.bytes.len() {
            return Err(Error::page(at, "has elements that overlap"));
        }
        Ok(page)
    }

    fn element(&self, index: usize, elements_end: usize) -> Result<Element> {
        let wrong = |what: &str| Error::page(self.id, format!("element {index} {what}"));
        let start = HEADER_BYTES + ELEMENT_BYTES * index;
        let number = |at: usize| -> Result<usize> {
            let number = u32_at(&self.bytes, start + at).ok_or_else(|| wrong("is cut off"))?;
            usize::try_from(number).map_err(|_| wrong("is too long"))
        };
        let (place, key_bytes) = match self.kind {
            Kind::Branch => (number(0)?, number(4)?),
            Kind::Leaf => (number(4)?, number(8)?),
        };
        // The place counts from the element's own first byte.
        let key_start = start.checked_add(place).filter(|place| *place >= elements_end);
        let key_start = key_start.ok_or_else(|| wrong("lies in the list of elements"))?;
        let key_end = key_start.checked_add(key_bytes).filter(|end| *end <= self.bytes.len());
        let key = key_start..key_end.ok_or_else(|| wrong("has a key outside of the page"))?;
        // Only the first key of a branch at the edge of a tree may be empty.
        if key.len() > KEY_BYTES_MAX || (key.is_empty() && !(self.kind == Kind::Branch && index == 0)) {
            return Err(wrong("has a key that is empty or longer than 32,768 bytes"));
        }
        let content = match self.kind {
            Kind::Branch => Content::Child(u64_at(&self.bytes, start + 8).ok_or_else(|| wrong("is cut off"))?),
            Kind::Leaf => {
                let end = key.end.checked_add(number(12)?).filter(|end| *end <= self.bytes.len());
                let value = key.end..end.ok_or_else(|| wrong("has a value outside of the page"))?;
                match number(0)? {
                    0 => Content::Value(value),
                    flags if flags == IS_BUCKET as usize => Content::Bucket(value),
                    flags => return Err(wrong(&format!("has the unknown flags {flags:#x}"))),
                }
            }
        };
        Ok(Element { key, content })
    }

    pub(crate) fn len(&self) -> usize {
        self.elements.len()
    }

    /// Returns the key of an element; the index is below [`Page::len`].
    pub(crate) fn key(&self, index: usize) -> Bytes {
        self.bytes.slice(self.elements[index].key.clone())
    }

    /// Returns the page of a child, if this is a branch.
    pub(crate) fn child(&self, index: usize) -> Option<u64> {
        match self.elements.get(index)?.content {
            Content::Child(id) => Some(id),
            Content::Value(_) | Content::Bucket(_) => None,
        }
    }

    /// Returns what is stored for a key, if this is a leaf.
    pub(crate) fn stored(&self, index: usize) -> Option<Stored> {
        match &self.elements.get(index)?.content {
            Content::Child(_) => None,
            Content::Value(value) => Some(Stored::Value(self.bytes.slice(value.clone()))),
            Content::Bucket(value) => Some(Stored::Bucket(self.bytes.slice(value.clone()))),
        }
    }
}

impl Content {
    fn len(&self) -> usize {
        match self {
            Self::Child(_) => 0,
            Self::Value(value) | Self::Bucket(value) => value.len(),
        }
    }
}
