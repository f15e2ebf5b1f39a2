//! The first reading of kine's table: revisions without a change, rows that make no sense, keys and TTLs.

use std::collections::HashMap;

use orlop_core::{
    log::LoggedLease,
    types::{LeaseId, Revision, shown},
};
use orlop_sql::{KineRow, KineState};

use super::{
    Error, Result,
    chain::{Chain, Own, Taken},
    lease_id,
};
use crate::load::{Bounds, HEAD_MAX};

/// Maximum number of rows without sense that the report lists.
const LISTED_MAX: usize = 20;

/// What the rows say together.
#[derive(Default)]
pub(super) struct Survey {
    chain: Chain,
    /// The newest revision that has a change; before the first row the compact revision, or that of an empty store.
    last: i64,
    /// Number of revisions above kine's compact revision that have no change, and the last of them.
    pub(super) holes: i64,
    pub(super) last_hole: Option<i64>,
    /// The newest row before which history cannot be used.
    pub(super) history_ends: Option<i64>,
    pub(super) own_rows: HashMap<&'static str, usize>,
    pub(super) findings: Findings,
    /// Names that SQLite has stored as numbers.
    pub(super) numeric_names: usize,
    /// The TTL of each live key that has one, by the id of its row.
    ttls: HashMap<i64, i64>,
    pub(super) keys: usize,
    /// Live keys whose creation is compacted, so that their version is a lower bound.
    pub(super) inexact_versions: usize,
}

/// Rows that make no sense.
#[derive(Default)]
pub(super) struct Findings {
    pub(super) skipped: usize,
    pub(super) repaired: usize,
    /// At most [`LISTED_MAX`] lines.
    pub(super) listed: Vec<String>,
}

impl Survey {
    pub(super) fn new(state: &KineState) -> Self {
        Self { chain: Chain::new(state), last: state.compact_revision.max(Revision::EMPTY.0), ..Self::default() }
    }

    /// Takes the next row.
    ///
    /// # Errors
    ///
    /// If the import must be refused, because revisions or the order of rows are wrong.
    pub(super) fn take(&mut self, row: &KineRow) -> Result<()> {
        let refused = |what: String| Err(Error::Refused(format!("kine's table is damaged: row {}: {what}", row.id)));
        if row.id < 1 {
            return refused("its id is below 1, the first revision".to_owned());
        }
        let taken = self.chain.take(row);
        let is_compaction = matches!(taken, Taken::Own(Own::CompactRevision));
        if !is_compaction && !(0..row.id).contains(&row.prev_revision) {
            let prev = row.prev_revision;
            return refused(format!(
                "its prev_revision is {prev}, expected an earlier row: a smaller number, at least 0"
            ));
        }
        match taken {
            Taken::Own(own) => *self.own_rows.entry(own.name()).or_default() += 1,
            Taken::Skipped(why) => {
                self.findings.skipped += 1;
                self.findings.list(row, &format!("{why}: skipped"));
            }
            Taken::Change { doubts, .. } => {
                if row.id == Revision::EMPTY.0 {
                    return Err(Error::Refused(key_at_first_revision(row)));
                }
                self.numeric_names += usize::from(!row.is_text);
                if !doubts.what.is_empty() {
                    self.findings.repaired += 1;
                    self.findings.list(row, &doubts.what.join("; "));
                }
                if doubts.ends_history {
                    self.history_ends = Some(row.id);
                }
                self.change_at(row.id);
            }
        }
        Ok(())
    }

    /// Returns the bounds of the log.
    ///
    /// # Errors
    ///
    /// If a revision is too high.
    pub(super) fn finish(&mut self, state: &KineState) -> Result<Bounds> {
        let head = state.newest.max(state.compact_revision).max(state.sequence).max(Revision::EMPTY.0);
        if Revision(head) > HEAD_MAX {
            return Err(Error::Refused(format!(
                "kine's newest revision is stated as {head}, more than a store can have written (newest row {}, compact \
                 revision {}, sequence {})",
                state.newest, state.compact_revision, state.sequence
            )));
        }
        self.change_at(head + 1);
        for (id, live) in self.chain.live() {
            self.keys += 1;
            self.inexact_versions += usize::from(!live.is_exact());
            if let Some(ttl_secs) = live.ttl_secs() {
                self.ttls.insert(id, ttl_secs);
            }
        }
        self.history_ends = self.history_ends.filter(|row| *row > state.compact_revision);
        let above_empty = |revision: i64| (revision > Revision::EMPTY.0).then_some(Revision(revision));
        let compacted = above_empty(state.compact_revision).max(self.history_ends.and_then(above_empty));
        self.chain = Chain::new(state);
        Ok(Bounds::new(Revision(head), compacted, self.last_hole.map(Revision)))
    }

    /// Counts the revisions without a change before one that has a change.
    fn change_at(&mut self, revision: i64) {
        if revision > self.last.saturating_add(1) {
            self.holes += revision - self.last - 1;
            self.last_hole = Some(revision - 1);
        }
        self.last = self.last.max(revision);
    }

    /// Returns the lease of the key whose newest row this is.
    pub(super) fn lease_of(&self, id: i64) -> Option<LeaseId> {
        self.ttls.contains_key(&id).then(|| lease_id(id))
    }

    /// Returns the leases of all keys, in the order of the keys' rows.
    pub(super) fn leases(&self) -> Vec<LoggedLease> {
        let lease =
            |(id, ttl_secs): (&i64, &i64)| LoggedLease { id: lease_id(*id), ttl_secs: *ttl_secs, left_secs: None };
        let mut leases: Vec<LoggedLease> = self.ttls.iter().map(lease).collect();
        leases.sort_by_key(|lease| lease.id.0);
        leases
    }
}

/// Returns why a table whose first row is a key is refused. kine deletes the row in a compaction after the key was
/// written again.
fn key_at_first_revision(row: &KineRow) -> String {
    format!(
        "row {} is the key \"{}\", and revision {} is that of an empty store: start kine or k3s, write this key (for \
         example with kubectl annotate), let kine run until a compaction has deleted the row (it keeps the newest 1000 \
         revisions), stop it and import again",
        row.id,
        shown(&row.name),
        Revision::EMPTY,
    )
}

impl Findings {
    fn list(&mut self, row: &KineRow, what: &str) {
        if self.listed.len() < LISTED_MAX {
            self.listed.push(format!("row {}, name \"{}\": {what}", row.id, shown(&row.name)));
        }
    }

    /// Returns the number of rows.
    pub(super) fn total(&self) -> usize {
        self.skipped + self.repaired
    }
}
