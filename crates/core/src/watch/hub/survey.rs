//! Surveys the watches: how many each range has, and how far behind they are.
//!
//! The hub's lock is held for a bounded number of watches, or for those of one range, at a time. Queued events are counted without it, one stream
//! at a time. So a survey is not one moment: watches that are created or canceled meanwhile may be missing.
//!
//! Known limit: at most [`EXAMINED_MAX`] watches and [`RANGES_MAX`] ranges are examined, which bounds its memory.

use std::{cmp::Reverse, collections::HashMap, ops::Bound, sync::Arc};

use super::{Hub, RangeGroup, State, WatchKey, behind::BehindWatch};
use crate::{
    overload::Steps,
    types::{KeyRange, Revision, WatchId},
    watch::outbox::Outbox,
};

/// Maximum number of watches whose queued events are counted.
const EXAMINED_MAX: usize = 50_000;
/// Maximum number of ranges that are distinguished.
const RANGES_MAX: usize = 10_000;
/// Number of watches, or of ranges, that are visited while the hub is locked.
const STEP_WATCHES: usize = 1_000;

/// The watches of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchedRange {
    pub range: KeyRange,
    pub watches: usize,
    /// Number of watches that read the log.
    pub catching_up: usize,
    /// Number of chunks of events that wait to be sent.
    pub queued: usize,
    /// Number of revisions from the oldest that the slowest watch has not received to the head.
    pub revision_lag: i64,
}

/// The watches of all streams.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// The slowest first, then those with the most watches.
    pub ranges: Vec<WatchedRange>,
    pub ranges_total: usize,
    pub watches_total: usize,
    /// Whether a limit was reached, so that lags and queued events may be higher.
    pub is_partial: bool,
}

/// A watch whose queue will be examined.
struct Examined {
    outbox: Arc<Outbox>,
    id: WatchId,
    /// Position in [`Collected::ranges`].
    range: usize,
}

/// The result of the part that needs the hub's lock.
#[derive(Default)]
struct Collected {
    ranges: Vec<WatchedRange>,
    numbers: HashMap<KeyRange, usize>,
    examined: Vec<Examined>,
    survey: Survey,
}

impl Hub {
    /// Surveys the watches; returns at most `ranges_max` ranges.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing is changed.
    pub async fn survey(&self, ranges_max: usize, steps: &Steps) -> Survey {
        let mut collected = Collected::default();
        let head = self.head();
        let mut next = Some(0);
        while let Some(group) = next {
            next = collected.add_groups(&self.state.lock(), group);
            steps.request().await;
        }
        let mut next = Some(Bound::Unbounded);
        while let Some(from) = next {
            next = collected.add_behind(&self.state.lock(), from, head);
            steps.request().await;
        }
        let mut examined = std::mem::take(&mut collected.examined);
        // Watches of one stream become neighbours, so each stream's queue is read once.
        examined.sort_unstable_by_key(|watch| (Arc::as_ptr(&watch.outbox), watch.id));
        for stream in examined.chunk_by(|a, b| Arc::ptr_eq(&a.outbox, &b.outbox)) {
            if collected.add_queued(stream, head) {
                steps.request().await;
            }
        }
        collected.finish(ranges_max)
    }
}

impl Collected {
    /// Adds the synced watches of the groups from `next` on. Returns the next group, or `None` at the end.
    fn add_groups(&mut self, state: &State, mut next: usize) -> Option<usize> {
        let mut visited = 0;
        while visited < STEP_WATCHES {
            // Numbers of removed groups are below the capacity, too.
            if next >= state.groups.capacity() {
                return None;
            }
            visited += 1 + state.groups.get(next).map_or(0, |group| self.add_group(group));
            next += 1;
        }
        Some(next)
    }

    /// Adds a group. Returns how many of its watches will be examined.
    fn add_group(&mut self, group: &RangeGroup) -> usize {
        let watches: usize = group.flavors.iter().map(|flavor| flavor.members.len()).sum();
        self.survey.watches_total += watches;
        self.survey.ranges_total += 1;
        let Some(range) = self.range(&group.range) else { return 0 };
        self.ranges[range].watches += watches;
        let free = EXAMINED_MAX - self.examined.len();
        self.survey.is_partial |= watches > free;
        let members = group.flavors.iter().flat_map(|flavor| flavor.members.iter()).take(free);
        self.examined.extend(members.map(|member| Examined {
            outbox: Arc::clone(&member.outbox),
            id: member.id,
            range,
        }));
        watches.min(free)
    }

    /// Adds watches that read the log, from a bound on; their queued events count as well. Returns the bound of the
    /// next step, or `None` at the end.
    fn add_behind(&mut self, state: &State, from: Bound<WatchKey>, head: Revision) -> Option<Bound<WatchKey>> {
        let mut last = None;
        for (key, BehindWatch { outbox, range, next, .. }) in state.behind.from(from).take(STEP_WATCHES) {
            last = Some(Bound::Excluded(*key));
            self.survey.watches_total += 1;
            let before = self.ranges.len();
            let Some(number) = self.range(range) else { continue };
            self.survey.ranges_total += self.ranges.len() - before;
            let range = &mut self.ranges[number];
            range.watches += 1;
            range.catching_up += 1;
            range.revision_lag = range.revision_lag.max(head.0 - next.0 + 1);
            match outbox.upgrade() {
                Some(outbox) if self.examined.len() < EXAMINED_MAX => {
                    self.examined.push(Examined { outbox, id: key.1, range: number });
                }
                Some(_) => self.survey.is_partial = true,
                None => {}
            }
        }
        last
    }

    /// Adds the queued events of one stream. Returns whether there were any.
    fn add_queued(&mut self, stream: &[Examined], head: Revision) -> bool {
        let Some(first) = stream.first() else { return false };
        let Some(queued) = first.outbox.queued() else { return false };
        self.survey.is_partial |= queued.is_partial;
        for watch in stream {
            let Some((chunks, oldest)) = queued.watches.get(&watch.id) else { continue };
            let range = &mut self.ranges[watch.range];
            range.queued += chunks;
            range.revision_lag = range.revision_lag.max(head.0 - oldest.0 + 1);
        }
        true
    }

    /// Returns the number of a range, or `None` if there are too many.
    fn range(&mut self, range: &KeyRange) -> Option<usize> {
        if let Some(number) = self.numbers.get(range) {
            return Some(*number);
        }
        if self.ranges.len() == RANGES_MAX {
            self.survey.is_partial = true;
            return None;
        }
        self.numbers.insert(range.clone(), self.ranges.len());
        let range = range.clone();
        self.ranges.push(WatchedRange { range, watches: 0, catching_up: 0, queued: 0, revision_lag: 0 });
        Some(self.ranges.len() - 1)
    }

    fn finish(mut self, ranges_max: usize) -> Survey {
        self.ranges.sort_by(|a, b| {
            let key = |range: &WatchedRange| Reverse((range.revision_lag, range.queued, range.watches));
            key(a).cmp(&key(b)).then_with(|| a.range.cmp(&b.range))
        });
        self.ranges.truncate(ranges_max);
        Survey { ranges: self.ranges, ..self.survey }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::{Flavor, Spec};

    fn spec(key: &str, end: &str, start: Option<i64>) -> Spec {
        let range = KeyRange::from_wire(key.as_bytes(), end.as_bytes());
        let flavor = Flavor { prev_kv: false, puts: true, deletes: true };
        Spec { id: None, range, start: start.map(Revision), flavor, fragment: None, progress_notify: false }
    }

    /// Returns the key, the watches, those that catch up, and the lag of each range.
    async fn survey(hub: &Hub) -> Vec<(String, usize, usize, i64)> {
        let (steps, grant) = Steps::new();
        tokio::spawn(grant);
        let survey = hub.survey(10, &steps).await;
        let watches: usize = survey.ranges.iter().map(|range| range.watches).sum();
        assert_eq!((survey.ranges.len(), watches), (survey.ranges_total, survey.watches_total));
        let row = |range: WatchedRange| {
            let key = String::from_utf8_lossy(range.range.start()).into_owned();
            (key, range.watches, range.catching_up, range.revision_lag)
        };
        survey.ranges.into_iter().map(row).collect()
    }

    #[tokio::test]
    async fn survey_counts_watches_by_range_and_state() {
        let hub = Hub::new(Revision(10), None, Arc::default());
        let (fast, slow) = (Arc::new(hub.outbox()), Arc::new(hub.outbox()));
        assert_eq!(survey(&hub).await, []);
        hub.create(&fast, WatchId(1), &spec("a", "b", None));
        hub.create(&slow, WatchId(1), &spec("a", "b", Some(11)));
        hub.create(&slow, WatchId(2), &spec("c", "", Some(3)));
        let row = |key: &str, watches, behind, lag| (key.to_owned(), watches, behind, lag);
        assert_eq!(survey(&hub).await, [row("c", 1, 1, 8), row("a", 2, 0, 0)]);
        // It has read up to 6, then everything.
        hub.join(&slow, WatchId(2), &spec("c", "", Some(3)), Revision(7));
        assert_eq!(survey(&hub).await, [row("c", 1, 1, 4), row("a", 2, 0, 0)]);
        hub.join(&slow, WatchId(2), &spec("c", "", Some(3)), Revision(11));
        assert_eq!(survey(&hub).await, [row("a", 2, 0, 0), row("c", 1, 0, 0)]);
        hub.reset_to(Revision(12), None, || {});
        assert_eq!(survey(&hub).await, [row("a", 2, 2, 2), row("c", 1, 1, 2)]);
        hub.remove(&slow, WatchId(2), &spec("c", "", Some(3)));
        hub.remove(&slow, WatchId(1), &spec("a", "b", Some(11)));
        hub.remove(&fast, WatchId(1), &spec("a", "b", None));
        assert_eq!(survey(&hub).await, []);
    }
}
