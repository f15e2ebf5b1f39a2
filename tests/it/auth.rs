//! Users and roles: what every call requires, tokens, and attacks. The differential test compares them with etcd.

mod attacks;
mod calls;
mod certificates;
mod patroni;
mod stored;
mod tokens;

use orlop_wire::proto::client::{
    authpb::Permission,
    etcdserverpb::{
        AuthEnableRequest, AuthRoleAddRequest, AuthRoleGrantPermissionRequest, AuthUserAddRequest,
        AuthUserGrantRoleRequest,
    },
};
use tonic::{Code, Status};

use crate::support::{self, Client};

/// Checks of passwords take long on purpose; most tests do not need that.
pub const CHEAP: [&str; 2] = ["--bcrypt-cost", "4"];

const DENIED: (Code, &str) = (Code::PermissionDenied, "etcdserver: permission denied");
const INVALID_TOKEN: (Code, &str) = (Code::Unauthenticated, "etcdserver: invalid auth token");
const NOBODY: (Code, &str) = (Code::InvalidArgument, "etcdserver: user name is empty");
const OLD_REVISION: (Code, &str) = (Code::InvalidArgument, "etcdserver: revision of auth store is old");

/// Adds a user with the password `NAME's password`.
async fn add_user(client: &mut Client, name: &str) {
    let user = AuthUserAddRequest { name: name.to_owned(), password: password(name), ..Default::default() };
    client.auth.user_add(user).await.expect("a user");
}

pub fn password(user: &str) -> String {
    format!("{user}'s password")
}

async fn grant_role(client: &mut Client, user: &str, role: &str) {
    let grant = AuthUserGrantRoleRequest { user: user.to_owned(), role: role.to_owned() };
    client.auth.user_grant_role(grant).await.expect("a grant");
}

/// Adds a role that may read and write a range.
async fn add_role(client: &mut Client, role: &str, key: &str, range_end: &str) {
    client.auth.role_add(AuthRoleAddRequest { name: role.to_owned() }).await.expect("a role");
    let perm = Permission { perm_type: 2, key: key.to_owned().into(), range_end: range_end.to_owned().into() };
    let grant = AuthRoleGrantPermissionRequest { name: role.to_owned(), perm: Some(perm) };
    client.auth.role_grant_permission(grant).await.expect("a permission");
}

/// Adds root and the user `user`, who may read and write keys that begin with `a`, and enables Auth.
pub async fn enable(client: &mut Client) {
    add_user(client, "root").await;
    grant_role(client, "root", "root").await;
    add_role(client, "role", "a", "b").await;
    add_user(client, "user").await;
    grant_role(client, "user", "role").await;
    client.auth.auth_enable(AuthEnableRequest {}).await.expect("Auth is enabled");
}

/// Logs in and acts as the user from now on.
pub async fn act_as(client: &mut Client, user: &str) -> String {
    let token = client.log_in(user, &password(user)).await.expect("a login");
    client.act_with(Some(&token));
    token
}

async fn get(client: &mut Client, key: &str) -> Result<(), Status> {
    client.kv.range(support::get(key)).await.map(drop)
}

async fn put(client: &mut Client, key: &str) -> Result<(), Status> {
    client.kv.put(support::put(key, "v")).await.map(drop)
}

/// Checks that a call was refused with this code and text.
#[track_caller]
fn check_refused<T>(outcome: Result<T, Status>, (code, text): (Code, &str), what: &str) {
    match outcome {
        Ok(_) => panic!("{what}: served, expected {text:?}"),
        Err(status) => assert_eq!((status.code(), status.message()), (code, text), "{what}"),
    }
}
