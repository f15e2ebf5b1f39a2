//! The server's log: text, or JSON objects with etcd's names for level, time and message.

mod output;
mod stream;

use std::{fmt, io::IsTerminal as _};

use serde_json::{Map, Value};
use tracing::{
    Event, Level, Subscriber, error,
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

use self::{output::Outputs, stream::Stream};
use crate::config::{LogFormat, Settings};

/// The log of the process.
pub struct Log {
    is_text_on_stderr: bool,
}

impl Log {
    /// Logs why the process ends, unless the log is text on standard error, where `main` prints the same.
    pub fn failure(&self, error: &dyn std::error::Error) {
        if !self.is_text_on_stderr {
            error!(%error, "the server failed");
        }
    }
}

/// Starts logging.
///
/// # Errors
///
/// If the level is unknown or an output cannot be opened.
pub fn start(settings: &Settings) -> Result<Log, String> {
    let level = &settings.log_level;
    let filter = filter(level).map_err(|error| {
        format!(
            "log-level {level:?}: {error}; use error, warn, info, debug or trace, or a filter such as \
             info,orlop_core::watch=debug"
        )
    })?;
    let outputs = Outputs::open(settings)?;
    let is_stderr = outputs.is_stderr();
    let is_terminal = is_stderr && std::io::stderr().is_terminal();
    let is_text = match settings.log_format {
        LogFormat::Auto => is_terminal,
        LogFormat::Text => true,
        LogFormat::Json => false,
    };
    let logger = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(outputs.with_notice(if is_text { text_notice } else { json_notice }))
        // It would report a failed write to standard error on standard error, and panic when that fails too, for example
        // because the disk of the log is full.
        .log_internal_errors(false)
        .with_ansi(is_terminal);
    if is_text {
        logger.init();
    } else {
        logger.event_format(Json).init();
    }
    Ok(Log { is_text_on_stderr: is_text && is_stderr })
}

/// Prints a line to standard output, unless nobody reads it.
pub(crate) fn print(line: &str) {
    // The process continues if standard output is closed.
    let _ = Stream::new(std::io::stdout()).write(format!("{line}\n").as_bytes(), text_notice);
}

const LOST: &str = "log messages were lost, because nobody read the output";

fn text_notice(lost: u64) -> String {
    format!("{}  WARN orlop::logging: {LOST} messages={lost}\n", time())
}

fn json_notice(lost: u64) -> String {
    let (time, line) = (time(), line!());
    let lost = format!(",\"messages\":{lost}}}\n");
    format!(r#"{{"level":"warn","ts":"{time}","caller":"logging.rs:{line}","msg":"{LOST}"{lost}"#)
}

/// Returns the time as it is in the log.
fn time() -> String {
    let mut time = String::new();
    // Writing to a string does not fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut time));
    time
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
        let time = time();
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
        // Events of OpenTelemetry's libraries have a name and no message.
        let message = if fields.message.is_empty() { fields.others.remove("name") } else { None };
        write!(writer, r#","msg":{}"#, message.unwrap_or_else(|| Value::from(fields.message)))?;
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

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    #[test]
    fn event_without_a_message_has_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let logger = tracing_subscriber::fmt().event_format(Json).with_writer(File::create(&log).unwrap()).finish();
        tracing::subscriber::with_default(logger, || {
            error!(name = "Exporter.Failed", reason = "no collector", "");
            error!(name = "etcd", "a message");
        });
        let text = fs::read_to_string(&log).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((&lines[0]["msg"], &lines[0]["reason"]), (&"Exporter.Failed".into(), &"no collector".into()));
        assert_eq!((&lines[1]["msg"], &lines[1]["name"]), (&"a message".into(), &"etcd".into()));
        assert_eq!((lines.len(), lines[0].get("name")), (2, None));
    }

    #[test]
    fn notices_have_the_form_of_the_log() {
        let json: Value = serde_json::from_str(json_notice(3).trim_end()).unwrap();
        assert_eq!((&json["level"], &json["msg"], &json["messages"]), (&"warn".into(), &LOST.into(), &3.into()));
        let text = text_notice(3);
        assert!(text.ends_with(&format!("Z  WARN orlop::logging: {LOST} messages=3\n")), "{text}");
    }
}
