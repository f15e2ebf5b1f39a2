//! The plots of a soak test: time on the x-axis, one line per server.

use std::path::Path;

use plotters::prelude::*;

use super::{
    metrics::{METRICS, Metric, Sample},
    report::{ServerResult, SoakReport},
    verdict::by_period,
};
use crate::{
    compare::{
        plot::{RIGHT_MARGIN, SIZE, color, draw_legend, plot_error},
        server_kind::ServerKind,
    },
    error::Error,
    output,
};

/// File, title, unit and metrics of each plot. The first metric has a thick line, the second a thin one.
const PLOTS: [(&str, &str, &str, &[&str]); 4] = [
    ("soak-memory.svg", "Resident memory", "MiB", &["memory"]),
    ("soak-size.svg", "Database size; thin line: without free pages", "MiB", &["size", "size in use"]),
    ("soak-descriptors.svg", "Open file descriptors", "", &["descriptors"]),
    ("soak-latency.svg", "p99 of write latency; thin line: median", "ms", &["write p99", "write p50"]),
];

pub fn draw(report: &SoakReport, folder: &Path) -> Result<(), Error> {
    for (file, title, unit, names) in PLOTS {
        let metrics: Vec<&Metric> = names.iter().filter_map(|name| named(name)).collect();
        draw_one(report, &folder.join(file), title, unit, &metrics)?;
    }
    Ok(())
}

fn named(name: &str) -> Option<&'static Metric> {
    METRICS.iter().find(|metric| metric.name == name)
}

fn draw_one(report: &SoakReport, file: &Path, title: &str, unit: &str, metrics: &[&Metric]) -> Result<(), Error> {
    let lines: Vec<_> = report
        .servers
        .iter()
        .flat_map(|result| {
            metrics.iter().enumerate().map(move |(at, metric)| (result, at, line(report, result, metric)))
        })
        .collect();
    let max = lines.iter().flat_map(|(_, _, line)| line).map(|(_, value)| *value).fold(0.0, f64::max);
    let minutes = lines.iter().flat_map(|(_, _, line)| line).map(|(at, _)| *at).fold(0.0, f64::max);
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(plot_error)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .margin_right(RIGHT_MARGIN)
        .x_label_area_size(40)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..minutes.max(f64::MIN_POSITIVE), 0.0..(max * 1.25).max(f64::MIN_POSITIVE))
        .map_err(plot_error)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .y_label_formatter(&|value| output::number(*value))
        .x_label_formatter(&|minutes| output::number(*minutes))
        .x_desc("minutes")
        .y_desc(unit)
        .draw()
        .map_err(plot_error)?;
    for (result, at, line) in lines {
        let style = color(kind(result)).stroke_width(if at == 0 { 2 } else { 1 });
        let drawn = chart.draw_series(LineSeries::new(line, style)).map_err(plot_error)?;
        if at == 0 {
            drawn.label(result.server).legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        }
    }
    draw_legend(&mut chart, SeriesLabelPosition::UpperRight)?;
    root.present().map_err(plot_error)
}

/// Returns the points of a line, with the time in minutes. Latency has one point per period: a single sample has too
/// few operations for a p99.
fn line(report: &SoakReport, result: &ServerResult, metric: &Metric) -> Vec<(f64, f64)> {
    let points = if metric.unit == "ms" {
        by_period(metric, &result.samples, report.compact_interval_secs)
    } else {
        let value = |name| move |sample: &Sample| Some((sample.secs, *sample.values.get(name)?));
        result.samples.iter().filter_map(value(metric.name)).collect()
    };
    points.into_iter().map(|(secs, value)| (secs / 60.0, value)).collect()
}

/// Returns the server kind, for the color. A server that the test has not started has the
/// color of etcd.
fn kind(result: &ServerResult) -> ServerKind {
    [ServerKind::Sqlite, ServerKind::Postgres]
        .into_iter()
        .find(|kind| kind.name() == result.server)
        .unwrap_or(ServerKind::Etcd)
}
