//! The scenario that lists: all keys at once, in pages, at an old revision.

use std::collections::BTreeMap;

use tonic::Status;

use super::{
    Bench, Error,
    args::{at_least_one, value_size},
    closed_loop::{Done, Worker},
    connection::Client,
    report::{self, Report},
    write::filler,
};
use orlop_wire::proto::client::etcdserverpb::RangeRequest;

#[derive(Debug, clap::Args)]
pub struct Range {
    /// Bytes of each value
    #[arg(long, default_value = "1024", value_parser = value_size, value_name = "BYTES")]
    value_size: usize,

    /// Keys in the range
    #[arg(long, default_value = "10000", value_parser = at_least_one, value_name = "N")]
    keys: usize,

    /// Read in pages of so many keys, all of them at one revision; an operation is all pages [default: all keys at once]
    #[arg(long, value_parser = at_least_one, value_name = "KEYS")]
    page: Option<usize>,

    /// Write every key once more, and read what was there before
    #[arg(long)]
    old_revision: bool,

    /// Take what the endpoint has, without asking whether it is the newest
    #[arg(long)]
    serializable: bool,
}

impl Range {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        bench.load(self.keys, self.value_size).await?;
        let pages = self.pages(bench, bench.keys.revision(&bench.pool.client(0)).await?);
        if self.old_revision {
            bench.keys.load(&bench.pool, self.keys, &filler(self.value_size), &bench.interrupt).await?;
        }
        let lister = |number| Lister { client: bench.pool.client(number), pages: pages.clone() };
        let recorder = bench.drive(bench.workers(lister)).await;
        let mebibytes = report::per_sec(recorder.done.bytes, recorder.elapsed()) / f64::from(1 << 20);
        let facts = BTreeMap::from([
            ("keys_per_sec", report::per_sec(recorder.done.keys, recorder.elapsed())),
            ("mib_per_sec", report::rounded(mebibytes)),
        ]);
        Ok(bench.report("range", self.value_size, &recorder, facts))
    }

    /// The requests of one list. As a client that follows pages does, the first asks for the newest revision and the
    /// others for the revision of the first.
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
    /// How many pairs the answer has.
    kvs: u64,
}

struct Lister {
    client: Client,
    pages: Vec<Page>,
}

impl Worker for Lister {
    async fn step(&mut self, _stamp: u64) -> Result<Done, Status> {
        let mut done = Done::default();
        for Page { request, kvs } in &self.pages {
            let answer = self.client.range_of(request.clone(), *kvs).await?;
            done.keys += answer.kvs;
            done.bytes += answer.bytes;
        }
        Ok(done)
    }

    fn client(&self) -> &Client {
        &self.client
    }
}
