//! The views: figures as tables.

use std::cmp::Reverse;

use super::table::{
    Column::{Fill, Number, Text},
    Table,
};
use crate::{
    insight::{Figures, Operation, PairSizes, Sized, Sizes, SlowRequest, WatchedRange},
    text::{bytes, micros, rate, secs, time_of_day},
};

/// A page of the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    Overview,
    Keys,
    Watchers,
    Leases,
    Slow,
    Members,
}

impl View {
    pub(super) const ALL: [Self; 6] =
        [Self::Overview, Self::Keys, Self::Watchers, Self::Leases, Self::Slow, Self::Members];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Overview => "Overview",
            Self::Keys => "Keys",
            Self::Watchers => "Watchers",
            Self::Leases => "Leases",
            Self::Slow => "Slow requests",
            Self::Members => "Members",
        }
    }

    /// Returns what the rows can be sorted by.
    pub(super) fn orders(self) -> &'static [&'static str] {
        match self {
            Self::Overview => &["rate", "p99", "name"],
            Self::Keys => &["bytes", "keys", "name"],
            Self::Watchers => &["lag", "watchers", "range"],
            Self::Leases => &["remaining", "keys", "ttl"],
            Self::Slow => &["newest", "slowest"],
            Self::Members => &["age"],
        }
    }
}

/// The order of the rows of each view, as a position in [`View::orders`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sorts([usize; View::ALL.len()]);

impl Sorts {
    pub(super) fn next(&mut self, view: View) {
        let order = &mut self.0[view as usize];
        *order = (*order + 1) % view.orders().len();
    }

    pub(super) fn name(&self, view: View) -> &'static str {
        view.orders()[self.0[view as usize]]
    }
}

/// Returns the first line: the endpoint, the server and the time.
pub(super) fn title(figures: &Figures) -> String {
    let server = &figures.now.server;
    let version = match &server.orlop_version {
        Some(version) => format!("Orlop {version}"),
        None => server.unnamed_version(),
    };
    let database = server.database.as_ref().map(|database| format!(", {database}")).unwrap_or_default();
    format!("{}  {version}{database}  {} UTC", figures.now.endpoint, time_of_day(figures.now.unix_ms))
}

/// Returns the tables of a view.
pub(super) fn tables(view: View, figures: &Figures, sorts: Sorts) -> Vec<Table> {
    let order = sorts.name(view);
    match view {
        View::Overview => vec![summary(figures), operations(figures, order)],
        View::Keys => keys(figures, order),
        View::Watchers => vec![watchers(figures, order)],
        View::Leases => vec![leases(figures, order)],
        View::Slow => vec![slow_requests(figures, order)],
        View::Members => vec![members(figures)],
    }
}

/// Returns why a part is missing.
fn missing(figures: &Figures, part: &str) -> Option<String> {
    Some(figures.now.missing.get(part).cloned().unwrap_or_else(|| "not reported".to_owned()))
}

fn known(number: Option<i64>) -> String {
    number.map_or("not reported".to_owned(), |number| number.to_string())
}

fn summary(figures: &Figures) -> Table {
    let server = &figures.now.server;
    let rows = [
        ("revision", revisions(figures)),
        ("size", server.size_text("not reported")),
        ("kept history", server.history_text("not reported")),
        ("requests", requests(figures)),
        ("watchers", watch_streams(figures)),
        ("leases", lease_count(figures)),
        ("members", member_count(figures)),
        ("slow requests", slow_count(figures)),
        ("alarms", if server.alarms.is_empty() { "none".to_owned() } else { server.alarms.join("; ") }),
    ];
    Table {
        title: "Summary".to_owned(),
        columns: &[Text(""), Fill("")],
        rows: rows.map(|(name, value)| vec![name.to_owned(), value]).into(),
        note: None,
    }
}

fn revisions(figures: &Figures) -> String {
    let server = &figures.now.server;
    let rate = figures.rates.map_or(String::new(), |rates| format!(" (+{}/s)", rate(rates.revisions_per_sec)));
    let compact = match server.compact_revision {
        Some(..0) => "none".to_owned(),
        revision => known(revision),
    };
    format!("{}{rate}, compact revision {compact}, keys {}", server.revision, known(server.keys))
}

fn requests(figures: &Figures) -> String {
    let Some(rates) = figures.rates else { return missing(figures, "operations").unwrap_or_default() };
    let cpu = rates.cpu_cores.map_or(String::new(), |cores| format!(", {:.1} % of a core", cores * 100.0));
    let memory = rates.resident_bytes.map_or(String::new(), |resident| format!(", {} memory", bytes(resident as i64)));
    format!("{}/s, {} failed/s{cpu}{memory}", rate(rates.operations_per_sec), rate(rates.failures_per_sec))
}

fn watch_streams(figures: &Figures) -> String {
    let server = &figures.now.server;
    let messages = figures.rates.and_then(|rates| rates.watch_messages_per_sec);
    let messages = messages.map_or(String::new(), |messages| format!(", {} messages/s", rate(messages)));
    match (server.watchers, server.watch_streams) {
        (Some(watchers), Some(streams)) => {
            format!("{watchers} on {streams} streams, {} slow{messages}", known(server.slow_watchers))
        }
        (watchers, _) => known(watchers),
    }
}

fn lease_count(figures: &Figures) -> String {
    let Some(leases) = &figures.now.leases else {
        let count = figures.now.server.leases;
        return count.map_or_else(|| missing(figures, "leases").unwrap_or_default(), |n| n.to_string());
    };
    let next = leases.leases.first().map(|lease| secs(lease.remaining_ms as f64 / 1e3));
    let next = next.map_or(String::new(), |next| format!(", the next expires in {next}"));
    format!("{}{next}", leases.total)
}

fn member_count(figures: &Figures) -> String {
    let Some(members) = &figures.now.members else { return missing(figures, "members").unwrap_or_default() };
    let leader = match members.members.iter().find(|member| member.leads_expiry) {
        Some(member) if member.responds => "this one leads".to_owned(),
        Some(member) => format!("{} leads", member.name),
        None => "no leader".to_owned(),
    };
    format!("{}, {leader}", members.members.len())
}

fn slow_count(figures: &Figures) -> String {
    let Some(slow) = &figures.now.slow_requests else { return missing(figures, "slowRequests").unwrap_or_default() };
    let slowest = slow.requests.iter().max_by_key(|request| request.took_us);
    let slowest = slowest.map_or(String::new(), |slowest| {
        format!(", the slowest {} took {}", short_method(&slowest.method), micros(slowest.took_us))
    });
    format!("{} in the last hour{slowest}", slow.requests.len())
}

fn short_method(method: &str) -> &str {
    method.rsplit_once('/').map_or(method, |(_, method)| method)
}

fn operations(figures: &Figures, order: &str) -> Table {
    let table = Table {
        title: "Operations".to_owned(),
        columns: &[Fill("METHOD"), Number("CALLS/S"), Number("FAILED/S"), Number("P50"), Number("P99")],
        ..Table::default()
    };
    let Some(operations) = &figures.operations else { return Table { note: missing(figures, "operations"), ..table } };
    let mut operations: Vec<&Operation> = operations.iter().collect();
    match order {
        "p99" => operations.sort_by(|a, b| {
            let p99 = |operation: &Operation| operation.p99_secs.unwrap_or_default();
            p99(b).total_cmp(&p99(a))
        }),
        "name" => operations.sort_by_key(|operation| operation.method.clone()),
        _ => {}
    }
    let quantile = |quantile: Option<f64>| quantile.map_or("-".to_owned(), secs);
    let row = |operation: &&Operation| {
        vec![
            operation.method.clone(),
            rate(operation.per_sec),
            rate(operation.failures_per_sec),
            quantile(operation.p50_secs),
            quantile(operation.p99_secs),
        ]
    };
    let note = operations.is_empty().then(|| "no requests".to_owned());
    Table { rows: operations.iter().map(row).collect(), note, ..table }
}

fn keys(figures: &Figures, order: &str) -> Vec<Table> {
    let table = Table {
        title: "Keys by prefix".to_owned(),
        columns: &[Fill("PREFIX OR KEY"), Number("KEYS"), Number("BYTES OF KEYS"), Number("OF VALUES"), Number("%")],
        ..Table::default()
    };
    let Some(sizes) = &figures.now.sizes else { return vec![Table { note: missing(figures, "sizes"), ..table }] };
    let mut children: Vec<&Sized> = sizes.children.iter().collect();
    match order {
        "keys" => children.sort_by_key(|child| Reverse(child.sizes.keys)),
        "name" => children.sort_by_key(|child| child.name.clone()),
        _ => {}
    }
    let child_row = |child: &Sized| sized_row(child.name.text(), child.sizes, sizes);
    let rest = (sizes.rest.keys > 0).then(|| sized_row("(elsewhere)".to_owned(), sizes.rest, sizes));
    let listed = Table {
        title: sizes_title(sizes),
        rows: children.iter().copied().map(child_row).chain(rest).collect(),
        note: children.is_empty().then(|| "no keys".to_owned()),
        ..table
    };
    let largest = Table {
        title: "Largest keys".to_owned(),
        rows: sizes.largest_keys.iter().map(child_row).collect(),
        note: sizes.largest_keys.is_empty().then(|| "not reported".to_owned()),
        ..table
    };
    vec![listed, largest]
}

fn sizes_title(sizes: &Sizes) -> String {
    let prefix = if sizes.prefix.0.is_empty() { "all keys".to_owned() } else { sizes.prefix.text() };
    let partial = if sizes.is_partial { "the first " } else { "" };
    let values = sizes.total.value_bytes.map_or("not reported".to_owned(), |total| bytes(total.cast_signed()));
    format!("Keys below {prefix}: {partial}{} keys, values {values}, {} s ago", sizes.total.keys, sizes.age_ms / 1000)
}

fn sized_row(name: String, part: PairSizes, sizes: &Sizes) -> Vec<String> {
    let all = sizes.all().amount();
    let percent = if all == 0 { 0.0 } else { part.amount() as f64 * 100.0 / all as f64 };
    vec![
        name,
        part.keys.to_string(),
        bytes(part.key_bytes.cast_signed()),
        part.value_bytes.map_or("-".to_owned(), |value| bytes(value.cast_signed())),
        format!("{percent:.1}"),
    ]
}

fn watchers(figures: &Figures, order: &str) -> Table {
    let table = Table {
        title: "Watchers by range".to_owned(),
        columns: &[Fill("RANGE"), Number("WATCHERS"), Number("CATCHING UP"), Number("QUEUED"), Number("LAG")],
        ..Table::default()
    };
    let Some(watchers) = &figures.now.watchers else { return Table { note: missing(figures, "watchers"), ..table } };
    let mut ranges: Vec<&WatchedRange> = watchers.ranges.iter().collect();
    match order {
        "watchers" => ranges.sort_by_key(|range| Reverse(range.watchers)),
        "range" => ranges.sort_by_key(|range| range.key.clone()),
        _ => {}
    }
    let row = |range: &&WatchedRange| {
        let numbers = [range.watchers, range.catching_up, range.queued].map(|number| number.to_string());
        [vec![range.text.clone()], numbers.into(), vec![range.revision_lag.to_string()]].concat()
    };
    let partial = if watchers.is_partial { ", not all examined" } else { "" };
    Table {
        title: format!("{} watchers of {} ranges{partial}", watchers.watchers_total, watchers.ranges_total),
        rows: ranges.iter().map(row).collect(),
        note: ranges.is_empty().then(|| "no watchers".to_owned()),
        ..table
    }
}

fn leases(figures: &Figures, order: &str) -> Table {
    let table = Table {
        title: "Leases".to_owned(),
        columns: &[Fill("LEASE"), Number("EXPIRES IN"), Number("TTL"), Number("KEYS")],
        ..Table::default()
    };
    let Some(leases) = &figures.now.leases else { return Table { note: missing(figures, "leases"), ..table } };
    let mut rows: Vec<_> = leases.leases.iter().collect();
    match order {
        "keys" => rows.sort_by_key(|lease| Reverse(lease.keys)),
        "ttl" => rows.sort_by_key(|lease| lease.ttl_secs),
        _ => {}
    }
    Table {
        title: format!("Leases that expire next, of {}", leases.total),
        note: rows.is_empty().then(|| "no leases".to_owned()),
        rows: (rows.iter())
            .map(|lease| {
                let remaining = secs(lease.remaining_ms as f64 / 1e3);
                vec![lease.id.clone(), remaining, format!("{} s", lease.ttl_secs), lease.keys.to_string()]
            })
            .collect(),
        ..table
    }
}

fn slow_requests(figures: &Figures, order: &str) -> Table {
    let table = Table {
        title: "Slow requests".to_owned(),
        columns: &[Text("TIME"), Text("METHOD"), Number("TOOK"), Text("CODE"), Text("PHASES"), Fill("REQUEST")],
        ..Table::default()
    };
    let Some(slow) = &figures.now.slow_requests else {
        return Table { note: missing(figures, "slowRequests"), ..table };
    };
    let mut rows: Vec<&SlowRequest> = slow.requests.iter().collect();
    if order == "slowest" {
        rows.sort_by_key(|request| Reverse(request.took_us));
    }
    let row = |request: &&SlowRequest| {
        vec![
            time_of_day(request.ended_unix_ms),
            short_method(&request.method).to_owned(),
            micros(request.took_us),
            request.code.clone(),
            longest_phases(request),
            request.request.clone(),
        ]
    };
    Table {
        title: format!(
            "Requests of the last hour that took longer than {}; {} since the start",
            micros(slow.threshold_us),
            slow.total
        ),
        rows: rows.iter().map(row).collect(),
        note: rows.is_empty().then(|| "none".to_owned()),
        ..table
    }
}

/// Returns the two phases that took longest.
fn longest_phases(request: &SlowRequest) -> String {
    let mut phases: Vec<_> = request.phases.iter().collect();
    phases.sort_by_key(|phase| Reverse(phase.took_us));
    let phases = phases.iter().take(2).map(|phase| format!("{} {}", phase.name, micros(phase.took_us)));
    phases.collect::<Vec<_>>().join(", ")
}

fn members(figures: &Figures) -> Table {
    let table = Table {
        title: "Members".to_owned(),
        columns: &[Text("ID"), Text("NAME"), Text("ROLE"), Fill("CLIENT URLS")],
        ..Table::default()
    };
    let Some(members) = &figures.now.members else { return Table { note: missing(figures, "members"), ..table } };
    let heartbeat = members.since_heartbeat_ms.map(|ms| format!(", heartbeat {} ago", secs(ms as f64 / 1e3)));
    let rows = members.members.iter().map(|member| {
        let role = match (member.leads_expiry, member.responds) {
            (true, true) => "leads, this one",
            (true, false) => "leads",
            (false, true) => "this one",
            (false, false) => "",
        };
        vec![member.id.clone(), member.name.clone(), role.to_owned(), member.client_urls.join(" ")]
    });
    Table {
        title: format!("{} members{}", members.members.len(), heartbeat.unwrap_or_default()),
        rows: rows.collect(),
        ..table
    }
}
