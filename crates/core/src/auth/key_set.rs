//! Sets of keys that permissions cover.

use crate::types::{Key, KeyRange};

/// A set of keys: sorted spans that neither overlap nor touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeySet(Vec<Span>);

/// The keys in [start, end); without an end, all keys from `start` on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Span {
    start: Key,
    end: Option<Key>,
}

impl Span {
    fn of(range: &KeyRange) -> Self {
        match range {
            KeyRange::Single(key) => Self { start: key.clone(), end: Some([key, &[0][..]].concat().into()) },
            KeyRange::Span { start, end } => Self { start: start.clone(), end: end.clone() },
        }
    }

    fn is_empty(&self) -> bool {
        self.end.as_ref().is_some_and(|end| self.start >= *end)
    }
}

impl<'a> FromIterator<&'a KeyRange> for KeySet {
    fn from_iter<T: IntoIterator<Item = &'a KeyRange>>(ranges: T) -> Self {
        let mut spans: Vec<Span> = ranges.into_iter().map(Span::of).filter(|span| !span.is_empty()).collect();
        spans.sort();
        let mut merged: Vec<Span> = Vec::with_capacity(spans.len());
        for span in spans {
            match merged.last_mut() {
                Some(Span { end: None, .. }) => break,
                Some(Span { end: Some(end), .. }) if span.start <= *end => match span.end {
                    None => merged.last_mut().expect("seen above").end = None,
                    Some(later) if later > *end => *end = later,
                    Some(_) => {}
                },
                _ => merged.push(span),
            }
        }
        Self(merged)
    }
}

impl KeySet {
    /// Returns whether the set contains every key of a range.
    pub fn contains(&self, range: &KeyRange) -> bool {
        let start = range.start();
        let following = self.0.partition_point(|span| span.start <= *start);
        let Some(span) = following.checked_sub(1).and_then(|index| self.0.get(index)) else { return false };
        match (&span.end, range) {
            (None, _) => true,
            (Some(end), KeyRange::Single(key)) => key < end,
            (Some(end), KeyRange::Span { end: Some(last), .. }) => start < end && last <= end,
            (Some(_), KeyRange::Span { end: None, .. }) => false,
        }
    }
}
