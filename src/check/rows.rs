//! Checks of rows against each other. It reads no database: the caller passes the rows in order, and violations are
//! added to [`Findings`].

use std::collections::{HashMap, HashSet};

use super::{Findings, Location};
use orlop_core::{
    index::{RowKind, ValidatedColumns},
    log::{Facts, StoredRow, Table},
    types::{Key, Revision, RowId, shown},
};

/// The newest row of a key.
#[derive(Debug, Clone, Copy)]
pub(super) struct Newest {
    columns: ValidatedColumns,
    lease: i64,
}

/// The state of the check.
pub(super) struct Rows {
    compacted: Option<Revision>,
    head: i64,
    newest: HashMap<Key, Newest>,
    /// The position of the previous row.
    last: Option<(i64, i64)>,
    count: u64,
}

impl Rows {
    pub(super) fn new(facts: &Facts, compacted: Option<Revision>) -> Self {
        let head = facts.ids.map_or(Revision::EMPTY.0, |(_, last)| last);
        Self { compacted, head, newest: HashMap::new(), last: None, count: 0 }
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the newest row of each key.
    pub(super) fn newest(&self) -> &HashMap<Key, Newest> {
        &self.newest
    }

    /// Returns the keys whose newest row is a put, with that row.
    pub(super) fn live(&self) -> impl Iterator<Item = (&Key, &Newest)> {
        self.newest.iter().filter(|(_, newest)| matches!(newest.columns.kind, RowKind::Put { .. }))
    }

    /// Returns the row ID, create revision, version and lease of a live key.
    pub(super) fn live_version(&self, key: &Key) -> Option<(RowId, Revision, i64, i64)> {
        let Newest { columns, lease } = self.newest.get(key)?;
        match columns.kind {
            RowKind::Put { create_revision, version } => Some((columns.row, create_revision, version, *lease)),
            RowKind::Delete => None,
        }
    }

    /// Checks the next row.
    pub(super) fn check(&mut self, row: &StoredRow, findings: &mut Findings) {
        self.count += 1;
        check_columns(row, findings);
        match self.row_id(row) {
            Ok(row_id) => {
                self.check_order(row, findings);
                self.last = Some(row.place());
                self.check_key(row, row_id, findings);
            }
            // A row without a valid position is not compared with later rows.
            Err(what) => findings.add_row(row, what),
        }
    }

    fn row_id(&self, row: &StoredRow) -> Result<RowId, String> {
        let (id, sub) = row.place();
        if id <= Revision::EMPTY.0 {
            return Err(format!("id is {id}, expected at least 2: the empty store is at revision 1"));
        }
        if id > self.head {
            return Err(format!("id is {id}, expected at most {}, the newest in kv_log", self.head));
        }
        match u32::try_from(sub) {
            Ok(sub) if sub > 0 || row.table == Table::First => Ok(RowId::new(Revision(id), sub)),
            Ok(_) | Err(_) => Err(format!("sub is {sub}, expected at least 1 and at most {}", u32::MAX)),
        }
    }

    /// Checks that no row between the compact revision and this row is missing.
    fn check_order(&self, row: &StoredRow, findings: &mut Findings) {
        let (id, sub) = row.place();
        let complete_from = self.complete_from();
        if id < complete_from {
            return;
        }
        let last = self.last.filter(|last| last.0 >= complete_from);
        let last_id = last.map_or(complete_from - 1, |last| last.0);
        if id - last_id > 1 {
            add_missing_revisions(last_id + 1, id - 1, findings);
        }
        let expected = last.filter(|last| last.0 == id).map_or(0, |last| last.1 + 1);
        if sub == expected {
            return;
        }
        if expected == 0 {
            findings.add_row(row, format!("revision {id} has no row in kv_log, expected its first change"));
        }
        if sub != expected.max(1) {
            findings.add_row(row, format!("sub is {sub}, expected {}", expected.max(1)));
        }
    }

    fn check_key(&mut self, row: &StoredRow, row_id: RowId, findings: &mut Findings) {
        let columns = columns(row, row_id);
        let last = self.newest.get(row.key.as_slice()).map(|newest| newest.columns);
        if let Err(contradiction) = columns.follow(last.as_ref(), self.compacted) {
            findings.add_row(row, contradiction.to_string());
        }
        self.newest.insert(Key::from(row.key.as_slice()), Newest { columns, lease: row.lease });
    }

    /// Returns the first revision from which on all rows must exist. Compaction keeps the rows at the compact revision.
    fn complete_from(&self) -> i64 {
        self.compacted.map_or(0, |compacted| compacted.0).max(Revision::EMPTY.next().0)
    }

    /// Ends the check: finds missing rows at the end and keys with unknown leases.
    pub(super) fn finish(&self, facts: &Facts, findings: &mut Findings) {
        let complete_from = self.complete_from();
        let last = self.last.map_or(complete_from - 1, |(id, _)| id.max(complete_from - 1));
        if last < self.head {
            add_missing_revisions(last + 1, self.head, findings);
        }
        let known: HashSet<i64> = facts.leases.iter().map(|lease| lease.id).collect();
        let mut unknown: Vec<(&Key, &Newest)> =
            self.live().filter(|(_, newest)| newest.lease != 0 && !known.contains(&newest.lease)).collect();
        unknown.sort_unstable_by_key(|(_, newest)| newest.columns.row);
        // A lease and its keys are deleted in one transaction.
        for (key, Newest { columns, lease }) in unknown {
            let RowId { revision, sub } = columns.row;
            let table = if sub == 0 { Table::First } else { Table::More };
            let location = Location::Row { id: revision.0, sub: sub.into(), key: shown(key) };
            findings.add(table.name(), Some(location), format!("lease is {lease:x}, expected a lease in table lease"));
        }
    }
}

fn add_missing_revisions(from: i64, to: i64, findings: &mut Findings) {
    let what = if from == to {
        format!("revision {from} has no row, expected one")
    } else {
        format!("revisions {from} to {to} have no row, expected one each")
    };
    findings.add(Table::First.name(), None, what);
}

fn columns(row: &StoredRow, row_id: RowId) -> ValidatedColumns {
    let kind = if row.deleted == 0 {
        RowKind::Put { create_revision: Revision(row.create_revision), version: row.version }
    } else {
        RowKind::Delete
    };
    ValidatedColumns { row: row_id, kind, prev_revision: Revision(row.prev_revision) }
}

/// Checks the columns of a single row.
fn check_columns(row: &StoredRow, findings: &mut Findings) {
    match row.deleted {
        0 if row.value_bytes.is_none() => findings.add_row(row, "value is NULL, expected a put's value"),
        0 => {}
        1 => {
            if let Some(bytes) = row.value_bytes {
                findings.add_row(row, format!("value has {bytes} bytes, expected NULL because the row is a delete"));
            }
            for (column, found) in
                [("lease", row.lease), ("version", row.version), ("create_revision", row.create_revision)]
            {
                if found != 0 {
                    findings.add_row(row, format!("{column} is {found}, expected 0 because the row is a delete"));
                }
            }
        }
        other => findings.add_row(row, format!("deleted is {other}, expected 0 or 1")),
    }
    // A delete of the empty key stands for a change that is missing in a snapshot of etcd.
    if row.key.is_empty() && row.deleted != 1 {
        findings.add_row(row, "key is empty, expected at least one byte");
    }
}
