//! `orlop migrate`: a store is copied while clients write to it, and clients go on at the copy where they were.

mod moved;
mod older;
mod sources;
mod stopped;

use std::{
    fs::File,
    path::PathBuf,
    process::ExitStatus,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use orlop_wire::proto::client::etcdserverpb::{
    AuthEnableRequest, AuthUserAddRequest, AuthUserGrantRoleRequest, CompactionRequest, LeaseGrantRequest,
};
use rustix::process::Signal;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tonic::Code;

use crate::{
    snapshot::{
        self,
        etcd::{add_users, check_same, seen},
    },
    support::{
        Backend, Client, Etcd, Link, Postgres, Random, Server, Started, eventually, get, on_both_backends, orlop,
        prints, put, run, send_signal,
    },
};

const WRITERS: u64 = 16;
/// Requests between two kills of the migration.
const WRITES_BETWEEN_KILLS: usize = 400;
const KILLS: usize = 4;

/// An empty database, and a folder for everything else.
struct Destination {
    datastore: String,
    home: TempDir,
}

impl Destination {
    async fn new(backend: Backend) -> Option<Self> {
        let home = TempDir::new().expect("a folder");
        let datastore = match backend {
            Backend::Sqlite => format!("sqlite://{}", home.path().join("copy/orlop.db").display()),
            Backend::Postgres => Postgres::shared().await?.create_database(),
        };
        Some(Self { datastore, home })
    }

    /// Starts a migration that does not serve.
    fn migrate(&self, source: &str, flags: &[&str]) -> Migrator {
        let output = self.home.path().join("output");
        let file = File::create(&output).expect("a file");
        let mut migrate = orlop(["migrate", "--from", source, "--datastore-endpoint", &self.datastore]);
        migrate.args(flags).stdout(file.try_clone().expect("a descriptor")).stderr(file);
        Migrator { process: Started::spawn(&mut migrate), output }
    }

    /// Copies the source as it is, and returns what the migration printed.
    async fn copied(&self, source: &Server, flags: &[&str]) -> String {
        let mut migrator = self.migrate(source.endpoint(), &[&["--once"], flags].concat());
        let status = migrator.ended().await;
        assert!(status.success(), "{}", migrator.output());
        migrator.output()
    }

    /// Runs a migration that must fail with all of these texts.
    async fn check_refused(&self, source: &Server, because: &[&str]) {
        let mut migrator = self.migrate(source.endpoint(), &["--once"]);
        let status = migrator.ended().await;
        let text = migrator.output();
        assert_eq!(status.code(), Some(1), "{text}");
        for because in because {
            assert!(text.contains(because), "no {because:?}: {text}");
        }
    }

    /// Starts a server on the copy, which must be sound.
    async fn server(&self) -> Server {
        prints(&["check", "--datastore-endpoint", &self.datastore]);
        Server::orlop_on(&self.datastore, &[]).await
    }

    /// Takes over from the source. Returns the server when it serves.
    async fn cut_over(&self, source: &Server, flags: &[&str]) -> Server {
        Server::orlop_on(&self.datastore, &[&["migrate", "--from", source.endpoint(), "--cut-over"], flags].concat())
            .await
    }
}

struct Migrator {
    process: Started,
    output: PathBuf,
}

impl Migrator {
    fn output(&self) -> String {
        std::fs::read_to_string(&self.output).expect("a file")
    }

    /// Waits until the migration has printed a text; it must not end before.
    async fn says(&mut self, text: &str) {
        eventually(text, || {
            // Asked first: a migration may end right after it has printed the text.
            let status = self.process.try_wait().expect("our child");
            let output = self.output();
            let is_said = output.contains(text);
            assert!(is_said || status.is_none(), "it ended with {status:?} without {text:?}: {output}");
            std::future::ready(if is_said { Ok(()) } else { Err(output) })
        })
        .await;
    }

    async fn ended(&mut self) -> ExitStatus {
        let what = format!("the end of a migration that prints to {}", self.output.display());
        eventually(&what, || std::future::ready(self.process.try_wait().expect("our child").ok_or("it runs"))).await
    }

    fn kill(mut self) {
        self.process.kill().expect("our child");
        self.process.wait().expect("our child");
    }

    /// Sends SIGTERM.
    fn signal(&self) {
        send_signal(self.process.id(), Signal::TERM);
    }

    async fn terminate(mut self) -> (ExitStatus, String) {
        self.signal();
        (self.ended().await, self.output())
    }
}

/// Starts the source of a migration: etcd, or Orlop on the other database.
async fn source(of: Source, backend: Backend) -> Option<Server> {
    let other = if backend == Backend::Sqlite { Backend::Postgres } else { Backend::Sqlite };
    match of {
        Source::Etcd(etcd) => Server::etcd_of(etcd, &[], None).await,
        Source::Orlop => Server::orlop(other).await,
    }
}

#[derive(Clone, Copy)]
enum Source {
    Etcd(Etcd),
    Orlop,
}

/// Writers that compact as well, a migration that is killed and loses its connection, and at the end equal stores.
async fn migrates_under_load(of: Source, backend: Backend) {
    let Some(source) = source(of, backend).await else { return };
    let Some(destination) = Destination::new(backend).await else { return };
    let link = Link::to(source.port()).await;
    let address = format!("http://127.0.0.1:{}", link.port());
    add_users(&mut Client::connect(source.endpoint()).await).await;
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::<AtomicUsize>::default());
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let client = Client::connect(source.endpoint()).await;
        writers.spawn(snapshot::write(client, writer, Arc::clone(&stop), Arc::clone(&done)));
    }
    let written = async |more: usize| {
        let enough = done.load(Ordering::Relaxed) + more;
        eventually("the writes", async || (done.load(Ordering::Relaxed) >= enough).then_some(()).ok_or("few")).await;
    };
    let mut random = Random::new(7);
    for _ in 0..KILLS {
        let migrator = destination.migrate(&address, &[]);
        written(random.below(WRITES_BETWEEN_KILLS)).await;
        link.reset();
        written(random.below(WRITES_BETWEEN_KILLS)).await;
        migrator.kill();
    }
    stop.store(true, Ordering::Relaxed);
    while let Some(writer) = writers.join_next().await {
        writer.expect("a writer");
    }
    let output = destination.copied(&source, &[]).await;
    assert!(output.contains("verified"), "{output}");
    let before = seen(&mut Client::connect(source.endpoint()).await).await;
    let copy = destination.server().await;
    check_same(&seen(&mut Client::connect(copy.endpoint()).await).await, &before);
}

async fn etcd_is_copied_under_load(backend: Backend) {
    for etcd in Etcd::ALL {
        println!("{etcd}");
        migrates_under_load(Source::Etcd(etcd), backend).await;
    }
}

async fn orlop_is_copied_under_load(backend: Backend) {
    migrates_under_load(Source::Orlop, backend).await;
}

async fn writes_at_the_source_after_the_cut_over_are_named(backend: Backend) {
    let Some(source) = Server::etcd().await else { return };
    let Some(destination) = Destination::new(backend).await else { return };
    let mut client = Client::connect(source.endpoint()).await;
    client.put("before", [1]).await;
    let copy = destination.cut_over(&source, &[]).await;
    client.put("after", [1]).await;
    client.lease.lease_grant(LeaseGrantRequest { ttl: 60, id: 0x7007 }).await.expect("a lease");
    eventually("the names of the writes", async || {
        let log = copy.log();
        let is_named = log.contains("\"after\"") && log.contains("7007") && !log.contains("\"before\"");
        if is_named { Ok(()) } else { Err(log) }
    })
    .await;
}

async fn compacted_source_is_copied_again(backend: Backend) {
    let Some(source) = Server::etcd().await else { return };
    let Some(destination) = Destination::new(backend).await else { return };
    let mut client = Client::connect(source.endpoint()).await;
    add_users(&mut client).await;
    let fill = async |client: &mut Client| {
        for number in 0..20 {
            client.put(format!("key/{}", number % 7), [number]).await;
        }
    };
    fill(&mut client).await;
    let mut migrator = destination.migrate(source.endpoint(), &[]);
    migrator.says("restored a snapshot").await;
    migrator.kill();
    let refused = run(&mut orlop(["--datastore-endpoint", &destination.datastore]));
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("unfinished copy of another store"), "{text}");
    fill(&mut client).await;
    client.kv.compact(CompactionRequest { revision: 35, physical: true }).await.expect("a compaction");
    let output = destination.copied(&source, &[]).await;
    assert!(output.contains("the source was compacted; starting again with a new snapshot"), "{output}");
    let copy = destination.server().await;
    check_same(&seen(&mut Client::connect(copy.endpoint()).await).await, &seen(&mut client).await);
}

/// To watch a store from its first revision, etcd reads its whole history, and writes wait.
async fn history_of_a_source_without_compactions_is_not_watched(backend: Backend) {
    const READS: &str =
        r#"grpc_server_started_total{grpc_method="Range",grpc_service="etcdserverpb.KV",grpc_type="unary"}"#;
    const WATCHES: &str =
        r#"grpc_server_started_total{grpc_method="Watch",grpc_service="etcdserverpb.Watch",grpc_type="bidi_stream"}"#;
    let Some(source) = Server::etcd().await else { return };
    let Some(destination) = Destination::new(backend).await else { return };
    let mut client = Client::connect(source.endpoint()).await;
    client.put("key", [1]).await;
    let mut migrator = destination.migrate(source.endpoint(), &[]);
    migrator.says("restored a snapshot").await;
    // After the first three reads, one of which is the test's, one asks for the compact revision; the others ask for the
    // newest revision.
    eventually("the migration's reads", async || match source.metric(READS).await {
        reads if reads >= 5.0 => Ok(()),
        reads => Err(reads),
    })
    .await;
    assert_eq!(source.metric(WATCHES).await, 1.0, "the watch of the newest changes");
    migrator.kill();
}

/// At its compact revision, etcd 3.4 tells no hash, and later versions the one from before the compaction.
async fn source_compacted_at_its_head_is_copied(backend: Backend) {
    for etcd in Etcd::ALL {
        println!("{etcd}");
        let Some(source) = Server::etcd_of(etcd, &[], None).await else { continue };
        let Some(destination) = Destination::new(backend).await else { return };
        let mut client = Client::connect(source.endpoint()).await;
        for number in 0..5 {
            client.put(format!("key/{}", number % 2), [number]).await;
        }
        client.kv.compact(CompactionRequest { revision: 6, physical: true }).await.expect("a compaction");
        for says in ["restored a snapshot", "continuing with"] {
            let output = destination.copied(&source, &[]).await;
            assert!(output.contains(says) && output.contains("at revision 6"), "{output}");
        }
    }
}

/// A watch does not tell changes of users.
async fn changed_users_are_copied_again(backend: Backend) {
    let Some(source) = Server::etcd().await else { return };
    let Some(destination) = Destination::new(backend).await else { return };
    let mut client = Client::connect(source.endpoint()).await;
    add_users(&mut client).await;
    let mut migrator = destination.migrate(source.endpoint(), &[]);
    migrator.says("restored a snapshot").await;
    let bob = AuthUserAddRequest { name: "bob".to_owned(), password: "late".to_owned(), ..Default::default() };
    client.auth.user_add(bob).await.expect("a user");
    let (status, output) = migrator.terminate().await;
    assert!(status.success() && output.contains("users or roles of the source have changed"), "{output}");
    let copy = destination.server().await;
    check_same(&seen(&mut Client::connect(copy.endpoint()).await).await, &seen(&mut client).await);
}

async fn store_with_auth_is_copied_by_root(backend: Backend) {
    for etcd in Etcd::ALL {
        println!("{etcd}");
        store_with_auth_is_copied(etcd, backend).await;
    }
}

async fn store_with_auth_is_copied(etcd: Etcd, backend: Backend) {
    let Some(source) = Server::etcd_of(etcd, &[], None).await else { return };
    let Some(destination) = Destination::new(backend).await else { return };
    let mut client = Client::connect(source.endpoint()).await;
    add_users(&mut client).await;
    let root = AuthUserGrantRoleRequest { user: "root".to_owned(), role: "root".to_owned() };
    client.auth.user_grant_role(root).await.expect("a role");
    client.auth.auth_enable(AuthEnableRequest {}).await.expect("users");
    let hint = "--user, or the variables ETCDCTL_USER and ETCDCTL_PASSWORD";
    destination.check_refused(&source, &["the source refuses a request", "user name is empty", hint]).await;
    let file = destination.home.path().join("saved.db");
    let save = ["snapshot", "save", "--endpoints", source.endpoint(), file.to_str().expect("text")];
    let refused = run(&mut orlop(save));
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains(hint), "{text}");
    destination.copied(&source, &["--user", "root:wonder"]).await;
    let copy = destination.server().await;
    let mut client = Client::connect(copy.endpoint()).await;
    let refused = client.kv.range(get("a")).await.expect_err("a login is needed");
    assert_eq!((refused.code(), refused.message()), (Code::InvalidArgument, "etcdserver: user name is empty"));
    let token = client.log_in("alice", "wonder").await.expect("the password is copied");
    client.act_with(Some(&token));
    client.kv.range(get("a")).await.expect("the rights are copied");
}

/// What prevents the server from starting is said before anything happens.
async fn addresses_are_checked_before_the_cut_over(backend: Backend) {
    let Some(source) = Server::etcd().await else { return };
    let Some(destination) = Destination::new(backend).await else { return };
    let flags = ["--cut-over", "--fence", "--listen-client-urls", source.endpoint()];
    let mut migrator = destination.migrate(source.endpoint(), &flags);
    assert!(!migrator.ended().await.success(), "{}", migrator.output());
    assert!(migrator.output().contains("in use"), "{}", migrator.output());
    let mut client = Client::connect(source.endpoint()).await;
    client.kv.put(put("key", [1])).await.expect("the source is not fenced");
}

/// The source stays fenced, because the server may have accepted writes before it failed.
async fn server_that_fails_after_the_cut_over_names_the_fence(backend: Backend) {
    let Some(source) = Server::etcd().await else { return };
    let mut client = Client::connect(source.endpoint()).await;
    for fence in [&[][..], &["--fence"]] {
        let Some(destination) = Destination::new(backend).await else { return };
        client.put("key", [1]).await;
        // Only a start reads the key file.
        let tokens = "jwt,sign-method=HS256,priv-key=/nowhere";
        let start = ["--cut-over", "--listen-client-urls", "http://127.0.0.1:0", "--auth-token", tokens];
        let mut migrator = destination.migrate(source.endpoint(), &[&start[..], fence].concat());
        assert!(!migrator.ended().await.success(), "{}", migrator.output());
        let output = migrator.output();
        let names_fence = output.contains("the source still refuses writes") && output.contains("etcdctl alarm disarm");
        assert!(output.contains("cannot read /nowhere") && names_fence != fence.is_empty(), "{output}");
    }
    let refused = client.kv.put(put("late", "")).await.expect_err("the source is fenced");
    assert_eq!(refused.message(), "etcdserver: corrupt cluster");
}

/// A finished copy is continued with as long as it contains nothing else.
async fn databases_with_other_data_are_refused(backend: Backend) {
    let (Some(source), Some(other)) = (Server::etcd().await, Server::etcd().await) else { return };
    let Some(destination) = Destination::new(backend).await else { return };
    for (server, puts) in [(&source, 5), (&other, 3)] {
        let mut client = Client::connect(server.endpoint()).await;
        for number in 0..puts {
            client.put(format!("key/{number}"), [number]).await;
        }
    }
    destination.copied(&source, &[]).await;
    // At its compact revision, etcd tells the hash from before the compaction.
    let mut client = Client::connect(source.endpoint()).await;
    client.kv.compact(CompactionRequest { revision: 6, physical: true }).await.expect("a compaction");
    let output = destination.copied(&source, &["--fence"]).await;
    assert!(output.contains("continuing with"), "{output}");
    let refused = client.kv.put(put("late", "")).await.expect_err("the source is fenced");
    assert_eq!(refused.message(), "etcdserver: corrupt cluster");
    destination.check_refused(&other, &["contains other data", "it is at revision 6, and the source at 4"]).await;
    let mut client = Client::connect(other.endpoint()).await;
    for number in 3..6 {
        client.put(format!("else/{number}"), [number]).await;
    }
    destination.check_refused(&other, &["its history up to revision 6 is not the source's"]).await;
    client.kv.compact(CompactionRequest { revision: 7, physical: true }).await.expect("a compaction");
    destination.check_refused(&other, &["it is at revision 6, which the source has compacted"]).await;
    let server = destination.server().await;
    let in_use = if backend == Backend::Sqlite { "in use by another orlop process" } else { "a server uses it" };
    destination.check_refused(&source, &[in_use]).await;
    drop(server);

    let unfinished = Destination::new(backend).await.expect("as before");
    let mut migrator = unfinished.migrate(source.endpoint(), &[]);
    migrator.says("restored a snapshot").await;
    migrator.kill();
    unfinished.check_refused(&other, &["it is the unfinished copy of cluster"]).await;
}

on_both_backends!(
    etcd_is_copied_under_load,
    orlop_is_copied_under_load,
    writes_at_the_source_after_the_cut_over_are_named,
    compacted_source_is_copied_again,
    source_compacted_at_its_head_is_copied,
    history_of_a_source_without_compactions_is_not_watched,
    changed_users_are_copied_again,
    databases_with_other_data_are_refused,
    store_with_auth_is_copied_by_root,
    addresses_are_checked_before_the_cut_over,
    server_that_fails_after_the_cut_over_names_the_fence,
);
