//! The server's log: text, or JSON objects with etcd's names for level, time and message.

mod output;

use std::{fmt, io::IsTerminal as _};

use serde_json::{Map, Value};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    EnvFilter,
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::Writer,
        time::{FormatTime as _, SystemTime},
    },
    registry::LookupSpan,
};

use self::output::Outputs;
use crate::config::{LogFormat, Settings};

/// Starts logging.
///
/// # Errors
///
/// If the level is unknown or an output cannot be opened.
pub fn start(settings: &Settings) -> Result<(), String> {
    let level = &settings.log_level;
    let filter = filter(level).map_err(|error| {
        format!(
            "log-level {level:?}: {error}; use error, warn, info, debug or trace, or a filter such as \
             info,orlop_core::watch=debug"
        )
    })?;
    let outputs = Outputs::open(settings)?;
    let is_terminal = outputs.is_stderr() && std::io::stderr().is_terminal();
    let logger = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(outputs)
        // It would report a failed write to standard error on standard error, and panic when that fails too, for example
        // because the disk of the log is full.
        .log_internal_errors(false)
        .with_ansi(is_terminal);
    match settings.log_format {
        LogFormat::Auto if !is_terminal => logger.event_format(Json).init(),
        LogFormat::Text | LogFormat::Auto => logger.init(),
        LogFormat::Json => logger.event_format(Json).init(),
    }
    Ok(())
}

/// Parses a level or a list of `TARGET=LEVEL`. `EnvFilter` alone takes an unknown level for a target, which silences the
/// log.
fn filter(text: &str) -> Result<EnvFilter, String> {
    let directives: Vec<String> = text.split(',').map(directive).collect::<Result<_, _>>()?;
    EnvFilter::try_new(directives.join(",")).map_err(|error| error.to_string())
}

fn directive(text: &str) -> Result<String, String> {
    let (target, level) = text.rsplit_once('=').map_or(("", text), |(target, _)| text.split_at(target.len() + 1));
    match &*level.trim().to_ascii_lowercase() {
        level @ ("off" | "error" | "warn" | "info" | "debug" | "trace") => Ok(format!("{target}{level}")),
        // Levels of etcd above error.
        "dpanic" | "panic" | "fatal" => Ok(format!("{target}error")),
        _ => Err(format!("unknown level {level:?}")),
    }
}

/// A JSON object per line: `level`, `ts`, `caller`, `msg`, then the fields of the event.
struct Json;

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let metadata = event.metadata();
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let mut fields = EventFields::default();
        event.record(&mut fields);
        let level = match *metadata.level() {
            Level::ERROR => "error",
            Level::WARN => "warn",
            Level::INFO => "info",
            Level::DEBUG => "debug",
            Level::TRACE => "trace",
        };
        write!(writer, r#"{{"level":"{level}","ts":"{time}""#)?;
        if let (Some(file), Some(line)) = (metadata.file(), metadata.line()) {
            // The path relative to the source directory.
            let file = file.rsplit_once("src/").map_or(file, |(_, file)| file);
            write!(writer, r#","caller":{}"#, Value::from(format!("{file}:{line}")))?;
        }
        write!(writer, r#","msg":{}"#, Value::from(fields.message))?;
        for (name, value) in &fields.others {
            write!(writer, ",{}:{value}", Value::from(name.as_str()))?;
        }
        writeln!(writer, "}}")
    }
}

/// The fields of an event.
#[derive(Default)]
struct EventFields {
    message: String,
    others: Map<String, Value>,
}

impl EventFields {
    fn insert(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(message)) => self.message = message,
            (name, value) => drop(self.others.insert(name.trim_start_matches("r#").to_owned(), value)),
        }
    }
}

impl Visit for EventFields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.insert(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.insert(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.insert(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.insert(field, value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.insert(field, value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.insert(field, format!("{value:?}").into());
    }
}
