//! The keys that the evaluation of a batch looked at.

use crate::types::KeyRange;

/// The keys that the evaluation of a batch looked at, which include all keys that it changed. A batch whose read set
/// is unchanged gives the same changes at a later head, apart from their revisions.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ReadSet<'a> {
    pub keys: Vec<&'a [u8]>,
    /// Ranges of several keys.
    pub spans: Vec<&'a KeyRange>,
}

impl<'a> ReadSet<'a> {
    /// Adds a range that is not empty.
    pub fn add(&mut self, range: &'a KeyRange) {
        match range {
            KeyRange::Single(key) => self.keys.push(key),
            KeyRange::Span { .. } if range.is_empty() || self.spans.contains(&range) => {}
            KeyRange::Span { .. } => self.spans.push(range),
        }
    }

    pub fn contains(&self, key: &[u8]) -> bool {
        self.keys.contains(&key) || self.spans.iter().any(|span| span.contains(key))
    }
}
