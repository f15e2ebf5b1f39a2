//! The plots, as SVG.

use std::path::Path;

use plotters::{coord::types::RangedCoordf64, prelude::*};

use super::{
    Error,
    figures::{Figures, Row, Table},
    groups::Of,
    server::Kind,
};

const SIZE: (u32, u32) = (760, 380);

/// What etcd and the two Orlops are drawn in: told apart by those who see no red and green, on white and on dark pages.
fn color(server: Kind) -> RGBColor {
    match server {
        Kind::Etcd => RGBColor(136, 136, 136),
        Kind::Sqlite => RGBColor(0, 114, 178),
        Kind::Postgres => RGBColor(213, 94, 0),
    }
}

/// Writes what can be drawn of the figures; returns file names and titles.
pub fn draw(figures: &Figures, folder: &Path) -> Result<Vec<(&'static str, &'static str)>, Error> {
    let table = |name: &str| figures.tables.iter().find(|table| table.name == name);
    let mut drawn = Vec::new();
    let mut lines = |name: &str, of: Of, file, title, unit| {
        let Some(table) = table(name) else { return Ok(()) };
        drawn.push((file, title));
        by_clients(table, of, &folder.join(file), title, unit)
    };
    lines("put-256b", Of::PerSec("put"), "puts.svg", "Puts of 256 B", "puts/s")?;
    lines("put-256b", Of::P99("put"), "puts-p99.svg", "Puts of 256 B: the slowest of a hundred", "ms")?;
    lines("create-256b", Of::PerSec("create-txn"), "creates.svg", "Creates of 256 B", "creates/s")?;
    let rated: Vec<&Row> = figures
        .tables
        .iter()
        .flat_map(|table| &table.rows)
        .filter(|row| row.figure.aim.is_some() && row.figure.of.is_better_when_more() && row.cells.len() > 1)
        .collect();
    if rated.iter().any(|row| row.times_etcd(Kind::Sqlite).or(row.times_etcd(Kind::Postgres)).is_some()) {
        drawn.push(("times-etcd.svg", "Times as much as etcd"));
        times_etcd(&rated, &folder.join("times-etcd.svg"))?;
    }
    Ok(drawn)
}

/// A line a server: the figure at each number of clients.
fn by_clients(table: &Table, of: Of, file: &Path, title: &str, unit: &str) -> Result<(), Error> {
    let rows: Vec<&Row> = table.rows.iter().filter(|row| row.figure.of == of).collect();
    let most = rows.iter().flat_map(|row| &row.cells).map(|cell| cell.median()).fold(0.0, f64::max);
    let clients: Vec<&str> = rows.iter().map(|row| row.load.split(", ").nth(1).unwrap_or_default()).collect();
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(32)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..rows.len().saturating_sub(1).max(1) as f64, 0.0..most * 1.1)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(rows.len())
        .x_label_formatter(&|at| name_at(&clients, at.round()))
        .y_desc(unit)
        .draw()
        .map_err(failed)?;
    for (number, server) in table.servers().into_iter().enumerate() {
        let points: Vec<_> =
            rows.iter().enumerate().filter_map(|(at, row)| Some((at as f64, row.cell(server)?.median()))).collect();
        let style = color(server).stroke_width(2);
        chart.draw_series(LineSeries::new(points.clone(), style)).map_err(failed)?;
        let dots = points.into_iter().map(|point| Circle::new(point, 3, color(server).filled()));
        let key = chart.draw_series(dots).map_err(failed)?;
        debug_assert!(number < 3, "each server has a colour");
        key.label(server.name()).legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    legend(&mut chart)?;
    root.present().map_err(failed)
}

/// Two bars a load, and a line at etcd.
fn times_etcd(rows: &[&Row], file: &Path) -> Result<(), Error> {
    let orlops = [Kind::Sqlite, Kind::Postgres];
    let most =
        rows.iter().flat_map(|row| orlops.map(|server| row.times_etcd(server).unwrap_or(0.0))).fold(1.0, f64::max);
    let mut names: Vec<&str> = rows.iter().map(|row| row.load.as_str()).collect();
    let height = 90 + 34 * rows.len() as u32;
    let root = SVGBackend::new(file, (SIZE.0, height)).into_drawing_area();
    root.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("Times as much as etcd", ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(24)
        .y_label_area_size(270)
        .build_cartesian_2d(0.0..most * 1.05, 0.0..rows.len() as f64)
        .map_err(failed)?;
    // From the top down, on an axis that goes up.
    names.reverse();
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(rows.len())
        .y_label_formatter(&|at| name_at(&names, at.floor()))
        .draw()
        .map_err(failed)?;
    for (number, server) in orlops.into_iter().enumerate() {
        let bar = |(at, row): (usize, &&Row)| {
            let top = (rows.len() - at) as f64 - 0.15 - 0.35 * number as f64;
            let times = row.times_etcd(server)?;
            Some(Rectangle::new([(0.0, top - 0.33), (times, top)], color(server).filled()))
        };
        let bars: Vec<_> = rows.iter().enumerate().filter_map(bar).collect();
        let key = chart.draw_series(bars).map_err(failed)?;
        let fill = color(server).filled();
        key.label(server.name()).legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 18, y + 4)], fill));
    }
    let etcd = [(1.0, 0.0), (1.0, rows.len() as f64)];
    chart.draw_series(LineSeries::new(etcd, BLACK.stroke_width(1))).map_err(failed)?;
    legend(&mut chart)?;
    root.present().map_err(failed)
}

fn name_at(names: &[&str], at: f64) -> String {
    let found = names.iter().zip(0_u32..).find(|(_, number)| f64::from(*number) == at);
    found.map_or_else(String::new, |(name, _)| (*name).to_owned())
}

type Plane = Cartesian2d<RangedCoordf64, RangedCoordf64>;

fn legend<'a>(chart: &mut ChartContext<'a, SVGBackend<'a>, Plane>) -> Result<(), Error> {
    let labels = chart.configure_series_labels().position(SeriesLabelPosition::LowerRight).border_style(BLACK).draw();
    labels.map_err(failed)
}

fn failed(error: impl std::error::Error) -> Error {
    Error::Io(std::io::Error::other(error.to_string()))
}
