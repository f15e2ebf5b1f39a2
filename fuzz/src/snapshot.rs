//! Snapshot files with damage.

use std::{
    path::Path,
    sync::{Arc, LazyLock},
    time::Duration,
};

use tokio::runtime::{Builder, Runtime};

use async_trait::async_trait;
use orlop::snapshot::{self, Content, Export, HashCheck, Purpose};
use orlop_core::{
    auth::{AuthState, Caller},
    log::{self, ArchivePart, Load, Meta, ReadLog as _},
    store::{
        self, HistorySettings, Keep, Store,
        request::{CompactionWait, PutLease, PutRequest, PutValue},
    },
    types::{Change, Revision},
};
use orlop_sql::SqliteLog;
use sha2::{Digest as _, Sha256};

static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_current_thread().enable_all().build().expect("a runtime can be built"));

/// A snapshot of a small store without its checksum.
static DATABASE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a folder can be made");
    RUNTIME.block_on(async {
        let log = SqliteLog::open(&folder.path().join("orlop.db")).await.expect("a database");
        let meta = log.meta().await.expect("an empty log");
        let archive = log.archive(&meta, true).await.expect("it was created");
        let keep = Keep::Rows { retention: Duration::from_secs(3_600), bytes_max: u64::MAX };
        let history = Some(HistorySettings { archive: Arc::new(archive), keep });
        let settings = store::Settings { history, ..store::Settings::default() };
        let store = Store::open(Arc::new(log), settings).await.expect("an empty store");
        for number in 0..120_u8 {
            let (key, value) = (vec![b'a' + number % 20].into(), PutValue::New(vec![number; 50].into()));
            let request = PutRequest { key, value, lease: PutLease::Set(None), prev_kv: false };
            store.put(&Caller::Server, request).await.expect("a put");
        }
        store.compact(&Caller::Server, Revision(60), CompactionWait::ForRows).await.expect("a compaction");
        let mut export = Export::of(&store, Content::LogAndArchive).await.expect("a snapshot");
        let (len, mut bytes) = (usize::try_from(export.bytes()).expect("a small file"), Vec::new());
        while let Some(piece) = export.next().await.expect("a piece") {
            bytes.extend_from_slice(&piece);
        }
        store.stop().await;
        bytes.truncate(len);
        bytes
    })
});

/// A database that keeps nothing.
struct Nowhere;

#[async_trait]
impl Load for Nowhere {
    async fn add(&mut self, _: &[Change]) -> log::Result<()> {
        Ok(())
    }

    async fn add_archive(&mut self, _: ArchivePart) -> log::Result<()> {
        Ok(())
    }

    async fn finish(self: Box<Self>, _: &Meta, _: &AuthState) -> log::Result<()> {
        Ok(())
    }
}

/// A description of the damage to a valid file: whether the file has a checksum, whether the checksum is correct, the
/// number of bytes to cut off, and the bytes to change.
///
/// ```text
/// flags | cut, 2 bytes | place, 3 bytes, change, 1 byte | place, change | ...
/// ```
struct Damage<'a> {
    flags: u8,
    cut: usize,
    changes: &'a [u8],
}

/// Flag: the checksum is that of the damaged file, and so is correct.
const REHASHED: u8 = 1;
/// Flag: the file has no checksum.
const UNCHECKED: u8 = 2;

impl Damage<'_> {
    fn apply(&self) -> Vec<u8> {
        let mut bytes = DATABASE.clone();
        for change in self.changes.chunks_exact(4) {
            let place = usize::from(change[0]) << 16 | usize::from(change[1]) << 8 | usize::from(change[2]);
            let place = place % bytes.len();
            bytes[place] ^= change[3];
        }
        bytes.truncate(bytes.len().saturating_sub(self.cut));
        if self.flags & UNCHECKED == 0 {
            let hashed = if self.flags & REHASHED == 0 { DATABASE.as_slice() } else { bytes.as_slice() };
            let checksum = Sha256::digest(hashed);
            bytes.extend_from_slice(&checksum);
        }
        bytes
    }
}

/// Input: a description of the [`Damage`] to a snapshot. Restores it if it is not refused.
pub(super) fn run(data: &[u8]) {
    let [flags, high, low, changes @ ..] = data else { return };
    let damage = Damage { flags: *flags, cut: usize::from(*high) << 8 | usize::from(*low), changes };
    let bytes = damage.apply();
    let folder = tempfile::tempdir_in(memory_folder()).expect("a folder can be made");
    let file = folder.path().join("given.db");
    std::fs::write(&file, &bytes).expect("a file can be written");
    let check = if damage.flags & UNCHECKED == 0 { HashCheck::Verify } else { HashCheck::Skip };
    let create = async { Ok::<Box<dyn Load>, snapshot::Error>(Box::new(Nowhere)) };
    let purpose = Purpose::NewStore(None);
    let restored = RUNTIME.block_on(snapshot::restore(&file, check, Content::LogAndArchive, purpose, create));
    // The first bytes of the checksum may equal those that were cut off.
    let is_whole = damage.cut == 0 && bytes.starts_with(&DATABASE);
    match restored {
        Ok(restored) => {
            assert!(is_whole || check == HashCheck::Skip || damage.flags & REHASHED != 0, "undetected: {restored:?}");
        }
        Err(error) => {
            assert!(!is_whole, "{error}");
            assert!(error.to_string().contains("given.db"), "an error names the file: {error}");
        }
    }
}

/// Returns a folder that is in memory, if the machine has one.
fn memory_folder() -> &'static Path {
    let shared_memory = Path::new("/dev/shm");
    if shared_memory.is_dir() { shared_memory } else { Path::new("/tmp") }
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let size = DATABASE.len();
    let page = 4096;
    let mut seeds = vec![vec![0, 0, 0], vec![REHASHED, 0, 0], vec![UNCHECKED, 0, 0]];
    for flags in [0, REHASHED, UNCHECKED] {
        for cut in [1_u16, 32, 512, 4096, 8192] {
            seeds.push([&[flags], &cut.to_be_bytes()[..]].concat());
        }
        // Bytes in the first meta and in the headers and first elements of the pages.
        let pages =
            (page..size).step_by(page).flat_map(|start| [0, 8, 10, 12, 16, 20, 24, 28, 33].map(|at| start + at));
        for place in [16, 24, 32, 48, 56, 64].into_iter().chain(pages) {
            let [_, place @ ..] = u32::try_from(place).unwrap_or(0).to_be_bytes();
            seeds.push([&[flags, 0, 0], &place[..], &[4]].concat());
        }
    }
    seeds
}
