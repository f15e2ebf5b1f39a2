//! What a snapshot of etcd contains: the buckets, and the form of their keys and values.
//!
//! ```text
//!   auth       authEnabled, authRevision
//!   authRoles  name -> authpb.Role
//!   authUsers  name -> authpb.User
//!   key        revision -> mvccpb.KeyValue, one row for each change
//!   lease      ID -> leasepb.Lease
//!   meta       finishedCompactRev, scheduledCompactRev, storageVersion, and what etcd knows of its members
//! ```
//!
//! Numbers in keys are big-endian, so that they are in order. etcd's buckets for alarms, members and the version of the
//! cluster describe the cluster from which a snapshot comes. They are neither written nor read.

use bytes::Bytes;
use prost::Message as _;

use crate::{
    api::convert::{access, listed},
    load::{StoredRow, VERSION_MAX},
};
use orlop_core::{
    auth::{AuthState, Password, User},
    index::RowKind,
    lease::TTL_SECS_MAX,
    log::{LoggedLease, Meta},
    types::{Change, ChangeKind, EncodedKv, Key, KeyRange, LeaseId, Revision, RowId, Version, shown},
};
use orlop_wire::proto::{
    client::mvccpb,
    server::{authpb, leasepb},
};

pub(super) const AUTH: &str = "auth";
pub(super) const AUTH_ROLES: &str = "authRoles";
pub(super) const AUTH_USERS: &str = "authUsers";
pub(super) const KEY: &str = "key";
pub(super) const LEASE: &str = "lease";
pub(super) const META: &str = "meta";

const AUTH_ENABLED: &[u8] = b"authEnabled";
const AUTH_REVISION: &[u8] = b"authRevision";
/// The revision of the last compaction that is complete, and of the last one that was requested.
const COMPACTED: &[u8] = b"finishedCompactRev";
const COMPACTING: &[u8] = b"scheduledCompactRev";
/// The index of the last entry of etcd's WAL that the file has.
const APPLIED: &[u8] = b"consistent_index";
const STORAGE_VERSION: &[u8] = b"storageVersion";

/// Bytes of a row's key: the revision, `_`, and the number of the change. A `t` follows if it is a delete.
const ROW_BYTES: usize = 17;

/// A place for the content of a snapshot.
pub(super) trait Target {
    /// Begins the next bucket.
    fn bucket(&mut self, name: &'static str) -> Result<(), orlop_bolt::Unordered>;
    fn add(&mut self, key: Bytes, value: Bytes) -> Result<(), orlop_bolt::Unordered>;
}

/// Writes the buckets before that of the rows, and begins that one.
pub(super) fn begin(auth: &AuthState, target: &mut impl Target) -> Result<(), orlop_bolt::Unordered> {
    target.bucket(AUTH)?;
    target.add(Bytes::from_static(AUTH_ENABLED), vec![u8::from(auth.enabled)].into())?;
    target.add(Bytes::from_static(AUTH_REVISION), auth.revision.to_be_bytes().to_vec().into())?;
    target.bucket(AUTH_ROLES)?;
    for (name, permissions) in &auth.roles {
        let role = authpb::Role { name: name.clone().into(), key_permission: listed(permissions) };
        target.add(name.clone().into(), role.encode_to_vec().into())?;
    }
    target.bucket(AUTH_USERS)?;
    for (name, user) in &auth.users {
        target.add(name.clone().into(), stored_user(name, user).encode_to_vec().into())?;
    }
    target.bucket(KEY)
}

/// Writes rows, all of which are above those before.
pub(super) fn rows(changes: Vec<Change>, target: &mut impl Target) -> Result<(), orlop_bolt::Unordered> {
    for change in changes {
        let key = row_key(change.row, change.is_delete());
        let value = match change.kind {
            ChangeKind::Put { kv, .. } => kv.into_bytes(),
            ChangeKind::Delete => delete_value(&change.key),
        };
        target.add(key, value)?;
    }
    Ok(())
}

/// Returns the value of a delete's row.
pub(super) fn delete_value(key: &Key) -> Bytes {
    mvccpb::KeyValue { key: key.to_vec().into(), ..Default::default() }.encode_to_vec().into()
}

/// Writes the buckets of etcd after that of the rows.
pub(super) fn facts(
    meta: &Meta,
    storage_version: &'static str,
    target: &mut impl Target,
) -> Result<(), orlop_bolt::Unordered> {
    target.bucket(LEASE)?;
    let mut leases: Vec<&LoggedLease> = meta.leases.iter().collect();
    leases.sort_by_key(|lease| lease.id.0.cast_unsigned());
    for lease in leases {
        let stored = leasepb::Lease { id: lease.id.0, ttl: lease.ttl_secs, remaining_ttl: 0 };
        target.add(lease.id.0.to_be_bytes().to_vec().into(), stored.encode_to_vec().into())?;
    }
    target.bucket(META)?;
    if let Some(revision) = meta.compact_revision {
        let compacted = row_key(RowId::new(revision, 0), false);
        target.add(Bytes::from_static(COMPACTED), compacted.clone())?;
        target.add(Bytes::from_static(COMPACTING), compacted)?;
    }
    target.add(Bytes::from_static(STORAGE_VERSION), Bytes::from_static(storage_version.as_bytes()))
}

pub(super) fn row_key(row: RowId, is_delete: bool) -> Bytes {
    let mut key = Vec::with_capacity(ROW_BYTES + 1);
    key.extend(row.revision.0.to_be_bytes());
    key.push(b'_');
    key.extend(u64::from(row.sub).to_be_bytes());
    if is_delete {
        key.push(b't');
    }
    key.into()
}

fn stored_user(name: &str, user: &User) -> authpb::User {
    let (password, no_password) = match &user.password {
        Password::Hash(hash) => (hash.clone().into(), false),
        Password::None => (Bytes::new(), true),
    };
    authpb::User {
        name: name.to_owned().into(),
        password,
        roles: user.roles.iter().cloned().collect(),
        options: Some(authpb::UserAddOptions { no_password }),
    }
}

/// What the buckets other than that of the rows contain.
#[derive(Debug, Default)]
pub(super) struct Facts {
    pub(super) auth: AuthState,
    pub(super) leases: Vec<LoggedLease>,
    /// The compact revision as far as it is stated. Both of etcd's entries are taken: a compaction that was only
    /// requested goes on when etcd starts.
    pub(super) compacted: Option<Revision>,
    pub(super) storage_version: String,
    /// The last entry of the WAL that the file has, if it comes from a data directory.
    pub(super) applied: u64,
}

impl Facts {
    /// Takes an entry of a bucket. Entries that describe the old cluster, and unknown ones, are ignored.
    ///
    /// # Errors
    ///
    /// A text for the operator.
    pub(super) fn take(&mut self, bucket: &[u8], key: &[u8], value: &Bytes) -> Result<(), String> {
        let wrong = |what: &str| format!("the {what} \"{}\" is invalid", shown(key));
        match str::from_utf8(bucket) {
            Ok(AUTH) if key == AUTH_ENABLED => self.auth.enabled = value[..] == [1],
            Ok(AUTH) if key == AUTH_REVISION => {
                let revision = value.first_chunk().map(|chunk| u64::from_be_bytes(*chunk));
                // It is stored in a signed column.
                self.auth.revision = revision.filter(|it| i64::try_from(*it).is_ok()).ok_or_else(|| wrong("fact"))?;
            }
            Ok(AUTH_ROLES) => self.take_role(value).ok_or_else(|| wrong("role"))?,
            Ok(AUTH_USERS) => self.take_user(value).ok_or_else(|| wrong("user"))?,
            Ok(LEASE) => self.leases.push(lease(key, value).ok_or_else(|| wrong("lease"))?),
            Ok(META) if key == COMPACTED || key == COMPACTING => {
                let (row, _) = parse_row_key(value).ok_or_else(|| wrong("fact"))?;
                self.compacted = self.compacted.max(Some(row.revision));
            }
            Ok(META) if key == APPLIED => {
                self.applied =
                    value.first_chunk().map(|chunk| u64::from_be_bytes(*chunk)).ok_or_else(|| wrong("fact"))?;
            }
            Ok(META) if key == STORAGE_VERSION => {
                self.storage_version = String::from_utf8_lossy(value).into_owned();
            }
            Ok(_) | Err(_) => {}
        }
        Ok(())
    }

    fn take_role(&mut self, value: &Bytes) -> Option<()> {
        let role = authpb::Role::decode(value.clone()).ok()?;
        let permissions = role.key_permission.iter().map(|permission| {
            let range = KeyRange::from_wire(&permission.key, &permission.range_end);
            Some((range, access(permission.perm_type).ok()?))
        });
        let permissions = permissions.collect::<Option<_>>()?;
        self.auth.roles.insert(text(&role.name)?, permissions);
        Some(())
    }

    fn take_user(&mut self, value: &Bytes) -> Option<()> {
        let user = authpb::User::decode(value.clone()).ok()?;
        let password = match &user.password[..] {
            [] if user.options.is_some_and(|options| options.no_password) => Password::None,
            // The last change of the password was to an empty one.
            [] => Password::locked(),
            hash => Password::Hash(text(hash)?),
        };
        let name = text(&user.name)?;
        // Tokens of the old cluster are not valid in the new one, which signs them with another key.
        self.auth.users.insert(name, User { password, roles: user.roles.into_iter().collect(), tokens_from: 0 });
        Some(())
    }
}

fn text(bytes: &[u8]) -> Option<String> {
    String::from_utf8(bytes.to_vec()).ok()
}

/// Returns the lease of an entry, whose key is its ID. Keys are unique, so no ID occurs twice.
fn lease(key: &[u8], value: &Bytes) -> Option<LoggedLease> {
    let lease = leasepb::Lease::decode(value.clone()).ok()?;
    let id = LeaseId::from_wire(lease.id).filter(|id| key == id.0.to_be_bytes())?;
    let left_secs = (lease.remaining_ttl > 0).then_some(lease.remaining_ttl.min(TTL_SECS_MAX) as f64);
    Some(LoggedLease { id, ttl_secs: lease.ttl.clamp(1, TTL_SECS_MAX), left_secs })
}

/// Reads a row of the bucket `key`.
///
/// # Errors
///
/// A text for the operator.
pub(super) fn read_row(key: &[u8], value: &Bytes) -> Result<StoredRow, String> {
    let (row, pair) = decode_row(key, value)?;
    let change = pair.map(|(kv, is_delete)| change(row, is_delete, &kv));
    Ok(StoredRow { row, change })
}

/// Returns the key and the change that a pair of a row means.
fn change(row: RowId, is_delete: bool, kv: &mvccpb::KeyValue) -> (Key, ChangeKind) {
    let kind = if is_delete {
        ChangeKind::Delete
    } else {
        let version = Version { row, create_revision: Revision(kv.create_revision), version: kv.version };
        ChangeKind::put(EncodedKv::new(&kv.key, version, &kv.value, LeaseId::from_wire(kv.lease)))
    };
    (Key::from(&kv.key[..]), kind)
}

/// Like [`read_row`], without the value.
///
/// # Errors
///
/// The same.
pub(super) fn read_columns(key: &[u8], value: &Bytes) -> Result<(RowId, Option<(Key, RowKind)>), String> {
    let (row, pair) = decode_row(key, value)?;
    let columns = pair.map(|(kv, is_delete)| {
        let put = RowKind::Put { create_revision: Revision(kv.create_revision), version: kv.version };
        (Key::from(&kv.key[..]), if is_delete { RowKind::Delete } else { put })
    });
    Ok((row, columns))
}

/// Returns the row, its pair, and whether it is a delete; no pair: a revision without a change, which
/// `etcdutl snapshot restore --bump-revision` makes.
fn decode_row(key: &[u8], value: &Bytes) -> Result<(RowId, Option<(mvccpb::KeyValue, bool)>), String> {
    let wrong = || format!("the row \"{}\" is invalid", shown(key));
    let (row, is_delete) = parse_row_key(key).ok_or_else(wrong)?;
    if value.is_empty() {
        return Ok((row, None));
    }
    let kv = mvccpb::KeyValue::decode(value.clone()).map_err(|_| wrong())?;
    if !is_of(row, is_delete, &kv) {
        return Err(wrong());
    }
    Ok((row, Some((kv, is_delete))))
}

/// Returns whether a pair can be that of a row. The first revision is that of an empty store, which has no row.
fn is_of(row: RowId, is_delete: bool, kv: &mvccpb::KeyValue) -> bool {
    row.revision > Revision::EMPTY && (is_delete || kv.mod_revision == row.revision.0 && kv.version <= VERSION_MAX)
}

/// Returns the key and the change of an archived row; `None`: the pair is not that of the row.
pub(super) fn read_pair(row: RowId, is_delete: bool, kv: &mvccpb::KeyValue) -> Option<(Key, ChangeKind)> {
    is_of(row, is_delete, kv).then(|| change(row, is_delete, kv))
}

/// Returns the row of a key, and whether it is a delete.
pub(super) fn parse_row_key(key: &[u8]) -> Option<(RowId, bool)> {
    let is_delete = match (key.len(), key.last()) {
        (ROW_BYTES, _) => false,
        (len, Some(b't')) if len == ROW_BYTES + 1 => true,
        _ => return None,
    };
    let revision = i64::from_be_bytes(*key.first_chunk()?);
    let sub = u64::from_be_bytes(*key.get(9..)?.first_chunk()?);
    let sub = u32::try_from(sub).ok()?;
    (key[8] == b'_' && revision >= 0).then_some((RowId::new(Revision(revision), sub), is_delete))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_users_that_were_added_without_a_password_stay_without() {
        let password = |hash: &'static [u8], no_password| {
            let options = Some(authpb::UserAddOptions { no_password });
            let user = authpb::User { name: "u".into(), password: hash.into(), options, ..Default::default() };
            let mut facts = Facts::default();
            facts.take_user(&user.encode_to_vec().into()).expect("a user");
            facts.auth.users["u"].password.clone()
        };
        assert_eq!(password(b"", true), Password::None);
        assert_eq!(password(b"", false), Password::locked());
        assert_eq!(password(b"$2a$10$x", false), Password::Hash("$2a$10$x".to_owned()));
    }

    #[test]
    fn rows_that_no_store_has_are_refused() {
        for (revision, is_delete, mod_revision, version, is_sound) in [
            (2, false, 2, 1, true),
            (2, true, 0, 0, true),
            (2, false, 3, 1, false),
            // The next put of the key needs a higher version.
            (2, false, 2, VERSION_MAX, true),
            (2, false, 2, VERSION_MAX + 1, false),
            (2, false, 2, i64::MAX, false),
            // An empty store is at revision 1.
            (1, false, 1, 1, false),
            (1, true, 0, 0, false),
            (0, false, 0, 1, false),
        ] {
            let key = row_key(RowId::new(Revision(revision), 0), is_delete);
            let kv = mvccpb::KeyValue { key: "a".into(), mod_revision, version, ..Default::default() };
            let read = read_columns(&key, &kv.encode_to_vec().into());
            assert_eq!(read.is_ok(), is_sound, "{revision} {is_delete} {mod_revision} {version}: {read:?}");
        }
    }

    #[test]
    fn times_of_leases_are_within_their_bounds() {
        for (ttl, remaining_ttl, expected) in [
            (60, 0, (60, None)),
            (60, 40, (60, Some(40.0))),
            (-9, -9, (1, None)),
            (i64::MAX, i64::MAX, (TTL_SECS_MAX, Some(9e9))),
        ] {
            let stored = leasepb::Lease { id: 5, ttl, remaining_ttl };
            let lease = lease(&5_i64.to_be_bytes(), &stored.encode_to_vec().into()).expect("a lease");
            assert_eq!((lease.ttl_secs, lease.left_secs), expected, "{ttl} {remaining_ttl}");
        }
    }

    #[test]
    fn key_of_a_lease_is_its_id() {
        let stored: Bytes = leasepb::Lease { id: -5, ttl: 60, remaining_ttl: 0 }.encode_to_vec().into();
        for (key, is_sound) in [(&(-5_i64).to_be_bytes()[..], true), (&6_i64.to_be_bytes(), false), (&[], false)] {
            assert_eq!(lease(key, &stored).is_some(), is_sound, "{key:?}");
        }
    }
}
