//! Ranges that are read in pieces.

use std::sync::Arc;

use super::pairs::{STEP_KEYS, StepCount};
use crate::{
    auth::Caller,
    store::{
        error::Result,
        handle::Store,
        request::{Consistency, Projection, RangeRequest, RangeResponse, RevisionFilter},
        select::Selected,
    },
    types::{Key, Revision},
};

impl Store {
    /// Returns a range in pieces, all at the revision of the first, so that the whole response need not be in memory.
    pub async fn range_pieces(self: &Arc<Self>, caller: &Caller, request: RangeRequest) -> Result<RangePieces> {
        if request.sort.is_some() || request.filter != RevisionFilter::default() {
            // All pairs must be known before the first is sent.
            let response = self.range(caller, &request).await?;
            return Ok(RangePieces::Whole(Some(response)));
        }
        if request.consistency == Consistency::Linearizable {
            self.confirm().await?;
        }
        let index = self.shared.index.read();
        let (revision, at) = (index.head(), index.resolve(request.at));
        drop(index);
        self.shared.check_read(caller, &request.range)?;
        let at = at?;
        let store = Arc::clone(self);
        Ok(RangePieces::Walk(Walk { store, request, revision, at, after: None, count: 0, taken: 0, done: false }))
    }
}

/// A range that is read in pieces; see [`Store::range_pieces`].
pub enum RangePieces {
    /// The pairs are read piece by piece.
    Walk(Walk),
    /// The rest of the response, or `None` after the last piece.
    Whole(Option<RangeResponse>),
}

impl RangePieces {
    /// Returns the next piece: at most `limit` pairs, where `limit` is at least 1. The last piece, which may be empty,
    /// contains the final `count` and `more`.
    pub async fn next(&mut self, limit: usize) -> Result<Option<RangeResponse>> {
        match self {
            Self::Walk(walk) => walk.next(limit).await,
            Self::Whole(Some(left)) if left.kvs.len() > limit => {
                let kvs = left.kvs.drain(..limit).collect();
                Ok(Some(RangeResponse { kvs, ..*left }))
            }
            Self::Whole(last) => Ok(last.take()),
        }
    }

    /// Returns whether the last piece was returned.
    pub fn is_done(&self) -> bool {
        match self {
            Self::Walk(walk) => walk.done,
            Self::Whole(left) => left.is_none(),
        }
    }
}

/// A range in key order, and how far it was read.
pub struct Walk {
    store: Arc<Store>,
    request: RangeRequest,
    /// The head at the start.
    revision: Revision,
    /// The revision that is read.
    at: Revision,
    /// The last visited key, after which the next piece begins.
    after: Option<Key>,
    count: usize,
    /// Number of pairs returned.
    taken: usize,
    done: bool,
}

impl Walk {
    async fn next(&mut self, limit: usize) -> Result<Option<RangeResponse>> {
        if self.done {
            return Ok(None);
        }
        let limit = limit.min(self.request.limit.map_or(usize::MAX, |all| all - self.taken)).max(1);
        let all_taken = self.request.limit == Some(self.taken) || self.request.projection == Projection::CountOnly;
        let shared = &self.store.shared;
        let mut selected = Vec::new();
        let (mut more, mut step) = (false, StepCount::default());
        loop {
            let budget = if all_taken { STEP_KEYS } else { (limit - selected.len()).min(STEP_KEYS) };
            let (projection, range) = (self.request.projection, &self.request.range);
            let count = &mut self.count;
            let after = shared.walk(range, self.after.as_ref(), self.at, budget, &mut |key, entry| {
                *count += 1;
                if all_taken {
                    more = projection != Projection::CountOnly;
                } else {
                    let key = (projection == Projection::KeysOnly).then(|| key.clone());
                    selected.push(Selected { entry, key });
                }
            })?;
            self.done = after.is_none();
            if after.is_some() {
                self.after = after;
            }
            if self.done || selected.len() == limit {
                break;
            }
            step.next(&shared.steps).await;
        }
        let mut kvs = shared.pairs(&selected, self.request.projection, self.at, &mut step, None).await?;
        if self.request.projection == Projection::KeysOnly {
            kvs.iter_mut().for_each(|kv| *kv = kv.without_value());
        }
        self.taken += kvs.len();
        Ok(Some(RangeResponse { revision: self.revision, kvs, more, count: self.count }))
    }
}
