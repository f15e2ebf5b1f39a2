//! The keys of a run. All have the same prefix. No keys with this prefix exist before the run, and the run deletes all
//! of them at its end, unless `--existing` or `--keep` is given.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;
use tonic::{Response, Status};

use orlop_client::describe;

use crate::{
    closed_loop::{Limits, OpCounts, Run, Worker},
    connection::{Client, Pool},
    error::Error,
    interrupt::Interrupt,
};
use orlop_wire::proto::client::etcdserverpb::{DeleteRangeRequest, PutRequest, RangeRequest};

/// Timeout of a request outside the measured loop.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum number of keys per DeleteRange request. Deleting a million keys at once would block the server for too long.
const DELETED_KEYS_MAX: i64 = 5_000;

/// Maximum number of keys per Range request that reads mod revisions.
const READ_KEYS_MAX: i64 = 10_000;

/// Number of concurrent clients that write keys: enough for the server to commit many keys at once.
const LOAD_CLIENTS: usize = 256;

/// The keys with one prefix.
pub struct KeySpace {
    prefix: String,
}

impl KeySpace {
    /// `prefix` must not be empty.
    pub fn new(prefix: String) -> Self {
        Self { prefix }
    }

    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the key with this sequence number in the client's part of the key space.
    pub fn key(&self, client: usize, sequence: u64) -> Bytes {
        format!("{}{client:06}/{sequence:010}", self.prefix).into()
    }

    /// Returns the start and the end of the range [start, end) that contains all keys.
    pub fn range(&self) -> (Bytes, Bytes) {
        let mut end = self.prefix.clone().into_bytes();
        if let Some(last) = end.last_mut() {
            // The byte 0xff does not occur in UTF-8, so the addition does not overflow.
            *last += 1;
        }
        (self.prefix.clone().into(), end.into())
    }

    /// Returns the current revision of the store.
    pub async fn revision(&self, client: &Client) -> Result<i64, Error> {
        let request = RangeRequest { key: self.key(0, 0), count_only: true, ..RangeRequest::default() };
        let answer = setup_request("reading the revision", client, client.kv.clone().range(request)).await?;
        Ok(answer.header.unwrap_or_default().revision)
    }

    /// Reads the mod revisions of the first `keys` keys of client 0; 0 means that the key does not exist.
    pub async fn mod_revisions(&self, client: &Client, keys: usize) -> Result<Vec<i64>, Error> {
        let mut revisions = vec![0; keys];
        let (mut key, range_end) = (self.key(0, 0), self.key(0, keys as u64));
        loop {
            let request = RangeRequest {
                key,
                range_end: range_end.clone(),
                limit: READ_KEYS_MAX,
                keys_only: true,
                ..RangeRequest::default()
            };
            let page = setup_request("reading mod revisions", client, client.kv.clone().range(request)).await?;
            for kv in &page.kvs {
                let Some(number) = sequence(&kv.key) else { continue };
                if let Some(revision) = revisions.get_mut(number) {
                    *revision = kv.mod_revision;
                }
            }
            match page.kvs.last() {
                Some(last) if page.more => key = [last.key.as_ref(), b"\0"].concat().into(),
                _ => return Ok(revisions),
            }
        }
    }

    /// Fails if there are keys with the prefix; with `purge`, deletes them instead.
    pub async fn claim(&self, client: &mut Client, purge: bool) -> Result<(), Error> {
        if purge {
            return self.clear(client).await;
        }
        let (key, range_end) = self.range();
        let request = RangeRequest { key, range_end, count_only: true, ..RangeRequest::default() };
        let count = setup_request("counting old keys", client, client.kv.clone().range(request)).await?.count;
        if count > 0 {
            return Err(Error::PrefixInUse { prefix: self.prefix.clone(), count });
        }
        Ok(())
    }

    /// Deletes all keys with the prefix.
    pub async fn clear(&self, client: &mut Client) -> Result<(), Error> {
        let (key, range_end) = self.range();
        loop {
            let request = RangeRequest {
                key: key.clone(),
                range_end: range_end.clone(),
                limit: DELETED_KEYS_MAX,
                keys_only: true,
                ..RangeRequest::default()
            };
            let found = setup_request("listing keys to delete", client, client.kv.clone().range(request)).await?;
            let end = if found.more { found.kvs.last().map(|kv| kv.key.clone()) } else { None };
            let delete = DeleteRangeRequest {
                key: key.clone(),
                range_end: end.unwrap_or_else(|| range_end.clone()),
                ..DeleteRangeRequest::default()
            };
            setup_request("deleting keys", client, client.kv.clone().delete_range(delete)).await?;
            if !found.more {
                return Ok(());
            }
        }
    }

    /// Writes the first `keys` keys of client 0, each at its own revision, like most keys of a Kubernetes cluster.
    pub async fn load(
        self: &Arc<Self>,
        pool: &Pool,
        keys: usize,
        value: &Bytes,
        interrupt: &Interrupt,
    ) -> Result<(), Error> {
        let next = Arc::new(AtomicU64::new(0));
        let loader = |number| Loader {
            client: pool.client(number),
            keys: Arc::clone(self),
            value: value.clone(),
            next: Arc::clone(&next),
        };
        let total = Some(keys as u64);
        let run = Run::begin(Limits { total, duration: None, warmup: Duration::ZERO });
        run.drive((0..LOAD_CLIENTS).map(loader).collect(), interrupt).await;
        match run.finish().first_error {
            Some(error) => Err(Error::Step { step: "loading keys", endpoint: pool.endpoints(), error }),
            None => Ok(()),
        }
    }
}

/// Returns the sequence number in a key of [`KeySpace::key`].
fn sequence(key: &[u8]) -> Option<usize> {
    let (_, digits) = key.split_last_chunk::<10>()?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Sends a request outside the measured loop, with a timeout.
pub async fn setup_request<T>(
    step: &'static str,
    client: &Client,
    request: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Error> {
    let failed = |error| Error::Step { step, endpoint: client.endpoint().to_string(), error };
    match timeout(REQUEST_TIMEOUT, request).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(failed(describe(&status))),
        Err(_) => Err(failed(format!("no response within {REQUEST_TIMEOUT:?}"))),
    }
}

/// Returns a value of `len` bytes. Postgres compresses large values: this one to about half of its length, as it does
/// with objects of Kubernetes of 4 KiB.
pub fn filler_value(len: usize) -> Bytes {
    let items = (0_u64..).flat_map(|item| {
        let id = Bytes::copy_from_slice(&Sha256::digest(item.to_be_bytes())[..16]);
        format!(r#"{{"name":"container","id":"{id:x}","ready":true}},"#).into_bytes()
    });
    items.take(len).collect()
}

/// Returns a value that cannot be compressed, for stores of a given size.
pub fn incompressible_value(len: usize) -> Bytes {
    let blocks = (0_u64..).flat_map(|block| Sha256::digest(block.to_be_bytes()));
    blocks.take(len).collect()
}

struct Loader {
    client: Client,
    keys: Arc<KeySpace>,
    value: Bytes,
    /// Sequence number of the next key to write, shared by all loaders.
    next: Arc<AtomicU64>,
}

impl Worker for Loader {
    async fn step(&mut self, _started: u64) -> Result<OpCounts, Status> {
        let key = self.keys.key(0, self.next.fetch_add(1, Relaxed));
        self.client.kv.put(PutRequest { key, value: self.value.clone(), ..PutRequest::default() }).await?;
        Ok(OpCounts::default())
    }

    fn client(&self) -> &Client {
        &self.client
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_contains_every_key() {
        let keys = KeySpace::new("bench/é".to_owned());
        let (start, end) = keys.range();
        for (client, sequence) in [(0, 0), (999_999, 9_999_999_999), (1_000_000, u64::MAX)] {
            let key = keys.key(client, sequence);
            assert!(start <= key && key < end, "{key:?}");
        }
        assert_eq!(end, b"bench/\xc3\xaa"[..]);
    }

    #[test]
    fn keys_sort_by_client_and_sequence() {
        let keys = KeySpace::new("bench/".to_owned());
        assert!(keys.key(0, 9) < keys.key(0, 10));
        assert!(keys.key(9, 10) < keys.key(10, 0));
        assert_eq!(sequence(&keys.key(7, 4_999)), Some(4_999));
        assert_eq!(sequence(b"bench/000007"), None);
    }
}
