//! The report of an import: what was taken, and what kine's table does not say.

use std::fmt::Write as _;

use orlop_core::types::Revision;
use orlop_sql::KineState;

use super::{Added, Import, chain::Own};
use crate::text::bytes;

impl Own {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::CompactRevision => "compact_rev_key",
            Self::Gap => "gap rows",
            Self::OldApiserverCompaction => "compact_rev_key_apiserver without a value",
        }
    }
}

/// Returns the report, one fact per line. `quota`: that of the command's settings.
pub(super) fn text(import: &Import, added: Added, quota: Option<i64>) -> String {
    let Import { state, survey, bounds, .. } = import;
    let mut text = String::new();
    let mut line = |name: &str, fact: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<18} {fact}");
    };
    line("revision", format!("{}{}", bounds.head, given(state, bounds.head)));
    line("compact revision", bounds.compacted.map_or_else(|| "none".to_owned(), |revision| revision.to_string()));
    if let Some(fact) = above_rows(state) {
        line("", fact);
    }
    if bounds.compacted > Some(Revision(state.compact_revision)) {
        for fact in raised(import) {
            line("", fact);
        }
    }
    line("keys", survey.keys.to_string());
    line(
        "rows",
        format!(
            "{} of kine's {}: {} live at the compact revision, {} changes after it",
            added.compacted + added.history,
            state.rows,
            added.compacted,
            added.history
        ),
    );
    for (name, fact) in size(added.bytes, quota) {
        line(name, fact);
    }
    let mut own: Vec<String> = survey.own_rows.iter().map(|(name, rows)| format!("{rows} {name}")).collect();
    own.sort();
    line("rows of kine", if own.is_empty() { "none".to_owned() } else { format!("{}; not keys", own.join(", ")) });
    let leases = match survey.leases().len() {
        0 => "none".to_owned(),
        leases => format!("{leases}, one for each key with a TTL; they begin when the server starts"),
    };
    line("leases", leases);
    let inexact = match survey.inexact_versions {
        0 => String::new(),
        keys => format!("; {keys} keys, whose creation kine has compacted, may have had a higher one"),
    };
    line("versions", format!("computed from the rows, because kine stores none{inexact}"));
    if survey.numeric_names > 0 {
        let rows = survey.numeric_names;
        line(
            "numeric names",
            format!("{rows} rows: SQLite has stored the name as a number, so 007 became 7; taken as stored"),
        );
    }
    let findings = &survey.findings;
    let (skipped, repaired) = (findings.skipped, findings.repaired);
    line(
        "rows without sense",
        match findings.total() {
            0 => "none".to_owned(),
            total => format!("{total}: {skipped} skipped, {repaired} taken with a change"),
        },
    );
    for finding in &findings.listed {
        line("", finding.clone());
    }
    if findings.listed.len() < findings.total() {
        line("", format!("and {} more", findings.total() - findings.listed.len()));
    }
    text
}

/// Returns the size of the rows, and a warning if a server would refuse writes because of it. kine has no quota.
fn size(used: i64, quota: Option<i64>) -> Vec<(&'static str, String)> {
    let mut facts = vec![("size", format!("about {}", bytes(used)))];
    if let Some(quota) = quota.filter(|quota| used > *quota) {
        facts.push(("", format!("Warning: a server with the quota of this command's settings, {},", bytes(quota))));
        facts.push(("", "refuses writes. Compact to the revision above before clients start, or give the".to_owned()));
        facts.push(("", "server a larger quota-backend-bytes.".to_owned()));
    }
    facts
}

/// Returns why the revision is above kine's newest one; an empty text if it is not.
fn given(state: &KineState, head: Revision) -> String {
    let newest = state.newest.max(state.compact_revision);
    if head.0 <= newest {
        String::new()
    } else if head == Revision::EMPTY {
        ", that of an empty store: kine's table has no rows".to_owned()
    } else if head.0 <= state.sequence {
        format!(", above kine's newest {newest}, because a failed write has used the numbers between")
    } else {
        format!(", above kine's newest {newest}, because no lower one can be compacted")
    }
}

/// Returns what a compact revision of kine that is above each of its ids means.
fn above_rows(state: &KineState) -> Option<String> {
    let KineState { newest, sequence, compact_revision, .. } = *state;
    let fact =
        || format!("kine's is above its newest row {newest} and its sequence {sequence}: damaged, or rows are missing");
    (compact_revision > newest.max(sequence)).then(fact)
}

/// Returns why the compact revision is above kine's, and what that means for clients.
fn raised(import: &Import) -> Vec<String> {
    let Import { state, survey, .. } = import;
    let mut facts = vec![match state.compact_revision {
        0 => "kine has not compacted".to_owned(),
        revision => format!("kine's is {revision}"),
    }];
    if let Some(last) = survey.last_hole {
        facts.push(format!("{} revisions above it have no change; the last of them is {last}", survey.holes));
    }
    if let Some(row) = survey.history_ends {
        facts.push(format!("row {row} contradicts the rows before it"));
    }
    facts.push(
        "No key is lost. Clients that ask for an older revision get \"compacted\" and list again, as all".to_owned(),
    );
    facts.push("clients of kube-apiserver do after its restart.".to_owned());
    facts
}
