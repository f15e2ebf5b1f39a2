//! `orlop status`: the state of a running server on one screen, from Maintenance.Status and `/metrics`.
//!
//! It works with etcd too. A property that the server does not report is unknown.

mod requests;
mod text;

use orlop_client::{Client, MetricsPage, ServerFlags, describe};
use orlop_wire::proto::client::etcdserverpb::{StatusRequest, StatusResponse};
use serde::Serialize;

use self::requests::{Durations, slowest};
use crate::output::{Format, print};

/// Number of kinds of requests whose durations are shown.
const SLOWEST_COUNT: usize = 3;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Output format
    #[arg(short, long, default_value = "simple", value_name = "FORMAT")]
    write_out: Format,

    #[command(flatten)]
    server: ServerFlags,
}

/// The state of a server. `None`: unknown.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    endpoint: String,
    /// Orlop's version.
    orlop_version: Option<String>,
    /// The etcd version whose API is served.
    version: String,
    database: Option<String>,
    revision: i64,
    /// -1: the store has never been compacted.
    compact_revision: Option<i64>,
    keys: Option<i64>,
    db_size: i64,
    db_size_in_use: i64,
    /// 0: there is no quota.
    db_size_quota: Option<i64>,
    instances: Option<i64>,
    is_leader: bool,
    watchers: Option<i64>,
    watch_streams: Option<i64>,
    leases: Option<i64>,
    /// Unix time; 0: none since the start of the server.
    last_compaction: Option<i64>,
    /// Unix time; 0: none.
    last_snapshot: Option<i64>,
    slowest_requests: Vec<Durations>,
    /// Alarms and other errors.
    errors: Vec<String>,
}

/// Runs the command and prints its result.
///
/// # Errors
///
/// A text for the operator.
pub async fn run(args: Args) -> Result<(), Box<dyn std::error::Error>> {
    let endpoint = args.server.endpoint().to_string();
    let client = args.server.connect().await?;
    let status = read(&client).await.map_err(|error| format!("cannot read the status of {endpoint}: {error}"))?;
    let text = match args.write_out {
        Format::Simple => text::simple(&status, crate::snapshot::now()),
        Format::Json => format!("{}\n", serde_json::to_string(&status)?),
    };
    Ok(print(text.as_bytes())?)
}

async fn read(client: &Client) -> Result<Status, String> {
    let answer = client.maintenance().status(StatusRequest {}).await.map_err(|status| describe(&status))?;
    // A server may have no metrics at this address.
    let page = client.metrics().await.unwrap_or_default();
    Ok(status_of(client.endpoint().to_string(), answer.into_inner(), &page))
}

fn status_of(endpoint: String, answer: StatusResponse, page: &MetricsPage) -> Status {
    let number = |name: &str| page.value(name).map(|value| value as i64);
    let label = |metric: &str, label: &str| {
        let found = page.series(metric).find(|(_, value)| *value > 0.0);
        found.and_then(|(labels, _)| labels.get(label).map(|value| (*value).to_owned()))
    };
    let header = answer.header.unwrap_or_default();
    // etcd before 3.6 does not report its quota in the response.
    let quota =
        number("etcd_server_quota_backend_bytes").or((answer.db_size_quota > 0).then_some(answer.db_size_quota));
    Status {
        endpoint,
        orlop_version: label("orlop_build_info", "version"),
        version: answer.version,
        database: label("orlop_database_info", "kind"),
        revision: header.revision,
        compact_revision: number("etcd_debugging_mvcc_compact_revision"),
        keys: number("etcd_debugging_mvcc_keys_total"),
        db_size: answer.db_size,
        db_size_in_use: answer.db_size_in_use,
        db_size_quota: quota,
        instances: number("orlop_instances"),
        is_leader: answer.leader == header.member_id,
        watchers: number("etcd_debugging_mvcc_watcher_total"),
        watch_streams: number("etcd_debugging_mvcc_watch_stream_total"),
        leases: number("orlop_leases"),
        last_compaction: number("etcd_debugging_mvcc_db_compaction_last"),
        last_snapshot: number("orlop_snapshot_last_timestamp_seconds"),
        slowest_requests: slowest(page, SLOWEST_COUNT),
        errors: answer.errors.iter().map(|error| error.trim().to_owned()).collect(),
    }
}
