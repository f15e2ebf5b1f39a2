//! Which rights a request needs, as in etcd.

use std::collections::BTreeSet;

use super::{
    request::{DeleteRequest, Op, PutLease, PutRequest, TxnRequest},
    write_request::Request,
};
use crate::{
    auth::{Authority, Caller, Error, KeySet, Rights},
    types::LeaseId,
};

/// The leases that a request sets.
type Leases = BTreeSet<LeaseId>;

/// Checks a request of the writer. `has_key_outside` returns whether a lease has a key that is not in the set.
pub(super) fn check(
    authority: &Authority,
    caller: &Caller,
    request: &Request,
    has_key_outside: impl Fn(LeaseId, &KeySet) -> bool,
) -> Result<(), Error> {
    // A key is deleted with its lease, so a caller that sets a lease must be able to revoke it.
    let check_leases = |rights: &Rights, leases: &Leases| match rights {
        Rights::Keys { write, .. } if leases.iter().any(|lease| has_key_outside(*lease, write)) => {
            Err(Error::PermissionDenied)
        }
        Rights::Root | Rights::Keys { .. } => Ok(()),
    };
    match request {
        Request::Put(put) => {
            let (rights, mut leases) = (authority.rights(caller)?, Leases::new());
            check_put(rights, put, &mut leases)?;
            check_leases(rights, &leases)
        }
        Request::Delete(delete) => check_delete(authority.rights(caller)?, delete),
        Request::Txn(txn) => {
            let (rights, mut leases) = (authority.rights(caller)?, Leases::new());
            check_txn(rights, txn, &mut leases)?;
            check_leases(rights, &leases)
        }
        Request::Grant { .. } => authority.check_user(caller),
        Request::Revoke(lease) => {
            authority.check_user(caller)?;
            let has_keys = has_key_outside(*lease, &KeySet::default());
            if has_keys { check_leases(authority.rights(caller)?, &Leases::from([*lease])) } else { Ok(()) }
        }
        // A request of the server.
        Request::Expire(_) => Ok(()),
        Request::Compact(_) | Request::Alarm(_) | Request::Auth(_) => authority.check_root(caller),
    }
}

/// Checks a read-only transaction, which sets no lease.
pub(super) fn check_read_txn(rights: &Rights, txn: &TxnRequest) -> Result<(), Error> {
    check_txn(rights, txn, &mut Leases::new())
}

/// Checks every compare and every operation of both branches, also of nested transactions. Adds the leases that puts set
/// to `leases`.
fn check_txn(rights: &Rights, txn: &TxnRequest, leases: &mut Leases) -> Result<(), Error> {
    if *rights == Rights::Root {
        return Ok(());
    }
    txn.compares.iter().try_for_each(|compare| rights.check_read(&compare.range))?;
    txn.success.iter().chain(&txn.failure).try_for_each(|op| match op {
        Op::Range(range) => rights.check_read(&range.range),
        Op::Put(put) => check_put(rights, put, leases),
        Op::Delete(delete) => check_delete(rights, delete),
        Op::Txn(nested) => check_txn(rights, nested, leases),
    })
}

/// Checks a put, and adds the lease that it sets to `leases`.
fn check_put(rights: &Rights, put: &PutRequest, leases: &mut Leases) -> Result<(), Error> {
    rights.check_write_key(&put.key)?;
    if let PutLease::Set(Some(lease)) = put.lease {
        leases.insert(lease);
    }
    if put.prev_kv { rights.check_read_key(&put.key) } else { Ok(()) }
}

fn check_delete(rights: &Rights, delete: &DeleteRequest) -> Result<(), Error> {
    rights.check_write(&delete.range)?;
    if delete.prev_kv { rights.check_read(&delete.range) } else { Ok(()) }
}
