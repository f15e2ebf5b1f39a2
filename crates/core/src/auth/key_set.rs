//! Sets of keys that permissions cover.

use std::{collections::BTreeSet, iter, ops::Bound};

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
                Some(last) if last.end.as_ref().is_none_or(|end| span.start <= *end) => {
                    last.end = last.end.take().zip(span.end).map(|(end, other)| end.max(other));
                }
                _ => merged.push(span),
            }
        }
        Self(merged)
    }
}

impl KeySet {
    /// Returns whether the set contains every key of a range.
    pub fn contains(&self, range: &KeyRange) -> bool {
        match range {
            KeyRange::Single(key) => self.contains_key(key),
            KeyRange::Span { start, end } => self.span_at(start).is_some_and(|span| match (&span.end, end) {
                (None, _) => true,
                (Some(covered), Some(end)) => start < covered && end <= covered,
                (Some(_), None) => false,
            }),
        }
    }

    /// Returns whether the set contains a key.
    pub fn contains_key(&self, key: &[u8]) -> bool {
        self.span_of(key).is_some()
    }

    /// Returns the keys that the set does not contain, in order. All keys within a span are skipped in one step.
    pub fn outside<'a>(&'a self, keys: &'a BTreeSet<Key>) -> impl Iterator<Item = &'a Key> {
        let mut from: Bound<&Key> = Bound::Unbounded;
        iter::from_fn(move || {
            loop {
                let key = keys.range::<Key, _>((from, Bound::Unbounded)).next()?;
                let Some(span) = self.span_of(key) else {
                    from = Bound::Excluded(key);
                    return Some(key);
                };
                from = Bound::Included(span.end.as_ref()?);
            }
        })
    }

    /// Returns the span that contains a key.
    fn span_of(&self, key: &[u8]) -> Option<&Span> {
        self.span_at(key).filter(|span| span.end.as_ref().is_none_or(|end| key < end.as_slice()))
    }

    /// Returns the last span that starts at or before a key.
    fn span_at(&self, key: &[u8]) -> Option<&Span> {
        let following = self.0.partition_point(|span| span.start.as_slice() <= key);
        following.checked_sub(1).and_then(|index| self.0.get(index))
    }
}
