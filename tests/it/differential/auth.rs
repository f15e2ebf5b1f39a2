//! Users and roles in a round: who sends an operation, and the operations of the Auth service.

use orlop_wire::proto::client::{
    authpb::{Permission, UserAddOptions},
    etcdserverpb::{
        AuthDisableRequest, AuthEnableRequest, AuthRoleAddRequest, AuthRoleDeleteRequest, AuthRoleGetRequest,
        AuthRoleGrantPermissionRequest, AuthRoleListRequest, AuthRoleRevokePermissionRequest, AuthStatusRequest,
        AuthUserAddRequest, AuthUserChangePasswordRequest, AuthUserDeleteRequest, AuthUserGetRequest,
        AuthUserGrantRoleRequest, AuthUserListRequest, AuthUserRevokeRoleRequest, ResponseHeader, request_op::Request,
    },
};
use tonic::Status;

use super::{
    generate::KEYS,
    op::{Answer, Op},
};
use crate::support::{Client, Random};

/// Who sends an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    Root,
    /// A user, with the token of the last login.
    User(&'static str),
    Nobody,
    /// A client with a token that no server gave.
    Forger,
}

pub const ROOT: &str = "root";
const USERS: [&str; 3] = ["u", "v", "w"];
const ROLES: [&str; 3] = ["r", "s", "root"];
pub const PASSWORDS: [&str; 2] = ["one", "two"];
/// An empty password is refused at a log-in after a change to it.
const CHANGED: [&str; 3] = ["one", "two", ""];

#[derive(Clone, Debug)]
pub enum AuthOp {
    Enable,
    Disable,
    Status,
    /// Logs in and uses the token from now on.
    LogIn {
        user: &'static str,
        password: &'static str,
    },
    UserAdd(AuthUserAddRequest),
    UserGet(AuthUserGetRequest),
    UserList,
    UserDelete(AuthUserDeleteRequest),
    ChangePassword(AuthUserChangePasswordRequest),
    GrantRole(AuthUserGrantRoleRequest),
    RevokeRole(AuthUserRevokeRoleRequest),
    RoleAdd(AuthRoleAddRequest),
    RoleGet(AuthRoleGetRequest),
    RoleList,
    RoleDelete(AuthRoleDeleteRequest),
    GrantPermission(AuthRoleGrantPermissionRequest),
    RevokePermission(AuthRoleRevokePermissionRequest),
}

/// Returns the operations with which a round with users begins: root has the role root, each user has a role, and Auth
/// is enabled.
pub fn first_ops() -> Vec<AuthOp> {
    let add = |name: &str, password: &str| {
        AuthOp::UserAdd(AuthUserAddRequest { name: name.into(), password: password.into(), ..Default::default() })
    };
    let grant =
        |user: &str, role: &str| AuthOp::GrantRole(AuthUserGrantRoleRequest { user: user.into(), role: role.into() });
    let mut ops = vec![add(ROOT, PASSWORDS[0]), grant(ROOT, ROOT)];
    for (user, role) in USERS.into_iter().zip(["r", "s", "r"]) {
        ops.extend([
            add(user, PASSWORDS[0]),
            AuthOp::RoleAdd(AuthRoleAddRequest { name: role.into() }),
            grant(user, role),
        ]);
    }
    ops.push(permission("r", b"a", b"b", 2));
    ops.push(permission("s", b"\0", b"\0", 0));
    ops.push(AuthOp::Enable);
    ops.extend(log_ins());
    ops
}

/// Returns the logins of all users with the first password.
pub fn log_ins() -> Vec<AuthOp> {
    [ROOT].into_iter().chain(USERS).map(|user| AuthOp::LogIn { user, password: PASSWORDS[0] }).collect()
}

fn permission(role: &str, key: &[u8], range_end: &[u8], perm_type: i32) -> AuthOp {
    let (key, range_end) = (key.to_vec().into(), range_end.to_vec().into());
    let perm = Some(Permission { perm_type, key, range_end });
    AuthOp::GrantPermission(AuthRoleGrantPermissionRequest { name: role.into(), perm })
}

pub fn draw_caller(random: &mut Random) -> Caller {
    match random.weighted(&[45, 50, 3, 2]) {
        0 => Caller::Root,
        1 => Caller::User(random.pick(&USERS)),
        2 => Caller::Nobody,
        _ => Caller::Forger,
    }
}

pub fn draw_op(random: &mut Random) -> AuthOp {
    let user = if random.chance(3) { ROOT } else { random.pick(&USERS) };
    let (role, name) = (random.pick(&ROLES).to_owned(), user.to_owned());
    let password = random.pick(&PASSWORDS);
    match random.weighted(&[2, 2, 5, 20, 4, 5, 3, 2, 4, 10, 8, 3, 4, 3, 2, 20, 12]) {
        0 => AuthOp::Enable,
        1 => AuthOp::Disable,
        2 => AuthOp::Status,
        3 => AuthOp::LogIn { user, password: random.pick(&CHANGED) },
        4 => {
            // Root must be able to log in, so that the round can go on.
            let options = (user != ROOT && random.chance(20)).then_some(UserAddOptions { no_password: true });
            let password = if user == ROOT { PASSWORDS[0] } else { password };
            AuthOp::UserAdd(AuthUserAddRequest { name, password: password.into(), options, ..Default::default() })
        }
        5 => AuthOp::UserGet(AuthUserGetRequest { name }),
        6 => AuthOp::UserList,
        7 => AuthOp::UserDelete(AuthUserDeleteRequest { name }),
        8 => AuthOp::ChangePassword(AuthUserChangePasswordRequest {
            name: random.pick(&USERS).to_owned(),
            password: random.pick(&CHANGED).into(),
            ..Default::default()
        }),
        9 => AuthOp::GrantRole(AuthUserGrantRoleRequest { user: name, role }),
        10 => AuthOp::RevokeRole(AuthUserRevokeRoleRequest { name, role }),
        11 => AuthOp::RoleAdd(AuthRoleAddRequest { name: role }),
        // etcd before 3.6 shows no permission of the role root.
        12 => AuthOp::RoleGet(AuthRoleGetRequest { role: random.pick(&["r", "s", "none"]).to_owned() }),
        13 => AuthOp::RoleList,
        14 => AuthOp::RoleDelete(AuthRoleDeleteRequest { role }),
        15 => {
            let key = random.pick(&KEYS);
            permission(&role, key, range_end(key, random), random.pick(&[0, 1, 2, 2]))
        }
        _ => {
            let key = random.pick(&KEYS);
            let (range_end, key) = (range_end(key, random).to_vec().into(), key.to_vec().into());
            AuthOp::RevokePermission(AuthRoleRevokePermissionRequest { role, key, range_end })
        }
    }
}

/// Returns the range end of a permission, one for each key: if a role has several permissions with the same key, a new
/// grant of one of them replaces it only sometimes in etcd. In a few cases the range is invalid.
fn range_end(key: &[u8], random: &mut Random) -> &'static [u8] {
    if random.chance(2) && key != b"\0" {
        return b"\0\0";
    }
    match key {
        b"\0" | b"b/1" => b"\0",
        b"a" => b"b",
        b"a/" => b"a0",
        b"b" => b"c",
        b"\xff" => b"\xff\xff\xff",
        _ => b"",
    }
}

/// Returns whether an operation of this caller must not be sent, because etcd before 3.6 permits it without a check, or
/// refuses it only sometimes, and it may change the store.
pub fn is_checked_differently(caller: Caller, op: &Op) -> bool {
    match op {
        _ if caller == Caller::Root => false,
        // If its put is refused, the lease remains.
        Op::Compact(_) | Op::GrantBriefly(_) => true,
        Op::Grant(_) | Op::Revoke { .. } => !matches!(caller, Caller::User(_)),
        Op::Txn(txn) => {
            txn.compare.iter().any(|compare| is_empty_range(&compare.key, &compare.range_end))
                || txn.success.iter().chain(&txn.failure).any(|op| match &op.request {
                    Some(Request::RequestTxn(_)) => true,
                    Some(Request::RequestPut(put)) => put.prev_kv || put.lease != 0,
                    Some(Request::RequestRange(range)) => is_empty_range(&range.key, &range.range_end),
                    Some(Request::RequestDeleteRange(delete)) => is_empty_range(&delete.key, &delete.range_end),
                    None => false,
                })
        }
        _ => false,
    }
}

/// Returns whether a range contains no key. etcd permits it or not depending on the shape of a tree of permissions.
pub fn is_empty_range(key: &[u8], range_end: &[u8]) -> bool {
    !range_end.is_empty() && range_end != b"\0" && key >= range_end
}

impl AuthOp {
    /// Sends the operation. Returns the answer, and the user with a new token.
    pub async fn send(self, client: &mut Client) -> Result<(Answer, Option<(&'static str, String)>), Status> {
        let Client { auth, .. } = client;
        /// The header of a response, and the rest of it.
        macro_rules! answer {
            ($call:expr) => {{
                let mut answer = $call.await?.into_inner();
                let header = answer.header.take();
                shown(header, &answer)
            }};
        }
        let answer = match self {
            Self::LogIn { user, password } => {
                let token = client.log_in(user, password).await?;
                return Ok((shown(None, &"logged in"), Some((user, token))));
            }
            Self::Enable => answer!(auth.auth_enable(AuthEnableRequest {})),
            Self::Disable => answer!(auth.auth_disable(AuthDisableRequest {})),
            Self::Status => answer!(auth.auth_status(AuthStatusRequest {})),
            Self::UserAdd(request) => answer!(auth.user_add(request)),
            Self::UserGet(request) => answer!(auth.user_get(request)),
            Self::UserList => answer!(auth.user_list(AuthUserListRequest {})),
            Self::UserDelete(request) => answer!(auth.user_delete(request)),
            Self::ChangePassword(request) => answer!(auth.user_change_password(request)),
            Self::GrantRole(request) => answer!(auth.user_grant_role(request)),
            Self::RevokeRole(request) => answer!(auth.user_revoke_role(request)),
            Self::RoleAdd(request) => answer!(auth.role_add(request)),
            Self::RoleGet(request) => answer!(auth.role_get(request)),
            Self::RoleList => answer!(auth.role_list(AuthRoleListRequest {})),
            Self::RoleDelete(request) => answer!(auth.role_delete(request)),
            Self::GrantPermission(request) => answer!(auth.role_grant_permission(request)),
            Self::RevokePermission(request) => answer!(auth.role_revoke_permission(request)),
        };
        Ok((answer, None))
    }
}

fn shown(header: Option<ResponseHeader>, rest: &impl std::fmt::Debug) -> Answer {
    Answer::Auth { header, rest: format!("{rest:?}") }
}
