//! The plots, as SVG.

use std::path::Path;

use plotters::{coord::CoordTranslate, prelude::*};

use super::{
    Error,
    figures::{Figures, Row, Table},
    groups::Of,
    page,
    server::Kind,
};

pub const SIZE: (u32, u32) = (760, 380);
/// Room for half of the last label of an axis.
pub const RIGHT_MARGIN: u32 = 40;

/// What etcd and the two Orlops are drawn in: told apart by those who see no red and green, on white and on dark pages.
pub fn color(server: Kind) -> RGBColor {
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
        .margin_right(RIGHT_MARGIN)
        .x_label_area_size(32)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..rows.len().saturating_sub(1).max(1) as f64, 0.0..most * 1.1)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .y_label_formatter(&|figure| page::number(*figure))
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
    legend(&mut chart, SeriesLabelPosition::UpperLeft)?;
    root.present().map_err(failed)
}

/// Two bars a load, which begin at etcd. Some are twice as much and some fifty times, so the axis is logarithmic.
fn times_etcd(rows: &[&Row], file: &Path) -> Result<(), Error> {
    let orlops = [Kind::Sqlite, Kind::Postgres];
    let times = |row: &Row| orlops.map(|server| row.times_etcd(server).unwrap_or(1.0));
    let least = rows.iter().flat_map(|row| times(row)).fold(0.8, f64::min);
    let most = rows.iter().flat_map(|row| times(row)).fold(1.0, f64::max);
    // From the top down, on an axis that goes up.
    let names: Vec<&str> = rows.iter().rev().map(|row| row.load.as_str()).collect();
    let root = SVGBackend::new(file, (SIZE.0, 90 + 34 * rows.len() as u32)).into_drawing_area();
    root.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("Times as much as etcd", ("sans-serif", 18))
        .margin(12)
        .margin_right(RIGHT_MARGIN)
        .x_label_area_size(24)
        .y_label_area_size(290)
        .build_cartesian_2d((least * 0.9..most * 1.1).log_scale(), -0.5..rows.len() as f64 - 0.5)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(TRANSPARENT)
        .y_labels(rows.len() + 1)
        .y_label_formatter(&|at| name_at(&names, *at))
        .x_label_formatter(&|times| if is_round(*times) { page::number(*times) } else { String::new() })
        .draw()
        .map_err(failed)?;
    for (number, server) in orlops.into_iter().enumerate() {
        let bar = |(row, at): (&&Row, u32)| {
            let top = f64::from(at) + 0.36 - 0.37 * number as f64;
            Some(Rectangle::new([(1.0, top - 0.34), (row.times_etcd(server)?, top)], color(server).filled()))
        };
        let bars: Vec<_> = rows.iter().rev().zip(0_u32..).filter_map(bar).collect();
        let key = chart.draw_series(bars).map_err(failed)?;
        let fill = color(server).filled();
        key.label(server.name()).legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 18, y + 4)], fill));
    }
    let etcd = [(1.0, -0.5), (1.0, rows.len() as f64 - 0.5)];
    chart.draw_series(LineSeries::new(etcd, BLACK.stroke_width(1))).map_err(failed)?;
    legend(&mut chart, SeriesLabelPosition::UpperRight)?;
    root.present().map_err(failed)
}

/// Whether it is 1, 2 or 5 times a power of ten: more labels do not fit on a logarithmic axis.
fn is_round(number: f64) -> bool {
    let leading = number / 10_f64.powf(number.log10().floor());
    [1.0, 2.0, 5.0].iter().any(|round| (leading - round).abs() < 1e-9)
}

fn name_at(names: &[&str], at: f64) -> String {
    let found = names.iter().zip(0_u32..).find(|(_, number)| f64::from(*number) == at);
    found.map_or_else(String::new, |(name, _)| (*name).to_owned())
}

pub fn legend<'a, C: CoordTranslate>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, C>,
    at: SeriesLabelPosition,
) -> Result<(), Error> {
    let style = chart.configure_series_labels().position(at).border_style(BLACK).background_style(WHITE).draw();
    style.map_err(failed)
}

pub fn failed(error: impl std::error::Error) -> Error {
    Error::Io(std::io::Error::other(error.to_string()))
}
