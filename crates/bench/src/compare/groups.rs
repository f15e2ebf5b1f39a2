//! The groups of loads, the metrics that are read from each, and Orlop's performance targets.

use crate::output::number;

/// Loads that run on one server one after another, starting without data.
pub struct Group {
    pub name: &'static str,
    pub title: String,
    /// Number of instances of the server.
    pub instances: usize,
    /// Additional flags for Orlop.
    pub flags: &'static [&'static str],
    pub steps: Vec<Step>,
    /// Whether the group runs in one round only, because it takes long or has a low variance.
    pub is_measured_once: bool,
}

/// One load of a group, and the metrics that are read after it.
pub struct Step {
    pub load: Load,
    pub title: String,
    pub metrics: Vec<Metric>,
    /// Duration of the load as a multiple of the usual duration.
    pub duration_factor: u32,
}

pub enum Load {
    /// Runs `orlop bench` with these arguments. Unless they contain a limit, the load runs for the usual duration:
    /// `--duration` of the comparison.
    Bench(String),
    /// Restarts the server with its data.
    Restart,
}

/// A metric of a load.
#[derive(Clone, Debug)]
pub struct Metric {
    pub unit: &'static str,
    pub source: Source,
    pub target: Option<PerformanceTarget>,
}

/// The source of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Rate of the operation with this name.
    PerSec(&'static str),
    /// Latency of the operation with this name: median, p99 and maximum, in milliseconds.
    P50(&'static str),
    P99(&'static str),
    Max(&'static str),
    /// A field of the report.
    ReportField(&'static str),
    /// Seconds from the start of the process to its first response.
    StartTime,
    /// Anonymous memory of the server without Postgres, in MiB. Mapped files do not count.
    Memory,
    /// Size of the database as reported by the Status method, in MiB.
    DatabaseSize,
    /// CPU usage including Postgres, in percent of a core, of a load that reports `elapsed_secs`.
    Cpu,
}

/// A performance target of Orlop.
#[derive(Clone, Copy, Debug)]
pub enum PerformanceTarget {
    /// Minimum ratio to etcd, on SQLite and on Postgres.
    EtcdRatio(f64, f64),
    /// At least as good as etcd.
    NotWorse,
    /// Maximum value.
    AtMost(f64),
}

impl Source {
    pub fn is_higher_better(self) -> bool {
        match self {
            Self::PerSec(_) => true,
            Self::ReportField(name) => name.ends_with("_per_sec"),
            Self::P50(_)
            | Self::P99(_)
            | Self::Max(_)
            | Self::StartTime
            | Self::Memory
            | Self::DatabaseSize
            | Self::Cpu => false,
        }
    }
}

impl Group {
    fn new(name: &'static str, title: impl Into<String>, steps: Vec<Step>) -> Self {
        Self { name, title: title.into(), instances: 1, flags: &[], steps, is_measured_once: false }
    }

    /// Returns the number of rounds; `default` applies to groups that are measured repeatedly.
    pub fn rounds(&self, default: u32) -> u32 {
        if self.is_measured_once { 1 } else { default }
    }
}

impl Step {
    fn bench(title: impl Into<String>, arguments: impl Into<String>, metrics: Vec<Metric>) -> Self {
        Self { load: Load::Bench(arguments.into()), title: title.into(), metrics, duration_factor: 1 }
    }

    fn restart(title: &str, metrics: Vec<Metric>) -> Self {
        Self { load: Load::Restart, title: title.to_owned(), metrics, duration_factor: 1 }
    }
}

fn metric(unit: &'static str, source: Source) -> Metric {
    Metric { unit, source, target: None }
}

fn metric_with_target(unit: &'static str, source: Source, target: PerformanceTarget) -> Metric {
    Metric { unit, source, target: Some(target) }
}

/// Checks that a group with this name exists.
pub fn parse_name(text: &str) -> Result<String, String> {
    let names: Vec<_> = all().iter().map(|group| group.name).collect();
    if names.contains(&text) { Ok(text.to_owned()) } else { Err(format!("must be one of {}", names.join(", "))) }
}

pub fn all() -> Vec<Group> {
    let writes = [(256, "256 B"), (4096, "4 KiB"), (65536, "64 KiB")];
    let puts = ["put-256b", "put-4kib", "put-64kib"];
    let creates = ["create-256b", "create-4kib", "create-64kib"];
    let mut groups = Vec::new();
    for (name, (bytes, size)) in puts.into_iter().zip(writes) {
        groups.push(write_group(name, "put", "puts/s", bytes, size));
    }
    for (name, (bytes, size)) in creates.into_iter().zip(writes) {
        groups.push(write_group(name, "create-txn", "creates/s", bytes, size));
    }
    groups.extend([kubernetes(), gets()]);
    groups.extend(lists());
    groups.extend([fan_out(), catch_up(), idle(), million()]);
    groups.extend(three_instances());
    groups
}

/// Numbers of clients of the puts and creates, and the throughput targets for puts of 256 B.
const CLIENTS: [(usize, Option<PerformanceTarget>); 5] = [
    (1, Some(PerformanceTarget::EtcdRatio(1.2, 1.0))),
    (16, None),
    (64, Some(PerformanceTarget::EtcdRatio(2.0, 1.7))),
    (256, Some(PerformanceTarget::EtcdRatio(2.0, 1.7))),
    (1024, Some(PerformanceTarget::EtcdRatio(2.0, 1.7))),
];

/// Minimum bytes in flight of a load that runs longer than usual, so that each client completes several operations.
const LONG_LOAD_BYTES_MIN: usize = 64 << 20;

fn write_group(
    name: &'static str,
    operation: &'static str,
    unit: &'static str,
    bytes: usize,
    size: &'static str,
) -> Group {
    let has_targets = name == "put-256b";
    let step = |(clients, target): (usize, Option<PerformanceTarget>)| {
        let rate = metric(unit, Source::PerSec(operation));
        let p99 = metric("p99, ms", Source::P99(operation));
        let metrics = if has_targets {
            vec![
                Metric { target, ..rate },
                Metric { target: (clients >= 64).then_some(PerformanceTarget::NotWorse), ..p99 },
            ]
        } else {
            vec![rate, p99]
        };
        let arguments = format!("--clients {clients} {operation} --value-size {bytes}");
        let clients_text =
            if clients == 1 { "1 client".to_owned() } else { format!("{} clients", number(clients as f64)) };
        let duration_factor = if clients * bytes >= LONG_LOAD_BYTES_MIN { 4 } else { 1 };
        Step { duration_factor, ..Step::bench(format!("{operation}, {clients_text}, {size}"), arguments, metrics) }
    };
    let title = if operation == "put" { "Puts" } else { "Creates, each a transaction" };
    Group::new(name, format!("{title}, {size}"), CLIENTS.into_iter().map(step).collect())
}

fn kubernetes() -> Group {
    let metrics = vec![
        metric_with_target("operations/s", Source::PerSec("kubernetes"), PerformanceTarget::EtcdRatio(2.0, 1.7)),
        metric("p99, ms", Source::P99("kubernetes")),
        metric("lease renewals, p99, ms", Source::P99("renew-lease")),
        metric("pages of 500 pods, p99, ms", Source::P99("list-page")),
        metric("memory, MiB", Source::Memory),
    ];
    let title = "500 nodes, 5,000 pods, 64 clients, 60 watches";
    Group::new(
        "kubernetes",
        "Traffic of a Kubernetes cluster",
        vec![Step::bench(title, "kubernetes --connections 66", metrics)],
    )
}

fn gets() -> Group {
    let step = |title, arguments, target| {
        let rate = Metric { unit: "gets/s", source: Source::PerSec("get"), target };
        Step::bench(title, arguments, vec![rate, metric("p99, ms", Source::P99("get"))])
    };
    let steps = vec![
        step("get, linearizable, 64 clients", "get", Some(PerformanceTarget::EtcdRatio(1.5, 1.2))),
        step("get, serializable, 64 clients", "get --serializable", None),
        step("get, linearizable, 1 client", "get --clients 1", None),
    ];
    Group::new("get", "Gets, 256 B", steps)
}

/// In the groups whose names end with `tenth`, the cache holds a tenth of the data.
fn lists() -> Vec<Group> {
    let small = Lists { title: "Lists, 10,000 x 1 KiB", load: "range --keys 10000 --value-size 1024", limits: "" };
    let large = Lists {
        title: "Lists, 50,000 x 2 KiB",
        load: "range --keys 50000 --value-size 2048",
        // A list takes so long that only a few would complete in the usual duration.
        limits: "--total 6 --warmup 0s",
    };
    vec![
        small.list("list", Some(PerformanceTarget::EtcdRatio(3.0, 3.0))),
        small.with_tenth("list-tenth", &["--value-cache-bytes=1048576"]),
        small.without_cache("list-uncached"),
        large.list("list-large", None),
        large.with_tenth("list-large-tenth", &["--value-cache-bytes=10485760"]),
        large.without_cache("list-large-uncached"),
    ]
}

/// Groups of lists of the same keys.
struct Lists {
    title: &'static str,
    load: &'static str,
    /// Flags that limit the load; empty for the usual duration.
    limits: &'static str,
}

impl Lists {
    /// Each step uses the keys of the previous one.
    fn list(&self, name: &'static str, target: Option<PerformanceTarget>) -> Group {
        let p99 = || metric("p99, ms", Source::P99("range"));
        let again = |title, flags: &str, limits: &str, metrics| {
            Step::bench(title, format!("{} --existing --keep {flags} {limits}", self.load), metrics)
        };
        let first = vec![metric("ms", Source::P50("range"))];
        let whole = vec![lists_per_sec(target), p99(), metric("memory, MiB", Source::Memory)];
        let steps = vec![
            Step::bench("list, whole", format!("{} --keep {}", self.load, self.limits), whole),
            again("list, in pages of 500", "--page 500", self.limits, vec![lists_per_sec(None), p99()]),
            Step::restart("", Vec::new()),
            again("list, first after a start", "", "--total 1 --warmup 0s", first),
            again("list, at an old revision", "--old-revision", self.limits, vec![lists_per_sec(None), p99()]),
        ];
        Group::new(name, self.title, steps)
    }

    fn with_tenth(&self, name: &'static str, flags: &'static [&'static str]) -> Group {
        self.with_cache(name, "Orlop's cache holds a tenth", flags)
    }

    fn without_cache(&self, name: &'static str) -> Group {
        self.with_cache(name, "Orlop's cache off", &["--value-cache-bytes=0"])
    }

    fn with_cache(&self, name: &'static str, cache: &str, flags: &'static [&'static str]) -> Group {
        let metrics =
            vec![lists_per_sec(None), metric("p99, ms", Source::P99("range")), metric("memory, MiB", Source::Memory)];
        let steps = vec![Step::bench("list, whole", format!("{} {}", self.load, self.limits), metrics)];
        Group { flags, ..Group::new(name, format!("{}, {cache}", self.title), steps) }
    }
}

fn lists_per_sec(target: Option<PerformanceTarget>) -> Metric {
    Metric { unit: "lists/s", source: Source::PerSec("range"), target }
}

fn fan_out() -> Group {
    let step = |title, arguments, target: Option<PerformanceTarget>| {
        let has_target = target.is_some();
        let rate = Metric { unit: "events/s", source: Source::PerSec("event"), target };
        let p99 = Metric {
            unit: "p99 from put to event, ms",
            source: Source::P99("event"),
            target: has_target.then_some(PerformanceTarget::NotWorse),
        };
        let lag = [metric("from answer to event: p50, ms", Source::P50("lag")), metric("p99, ms", Source::P99("lag"))];
        Step::bench(title, arguments, [rate, p99].into_iter().chain(lag).collect())
    };
    let steps = vec![
        step("1,000 watchers of all, 10 streams", "watch", Some(PerformanceTarget::EtcdRatio(5.0, 5.0))),
        step("1,000 watchers of all, 100 streams", "watch --streams 100", None),
        step("10,000 watchers of all, 100 streams", "watch --watchers 10000 --streams 100", None),
        step("1,000 watchers, each of its own key", "watch --own-key", None),
        step("10,000 watchers, each of its own key", "watch --own-key --watchers 10000 --streams 100", None),
    ];
    Group::new("fan-out", "Fan-out: a client puts again when all watchers have received its last put", steps)
}

fn catch_up() -> Group {
    let metrics = vec![
        metric_with_target("events/s", Source::ReportField("events_per_sec"), PerformanceTarget::EtcdRatio(2.0, 2.0)),
        metric("memory, MiB", Source::Memory),
    ];
    let step = Step::bench("catching up with 100,000 revisions", "catch-up --total 1 --warmup 0s", metrics);
    Group { is_measured_once: true, ..Group::new("catch-up", "Catching up", vec![step]) }
}

fn idle() -> Group {
    let metrics = vec![metric("CPU, % of a core", Source::Cpu), metric("memory, MiB", Source::Memory)];
    let step = Step::bench("66 connections, 60 watches", "idle --connections 66 --duration 5s", metrics);
    Group { is_measured_once: true, ..Group::new("idle", "Idle", vec![step]) }
}

/// The clients are spread over three instances, or over the three members of an etcd cluster.
fn three_instances() -> Vec<Group> {
    let group = |name, title, operation: &'static str, unit, per_instance: &[usize]| {
        let step = |&clients: &usize| {
            // With more connections than clients some would be idle.
            let connections = 3 * clients.min(8);
            let metrics = vec![
                metric_with_target(unit, Source::PerSec(operation), PerformanceTarget::EtcdRatio(2.0, 2.0)),
                metric_with_target("p99, ms", Source::P99(operation), PerformanceTarget::NotWorse),
            ];
            let flags = format!("--clients {} --connections {connections} {operation}", 3 * clients);
            Step { duration_factor: 2, ..Step::bench(format!("{operation}, 3 x {clients} clients"), flags, metrics) }
        };
        Group { instances: 3, ..Group::new(name, title, per_instance.iter().map(step).collect()) }
    };
    let clients = [1, 8, 24, 80];
    vec![
        group("three-put", "Puts on three instances, 256 B", "put", "puts/s", &clients),
        group("three-create", "Creates on three instances, 256 B", "create-txn", "creates/s", &clients),
        group("three-update", "Updates on three instances, 256 B", "update", "updates/s", &clients),
        group(
            "three-kubernetes",
            "Traffic of a Kubernetes cluster on three instances",
            "kubernetes",
            "operations/s",
            &clients,
        ),
        group("three-get", "Linearizable gets on three instances, 256 B", "get", "gets/s", &[8, 80]),
    ]
}

/// Each step uses the keys of the previous one.
fn million() -> Group {
    let load = "get --key-space 1000000 --value-size 1024 --total 1 --warmup 0s --keep";
    let list = "range --existing --keep --keys 10000";
    let churn = "put --clients 256 --existing --keep --total 500000 --warmup 0s";
    let steps = vec![
        Step::bench(
            "1,000,000 x 1 KiB loaded",
            load,
            vec![metric("memory, MiB", Source::Memory), metric("file, MiB", Source::DatabaseSize)],
        ),
        Step::bench("list of 10,000 of the million keys", list, vec![metric("lists/s", Source::PerSec("range"))]),
        Step::bench(
            "500,000 more puts, 256 clients",
            churn,
            vec![
                metric("puts/s", Source::PerSec("put")),
                metric("p99, ms", Source::P99("put")),
                metric_with_target("memory, MiB", Source::Memory, PerformanceTarget::NotWorse),
            ],
        ),
        // The phase without maintenance takes about as long as the others.
        Step {
            duration_factor: 6,
            ..Step::bench(
                "compaction and defragmentation while 64 clients put",
                "maintenance --existing --keep",
                vec![
                    metric("p99 of puts before, ms", Source::P99("put")),
                    metric("p99 of puts during compaction, ms", Source::P99("put-compacting")),
                    metric_with_target(
                        "ratio of the p99",
                        Source::ReportField("compacting_p99_ratio"),
                        PerformanceTarget::AtMost(2.0),
                    ),
                    metric("compaction, s", Source::ReportField("compaction_secs")),
                    metric("slowest put while defragmenting, ms", Source::Max("put-defragmenting")),
                    metric("failed puts during defragmentation", Source::ReportField("puts_failed")),
                    metric("defragmentation, s", Source::ReportField("defragmentation_secs")),
                    metric("file afterwards, MiB", Source::DatabaseSize),
                ],
            )
        },
        Step::restart(
            "start with a million keys",
            vec![
                metric_with_target("s to the first answer", Source::StartTime, PerformanceTarget::AtMost(3.0)),
                metric("memory, MiB", Source::Memory),
            ],
        ),
    ];
    Group { is_measured_once: true, ..Group::new("million", "A million keys", steps) }
}
