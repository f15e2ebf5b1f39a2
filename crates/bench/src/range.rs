//! The scenario `range`: lists all keys, in one request, in pages or at an old revision.

use std::{collections::BTreeMap, time::Duration};

use tonic::Status;

use crate::{
    args::{parse_count, parse_keys, parse_value_size},
    bench::Bench,
    closed_loop::{OpCounts, Worker},
    connection::Client,
    error::Error,
    keyspace::filler_value,
    report::{self, Report},
};
use orlop_wire::proto::client::etcdserverpb::RangeRequest;

#[derive(Debug, clap::Args)]
pub struct Range {
    /// Size of each value in bytes
    #[arg(long, default_value = "1024", value_parser = parse_value_size, value_name = "BYTES")]
    value_size: usize,

    /// Number of keys in the range
    #[arg(long, default_value = "10000", value_parser = parse_keys, value_name = "N")]
    keys: usize,

    /// Number of keys per page; all pages of a list are read at one revision and count as one operation [default: all
    /// keys in one request]
    #[arg(long, value_parser = parse_count, value_name = "KEYS")]
    page: Option<usize>,

    /// Write every key a second time, then list at the revision before that
    #[arg(long)]
    old_revision: bool,

    /// Send serializable requests: the server may answer with stale data
    #[arg(long)]
    serializable: bool,
}

impl Range {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        bench.load(self.keys, self.value_size).await?;
        let pages = self.pages(bench, bench.keys.revision(&bench.pool.client(0)).await?);
        if self.old_revision {
            bench.keys.load(&bench.pool, self.keys, &filler_value(self.value_size), &bench.interrupt).await?;
        }
        let lister = |number| Lister { client: bench.pool.client(number), pages: pages.clone() };
        let recorder = bench.drive(bench.workers(lister)).await;
        let mebibytes = report::per_sec(recorder.counts.bytes, recorder.elapsed()) / f64::from(1 << 20);
        let extra = BTreeMap::from([
            ("keys_per_sec", report::per_sec(recorder.counts.keys, recorder.elapsed())),
            ("mib_per_sec", report::rounded(mebibytes)),
        ]);
        Ok(bench.report("range", self.value_size, &recorder, extra))
    }

    /// Returns the requests of one list. As in a client that reads pages, the first request reads the newest revision,
    /// and the others name it: `revision`. With `--old-revision`, all requests name `revision`, which is then older.
    fn pages(&self, bench: &Bench, revision: i64) -> Vec<Page> {
        let all = self.keys as u64;
        let size = self.page.map_or(all, |page| page as u64);
        let page = |first: u64| {
            let is_newest = first == 0 && !self.old_revision;
            let request = RangeRequest {
                key: bench.keys.key(0, first),
                range_end: bench.keys.key(0, all),
                limit: self.page.map_or(0, |page| page as i64),
                revision: if is_newest { 0 } else { revision },
                serializable: self.serializable,
                ..RangeRequest::default()
            };
            Page { request, kvs: size.min(all - first) }
        };
        (0..all).step_by(self.page.unwrap_or(self.keys)).map(page).collect()
    }
}

#[derive(Clone)]
struct Page {
    request: RangeRequest,
    /// Number of pairs that the response must contain.
    kvs: u64,
}

struct Lister {
    client: Client,
    pages: Vec<Page>,
}

impl Worker for Lister {
    /// An operation receives all keys.
    const SILENCE_MAX: Duration = Duration::from_secs(600);

    async fn step(&mut self, _started: u64) -> Result<OpCounts, Status> {
        let mut counts = OpCounts::default();
        for Page { request, kvs } in &self.pages {
            let response = self.client.range_exact(request.clone(), *kvs).await?;
            counts.keys += response.kvs;
            counts.bytes += response.bytes;
        }
        Ok(counts)
    }

    fn client(&self) -> &Client {
        &self.client
    }
}
