//! Checks of the data other than rows: facts (the rows of table meta), leases and members.

use super::{Findings, Location};
use orlop_core::{
    log::{self, Facts},
    types::Revision,
};

const FACTS: &str = "meta";
/// Known facts and their minimum values.
const KNOWN_FACTS: [(&str, i64); 15] = [
    ("cluster_id", 1),
    ("member_id", 1),
    ("compact_revision", 0),
    ("epoch", 0),
    ("purged_revision", 0),
    ("last_beat", 0),
    // The ID of a cluster, of which all bits are used.
    (log::MIGRATION_SOURCE, i64::MIN),
    // A random number.
    (log::SAVED_INDEX_MARK, i64::MIN),
    ("auth_enabled", 0),
    ("auth_revision", 1),
    ("archived_revision", 0),
    ("archive_first", 0),
    ("archive_copied", 0),
    ("archive_bytes", 0),
    ("archive_rows", 0),
];

/// Checks the facts, leases and members. Returns the compact revision.
pub(super) fn check(facts: &Facts, findings: &mut Findings) -> Option<Revision> {
    for name in facts.required {
        if !facts.named.iter().any(|(present, _)| present == name) {
            findings.add(FACTS, Some(Location::Fact((*name).to_owned())), "the fact is missing");
        }
    }
    for (name, value) in &facts.named {
        check_fact(name, *value, findings);
    }
    let compacted = named(facts, "compact_revision");
    check_revisions(facts, compacted, findings);
    for lease in &facts.leases {
        if lease.id == 0 {
            findings.add("lease", Some(Location::Lease(0)), "id is 0, expected another number: 0 means no lease");
        }
        if lease.ttl < 1 {
            let what = format!("ttl is {}, expected at least 1", lease.ttl);
            findings.add("lease", Some(Location::Lease(lease.id)), what);
        }
    }
    for member in &facts.members {
        let location = || Some(Location::Member(member.id));
        if member.id < 1 {
            findings.add("member", location(), format!("id is {}, expected at least 1", member.id));
        }
        if member.name.is_empty() {
            findings.add("member", location(), "name is empty, expected a name");
        }
        if !member.beats_after_start {
            findings.add("member", location(), "beat is before started, expected beat at or after started");
        }
    }
    compacted.map(Revision)
}

fn named(facts: &Facts, wanted: &str) -> Option<i64> {
    facts.named.iter().find(|(name, _)| name == wanted).map(|(_, value)| *value)
}

fn check_fact(name: &str, value: i64, findings: &mut Findings) {
    let location = || Some(Location::Fact(name.to_owned()));
    match KNOWN_FACTS.iter().find(|(known, _)| *known == name) {
        Some((_, min)) if value < *min => {
            findings.add(FACTS, location(), format!("value is {value}, expected at least {min}"));
        }
        None if !log::is_alarm(name) && log::lease_of_fact(name).is_none() => {
            findings.add(FACTS, location(), "unknown fact")
        }
        Some(_) | None => {}
    }
}

fn check_revisions(facts: &Facts, compacted: Option<i64>, findings: &mut Findings) {
    let head = facts.ids.map_or(Revision::EMPTY.0, |(_, last)| last);
    if let Some(compacted) = compacted.filter(|compacted| *compacted > head) {
        let what = format!("value is {compacted}, expected at most {head}, the newest revision");
        findings.add(FACTS, Some(Location::Fact("compact_revision".to_owned())), what);
    }
    let max = compacted.unwrap_or(0).max(0);
    if let Some(purged) = named(facts, "purged_revision").filter(|purged| *purged > max) {
        let what = format!("value is {purged}, expected at most {max}, the compact revision");
        findings.add(FACTS, Some(Location::Fact("purged_revision".to_owned())), what);
    }
}
