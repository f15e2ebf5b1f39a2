//! How each fault is injected and ended.

use std::{path::Path, time::Duration};

use orlop_core::supervise::EXIT_DISK_FAILED;
use orlop_wire::proto::client::etcdserverpb::{
    Compare, LeaseGrantRequest, LeaseKeepAliveRequest, LeaseTimeToLiveRequest, PutRequest, RequestOp, TxnRequest,
    compare::{CompareResult, CompareTarget, TargetUnion},
    request_op::Request,
};
use rustix::process::Signal;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_stream::StreamExt as _;
use tonic::Code;

use super::{
    faults::{
        Kind::{self, *},
        LinkSide::{self, *},
    },
    preload::{DATABASE, EIO, Field},
    rig::{Rig, Target, limit},
    workload::Workload,
};
use crate::support::{
    Client, DEADLINE, NetworkState, Random, all, eventually, get, http_get, memory_kib, put, send_signal,
};

/// Injects a fault and ends it. Returns the time, on the clients' clock, from which the clients' waits are measured.
pub async fn strike(kind: Kind, rig: &mut Rig, workload: &Workload, random: &mut Random) -> u64 {
    match kind {
        Kill => {
            rig.server().kill();
            let since = workload.now();
            rig.restart(0).await;
            since
        }
        PowerCut => cut_power(rig, workload).await,
        PostgresCrash => {
            rig.postgres().crash();
            let since = workload.now();
            rig.postgres().start_again().await;
            since
        }
        BackendKill => {
            kill_backend(rig);
            workload.now()
        }
        Reset(side) => {
            let since = workload.now();
            assert!(reset(rig, side) > 0, "there are connections");
            since
        }
        Cut(side) => {
            set_network(rig, side, NetworkState::Down);
            reset(rig, side);
            let since = workload.now();
            sleep(Duration::from_secs(1)).await;
            set_network(rig, side, NetworkState::Normal);
            since
        }
        Silence(side) => for_two_seconds(rig, side, NetworkState::Silent, workload).await,
        Delay(side) => for_two_seconds(rig, side, NetworkState::Slow(Duration::from_millis(100)), workload).await,
        Pause => {
            let victim = random.below(rig.servers.len());
            rig.servers[victim].pause();
            let since = workload.now();
            sleep(Duration::from_secs(2)).await;
            rig.servers[victim].resume();
            since
        }
        DiskFull => fill_disk(rig, workload).await,
        SyncFails(files) => fail_syncs(files, rig, workload, random).await,
        WriteFails(files, errno) => fail_writes(files, errno, rig, workload).await,
        SlowSync => {
            rig.preload().set(Field::SyncDelayMs, 500);
            let since = workload.now();
            wait_for_injections(rig, Field::SyncsDelayed, 3).await;
            rig.preload().set(Field::SyncDelayMs, 0);
            since
        }
        ClockJump(secs) => {
            let since = workload.now();
            jump(secs, rig).await;
            since
        }
        NoDescriptors => exhaust_descriptors(rig, workload).await,
        NoMemory => exhaust_memory(rig, workload).await,
    }
}

async fn cut_power(rig: &mut Rig, workload: &Workload) -> u64 {
    rig.server().kill();
    let since = workload.now();
    let data = rig.server().data_dir();
    rig.preload().cut_power(&data);
    rig.restart(0).await;
    since
}

fn kill_backend(rig: &Rig) {
    let postgres = rig.postgres();
    let sql = "SELECT pid FROM pg_stat_activity WHERE application_name = 'orlop' AND query LIKE '%orlop_append%' \
               ORDER BY query_start DESC LIMIT 1";
    let pid = postgres.psql("postgres", sql);
    send_signal(pid.parse().unwrap_or_else(|_| panic!("not a process: `{pid}`")), Signal::KILL);
}

fn links(rig: &Rig, side: LinkSide) -> Vec<&crate::support::Link> {
    match side {
        ToClients => rig.client_links.iter().collect(),
        ToDatabase => rig.database_link.iter().collect(),
    }
}

fn set_network(rig: &Rig, side: LinkSide, network: NetworkState) {
    links(rig, side).iter().for_each(|link| link.set_network(network));
}

fn reset(rig: &Rig, side: LinkSide) -> usize {
    links(rig, side).iter().map(|link| link.reset()).sum()
}

async fn for_two_seconds(rig: &Rig, side: LinkSide, network: NetworkState, workload: &Workload) -> u64 {
    set_network(rig, side, network);
    let since = workload.now();
    sleep(Duration::from_secs(2)).await;
    set_network(rig, side, NetworkState::Normal);
    since
}

/// Returns a write that is not part of the workload.
fn probe() -> PutRequest {
    put("probe", format!("{:<400}", 1))
}

/// Time after which etcd counts as affected by a full disk, although it still accepts writes.
const ETCD_FULL_NANOS: u64 = 3_000_000_000;

/// Fills the disk and waits until a write is refused. On SQLite the error must state that nothing was written, reads
/// must continue, and the process must not end.
async fn fill_disk(rig: &mut Rig, workload: &Workload) -> u64 {
    let endpoint = rig.server().endpoint().to_owned();
    let pid = rig.server().pid();
    rig.disk.as_ref().expect("this fault has a disk").fill();
    let since = workload.now();
    let refusal = eventually("an answer that there is no space, or the end of the server", async || {
        if !Path::new("/proc").join(pid.to_string()).join("exe").exists() {
            return Ok(None);
        }
        let mut client = Client::try_connect(&endpoint).await.map_err(|error| error.to_string())?;
        match client.kv.put(probe()).await {
            Err(status) if status.code() == Code::ResourceExhausted => Ok(Some(status.message().to_owned())),
            // Postgres may be restarting.
            Err(_) if rig.target == Target::Postgres => Ok(None),
            // etcd has preallocated its WAL, so it can write for some time.
            Ok(_) if rig.target == Target::Etcd && workload.now() - since > ETCD_FULL_NANOS => Ok(None),
            other => Err(format!("{other:?}; it logged {}", rig.servers[0].log_tail())),
        }
    })
    .await;
    if rig.target == Target::Sqlite {
        assert_eq!(refusal.as_deref(), Some("etcdserver: mvcc: database space exceeded"));
        let mut client = Client::connect(&endpoint).await;
        let read = client.kv.range(all()).await.expect("reads continue");
        assert!(read.into_inner().count > 0);
    }
    rig.disk.as_ref().expect("this fault has a disk").empty();
    if !rig.server().runs() {
        assert!(rig.target == Target::Etcd, "the server ended; it logged:\n{}", rig.servers[0].log_tail());
        rig.restart(0).await;
    }
    if let Some(postgres) = &rig.postgres
        && !postgres.runs()
    {
        postgres.start_again().await;
    }
    assert!(rig.target == Target::Etcd || rig.server().pid() == pid);
    since
}

/// Waits until the preloaded library has injected `more` additional failures or delays.
async fn wait_for_injections(rig: &mut Rig, field: Field, more: i64) {
    let before = rig.preload().get(field);
    let Rig { preload, servers, .. } = rig;
    let (preload, server) = (preload.as_ref().expect("this fault preloads the library"), &mut servers[0]);
    eventually("the fault", || {
        assert!(server.runs(), "the server ended by itself; it logged:\n{}", server.log_tail());
        let injected = preload.get(field) - before;
        std::future::ready(if injected >= more { Ok(()) } else { Err((field, injected)) })
    })
    .await;
}

/// The kernel reports a failed write to the disk only once and discards the data, so the next sync can succeed although
/// the data is not on the disk. A power cut shows whether the server relied on such a sync.
async fn fail_syncs(files: i64, rig: &mut Rig, workload: &Workload, random: &mut Random) -> u64 {
    rig.preload().set(Field::WriteBack, random.between(0, 50));
    rig.preload().set(Field::SyncErrno, EIO);
    rig.preload().set(Field::SyncFiles, files);
    let since = workload.now();
    if files == DATABASE {
        assert_eq!(rig.server().ended().await.code(), Some(EXIT_DISK_FAILED));
        rig.preload().set(Field::SyncFiles, 0);
        if random.chance(50) {
            // The power fails when the new process has written the pages again.
            rig.restart(0).await;
            rig.wait_for_all_clients(workload).await;
        }
        return cut_power(rig, workload).await;
    }
    wait_for_injections(rig, Field::SyncsFailed, random.between(1, 6)).await;
    if random.chance(50) {
        rig.preload().set(Field::SyncFiles, 0);
        if random.chance(50) {
            return since;
        }
        // Some writes succeed before the power is cut.
        rig.wait_for_all_clients(workload).await;
    }
    rig.server().kill();
    rig.preload().set(Field::SyncFiles, 0);
    if random.chance(50) {
        // A new process must not append after a commit that is not on the disk.
        rig.restart(0).await;
        rig.wait_for_all_clients(workload).await;
    }
    cut_power(rig, workload).await
}

async fn fail_writes(files: i64, errno: i64, rig: &mut Rig, workload: &Workload) -> u64 {
    let pid = rig.server().pid();
    rig.preload().set(Field::WriteErrno, errno);
    rig.preload().set(Field::WriteFiles, files);
    let since = workload.now();
    wait_for_injections(rig, Field::WritesFailed, 3).await;
    rig.preload().set(Field::WriteFiles, 0);
    assert_eq!(rig.server().pid(), pid);
    since
}

/// Longer than a stall of the machine between the grant and the put.
const SHORT_TTL_SECS: i64 = 8;
const LONG_TTL_SECS: i64 = 60;

/// Lets the clock jump and jump back. A lease that is kept alive must survive both jumps; a lease that is not kept
/// alive must expire, with its key.
async fn jump(secs: i64, rig: &mut Rig) {
    let mut client = Client::connect(rig.server().endpoint()).await;
    let mut leases = Vec::new();
    for ttl in [SHORT_TTL_SECS, LONG_TTL_SECS] {
        let granted = client.lease.lease_grant(LeaseGrantRequest { ttl, id: 0 }).await.expect("a grant").into_inner();
        let put = PutRequest { lease: granted.id, ..put(format!("leased/{ttl}"), "1") };
        client.kv.put(put).await.expect("a put");
        leases.push(granted.id);
    }
    let before = rig.preload().get(Field::ClocksShifted);
    for offset in [secs, 0] {
        rig.preload().set(Field::ClockSecs, offset);
        // The Date header of an HTTP/1 response needs the wall clock; without this request the server may never read
        // the clock.
        assert!(http_get(rig.server().endpoint(), "/version").await.header("date").is_some());
        let ttl = keep_alive(&mut client, leases[1]).await;
        assert_eq!(ttl, LONG_TTL_SECS, "the lease exists when the clock is off by {offset} s");
        assert!(has_key(&mut client, LONG_TTL_SECS).await, "its key exists when the clock is off by {offset} s");
    }
    eventually("the end of the lease that is not kept alive", async || {
        let left = LeaseTimeToLiveRequest { id: leases[0], keys: false };
        let left = client.clone().lease.lease_time_to_live(left).await.map_err(|status| status.to_string())?;
        match left.into_inner().ttl {
            -1 if !has_key(&mut client.clone(), SHORT_TTL_SECS).await => Ok(()),
            ttl => Err(format!("it has {ttl} s left")),
        }
    })
    .await;
    assert!(has_key(&mut client, LONG_TTL_SECS).await);
    assert!(rig.preload().get(Field::ClocksShifted) > before, "the clock was read");
}

async fn keep_alive(client: &mut Client, id: i64) -> i64 {
    let requests = tokio_stream::once(LeaseKeepAliveRequest { id }).chain(tokio_stream::pending());
    let mut answers = client.lease.lease_keep_alive(requests).await.expect("a stream").into_inner();
    answers.message().await.expect("the stream lives").expect("an answer").ttl
}

async fn has_key(client: &mut Client, ttl: i64) -> bool {
    client.kv.range(get(format!("leased/{ttl}"))).await.expect("a range").into_inner().count == 1
}

/// The limit of file descriptors. It is below the number in use: open descriptors stay open, but no new one is allowed.
const DESCRIPTORS: &str = "8";

async fn exhaust_descriptors(rig: &mut Rig, workload: &Workload) -> u64 {
    limit(rig.server(), "nofile", DESCRIPTORS);
    assert!(reset(rig, ToClients) > 0, "there are connections");
    let since = workload.now();
    sleep(Duration::from_secs(1)).await;
    assert_eq!(workload.recovered_since(since), 0, "no client could connect");
    limit(rig.server(), "nofile", "1024");
    since
}

/// Opens another connection and sends large requests that have no effect on it. `asking` holds the connection.
async fn demand_memory(endpoint: &str, asking: &mut JoinSet<()>) {
    let Ok(Ok(client)) = timeout(CONNECT_TIME, Client::try_connect(endpoint)).await else { return };
    let never = Compare {
        result: CompareResult::Less.into(),
        target: CompareTarget::Version.into(),
        key: "probe".into(),
        target_union: Some(TargetUnion::Version(0)),
        ..Default::default()
    };
    let put = put("probe", vec![b'1'; LARGE_BYTES]);
    let success = vec![RequestOp { request: Some(Request::RequestPut(put)) }];
    let txn = TxnRequest { compare: vec![never], success, failure: Vec::new() };
    for _ in 0..LARGE_REQUESTS {
        let (mut client, txn) = (client.clone(), txn.clone());
        asking.spawn(async move {
            // The requests fail when the server ends, as intended.
            let _ = client.kv.txn(txn).await;
            std::future::pending().await
        });
    }
}

/// Maximum time to connect to a server that may have no memory left.
const CONNECT_TIME: Duration = Duration::from_secs(1);

const LARGE_BYTES: usize = 1_400_000;
const LARGE_REQUESTS: usize = 8;

/// Limits the server's memory until its process ends, and starts it again. A process without memory cannot continue.
async fn exhaust_memory(rig: &mut Rig, workload: &Workload) -> u64 {
    // The private memory that the process can write to.
    let data = memory_kib(rig.server().pid(), "VmData") * 1024;
    limit(rig.server(), "data", &data.to_string());
    let endpoint = rig.server().endpoint().to_owned();
    let deadline = Instant::now() + DEADLINE;
    let mut asking = JoinSet::new();
    while rig.server().runs() {
        assert!(Instant::now() < deadline, "the server does not run out of memory");
        demand_memory(&endpoint, &mut asking).await;
    }
    drop(asking);
    let since = workload.now();
    rig.restart(0).await;
    since
}
