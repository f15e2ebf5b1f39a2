//! The plots: time to the right, a line a server.

use std::path::Path;

use plotters::prelude::*;

use super::{
    gauges::{FIGURES, Figure},
    report::{Lived, Outcome},
    verdict::by_period,
};
use crate::{
    Error,
    compare::{
        page,
        plot::{RIGHT_MARGIN, SIZE, color, failed, legend},
        server::Kind,
    },
};

/// File, title, unit, and the figures: the first with a thick line, the second with a thin one.
const PLOTS: [(&str, &str, &str, &[&str]); 4] = [
    ("soak-memory.svg", "Memory of the server", "MiB", &["memory"]),
    ("soak-size.svg", "Size of the database, and thin: less its free pages", "MiB", &["size", "size in use"]),
    ("soak-descriptors.svg", "Descriptors", "", &["descriptors"]),
    ("soak-latency.svg", "Writes: the slowest of a hundred, and thin: the median", "ms", &["write p99", "write p50"]),
];

pub fn draw(outcome: &Outcome, folder: &Path) -> Result<(), Error> {
    for (file, title, unit, names) in PLOTS {
        let figures: Vec<&Figure> = names.iter().filter_map(|name| named(name)).collect();
        draw_one(outcome, &folder.join(file), title, unit, &figures)?;
    }
    Ok(())
}

fn named(name: &str) -> Option<&'static Figure> {
    FIGURES.iter().find(|figure| figure.name == name)
}

fn draw_one(outcome: &Outcome, file: &Path, title: &str, unit: &str, figures: &[&Figure]) -> Result<(), Error> {
    let lines: Vec<_> = outcome
        .servers
        .iter()
        .flat_map(|lived| figures.iter().enumerate().map(move |(at, figure)| (lived, at, line(outcome, lived, figure))))
        .collect();
    let most = lines.iter().flat_map(|(_, _, line)| line).map(|(_, value)| *value).fold(0.0, f64::max);
    let minutes = lines.iter().flat_map(|(_, _, line)| line).map(|(at, _)| *at).fold(0.0, f64::max);
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .margin_right(RIGHT_MARGIN)
        .x_label_area_size(40)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..minutes.max(f64::MIN_POSITIVE), 0.0..(most * 1.25).max(f64::MIN_POSITIVE))
        .map_err(failed)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .y_label_formatter(&|figure| page::number(*figure))
        .x_label_formatter(&|minutes| page::number(*minutes))
        .x_desc("minutes")
        .y_desc(unit)
        .draw()
        .map_err(failed)?;
    for (lived, at, line) in lines {
        let style = color(kind(lived)).stroke_width(if at == 0 { 2 } else { 1 });
        let drawn = chart.draw_series(LineSeries::new(line, style)).map_err(failed)?;
        if at == 0 {
            drawn.label(lived.server).legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        }
    }
    legend(&mut chart, SeriesLabelPosition::UpperRight)?;
    root.present().map_err(failed)
}

/// In minutes. Latency a period at a time, as a single look has too few operations for its slowest of a hundred.
fn line(outcome: &Outcome, lived: &Lived, figure: &Figure) -> Vec<(f64, f64)> {
    let points = if figure.unit == "ms" {
        by_period(figure, &lived.samples, outcome.compact_every_secs)
    } else {
        let value = |name| move |sample: &super::Sample| Some((sample.secs, *sample.values.get(name)?));
        lived.samples.iter().filter_map(value(figure.name)).collect()
    };
    points.into_iter().map(|(secs, value)| (secs / 60.0, value)).collect()
}

/// A server that was there before is drawn as etcd is elsewhere: which one it is nobody knows.
fn kind(lived: &Lived) -> Kind {
    [Kind::Sqlite, Kind::Postgres].into_iter().find(|kind| kind.name() == lived.server).unwrap_or(Kind::Etcd)
}
