//! The page: tables in Markdown, between two marks of a page that may say more.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use super::{
    Error,
    figures::{Cell, Figures, Row, Table},
    groups::Aim,
    machine::Machine,
    plot,
    server::Kind,
};

const BEGIN: &str = "<!-- figures: begin; orlop bench compare writes what stands between -->\n";
const END: &str = "<!-- figures: end -->\n";

/// Rounds that differ by more than this share of their median are marked.
const SPREAD_MAX: f64 = 0.3;

/// A page to write into.
pub struct Page {
    path: PathBuf,
    before: String,
    after: String,
}

impl Page {
    /// Reads what stands around the figures, before anything is measured in vain.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let unusable = |what: &str| Error::Flags(format!("--output {}: {what}", path.display()));
        let old = match fs::read_to_string(path) {
            Ok(old) => old,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => format!("# Benchmarks\n\n{BEGIN}{END}"),
            Err(error) => return Err(unusable(&error.to_string())),
        };
        let around = old.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
        let (before, after) = around.ok_or_else(|| {
            unusable(&format!("it has no place for figures, which begins with `{}`", BEGIN.trim_end()))
        })?;
        Ok(Self { path: path.to_owned(), before: before.to_owned(), after: after.to_owned() })
    }

    /// Writes the figures to the page, and the plots to the page's folder.
    pub fn write(&self, machine: &Machine, figures: &Figures) -> Result<(), Error> {
        let folder = self.path.parent().unwrap_or(Path::new(""));
        fs::create_dir_all(folder)?;
        let plots = plot::draw(figures, folder)?;
        let text = text(machine, figures, Some(&plots));
        fs::write(&self.path, format!("{}{BEGIN}{text}{END}{}", self.before, self.after))?;
        Ok(())
    }
}

/// The machine, the aims, the plots (file and title) and a table for each group.
pub fn text(machine: &Machine, figures: &Figures, plots: Option<&[(&'static str, &'static str)]>) -> String {
    let mut text = format!("\nMeasured on: {}.\n\n{}", machine.text(), trust(figures));
    text += &aims(figures);
    for (path, title) in plots.unwrap_or_default() {
        let _infallible = write!(text, "\n![{title}]({path})\n");
    }
    for table in &figures.tables {
        text += &group(table);
    }
    text + "\n"
}

/// How far the figures can be relied on.
fn trust(figures: &Figures) -> String {
    let turns = figures.pace.len();
    let least = figures.pace.iter().copied().fold(f64::INFINITY, f64::min);
    let most = figures.pace.iter().copied().fold(0.0, f64::max);
    let noisy: usize = figures.tables.iter().map(|table| table.noisy_turns).sum();
    let rounds = figures.tables.iter().map(|table| table.rounds).max().unwrap_or_default();
    let doubt = match noisy {
        0 => "none was left in doubt".to_owned(),
        noisy => format!("{noisy} stayed in doubt"),
    };
    let rounds = match rounds {
        1 => "One round".to_owned(),
        rounds => format!("Medians of {rounds} rounds where nothing else is said"),
    };
    format!(
        "{rounds}; ± is half the distance from the worst round to the best, \
         ~ marks a figure whose rounds lie more than {:.0} % apart. Bold: times as good as etcd. The machine itself was timed \
         around each of {turns} turns, with {least:.0} to {most:.0} MiB of SHA-256 a second; {} turns were taken again as it \
         was slow, {doubt}.\n",
        SPREAD_MAX * 100.0,
        figures.retaken,
    )
}

fn aims(figures: &Figures) -> String {
    let rows: Vec<&Row> =
        figures.tables.iter().flat_map(|table| &table.rows).filter(|row| row.figure.aim.is_some()).collect();
    if rows.is_empty() {
        return String::new();
    }
    let mut text =
        "\n### Against what Orlop aims at\n| | aim, SQLite | | aim, Postgres | |\n|---|---|---|---|---|\n".to_owned();
    for row in rows {
        let _infallible = write!(text, "| {}, {} |", row.load, row.unit);
        for server in [Kind::Sqlite, Kind::Postgres] {
            let _infallible = write!(text, " {} | {} |", aim(row, server), outcome(row, server));
        }
        text.push('\n');
    }
    text
}

fn aim(row: &Row, server: Kind) -> String {
    match row.figure.aim {
        Some(Aim::Times(sqlite, postgres)) => {
            format!("{}x etcd", if server == Kind::Sqlite { sqlite } else { postgres })
        }
        Some(Aim::Better) => "no worse than etcd".to_owned(),
        Some(Aim::AtMost(most)) => format!("{most} at most"),
        None => String::new(),
    }
}

fn outcome(row: &Row, server: Kind) -> String {
    let Some(is_reached) = row.reaches_aim(server) else { return "not measured".to_owned() };
    let got = match (row.figure.aim, row.times_etcd(server)) {
        (Some(Aim::Times(..) | Aim::Better), Some(times)) => format!("{times:.2}x"),
        _ => row.cell(server).map_or_else(String::new, |cell| number(cell.median())),
    };
    if is_reached { format!("**{got}**") } else { format!("{got}, missed") }
}

fn group(table: &Table) -> String {
    let servers = table.servers();
    let mut text = format!("\n### {}\n", table.title);
    if table.noisy_turns > 0 {
        let _infallible = write!(text, "\n{} turns in doubt: the machine was slow meanwhile.\n\n", table.noisy_turns);
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
    let doubt = if cell.spread() > SPREAD_MAX { "~" } else { "" };
    let spread = match cell.samples.len() {
        0 | 1 => String::new(),
        _ => format!(" ± {:.0} %", cell.spread() * 50.0),
    };
    let times = row.times_etcd(cell.server).map_or_else(String::new, |times| format!(", **{times:.2}x**"));
    format!("{doubt}{}{spread}{times}", number(cell.median()))
}

/// Three digits below a thousand, whole above, with commas.
pub fn number(value: f64) -> String {
    if value < 1_000.0 {
        let decimals = if value.fract() == 0.0 {
            0
        } else if value < 1.0 {
            3
        } else if value < 10.0 {
            2
        } else {
            usize::from(value < 100.0)
        };
        return format!("{value:.decimals$}");
    }
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::groups::{Figure, Of};

    #[test]
    fn numbers_have_three_digits() {
        for (value, want) in [
            (0.0, "0"),
            (64.0, "64"),
            (0.1234, "0.123"),
            (1.234, "1.23"),
            (12.34, "12.3"),
            (123.4, "123"),
            (999.6, "1000"),
            (1_234.5, "1,234"),
            (1_234_567.0, "1,234,567"),
        ] {
            assert_eq!(number(value), want, "{value}");
        }
    }

    fn row(of: Of, aim: Option<Aim>, samples: [&[f64]; 2]) -> Row {
        let cell = |server, samples: &[f64]| Cell { server, samples: samples.to_vec() };
        let figure = Figure { unit: "puts/s", of, aim };
        let cells = vec![cell(Kind::Etcd, samples[0]), cell(Kind::Sqlite, samples[1])];
        Row { load: "put".to_owned(), unit: "puts/s", figure, cells }
    }

    #[test]
    fn cells_tell_times_etcd_and_doubt() {
        let row = row(Of::PerSec("put"), Some(Aim::Times(2.0, 1.0)), [&[10.0], &[10.0, 25.0, 30.0]]);
        assert_eq!(cell_text(&row, &row.cells[0]), "10");
        assert_eq!(cell_text(&row, &row.cells[1]), "~25 ± 40 %, **2.50x**");
        assert_eq!(
            (aim(&row, Kind::Sqlite), outcome(&row, Kind::Sqlite)),
            ("2x etcd".to_owned(), "**2.50x**".to_owned())
        );
        assert_eq!(outcome(&row, Kind::Postgres), "not measured");
    }

    #[test]
    fn what_stands_around_the_figures_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page.md");
        fs::write(&path, format!("before\n{BEGIN}old\n{END}after\n")).unwrap();
        let page = Page::open(&path).unwrap();
        assert_eq!((page.before.as_str(), page.after.as_str()), ("before\n", "after\n"));
        fs::write(&path, "no place").unwrap();
        let refused = Page::open(&path).map(|_| ()).unwrap_err().to_string();
        assert!(refused.contains("it has no place for figures"), "{refused}");
    }
}
