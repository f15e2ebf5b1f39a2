//! The difference of two versions of a value, line by line, as data and as text.
//!
//! Lines are equal if what they show and what they hide is equal: a masked value that changed is a removed and an added
//! line with the same text.

use std::{
    collections::HashSet,
    fmt::Write as _,
    time::{Duration, Instant},
};

use serde::Serialize;
use similar::{Algorithm, ChangeTag, DiffOp, capture_diff_slices_deadline, group_diff_ops};

use crate::{Shown, lines::Line};

/// Maximum time of the search for the smallest difference. After that, larger differences than necessary are found.
const SEARCH_TIME_MAX: Duration = Duration::from_millis(500);

/// The changed parts of a value.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Diff {
    pub hunks: Vec<Hunk>,
    /// The stored bytes differ. If there are no hunks, the difference is one that rendering removes, such as the order
    /// of keys.
    pub bytes_differ: bool,
}

/// Neighbouring changes with the lines around them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Hunk {
    /// Number of the first line in the old version, from 1; 0 if the hunk has no line of it.
    pub old_start: usize,
    pub old_lines: usize,
    pub new_start: usize,
    pub new_lines: usize,
    pub lines: Vec<DiffLine>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct DiffLine {
    pub change: Change,
    pub text: String,
    /// The line shows the same as one that was removed; what it masks or cuts has changed.
    pub hidden_change: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    Same,
    Removed,
    Added,
}

/// How a difference is written as text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Style {
    Plain,
    /// With ANSI escape sequences: removed lines red, added lines green.
    Coloured,
}

/// Compares two versions of a value. `None` is a key that does not exist: all lines of the other version are added or
/// removed. `context_lines` is the number of unchanged lines shown before and after a change.
pub fn diff(old: Option<&Shown>, new: Option<&Shown>, context_lines: usize) -> Diff {
    let lines = |shown: Option<&'_ Shown>| shown.map(|shown| shown.lines.clone()).unwrap_or_default();
    let (old_lines, new_lines) = (lines(old), lines(new));
    let deadline = Instant::now().checked_add(SEARCH_TIME_MAX);
    let operations = capture_diff_slices_deadline(Algorithm::Myers, &old_lines, &new_lines, deadline);
    let groups = group_diff_ops(operations, context_lines.min(1 << 30));
    let hunks = groups.iter().map(|group| hunk(group, &old_lines, &new_lines)).collect();
    Diff { hunks, bytes_differ: old.map(|old| old.stored) != new.map(|new| new.stored) }
}

impl Diff {
    /// Returns the numbers of removed and added lines.
    pub fn counts(&self) -> (usize, usize) {
        let count = |change| self.lines().filter(|line| line.change == change).count();
        (count(Change::Removed), count(Change::Added))
    }

    /// Returns the difference in the form of `diff -u`, without the names of files.
    pub fn render(&self, style: Style) -> String {
        let mut out = String::new();
        for hunk in &self.hunks {
            let Hunk { old_start, old_lines, new_start, new_lines, lines } = hunk;
            push_line(&mut out, style, "36", &format!("@@ -{old_start},{old_lines} +{new_start},{new_lines} @@"));
            for line in lines {
                let (sign, colour) = match line.change {
                    Change::Same => (' ', ""),
                    Change::Removed => ('-', "31"),
                    Change::Added => ('+', "32"),
                };
                let remark = if line.hidden_change { "  # changed" } else { "" };
                push_line(&mut out, style, colour, &format!("{sign}{}{remark}", line.text));
            }
        }
        if self.hunks.is_empty() && self.bytes_differ {
            push_line(&mut out, style, "36", "# the stored bytes differ, but nothing that is shown");
        }
        out
    }

    fn lines(&self) -> impl Iterator<Item = &DiffLine> {
        self.hunks.iter().flat_map(|hunk| &hunk.lines)
    }
}

fn push_line(out: &mut String, style: Style, colour: &str, text: &str) {
    // Writing to a string cannot fail.
    _ = match style {
        Style::Coloured if !colour.is_empty() => writeln!(out, "\x1b[{colour}m{text}\x1b[0m"),
        Style::Coloured | Style::Plain => writeln!(out, "{text}"),
    };
}

fn hunk(group: &[DiffOp], old: &[Line], new: &[Line]) -> Hunk {
    let changes = || group.iter().flat_map(|operation| operation.iter_changes(old, new));
    let removed: HashSet<String> =
        changes().filter(|change| change.tag() == ChangeTag::Delete).map(|change| change.value().text).collect();
    let lines: Vec<DiffLine> = changes()
        .map(|change| {
            let line: Line = change.value();
            let hidden_change =
                change.tag() == ChangeTag::Insert && line.hidden.is_some() && removed.contains(&line.text);
            let change = match change.tag() {
                ChangeTag::Equal => Change::Same,
                ChangeTag::Delete => Change::Removed,
                ChangeTag::Insert => Change::Added,
            };
            DiffLine { change, text: line.text, hidden_change }
        })
        .collect();
    let count = |other: Change| lines.iter().filter(|line| line.change != other).count();
    let (old_lines, new_lines) = (count(Change::Added), count(Change::Removed));
    let start = |start: Option<usize>, lines: usize| start.map_or(0, |start| start + usize::from(lines > 0));
    let old_start = start(group.first().map(|operation| operation.old_range().start), old_lines);
    let new_start = start(group.first().map(|operation| operation.new_range().start), new_lines);
    Hunk { old_start, old_lines, new_start, new_lines, lines }
}
