//! The plots of a comparison, as SVG.

use std::path::Path;

use plotters::{coord::CoordTranslate, prelude::*};

use super::{
    groups::Source,
    results::{Results, Row, Table},
    server_kind::ServerKind,
};
use crate::{error::Error, output};

/// Width and height in pixels.
pub const SIZE: (u32, u32) = (760, 380);
/// Margin in pixels for half of the last label of the x-axis.
pub const RIGHT_MARGIN: u32 = 40;

/// Returns the color of the server. The colors are distinguishable with red-green color blindness, on light and dark
/// pages.
pub fn color(server: ServerKind) -> RGBColor {
    match server {
        ServerKind::Etcd => RGBColor(136, 136, 136),
        ServerKind::Sqlite => RGBColor(0, 114, 178),
        ServerKind::Postgres => RGBColor(213, 94, 0),
    }
}

/// Draws the plots for which there are results; returns their file names and titles.
pub fn draw(results: &Results, folder: &Path) -> Result<Vec<(&'static str, &'static str)>, Error> {
    let table = |name: &str| results.tables.iter().find(|table| table.name == name);
    let mut drawn = Vec::new();
    let mut draw_lines = |name: &str, source: Source, file, title, unit| {
        let Some(table) = table(name) else { return Ok(()) };
        drawn.push((file, title));
        draw_by_clients(table, source, &folder.join(file), title, unit)
    };
    draw_lines("put-256b", Source::PerSec("put"), "puts.svg", "Puts of 256 B", "puts/s")?;
    draw_lines("put-256b", Source::P99("put"), "puts-p99.svg", "p99 of puts of 256 B", "ms")?;
    draw_lines("create-256b", Source::PerSec("create-txn"), "creates.svg", "Creates of 256 B", "creates/s")?;
    let rows_with_target: Vec<&Row> = results
        .tables
        .iter()
        .filter(|table| table.instances == 1)
        .flat_map(|table| &table.rows)
        .filter(|row| row.metric.target.is_some() && row.metric.source.is_higher_better() && row.cells.len() > 1)
        .collect();
    if rows_with_target
        .iter()
        .any(|row| row.ratio_to_etcd(ServerKind::Sqlite).or(row.ratio_to_etcd(ServerKind::Postgres)).is_some())
    {
        drawn.push(("times-etcd.svg", "Throughput relative to etcd"));
        draw_ratios(&rows_with_target, &folder.join("times-etcd.svg"))?;
    }
    Ok(drawn)
}

/// Draws one line per server: the metric by the number of clients.
fn draw_by_clients(table: &Table, source: Source, file: &Path, title: &str, unit: &str) -> Result<(), Error> {
    let rows: Vec<&Row> = table.rows.iter().filter(|row| row.metric.source == source).collect();
    let max = rows.iter().flat_map(|row| &row.cells).map(|cell| cell.median()).fold(0.0, f64::max);
    let clients: Vec<&str> = rows.iter().map(|row| row.load.split(", ").nth(1).unwrap_or_default()).collect();
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(plot_error)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .margin_right(RIGHT_MARGIN)
        .x_label_area_size(32)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..rows.len().saturating_sub(1).max(1) as f64, 0.0..max * 1.1)
        .map_err(plot_error)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .y_label_formatter(&|value| output::number(*value))
        .x_labels(rows.len())
        .x_label_formatter(&|at| name_at(&clients, at.round()))
        .y_desc(unit)
        .draw()
        .map_err(plot_error)?;
    for server in table.servers() {
        let points: Vec<_> =
            rows.iter().enumerate().filter_map(|(at, row)| Some((at as f64, row.cell(server)?.median()))).collect();
        let style = color(server).stroke_width(2);
        chart.draw_series(LineSeries::new(points.clone(), style)).map_err(plot_error)?;
        let dots = points.into_iter().map(|point| Circle::new(point, 3, color(server).filled()));
        let series = chart.draw_series(dots).map_err(plot_error)?;
        series.label(server.name()).legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    draw_legend(&mut chart, SeriesLabelPosition::UpperLeft)?;
    root.present().map_err(plot_error)
}

/// Draws two bars per load, starting at etcd's 1. The axis is logarithmic, because the ratios range from 1 to 50.
fn draw_ratios(rows: &[&Row], file: &Path) -> Result<(), Error> {
    let servers = [ServerKind::Sqlite, ServerKind::Postgres];
    let ratios = |row: &Row| servers.map(|server| row.ratio_to_etcd(server).unwrap_or(1.0));
    let min = rows.iter().flat_map(|row| ratios(row)).fold(0.8, f64::min);
    let max = rows.iter().flat_map(|row| ratios(row)).fold(1.0, f64::max);
    // Reversed, because the y-axis points up.
    let names: Vec<&str> = rows.iter().rev().map(|row| row.load.as_str()).collect();
    let root = SVGBackend::new(file, (SIZE.0, 90 + 34 * rows.len() as u32)).into_drawing_area();
    root.fill(&WHITE).map_err(plot_error)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("Throughput relative to etcd", ("sans-serif", 18))
        .margin(12)
        .margin_right(RIGHT_MARGIN)
        .x_label_area_size(24)
        .y_label_area_size(290)
        .build_cartesian_2d((min * 0.9..max * 1.1).log_scale(), -0.5..rows.len() as f64 - 0.5)
        .map_err(plot_error)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(TRANSPARENT)
        .y_labels(rows.len() + 1)
        .y_label_formatter(&|at| name_at(&names, *at))
        .x_label_formatter(&|ratio| if is_round(*ratio) { output::number(*ratio) } else { String::new() })
        .draw()
        .map_err(plot_error)?;
    for (number, server) in servers.into_iter().enumerate() {
        let bar = |(row, at): (&&Row, u32)| {
            let top = f64::from(at) + 0.36 - 0.37 * number as f64;
            Some(Rectangle::new([(1.0, top - 0.34), (row.ratio_to_etcd(server)?, top)], color(server).filled()))
        };
        let bars: Vec<_> = rows.iter().rev().zip(0_u32..).filter_map(bar).collect();
        let series = chart.draw_series(bars).map_err(plot_error)?;
        let fill = color(server).filled();
        series.label(server.name()).legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 18, y + 4)], fill));
    }
    let etcd = [(1.0, -0.5), (1.0, rows.len() as f64 - 0.5)];
    chart.draw_series(LineSeries::new(etcd, BLACK.stroke_width(1))).map_err(plot_error)?;
    draw_legend(&mut chart, SeriesLabelPosition::UpperRight)?;
    root.present().map_err(plot_error)
}

/// Returns whether the number is 1, 2 or 5 times a power of ten. More labels do not fit on a logarithmic axis.
fn is_round(number: f64) -> bool {
    let leading = number / 10_f64.powf(number.log10().floor());
    [1.0, 2.0, 5.0].iter().any(|round| (leading - round).abs() < 1e-9)
}

fn name_at(names: &[&str], at: f64) -> String {
    let found = names.iter().zip(0_u32..).find(|(_, number)| f64::from(*number) == at);
    found.map_or_else(String::new, |(name, _)| (*name).to_owned())
}

pub fn draw_legend<'a, C: CoordTranslate>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, C>,
    at: SeriesLabelPosition,
) -> Result<(), Error> {
    let style = chart.configure_series_labels().position(at).border_style(BLACK).background_style(WHITE).draw();
    style.map_err(plot_error)
}

pub fn plot_error(error: impl std::error::Error) -> Error {
    Error::Io(std::io::Error::other(error.to_string()))
}
