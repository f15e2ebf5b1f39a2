//! Read-only transactions.

use tracing::error;

use super::pairs::FEW_ROWS_MAX;
use crate::{
    auth::Caller,
    store::{
        batch::Batch,
        error::{Error, Result},
        handle::Store,
        permissions,
        request::{TxnRequest, TxnResponse},
        txn::{Evaluation, Fetched, Stop},
    },
    types::Revision,
};

impl Store {
    /// Executes a read-only transaction at one revision.
    pub(in crate::store) async fn read_txn(&self, caller: &Caller, request: TxnRequest) -> Result<TxnResponse> {
        if !request.is_serializable() {
            self.confirm().await?;
        }
        let mut fetched = Fetched::new();
        // All reads of the log for this transaction are one list, regardless of the number of evaluations.
        let mut list = if request.lists_keys() { Some(self.shared.read_memory.list().await?) } else { None };
        loop {
            let (before, evaluated) = {
                let index = self.shared.index.read();
                let leases = self.shared.leases.lock();
                if let Some(authority) = self.shared.authority.if_enabled() {
                    permissions::check_read_txn(authority.rights(caller)?, &request)?;
                }
                let mut batch = Batch::new(index.head());
                let evaluation = Evaluation::new(
                    &index,
                    &leases,
                    &self.shared.values,
                    &self.shared.read_memory,
                    &fetched,
                    &mut batch,
                )
                .txn(&request);
                ((index.head(), index.compact_revision()), evaluation)
            };
            let rows = match evaluated {
                Ok(response) => return Ok(response),
                Err(Stop::Failed(error)) => return Err(error),
                Err(Stop::NeedsValues(rows)) => rows,
                Err(Stop::NeedsCommit | Stop::Outdated) => {
                    unreachable!("a batch without changes has no revision of its own")
                }
            };
            if rows.iter().any(|row| fetched.get(row).is_some_and(Option::is_none)) {
                self.check_log_moved(before, rows.len()).await?;
            }
            // Rows that were not found before are forgotten. If the evaluation still needs them, they are read again.
            fetched.retain(|_, kv| kv.is_some());
            fetched.extend(rows.iter().map(|row| (*row, None)));
            let is_list = fetched.len() > FEW_ROWS_MAX;
            let found = match &list {
                Some(_) => self.shared.read_list(&rows).await?,
                None if !is_list && self.shared.read_memory.has_free() => self.shared.read_few_retrying(&rows).await?,
                // A waiting read must hold no values.
                None => {
                    fetched.clear();
                    if is_list {
                        list = Some(self.shared.read_memory.list().await?);
                    } else {
                        self.shared.read_memory.wait_until_free().await?;
                    }
                    continue;
                }
            };
            fetched.extend(found.into_iter().map(|(row, kv)| (row, Some(kv))));
        }
    }

    /// Catches up after `rows` rows were missing from the log, because another instance may have compacted them.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] if the head and the compact revision still equal `before`, those of the evaluation.
    async fn check_log_moved(&self, before: (Revision, Option<Revision>), rows: usize) -> Result<()> {
        if self.shared.log.shared().is_some() {
            self.shared.catch_up().await?;
        }
        let index = self.shared.index.read();
        if (index.head(), index.compact_revision()) == before {
            error!(revision = before.0.0, rows, "rows of live versions are missing from the log");
            return Err(Error::Corrupt);
        }
        Ok(())
    }
}
