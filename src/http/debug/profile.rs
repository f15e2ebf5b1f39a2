//! CPU profiles: stacks of the threads that run, sampled with the `pprof` crate, in the format of `go tool pprof`.
//!
//! The profiler interrupts the process with SIGPROF. It walks the stacks with the unwind tables of the executable and
//! checks each address before it reads it. It needs a temporary directory.

use std::{
    collections::HashMap,
    fmt::Display,
    io::Write as _,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use flate2::{Compression, write::GzEncoder};
use pprof::{ProfilerGuard, ProfilerGuardBuilder, Report, Symbol};
use prost::Message;
use signal_hook::{consts::SIGPROF, low_level::raise};
use tokio::{task::spawn_blocking, time::sleep};

/// Samples per second of CPU time. Not a divisor of 100, so that samples do not coincide with periodic tasks.
const FREQUENCY: i32 = 99;
const DEFAULT: Duration = Duration::from_secs(30);
const SECONDS_MAX: u64 = 300;
const NEEDS: &str = "it needs a temporary directory (TMPDIR)";

/// Parses the parameter `seconds`.
pub(super) fn duration(seconds: Option<&str>) -> Result<Duration, String> {
    match seconds.map(str::parse) {
        None => Ok(DEFAULT),
        Some(Ok(seconds)) if (1..=SECONDS_MAX).contains(&seconds) => Ok(Duration::from_secs(seconds)),
        Some(_) => Err(format!("seconds must be a whole number from 1 to {SECONDS_MAX}, for example seconds=30")),
    }
}

/// Records a profile; returns it compressed with gzip.
///
/// # Cancel safety
///
/// If the client closes the connection, the profiler stops.
///
/// # Errors
///
/// A text for the client, for example if another profile is being recorded.
pub(super) async fn record(duration: Duration) -> Result<Vec<u8>, String> {
    let failed = |error: &dyn Display| format!("cannot record a CPU profile: {error}");
    // Starting a profiler takes milliseconds; finding the names of functions takes longer.
    let started = spawn_blocking(start).await.map_err(|error| failed(&error))?;
    let profiler = started.map_err(|error| {
        let is_running = matches!(error, pprof::Error::Running);
        if is_running { failed(&"another one is being recorded") } else { failed(&format!("{error}; {NEEDS}")) }
    })?;
    sleep(duration).await;
    let built = spawn_blocking(move || {
        let report = profiler.report().build().map_err(|error| error.to_string())?;
        drop(profiler);
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(&Profile::of(&report).encode_to_vec()).map_err(|error| error.to_string())?;
        gzip.finish().map_err(|error| error.to_string())
    });
    built.await.map_err(|error| failed(&error))?.map_err(|error| failed(&error))
}

/// Starts the profiler.
fn start() -> pprof::Result<ProfilerGuard<'static>> {
    static HAS_TABLES: AtomicBool = AtomicBool::new(false);
    if !HAS_TABLES.load(Ordering::Relaxed) {
        read_unwind_tables()?;
        HAS_TABLES.store(true, Ordering::Relaxed);
    }
    ProfilerGuardBuilder::default().frequency(FREQUENCY).build()
}

/// Makes the profiler read the unwind tables, which it does in the handler of the first signal. That opens files and
/// allocates memory, so the signal must not interrupt an allocation: it is raised here.
fn read_unwind_tables() -> pprof::Result<()> {
    // The timer's first signal comes after a second of CPU time.
    let profiler = ProfilerGuardBuilder::default().frequency(1).build()?;
    raise(SIGPROF)?;
    drop(profiler);
    Ok(())
}

// The messages of https://github.com/google/pprof/blob/main/proto/profile.proto, with the fields that are used. Texts are
// positions in `string_table`, whose first entry is empty.

#[derive(Clone, PartialEq, Message)]
struct Profile {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<Sample>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "9")]
    time_nanos: i64,
    #[prost(int64, tag = "10")]
    duration_nanos: i64,
    #[prost(message, optional, tag = "11")]
    period_type: Option<ValueType>,
    /// Nanoseconds of CPU time between two samples.
    #[prost(int64, tag = "12")]
    period: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    kind: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Sample {
    /// The innermost frame first.
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    /// One for each `sample_type`.
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    label: Vec<Label>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Label {
    #[prost(int64, tag = "1")]
    key: i64,
    #[prost(int64, tag = "2")]
    text: i64,
}

/// A frame: a function and the functions that the compiler inlined into it, the innermost first.
#[derive(Clone, PartialEq, Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
    #[prost(int64, tag = "2")]
    line: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
    #[prost(int64, tag = "3")]
    system_name: i64,
    #[prost(int64, tag = "4")]
    filename: i64,
}

impl Profile {
    fn of(report: &Report) -> Self {
        let (mut tables, timing) = (Tables::default(), &report.timing);
        tables.text(String::new());
        let nanos = |duration: Duration| i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX);
        let period = nanos(Duration::from_secs(1)) / i64::from(timing.frequency.max(1));
        let types = [("samples", "count"), ("cpu", "nanoseconds")]
            .map(|(kind, unit)| ValueType { kind: tables.text(kind.to_owned()), unit: tables.text(unit.to_owned()) });
        let thread = tables.text("thread".to_owned());
        let sample = report.data.iter().map(|(frames, count)| {
            let count = i64::try_from(*count).unwrap_or(i64::MAX);
            let location_id = frames.frames.iter().map(|symbols| tables.location(symbols)).collect();
            let label = vec![Label { key: thread, text: tables.text(frames.thread_name_or_id()) }];
            Sample { location_id, value: vec![count, count.saturating_mul(period)], label }
        });
        Self {
            sample: sample.collect(),
            sample_type: types.to_vec(),
            location: tables.locations,
            function: tables.functions,
            string_table: tables.texts,
            time_nanos: timing.start_time.duration_since(std::time::UNIX_EPOCH).map_or(0, nanos),
            duration_nanos: nanos(timing.duration),
            period_type: Some(types[1]),
            period,
        }
    }
}

/// The tables to which samples refer, and the position of each entry. Ids of functions and locations begin at 1.
#[derive(Default)]
struct Tables {
    texts: Vec<String>,
    text_positions: HashMap<String, i64>,
    functions: Vec<Function>,
    function_ids: HashMap<(i64, i64), u64>,
    locations: Vec<Location>,
    location_ids: HashMap<Vec<Line>, u64>,
}

impl Tables {
    fn text(&mut self, text: String) -> i64 {
        let next = self.texts.len();
        *self.text_positions.entry(text).or_insert_with_key(|text| {
            self.texts.push(text.clone());
            i64::try_from(next).unwrap_or(i64::MAX)
        })
    }

    fn function(&mut self, symbol: &Symbol) -> u64 {
        let (name, filename) = (self.text(symbol.name()), self.text(symbol.filename().into_owned()));
        let system_name = self.text(symbol.sys_name().into_owned());
        let next = self.functions.len() as u64 + 1;
        *self.function_ids.entry((system_name, filename)).or_insert_with(|| {
            self.functions.push(Function { id: next, name, system_name, filename });
            next
        })
    }

    fn location(&mut self, symbols: &[Symbol]) -> u64 {
        let line = |symbol| Line { function_id: self.function(symbol), line: i64::from(symbol.lineno()) };
        let lines: Vec<Line> = symbols.iter().map(line).collect();
        let next = self.locations.len() as u64 + 1;
        *self.location_ids.entry(lines).or_insert_with_key(|line| {
            self.locations.push(Location { id: next, line: line.clone() });
            next
        })
    }
}
