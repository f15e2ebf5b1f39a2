//! `orlop status`: the state of a running server on one screen, from Maintenance.Status and `/metrics`.
//!
//! It works with etcd too. A property that the server does not report is unknown. [`insight`](crate::insight) reads the
//! properties that `orlop top` also shows.

mod requests;
mod text;

use std::time::Duration;

use orlop_client::{Client, MetricsPage, ServerFlags, describe, hint_at_user};
use orlop_wire::proto::client::etcdserverpb::{StatusRequest, StatusResponse};
use serde::Serialize;
use tokio::time::timeout;

use self::requests::{Durations, slowest};
use crate::{
    insight::{ServerState, server_state},
    output::{Format, json_line, print},
};

/// Maximum time for an answer, in which the server may wait for its database.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Number of methods whose durations are shown.
const SLOWEST_COUNT: usize = 3;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Output format
    #[arg(short, long, default_value = "simple", value_name = "FORMAT")]
    write_out: Format,

    /// Only ask `/readyz` whether the server is ready, which needs no user; the exit status is 1 if it is not
    #[arg(long, conflicts_with = "write_out")]
    ready: bool,

    #[command(flatten)]
    server: ServerFlags,
}

/// The state of a server. `None`: unknown.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    endpoint: String,
    #[serde(flatten)]
    server: ServerState,
    instances: Option<i64>,
    is_leader: bool,
    /// Unix time; 0: none since the start of the server.
    last_compaction: Option<i64>,
    /// Unix time; 0: none.
    last_snapshot: Option<i64>,
    slowest_requests: Vec<Durations>,
}

/// Runs the command and prints its result.
///
/// # Errors
///
/// A text for the operator.
pub async fn run(args: Args) -> Result<(), Box<dyn std::error::Error>> {
    let endpoint = args.server.endpoint().to_string();
    let client = args.server.connect().await?;
    if args.ready {
        let ready = within_limit(async { client.get("/readyz").await.map_err(|error| error.message().to_owned()) });
        let ready = ready.await.map_err(|error| format!("{endpoint} is not ready: {error}"))?;
        return Ok(print(ready.as_bytes())?);
    }
    let status = within_limit(read(&client)).await;
    let status = status.map_err(|error| format!("cannot read the status of {endpoint}: {error}"))?;
    let text = match args.write_out {
        Format::Simple => text::simple(&status, orlop_core::clock::now()),
        Format::Json => json_line(&serde_json::to_string(&status)?),
    };
    Ok(print(text.as_bytes())?)
}

async fn within_limit<T>(answer: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    timeout(ANSWER_MAX, answer).await.unwrap_or_else(|_| Err(format!("no answer within {} s", ANSWER_MAX.as_secs())))
}

async fn read(client: &Client) -> Result<Status, String> {
    let refused = |status: tonic::Status| format!("{}{}", describe(&status), hint_at_user(&status));
    let answer = client.maintenance().status(StatusRequest {}).await.map_err(refused)?;
    // A server may have no metrics at this address.
    let page = client.metrics().await.unwrap_or_default();
    Ok(status_of(client.endpoint().to_string(), answer.into_inner(), &page))
}

fn status_of(endpoint: String, answer: StatusResponse, page: &MetricsPage) -> Status {
    let number = |name: &str| page.value(name).map(|value| value as i64);
    let server = server_state(answer, Some(page));
    Status {
        endpoint,
        instances: number("orlop_instances"),
        is_leader: server.leader_id == server.member_id,
        last_compaction: number("etcd_debugging_mvcc_db_compaction_last"),
        last_snapshot: number("orlop_snapshot_last_timestamp_seconds"),
        slowest_requests: slowest(page, SLOWEST_COUNT),
        server,
    }
}

#[cfg(test)]
mod tests {
    use orlop_wire::proto::client::etcdserverpb::ResponseHeader;

    use super::*;

    /// Other instances do not measure it.
    #[test]
    fn kept_history_is_known_from_the_leader() {
        for (leader, want, line) in [(7, Some(2048), "2.0 KiB of compacted rows"), (8, None, "unknown")] {
            let header = Some(ResponseHeader { member_id: 7, ..ResponseHeader::default() });
            let answer = StatusResponse { header, leader, ..StatusResponse::default() };
            let page = MetricsPage::new("orlop_history_bytes 2048\n".to_owned());
            let status = status_of("http://a:1".to_owned(), answer, &page);
            assert_eq!(status.server.history_bytes, want);
            let text = text::simple(&status, std::time::SystemTime::UNIX_EPOCH);
            assert!(text.contains(&format!("kept history      {line}\n")), "{text}");
        }
    }

    #[test]
    fn texts_of_the_server_have_no_control_characters() {
        let answer = StatusResponse {
            version: "3.6\x1b[2J".to_owned(),
            errors: vec!["al\x07arm\n".to_owned()],
            ..StatusResponse::default()
        };
        let page = "orlop_database_info{kind=\"SQL\rite\"} 1\n\
             grpc_server_handling_seconds_count{grpc_method=\"Pu\x1bt\",grpc_service=\"KV\",grpc_type=\"unary\"} 1\n";
        let status = status_of("http://a:1".to_owned(), answer, &MetricsPage::new(page.to_owned()));
        assert_eq!((&*status.server.version, status.server.database.as_deref()), ("3.6 [2J", Some("SQL ite")));
        assert_eq!((&*status.server.alarms[0], &*status.slowest_requests[0].request), ("al arm", "KV/Pu t"));
        let json = serde_json::to_value(&status).expect("JSON");
        assert_eq!(
            (&json["version"], &json["alarms"][0], &json["isLeader"]),
            (&"3.6 [2J".into(), &"al arm".into(), &true.into())
        );
    }
}
