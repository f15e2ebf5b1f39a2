//! The keys of a run: all below one prefix, which is empty before and is emptied afterwards.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::time::timeout;
use tonic::{Response, Status};

use super::{
    Error,
    closed_loop::{Done, Limits, Run, Worker, describe},
    connection::{Client, Pool},
    interrupt::Interrupt,
};
use orlop_wire::proto::client::etcdserverpb::{DeleteRangeRequest, PutRequest, RangeRequest};

/// Of one request before or after the run.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// Keys in one deletion: a million at once would hold up the server, and with it the end of the run.
const KEYS_DELETED_AT_ONCE: i64 = 5_000;

/// Enough for servers that commit in groups to do so.
const LOADERS: usize = 256;

pub struct KeySpace {
    prefix: String,
}

impl KeySpace {
    /// The prefix is not empty.
    pub fn new(prefix: String) -> Self {
        Self { prefix }
    }

    /// A key of the client's own.
    pub fn key(&self, client: usize, sequence: u64) -> Bytes {
        format!("{}{client:06}/{sequence:010}", self.prefix).into()
    }

    /// All keys: the first possible one, and the end, which is no longer in.
    pub fn range(&self) -> (Bytes, Bytes) {
        let mut end = self.prefix.clone().into_bytes();
        if let Some(last) = end.last_mut() {
            // UTF-8 has no 0xff, so the last byte has a successor.
            *last += 1;
        }
        (self.prefix.clone().into(), end.into())
    }

    /// The store's revision.
    pub async fn revision(&self, client: &Client) -> Result<i64, Error> {
        let request = RangeRequest { key: self.key(0, 0), count_only: true, ..RangeRequest::default() };
        let answer = step("asking for the revision", client, client.kv.clone().range(request)).await?;
        Ok(answer.header.unwrap_or_default().revision)
    }

    /// Sees to it that there are no keys yet.
    pub async fn claim(&self, client: &mut Client, purge: bool) -> Result<(), Error> {
        if purge {
            return self.clear(client).await;
        }
        let (key, range_end) = self.range();
        let request = RangeRequest { key, range_end, count_only: true, ..RangeRequest::default() };
        let count = step("looking for old keys", client, client.kv.clone().range(request)).await?.count;
        if count > 0 {
            return Err(Error::PrefixInUse { prefix: self.prefix.clone(), count });
        }
        Ok(())
    }

    pub async fn clear(&self, client: &mut Client) -> Result<(), Error> {
        let (key, range_end) = self.range();
        loop {
            let request = RangeRequest {
                key: key.clone(),
                range_end: range_end.clone(),
                limit: KEYS_DELETED_AT_ONCE,
                keys_only: true,
                ..RangeRequest::default()
            };
            let found = step("looking for keys to delete", client, client.kv.clone().range(request)).await?;
            let end = if found.more { found.kvs.last().map(|kv| kv.key.clone()) } else { None };
            let delete = DeleteRangeRequest {
                key: key.clone(),
                range_end: end.unwrap_or_else(|| range_end.clone()),
                ..DeleteRangeRequest::default()
            };
            step("deleting keys", client, client.kv.clone().delete_range(delete)).await?;
            if !found.more {
                return Ok(());
            }
        }
    }

    /// Writes the first `keys` keys of client 0, each in a revision of its own as most keys of a cluster are.
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
        run.drive((0..LOADERS).map(loader).collect(), interrupt).await;
        match run.take().first_error {
            Some(error) => Err(Error::Step { step: "loading keys", endpoint: pool.endpoints(), error }),
            None => Ok(()),
        }
    }
}

/// One request before or after a run.
pub async fn step<T>(
    step: &'static str,
    client: &Client,
    request: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Error> {
    let failed = |error| Error::Step { step, endpoint: client.endpoint().to_string(), error };
    match timeout(STEP_TIMEOUT, request).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(failed(describe(&status))),
        Err(_) => Err(failed(format!("no answer within {STEP_TIMEOUT:?}"))),
    }
}

struct Loader {
    client: Client,
    keys: Arc<KeySpace>,
    value: Bytes,
    /// Sequence of the first key that no loader has taken.
    next: Arc<AtomicU64>,
}

impl Worker for Loader {
    async fn step(&mut self, _stamp: u64) -> Result<Done, Status> {
        let key = self.keys.key(0, self.next.fetch_add(1, Relaxed));
        self.client.kv.put(PutRequest { key, value: self.value.clone(), ..PutRequest::default() }).await?;
        Ok(Done::default())
    }

    fn client(&self) -> &Client {
        &self.client
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_lies_in_the_range() {
        let keys = KeySpace::new("bench/é".to_owned());
        let (start, end) = keys.range();
        for (client, sequence) in [(0, 0), (999_999, 9_999_999_999), (1_000_000, u64::MAX)] {
            let key = keys.key(client, sequence);
            assert!(start <= key && key < end, "{key:?}");
        }
        assert_eq!(end, b"bench/\xc3\xaa"[..]);
    }

    #[test]
    fn keys_sort_as_their_sequences() {
        let keys = KeySpace::new("bench/".to_owned());
        assert!(keys.key(0, 9) < keys.key(0, 10));
        assert!(keys.key(9, 10) < keys.key(10, 0));
    }
}
