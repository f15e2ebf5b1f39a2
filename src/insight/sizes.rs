//! Reads the sizes below prefixes in the background.
//!
//! A read can take seconds with a million keys, so each one is a task, one runs at a time, and the last results are kept.
//!
//! A read of all keys goes down as long as one prefix has nearly everything ([`main_prefix`]): a kube-apiserver keeps its
//! objects below `/registry/` and one key, `compact_rev_key`, elsewhere. Each step down is another request. A prefix that
//! somebody has chosen is shown as it is.
//!
//! Known limits: against etcd, the sizes are the numbers of keys in a listing of at most [`LISTED_KEYS_MAX`] keys, once in
//! [`LISTING_PAUSE`], because a listing costs etcd as much as reading the pairs.

use std::{collections::BTreeMap, time::Duration};

use orlop_client::{Client, describe};
use orlop_core::{
    store::sizes::NAME_BYTES_MAX,
    types::{child_prefix, common_path, prefix_end},
};
use orlop_wire::proto::client::{etcdserverpb::RangeRequest, orlopb as pb};
use tokio::{
    task::JoinHandle,
    time::{Instant, timeout_at},
};
use tonic::{Code, Status};

use super::{
    parts::{KeyName, PairSizes, Sized, Sizes},
    source::ONLY_ROOT,
};

/// Time between two reads of a prefix. The server caches the sizes for longer if they are expensive.
const SIZES_PAUSE: Duration = Duration::from_secs(10);
/// Maximum number of keys that are listed to count them by prefix.
const LISTED_KEYS_MAX: usize = 200_000;
/// Number of keys per request of a listing.
const LISTED_KEYS_PAGE: i64 = 5_000;
/// Time between two listings of a prefix.
const LISTING_PAUSE: Duration = Duration::from_secs(300);
/// Maximum number of steps down from all keys. The server visits all keys below the prefix for each one.
const STEPS_DOWN_MAX: usize = 4;
/// A prefix with less than this part of the sizes, in percent, is shown beside the others.
const MAIN_PERCENT: u64 = 99;
/// Maximum number of prefixes whose last result is kept.
const KEPT_MAX: usize = 4;

pub type SizesResult = Result<Sizes, String>;

/// Reads sizes in the background, of one prefix at a time, and keeps the last results.
#[derive(Default)]
pub struct SizesReader {
    /// The read that runs, and its prefix. It is not stopped for another prefix: two visitors of the web page would stop
    /// each other's reads.
    running: Option<Running>,
    /// The oldest first, at most [`KEPT_MAX`], each of another prefix.
    kept: Vec<Kept>,
}

struct Running {
    prefix: Vec<u8>,
    /// Also returns when the read ended.
    task: JoinHandle<(SizesResult, Instant)>,
}

/// The result of the last read of a prefix.
struct Kept {
    prefix: Vec<u8>,
    read_at: Instant,
    result: SizesResult,
}

impl SizesReader {
    /// Returns the sizes below a prefix, with at most `rows_max` children; `None` if the first ones are not complete
    /// within `wait_max`.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn read(
        &mut self,
        client: &Client,
        prefix: &[u8],
        rows_max: u32,
        wait_max: Duration,
    ) -> Option<SizesResult> {
        let begin = || {
            let (client, prefix) = (client.clone(), prefix.to_vec());
            async move { read_sizes(&client, prefix, rows_max).await }
        };
        self.read_with(prefix, wait_max, begin).await
    }

    /// Like [`Self::read`], with the function that begins a read.
    async fn read_with<F>(&mut self, prefix: &[u8], wait_max: Duration, begin: impl Fn() -> F) -> Option<SizesResult>
    where
        F: Future<Output = SizesResult> + Send + 'static,
    {
        let deadline = Instant::now() + wait_max;
        // First, the read of another prefix may have to end.
        while self.is_due(prefix) {
            let running = self.running.get_or_insert_with(|| {
                let read = begin();
                let task = tokio::spawn(async move { (read.await, Instant::now()) });
                Running { prefix: prefix.to_vec(), task }
            });
            let Ok(ended) = timeout_at(deadline, &mut running.task).await else { break };
            if let Some(Running { prefix, .. }) = self.running.take() {
                let (result, read_at) = ended.unwrap_or_else(|error| (Err(error.to_string()), Instant::now()));
                self.keep(Kept { prefix, read_at, result });
            }
        }
        let Kept { read_at, result, .. } = self.last(prefix)?;
        let age_ms = u64::try_from(read_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        Some(result.clone().map(|sizes| Sizes { age_ms: sizes.age_ms.saturating_add(age_ms), ..sizes }))
    }

    fn last(&self, prefix: &[u8]) -> Option<&Kept> {
        self.kept.iter().find(|kept| kept.prefix == prefix)
    }

    /// Returns whether the last result is missing or too old.
    fn is_due(&self, prefix: &[u8]) -> bool {
        self.last(prefix).is_none_or(|kept| {
            let is_listing = matches!(&kept.result, Ok(sizes) if sizes.cost_us.is_none());
            kept.read_at.elapsed() >= if is_listing { LISTING_PAUSE } else { SIZES_PAUSE }
        })
    }

    fn keep(&mut self, result: Kept) {
        self.kept.retain(|kept| kept.prefix != result.prefix);
        if self.kept.len() == KEPT_MAX {
            self.kept.remove(0);
        }
        self.kept.push(result);
    }
}

impl Drop for SizesReader {
    fn drop(&mut self) {
        if let Some(running) = &self.running {
            running.task.abort();
        }
    }
}

async fn read_sizes(client: &Client, prefix: Vec<u8>, limit: u32) -> SizesResult {
    let mut sizes = match request_sizes(client, prefix.clone(), limit).await {
        Ok(sizes) => sizes,
        Err(status) if status.code() == Code::Unimplemented => return list_keys(client, prefix).await,
        Err(status) if status.code() == Code::PermissionDenied => return Err(ONLY_ROOT.to_owned()),
        Err(status) => return Err(describe(&status)),
    };
    for _ in 0..steps_down_max(&prefix) {
        let Some(main) = main_prefix(&sizes) else { break };
        let below = request_sizes(client, main.name.0.clone(), limit).await.map_err(|status| describe(&status))?;
        sizes = went_down(&sizes, main, below);
    }
    Ok(sizes)
}

/// Returns the maximum number of steps down from a prefix that was asked for.
fn steps_down_max(prefix: &[u8]) -> usize {
    if prefix.is_empty() { STEPS_DOWN_MAX } else { 0 }
}

/// Returns the prefix that has nearly everything.
fn main_prefix(sizes: &Sizes) -> Option<&Sized> {
    // The server may have cut a longer name.
    let largest = sizes.children.first().filter(|child| child.is_prefix && child.name.0.len() < NAME_BYTES_MAX)?;
    let (part, all) = (u128::from(largest.sizes.amount()), u128::from(sizes.total.amount()));
    (part * 100 >= all * u128::from(MAIN_PERCENT)).then_some(largest)
}

/// Returns the sizes below the main prefix, with the rest of those above it. The largest keys can be anywhere.
fn went_down(above: &Sizes, main: &Sized, below: Sizes) -> Sizes {
    Sizes {
        rest: above.rest.plus(&above.total.minus(&main.sizes)),
        largest_keys: above.largest_keys.clone(),
        age_ms: above.age_ms.max(below.age_ms),
        cost_us: above.cost_us.zip(below.cost_us).map(|(above, below)| above.saturating_add(below)),
        ..below
    }
}

async fn request_sizes(client: &Client, prefix: Vec<u8>, limit: u32) -> Result<Sizes, Status> {
    let request = pb::SizesRequest { prefix: prefix.into(), limit };
    let response = client.insight().max_decoding_message_size(16 << 20).sizes(request).await?.into_inner();
    let sizes = |sizes: Option<pb::PairSizes>| {
        let pb::PairSizes { keys, key_bytes, value_bytes } = sizes.unwrap_or_default();
        PairSizes { keys, key_bytes, value_bytes: Some(value_bytes) }
    };
    let child = |child: pb::SizedChild| Sized {
        name: KeyName(child.name.into()),
        is_prefix: child.is_prefix,
        sizes: sizes(child.sizes),
    };
    Ok(Sizes {
        prefix: KeyName(response.prefix.into()),
        total: sizes(response.total),
        rest: PairSizes::default(),
        children: response.children.into_iter().map(child).collect(),
        children_total: response.children_total,
        largest_keys: response.largest_keys.into_iter().map(child).collect(),
        age_ms: response.age_ms,
        cost_us: Some(response.cost_us),
        is_partial: false,
    })
}

/// Counts the keys below a prefix by path segment, from a listing.
async fn list_keys(client: &Client, prefix: Vec<u8>) -> SizesResult {
    let range_end = prefix_end(&prefix);
    let mut start = if prefix.is_empty() { vec![0] } else { prefix.clone() };
    let mut keys: Vec<Vec<u8>> = Vec::new();
    let is_partial = loop {
        let request = RangeRequest {
            key: start.into(),
            range_end: range_end.clone().into(),
            limit: LISTED_KEYS_PAGE,
            keys_only: true,
            serializable: true,
            ..RangeRequest::default()
        };
        let response = client.kv().range(request).await.map_err(|status| describe(&status))?.into_inner();
        keys.extend(response.kvs.into_iter().map(|kv| kv.key.to_vec()));
        match keys.last().filter(|_| response.more) {
            Some(_) if keys.len() >= LISTED_KEYS_MAX => break true,
            Some(last) => start = [last, &[0][..]].concat(),
            None => break false,
        }
    };
    Ok(count_keys(&keys, prefix, is_partial))
}

/// Counts sorted keys below the prefix, or below the one that has nearly all of them.
fn count_keys(keys: &[Vec<u8>], prefix: Vec<u8>, is_partial: bool) -> Sizes {
    let steps_max = steps_down_max(&prefix);
    let mut sizes = count_by_segment(keys, prefix, is_partial);
    for _ in 0..steps_max {
        let Some(main) = main_prefix(&sizes) else { break };
        let prefix = &main.name.0;
        let keys = &keys[keys.partition_point(|key| key < prefix)..];
        let keys = &keys[..keys.partition_point(|key| key.starts_with(prefix))];
        sizes = went_down(&sizes, main, count_by_segment(keys, prefix.clone(), is_partial));
    }
    sizes
}

/// Counts sorted keys by the path segment below the prefix, or below the longest path that they share.
fn count_by_segment(keys: &[Vec<u8>], prefix: Vec<u8>, is_partial: bool) -> Sizes {
    let shared = keys.first().zip(keys.last()).and_then(|(first, last)| common_path(first, last));
    let prefix = shared.filter(|shared| shared.len() > prefix.len()).map_or(prefix, <[u8]>::to_vec);
    let mut children: BTreeMap<(&[u8], bool), PairSizes> = BTreeMap::new();
    let mut total = PairSizes::default();
    for key in keys {
        let child = child_prefix(key, prefix.len());
        for sizes in [&mut total, children.entry((child.unwrap_or(key), child.is_some())).or_default()] {
            sizes.keys += 1;
            sizes.key_bytes += key.len() as u64;
        }
    }
    let child = |((name, is_prefix), sizes): ((&[u8], bool), PairSizes)| Sized {
        name: KeyName(name.to_vec()),
        is_prefix,
        sizes,
    };
    let mut children: Vec<Sized> = children.into_iter().map(child).collect();
    let children_total = children.len() as u64;
    children.sort_by_key(|child| std::cmp::Reverse(child.sizes.keys));
    children.truncate(256);
    Sizes {
        prefix: KeyName(prefix),
        total,
        rest: PairSizes::default(),
        children,
        children_total,
        largest_keys: Vec::new(),
        age_ms: 0,
        cost_us: None,
        is_partial,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
    };

    use tokio::time::sleep;

    use super::*;

    const WAIT: Duration = Duration::from_millis(50);

    /// Lists no keys, and counts the listings.
    struct Lister {
        reader: SizesReader,
        listings: Arc<AtomicUsize>,
        duration: Duration,
    }

    impl Lister {
        fn new(duration: Duration) -> Self {
            Self { reader: SizesReader::default(), listings: Arc::default(), duration }
        }

        async fn read(&mut self, prefix: &str) -> Option<Sizes> {
            let (listings, duration) = (Arc::clone(&self.listings), self.duration);
            let begin = || {
                listings.fetch_add(1, Ordering::Relaxed);
                let prefix = KeyName(prefix.into());
                async move {
                    sleep(duration).await;
                    Ok(Sizes { prefix, ..Sizes::default() })
                }
            };
            let read = self.reader.read_with(prefix.as_bytes(), WAIT, begin).await?;
            Some(read.expect("sizes"))
        }

        fn listings(&self) -> usize {
            self.listings.load(Ordering::Relaxed)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn prefixes_that_are_requested_in_turn_are_read_one_after_the_other() {
        let mut lister = Lister::new(Duration::from_secs(5));
        let mut read = BTreeSet::new();
        for second in 0..30 {
            for prefix in ["/a/", "/b/"] {
                if let Some(sizes) = lister.read(prefix).await {
                    assert_eq!(sizes.prefix.text(), prefix);
                    read.insert(prefix);
                }
            }
            assert!(second >= 5 || lister.listings() == 1, "both are read at the same time");
            sleep(Duration::from_secs(1)).await;
        }
        assert_eq!((read.len(), lister.listings()), (2, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn last_results_are_kept() {
        let mut lister = Lister::new(Duration::ZERO);
        let prefixes = ["/0/", "/1/", "/2/", "/3/", "/4/"];
        assert_eq!(prefixes.len(), KEPT_MAX + 1);
        let again = [("/1/", 5), ("/4/", 5), ("/0/", 6), ("/1/", 7)];
        for (prefix, listings) in prefixes.into_iter().zip(1..).chain(again) {
            assert!(lister.read(prefix).await.is_some(), "{prefix}");
            assert_eq!(lister.listings(), listings, "{prefix}");
        }
        sleep(Duration::from_secs(7)).await;
        assert_eq!(lister.read("/1/").await.map(|sizes| sizes.age_ms / 1_000), Some(7));
        sleep(LISTING_PAUSE).await;
        assert_eq!(lister.read("/1/").await.map(|sizes| sizes.age_ms / 1_000), Some(0));
    }

    #[test]
    fn listed_keys_are_counted_below_their_common_path() {
        for (keys, prefix, want_prefix, want) in [
            (&[][..], "", "", &[][..]),
            (&["/r/a/1", "/r/a/2", "/r/b"], "", "/r/", &[("/r/a/", true, 2), ("/r/b", false, 1)]),
            (&["a", "b/1"], "", "", &[("a", false, 1), ("b/", true, 1)]),
            (&["/r/a"], "/r", "/r/", &[("/r/a", false, 1)]),
        ] {
            let keys: Vec<Vec<u8>> = keys.iter().map(|key| key.as_bytes().to_vec()).collect();
            let sizes = count_keys(&keys, prefix.into(), false);
            let children: Vec<_> =
                (sizes.children.iter()).map(|child| (child.name.text(), child.is_prefix, child.sizes.keys)).collect();
            let want: Vec<_> =
                want.iter().map(|(name, is_prefix, keys)| ((*name).to_owned(), *is_prefix, *keys)).collect();
            assert_eq!((sizes.prefix.text(), children), (want_prefix.to_owned(), want));
        }
    }

    #[test]
    fn key_of_an_api_server_does_not_hide_what_is_below_the_registry() {
        let mut keys: Vec<Vec<u8>> = (0..300).map(|n| format!("/registry/pods/{n:03}").into_bytes()).collect();
        keys.extend((0..20).map(|n| format!("/registry/secrets/{n:03}").into_bytes()));
        keys.push(b"compact_rev_key".to_vec());
        let sizes = count_keys(&keys, Vec::new(), false);
        let children: Vec<_> = sizes.children.iter().map(|child| (child.name.text(), child.sizes.keys)).collect();
        let want = [("/registry/pods/".to_owned(), 300), ("/registry/secrets/".to_owned(), 20)];
        assert_eq!((sizes.prefix.text(), &*children), ("/registry/".to_owned(), &want[..]));
        assert_eq!((sizes.total.keys, sizes.rest.keys, sizes.rest.key_bytes), (320, 1, 15));
        assert_eq!((sizes.all().keys, sizes.all().value_bytes), (321, None));
        // Of more than one step, the rests are added up.
        keys.extend((0..3).map(|n| format!("/other/{n}").into_bytes()));
        keys.sort();
        let sizes = count_keys(&keys, Vec::new(), false);
        assert_eq!((sizes.prefix.text(), sizes.total.keys, sizes.rest.keys), ("/registry/".to_owned(), 320, 4));
        // A prefix that somebody has chosen is shown as it is.
        keys.retain(|key| key.starts_with(b"/"));
        let sizes = count_keys(&keys, b"/".to_vec(), false);
        assert_eq!((sizes.prefix.text(), sizes.children_total, sizes.rest.keys), ("/".to_owned(), 2, 0));
    }

    #[test]
    fn main_prefix_has_nearly_all_bytes() {
        let pairs = |value_bytes| PairSizes { keys: 1, key_bytes: 0, value_bytes: Some(value_bytes) };
        for (name, is_prefix, part, all, is_main) in [
            ("/a/", true, 99, 100, true),
            ("/a/", true, 98, 100, false),
            ("/a/", true, u64::MAX, u64::MAX, true),
            ("/a", false, 100, 100, false),
            (&*format!("{}/", "a".repeat(NAME_BYTES_MAX - 1)), true, 100, 100, false),
        ] {
            let child = Sized { name: KeyName(name.into()), is_prefix, sizes: pairs(part) };
            let sizes = Sizes { children: vec![child], total: pairs(all), ..Sizes::default() };
            assert_eq!(main_prefix(&sizes).is_some(), is_main, "{part} of {all}, {} bytes of name", name.len());
        }
        assert_eq!(main_prefix(&Sizes::default()), None);
    }
}
