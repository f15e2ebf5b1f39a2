//! Follows the source until the copy may take over.

use std::{collections::BTreeMap, time::Duration};

use orlop_wire::proto::client::{etcdserverpb::alarm_request::AlarmAction, mvccpb::Event};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::{
    Failure, Goal, Migration, Result, Stop,
    source::{self, Session},
    target::Target,
};
use crate::progress::Speed;
use orlop_core::{
    lease::TTL_SECS_MIN,
    types::{LeaseId, Revision},
};

/// Interval at which the source is asked for its revision.
const HEAD_INTERVAL: Duration = Duration::from_secs(1);
/// The same while a cut over waits for a moment at which the copy has every revision.
const CUT_INTERVAL: Duration = Duration::from_millis(20);
/// Interval at which the time of the copy's head is recorded.
const TIME_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which the copy is compacted as the source is.
const COMPACT_INTERVAL: Duration = Duration::from_secs(60);

impl Migration {
    /// Follows the source until the goal is reached. The first signal to stop changes the goal to [`Goal::Once`].
    pub(super) async fn follow(&mut self, session: &Session, target: &mut Target, stop: &Stop) -> Result<()> {
        let mut watch = session.watch(target.head().next()).await?;
        let mut compactions = interval(COMPACT_INTERVAL);
        compactions.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut times = interval(TIME_INTERVAL);
        times.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut speed = Speed::new();
        let mut head = session.head().await?;
        let mut ask = Instant::now() + HEAD_INTERVAL;
        while !self.has_arrived(&mut head, session, target).await? {
            let (at, keys) = (target.head(), target.keys());
            let (done, all) = (at.0.cast_unsigned(), at.max(head).0.cast_unsigned());
            self.progress.show(done, all, || {
                format!("revision {at}, {} behind, {keys} keys, {:.0} changes/s", all - done, speed.per_sec())
            });
            tokio::select! {
                () = stop.clone(), if self.goal != Goal::Once => {
                    self.progress.say("stopping at the source's revision; a second signal ends the process at once");
                    self.unfence(session).await?;
                    (self.goal, self.fence) = (Goal::Once, false);
                }
                events = watch.next() => {
                    let events = events?;
                    speed.add(events.len() as u64);
                    let grants = missing_leases(&events, session, target).await?;
                    target.follow(events, &grants).await?;
                }
                () = sleep_until(ask) => {
                    head = session.head().await?;
                    ask = Instant::now() + if self.is_verified { CUT_INTERVAL } else { HEAD_INTERVAL };
                }
                _ = times.tick() => {
                    if target.head() >= head {
                        target.note_time().await;
                    }
                }
                _ = compactions.tick() => {
                    if let Some(revision) = session.compact_revision().await? {
                        target.compact(revision).await?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns whether the goal is reached. The copy then has the leases of the source.
    async fn has_arrived(&mut self, head: &mut Revision, session: &Session, target: &mut Target) -> Result<bool> {
        match self.goal {
            Goal::Follow => return Ok(false),
            Goal::Once => {
                if target.head() < self.end(head, session, target).await? {
                    return Ok(false);
                }
                if self.raise_fence(session).await? {
                    self.end(head, session, target).await?;
                    return Ok(false);
                }
                self.verify(session, target).await?;
            }
            Goal::CutOver => {
                if target.head() < *head {
                    return Ok(false);
                }
                if !self.is_verified {
                    self.verify(session, target).await?;
                    self.is_verified = true;
                }
                self.raise_fence(session).await?;
                self.leases = session.leases(target.leases()).await?;
                *head = session.head().await?;
                if target.head() != *head {
                    return Ok(false);
                }
                check_users(session, target).await?;
            }
        }
        // A lease that has ended since may still have keys in the copy. One that was granted again has a new TTL.
        let mut leases = self.leases.clone();
        leases.extend(session.leases(target.leases()).await?);
        target.set_leases(&leases).await?;
        Ok(true)
    }

    /// Returns the revision at which [`Goal::Once`] is reached: the source's, after its leases were read.
    async fn end(&mut self, head: &mut Revision, session: &Session, target: &Target) -> Result<Revision> {
        if let Some(end) = self.end {
            return Ok(end);
        }
        self.leases = session.leases(target.leases()).await?;
        *head = session.head().await?;
        Ok(*self.end.insert(*head))
    }

    /// Compares source and copy at the copy's revision.
    ///
    /// # Errors
    ///
    /// [`Failure::Fatal`] if they differ.
    async fn verify(&mut self, session: &Session, target: &mut Target) -> Result<()> {
        check_users(session, target).await?;
        let at = target.head();
        let theirs = session.hash(at, target.compact_revision()).await?;
        if !target.has_hash(&theirs).await? {
            return Err(Failure::Fatal(format!(
                "source and copy differ at revision {at}: the source has another hash, {}, with the compact revision {}; \
                 start again with an empty database",
                theirs.hash,
                theirs.compact_revision.unwrap_or(Revision(0)),
            )));
        }
        if let Some(compacted) = theirs.compact_revision {
            target.compact(compacted).await?;
        }
        // A lease may be granted again with another TTL during the hash, which takes long.
        let leases = session.leases(&BTreeMap::new()).await?;
        target.set_leases(&leases).await?;
        self.progress.say(&format!("verified: source and copy have the hash {} at revision {at}", theirs.hash));
        Ok(())
    }

    /// Lets the source refuse writes, if that is wanted and not done yet. Returns whether it did.
    async fn raise_fence(&mut self, session: &Session) -> Result<bool> {
        if !self.fence || self.is_fenced {
            return Ok(false);
        }
        // Until writes are refused there may be more revisions. If the answer is lost, the alarm may be raised: the next attempt
        // raises it again and asks for the head then.
        self.end = None;
        self.alarmed.lock().insert(session.member_id);
        session.fence(AlarmAction::Activate, session.member_id).await?;
        self.is_fenced = true;
        self.progress.say("the source refuses writes from now on");
        Ok(true)
    }

    /// Lets the source accept writes again.
    pub(super) async fn unfence(&mut self, session: &Session) -> Result<()> {
        self.is_fenced = false;
        loop {
            let Some(member) = self.alarmed.lock().first().copied() else { return Ok(()) };
            session.fence(AlarmAction::Deactivate, member).await?;
            self.alarmed.lock().remove(&member);
        }
    }
}

/// # Errors
///
/// [`Failure::StartOver`] if users or roles have changed, or Auth was enabled: only a snapshot contains that.
async fn check_users(session: &Session, target: &Target) -> Result<()> {
    match session.auth().await? {
        // To enable Auth does not change the revision.
        Some(auth) if auth != target.auth => {
            Err(Failure::StartOver("users or roles of the source have changed, or Auth was enabled".to_owned()))
        }
        Some(_) | None => Ok(()),
    }
}

/// Returns the leases of events that the copy lacks, with their TTLs in seconds.
async fn missing_leases(events: &[Event], session: &Session, target: &Target) -> Result<BTreeMap<LeaseId, i64>> {
    let mut leases = BTreeMap::new();
    for id in events.iter().filter_map(source::lease) {
        if target.leases().contains_key(&id) || leases.contains_key(&id) {
            continue;
        }
        // A lease without a TTL has ended meanwhile. The end of its keys follows, unless the source refuses writes: then
        // the copy has to end them.
        leases.insert(id, session.ttl(id).await?.unwrap_or(TTL_SECS_MIN));
    }
    Ok(leases)
}
