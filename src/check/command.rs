//! The command line of `orlop check`.

use super::{Findings, Location, Plan, Report, Violation, check};
use crate::{
    config::{DatastoreFlags, Flags, Settings},
    datastore,
    output::{json_line, print},
    progress::Progress,
};
use orlop_core::{
    log::{self, Depth, Inspect},
    types::Revision,
};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    datastore: DatastoreFlags,

    /// Do not compare SQLite's indexes with its tables, which is the slowest part of the check
    #[arg(long)]
    quick: bool,

    /// Maximum number of violations to print; all are counted
    #[arg(long, default_value_t = 100, value_name = "COUNT")]
    limit: usize,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The result of a check.
#[must_use]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Sound,
    Damaged,
}

/// Runs the command: checks the store and prints the result.
///
/// # Errors
///
/// A text for the operator, if the store could not be checked.
pub async fn run(args: Args) -> Result<Verdict, Box<dyn std::error::Error>> {
    let Args { datastore, quick, limit, json } = args;
    let settings = Settings::load(&Flags::from(datastore))?;
    let plan = Plan { limit, depth: if quick { Depth::Quick } else { Depth::Whole } };
    let report = match open(&settings).await {
        Ok(store) => {
            let progress = if json { None } else { Progress::on_terminal() };
            check(&*store, plan, show(progress)).await?
        }
        // The store cannot be read because of damage.
        Err(Failure::Log(log::Error::Corrupt(what))) => unreadable(limit, what),
        Err(Failure::Log(error @ log::Error::Open(_))) => {
            let text = "--config-file, --data-dir or --datastore-endpoint selects another store";
            return Err(format!("{error}; {text}").into());
        }
        Err(Failure::Log(error)) => return Err(error.into()),
        Err(Failure::Settings(text)) => return Err(text.into()),
    };
    let text = if json { json_line(&as_json(&report)) } else { as_text(&report) };
    print(text.as_bytes())?;
    Ok(if report.findings.is_empty() { Verdict::Sound } else { Verdict::Damaged })
}

/// Returns the function that shows how far the check is.
fn show(mut progress: Option<Progress>) -> impl FnMut(Revision, Revision) {
    if let Some(progress) = &mut progress {
        progress.show(0, 1, || "checking the file".to_owned());
    }
    let number = |revision: Revision| u64::try_from(revision.0).unwrap_or(0);
    move |revision, head| {
        if let Some(progress) = &mut progress {
            progress.show(number(revision), number(head), || format!("revision {revision} of {head}"));
        }
    }
}

enum Failure {
    Settings(String),
    Log(log::Error),
}

async fn open(settings: &Settings) -> Result<Box<dyn Inspect>, Failure> {
    datastore::view(&settings.datastore().map_err(Failure::Settings)?).await.map_err(Failure::Log)
}

fn unreadable(limit: usize, what: String) -> Report {
    let mut findings = Findings::new(limit);
    findings.add("database", None, what);
    Report { findings, ..Report::default() }
}

fn as_text(report: &Report) -> String {
    let revisions = report.revisions.map_or("none".to_owned(), |(first, last)| format!("{first} to {last}"));
    let number = |number: Option<i64>| number.map_or("none".to_owned(), |number| number.to_string());
    let to_purge = report.rows_to_purge.map_or("not counted".to_owned(), |rows| rows.to_string());
    let mut text = format!(
        "database          {}\n\
         rows              {}\n\
         keys              {}\n\
         live keys         {}\n\
         revisions         {revisions}\n\
         compact revision  {}\n\
         rows to purge     {to_purge}\n\
         leases            {}\n\
         archived rows     {}\n\
         bytes             {}\n\
         seconds           {:.1}\n\
         violations        {}\n",
        report.name,
        report.rows,
        report.keys,
        report.live_keys,
        number(report.compact_revision),
        report.leases,
        number(report.archived_rows.map(u64::cast_signed)),
        report.bytes,
        report.took.as_secs_f64(),
        report.findings.total,
    );
    for violation in &report.findings.reported {
        text.push_str(&format!("{violation}\n"));
    }
    let more = report.findings.total - report.findings.reported.len() as u64;
    if more > 0 {
        text.push_str(&format!("and {more} more; --limit {} lists all of them\n", report.findings.total));
    }
    text.push_str(&match report.findings.total {
        0 => "The store is sound.\n".to_owned(),
        total => format!(
            "Keep a copy of the store and restore a snapshot: docs/how-to/backup.md.\n\
             The store is damaged: {total} {}.\n",
            if total == 1 { "finding" } else { "findings" }
        ),
    });
    text
}

fn as_json(report: &Report) -> serde_json::Value {
    let violations: Vec<serde_json::Value> = report.findings.reported.iter().map(violation_as_json).collect();
    serde_json::json!({
        "database": report.name,
        "sound": report.findings.is_empty(),
        "rows": report.rows,
        "keys": report.keys,
        "liveKeys": report.live_keys,
        "firstRevision": report.revisions.map(|(first, _)| first),
        "revision": report.revisions.map(|(_, last)| last),
        "compactRevision": report.compact_revision,
        "rowsToPurge": report.rows_to_purge,
        "leases": report.leases,
        "archivedRows": report.archived_rows,
        "bytes": report.bytes,
        "seconds": report.took.as_secs_f64(),
        "violationsTotal": report.findings.total,
        "violations": violations,
    })
}

fn violation_as_json(violation: &Violation) -> serde_json::Value {
    let mut object = serde_json::json!({ "table": violation.table, "what": violation.what });
    match &violation.row {
        Some(Location::Row { id, sub, key }) => {
            object["id"] = (*id).into();
            object["sub"] = (*sub).into();
            object["key"] = key.as_str().into();
        }
        Some(Location::Lease(id) | Location::Member(id)) => object["id"] = (*id).into(),
        Some(Location::Fact(name)) => object["name"] = name.as_str().into(),
        None => {}
    }
    object
}
