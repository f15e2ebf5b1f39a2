//! The Markdown page: replaces the tables between two markers and keeps the rest.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use super::{
    groups::PerformanceTarget,
    machine::Machine,
    plot,
    results::{Cell, Results, Row, Table},
    server_kind::ServerKind,
};
use crate::{error::Error, output::number};

const BEGIN: &str = "<!-- figures: begin; orlop bench compare replaces the text up to the end marker -->\n";
const END: &str = "<!-- figures: end -->\n";

/// Spread, as a share of the median, above which a value is marked.
const SPREAD_MAX: f64 = 0.3;

/// A page to write the results into.
pub struct Page {
    path: PathBuf,
    before: String,
    after: String,
}

impl Page {
    /// Reads the text before and after the tables. Called before the measurement, so that an unusable page is noticed
    /// early.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let unusable = |reason: &str| Error::Flags(format!("--output {}: {reason}", path.display()));
        let old = match fs::read_to_string(path) {
            Ok(old) => old,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => format!("# Benchmarks\n\n{BEGIN}{END}"),
            Err(error) => return Err(unusable(&error.to_string())),
        };
        let around = old.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
        let (before, after) = around.ok_or_else(|| {
            unusable(&format!("the page has no marker for the tables, marker=`{}`", BEGIN.trim_end()))
        })?;
        Ok(Self { path: path.to_owned(), before: before.to_owned(), after: after.to_owned() })
    }

    /// Writes the tables to the page, and the plots to the page's folder.
    pub fn write(&self, machine: &Machine, results: &Results) -> Result<(), Error> {
        let folder = self.path.parent().unwrap_or(Path::new(""));
        fs::create_dir_all(folder)?;
        let plots = plot::draw(results, folder)?;
        let text = text(machine, results, Some(&plots));
        fs::write(&self.path, format!("{}{BEGIN}{text}{END}{}", self.before, self.after))?;
        Ok(())
    }
}

/// Returns the text: the machine, the targets, the plots (file and title) and a table for each group.
pub fn text(machine: &Machine, results: &Results, plots: Option<&[(&'static str, &'static str)]>) -> String {
    let mut text = format!("\nMeasured on: {}.\n\n{}", machine.text(), reliability(results));
    text += &targets(results);
    for (path, title) in plots.unwrap_or_default() {
        let _infallible = write!(text, "\n![{title}]({path})\n");
    }
    for table in &results.tables {
        text += &group(table);
    }
    if results.interrupted {
        text += "\ninterrupted: the results are incomplete\n";
    }
    text + "\n"
}

/// Returns a note on the variance of the results and the speed of the machine.
fn reliability(results: &Results) -> String {
    let trials = results.cpu_speeds.len();
    let min = results.cpu_speeds.iter().copied().fold(f64::INFINITY, f64::min);
    let max = results.cpu_speeds.iter().copied().fold(0.0, f64::max);
    let slow: usize = results.tables.iter().map(|table| table.slow_trials).sum();
    let rounds = results.tables.iter().map(|table| table.rounds).max().unwrap_or_default();
    let doubt = match slow {
        0 => "none remained in doubt".to_owned(),
        slow => format!("{slow} remained in doubt"),
    };
    let rounds = match rounds {
        1 => "One round".to_owned(),
        rounds => format!("Medians of {rounds} rounds unless noted"),
    };
    format!(
        "{rounds}; ± is half the distance between the worst and the best round, ~ marks a figure whose rounds differ \
         by more than {:.0} %. Bold: ratio to etcd, above 1 is better. The speed of the machine was measured around \
         each of {trials} runs: {min:.0} to {max:.0} MiB of SHA-256 per second; {} runs were repeated because it was \
         slow, {doubt}.\n",
        SPREAD_MAX * 100.0,
        results.repeated_trials,
    )
}

fn targets(results: &Results) -> String {
    let rows: Vec<&Row> =
        results.tables.iter().flat_map(|table| &table.rows).filter(|row| row.metric.target.is_some()).collect();
    if rows.is_empty() {
        return String::new();
    }
    let mut text =
        "\n### Targets\n| load | target, SQLite | result | target, Postgres | result |\n|---|---|---|---|---|\n"
            .to_owned();
    for row in rows {
        let _infallible = write!(text, "| {}, {} |", row.load, row.unit);
        for server in [ServerKind::Sqlite, ServerKind::Postgres] {
            let _infallible = write!(text, " {} | {} |", target(row, server), outcome(row, server));
        }
        text.push('\n');
    }
    text
}

fn target(row: &Row, server: ServerKind) -> String {
    match row.metric.target {
        Some(PerformanceTarget::EtcdRatio(sqlite, postgres)) => {
            format!("{}x etcd", if server == ServerKind::Sqlite { sqlite } else { postgres })
        }
        Some(PerformanceTarget::NotWorse) => "no worse than etcd".to_owned(),
        Some(PerformanceTarget::AtMost(max)) => format!("at most {max}"),
        None => String::new(),
    }
}

fn outcome(row: &Row, server: ServerKind) -> String {
    let Some(is_met) = row.meets_target(server) else { return "not measured".to_owned() };
    let got = match (row.metric.target, row.ratio_to_etcd(server)) {
        (Some(PerformanceTarget::EtcdRatio(..) | PerformanceTarget::NotWorse), Some(ratio)) => format!("{ratio:.2}x"),
        _ => row.cell(server).map_or_else(String::new, |cell| number(cell.median())),
    };
    if is_met { format!("**{got}**") } else { format!("{got}, missed") }
}

fn group(table: &Table) -> String {
    let servers = table.servers();
    let mut text = format!("\n### {}\n", table.title);
    if table.slow_trials > 0 {
        let _infallible = write!(text, "\n{} runs in doubt because the machine was slow.\n\n", table.slow_trials);
    }
    text += "| load | |";
    for server in &servers {
        let _infallible = write!(text, " {} |", server.name());
    }
    let _infallible = writeln!(text, "\n|---|---|{}", "---|".repeat(servers.len()));
    let mut last = "";
    for row in &table.rows {
        let load = if row.load == last { "" } else { row.load.as_str() };
        last = &row.load;
        let _infallible = write!(text, "| {load} | {} |", row.unit);
        for cell in &row.cells {
            let _infallible = write!(text, " {} |", cell_text(row, cell));
        }
        text.push('\n');
    }
    text
}

fn cell_text(row: &Row, cell: &Cell) -> String {
    let mark = if cell.spread() > SPREAD_MAX { "~" } else { "" };
    let spread = match cell.samples.len() {
        0 | 1 => String::new(),
        _ => format!(" ± {:.0} %", cell.spread() * 50.0),
    };
    let ratio = row.ratio_to_etcd(cell.server).map_or_else(String::new, |ratio| format!(", **{ratio:.2}x**"));
    format!("{mark}{}{spread}{ratio}", number(cell.median()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::groups::{Metric, Source};

    fn row(source: Source, target: Option<PerformanceTarget>, samples: [&[f64]; 2]) -> Row {
        let cell = |server, samples: &[f64]| Cell { server, samples: samples.to_vec() };
        let metric = Metric { unit: "puts/s", source, target };
        let cells = vec![cell(ServerKind::Etcd, samples[0]), cell(ServerKind::Sqlite, samples[1])];
        Row { load: "put".to_owned(), unit: "puts/s", metric, cells }
    }

    #[test]
    fn cells_contain_ratio_and_spread() {
        let row =
            row(Source::PerSec("put"), Some(PerformanceTarget::EtcdRatio(2.0, 1.0)), [&[10.0], &[10.0, 25.0, 30.0]]);
        assert_eq!(cell_text(&row, &row.cells[0]), "10");
        assert_eq!(cell_text(&row, &row.cells[1]), "~25 ± 40 %, **2.50x**");
        assert_eq!(
            (target(&row, ServerKind::Sqlite), outcome(&row, ServerKind::Sqlite)),
            ("2x etcd".to_owned(), "**2.50x**".to_owned())
        );
        assert_eq!(outcome(&row, ServerKind::Postgres), "not measured");
    }

    #[test]
    fn text_around_the_tables_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page.md");
        fs::write(&path, format!("before\n{BEGIN}old\n{END}after\n")).unwrap();
        let page = Page::open(&path).unwrap();
        assert_eq!((page.before.as_str(), page.after.as_str()), ("before\n", "after\n"));
        fs::write(&path, "no place").unwrap();
        let rejected = Page::open(&path).map(|_| ()).unwrap_err().to_string();
        assert!(rejected.contains("the page has no marker for the tables"), "{rejected}");
    }
}
