//! Orlop in the place of the process `etcd`: flags, variables, configuration file, addresses and log.

mod kubeadm;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use orlop_wire::proto::client::etcdserverpb::{MemberListRequest, StatusRequest};
use rustix::process::Signal;

use crate::{
    start::{check_refused, run},
    support::{
        Backend, Client, DEADLINE, Lines, Place, Server, Started, ended, etcd_tool, eventually, free_port, http,
        http_get, on_both_backends, orlop_program, run_within, send_signal, skip,
    },
    torture::preload::{EIO, Field, Preload, WAL},
};

/// Where a program finds a setting, and values that are accepted or refused there, depending on the kind of the setting.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    Flag,
    Variable,
    File,
}

impl Source {
    fn values(self) -> &'static [&'static str] {
        match self {
            Self::Flag => &["true", "t", "7", "0", "1h30m", "http://127.0.0.1:7001", "new", "off", "x"],
            Self::Variable => &["t", "7", "1h30m", "http://127.0.0.1:7001", "new", "x", ""],
            Self::File => &["true", "7", "1.5", "'7'", "http://127.0.0.1:7001", "off", "x", "[a]", "{a: b}", "''"],
        }
    }
}

/// Flags whose values etcd checks after it has parsed all flags, and Orlop at once.
const CHECKED_LATER: [&str; 8] = [
    "auth-token",
    "auto-compaction-mode",
    "auto-compaction-retention",
    "cipher-suites",
    "metrics",
    "tls-max-version",
    "tls-min-version",
    "logger",
];

/// Settings with which both programs fail after they have accepted all others: etcd demands a longer election timeout, and
/// Orlop cannot create the directory.
const FAILING: [(&str, &str); 3] =
    [("election-timeout", "1"), ("heartbeat-interval", "100"), ("data-dir", "/dev/null/none")];

/// Returns whether a program accepts a value of a setting, and its output.
fn accepts(program: &Path, home: &Path, source: Source, name: &str, value: &str) -> (bool, String) {
    let mut command = Command::new(program);
    let variable = |name: &str| format!("ETCD_{}", name.replace('-', "_").to_uppercase());
    match source {
        // No program knows the second flag.
        Source::Flag => command.args([&format!("--{name}={value}"), "--no-such-flag"]),
        Source::Variable => {
            command.envs(FAILING.map(|(name, value)| (variable(name), value))).env(variable(name), value)
        }
        Source::File => {
            let file = home.join(format!("{name}.yml"));
            let settings = FAILING.into_iter().chain([(name, value)]).map(|(name, value)| format!("{name}: {value}\n"));
            fs::write(&file, settings.collect::<String>()).expect("a file can be written");
            command.arg("--config-file").arg(file)
        }
    };
    let output = run_within(DEADLINE, command.current_dir(home));
    assert!(!output.status.success(), "{source:?} {name}={value}");
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let signs_of_etcd = ["not defined: -no-such-flag", "should be at least as 5 times"];
    // Another process may use the port. A setting may require another one, which etcd finds out later.
    let signs_of_orlop = ["'--no-such-flag'", "Not a directory (os", "cannot listen on", " requires "];
    let is_accepted = signs_of_etcd.iter().chain(&signs_of_orlop).any(|sign| text.contains(sign));
    (is_accepted, text.lines().last().unwrap_or_default().to_owned())
}

/// Compares every flag in the help of the installed etcd, each with values of all kinds.
fn compare_values(source: Source, excepted: &[&str], is_allowed: impl Fn(&Path, &str, &str) -> bool + Sync) {
    let Some(etcd) = etcd_tool("etcd", "ORLOP_ETCD") else { return skip("etcd") };
    let etcd = fs::canonicalize(etcd).expect("etcd exists");
    let help = run_within(DEADLINE, Command::new(&etcd).arg("--help"));
    let help = String::from_utf8_lossy(&[help.stdout, help.stderr].concat()).into_owned();
    let flags = help.lines().filter_map(|line| line.trim_start().strip_prefix("--")?.split([' ', '=']).next());
    // log-outputs moves the text to another place.
    let failing = FAILING.map(|(name, _)| name);
    let used = if source == Source::Flag { &[][..] } else { &[&failing[..], &["log-outputs"]].concat() };
    let skipped = [&CHECKED_LATER[..], &["config-file"], used, excepted].concat();
    let flags: Vec<&str> = flags.filter(|flag| !skipped.contains(flag)).collect();
    assert!(flags.len() > 80, "{flags:?}");
    let orlop = PathBuf::from(orlop_program());
    let home = tempfile::tempdir().expect("a folder");
    let differing = |(name, value): (&str, &str)| {
        let (by_etcd, etcd_text) = accepts(&etcd, home.path(), source, name, value);
        let (by_orlop, orlop_text) = accepts(&orlop, home.path(), source, name, value);
        // etcd ignores keys of a file that it does not know, whatever their values are.
        let is_key = || source != Source::File || !accepts(&etcd, home.path(), source, name, "{a: b}").0;
        let differ = by_etcd != by_orlop && is_key() && !(by_orlop && is_allowed(home.path(), name, value));
        differ.then(|| format!("{name}={value}: etcd {by_etcd}: {etcd_text}; Orlop {by_orlop}: {orlop_text}"))
    };
    let pairs: Vec<(&str, &str)> =
        flags.iter().flat_map(|name| source.values().iter().map(|value| (*name, *value))).collect();
    let check = |pairs: &[(&str, &str)]| pairs.iter().copied().filter_map(differing).collect::<Vec<_>>();
    let differing: Vec<String> = std::thread::scope(|scope| {
        let halves = pairs.chunks(pairs.len().div_ceil(2));
        let workers: Vec<_> = halves.map(|pairs| scope.spawn(|| check(pairs))).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("no panic")).collect()
    });
    assert!(differing.is_empty(), "etcd and Orlop differ: {differing:#?}");
}

#[test]
fn values_of_flags_are_accepted_as_by_etcd() {
    compare_values(Source::Flag, &[], |_, _, _| false);
}

#[test]
fn values_of_variables_are_accepted_as_by_etcd() {
    compare_values(Source::Variable, &[], |_, _, _| false);
}

/// In a file Orlop accepts, in addition, an empty text as the default, and the text of a value as the flag takes it, such
/// as 5s.
#[test]
fn values_in_files_are_accepted_as_by_etcd() {
    let excepted = [
        // etcd ignores them outside of the section client-transport-security.
        &["cert-file", "key-file", "client-cert-auth", "client-crl-file", "client-cert-allowed-hostname"][..],
        &["trusted-ca-file", "auto-tls"],
        // etcd checks the first later, and has a minimum for the second only in later versions.
        &["v2-deprecation", "experimental-watch-progress-notify-interval"],
    ];
    let orlop = PathBuf::from(orlop_program());
    let is_allowed = |home: &Path, name: &str, value: &str| {
        let text = value.trim_matches('\'');
        text.is_empty() || accepts(&orlop, home, Source::Flag, name, text).0
    };
    compare_values(Source::File, &excepted.concat(), is_allowed);
}

#[test]
fn one_dash_before_a_flag_is_enough() {
    check_refused(&["-max-txn-ops=x"], &[], &["--max-txn-ops"]);
}

/// A file in etcd's form: sections for TLS, durations in nanoseconds, empty values, settings without a meaning here.
const ETCD_FILE: &str = "\
name: 'from the file'
data-dir:
wal-dir:
snapshot-count: 10000
heartbeat-interval: 100
election-timeout: 1000
quota-backend-bytes: 12345678
listen-peer-urls: http://localhost:2380
max-snapshots: 5
cors:
initial-advertise-peer-urls: http://localhost:2380
advertise-client-urls: http://10.0.0.7:2379
discovery:
discovery-fallback: 'proxy'
initial-cluster: 'default=http://localhost:2380'
initial-cluster-token: 'etcd-cluster'
initial-cluster-state: 'new'
strict-reconfig-check: false
proxy: 'off'
proxy-failure-wait: 5000
experimental-watch-progress-notify-interval: 5000000000
client-transport-security:
  cert-file:
  key-file:
  client-cert-auth: false
  trusted-ca-file:
  auto-tls: false
peer-transport-security:
  cert-file: /etc/peer.crt
  client-cert-auth: false
self-signed-cert-validity: 1
log-level: info
logger: zap
log-outputs: [stderr]
force-new-cluster: false
auto-compaction-mode: periodic
auto-compaction-retention: \"1\"
cipher-suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256]
tls-min-version: 'TLS1.2'
tls-max-version: 'TLS1.3'
";

async fn configuration_file_of_etcd_is_read(backend: Backend) {
    let home = tempfile::tempdir().expect("a folder");
    let file = home.path().join("etcd.conf.yml");
    fs::write(&file, ETCD_FILE).expect("a file can be written");
    let file = file.display().to_string();
    let Some(server) = Server::orlop_with(backend, &["--config-file", &file]).await else { return };
    check_member(&server, "from the file", 12_345_678).await;
    let log = server.log();
    for part in [
        "peer-transport-security",
        "snapshot-count",
        "--experimental-watch-progress-notify-interval is deprecated; use --watch-progress-notify-interval instead",
    ] {
        assert!(log.contains(part), "no {part}: {log}");
    }
    // A key that neither knows is an error, and so is an unknown key of the section.
    for wrong in ["quota-backend-byte: 1\n", "client-transport-security:\n  certfile: x\n"] {
        fs::write(home.path().join("wrong.yml"), wrong).expect("a file can be written");
        let wrong = home.path().join("wrong.yml").display().to_string();
        check_refused(&["--config-file", &wrong], &[], &["unknown key", "wrong.yml"]);
    }
}

async fn check_member(server: &Server, name: &str, quota: i64) {
    let mut client = Client::connect(server.endpoint()).await;
    let list = client.cluster.member_list(MemberListRequest::default()).await.expect("members").into_inner();
    assert_eq!(list.members[0].name, name);
    let status = client.maintenance.status(StatusRequest {}).await.expect("a status").into_inner();
    assert_eq!(status.db_size_quota, quota);
}

async fn variables_of_etcd_are_read(backend: Backend) {
    let variables = [
        ("ETCD_NAME", "from a variable"),
        ("ETCD_QUOTA_BACKEND_BYTES", "12345678"),
        ("ETCD_EXPERIMENTAL_WATCH_PROGRESS_NOTIFY_INTERVAL", "5s"),
        ("ETCD_INITIAL_CLUSTER", "default=http://localhost:2380"),
        ("ETCD_UNSUPPORTED_ARCH", "arm64"),
        ("ETCD_VERSION", "3.6.13"),
        // Orlop's own variables override those of etcd.
        ("ORLOP_NAME", "from Orlop's variable"),
        ("ORLOP_DATABASE_URL", "postgres://host/db"),
    ];
    let environment = variables.map(|(name, value)| (name.to_owned(), value.into())).to_vec();
    let home = tempfile::tempdir().expect("a folder");
    let Some(datastore) = backend.empty_database(home.path(), "orlop.db").await else { return };
    let server = Server::orlop_at(Some(datastore), &[], Place { environment, ..Place::default() }).await;
    check_member(&server, "from Orlop's variable", 12_345_678).await;
    let log = server.log();
    let unrecognized = ["unrecognized environment variable", "ETCD_UNSUPPORTED_ARCH", "ORLOP_DATABASE_URL"];
    for part in ["ETCD_INITIAL_CLUSTER"].into_iter().chain(unrecognized) {
        assert!(log.contains(part), "no {part}: {log}");
    }
    assert!(!log.contains("ETCD_VERSION"), "{log}");
    check_refused(&["--name", "x"], &[("ETCD_NAME", "y")], &["ETCD_NAME", "shadowed", "--name"]);
    check_refused(&[], &[("ETCD_MAX_TXN_OPS", "many")], &["ETCD_MAX_TXN_OPS", "many", "must be a whole number"]);
}

/// Returns the value of a field of the line `started` in the log.
fn started(server: &Server, field: &str) -> String {
    let log = server.log();
    let line = log.lines().find(|line| line.contains(" started version=")).expect("the line is logged");
    let value = line.split(&format!("{field}=\"")).nth(1).expect("the field is logged");
    value.split('"').next().expect("a value").to_owned()
}

async fn http_can_have_addresses_of_its_own(backend: Backend) {
    let flags = ["--listen-client-http-urls", "http://127.0.0.1:0", "--log-level", "info"];
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let http_url = started(&server, "listen-client-http-urls");
    let mut client = Client::connect(server.endpoint()).await;
    client.put("k", "v").await;
    for path in ["/health", "/metrics", "/version"] {
        assert_eq!(http_get(&http_url, path).await.status, 200, "{path}");
        assert_eq!(http_get(server.endpoint(), path).await.status, 404, "{path}");
    }
    let range = http(&http_url, "POST", "/v3/kv/range", r#"{"key": "aw=="}"#).await;
    assert!(range.body.contains("\"value\":\"dg==\""), "{}", range.body);
    let refused = Client::connect(&http_url).await.maintenance.status(StatusRequest {}).await;
    assert_eq!(refused.expect_err("gRPC is not served there").code(), tonic::Code::Unimplemented);
}

async fn http_and_https_share_a_port(backend: Backend) {
    let port = free_port();
    let urls = format!("http://127.0.0.1:{port},https://127.0.0.1:{port}");
    let hosts = "--host-whitelist=none.example";
    let flags = ["--listen-client-urls", &urls, "--auto-tls", "--log-level", "info", hosts];
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    assert_eq!(started(&server, "listen-client-urls"), urls);
    let healthy = "\"health\":\"true\"";
    for (scheme, http, want) in [
        ("http", "--http1.1", "Host header was unrecognized"),
        ("https", "--http1.1", healthy),
        ("https", "--http2", healthy),
    ] {
        let curl = Command::new("curl")
            .args(["--silent", "--insecure", "--max-time", "20", http, &format!("{scheme}://127.0.0.1:{port}/health")])
            .output();
        let Ok(curl) = curl else { return skip("curl") };
        assert!(String::from_utf8_lossy(&curl.stdout).contains(want), "{scheme} {http}: {curl:?}");
    }
}

/// The log is JSON with etcd's names unless it goes to a terminal.
#[test]
fn log_is_json_and_can_go_to_a_file() {
    let home = tempfile::tempdir().expect("a folder");
    let invalid =
        ["--datastore-endpoint", "sqlite:///proc/none/orlop.db", "--listen-client-urls", "http://127.0.0.1:0"];
    let flags = ["--initial-cluster=x", "--log-outputs=orlop.log"];
    let output = run(home.path(), &[&invalid[..], &flags[..1], &["--log-outputs="]].concat(), &[]);
    let to_stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    run(home.path(), &[&invalid[..], &flags].concat(), &[]);
    let to_file = fs::read_to_string(home.path().join("orlop.log")).expect("the log is in the file");
    for log in [to_stderr, to_file] {
        let line: serde_json::Value = serde_json::from_str(log.lines().next().expect("a line")).expect("JSON");
        assert_eq!((line["level"].as_str(), line["settings"].as_str()), (Some("warn"), Some("initial-cluster")));
        assert!(line["ts"].is_string() && line["caller"].is_string() && line["msg"].is_string(), "{line}");
        let reason = log.lines().find(|line| line.contains(r#""msg":"the server failed""#));
        assert!(reason.is_some_and(|line| line.contains("error") && line.contains("/proc/none")), "{log}");
    }
    let rotation = ["--enable-log-rotation", "--log-outputs"];
    check_refused(&[&rotation[..], &["stderr"]].concat(), &[], &["enable-log-rotation requires a single file"]);
    let json = ["x.log", "--log-rotation-config-json", "{\"maxsize\": \"1\"}"];
    check_refused(&[&rotation[..], &json].concat(), &[], &["log-rotation-config-json", "example"]);
    check_refused(&["--log-outputs", "/none/x.log"], &[], &["log-outputs: cannot open /none/x.log"]);
}

async fn commits_need_no_sync_if_that_is_asked_for(backend: Backend) {
    let (home, preload) = (tempfile::tempdir().expect("a folder"), Preload::build());
    let Some(datastore) = backend.empty_database(home.path(), "orlop.db").await else { return };
    let place = Place { environment: preload.environment(), ..Place::default() };
    let server = Server::orlop_at(Some(datastore), &["--unsafe-no-fsync"], place).await;
    // A sync of SQLite's WAL would fail.
    preload.set(Field::SyncErrno, EIO);
    preload.set(Field::SyncFiles, WAL);
    let mut client = Client::connect(server.endpoint()).await;
    client.put("k", "").await;
    assert!(server.log().contains("unsafe-no-fsync: commits are not synced"), "{}", server.log());
}

/// What a process shows to the scripts and test harnesses that start etcd.
#[derive(Debug, PartialEq)]
struct Shown {
    /// `msg` of the log line for which etcd's test harness waits.
    ready: Option<String>,
    /// Path, status and, where it is fixed, body.
    endpoints: Vec<(&'static str, u16, Option<String>)>,
    /// The keys of `/version`.
    version: Vec<String>,
}

/// The file that k3s writes for its etcd, without certificates.
const K3S_FILE: &str = "\
name: node-1a2b3c4d
data-dir: data
listen-client-urls: CLIENT
advertise-client-urls: CLIENT
listen-metrics-urls: METRICS
listen-peer-urls: PEER
initial-advertise-peer-urls: PEER
initial-cluster: node-1a2b3c4d=PEER
initial-cluster-state: new
client-transport-security:
  client-cert-auth: false
peer-transport-security:
  client-cert-auth: false
force-new-cluster: false
heartbeat-interval: 500
election-timeout: 5000
snapshot-count: 10000
logger: zap
log-outputs:
- stderr
experimental-initial-corrupt-check: true
experimental-watch-progress-notify-interval: 5000000000
";

/// Starts a program with a script's arguments, waits until it is ready and stops it.
async fn shown(program: &Path, arguments: &[&str]) -> Shown {
    let home = tempfile::tempdir().expect("a folder");
    let (client, peer) = (format!("http://127.0.0.1:{}", free_port()), format!("http://127.0.0.1:{}", free_port()));
    let metrics = format!("http://127.0.0.1:{}", free_port());
    let fill = |text: &&str| text.replace("CLIENT", &client).replace("PEER", &peer).replace("METRICS", &metrics);
    fs::write(home.path().join("k3s.yml"), fill(&K3S_FILE)).expect("a file can be written");
    let mut start = Command::new(program);
    start.args(arguments.iter().map(fill)).current_dir(home.path()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut process = Started::spawn(&mut start);
    let lines = Lines::of(process.stderr.take().expect("stderr is piped"));
    eventually("the health of the server", async || {
        let address = client.trim_start_matches("http://");
        tokio::net::TcpStream::connect(address).await.map_err(|error| error.to_string())?;
        let answer = http_get(&client, "/health").await;
        if answer.status == 200 { Ok(()) } else { Err(answer.body) }
    })
    .await;
    let mut endpoints = Vec::new();
    for (path, has_fixed_body) in
        [("/health", true), ("/livez", true), ("/readyz", true), ("/metrics", false), ("/none", true)]
    {
        let answer = http_get(&client, path).await;
        endpoints.push((path, answer.status, has_fixed_body.then_some(answer.body)));
    }
    if arguments.iter().any(|argument| argument.contains("METRICS") || argument.contains("k3s.yml")) {
        endpoints.push(("metrics /health", http_get(&metrics, "/health").await.status, None));
    }
    let version: serde_json::Value =
        serde_json::from_str(&http_get(&client, "/version").await.body).expect("/version is JSON");
    let version = version.as_object().expect("an object").keys().filter(|key| *key != "storage").cloned().collect();
    send_signal(process.id(), Signal::TERM);
    ended(process);
    let messages = lines.filter_map(|line| serde_json::from_str::<serde_json::Value>(&line).ok());
    let mut messages = messages.filter_map(|line| line["msg"].as_str().map(str::to_owned));
    let ready = messages.find(|message| message == "ready to serve client requests");
    Shown { ready, endpoints, version }
}

/// The arguments of Kubernetes' hack/lib/etcd.sh, of kubeadm's manifest, of etcd's end-to-end tests and of k3s. CLIENT,
/// PEER and METRICS are URLs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_shows_what_etcd_shows() {
    let Some(etcd) = etcd_tool("etcd", "ORLOP_ETCD") else { return skip("etcd") };
    let etcd = fs::canonicalize(etcd).expect("etcd exists");
    let orlop = PathBuf::from(orlop_program());
    let peers = ["--listen-peer-urls=PEER", "--initial-advertise-peer-urls=PEER"];
    let scripts: [Vec<&str>; 4] = [
        vec!["--advertise-client-urls", "CLIENT", "--data-dir", "data", "--listen-client-urls", "CLIENT"]
            .into_iter()
            .chain(["--log-level=info", "--initial-cluster=default=PEER"])
            .chain(peers)
            .collect(),
        [
            &["--name=node", "--data-dir=data", "--advertise-client-urls=CLIENT", "--listen-client-urls=CLIENT"][..],
            &["--initial-cluster=node=PEER", "--listen-metrics-urls=METRICS", "--snapshot-count=10000"],
            &["--experimental-initial-corrupt-check=true", "--experimental-watch-progress-notify-interval=5s"],
            &peers,
        ]
        .concat(),
        [
            &["--name", "test-0", "--data-dir", "data", "--listen-client-urls", "CLIENT"][..],
            &["--advertise-client-urls", "CLIENT", "--initial-cluster-token", "new", "--snapshot-count", "100000"],
            &["--initial-cluster", "test-0=PEER", "--initial-cluster-state", "new", "--max-concurrent-streams=0"],
            // As templates of command lines write them.
            &["--cert-file=", "--key-file=", "--trusted-ca-file", "", "--client-crl-file=", "--tls-min-version="],
            &["--tls-max-version=", "--metrics=", "--auto-compaction-mode=", "--auto-compaction-retention="],
            &["--log-level=", "--config-file="],
            &peers,
        ]
        .concat(),
        vec!["--config-file=k3s.yml"],
    ];
    for arguments in scripts {
        assert_eq!(shown(&orlop, &arguments).await, shown(&etcd, &arguments).await, "{arguments:?}");
    }
}

/// Exit codes of starts that fail: 2 for the command line, 1 for the rest. Orlop exits with 2 for every invalid value of a
/// flag, also for the few that etcd checks later.
#[test]
fn exit_codes_equal_those_of_etcd() {
    let Some(etcd) = etcd_tool("etcd", "ORLOP_ETCD") else { return skip("etcd") };
    let etcd = fs::canonicalize(etcd).expect("etcd exists");
    let orlop = PathBuf::from(orlop_program());
    for arguments in [
        &["--no-such-flag"][..],
        &["--max-txn-ops=x"],
        &["--listen-client-urls=nowhere"],
        &["--listen-client-urls=http://::1:0"],
        &["--advertise-client-urls=http://fd00::1:2379"],
        &["--config-file=none.yml"],
        &["--listen-client-urls=http://256.0.0.1:1", "--advertise-client-urls=http://256.0.0.1:1"],
        &["--cert-file=none.pem", "--key-file=none.key", "--listen-client-urls=https://127.0.0.1:0"],
        &["--initial-cluster-state="],
        &["--version"],
        &["-version"],
        &["--help"],
        &["-help"],
    ] {
        let code = |program: &Path| {
            let home = tempfile::tempdir().expect("a folder");
            run_within(DEADLINE, Command::new(program).args(arguments).current_dir(home.path())).status.code()
        };
        assert_eq!(code(&orlop), code(&etcd), "{arguments:?}");
    }
}

on_both_backends!(
    configuration_file_of_etcd_is_read,
    variables_of_etcd_are_read,
    http_can_have_addresses_of_its_own,
    http_and_https_share_a_port,
    commits_need_no_sync_if_that_is_asked_for,
);
