//! Gauges and health checks.

use std::sync::Arc;

use tokio::runtime::Handle;

use super::{
    error::Result,
    handle::Store,
    request::{Consistency, Projection, RangeRequest},
};
use crate::{auth::Caller, index::ReadAt, log::AlarmKind, metrics::Metrics, types::KeyRange};

impl Store {
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.shared.metrics
    }

    /// Reads a key as a client does, for health checks.
    pub async fn probe(&self, consistency: Consistency) -> Result<()> {
        let request = RangeRequest {
            range: KeyRange::from_wire(b"health", b""),
            at: ReadAt::Latest,
            limit: Some(1),
            sort: None,
            filter: Default::default(),
            projection: Projection::KeysOnly,
            consistency,
        };
        self.range(&Caller::Server, &request).await.map(drop)
    }

    /// Updates the gauges of the store. If the database does not answer, the gauges that come from it keep their
    /// values.
    pub async fn update_gauges(&self) {
        let (state, shared) = (&self.metrics().state, &self.shared);
        {
            let index = shared.index.read();
            state.revision.set(index.head().0);
            state.compact_revision.set(index.compact_revision().map_or(-1, |revision| revision.0));
            state.keys.set(as_gauge(index.live()));
        }
        state.pending.set(as_gauge(self.queue.len()));
        state.tasks.set(as_gauge(Handle::current().metrics().num_alive_tasks()));
        state.auth_revision.set(i64::try_from(self.authority().state().revision).unwrap_or(i64::MAX));
        state.leases.set(as_gauge(shared.leases.lock().len()));
        state.cache_bytes.set(shared.values.bytes().cast_signed());
        state.cache_hits.set(shared.values.hits().cast_signed());
        state.cache_misses.set(shared.values.misses().cast_signed());
        let (own, leader) = (self.identity().member_id, self.leader());
        state.is_leader.set(i64::from(leader == own));
        state.server_id.with_label_values(&[&format!("{own:x}")]).set(1);
        self.update_member_gauges(own);
        self.update_alarm_gauges();
        let connections = shared.log.connections();
        state.reads.set(as_gauge(connections.used));
        for (kind, count) in [("idle", connections.idle), ("used", connections.used)] {
            state.connections.with_label_values(&[kind]).set(as_gauge(count));
        }
        let size = self.size().await;
        state.has_leader.set(i64::from(size.is_ok() && self.accepts_writes()));
        if let Ok(size) = size {
            state.db_bytes.set(size.total);
            state.db_bytes_in_use.set(size.in_use);
            if let Some(free) = size.disk_free {
                state.disk_free.with_label_values::<&str>(&[]).set(i64::try_from(free).unwrap_or(i64::MAX));
            }
            if let Some(wal) = size.wal {
                state.wal_bytes.with_label_values::<&str>(&[]).set(i64::try_from(wal).unwrap_or(i64::MAX));
            }
        }
    }

    fn update_alarm_gauges(&self) {
        let state = &self.metrics().state;
        state.quota.set(self.shared.space.quota().cast_signed());
        state.alarms.reset();
        let own = format!("{:x}", self.identity().member_id);
        for kind in [AlarmKind::NoSpace, AlarmKind::Corrupt] {
            state.alarms.with_label_values(&[own.as_str(), kind.name()]).set(0);
        }
        for alarm in self.alarms() {
            state.alarms.with_label_values(&[&format!("{:x}", alarm.member_id), alarm.kind.name()]).set(1);
        }
    }

    fn update_member_gauges(&self, own: u64) {
        let state = &self.metrics().state;
        let serving = self.shared.members.serving();
        state.instances.set(as_gauge(serving.len()));
        let own_id = format!("{own:x}");
        let others: Vec<String> =
            serving.iter().filter(|member| member.id != own).map(|member| format!("{:x}", member.id)).collect();
        state.known_peers.reset();
        others.iter().for_each(|other| state.known_peers.with_label_values(&[&own_id, other]).set(1));
        self.metrics().absent.set_peers(&others);
    }
}

fn as_gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
