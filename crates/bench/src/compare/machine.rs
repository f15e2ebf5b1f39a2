//! A description of the machine, and its current speed.

use std::{
    fs,
    io::Write as _,
    path::Path,
    time::{Duration, Instant},
};

use sha2::{Digest as _, Sha256};

use super::test_bed::TestBed;
use crate::error::Error;

/// The machine that the servers run on.
pub struct Machine {
    processor: String,
    cores: usize,
    memory_gib: f64,
    kernel: String,
    file_system: String,
    /// Median time of a small append with fdatasync.
    sync_time: Duration,
    versions: Vec<String>,
}

impl Machine {
    pub fn describe(test_bed: &TestBed) -> Result<Self, Error> {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let after = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split(':').nth(1))
                .map_or_else(|| "unknown".to_owned(), |value| value.trim().to_owned())
        };
        let kibibytes: f64 =
            after(&read("/proc/meminfo"), "MemTotal").trim_end_matches(" kB").parse().unwrap_or_default();
        Ok(Self {
            processor: after(&read("/proc/cpuinfo"), "model name"),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gib: kibibytes / f64::from(1 << 20),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            file_system: file_system(test_bed.folder())?,
            sync_time: measure_sync_time(test_bed.folder())?,
            versions: test_bed.versions.clone(),
        })
    }

    /// Returns the description in one line.
    pub fn text(&self) -> String {
        let Self { processor, cores, memory_gib, kernel, file_system, sync_time, versions } = self;
        let versions: String = versions.iter().map(|version| format!("; {version}")).collect();
        format!(
            "{processor}, {cores} cores, {memory_gib:.0} GiB; Linux {kernel}; {file_system}, on which a small write and \
             its fdatasync take {:.2} ms; Orlop {}{versions}",
            sync_time.as_secs_f64() * 1e3,
            env!("CARGO_PKG_VERSION"),
        )
    }
}

/// Duration of a speed measurement: short compared with a trial.
const SPEED_TEST_TIME: Duration = Duration::from_millis(60);

/// Returns the current speed of one core, in MiB of SHA-256 per second.
pub fn cpu_speed() -> f64 {
    let block = [0_u8; 16 << 10];
    let mut hash = Sha256::new();
    let began = Instant::now();
    let mut blocks = 0;
    while began.elapsed() < SPEED_TEST_TIME {
        hash.update(block);
        blocks += 1;
    }
    // Using the hash keeps the compiler from removing the loop.
    let bytes = f64::from(blocks) * block.len() as f64 + f64::from(hash.finalize()[0] & 1);
    bytes / f64::from(1 << 20) / began.elapsed().as_secs_f64()
}

/// Returns the type of the file system that contains the directory.
fn file_system(folder: &Path) -> Result<String, Error> {
    let folder = folder.canonicalize()?;
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        Some((words.next()?, words.next()?))
    });
    let nearest = mounts.filter(|(at, _)| folder.starts_with(at)).max_by_key(|(at, _)| at.len());
    Ok(nearest.map_or_else(|| "unknown".to_owned(), |(_, kind)| kind.to_owned()))
}

fn measure_sync_time(folder: &Path) -> Result<Duration, Error> {
    const TIMES: usize = 101;
    let mut file = tempfile::tempfile_in(folder)?;
    let mut times = Vec::with_capacity(TIMES);
    for _ in 0..TIMES {
        let began = Instant::now();
        file.write_all(&[b'x'; 512])?;
        file.sync_data()?;
        times.push(began.elapsed());
    }
    times.sort_unstable();
    Ok(times[TIMES / 2])
}
