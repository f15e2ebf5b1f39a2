//! CPU time of the server's threads during a load, for a server on the same machine (`--server-pid`).
//!
//! Threads are grouped by their names, of which the kernel keeps 15 bytes. Child processes count too, because Postgres
//! has one process per connection. A thread that ends during the load is not counted.

use std::{collections::BTreeMap, fmt, time::Duration};

use parking_lot::Mutex;
use procfs::{ProcError, ProcResult, process::Process};
use serde::Serialize;

use crate::{error::Error, report::rounded};

/// Measures the CPU time of processes. A measurement may consist of several parts, whose times are added.
#[derive(Debug)]
pub struct CpuMeter {
    processes: Vec<i32>,
    used: Mutex<Measured>,
}

#[derive(Debug, Default)]
struct Measured {
    by_name: BTreeMap<String, Duration>,
    error: Option<String>,
}

/// CPU time per thread.
pub type Snapshot = Result<BTreeMap<ThreadId, Thread>, String>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ThreadId {
    process: i32,
    thread: i32,
}

#[derive(Clone, Debug)]
pub struct Thread {
    name: String,
    used: Duration,
}

impl CpuMeter {
    /// Fails if one of the processes does not exist or cannot be read.
    pub fn new(processes: &[i32]) -> Result<Self, Error> {
        let meter = Self { processes: processes.to_vec(), used: Mutex::default() };
        meter.snapshot().map_err(|error| Error::Flags(format!("--server-pid: {error}")))?;
        Ok(meter)
    }

    pub fn snapshot(&self) -> Snapshot {
        let mut threads = BTreeMap::new();
        for &process in &self.processes {
            let mut read = || -> ProcResult<()> {
                read_threads(&Process::new(process)?, &mut threads)?;
                for child in procfs::process::all_processes()?.flatten() {
                    // A process that has ended in the meantime has no threads.
                    if child.stat().is_ok_and(|stat| stat.ppid == process) {
                        read_threads(&child, &mut threads).ok();
                    }
                }
                Ok(())
            };
            // The error's own text names a file below /proc.
            read().map_err(|error| match error {
                ProcError::NotFound(_) => format!("no such process, pid={process}"),
                ProcError::PermissionDenied(_) => format!("the process belongs to another user, pid={process}"),
                ProcError::Incomplete(_) | ProcError::Io(..) | ProcError::Other(_) | ProcError::InternalError(_) => {
                    format!("{error}, pid={process}")
                }
            })?;
        }
        Ok(threads)
    }

    /// Adds the time since `before` to the measurement.
    pub fn add_since(&self, before: &Snapshot) {
        let after = self.snapshot();
        let mut used = self.used.lock();
        match (before, after) {
            (Ok(before), Ok(after)) => {
                for (id, thread) in after {
                    let earlier = before.get(&id).map_or(Duration::ZERO, |thread| thread.used);
                    *used.by_name.entry(thread.name).or_default() += thread.used.saturating_sub(earlier);
                }
            }
            (Err(error), _) => used.error = Some(error.clone()),
            (_, Err(error)) => used.error = Some(error),
        }
    }

    /// Returns the measurement and begins a new one.
    pub fn finish(&self, operations: u64) -> Result<ServerCpu, String> {
        let used = std::mem::take(&mut *self.used.lock());
        match used.error {
            Some(error) => Err(format!("reading the CPU time of the server failed: {error}")),
            None => Ok(ServerCpu::new(used.by_name, operations)),
        }
    }
}

fn read_threads(process: &Process, threads: &mut BTreeMap<ThreadId, Thread>) -> ProcResult<()> {
    let ticks_per_second = u32::try_from(procfs::ticks_per_second()).unwrap_or(u32::MAX);
    for task in process.tasks()?.flatten() {
        // A thread that has ended in the meantime is skipped.
        let Ok(stat) = task.stat() else { continue };
        let used = match task.schedstat() {
            Ok(exact) => Duration::from_nanos(exact.sum_exec_runtime),
            // Not every kernel has this file. A tick is usually 10 ms.
            Err(_) => Duration::from_secs(stat.utime + stat.stime) / ticks_per_second,
        };
        let id = ThreadId { process: process.pid, thread: task.tid };
        threads.insert(id, Thread { name: stat.comm, used });
    }
    Ok(())
}

/// CPU time of the server by thread name, the largest first.
#[derive(Clone, Debug, Serialize)]
pub struct ServerCpu {
    /// Operations of the load.
    pub operations: u64,
    pub cpu_secs: f64,
    /// 0 if the load has no operations.
    pub micros_per_operation: f64,
    pub threads: Vec<ThreadCpu>,
}

/// CPU time of all threads with the same name.
#[derive(Clone, Debug, Serialize)]
pub struct ThreadCpu {
    pub name: String,
    pub cpu_secs: f64,
    pub micros_per_operation: f64,
}

impl ServerCpu {
    fn new(by_name: BTreeMap<String, Duration>, operations: u64) -> Self {
        let micros = |used: Duration| match operations {
            0 => 0.0,
            _ => rounded(used.as_secs_f64() * 1e6 / operations as f64),
        };
        let total: Duration = by_name.values().sum();
        let mut by_time: Vec<_> = by_name.into_iter().filter(|(_, used)| !used.is_zero()).collect();
        by_time.sort_by_key(|(_, used)| std::cmp::Reverse(*used));
        let thread = |(name, used): (String, Duration)| ThreadCpu {
            name,
            cpu_secs: used.as_secs_f64(),
            micros_per_operation: micros(used),
        };
        Self {
            operations,
            cpu_secs: total.as_secs_f64(),
            micros_per_operation: micros(total),
            threads: by_time.into_iter().map(thread).collect(),
        }
    }
}

impl fmt::Display for ServerCpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<20}  {:>11}  {:>16}", "server thread", "CPU seconds", "µs per operation")?;
        for ThreadCpu { name, cpu_secs, micros_per_operation } in &self.threads {
            writeln!(f, "{name:<20}  {cpu_secs:>11.2}  {micros_per_operation:>16.2}")?;
        }
        writeln!(f, "{:<20}  {:>11.2}  {:>16.2}", "sum", self.cpu_secs, self.micros_per_operation)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::Barrier,
        time::{Duration, Instant},
    };

    use super::*;

    #[test]
    fn threads_are_sorted_and_divided_by_the_operations() {
        let used = [("idle", 0), ("orlop", 1_500), ("sqlx-sqlite-wor", 3_500)];
        let used = used.map(|(name, millis)| (name.into(), Duration::from_millis(millis)));
        let cpu = ServerCpu::new(used.into(), 1_000_000);
        let threads: Vec<_> =
            cpu.threads.iter().map(|cpu| (cpu.name.as_str(), cpu.cpu_secs, cpu.micros_per_operation)).collect();
        assert_eq!(threads, [("sqlx-sqlite-wor", 3.5, 3.5), ("orlop", 1.5, 1.5)]);
        assert_eq!((cpu.cpu_secs, cpu.micros_per_operation), (5.0, 5.0));
        let text = cpu.to_string();
        let lines: Vec<_> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
        assert_eq!(
            lines[1..],
            [vec!["sqlx-sqlite-wor", "3.50", "3.50"], vec!["orlop", "1.50", "1.50"], vec!["sum", "5.00", "5.00"]]
        );
    }

    #[test]
    fn threads_of_the_same_name_are_summed() {
        let meter = CpuMeter::new(&[std::process::id().cast_signed()]).unwrap();
        let before = meter.snapshot();
        let spin = || {
            let began = Instant::now();
            while began.elapsed() < Duration::from_millis(300) {
                std::hint::spin_loop();
            }
        };
        // The threads wait for the measurement: a thread that has ended is not counted.
        let barrier = Barrier::new(3);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let spinner = || {
                    spin();
                    barrier.wait();
                    barrier.wait();
                };
                std::thread::Builder::new().name("spinner".to_owned()).spawn_scoped(scope, spinner).unwrap();
            }
            barrier.wait();
            meter.add_since(&before);
            barrier.wait();
        });
        let cpu = meter.finish(1_000).unwrap();
        let spinners: Vec<_> = cpu.threads.iter().filter(|thread| thread.name == "spinner").collect();
        assert_eq!(spinners.len(), 1, "{cpu:?}");
        assert!(spinners[0].cpu_secs > 0.0 && spinners[0].micros_per_operation > 0.0, "{cpu:?}");
        // The next measurement begins at zero.
        assert!(meter.finish(1).unwrap().threads.is_empty());
    }

    #[test]
    fn missing_process_is_named() {
        // The kernel's maximum is 4,194,304.
        let error = CpuMeter::new(&[i32::MAX]).unwrap_err().to_string();
        assert_eq!(error, "--server-pid: no such process, pid=2147483647");
    }
}
