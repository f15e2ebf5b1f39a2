//! What every integration test needs: a server process of its own, and clients for it.
//!
//! A target that is not on the machine is skipped with a line that says so; where `CI` is set, it is a failure instead.

mod certificates;
mod client;
mod http;
mod link;
mod postgres;
mod proxy;
mod random;
mod server;
mod stream;
mod tools;

use std::{fmt::Debug, future::Future, time::Duration};

use tokio::time::Instant;

pub use self::{
    certificates::{Authority, Certificate},
    client::Client,
    http::{Answer, http, http_get},
    link::{Link, Weather},
    postgres::{Fsync, Postgres},
    proxy::{Cut, Proxy},
    random::Random,
    server::{Place, Server},
    stream::{Stream, everything},
    tools::etcd_tool,
};

/// What a server keeps its log in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Sqlite,
    Postgres,
}

/// Makes tests of functions that take a backend, one on each. A function that is not listed is dead code.
macro_rules! on_both_backends {
    ($($name:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::support::Backend::Sqlite).await;
            })+
        }

        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::support::Backend::Postgres).await;
            })+
        }
    };
}
pub(crate) use on_both_backends;

/// How long a test waits for what should happen at once. Generous, as CI machines stall.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Says that a test does not run for want of `what`.
///
/// # Panics
/// Where `CI` is set: there, everything must be present.
pub fn skip(what: &str) {
    assert!(std::env::var_os("CI").is_none(), "CI has no {what}");
    println!("skipped: no {what}");
}

/// Asks `probe` again and again until it has an answer.
///
/// # Panics
/// When there is none within [`DEADLINE`].
pub async fn eventually<T, E, F>(what: &str, mut probe: impl FnMut() -> F) -> T
where
    E: Debug,
    F: Future<Output = Result<T, E>>,
{
    let deadline = Instant::now() + DEADLINE;
    loop {
        match probe().await {
            Ok(found) => return found,
            Err(error) if Instant::now() > deadline => panic!("{what} did not happen within {DEADLINE:?}: {error:?}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

mod tests {
    use orlop_wire::proto::client::etcdserverpb::{MemberListRequest, PutRequest, RangeRequest, StatusRequest};

    use super::{Backend, Client, Server};

    async fn acknowledged_write_survives_sigkill_and_sigterm(backend: Backend) {
        let Some(mut server) = Server::under_test(backend).await else { return };
        for (value, kill) in [("1", true), ("2", false)] {
            let mut client = Client::connect(server.endpoint()).await;
            client
                .kv
                .put(PutRequest { key: "k".into(), value: value.into(), ..Default::default() })
                .await
                .expect("the server takes a put");
            let pid = server.pid();
            if kill {
                server.kill();
            } else {
                server.terminate().await;
            }
            assert!(backend != Backend::Sqlite || server.data_dir().exists(), "the data outlives the process");
            server.restart().await;
            assert_ne!(pid, server.pid());

            let mut client = Client::connect(server.endpoint()).await;
            let range = RangeRequest { key: "k".into(), ..Default::default() };
            let kvs = client.kv.range(range).await.expect("the server takes a range").into_inner().kvs;
            assert_eq!(kvs.iter().map(|kv| &kv.value[..]).collect::<Vec<_>>(), [value.as_bytes()]);
        }
    }

    async fn one_member_leads_itself(backend: Backend) {
        let Some(server) = Server::under_test(backend).await else { return };
        let mut client = Client::connect(server.endpoint()).await;
        let status = client.maintenance.status(StatusRequest {}).await.expect("status answers").into_inner();
        let list = client.cluster.member_list(MemberListRequest::default()).await.expect("members answer").into_inner();
        assert_eq!(list.members.iter().map(|member| member.id).collect::<Vec<_>>(), [status.leader]);
    }

    on_both_backends!(acknowledged_write_survives_sigkill_and_sigterm, one_member_leads_itself,);
}
