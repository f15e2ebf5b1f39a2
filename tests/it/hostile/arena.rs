//! A server under attack, and a well-behaved client (the bystander) whose latency is measured.

use std::{
    fs,
    process::{self, Command},
    time::{Duration, Instant},
};

use tokio::{
    task::JoinSet,
    time::{sleep, timeout, timeout_at},
};

use crate::support::{Backend, Client, DEADLINE, Server, eventually, get, memory_kib, put};

/// The test that the bystander's process runs.
const BYSTANDER: &str = "hostile::arena::bystander";
/// The environment variable with the server's endpoint.
const BYSTANDER_ENDPOINT: &str = "ORLOP_BYSTANDER";
/// Start of the line in which the bystander prints its p99.
const BYSTANDER_P99_PREFIX: &str = "p99 in nanoseconds: ";

/// Number of additional open files that the attack does not cause, such as connections to the database.
const FILES_SLACK: usize = 24;

/// Time for a continuous attack to reach its peak memory. A virtual machine that has returned memory to its host waits
/// 5 ms for each 2 MiB that it takes back.
const ONSET: Duration = Duration::from_secs(3);

/// Maximum p99 of another client's put and get during an attack, as docs/explanation/overload.md promises.
const P99_MAX: Duration = Duration::from_millis(25);

pub struct Arena {
    pub server: Server,
    backend: Backend,
    /// Number of open files before the attack.
    files: usize,
    /// The server's memory before the attack, in KiB.
    memory: u64,
    /// The p99 of the bystander before the attack.
    p99_before: Duration,
}

/// Measurements during an attack.
struct Seen {
    /// The p99 of the bystander.
    p99_during: Duration,
    /// The server's peak memory, in KiB.
    peak: u64,
}

/// Returns `long` if the tests run in their long form, which `just hostile` selects by `ORLOP_HOSTILE_LONG` and whose
/// results are in docs/explanation/overload.md; otherwise `usual`.
pub fn sized(usual: usize, long: usize) -> usize {
    if is_long() { long } else { usual }
}

/// Returns whether the tests run in their long form.
pub fn is_long() -> bool {
    std::env::var_os("ORLOP_HOSTILE_LONG").is_some()
}

/// The processors that a process uses in the long form, which measures latency. Attackers get half of the machine's
/// processors, because in reality they run on other machines; the server, its database and the bystander get the other
/// half.
#[derive(Clone, Copy)]
enum Half {
    Served,
    Attackers,
}

impl Half {
    /// Moves this process, and the processes that it starts later, to these processors.
    fn enter(self) {
        if !is_long() {
            return;
        }
        let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
        let done = Command::new("taskset")
            .args(["--all-tasks", "--cpu-list", "--pid", &self.of(online.trim()), &process::id().to_string()])
            .output();
        assert!(done.as_ref().is_ok_and(|done| done.status.success()), "taskset, of util-linux: {done:?}");
    }

    /// Returns this half of the processors in `online`. The halves of `0-3` are `0-1` and `2-3`; both halves of `0` are
    /// `0`.
    fn of(self, online: &str) -> String {
        let last = online.rsplit(['-', ',']).next().and_then(|last| last.parse::<usize>().ok());
        match (self, last) {
            (_, None | Some(0)) => online.to_owned(),
            (Self::Served, Some(last)) => format!("0-{}", last.div_ceil(2) - 1),
            (Self::Attackers, Some(last)) => format!("{}-{last}", last.div_ceil(2)),
        }
    }
}

impl Arena {
    pub async fn new(backend: Backend, flags: &[&str]) -> Option<Self> {
        Half::Served.enter();
        let server = Server::under_test_with(backend, flags).await?;
        Half::Attackers.enter();
        let mut arena = Self { server, backend, files: 0, memory: 0, p99_before: Duration::ZERO };
        arena.measure_idle_state().await;
        Some(arena)
    }

    pub fn endpoint(&self) -> &str {
        self.server.endpoint()
    }

    pub async fn client(&self) -> Client {
        Client::connect(self.endpoint()).await
    }

    /// Measures the state before the attack; called again after the test has added data.
    pub async fn measure_idle_state(&mut self) {
        self.p99_before = bystander_p99(self.endpoint()).await;
        self.files = self.open_files();
        // Resets the kernel's peak memory.
        let _ = fs::write(format!("/proc/{}/clear_refs", self.server.pid()), "5");
        self.memory = memory_kib(self.server.pid(), "VmRSS");
    }

    /// While the attacker holds `held`, other clients are served, including new ones, and memory is bounded. After
    /// `held` is dropped the server frees its resources.
    pub async fn survives<T>(&mut self, attack: &str, peak_mib_max: u64, held: T) {
        let seen = self.serves_others(attack, peak_mib_max).await;
        drop(held);
        self.recovers(attack, &seen).await;
    }

    /// Makes the same checks for attackers that never stop.
    pub async fn survives_continuous(&mut self, attack: &str, peak_mib_max: u64, mut attackers: JoinSet<()>) {
        if is_long() {
            sleep(ONSET).await;
        }
        let seen = self.serves_others(attack, peak_mib_max).await;
        let ended = attackers.try_join_next();
        assert!(ended.is_none(), "{attack}: an attacker had stopped: {ended:?}");
        drop(attackers);
        self.recovers(attack, &seen).await;
    }

    async fn serves_others(&mut self, attack: &str, peak_mib_max: u64) -> Seen {
        let p99_during = bystander_p99(self.endpoint()).await;
        // The short form runs as a debug build while other tests run.
        if is_long() {
            assert!(p99_during < P99_MAX, "{attack}: the p99 of another client is {p99_during:?}");
        }
        let newcomer = timeout(DEADLINE, self.client()).await;
        assert!(newcomer.is_ok(), "a new client is served");
        drop(newcomer);
        let peak = memory_kib(self.server.pid(), "VmHWM");
        assert!(peak >> 10 <= peak_mib_max, "{attack}: the server took {} MiB", peak >> 10);
        Seen { p99_during, peak }
    }

    /// Measures the latency after the attack, which is also the latency before the next one. The machine's speed
    /// varies, so the latency during the attack is compared with the mean of those before and after it.
    async fn recovers(&mut self, attack: &str, seen: &Seen) {
        self.frees_resources().await;
        let after = bystander_p99(self.endpoint()).await;
        println!(
            "| {attack} | {:?} | {} | {} | {:.2} | {:.2} | {:.2} | {:.1} |",
            self.backend,
            self.memory >> 10,
            seen.peak >> 10,
            self.p99_before.as_secs_f64() * 1e3,
            seen.p99_during.as_secs_f64() * 1e3,
            after.as_secs_f64() * 1e3,
            seen.p99_during.as_secs_f64() * 2.0 / (self.p99_before + after).as_secs_f64()
        );
        self.p99_before = after;
    }

    /// Waits until no more files are open than before the attack.
    pub async fn frees_resources(&self) {
        eventually("files are closed", async || match self.open_files() {
            many if many > self.files + FILES_SLACK => {
                Err(format!("{many} are open, {} before the attack", self.files))
            }
            _ => Ok(()),
        })
        .await;
    }

    pub fn open_files(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.server.pid())).expect("/proc is readable").count()
    }
}

/// Measures in a separate process that shares nothing with the attackers, not even locks, which a descheduled attacker
/// might hold.
async fn bystander_p99(endpoint: &str) -> Duration {
    let program = std::env::current_exe().expect("/proc is readable");
    let bystander = tokio::process::Command::new(program)
        .args(["--exact", "--ignored", "--nocapture", BYSTANDER])
        .env(BYSTANDER_ENDPOINT, endpoint)
        .kill_on_drop(true)
        .output()
        .await
        .expect("this program can be started");
    let said = String::from_utf8_lossy(&bystander.stdout);
    let p99 =
        said.lines().find_map(|line| line.strip_prefix(BYSTANDER_P99_PREFIX)).and_then(|nanos| nanos.parse().ok());
    let error = String::from_utf8_lossy(&bystander.stderr);
    Duration::from_nanos(p99.unwrap_or_else(|| panic!("the bystander is not served: {said}\n{error}")))
}

#[tokio::test]
#[ignore = "other tests run it in a separate process"]
async fn bystander() {
    Half::Served.enter();
    let endpoint = std::env::var(BYSTANDER_ENDPOINT).expect("the variable is set");
    println!("\n{BYSTANDER_P99_PREFIX}{}", put_and_get_p99(&endpoint).await.as_nanos());
}

/// Returns the p99 of a put followed by a get. All puts and gets must succeed within four times [`DEADLINE`].
async fn put_and_get_p99(endpoint: &str) -> Duration {
    let mut client = timeout(DEADLINE, Client::connect(endpoint)).await.expect("the bystander connects");
    let mut times = Vec::new();
    let end = tokio::time::Instant::now() + DEADLINE * 4;
    for number in 0..sized(60, 6_000) {
        let began = Instant::now();
        let both = async {
            client.kv.put(put("bystander", [b'v'; 100])).await.expect("a put during the attack");
            client.kv.range(get("bystander")).await.expect("a get during the attack").into_inner().kvs.len()
        };
        let found = timeout_at(end, both).await;
        let found = found.unwrap_or_else(|_| panic!("call {number} of the bystander has no answer in time"));
        assert_eq!(found, 1);
        times.push(began.elapsed());
    }
    times.sort();
    times[times.len() * 99 / 100]
}
