//! Checks of the archive: its rows against each other and the log, and its facts against its rows.

use std::collections::HashMap;

use super::{Findings, Location};
use orlop_core::{
    log::{Depth, Inspect, Result, StoredArchive, StoredArchivedRow},
    types::shown,
};

const TABLE: &str = "kv_archive";
/// Bytes that a row counts in addition to its key and value.
const ROW_BYTES: i64 = orlop_core::log::ARCHIVED_ROW_BYTES as i64;

/// The newest archived row of a key so far.
struct Newest {
    id: i64,
    sub: i64,
    end: i64,
}

/// Checks the archive, if there is one. `oldest` contains the smallest id of each key in the log. Returns the number of
/// its rows.
pub(super) async fn check(
    store: &dyn Inspect,
    (depth, limit): (Depth, usize),
    oldest: &HashMap<Vec<u8>, i64>,
    findings: &mut Findings,
) -> Result<Option<u64>> {
    let Some(archive) = store.archive(depth, limit).await? else { return Ok(None) };
    for what in &archive.damage {
        findings.add(TABLE, None, what);
    }
    if !archive.damage.is_empty() {
        return Ok(None);
    }
    let (mut rows, mut bytes) = (0, 0);
    let mut newest: HashMap<Vec<u8>, Newest> = HashMap::new();
    let mut place = (i64::MIN, i64::MIN);
    loop {
        let page = store.archived_after(place).await?;
        let Some(last) = page.last() else { break };
        place = (last.id, last.sub);
        for row in page {
            rows += 1;
            bytes += row.bytes + ROW_BYTES;
            check_row(&archive, &row, newest.get(&row.key), findings);
            newest.insert(row.key, Newest { id: row.id, sub: row.sub, end: row.end_revision });
        }
    }
    for (key, last) in &newest {
        if let Some(next) = oldest.get(key).filter(|next| **next > last.id) {
            check_end(&archive, key, last, *next, findings);
        }
    }
    check_facts(&archive, rows, bytes, findings);
    Ok(Some(rows.cast_unsigned()))
}

fn check_row(archive: &StoredArchive, row: &StoredArchivedRow, before: Option<&Newest>, findings: &mut Findings) {
    let StoredArchivedRow { id, sub, key, deleted, end_revision: end, .. } = row;
    let location = || Some(Location::Row { id: *id, sub: *sub, key: shown(key) });
    let compacted = archive.compact_revision.unwrap_or(0);
    if *id >= compacted || *end > compacted {
        let what =
            format!("id is {id} and end_revision {end}, expected both below or at the compact revision {compacted}");
        findings.add(TABLE, location(), what);
    }
    if end < id || (*deleted == 1 && end != id) {
        let expected = if *deleted == 1 { "id, because the row is a delete" } else { "at least id" };
        findings.add(TABLE, location(), format!("end_revision is {end}, expected {expected}"));
    }
    if let Some(before) = before {
        check_end(archive, key, before, *id, findings);
    }
}

/// Checks the end of a row whose key changed next at `next`. A row of no further use may lack the next one.
fn check_end(archive: &StoredArchive, key: &[u8], row: &Newest, next: i64, findings: &mut Findings) {
    let is_used = row.end > archive.first.unwrap_or(i64::MAX);
    let is_delete = row.end == row.id;
    if is_used && !is_delete && row.end != next {
        let location = Location::Row { id: row.id, sub: row.sub, key: shown(key) };
        let what = format!("end_revision is {}, expected {next}, at which the key changed next", row.end);
        findings.add(TABLE, Some(location), what);
    }
}

fn check_facts(archive: &StoredArchive, rows: i64, bytes: i64, findings: &mut Findings) {
    let mut add = |name: &str, what: String| findings.add(TABLE, Some(Location::Fact(name.to_owned())), what);
    for (name, found, expected) in [("rows", archive.rows, rows), ("bytes", archive.bytes, bytes)] {
        match found {
            Some(found) if found == expected => {}
            Some(found) => add(name, format!("value is {found}, expected {expected}")),
            None => add(name, "the fact is missing".to_owned()),
        }
    }
    let compacted = archive.compact_revision.unwrap_or(1);
    match archive.copied {
        Some(copied) if copied > compacted => {
            add("copied", format!("value is {copied}, expected at most {compacted}, the compact revision"));
        }
        Some(_) => {}
        None => add("copied", "the fact is missing".to_owned()),
    }
}
