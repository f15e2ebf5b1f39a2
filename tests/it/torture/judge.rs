//! Checks that every acknowledged write exists and no refused write does.

use std::collections::{BTreeMap, HashMap};

use orlop_wire::proto::client::etcdserverpb::RangeRequest;

use super::workload::{Outcome, Seen, Write};
use crate::{
    linearizability::{
        connection::{Endpoints, connect, value},
        watcher::{Log, read_all},
        workload,
    },
    support::{Server, all, eventually, prints},
};

/// Counts of the checked writes.
#[derive(Debug, Default)]
pub struct Judged {
    pub acknowledged: usize,
    pub refused: usize,
    pub unknown: usize,
}

/// Checks what the clients and the watcher saw against the log. Returns the counts.
///
/// # Panics
///
/// If an acknowledged write is missing or changed, a refused write exists, a write with unknown outcome exists in part,
/// or the watcher missed an event or received one twice.
pub async fn judge(seen: Seen, endpoints: &Endpoints) -> Judged {
    let log = read_all(endpoints, seen.head).await;
    seen.watcher.check(&log, seen.head);
    check_state(&log, seen.head, endpoints).await;
    let writes: Vec<Write> = seen.load.into_iter().flatten().collect();
    let mut judged = check_writes(&writes, &log).unwrap_or_else(|wrong| panic!("{wrong}"));
    let (_, shared) = split(log);
    let history = seen.shared.into_iter().flatten().collect();
    let checked = workload::check(history, &shared).unwrap_or_else(|wrong| panic!("{wrong}"));
    judged.acknowledged += checked.acknowledged;
    judged.refused += checked.refused;
    judged.unknown += checked.unknown;
    judged
}

/// Checks that `orlop check` finds no violation.
pub fn check_store(server: &Server) {
    prints(&["check", "--datastore-endpoint", &server.url()]);
}

/// Prefix of the shared keys.
const SHARED: &str = "lin/";

/// Separates the events of the writers' own keys from those of the shared keys.
fn split(log: Log) -> (Log, Log) {
    log.into_iter().partition(|(_, events)| events.iter().all(|event| !event.key.starts_with(SHARED)))
}

/// Checks that a read at `head` returns the pairs that result from the events.
async fn check_state(log: &Log, head: i64, endpoints: &Endpoints) {
    let mut expected: BTreeMap<String, (u64, i64)> = BTreeMap::new();
    for event in log.values().flatten() {
        match event.value {
            Some(value) => expected.insert(event.key.clone(), (value, event.revision)),
            None => expected.remove(&event.key),
        };
    }
    let range = || RangeRequest { revision: head, ..all() };
    let kvs = eventually("a read of everything", async || {
        let mut connection = connect(endpoints, 0).await.ok_or("no connection")?;
        connection.kv.range(range()).await.map(|answer| answer.into_inner().kvs).map_err(|_| "no answer")
    })
    .await;
    let there: BTreeMap<String, (u64, i64)> = kvs
        .iter()
        .map(|kv| (String::from_utf8_lossy(&kv.key).into_owned(), (value(&kv.value), kv.mod_revision)))
        .collect();
    for key in expected.keys().chain(there.keys()) {
        assert_eq!(there.get(key), expected.get(key), "{key}: the stored pair and the result of the events");
    }
}

/// Checks the writers' own keys: each key is written at most once, and the keys of a transaction at one revision.
fn check_writes(writes: &[Write], log: &Log) -> Result<Judged, String> {
    let mut judged = Judged::default();
    let mut events: HashMap<&str, Vec<(i64, Option<u64>)>> = HashMap::new();
    for event in log.values().flatten().filter(|event| ["one/", "pair/"].iter().any(|it| event.key.starts_with(it))) {
        events.entry(&event.key).or_default().push((event.revision, event.value));
    }
    for write in writes {
        let found: Vec<_> = write.keys.iter().map(|key| events.remove(key.as_str()).unwrap_or_default()).collect();
        let revision = found[0].first().map(|(revision, _)| *revision);
        let whole = match revision {
            Some(revision) => found.iter().all(|events| *events == [(revision, Some(write.value))]),
            None => found.iter().all(Vec::is_empty),
        };
        if !whole {
            return Err(format!("{write:?} was applied in part, twice or with other contents: {found:?}"));
        }
        match (write.outcome, revision) {
            (Outcome::Written(outcome), Some(revision)) if outcome == revision => judged.acknowledged += 1,
            (Outcome::Written(_), _) => {
                return Err(format!("{write:?} was acknowledged, but the log contains {found:?}"));
            }
            (Outcome::Refused, Some(_)) => return Err(format!("{write:?} was refused but applied: {found:?}")),
            (Outcome::Refused, None) => judged.refused += 1,
            (Outcome::Unknown, _) => judged.unknown += 1,
        }
    }
    if let Some((key, events)) = events.into_iter().next() {
        return Err(format!("no request wrote {key}: {events:?}"));
    }
    Ok(judged)
}

mod tests {
    use super::{Outcome, Write, check_writes};
    use crate::linearizability::watcher::{Event, Log};

    #[test]
    fn judge_rejects_lost_and_refused_writes() {
        type Events = &'static [(i64, &'static str, u64)];
        let table: [(&str, Outcome, Events, &str); 10] = [
            ("acknowledged and present", Outcome::Written(2), &[(2, "pair/a", 7), (2, "pair/b", 7)], ""),
            ("acknowledged and lost", Outcome::Written(2), &[], "was acknowledged"),
            (
                "acknowledged and present at another revision",
                Outcome::Written(3),
                &[(2, "pair/a", 7), (2, "pair/b", 7)],
                "acknowledged",
            ),
            ("acknowledged and half present", Outcome::Written(2), &[(2, "pair/a", 7)], "in part"),
            ("acknowledged with another value", Outcome::Written(2), &[(2, "pair/a", 8), (2, "pair/b", 7)], "in part"),
            ("refused and absent", Outcome::Refused, &[], ""),
            ("refused and present", Outcome::Refused, &[(2, "pair/a", 7), (2, "pair/b", 7)], "refused but applied"),
            ("unknown and present", Outcome::Unknown, &[(2, "pair/a", 7), (2, "pair/b", 7)], ""),
            ("unknown and at two revisions", Outcome::Unknown, &[(2, "pair/a", 7), (3, "pair/b", 7)], "in part"),
            ("an event without a write", Outcome::Unknown, &[(2, "one/c", 7)], "no request wrote"),
        ];
        for (name, outcome, events, wrong) in table {
            let keys = vec!["pair/a".to_owned(), "pair/b".to_owned()];
            let write = Write { keys, value: 7, outcome, began: 0, ended: 1 };
            let mut log = Log::new();
            for (revision, key, value) in events {
                let event = Event { revision: *revision, key: (*key).to_owned(), value: Some(*value) };
                log.entry(*revision).or_default().push(event);
            }
            let found = check_writes(&[write], &log).err().unwrap_or_default();
            assert!(found.contains(wrong) && found.is_empty() == wrong.is_empty(), "{name}: {found}");
        }
    }
}
