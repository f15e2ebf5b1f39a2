//! Users and roles in the database, in snapshots and in the log of the server.

use std::fs;

use orlop_wire::proto::client::etcdserverpb::{
    AuthRoleAddRequest, AuthRoleDeleteRequest, AuthRoleGetRequest, AuthRoleRevokePermissionRequest, AuthStatusRequest,
    AuthUserAddRequest, AuthUserChangePasswordRequest, AuthUserDeleteRequest, AuthUserGetRequest,
};
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _, SqliteConnection};
use tempfile::TempDir;
use tokio::time::timeout;
use tonic::Code;

use super::{
    CHEAP, DENIED, INVALID_TOKEN, act_as, add_role, add_user, check_refused, enable, get, grant_role, password, put,
};
use crate::{
    snapshot::{restored, save},
    support::{Backend, Client, DEADLINE, Postgres, Server, database_name, on_both_backends, prints, range},
};

/// Tables that a person can read, without passwords.
async fn users_and_roles_are_rows(backend: Backend) {
    const USERS: &str = "SELECT name || ' ' || substr(password, 1, 4) FROM auth_user ORDER BY 1";
    const ROLES: &str = "SELECT user_name || ' ' || role FROM auth_user_role ORDER BY 1";
    let Some(mut server) = Server::orlop_with(backend, &CHEAP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    server.terminate().await;
    let (users, roles): (Vec<String>, Vec<String>) = match backend {
        Backend::Sqlite => {
            let file = server.data_dir().join("orlop.db");
            let mut database =
                SqliteConnection::connect(&format!("sqlite://{}", file.display())).await.expect("a file");
            let mut texts =
                async |sql| database.fetch_all(sql).await.expect("rows").iter().map(|row| row.get(0)).collect();
            (texts(USERS).await, texts(ROLES).await)
        }
        Backend::Postgres => {
            let mut database =
                PgConnection::connect(server.datastore().expect("a database")).await.expect("a database");
            let mut texts =
                async |sql| database.fetch_all(sql).await.expect("rows").iter().map(|row| row.get(0)).collect();
            (texts(USERS).await, texts(ROLES).await)
        }
    };
    assert_eq!(users, ["root $2b$", "user $2b$"]);
    assert_eq!(roles, ["root root", "user role"]);
    server.restart().await;
    let mut client = Client::connect(server.endpoint()).await;
    check_refused(get(&mut client, "a").await, super::NOBODY, "Auth is enabled after a restart");
    let _ = act_as(&mut client, "user").await;
    put(&mut client, "a").await.expect("a permitted put");
    check_refused(put(&mut client, "x").await, DENIED, "rights are the same after a restart");
}

/// A start refuses roles of a user that does not exist, and permissions of such a role.
async fn deleted_users_and_roles_leave_nothing(backend: Backend) {
    let Some(mut server) = Server::orlop_with(backend, &CHEAP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for role in ["kept", "deleted"] {
        add_role(&mut client, role, "a", "b").await;
    }
    for user in ["kept", "deleted"] {
        add_user(&mut client, user).await;
        grant_role(&mut client, user, "kept").await;
        grant_role(&mut client, user, "deleted").await;
    }
    client.auth.user_delete(AuthUserDeleteRequest { name: "deleted".to_owned() }).await.expect("a user is deleted");
    client.auth.role_delete(AuthRoleDeleteRequest { role: "deleted".to_owned() }).await.expect("a role is deleted");
    server.terminate().await;
    server.restart().await;
    let mut client = Client::connect(server.endpoint()).await;
    add_user(&mut client, "deleted").await;
    client.auth.role_add(AuthRoleAddRequest { name: "deleted".to_owned() }).await.expect("a role");
    for (name, roles, permissions) in [("kept", &["kept".to_owned()][..], 1), ("deleted", &[], 0)] {
        let user = AuthUserGetRequest { name: name.to_owned() };
        assert_eq!(client.auth.user_get(user).await.expect("a user").into_inner().roles, roles, "{name}");
        let role = AuthRoleGetRequest { role: name.to_owned() };
        assert_eq!(client.auth.role_get(role).await.expect("a role").into_inner().perm.len(), permissions, "{name}");
    }
}

/// A snapshot has users and roles, and a store that was restored from it gives tokens of its own.
async fn snapshots_have_users_and_roles(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &CHEAP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    let token = act_as(&mut client, "root").await;
    let before = (
        client.auth.auth_status(AuthStatusRequest {}).await.expect("a status").into_inner().auth_revision,
        client.auth.user_get(AuthUserGetRequest { name: "user".to_owned() }).await.expect("a user").into_inner().roles,
        client.auth.role_get(AuthRoleGetRequest { role: "role".to_owned() }).await.expect("a role").into_inner().perm,
    );
    let folder = TempDir::new().expect("a folder");
    let file = save(&mut client, folder.path()).await;
    let bytes = fs::read(&file).expect("a file");
    assert!(!contains(&bytes, password("user").as_bytes()), "a password is in the snapshot");

    let Some(other) = restored(backend, &file, folder.path()).await else { return };
    let mut client = Client::connect(other.endpoint()).await;
    check_refused(get(&mut client, "a").await, super::NOBODY, "Auth is enabled");
    client.act_with(Some(&token));
    check_refused(get(&mut client, "a").await, INVALID_TOKEN, "a token of the first store");
    client.act_with(None);
    let _ = act_as(&mut client, "root").await;
    let after = (
        client.auth.auth_status(AuthStatusRequest {}).await.expect("a status").into_inner().auth_revision,
        client.auth.user_get(AuthUserGetRequest { name: "user".to_owned() }).await.expect("a user").into_inner().roles,
        client.auth.role_get(AuthRoleGetRequest { role: "role".to_owned() }).await.expect("a role").into_inner().perm,
    );
    assert_eq!(before, after);
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Not even the most detailed log has a password, a hash or a token.
async fn secrets_are_in_no_log(backend: Backend) {
    let flags = [&CHEAP[..], &["--log-level", "trace"]].concat();
    let Some(mut server) = Server::orlop_with(backend, &flags).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    let root = act_as(&mut client, "root").await;
    let change = AuthUserChangePasswordRequest {
        name: "user".to_owned(),
        password: "another secret".to_owned(),
        ..Default::default()
    };
    client.auth.user_change_password(change).await.expect("the password is changed");
    let twice =
        AuthUserAddRequest { name: "user".to_owned(), password: "third secret".to_owned(), ..Default::default() };
    client.auth.user_add(twice).await.expect_err("the user exists");
    client.log_in("user", "wrong secret").await.expect_err("a wrong password");
    put(&mut client, "a").await.expect("a put");
    client.act_with(Some("forged secret"));
    get(&mut client, "a").await.expect_err("a wrong token");
    // A line may be written after the response.
    server.terminate().await;
    let log = server.log();
    assert!(log.contains("invalid password"), "the log has the failed login: {log}");
    for secret in [&root, "secret", &password("root"), &password("user"), "$2b$"] {
        assert!(!log.contains(secret), "{secret} is in the log: {log}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_of_the_first_schema_gets_the_tables() {
    const WITHOUT_TABLES: &str = "DROP TABLE auth_user; DROP TABLE auth_role; DROP TABLE auth_user_role; \
        DROP TABLE auth_permission; DROP TABLE auth_token_key; DELETE FROM _sqlx_migrations WHERE version = 2";
    let mut server = Server::orlop_with(Backend::Sqlite, &CHEAP).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    put(&mut client, "a").await.expect("a put");
    server.terminate().await;
    let file = server.data_dir().join("orlop.db");
    let mut database = SqliteConnection::connect(&format!("sqlite://{}", file.display())).await.expect("a file");
    database.execute(WITHOUT_TABLES).await.expect("the statements");
    database.close().await.expect("the connection closes");
    // It can be checked as it is.
    prints(&["check", "--data-dir", server.data_dir().to_str().expect("text")]);
    server.restart().await;
    let mut client = Client::connect(server.endpoint()).await;
    get(&mut client, "a").await.expect("a get");
    enable(&mut client).await;
    let _ = act_as(&mut client, "user").await;
    get(&mut client, "a").await.expect("a get of a user");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_of_the_first_schema_gets_the_tables() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database_of_the_first_schema().await;
    let mut database = PgConnection::connect(&datastore).await.expect("the database exists");
    let insert = "INSERT INTO kv_log VALUES (2, 'a', 'v', 0, 1, 2, 0, false)";
    database.execute(insert).await.expect("a row");
    prints(&["check", "--datastore-endpoint", &datastore]);
    let server = Server::orlop_on(&datastore, &CHEAP).await;
    let mut client = Client::connect(server.endpoint()).await;
    assert_eq!(client.kv.range(range("a", "b")).await.expect("a range").into_inner().count, 1);
    enable(&mut client).await;
    let _ = act_as(&mut client, "user").await;
    put(&mut client, "a").await.expect("a put of a user");
}

/// A failed write of keys is repeated for 7 seconds, during which all other writes wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_that_postgres_refuses_delays_no_write() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let database = database_name(&datastore);
    let server = Server::orlop_on(&datastore, &CHEAP).await;
    let mut client = Client::connect(server.endpoint()).await;
    let constraint = format!("ALTER TABLE {database}.auth_user ADD CONSTRAINT short CHECK (name <> 'long')");
    postgres.psql(database, &constraint);

    let user = AuthUserAddRequest { name: "long".to_owned(), password: password("long"), ..Default::default() };
    let added = timeout(DEADLINE, client.auth.user_add(user)).await.expect("an answer");
    let status = added.expect_err("the table does not accept this name");
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    assert!(status.message().starts_with("orlop: the database refused the request: "), "{status:?}");
    assert!(status.message().contains("check constraint \"short\""), "{status:?}");
    timeout(DEADLINE, put(&mut client, "a")).await.expect("an answer").expect("a put");
    add_user(&mut client, "short").await;
    // A write that is repeated is logged.
    let log = server.log();
    assert!(!log.contains("the database accepts"), "it is no outage: {log}");
}

/// Postgres refuses to delete from a published table whose rows it cannot identify at a subscriber.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permission_is_revoked_while_all_tables_are_published() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let server = Server::orlop_on(&datastore, &CHEAP).await;
    let mut client = Client::connect(server.endpoint()).await;
    postgres.psql(database_name(&datastore), "CREATE PUBLICATION everything FOR ALL TABLES");
    add_role(&mut client, "role", "a", "b").await;
    let revoke = AuthRoleRevokePermissionRequest { role: "role".to_owned(), key: "a".into(), range_end: "b".into() };
    client.auth.role_revoke_permission(revoke).await.expect("the permission is revoked");
    let role = AuthRoleGetRequest { role: "role".to_owned() };
    assert!(client.auth.role_get(role).await.expect("the role").into_inner().perm.is_empty());
}

on_both_backends!(
    users_and_roles_are_rows,
    deleted_users_and_roles_leave_nothing,
    snapshots_have_users_and_roles,
    secrets_are_in_no_log,
);
