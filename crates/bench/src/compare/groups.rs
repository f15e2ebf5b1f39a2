//! The loads: groups of them, what is read off each, and what Orlop aims at.

/// Loads that a server takes one after another, beginning without data.
pub struct Group {
    pub name: &'static str,
    pub title: String,
    /// Orlop's, beside the usual.
    pub flags: &'static [&'static str],
    pub steps: Vec<Step>,
    /// Takes long, or is steady enough, to be measured once.
    pub is_measured_once: bool,
}

pub struct Step {
    pub load: Load,
    pub title: String,
    pub figures: Vec<Figure>,
    /// It lasts so many times as long as others.
    pub lasts: u32,
}

pub enum Load {
    /// Arguments of `orlop bench`; without an end of their own they end after the duration of a load.
    Bench(String),
    /// The server stops, and starts with the data that it has.
    Restart,
}

#[derive(Clone, Debug)]
pub struct Figure {
    pub unit: &'static str,
    pub of: Of,
    pub aim: Option<Aim>,
}

/// Where a figure comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// Of the operation with this name.
    PerSec(&'static str),
    P50(&'static str),
    P99(&'static str),
    Max(&'static str),
    Fact(&'static str),
    /// Seconds from the start of the process to its first answer.
    Start,
    /// Resident, MiB, of the server without its Postgres.
    Memory,
    /// All that lies on the disk, MiB, as the server tells it.
    Size,
    /// Percent of a core, Postgres included.
    Cpu,
}

/// What Orlop aims at, on SQLite and on Postgres.
#[derive(Clone, Copy, Debug)]
pub enum Aim {
    /// Times as good as etcd.
    Times(f64, f64),
    /// No worse than etcd.
    Better,
    /// A figure of its own.
    AtMost(f64),
}

impl Of {
    pub fn is_better_when_more(self) -> bool {
        match self {
            Self::PerSec(_) => true,
            Self::Fact(name) => name.ends_with("_per_sec"),
            Self::P50(_) | Self::P99(_) | Self::Max(_) | Self::Start | Self::Memory | Self::Size | Self::Cpu => false,
        }
    }
}

impl Group {
    fn new(name: &'static str, title: impl Into<String>, steps: Vec<Step>) -> Self {
        Self { name, title: title.into(), flags: &[], steps, is_measured_once: false }
    }

    /// How often it is measured when others are so many times.
    pub fn rounds(&self, usual: u32) -> u32 {
        if self.is_measured_once { 1 } else { usual }
    }
}

impl Step {
    fn bench(title: impl Into<String>, arguments: impl Into<String>, figures: Vec<Figure>) -> Self {
        Self { load: Load::Bench(arguments.into()), title: title.into(), figures, lasts: 1 }
    }

    fn restart(title: &str, figures: Vec<Figure>) -> Self {
        Self { load: Load::Restart, title: title.to_owned(), figures, lasts: 1 }
    }
}

fn figure(unit: &'static str, of: Of) -> Figure {
    Figure { unit, of, aim: None }
}

fn aimed(unit: &'static str, of: Of, aim: Aim) -> Figure {
    Figure { unit, of, aim: Some(aim) }
}

/// Whether there is a group of this name.
pub fn name(text: &str) -> Result<String, String> {
    let names: Vec<_> = all().iter().map(|group| group.name).collect();
    if names.contains(&text) { Ok(text.to_owned()) } else { Err(format!("must be one of {}", names.join(", "))) }
}

pub fn all() -> Vec<Group> {
    let writes = [(256, "256 B"), (4096, "4 KiB"), (65536, "64 KiB")];
    let puts = ["put-256b", "put-4kib", "put-64kib"];
    let creates = ["create-256b", "create-4kib", "create-64kib"];
    let mut groups = Vec::new();
    for (name, (bytes, size)) in puts.into_iter().zip(writes) {
        groups.push(writing(name, "put", "puts/s", bytes, size));
    }
    for (name, (bytes, size)) in creates.into_iter().zip(writes) {
        groups.push(writing(name, "create-txn", "creates/s", bytes, size));
    }
    groups.extend([kubernetes(), gets()]);
    groups.extend(lists());
    groups.extend([fan_out(), catch_up(), idle(), million()]);
    groups
}

/// Clients of the puts and creates, and what Orlop aims at there with values of 256 B.
const CLIENTS: [(usize, Option<Aim>); 5] = [
    (1, Some(Aim::Times(1.2, 1.0))),
    (16, None),
    (64, Some(Aim::Times(2.0, 1.7))),
    (256, Some(Aim::Times(2.0, 1.7))),
    (1024, Some(Aim::Times(2.0, 1.7))),
];

/// What clients have in flight, from which on answering each of them once takes about as long as other loads last.
const LONG_BYTES: usize = 64 << 20;

fn writing(name: &'static str, operation: &'static str, unit: &'static str, bytes: usize, size: &'static str) -> Group {
    let is_aimed = name == "put-256b";
    let step = |(clients, aim): (usize, Option<Aim>)| {
        let rate = figure(unit, Of::PerSec(operation));
        let p99 = figure("p99, ms", Of::P99(operation));
        let figures = if is_aimed {
            vec![Figure { aim, ..rate }, Figure { aim: (clients >= 64).then_some(Aim::Better), ..p99 }]
        } else {
            vec![rate, p99]
        };
        let arguments = format!("--clients {clients} {operation} --value-size {bytes}");
        let named = if clients == 1 {
            "1 client".to_owned()
        } else {
            format!("{} clients", super::page::number(clients as f64))
        };
        // Each client has to be answered a few times.
        let lasts = if clients * bytes >= LONG_BYTES { 4 } else { 1 };
        Step { lasts, ..Step::bench(format!("{operation}, {named}, {size}"), arguments, figures) }
    };
    let title = if operation == "put" { "Puts" } else { "Creates, each a transaction" };
    Group::new(name, format!("{title}, {size}"), CLIENTS.into_iter().map(step).collect())
}

fn kubernetes() -> Group {
    let figures = vec![
        aimed("operations/s", Of::PerSec("kubernetes"), Aim::Times(2.0, 1.7)),
        figure("p99, ms", Of::P99("kubernetes")),
        figure("lease renewals, p99, ms", Of::P99("renew-lease")),
        figure("pages of 500 pods, p99, ms", Of::P99("list-page")),
        figure("memory, MiB", Of::Memory),
    ];
    let title = "500 nodes, 5,000 pods, 64 clients, 60 watches";
    Group::new("kubernetes", "A cluster's traffic", vec![Step::bench(title, "kubernetes --connections 66", figures)])
}

fn gets() -> Group {
    let step = |title, arguments, aim| {
        let rate = Figure { unit: "gets/s", of: Of::PerSec("get"), aim };
        Step::bench(title, arguments, vec![rate, figure("p99, ms", Of::P99("get"))])
    };
    let steps = vec![
        step("get, linearizable, 64 clients", "get", Some(Aim::Times(1.5, 1.2))),
        step("get, serializable, 64 clients", "get --serializable", None),
        step("get, linearizable, 1 client", "get --clients 1", None),
    ];
    Group::new("get", "Gets, 256 B", steps)
}

/// A tenth: room in the cache for that much of the data.
fn lists() -> Vec<Group> {
    let small = Lists { title: "Lists, 10,000 x 1 KiB", load: "range --keys 10000 --value-size 1024", end: "" };
    let large = Lists {
        title: "Lists, 50,000 x 2 KiB",
        load: "range --keys 50000 --value-size 2048",
        // Each takes so long that a time would end few.
        end: "--total 6 --warmup 0s",
    };
    let once = |group| Group { is_measured_once: true, ..group };
    vec![
        small.list("list", Some(Aim::Times(3.0, 3.0))),
        small.with_tenth("list-tenth", &["--value-cache-bytes=1048576"]),
        small.without_cache("list-uncached"),
        once(large.list("list-large", None)),
        large.with_tenth("list-large-tenth", &["--value-cache-bytes=10485760"]),
        large.without_cache("list-large-uncached"),
    ]
}

/// Lists of the same keys.
struct Lists {
    title: &'static str,
    load: &'static str,
    /// When a load ends, if not after the usual time.
    end: &'static str,
}

impl Lists {
    /// Each step leaves its keys for the next.
    fn list(&self, name: &'static str, aim: Option<Aim>) -> Group {
        let p99 = || figure("p99, ms", Of::P99("range"));
        let again = |title, flags: &str, end: &str, figures| {
            Step::bench(title, format!("{} --existing --keep {flags} {end}", self.load), figures)
        };
        let one = vec![figure("ms", Of::P50("range"))];
        let whole = vec![lists_per_sec(aim), p99(), figure("memory, MiB", Of::Memory)];
        let steps = vec![
            Step::bench("list, whole", format!("{} --keep {}", self.load, self.end), whole),
            again("list, in pages of 500", "--page 500", self.end, vec![lists_per_sec(None), p99()]),
            Step::restart("", Vec::new()),
            again("list, first after a start", "", "--total 1 --warmup 0s", one),
            again("list, at an old revision", "--old-revision", self.end, vec![lists_per_sec(None), p99()]),
        ];
        Group::new(name, self.title, steps)
    }

    fn with_tenth(&self, name: &'static str, flags: &'static [&'static str]) -> Group {
        self.with_cache(name, "Orlop's cache with room for a tenth", flags)
    }

    fn without_cache(&self, name: &'static str) -> Group {
        self.with_cache(name, "Orlop's cache off", &["--value-cache-bytes=0"])
    }

    fn with_cache(&self, name: &'static str, cache: &str, flags: &'static [&'static str]) -> Group {
        let figures = vec![lists_per_sec(None), figure("p99, ms", Of::P99("range")), figure("memory, MiB", Of::Memory)];
        let steps = vec![Step::bench("list, whole", format!("{} {}", self.load, self.end), figures)];
        Group { flags, is_measured_once: true, ..Group::new(name, format!("{}, {cache}", self.title), steps) }
    }
}

fn lists_per_sec(aim: Option<Aim>) -> Figure {
    Figure { unit: "lists/s", of: Of::PerSec("range"), aim }
}

fn fan_out() -> Group {
    let step = |title, arguments, aim: Option<Aim>| {
        let is_aimed = aim.is_some();
        let rate = Figure { unit: "events/s", of: Of::PerSec("event"), aim };
        let p99 =
            Figure { unit: "p99 from put to event, ms", of: Of::P99("event"), aim: is_aimed.then_some(Aim::Better) };
        let lag = [figure("from answer to event: p50, ms", Of::P50("lag")), figure("p99, ms", Of::P99("lag"))];
        Step::bench(title, arguments, [rate, p99].into_iter().chain(lag).collect())
    };
    let steps = vec![
        step("1,000 watchers of all, 10 streams", "watch", Some(Aim::Times(5.0, 5.0))),
        step("1,000 watchers of all, 100 streams", "watch --streams 100", None),
        step("10,000 watchers of all, 100 streams", "watch --watchers 10000 --streams 100", None),
        step("1,000 watchers, each of its own key", "watch --own-key", None),
        step("10,000 watchers, each of its own key", "watch --own-key --watchers 10000 --streams 100", None),
    ];
    Group::new("fan-out", "Fan-out: clients put when all watchers have the put before", steps)
}

fn catch_up() -> Group {
    let figures =
        vec![aimed("events/s", Of::Fact("events_per_sec"), Aim::Times(2.0, 2.0)), figure("memory, MiB", Of::Memory)];
    let step = Step::bench("catching up with 100,000 revisions", "catch-up --total 1 --warmup 0s", figures);
    Group { is_measured_once: true, ..Group::new("catch-up", "Catching up", vec![step]) }
}

fn idle() -> Group {
    let figures = vec![figure("CPU, % of a core", Of::Cpu), figure("memory, MiB", Of::Memory)];
    let step = Step::bench("66 connections, 60 watches", "idle --connections 66 --duration 5s", figures);
    Group { is_measured_once: true, ..Group::new("idle", "Nothing happens", vec![step]) }
}

/// Each step leaves its keys for the next.
fn million() -> Group {
    let load = "get --key-space 1000000 --value-size 1024 --total 1 --warmup 0s --keep";
    let list = "range --existing --keep --keys 10000";
    let churn = "put --clients 256 --existing --keep --total 500000 --warmup 0s";
    let steps = vec![
        Step::bench(
            "1,000,000 x 1 KiB loaded",
            load,
            vec![figure("memory, MiB", Of::Memory), figure("file, MiB", Of::Size)],
        ),
        Step::bench("list of 10,000 of them", list, vec![figure("lists/s", Of::PerSec("range"))]),
        Step::bench(
            "500,000 puts beside them, 256 clients",
            churn,
            vec![
                figure("puts/s", Of::PerSec("put")),
                figure("p99, ms", Of::P99("put")),
                aimed("memory, MiB", Of::Memory, Aim::Better),
            ],
        ),
        // What is quiet is measured about as long as what is not.
        Step {
            lasts: 6,
            ..Step::bench(
                "compaction and defragmentation while 64 clients put",
                "maintenance --existing --keep",
                vec![
                    figure("p99 of puts before, ms", Of::P99("put")),
                    figure("p99 of puts while compacting, ms", Of::P99("put-compacting")),
                    aimed("times the p99 before", Of::Fact("compacting_p99_ratio"), Aim::AtMost(2.0)),
                    figure("compaction, s", Of::Fact("compaction_secs")),
                    figure("slowest put while defragmenting, ms", Of::Max("put-defragmenting")),
                    figure("puts that failed meanwhile", Of::Fact("puts_failed")),
                    figure("defragmentation, s", Of::Fact("defragmentation_secs")),
                    figure("file after it, MiB", Of::Size),
                ],
            )
        },
        Step::restart(
            "start with them",
            vec![aimed("s to the first answer", Of::Start, Aim::AtMost(3.0)), figure("memory, MiB", Of::Memory)],
        ),
    ];
    Group { is_measured_once: true, ..Group::new("million", "A million keys", steps) }
}
