//! Draws the screen: a title, the names of the views, the tables of one view, and the keys.

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::Paragraph,
};

use super::{
    table::Table,
    views::{self, Sorts, View},
};
use crate::insight::Figures;

const HELP: [&str; 11] = [
    "tab, right     next view",
    "shift-tab, left  previous view",
    "1 to 6         a view by its number",
    "up, down, page up, page down   scroll",
    "r              next order of the rows",
    "p              pause: keep the figures on the screen",
    "?              this help; any key closes it",
    "q, esc, ctrl-c quit",
    "",
    "Rates and latencies are those between the last two reads. P50 and P99 are",
    "estimates within a bucket of the server's histograms.",
];

/// What is on the screen.
pub(super) struct Screen {
    pub endpoint: String,
    pub view: View,
    pub sorts: Sorts,
    pub scroll: usize,
    pub is_paused: bool,
    pub shows_help: bool,
    pub figures: Option<Figures>,
    /// Why the last read failed.
    pub problem: Option<String>,
}

impl Screen {
    pub(super) fn new(endpoint: String) -> Self {
        Self {
            endpoint,
            view: View::Overview,
            sorts: Sorts::default(),
            scroll: 0,
            is_paused: false,
            shows_help: false,
            figures: None,
            problem: None,
        }
    }

    /// Shows another view.
    pub(super) fn show(&mut self, view: View) {
        (self.view, self.scroll) = (view, 0);
    }

    /// Moves by this number of views, and around at the end.
    pub(super) fn turn(&mut self, views: isize) {
        let count = View::ALL.len().cast_signed();
        let next = (self.view as usize).cast_signed() + views;
        self.show(View::ALL[next.rem_euclid(count).cast_unsigned()]);
    }

    pub(super) fn draw(&mut self, frame: &mut Frame<'_>) {
        let rows = [Constraint::Length(1), Constraint::Length(1), Constraint::Fill(1), Constraint::Length(1)];
        let [title, names, body, keys] = Layout::vertical(rows).areas(frame.area());
        frame.render_widget(Paragraph::new(self.title()).style(Modifier::REVERSED), title);
        frame.render_widget(Paragraph::new(self.names()), names);
        self.draw_body(frame, body);
        frame.render_widget(Paragraph::new(self.keys()).style(Modifier::DIM), keys);
    }

    fn title(&self) -> String {
        let title = self.figures.as_ref().map_or_else(|| self.endpoint.clone(), views::title);
        let paused = if self.is_paused { "  PAUSED" } else { "" };
        format!("orlop top  {title}{paused}")
    }

    fn names(&self) -> Line<'static> {
        let names = View::ALL.into_iter().enumerate().flat_map(|(number, view)| {
            let is_shown = view == self.view;
            let style =
                if is_shown { Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED) } else { Style::new() };
            [Span::styled(format!("{} {}", number + 1, view.name()), style), Span::raw("  ")]
        });
        names.collect()
    }

    fn keys(&self) -> String {
        format!("q quit  tab view  r order: {}  p pause  ? help", self.sorts.name(self.view))
    }

    fn draw_body(&mut self, frame: &mut Frame<'_>, area: Rect) {
        let mut fixed: Vec<Line<'static>> = Vec::new();
        if let Some(problem) = &self.problem {
            let text = format!("no answer, trying again: {problem}");
            fixed.push(Line::styled(text, Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)));
        }
        let rows = [Constraint::Length(u16::from(!fixed.is_empty())), Constraint::Fill(1)];
        let [problem, content] = Layout::vertical(rows).areas(area);
        frame.render_widget(Paragraph::new(fixed), problem);
        let lines = self.content(content.width.into());
        let scroll_max = lines.len().saturating_sub(content.height.into());
        self.scroll = self.scroll.min(scroll_max);
        let shown: Vec<Line<'static>> = lines.into_iter().skip(self.scroll).take(content.height.into()).collect();
        frame.render_widget(Paragraph::new(shown), content);
    }

    fn content(&self, width: usize) -> Vec<Line<'static>> {
        if self.shows_help {
            return HELP.into_iter().map(Line::from).collect();
        }
        match &self.figures {
            Some(figures) => {
                let tables = views::tables(self.view, figures, self.sorts);
                tables.iter().enumerate().flat_map(|(number, table)| table_lines(number, table, width)).collect()
            }
            None => vec![Line::from("connecting")],
        }
    }
}

/// Returns the lines of a table: its title unless it has no headings, and an empty line before all but the first table.
fn table_lines(number: usize, table: &Table, width: usize) -> Vec<Line<'static>> {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut lines = Vec::new();
    if number > 0 {
        lines.push(Line::default());
    }
    let heads = table.head_lines();
    if heads > 0 || table.note.is_some() {
        lines.push(Line::styled(table.title.clone(), bold));
    }
    let heading = Style::new().fg(Color::Cyan);
    lines.extend(
        table
            .lines(width)
            .into_iter()
            .enumerate()
            .map(|(row, text)| if row < heads { Line::styled(text, heading) } else { Line::from(text) }),
    );
    lines
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};
    use tokio::time::Instant;

    use super::*;
    use crate::insight::{KeyName, Lease, Leases, Operation, PairSizes, Rates, ServerState, Sized, Sizes, Snapshot};

    fn figures() -> Figures {
        let sizes = |keys, value_bytes| PairSizes { keys, key_bytes: keys * 10, value_bytes: Some(value_bytes) };
        let child = |name: &str, keys, bytes| Sized {
            name: KeyName(name.into()),
            is_prefix: name.ends_with('/'),
            sizes: sizes(keys, bytes),
        };
        let lease = Lease { id: "7b".to_owned(), ttl_secs: 60, remaining_ms: 3_200, keys: 2 };
        Figures {
            now: Snapshot {
                taken_at: Instant::now(),
                unix_ms: 3_723_000,
                endpoint: "http://127.0.0.1:2379".to_owned(),
                server: ServerState {
                    orlop_version: Some("0.2.0".to_owned()),
                    revision: 6230,
                    compact_revision: Some(-1),
                    keys: Some(300),
                    db_size: 3 << 20,
                    db_size_in_use: 1 << 20,
                    db_size_quota: Some(2 << 30),
                    history_bytes: Some(12 << 20),
                    watchers: Some(41),
                    slow_watchers: Some(2),
                    watch_streams: Some(12),
                    alarms: vec!["memberID:1 alarm:NOSPACE".to_owned()],
                    ..ServerState::default()
                },
                counters: None,
                members: None,
                watchers: None,
                leases: Some(Leases { leases: vec![lease], total: 12 }),
                slow_requests: None,
                sizes: Some(Sizes {
                    prefix: KeyName("/registry/".into()),
                    total: sizes(300, 900_000),
                    rest: sizes(1, 100_000),
                    children: vec![child("/registry/pods/", 250, 890_000), child("/registry/\u{1b}[2J", 50, 10_000)],
                    children_total: 2,
                    ..Sizes::default()
                }),
                missing: [("watchers", "not reported by etcd".to_owned())].into(),
            },
            rates: Some(Rates {
                interval_secs: 1.0,
                operations_per_sec: 1520.0,
                failures_per_sec: 0.0,
                revisions_per_sec: 20.5,
                watch_messages_per_sec: Some(3.0),
                cpu_cores: Some(0.25),
                resident_bytes: Some(64.0 * 1024.0 * 1024.0),
            }),
            operations: Some(vec![
                Operation {
                    method: "KV/Range".to_owned(),
                    per_sec: 1500.0,
                    failures_per_sec: 0.0,
                    p50_secs: Some(0.000_08),
                    p99_secs: Some(0.0011),
                },
                Operation {
                    method: "KV/Put".to_owned(),
                    per_sec: 20.0,
                    failures_per_sec: 0.0,
                    p50_secs: Some(0.0015),
                    p99_secs: Some(0.2),
                },
            ]),
        }
    }

    /// Draws the screen and returns its lines.
    fn drawn(screen: &mut Screen, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..height).map(line).collect()
    }

    #[test]
    fn overview_fits_into_80_columns_and_24_rows() {
        let mut screen = Screen { figures: Some(figures()), ..Screen::new(String::new()) };
        let lines = drawn(&mut screen, 80, 24);
        let want = "\
orlop top  http://127.0.0.1:2379  Orlop 0.2.0  01:02:03 UTC
1 Overview  2 Keys  3 Watchers  4 Leases  5 Slow requests  6 Members
revision       6230 (+20.5/s), compact revision none, keys 300
size           3.0 MiB, in use 1.0 MiB, 0.0 % of the quota 2.0 GiB
kept history   12.0 MiB of compacted rows
requests       1520/s, 0 failed/s, 25.0 % of a core, 64.0 MiB memory
watchers       41 on 12 streams, 2 slow, 3.0 messages/s
leases         12, the next expires in 3.2 s
members        not reported
slow requests  not reported
alarms         memberID:1 alarm:NOSPACE

Operations";
        assert_eq!(lines[..13].join("\n"), want);
        assert!(lines[13..16].iter().zip(["METHOD", "KV/Range", "KV/Put"]).all(|(line, name)| line.starts_with(name)));
        assert_eq!(
            lines[14].split_whitespace().collect::<Vec<_>>(),
            ["KV/Range", "1500", "0", "80", "us", "1.10", "ms"]
        );
        assert_eq!(lines[23], "q quit  tab view  r order: rate  p pause  ? help");
        screen.sorts.next(View::Overview);
        assert!(drawn(&mut screen, 80, 24)[14].starts_with("KV/Put"), "the greatest p99 is first");
    }

    #[test]
    fn views_show_their_part_or_why_it_is_missing() {
        let mut screen = Screen { figures: Some(figures()), ..Screen::new(String::new()) };
        for (view, want) in [
            (
                View::Keys,
                &[
                    "Keys below /registry/: 300 keys",
                    "/registry/pods/ ",
                    "/registry/\\x1b[2J ",
                    "(elsewhere) ",
                    " 10.0",
                ][..],
            ),
            (View::Watchers, &["not reported by etcd"]),
            (View::Leases, &["Leases that expire next, of 12", "3.2 s  60 s     2"]),
            (View::Slow, &["not reported"]),
            (View::Members, &["not reported"]),
        ] {
            screen.show(view);
            let text = drawn(&mut screen, 80, 24).join("\n");
            for want in want {
                assert!(text.contains(want), "{view:?} lacks {want:?}: {text}");
            }
        }
    }

    #[test]
    fn problem_help_and_tiny_terminals_are_drawn() {
        let mut screen = Screen::new("http://a:1".to_owned());
        assert_eq!(drawn(&mut screen, 40, 5)[2], "connecting");
        screen.problem = Some("refused".to_owned());
        screen.figures = Some(figures());
        let lines = drawn(&mut screen, 80, 24);
        assert!(lines[2].ends_with("trying again: refused") && lines[3].starts_with("revision"), "{lines:?}");
        screen.shows_help = true;
        assert!(drawn(&mut screen, 80, 24)[3].starts_with("tab, right"));
        screen.shows_help = false;
        screen.scroll = 1_000;
        drawn(&mut screen, 80, 10);
        assert_eq!(screen.scroll, 14 - 6, "the last line is at the bottom");
        for (width, height) in [(1, 1), (3, 2), (0, 0), (10, 3), (300, 100)] {
            View::ALL.into_iter().for_each(|view| {
                screen.show(view);
                drawn(&mut screen, width, height);
            });
        }
        screen.show(View::Overview);
        screen.turn(-1);
        assert_eq!(screen.view, View::Members);
    }
}
