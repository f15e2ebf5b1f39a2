//! Programs that a test runs to their end or signals, with deadlines: a program that hangs fails its test.

use std::{
    ffi::{OsStr, OsString},
    fs,
    io::{BufRead as _, BufReader, Read},
    ops::{Deref, DerefMut},
    process::{Child, Command, Output, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use super::DEADLINE;

/// Maximum time that [`run`] waits for a program. Longer than [`DEADLINE`], because some commands copy a whole store.
pub const COMMAND_TIME: Duration = Duration::from_secs(120);

/// Returns Orlop's program: the one that `ORLOP_TEST_SERVER` names, or the one that was built with the tests.
pub fn orlop_program() -> OsString {
    std::env::var_os("ORLOP_TEST_SERVER").unwrap_or_else(|| env!("CARGO_BIN_EXE_orlop").into())
}

/// A process that a test has started. Dropping it kills the process, so that none remains if the test fails.
pub struct Started(Option<Child>);

impl Started {
    #[track_caller]
    pub fn spawn(command: &mut Command) -> Self {
        let process = command.spawn();
        process.unwrap_or_else(|error| panic!("{command:?} cannot be started: {error}")).into()
    }
}

impl From<Child> for Started {
    fn from(process: Child) -> Self {
        Self(Some(process))
    }
}

impl Deref for Started {
    type Target = Child;

    fn deref(&self) -> &Child {
        self.0.as_ref().expect("only `ended` takes the process")
    }
}

impl DerefMut for Started {
    fn deref_mut(&mut self) -> &mut Child {
        self.0.as_mut().expect("only `ended` takes the process")
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(process) = &mut self.0 {
            // It fails only if the process has already ended.
            process.kill().ok();
            process.wait().ok();
        }
    }
}

/// Returns a command that runs Orlop.
pub fn orlop<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(orlop_program());
    command.args(arguments);
    command
}

/// Runs Orlop, which must succeed, and returns its output.
#[track_caller]
pub fn prints(arguments: &[&str]) -> String {
    let output = run(&mut orlop(arguments));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Runs a program without input to its end, and collects its output.
///
/// # Panics
/// If the program does not end within [`COMMAND_TIME`].
#[track_caller]
pub fn run(command: &mut Command) -> Output {
    run_within(COMMAND_TIME, command)
}

/// Like [`run`], with another maximum time.
#[track_caller]
pub fn run_within(limit: Duration, command: &mut Command) -> Output {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let process = command.spawn().unwrap_or_else(|error| panic!("{command:?} cannot be started: {error}"));
    wait(limit, process)
        .unwrap_or_else(|printed| panic!("{command:?} did not end within {limit:?}; it printed:\n{printed}"))
}

/// Like [`run`], without blocking the other futures of the task.
pub async fn run_async(command: tokio::process::Command) -> Output {
    let mut command = command.into_std();
    tokio::task::spawn_blocking(move || run(&mut command)).await.expect("the program ends")
}

/// Waits until a process that was started ends. Returns its output, as far as it goes to pipes.
///
/// # Panics
/// If the process does not end within [`COMMAND_TIME`].
#[track_caller]
pub fn ended(process: impl Into<Started>) -> Output {
    let mut process: Started = process.into();
    wait(COMMAND_TIME, process.0.take().expect("only `ended` takes the process"))
        .unwrap_or_else(|printed| panic!("the program did not end within {COMMAND_TIME:?}; it printed:\n{printed}"))
}

/// Waits until a process ends. A process that still runs after `limit` is killed, and what it printed is the error.
pub fn wait(limit: Duration, process: Child) -> Result<Output, String> {
    let pid = Pid::from_child(&process);
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(process.wait_with_output()));
    if let Ok(output) = receiver.recv_timeout(limit) {
        return Ok(output.expect("our child can be waited for"));
    }
    // It fails only if the process has just ended.
    kill_process(pid, Signal::KILL).ok();
    // Processes that the killed one has started may keep its pipes open.
    let printed = receiver.recv_timeout(Duration::from_secs(1)).ok().and_then(Result::ok);
    let printed = printed.map(|output| [output.stdout, output.stderr].concat()).unwrap_or_default();
    Err(String::from_utf8_lossy(&printed).into_owned())
}

/// The lines of a pipe until [`DEADLINE`]. A thread reads the pipe to its end, because the process would block on a full
/// one.
pub struct Lines {
    receiver: Receiver<String>,
    deadline: Instant,
    received: Vec<String>,
}

impl Lines {
    pub fn of(pipe: impl Read + Send + 'static) -> Self {
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                // The receiver is dropped when the test needs no more lines.
                sender.send(line).ok();
            }
        });
        Self { receiver, deadline: Instant::now() + DEADLINE, received: Vec::new() }
    }
}

impl Iterator for Lines {
    type Item = String;

    /// Waits for a line; returns `None` at the end of the pipe.
    ///
    /// # Panics
    /// If the deadline passes.
    fn next(&mut self) -> Option<String> {
        match self.receiver.recv_timeout(self.deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                self.received.push(line.clone());
                Some(line)
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("the program printed only this in time: {:#?}", self.received),
        }
    }
}

/// Sends a signal to a process, which must exist.
#[track_caller]
pub fn send_signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.cast_signed()).expect("the id of a process");
    kill_process(pid, signal).expect("the signal can be sent");
}

/// Returns a size in KiB from a process's `/proc/PID/status`, such as `VmRSS`.
#[track_caller]
pub fn memory_kib(pid: u32, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let size = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).expect("Linux reports it");
    size.split_whitespace().next().and_then(|kib| kib.parse().ok()).expect("a number of KiB")
}
