//! Reading the log of other instances.

use futures_util::FutureExt as _;

use super::*;
use crate::{
    auth::{AuthChange, AuthState, Password},
    log::{Alarm, AlarmChange, AlarmKind, Append, Appended, AuthAppend, Cause, FactChange, LeaseChange, Reclaim},
    store::fixtures::shared,
    types::{EncodedKv, Key, Prev, Superseded, Version},
};

fn change(row: RowId, key: &str, version: i64, prev: Option<RowId>) -> Change {
    let create_revision = if version == 1 { row.revision } else { Revision(15) };
    let kv = EncodedKv::new(key.as_bytes(), Version { row, create_revision, version }, b"value", None);
    let kind = match version {
        0 => ChangeKind::Delete,
        _ => ChangeKind::put(kv),
    };
    let prev = prev.map(|row| Prev { row, kv: None });
    Change { row, key: Key::from(key.as_bytes()), kind, prev, prev_lease: None }
}

#[test]
fn changes_of_a_transaction_have_the_row_before_it_as_the_previous_one() {
    let row = |revision, sub| RowId::new(Revision(revision), sub);
    let mut index = TreeIndex::new();
    for (sub, key) in [(0, "a"), (1, "k")] {
        index.apply(&change(row(15, sub), key, 1, None));
    }
    // The log only has the revision of the previous row.
    let logged = Some(row(15, 0));
    let mut changes =
        [change(row(16, 0), "k", 2, logged), change(row(16, 1), "k", 0, logged), change(row(17, 0), "a", 2, logged)];
    complete_prev(&index, &mut changes);
    let rows = changes.map(|change| change.prev.map(|prev| prev.row));
    assert_eq!(rows, [Some(row(15, 1)), Some(row(15, 1)), Some(row(15, 0))]);
}

#[tokio::test]
async fn changes_of_a_replaced_server_are_not_applied() {
    let shared = shared(0);
    let others = || vec![change(RowId::new(Revision(2), 0), "k", 1, None)];
    // Another server was accepted after the append on server 1.
    let refused = shared.apply_others(others(), Revision(2), 1).await.map(drop);
    assert!(matches!(refused, Err(Error::OutcomeUnknown(_))), "{refused:?}");
    assert_eq!(shared.index.read().head(), Revision::EMPTY);
    shared.apply_others(others(), Revision(2), 0).await.map(drop).expect("the same server");
    assert_eq!(shared.index.read().head(), Revision(2));
}

/// Another instance has compacted at 4, and so far deleted only the first row.
#[tokio::test]
async fn rebuilt_state_has_everything_that_the_log_has() {
    let row = |revision| RowId::new(Revision(revision), 0);
    let changes = [
        change(row(2), "a", 1, None),
        change(row(3), "a", 0, Some(row(2))),
        change(row(4), "b", 1, None),
        change(row(5), "c", 1, None),
    ];
    let leases = [LeaseChange::Grant { id: LeaseId(7), ttl_secs: 600 }];
    let alarm = Alarm { member_id: 1, kind: AlarmKind::Corrupt };
    let raise = FactChange::Alarm(AlarmChange::Raise { alarm, cause: Cause::Client });
    let add = AuthChange::AddUser { user: "user".to_owned(), password: Password::None };
    let mut auth = AuthState::default();
    auth.apply(&add).unwrap();
    for catches_up in [false, true] {
        let shared = shared(0);
        let append = Append {
            leases: &leases,
            compact: Some(Revision(4)),
            fact: Some(raise),
            auth: Some(AuthAppend { change: &add, next: &auth }),
            ..Append::rows(Revision::EMPTY, &changes)
        };
        assert_eq!(shared.log.append(append).await.unwrap(), Appended::Done);
        let deleted = Reclaim::Rows { rows: &[row(2)], compacted: Revision(4), server: 0 };
        shared.log.reclaim(deleted).await.unwrap();
        if catches_up { shared.catch_up().await } else { shared.rebuild().await }.unwrap();
        let index = shared.index.read();
        let live: Vec<&[u8]> = index.range(.., index.head()).map(|(key, _)| key.as_slice()).collect();
        assert_eq!((live, index.compact_revision()), (vec![&b"b"[..], b"c"], Some(Revision(4))));
        assert!(shared.leases.lock().contains(LeaseId(7)));
        assert!(shared.space.check_not_corrupt().is_err(), "the alarm is raised");
        assert_eq!(shared.authority.get().state(), &auth);
        let left = Superseded { row: row(3), end: Revision(3) };
        assert_eq!(*shared.rows_left_to_others.lock(), [left]);
        assert_eq!(*shared.compaction_done.borrow(), Some(Revision(4)));
        assert!(shared.lease_deadline.notified().now_or_never().is_some());
    }
}

#[tokio::test]
async fn missing_revision_is_not_skipped() {
    let row = |revision| RowId::new(Revision(revision), 0);
    let shared = shared(0);
    let changes = [2, 3, 4].map(|revision| change(row(revision), &format!("k{revision}"), 1, None));
    assert_eq!(shared.log.append(Append::rows(Revision::EMPTY, &changes)).await.unwrap(), Appended::Done);
    // No compaction explains that the row is gone.
    let lost = Reclaim::Rows { rows: &[row(3)], compacted: Revision::EMPTY, server: 0 };
    shared.log.reclaim(lost).await.unwrap();
    let caught_up = shared.catch_up().await;
    assert!(matches!(caught_up, Err(Error::Corrupt(_))), "{caught_up:?}");
    assert_eq!(shared.index.read().head(), Revision::EMPTY);
}
