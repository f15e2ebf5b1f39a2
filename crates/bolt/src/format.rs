//! The numbers of the format, and the meta pages.

/// Bytes before the elements of a page: its id (8), flags (2), number of elements (2) and number of further pages (4).
pub(crate) const HEADER_BYTES: usize = 16;
/// Bytes of an element before its key.
pub(crate) const ELEMENT_BYTES: usize = 16;
/// Size of a page of a file that is written.
pub(crate) const PAGE_BYTES: usize = 4096;
/// The first page that is not a meta page.
pub(crate) const FIRST_PAGE: u64 = 2;
/// Bytes of the value of a bucket before an inline page: the root page (8) and a sequence (8).
pub(crate) const BUCKET_BYTES: usize = 16;

/// Flags of a page; it has exactly one.
pub(crate) const BRANCH: u16 = 1;
pub(crate) const LEAF: u16 = 2;
const META: u16 = 4;

/// The flag of a leaf's element whose value is a bucket.
pub(crate) const IS_BUCKET: u32 = 1;

const MAGIC: u32 = 0xed0c_daed;
const VERSION: u32 = 2;
/// In place of the page of a free list: the file contains none.
const NO_FREE_LIST: u64 = u64::MAX;
/// Bytes of a meta, without the header of its page.
const META_BYTES: usize = 64;
/// The checksum follows these bytes of a meta.
const CHECKED_BYTES: usize = 56;

/// Bytes from the start of a meta page to the end of its meta.
pub(crate) const META_END: usize = HEADER_BYTES + META_BYTES;

/// A meta: where everything is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Meta {
    pub(crate) page_bytes: u32,
    /// The page at the root of the bucket that contains all buckets.
    pub(crate) root: u64,
    /// Number of pages.
    pub(crate) high_water: u64,
    /// The number of the transaction that wrote it. The meta with the higher number counts.
    pub(crate) transaction: u64,
}

impl Meta {
    /// Returns the page with this meta.
    pub(crate) fn encode(&self, id: u64) -> Vec<u8> {
        let mut page = header(id, META, 0, 0).to_vec();
        page.extend(MAGIC.to_le_bytes());
        page.extend(VERSION.to_le_bytes());
        page.extend(self.page_bytes.to_le_bytes());
        page.extend(0_u32.to_le_bytes());
        let (root, sequence) = (self.root, 0_u64);
        for number in [root, sequence, NO_FREE_LIST, self.high_water, self.transaction] {
            page.extend(number.to_le_bytes());
        }
        let checksum = fnv1a(&page[HEADER_BYTES..]);
        page.extend(checksum.to_le_bytes());
        page.resize(PAGE_BYTES, 0);
        page
    }

    /// Reads the meta of a page, or `None` if the bytes are not a valid meta.
    pub(crate) fn decode(page: &[u8]) -> Option<Self> {
        let meta = page.get(HEADER_BYTES..META_END)?;
        let checksum = u64_at(meta, CHECKED_BYTES)?;
        let is_valid =
            u32_at(meta, 0)? == MAGIC && u32_at(meta, 4)? == VERSION && fnv1a(&meta[..CHECKED_BYTES]) == checksum;
        let decoded = Self {
            page_bytes: u32_at(meta, 8)?,
            root: u64_at(meta, 16)?,
            high_water: u64_at(meta, 40)?,
            transaction: u64_at(meta, 48)?,
        };
        is_valid.then_some(decoded)
    }
}

/// Returns the header of a page. `overflow` is the number of further pages that it occupies.
pub(crate) fn header(id: u64, flags: u16, count: u16, overflow: u32) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&id.to_le_bytes());
    header[8..10].copy_from_slice(&flags.to_le_bytes());
    header[10..12].copy_from_slice(&count.to_le_bytes());
    header[12..].copy_from_slice(&overflow.to_le_bytes());
    header
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|chunk| u16::from_le_bytes(*chunk))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|chunk| u32::from_le_bytes(*chunk))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|chunk| u64::from_le_bytes(*chunk))
}

/// The checksum of metas: FNV-1a with 64 bits.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
