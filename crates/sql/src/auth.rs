//! Users and roles in the tables of both databases, with the same SQL.

use orlop_core::{
    auth::{Access, AuthChange, AuthState, Password, User},
    log::{AuthAppend, Error, Result},
    types::KeyRange,
};

/// Reads users and roles as rows of [`AuthRow`].
pub(super) const SELECT: &str = "SELECT 'fact' AS kind, name AS name, CAST(NULL AS text) AS other, \
        CAST(NULL AS bytea) AS key, CAST(NULL AS bytea) AS range_end, value AS number FROM meta WHERE name LIKE 'auth/_%' ESCAPE '/' \
    UNION ALL SELECT 'role', name, NULL, NULL, NULL, NULL FROM auth_role \
    UNION ALL SELECT 'user', name, password, NULL, NULL, tokens_from FROM auth_user \
    UNION ALL SELECT 'user_role', user_name, role, NULL, NULL, NULL FROM auth_user_role \
    UNION ALL SELECT 'permission', role, access, key, range_end, NULL FROM auth_permission";
/// Reads the key that signs tokens.
pub(super) const SELECT_TOKEN_KEY: &str = "SELECT key FROM auth_token_key";
/// The migration that created the tables.
pub(super) const SCHEMA: i64 = 2;

/// A row of [`SELECT`], which reads everything in one statement, so that it is consistent.
pub(super) type AuthRow = (String, String, Option<String>, Option<Vec<u8>>, Option<Vec<u8>>, Option<i64>);

/// Names of facts in the table meta.
const ENABLED: &str = "auth_enabled";
const REVISION: &str = "auth_revision";

/// Builds the state from rows in any order.
pub(super) fn state(rows: Vec<AuthRow>) -> Result<AuthState> {
    let mut state = AuthState::default();
    let (mut granted, mut permissions) = (Vec::new(), Vec::new());
    for (kind, name, other, key, range_end, number) in rows {
        match (kind.as_str(), other, key, range_end, number) {
            ("fact", None, None, None, Some(value)) => set_fact(&mut state, &name, value)?,
            ("role", None, None, None, None) => drop(state.roles.entry(name).or_default()),
            ("user", password, None, None, Some(tokens_from)) => {
                let password = password.map_or(Password::None, Password::Hash);
                let tokens_from = unsigned(tokens_from)?;
                state.users.insert(name, User { password, roles: Default::default(), tokens_from });
            }
            ("user_role", Some(role), None, None, None) => granted.push((name, role)),
            ("permission", Some(access), Some(key), Some(range_end), None) => {
                permissions.push((name, KeyRange::from_wire(&key, &range_end), access_of(&access)?));
            }
            (kind, ..) => {
                return Err(Error::Corrupt(format!("a row of the {kind} {name} in the tables of Auth is invalid")));
            }
        }
    }
    for (user, role) in granted {
        let found = state.users.get_mut(&user);
        let missing = || Error::Corrupt(format!("auth_user_role has the user {user}, auth_user does not"));
        found.ok_or_else(missing)?.roles.insert(role);
    }
    for (role, range, access) in permissions {
        let found = state.roles.get_mut(&role);
        let missing = || Error::Corrupt(format!("auth_permission has the role {role}, auth_role does not"));
        found.ok_or_else(missing)?.insert(range, access);
    }
    Ok(state)
}

/// Sets the state's fact with this name, if it is one of users and roles.
pub(super) fn set_fact(state: &mut AuthState, name: &str, value: i64) -> Result<()> {
    match name {
        ENABLED => state.enabled = value != 0,
        REVISION => state.revision = unsigned(value)?,
        _ => {}
    }
    Ok(())
}

fn unsigned(number: i64) -> Result<u64> {
    u64::try_from(number).map_err(|_| Error::Corrupt(format!("the auth revision {number} is negative")))
}

const ACCESSES: [(Access, &str); 3] =
    [(Access::Read, "read"), (Access::Write, "write"), (Access::ReadWrite, "readwrite")];

fn access_of(text: &str) -> Result<Access> {
    let found = ACCESSES.iter().find(|(_, name)| *name == text).map(|(access, _)| *access);
    found.ok_or_else(|| {
        Error::Corrupt(format!("a permission has the access {text:?}, expected read, write or readwrite"))
    })
}

fn name_of(access: Access) -> &'static str {
    ACCESSES.iter().find(|(known, _)| *known == access).map_or("", |(_, name)| name)
}

/// A parameter of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Param<'a> {
    Text(&'a str),
    MaybeText(Option<&'a str>),
    Bytes(&'a [u8]),
    Int(i64),
}

/// A statement for both databases, with parameters `$1`, `$2`, ...
pub(super) type Statement<'a> = (&'static str, Vec<Param<'a>>);

const SET_FACT: &str =
    "INSERT INTO meta (name, value) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = excluded.value";
const ADD_USER: &str = "INSERT INTO auth_user (name, password, tokens_from) VALUES ($1, $2, $3)";
const GRANT_ROLE: &str = "INSERT INTO auth_user_role (user_name, role) VALUES ($1, $2)";
const ADD_ROLE: &str = "INSERT INTO auth_role (name) VALUES ($1)";
const GRANT_PERMISSION: &str = "INSERT INTO auth_permission (role, key, range_end, access) VALUES ($1, $2, $3, $4)";
const REVOKE_PERMISSION: &str = "DELETE FROM auth_permission WHERE role = $1 AND key = $2 AND range_end = $3";

/// Returns the statements of a change.
pub(super) fn change(AuthAppend { change, next }: AuthAppend<'_>) -> Vec<Statement<'_>> {
    use Param::{Int, Text};
    let user_row = |name: &str| next.users.get(name).map(user_params);
    let mut statements = facts(next);
    match change {
        AuthChange::Enable => {}
        AuthChange::Disable => {
            statements.push(("UPDATE auth_user SET tokens_from = $1", vec![Int(signed(next.revision))]));
        }
        AuthChange::AddUser { user, .. } => {
            statements.extend(user_row(user).map(|[password, from]| (ADD_USER, vec![Text(user), password, from])));
        }
        AuthChange::SetPassword { user, .. } => {
            const SET: &str = "UPDATE auth_user SET password = $2, tokens_from = $3 WHERE name = $1";
            statements.extend(user_row(user).map(|[password, from]| (SET, vec![Text(user), password, from])));
        }
        AuthChange::DeleteUser { user } => {
            statements.push(("DELETE FROM auth_user_role WHERE user_name = $1", vec![Text(user)]));
            statements.push(("DELETE FROM auth_user WHERE name = $1", vec![Text(user)]));
        }
        AuthChange::GrantRole { user, role } => statements.push((GRANT_ROLE, vec![Text(user), Text(role)])),
        AuthChange::RevokeRole { user, role } => {
            const REVOKE: &str = "DELETE FROM auth_user_role WHERE user_name = $1 AND role = $2";
            statements.push((REVOKE, vec![Text(user), Text(role)]));
        }
        AuthChange::AddRole { role } => statements.push((ADD_ROLE, vec![Text(role)])),
        AuthChange::DeleteRole { role } => {
            statements.push(("DELETE FROM auth_user_role WHERE role = $1", vec![Text(role)]));
            statements.push(("DELETE FROM auth_permission WHERE role = $1", vec![Text(role)]));
            statements.push(("DELETE FROM auth_role WHERE name = $1", vec![Text(role)]));
        }
        AuthChange::GrantPermission { role, range, access } => {
            statements.push(revoke_permission(role, range));
            statements.push(grant_permission(role, range, *access));
        }
        AuthChange::RevokePermission { role, range } => statements.push(revoke_permission(role, range)),
    }
    statements
}

/// Returns the statements that add a whole state to empty tables.
pub(super) fn all(state: &AuthState) -> Vec<Statement<'_>> {
    if *state == AuthState::default() {
        return Vec::new();
    }
    let mut statements = facts(state);
    for (role, permissions) in &state.roles {
        statements.push((ADD_ROLE, vec![Param::Text(role)]));
        statements.extend(permissions.iter().map(|(range, access)| grant_permission(role, range, *access)));
    }
    for (name, user) in &state.users {
        let [password, tokens_from] = user_params(user);
        statements.push((ADD_USER, vec![Param::Text(name), password, tokens_from]));
        statements.extend(user.roles.iter().map(|role| (GRANT_ROLE, vec![Param::Text(name), Param::Text(role)])));
    }
    statements
}

fn facts(state: &AuthState) -> Vec<Statement<'_>> {
    let fact = |name, value| (SET_FACT, vec![Param::Text(name), Param::Int(value)]);
    vec![fact(ENABLED, i64::from(state.enabled)), fact(REVISION, signed(state.revision))]
}

fn user_params(user: &User) -> [Param<'_>; 2] {
    let password = match &user.password {
        Password::Hash(hash) => Some(hash.as_str()),
        Password::None => None,
    };
    [Param::MaybeText(password), Param::Int(signed(user.tokens_from))]
}

fn grant_permission<'a>(role: &'a str, range: &'a KeyRange, access: Access) -> Statement<'a> {
    let [key, end] = range_params(range);
    (GRANT_PERMISSION, vec![Param::Text(role), key, end, Param::Text(name_of(access))])
}

fn revoke_permission<'a>(role: &'a str, range: &'a KeyRange) -> Statement<'a> {
    let [key, end] = range_params(range);
    (REVOKE_PERMISSION, vec![Param::Text(role), key, end])
}

fn range_params(range: &KeyRange) -> [Param<'_>; 2] {
    let (key, end) = range.to_wire();
    [Param::Bytes(key), Param::Bytes(end)]
}

/// An auth revision is a count, and stays below 2^63.
fn signed(revision: u64) -> i64 {
    i64::try_from(revision).unwrap_or(i64::MAX)
}

/// Binds the parameters of a statement.
macro_rules! bind_params {
    ($statement:expr) => {{
        let (sql, params) = $statement;
        params.into_iter().fold(sqlx::query(sql), |query, param| match param {
            crate::auth::Param::Text(text) => query.bind(text),
            crate::auth::Param::MaybeText(text) => query.bind(text),
            crate::auth::Param::Bytes(bytes) => query.bind(bytes),
            crate::auth::Param::Int(number) => query.bind(number),
        })
    }};
}
pub(super) use bind_params;
