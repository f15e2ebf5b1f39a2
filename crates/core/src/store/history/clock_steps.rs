//! Contradictions of recorded times. If the clock was set back between two records, it was ahead before or has been behind
//! since; nothing tells which. So a time that the clock has passed twice belongs to no certain revision.
//!
//! Until the clock comes to its time before the step again, the times after the step are those of the clock of now, and are
//! believed. Otherwise no time would be known for years after a clock was years ahead.

use crate::log::{self, Archive, ArchivedMoment, ClockStep, Moment, Written};

/// The places where the recorded times go back.
pub(super) struct ClockSteps {
    steps: Vec<ClockStep>,
    /// The time of the clock of the archive.
    now_ms: i64,
}

impl ClockSteps {
    pub(super) async fn read(archive: &dyn Archive) -> log::Result<Self> {
        let steps = archive.clock_steps().await?;
        let now_ms = if steps.is_empty() { 0 } else { archive.now_ms().await? };
        Ok(Self { steps, now_ms })
    }

    /// Returns whether the clock has passed a time twice.
    pub(super) fn is_repeated(&self, unix_ms: i64) -> bool {
        self.steps.iter().any(|step| self.repeats(step, unix_ms))
    }

    /// Returns whether the newest revision at a time is uncertain. `found` is the moment with the newest recorded time at or
    /// before it, `next` the moment that was recorded after `found`.
    pub(super) fn make_uncertain(&self, unix_ms: i64, found: Moment, next: Option<Moment>) -> bool {
        let is_contradicted =
            |next: Moment| self.steps.iter().any(|step| step.revision > found.revision && step.to_ms <= next.unix_ms);
        self.is_repeated(unix_ms) || next.is_some_and(is_contradicted)
    }

    /// Returns when the revisions of a record were written. `None`: it is not known, because the clock may have been behind
    /// when it was recorded.
    pub(super) fn written(&self, record: ArchivedMoment) -> Option<Written> {
        let ArchivedMoment { moment: Moment { revision, unix_ms }, has_gap } = record;
        if self.steps.iter().any(|step| step.revision <= revision && self.repeats(step, unix_ms)) {
            return None;
        }
        let may_be_ahead = self.steps.iter().any(|step| step.revision > revision && step.to_ms < unix_ms);
        Some(Written { unix_ms, is_latest: has_gap || may_be_ahead })
    }

    fn repeats(&self, step: &ClockStep, unix_ms: i64) -> bool {
        (step.to_ms..=step.from_ms).contains(&unix_ms) && step.from_ms <= self.now_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Revision;

    /// Revisions and their recorded times.
    type Records = [(i64, i64)];

    fn moment((revision, unix_ms): (i64, i64)) -> Moment {
        Moment { revision: Revision(revision), unix_ms }
    }

    fn steps(records: &Records, now_ms: i64) -> ClockSteps {
        let steps = records.windows(2).filter(|pair| pair[1].1 < pair[0].1);
        let step = |pair: &[(i64, i64)]| {
            let (before, after) = (moment(pair[0]), moment(pair[1]));
            ClockStep { revision: after.revision, from_ms: before.unix_ms, to_ms: after.unix_ms }
        };
        ClockSteps { steps: steps.map(step).collect(), now_ms }
    }

    /// Returns the revision of a time; 0: it is uncertain.
    fn revision_at(records: &Records, now_ms: i64, unix_ms: i64) -> i64 {
        let newest = records.iter().filter(|(_, at)| *at <= unix_ms).max_by_key(|(revision, at)| (*at, *revision));
        let found = *newest.expect("a record");
        let next = records.iter().find(|(revision, _)| *revision > found.0);
        let is_uncertain =
            steps(records, now_ms).make_uncertain(unix_ms, moment(found), next.map(|record| moment(*record)));
        if is_uncertain { 0 } else { found.0 }
    }

    /// The clock was ahead by 1000 for the revisions 3 and 4.
    const AHEAD: [(i64, i64); 7] = [(1, 10), (2, 20), (3, 1030), (4, 1040), (5, 50), (6, 60), (9, 1100)];
    /// The clock was behind by 1000 for the revision 5.
    const BEHIND: [(i64, i64); 7] = [(1, 10), (2, 40), (3, 1030), (4, 1040), (5, 50), (6, 1060), (7, 1070)];

    #[test]
    fn time_is_uncertain_where_recorded_times_contradict_each_other() {
        let (ahead, behind) = (&AHEAD[..], &BEHIND[..]);
        // Records, the time of now, a time, and its revision.
        for (records, now_ms, unix_ms, expected) in [
            (ahead, 1200, 10, 1),
            (ahead, 1200, 19, 1),
            // The revisions 3 and 4 were written soon after 2.
            (ahead, 1200, 20, 0),
            (ahead, 1200, 45, 0),
            (&ahead[..6], 70, 45, 0),
            (&ahead[..6], 70, 50, 5),
            (&ahead[..6], 70, 65, 6),
            // The clock has come to the time of the revision 3 again, and nothing else was written.
            (&ahead[..6], 1035, 1035, 0),
            (&ahead[..6], 1050, 1050, 0),
            (ahead, 1200, 60, 0),
            (ahead, 1200, 1035, 0),
            (ahead, 1200, 1100, 9),
            (behind, 1200, 10, 1),
            (behind, 1200, 39, 1),
            // The revision 3 may have been written soon after 2.
            (behind, 1200, 40, 0),
            (behind, 1200, 50, 0),
            (behind, 1200, 500, 0),
            (behind, 1200, 1030, 0),
            (behind, 1200, 1050, 0),
            (behind, 1200, 1060, 6),
            (behind, 1200, 1080, 7),
        ] {
            assert_eq!(revision_at(records, now_ms, unix_ms), expected, "{unix_ms} of {records:?}, now {now_ms}");
        }
    }

    #[test]
    fn limit_of_a_time_is_true() {
        // Records, the time of now, and the known times: exact, or as a limit, or unknown.
        let exact = |unix_ms| Some(Written { unix_ms, is_latest: false });
        let limit = |unix_ms| Some(Written { unix_ms, is_latest: true });
        for (records, now_ms, expected) in [
            (&AHEAD[..6], 70, vec![exact(10), exact(20), limit(1030), limit(1040), exact(50), exact(60)]),
            (&AHEAD[..], 1200, vec![exact(10), exact(20), limit(1030), limit(1040), None, None, exact(1100)]),
            (&BEHIND[..], 1200, vec![exact(10), exact(40), limit(1030), limit(1040), None, exact(1060), exact(1070)]),
        ] {
            let steps = steps(records, now_ms);
            let written =
                |record: &(i64, i64)| steps.written(ArchivedMoment { moment: moment(*record), has_gap: false });
            let found: Vec<Option<Written>> = records.iter().map(written).collect();
            assert_eq!(found, expected, "{records:?}, now {now_ms}");
        }
    }

    /// Retention deletes what is older than a time, unless the time is repeated.
    #[test]
    fn times_that_the_clock_has_passed_twice_are_repeated() {
        let steps = steps(&BEHIND, 1200);
        for (unix_ms, expected) in [(49, false), (50, true), (1040, true), (1041, false)] {
            assert_eq!(steps.is_repeated(unix_ms), expected, "{unix_ms}");
        }
    }
}
