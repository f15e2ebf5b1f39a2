//! A map from ranges to values, queried by key: finds all ranges that contain a key.
//!
//! Single keys are in a hash map. Spans are in a treap: a binary search tree ordered by (start, end) and balanced by
//! random priorities. Every node knows the greatest end in its subtree, so that whole subtrees can be skipped. A query
//! takes O(log n + matches).
//!
//! ```text
//!                 [f, m) max ∞
//!                /            \
//!      [a, z) max z          [k, ∞) max ∞
//!      /          \
//! [a, c) max c  [b, d) max d
//! ```

use std::{
    cmp::Ordering,
    collections::HashMap,
    hash::{BuildHasher as _, RandomState},
};

use crate::types::{Key, KeyRange};

/// A map from key ranges to values.
#[derive(Debug)]
pub struct Intervals<T> {
    singles: HashMap<Key, T>,
    spans: Link<T>,
    priorities: RandomState,
    inserted: u64,
}

type Link<T> = Option<Box<Node<T>>>;

#[derive(Debug)]
struct Node<T> {
    start: Key,
    end: End,
    value: T,
    priority: u64,
    /// The greatest end in this subtree.
    max_end: End,
    left: Link<T>,
    right: Link<T>,
}

/// The end of a span. An open end is the greatest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Before(Key),
    Open,
}

impl End {
    fn new(end: Option<&Key>) -> Self {
        end.map_or(Self::Open, |end| Self::Before(end.clone()))
    }

    fn is_after(&self, key: &[u8]) -> bool {
        match self {
            Self::Before(end) => end.as_slice() > key,
            Self::Open => true,
        }
    }
}

impl<T> Default for Intervals<T> {
    fn default() -> Self {
        Self { singles: HashMap::new(), spans: None, priorities: RandomState::new(), inserted: 0 }
    }
}

impl<T> Intervals<T> {
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the range's value, inserting it if it is absent.
    pub fn get_or_insert_with(&mut self, range: &KeyRange, make: impl FnOnce() -> T) -> &mut T {
        match range {
            KeyRange::Single(key) => self.singles.entry(key.clone()).or_insert_with(make),
            KeyRange::Span { start, end } => {
                let end = End::new(end.as_ref());
                if Self::find(&mut self.spans, start, &end).is_none() {
                    self.inserted += 1;
                    let priority = self.priorities.hash_one(self.inserted);
                    let node = Node {
                        start: start.clone(),
                        max_end: end.clone(),
                        end: end.clone(),
                        value: make(),
                        priority,
                        left: None,
                        right: None,
                    };
                    insert(&mut self.spans, Box::new(node));
                }
                Self::find(&mut self.spans, start, &end).expect("found or just inserted")
            }
        }
    }

    pub fn get(&self, range: &KeyRange) -> Option<&T> {
        let KeyRange::Span { start, end } = range else { return self.singles.get(range.start().as_slice()) };
        let (end, mut link) = (End::new(end.as_ref()), &self.spans);
        while let Some(node) = link {
            match node.compare(start, &end) {
                Ordering::Less => link = &node.left,
                Ordering::Greater => link = &node.right,
                Ordering::Equal => return Some(&node.value),
            }
        }
        None
    }

    pub fn remove(&mut self, range: &KeyRange) {
        match range {
            KeyRange::Single(key) => {
                self.singles.remove(key);
            }
            KeyRange::Span { start, end } => remove(&mut self.spans, start, &End::new(end.as_ref())),
        }
    }

    /// Visits the values of all ranges that contain the key.
    pub fn visit(&self, key: &[u8], visit: &mut impl FnMut(&T)) {
        if let Some(value) = self.singles.get(key) {
            visit(value);
        }
        visit_spans(&self.spans, key, visit);
    }

    fn find<'a>(mut link: &'a mut Link<T>, start: &Key, end: &End) -> Option<&'a mut T> {
        while let Some(node) = link {
            match node.compare(start, end) {
                Ordering::Less => link = &mut node.left,
                Ordering::Greater => link = &mut node.right,
                Ordering::Equal => return Some(&mut node.value),
            }
        }
        None
    }
}

impl<T> Node<T> {
    /// Compares (start, end) with this node's.
    fn compare(&self, start: &Key, end: &End) -> Ordering {
        start.cmp(&self.start).then_with(|| end.cmp(&self.end))
    }

    fn update_max_end(&mut self) {
        let below = [&self.left, &self.right].into_iter().flatten().map(|node| &node.max_end).max();
        let max_end = match below {
            Some(max_end) if *max_end > self.end => max_end.clone(),
            _ => self.end.clone(),
        };
        self.max_end = max_end;
    }
}

fn insert<T>(link: &mut Link<T>, mut node: Box<Node<T>>) {
    match link {
        Some(here) if here.priority >= node.priority => {
            let below = match here.compare(&node.start, &node.end) {
                Ordering::Less => &mut here.left,
                Ordering::Greater | Ordering::Equal => &mut here.right,
            };
            insert(below, node);
            here.update_max_end();
        }
        _ => {
            (node.left, node.right) = split(link.take(), &node.start, &node.end);
            node.update_max_end();
            *link = Some(node);
        }
    }
}

/// Splits a tree into the nodes before (start, end) and the others.
fn split<T>(link: Link<T>, start: &Key, end: &End) -> (Link<T>, Link<T>) {
    let Some(mut node) = link else { return (None, None) };
    if node.compare(start, end) == Ordering::Greater {
        let (left, right) = split(node.right.take(), start, end);
        node.right = left;
        node.update_max_end();
        (Some(node), right)
    } else {
        let (left, right) = split(node.left.take(), start, end);
        node.left = right;
        node.update_max_end();
        (left, Some(node))
    }
}

fn remove<T>(link: &mut Link<T>, start: &Key, end: &End) {
    let Some(node) = link else { return };
    match node.compare(start, end) {
        Ordering::Less => remove(&mut node.left, start, end),
        Ordering::Greater => remove(&mut node.right, start, end),
        Ordering::Equal => {
            *link = merge(node.left.take(), node.right.take());
            return;
        }
    }
    node.update_max_end();
}

/// Joins two trees; all nodes of the first are before those of the second.
fn merge<T>(left: Link<T>, right: Link<T>) -> Link<T> {
    match (left, right) {
        (Some(mut left), Some(right)) if left.priority >= right.priority => {
            left.right = merge(left.right.take(), Some(right));
            left.update_max_end();
            Some(left)
        }
        (Some(left), Some(mut right)) => {
            right.left = merge(Some(left), right.left.take());
            right.update_max_end();
            Some(right)
        }
        (left, None) => left,
        (None, right) => right,
    }
}

fn visit_spans<T>(link: &Link<T>, key: &[u8], visit: &mut impl FnMut(&T)) {
    let Some(node) = link else { return };
    if !node.max_end.is_after(key) {
        return;
    }
    visit_spans(&node.left, key, visit);
    if node.start.as_slice() <= key {
        if node.end.is_after(key) {
            visit(&node.value);
        }
        visit_spans(&node.right, key, visit);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn range() -> impl Strategy<Value = KeyRange> {
        let key = || prop::collection::vec(0_u8..4, 1..3);
        (key(), prop::option::of(key()), any::<bool>()).prop_map(|(start, end, open)| match end {
            None => KeyRange::Single(start.into()),
            Some(_) if open => KeyRange::Span { start: start.into(), end: None },
            Some(end) => KeyRange::Span { start: start.into(), end: Some(end.into()) },
        })
    }

    proptest! {
        #[test]
        fn query_finds_all_ranges_that_contain_a_key(
            steps in prop::collection::vec((range(), any::<bool>()), 0..60),
            keys in prop::collection::vec(prop::collection::vec(0_u8..5, 0..3), 1..20),
        ) {
            let mut intervals = Intervals::new();
            let mut model = BTreeSet::new();
            for (range, add) in steps {
                if add {
                    intervals.get_or_insert_with(&range, || range.clone());
                    model.insert(range);
                } else {
                    intervals.remove(&range);
                    model.remove(&range);
                }
            }
            for key in keys {
                let mut found = Vec::new();
                intervals.visit(&key, &mut |range: &KeyRange| found.push(range.clone()));
                found.sort();
                let expected: Vec<_> = model.iter().filter(|range| range.contains(&key)).cloned().collect();
                prop_assert_eq!(found, expected);
            }
            for range in &model {
                prop_assert_eq!(intervals.get(range), Some(range));
            }
        }
    }
}
