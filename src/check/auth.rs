//! Checks of users and roles.

use super::{Findings, Location};
use orlop_core::auth::{AuthState, Password, ROOT, is_permission};

const USERS: &str = "auth_user";
const ROLES: &str = "auth_role";
const PERMISSIONS: &str = "auth_permission";
/// Length of a bcrypt hash.
const HASH_BYTES: usize = 60;

/// Checks what cannot be the result of requests.
pub(super) fn check(state: &AuthState, findings: &mut Findings) {
    let location = |name: &str| Some(Location::Fact(name.to_owned()));
    for (name, user) in &state.users {
        if user.tokens_from > state.revision {
            let what =
                format!("tokens_from is {}, expected at most {}, the auth revision", user.tokens_from, state.revision);
            findings.add(USERS, location(name), what);
        }
        if let Password::Hash(hash) = &user.password
            && !(hash.len() == HASH_BYTES && hash.starts_with("$2"))
        {
            findings.add(USERS, location(name), "password is not a bcrypt hash");
        }
        for role in user.roles.iter().filter(|role| *role != ROOT && !state.roles.contains_key(*role)) {
            findings.add("auth_user_role", location(name), format!("the role {role:?} does not exist"));
        }
    }
    for (table, names) in [(USERS, state.users.keys().collect::<Vec<_>>()), (ROLES, state.roles.keys().collect())] {
        if names.iter().any(|name| name.is_empty()) {
            findings.add(table, location(""), "name is empty, expected a name");
        }
    }
    for (role, permissions) in &state.roles {
        for range in permissions.keys().filter(|range| !is_permission(range)) {
            findings.add(PERMISSIONS, location(role), format!("the range {range:?} contains no key"));
        }
    }
    let has_root = state.users.get(ROOT).is_some_and(|root| root.roles.contains(ROOT));
    if state.enabled && !has_root {
        findings.add(USERS, location(ROOT), "Auth is enabled, expected a user root with the role root");
    }
}
