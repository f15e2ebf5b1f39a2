use std::{ptr, sync::Arc};

use proptest::{
    collection::{btree_set, vec},
    prelude::*,
    sample::select,
};

use super::*;
use crate::types::Key;

fn key() -> impl Strategy<Value = Vec<u8>> {
    vec(select(vec![0_u8, b'a', b'b']), 0..3)
}

/// Ranges as on the wire, some of them empty.
fn range() -> impl Strategy<Value = KeyRange> {
    (key(), key()).prop_map(|(key, end)| KeyRange::from_wire(&key, &end))
}

/// Returns the keys at which a range starts and ends.
fn edges(range: &KeyRange) -> Vec<Vec<u8>> {
    match range {
        KeyRange::Single(key) => vec![key.to_vec(), [key, &[0][..]].concat()],
        KeyRange::Span { start, end } => {
            [Some(start), end.as_ref()].into_iter().flatten().map(|key| key.to_vec()).collect()
        }
    }
}

proptest! {
    /// Between two edges either all keys or none are permitted, so it suffices to look at the edges.
    #[test]
    fn set_contains_the_ranges_whose_keys_are_all_permitted(granted in vec(range(), 0..5), asked in range()) {
        prop_assume!(!asked.is_empty());
        let set: KeySet = granted.iter().collect();
        let is_permitted = |key: &Vec<u8>| granted.iter().any(|range| range.contains(key));
        let edges: Vec<Vec<u8>> = granted.iter().chain([&asked]).flat_map(edges).filter(|key| asked.contains(key)).collect();
        let is_endless = |range: &KeyRange| matches!(range, KeyRange::Span { end: None, .. });
        let expected = edges.iter().all(is_permitted) && (!is_endless(&asked) || granted.iter().any(is_endless));
        prop_assert_eq!(set.contains(&asked), expected, "{:?}", set);
    }

    #[test]
    fn keys_outside_a_set_are_in_none_of_its_ranges(granted in vec(range(), 0..5), keys in btree_set(key(), 0..8)) {
        let set: KeySet = granted.iter().collect();
        let keys: BTreeSet<Key> = keys.into_iter().map(Key::from).collect();
        let is_permitted = |key: &Key| granted.iter().any(|range| range.contains(key));
        let expected: Vec<&Key> = keys.iter().filter(|key| !is_permitted(key)).collect();
        prop_assert_eq!(set.outside(&keys).collect::<Vec<_>>(), expected, "{:?}", set);
    }
}

fn named(name: &str) -> String {
    name.to_owned()
}

fn add_user(user: &str) -> AuthChange {
    AuthChange::AddUser { user: named(user), password: Password::None }
}

fn grant_role(user: &str, role: &str) -> AuthChange {
    AuthChange::GrantRole { user: named(user), role: named(role) }
}

fn permission(role: &str, end: &str, access: Access) -> AuthChange {
    AuthChange::GrantPermission { role: named(role), range: KeyRange::from_wire(b"k", end.as_bytes()), access }
}

/// Each change with its outcome and the revision after it, in one sequence.
#[test]
fn changes_have_the_outcomes_of_etcd() {
    let role = |role: &str| AuthChange::AddRole { role: named(role) };
    let revoke = |role: &str, end: &str| AuthChange::RevokePermission {
        role: named(role),
        range: KeyRange::from_wire(b"k", end.as_bytes()),
    };
    let table = [
        (AuthChange::Enable, Err(Error::RootUserNotExist), 1),
        (add_user(""), Err(Error::UserEmpty), 1),
        (add_user(ROOT), Ok(true), 2),
        (add_user(ROOT), Err(Error::UserAlreadyExist), 2),
        (AuthChange::Enable, Err(Error::RootRoleNotExist), 2),
        (grant_role("nobody", ROOT), Err(Error::UserNotFound), 2),
        (grant_role(ROOT, "none"), Err(Error::RoleNotFound), 2),
        (grant_role(ROOT, ROOT), Ok(true), 3),
        (grant_role(ROOT, ROOT), Ok(false), 3),
        (AuthChange::Enable, Ok(true), 3),
        (AuthChange::Enable, Ok(false), 3),
        (AuthChange::DeleteUser { user: named(ROOT) }, Err(Error::InvalidAuthManagement), 3),
        (AuthChange::RevokeRole { user: named(ROOT), role: named(ROOT) }, Err(Error::InvalidAuthManagement), 3),
        (AuthChange::DeleteRole { role: named(ROOT) }, Err(Error::InvalidAuthManagement), 3),
        (role(""), Err(Error::RoleEmpty), 3),
        (role("r"), Ok(true), 4),
        (role("r"), Err(Error::RoleAlreadyExist), 4),
        (permission("none", "", Access::Read), Err(Error::RoleNotFound), 4),
        (permission("r", "a", Access::Read), Err(Error::InvalidAuthManagement), 4),
        (permission("r", "m", Access::Read), Ok(true), 5),
        (permission("r", "m", Access::Read), Ok(true), 6),
        (revoke("r", ""), Err(Error::PermissionNotGranted), 6),
        (revoke("r", "m"), Ok(true), 7),
        (add_user("u"), Ok(true), 8),
        (AuthChange::SetPassword { user: named("u"), password: Password::Hash(named("h")) }, Ok(true), 9),
        (AuthChange::RevokeRole { user: named("u"), role: named("r") }, Err(Error::RoleNotGranted), 9),
        (grant_role("u", "r"), Ok(true), 10),
        (AuthChange::DeleteRole { role: named("r") }, Ok(true), 11),
        (AuthChange::RevokeRole { user: named("u"), role: named("r") }, Err(Error::RoleNotGranted), 11),
        (AuthChange::DeleteUser { user: named("u") }, Ok(true), 12),
        (AuthChange::DeleteUser { user: named("u") }, Err(Error::UserNotFound), 12),
        (AuthChange::Disable, Ok(true), 13),
        (AuthChange::Disable, Ok(false), 13),
        (AuthChange::DeleteUser { user: named(ROOT) }, Ok(true), 14),
    ];
    let mut state = AuthState::default();
    for (change, outcome, revision) in table {
        assert_eq!((state.apply(&change), state.revision), (outcome, revision), "{change:?}");
    }
}

#[test]
fn users_with_the_same_roles_share_their_rights() {
    let mut state = AuthState::default();
    let changes = [
        vec![add_user(ROOT), grant_role(ROOT, ROOT), AuthChange::Enable],
        ["r", "s"].map(|role| AuthChange::AddRole { role: named(role) }).to_vec(),
        vec![permission("r", "m", Access::ReadWrite)],
        ["one", "two", "other"].map(add_user).to_vec(),
        vec![grant_role("one", "r"), grant_role("two", "r"), grant_role("other", "s")],
    ];
    for change in changes.concat() {
        assert!(state.apply(&change).is_ok(), "{change:?}");
    }
    let authority = Authority::from(state);
    let caller = |user| Caller::User(Arc::new(Identity { user: named(user), credential: Credential::Certificate }));
    let [one, two, other] = ["one", "two", "other"].map(|user| authority.rights(&caller(user)).expect("a user"));
    assert!(ptr::eq(one, two));
    assert_eq!([one, two, other].map(|rights| rights.check_write_key(b"k").is_ok()), [true, true, false]);
}
