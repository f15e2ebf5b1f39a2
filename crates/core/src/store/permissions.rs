//! Which rights a request needs, as in etcd.

use super::{
    request::{DeleteRequest, Op, PutLease, PutRequest, TxnRequest},
    write_request::Request,
};
use crate::{
    auth::{Authority, Caller, Error, Rights},
    types::{Key, LeaseId},
};

/// Checks a request of the writer. `lease_keys` returns the keys of a lease.
pub(super) fn check(
    authority: &Authority,
    caller: &Caller,
    request: &Request,
    lease_keys: impl Fn(LeaseId) -> Vec<Key>,
) -> Result<(), Error> {
    match request {
        Request::Put(put) => check_put(authority.rights(caller)?, put, &lease_keys),
        Request::Delete(delete) => check_delete(authority.rights(caller)?, delete),
        Request::Txn(txn) => check_txn(authority.rights(caller)?, txn, &lease_keys),
        Request::Grant { .. } => authority.check_user(caller),
        Request::Revoke(lease) => {
            authority.check_user(caller)?;
            let keys = lease_keys(*lease);
            if keys.is_empty() { Ok(()) } else { check_lease(authority.rights(caller)?, &keys) }
        }
        // A request of the server.
        Request::Expire(_) => Ok(()),
        Request::Compact(_) | Request::Alarm(_) | Request::Auth(_) => authority.check_root(caller),
    }
}

/// Checks every compare and every operation of both branches, also of nested transactions.
pub(super) fn check_txn(
    rights: &Rights,
    txn: &TxnRequest,
    lease_keys: &impl Fn(LeaseId) -> Vec<Key>,
) -> Result<(), Error> {
    if *rights == Rights::Root {
        return Ok(());
    }
    txn.compares.iter().try_for_each(|compare| rights.check_read(&compare.range))?;
    txn.success.iter().chain(&txn.failure).try_for_each(|op| match op {
        Op::Range(range) => rights.check_read(&range.range),
        Op::Put(put) => check_put(rights, put, lease_keys),
        Op::Delete(delete) => check_delete(rights, delete),
        Op::Txn(nested) => check_txn(rights, nested, lease_keys),
    })
}

fn check_put(rights: &Rights, put: &PutRequest, lease_keys: &impl Fn(LeaseId) -> Vec<Key>) -> Result<(), Error> {
    rights.check_write_key(&put.key)?;
    // The key would be deleted with the lease, so the caller must be able to revoke it.
    if let (PutLease::Set(Some(lease)), Rights::Keys { .. }) = (put.lease, rights) {
        check_lease(rights, &lease_keys(lease))?;
    }
    if put.prev_kv { rights.check_read_key(&put.key) } else { Ok(()) }
}

fn check_delete(rights: &Rights, delete: &DeleteRequest) -> Result<(), Error> {
    rights.check_write(&delete.range)?;
    if delete.prev_kv { rights.check_read(&delete.range) } else { Ok(()) }
}

fn check_lease(rights: &Rights, keys: &[Key]) -> Result<(), Error> {
    keys.iter().try_for_each(|key| rights.check_write_key(key))
}
