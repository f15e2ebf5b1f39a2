//! A line of numbers over time, as SVG.

use maud::{Markup, html};

const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 90.0;
/// Number of points from the left to the right side.
const POINTS: usize = 120;

/// Returns a chart of at most [`POINTS`] numbers; the newest is at the right side. `name` and `maximum` describe it.
pub(super) fn line(name: &str, numbers: &[f64], maximum: &str) -> Markup {
    let highest = numbers.iter().copied().fold(0.0, f64::max);
    let step = WIDTH / (POINTS - 1) as f64;
    let first = POINTS.saturating_sub(numbers.len());
    let height =
        |number: f64| if highest > 0.0 { HEIGHT - 2.0 - number / highest * (HEIGHT - 6.0) } else { HEIGHT - 2.0 };
    let points = numbers.iter().enumerate().map(|(at, number)| ((first + at) as f64 * step, height(*number)));
    let line: Vec<String> = points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let base = |x: f64| format!("{x:.1},{HEIGHT:.1}");
    let area = format!("{} {} {}", base(first as f64 * step), line.join(" "), base(WIDTH));
    html! {
        figure.chart {
            figcaption { (name) " " span.muted { "highest " (maximum) } }
            svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) preserveAspectRatio="none" role="img"
                aria-label=(format!("{name}, highest {maximum}")) {
                @if !numbers.is_empty() {
                    polygon.area points=(area) {}
                    polyline.line points=(line.join(" ")) {}
                }
            }
        }
    }
}
