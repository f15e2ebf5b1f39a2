//! Load and state of the server, refreshed while the page is visible.

use axum::response::Response;
use maud::{Markup, html};
use orlop_objects::escaped;

use super::{Tab, Visit, names, table};
use crate::{
    console::{backend::Failure, chart, figures::Shown},
    insight::{Figures, Leases, Members, Operation, ServerState, SlowRequest, SlowRequests, WatchedRange, Watchers},
    text::{bytes, micros, rate, secs, time_of_day},
};

/// Number of rows of each table.
const ROWS_MAX: usize = 20;
const SLOW_MAX: usize = 12;
/// Width of the bar of a slow request's parts.
const BAR_WIDTH: f64 = 160.0;

pub(in crate::console) async fn page(visit: Visit) -> Response {
    let content = content(&visit).await.map(|content| {
        html! {
            div.head {
                h1 { "Overview" }
                button type="button" data-pause { "Pause" }
                p.hidden role="status" data-status {}
            }
            div data-live="/overview/live" { (content) }
        }
    });
    visit.page(Tab::Overview, "Overview", content)
}

pub(in crate::console) async fn live(visit: Visit) -> Response {
    let content = content(&visit).await;
    visit.fragment(content)
}

async fn content(visit: &Visit) -> Result<Markup, Failure> {
    let Shown { figures, points } = visit.visitor.live.figures(&visit.visitor.client).await?;
    let rates: Vec<f64> = points.iter().map(|point| point.operations_per_sec).collect();
    let slowest: Vec<f64> = points.iter().map(|point| point.p99_secs.unwrap_or_default()).collect();
    let highest = |numbers: &[f64]| numbers.iter().copied().fold(0.0, f64::max);
    let now = &figures.now;
    Ok(html! {
        @for alarm in &now.server.alarms { p.failure { strong { "Alarm: " } (escaped(alarm)) } }
        (tiles(&figures))
        div.charts {
            (chart::line("Requests per second", &rates, &rate(highest(&rates))))
            (chart::line("p99 of the slowest kind of request", &slowest, &secs(highest(&slowest))))
        }
        div.columns {
            (section(&figures, "Requests", "operations", figures.operations.as_deref(), operations))
            (section(&figures, "Slow requests of the last hour", "slowRequests", now.slow_requests.as_ref(), slow_requests))
            (section(&figures, "Watchers", "watchers", now.watchers.as_ref(), watchers))
            (section(&figures, "Leases that expire next", "leases", now.leases.as_ref(), leases))
            (section(&figures, "Members", "members", now.members.as_ref(), members))
        }
    })
}

/// Returns a part, or why it is missing.
fn section<T: ?Sized>(
    figures: &Figures,
    title: &str,
    name: &'static str,
    part: Option<&T>,
    render: fn(&T) -> Markup,
) -> Markup {
    html! {
        section {
            h2 { (title) }
            @match part {
                Some(part) => (render(part)),
                None => p.muted {
                    @match figures.now.missing.get(name) {
                        Some(reason) => { "Unknown: " (escaped(reason)) }
                        None => "Being measured.",
                    }
                }
            }
        }
    }
}

fn tiles(figures: &Figures) -> Markup {
    let server = &figures.now.server;
    let number = |number: Option<i64>| number.map_or_else(|| "unknown".to_owned(), |number| number.to_string());
    let compacted = match server.compact_revision {
        None => "unknown".to_owned(),
        Some(-1) => "never".to_owned(),
        Some(revision) => revision.to_string(),
    };
    let version = server.orlop_version.as_ref().map_or_else(
        || server.unnamed_version(),
        |version| format!("Orlop {}", version.split(' ').next().unwrap_or_default()),
    );
    html! {
        dl.tiles {
            div {
                dt { "Requests" }
                @match figures.rates {
                    Some(rates) => {
                        dd { (rate(rates.operations_per_sec)) small { "/s" } }
                        dd.muted { (rate(rates.failures_per_sec)) " failed/s" }
                    }
                    None => dd.muted { "being measured" }
                }
            }
            div {
                dt { "Revision" }
                dd { (server.revision) }
                dd.muted { "compacted: " (compacted) }
            }
            div {
                dt { "Keys" }
                dd { (number(server.keys)) }
                dd.muted { (number(server.leases)) " leases" }
            }
            (size(server))
            div {
                dt { "Watchers" }
                dd { (number(server.watchers)) }
                dd.muted { (number(server.slow_watchers)) " slow, " (number(server.watch_streams)) " streams" }
            }
            div {
                dt { "Server" }
                dd.text { (escaped(&version)) }
                dd.muted {
                    @if let Some(database) = &server.database { (escaped(database)) } @else { "etcd" }
                    @if let Some(cores) = figures.rates.and_then(|rates| rates.cpu_cores) {
                        (format!(", {:.1} % of a core", cores * 100.0))
                    }
                    @if let Some(resident) = figures.rates.and_then(|rates| rates.resident_bytes) {
                        ", " (bytes(resident as i64))
                    }
                }
            }
        }
    }
}

fn size(server: &ServerState) -> Markup {
    let quota = server.db_size_quota.filter(|quota| *quota > 0);
    let kept = server.history_bytes.filter(|kept| *kept > 0);
    html! {
        div {
            dt { "Database" }
            dd { (bytes(server.db_size)) }
            dd.muted {
                (bytes(server.db_size_in_use)) " in use"
                @match quota {
                    Some(quota) => {
                        (format!(", {:.1} % of ", server.db_size_in_use as f64 * 100.0 / quota as f64))
                        (bytes(quota))
                        meter min="0" max=(quota) high=(quota / 10 * 8) value=(server.db_size_in_use) aria-label="Quota in use" {}
                    }
                    None => ", no quota",
                }
            }
            @if let Some(kept) = kept { dd.muted { (bytes(kept)) " of kept history" } }
        }
    }
}

fn operations(operations: &[Operation]) -> Markup {
    let time = |secs_measured: Option<f64>| secs_measured.map_or_else(|| "-".to_owned(), secs);
    if operations.is_empty() {
        return html! { p.muted { "No requests." } };
    }
    let rows = html! {
        @for operation in operations.iter().take(ROWS_MAX) {
            tr {
                td { (escaped(&operation.method)) }
                td.number { (rate(operation.per_sec)) }
                td.number { (rate(operation.failures_per_sec)) }
                td.number { (time(operation.p50_secs)) }
                td.number { (time(operation.p99_secs)) }
            }
        }
    };
    table("Requests", &["Method", "Per second", "Failed/s", "p50", "p99"], rows)
}

fn members(members: &Members) -> Markup {
    let rows = html! {
        @for member in &members.members {
            tr {
                td { (escaped(&member.name)) @if member.responds { " " span.muted { "(this one)" } } }
                td.number { (member.id) }
                td { @if member.leads_expiry { span.badge.created { "leads" } } }
                td.wide { (escaped(&member.client_urls.join(", "))) }
            }
        }
    };
    table("Members", &["Name", "ID", "Expiry of leases", "Addresses"], rows)
}

fn watchers(watchers: &Watchers) -> Markup {
    let rows = html! { @for range in watchers.ranges.iter().take(ROWS_MAX) { (watched(range)) } };
    html! {
        p { (watchers.watchers_total) " watchers of " (watchers.ranges_total) " ranges; the slowest first."
            @if watchers.is_partial { " Not all were examined." } }
        @if !watchers.ranges.is_empty() {
            (table("Watchers", &["Range", "Watchers", "Catching up", "Queued", "Revisions behind"], rows))
        }
    }
}

fn watched(range: &WatchedRange) -> Markup {
    let is_slow = range.catching_up > 0 || range.revision_lag > 0;
    html! {
        tr class=[is_slow.then_some("slow")] {
            td.wide { (names::link("/keys?prefix=", &range.key.0, &html! { (escaped(&names::cut(&range.text))) })) }
            td.number { (range.watchers) }
            td.number { (range.catching_up) }
            td.number { (range.queued) }
            td.number { (range.revision_lag) }
        }
    }
}

fn leases(leases: &Leases) -> Markup {
    let rows = html! {
        @for lease in leases.leases.iter().take(ROWS_MAX) {
            tr {
                td.number { (lease.id) }
                td.number { (secs(lease.remaining_ms as f64 / 1e3)) }
                td.number { (lease.ttl_secs) " s" }
                td.number { (lease.keys) }
            }
        }
    };
    html! {
        p { (leases.total) " leases." }
        @if !leases.leases.is_empty() { (table("Leases", &["ID", "Expires in", "TTL", "Keys"], rows)) }
    }
}

fn slow_requests(slow: &SlowRequests) -> Markup {
    if slow.requests.is_empty() {
        return html! { p.muted { "None took longer than " (micros(slow.threshold_us)) "." } };
    }
    let longest = slow.requests.iter().take(SLOW_MAX).map(|request| request.took_us).max().unwrap_or(1);
    let rows = html! {
        @for request in slow.requests.iter().take(SLOW_MAX) {
            tr {
                td.number { (time_of_day(request.ended_unix_ms)) }
                td.wide {
                    (escaped(request.method.rsplit('.').next().unwrap_or_default())) " " span.muted { (escaped(&names::cut(&request.request))) }
                    @if !request.code.eq_ignore_ascii_case("ok") { " " span.badge.deleted { (escaped(&request.code)) } }
                }
                td.number { (micros(request.took_us)) }
                td { (parts(request, longest)) }
            }
        }
    };
    let more = slow.requests.len().saturating_sub(SLOW_MAX);
    let table = table("Slow requests", &["Time (UTC)", "Request", "Took", "Parts"], rows);
    html! { (table) @if more > 0 { p.muted { (more) " more are not shown." } } }
}

/// Returns the phases as a bar and as text.
fn parts(request: &SlowRequest, longest: u64) -> Markup {
    let scale = BAR_WIDTH / longest.max(1) as f64;
    let mut at = 0.0;
    html! {
        svg.parts viewBox=(format!("0 0 {BAR_WIDTH} 10")) width=(BAR_WIDTH) height="10" aria-hidden="true" {
            rect.rest x="0" y="0" height="10" width=(format!("{:.1}", request.took_us as f64 * scale)) {}
            @for (number, phase) in request.phases.iter().enumerate() {
                rect class=(format!("part{}", number % 4)) x=(format!("{at:.1}")) y="0" height="10"
                    width=(format!("{:.1}", phase.took_us as f64 * scale)) {}
                @let () = at += phase.took_us as f64 * scale;
            }
        }
        small {
            @for (number, phase) in request.phases.iter().enumerate() {
                @if number > 0 { ", " }
                (escaped(&phase.name)) " " (micros(phase.took_us))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tile_of_the_database_has_the_kept_history_if_there_is_one() {
        for (history_bytes, want) in [(None, None), (Some(0), None), (Some(3 << 19), Some("1.5 MiB of kept history"))] {
            let tile = size(&ServerState { history_bytes, ..ServerState::default() }).0;
            assert_eq!(tile.contains("history"), want.is_some(), "{tile}");
            assert!(want.is_none_or(|want| tile.contains(want)), "{tile}");
        }
    }
}
