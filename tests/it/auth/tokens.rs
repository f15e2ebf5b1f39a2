//! Tokens: how long they are good, where, and which signatures are accepted.

use std::{fs, path::Path, process::Command, time::Duration};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD as BASE64};
use orlop_wire::proto::client::{
    authpb::UserAddOptions,
    etcdserverpb::{
        AlarmRequest, AuthDisableRequest, AuthEnableRequest, AuthRoleRevokePermissionRequest, AuthUserAddRequest,
        AuthUserChangePasswordRequest, AuthUserDeleteRequest,
    },
    orlopb::{HistoryMomentRequest, HistoryStateRequest},
};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};
use tonic::{Code, Status};

use super::{
    CHEAP, DENIED, INVALID_TOKEN, OLD_REVISION, act_as, add_user, check_refused, enable, get, grant_role, password, put,
};
use crate::{
    start,
    support::{Backend, Client, Postgres, Server, eventually, on_both_backends, skip},
};

/// A change of users or roles is in force everywhere as soon as it was acknowledged.
async fn changes_are_in_force_at_once_at_every_instance(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &CHEAP).await else { return };
    let other = match server.datastore().filter(|_| backend == Backend::Postgres) {
        Some(datastore) => Some(Server::orlop_on(datastore, &[&CHEAP[..], &["--name", "other"]].concat()).await),
        None => None,
    };
    let mut root = Client::connect(server.endpoint()).await;
    let mut user = Client::connect(other.as_ref().unwrap_or(&server).endpoint()).await;
    enable(&mut root).await;
    check_refused(put(&mut user, "a").await, super::NOBODY, "Auth was enabled");
    let _ = act_as(&mut root, "root").await;

    let token = root.log_in("user", &password("user")).await.expect("a login");
    user.act_with(Some(&token));
    for key in ["a", "a1"] {
        put(&mut user, key).await.expect("a permitted put");
        get(&mut user, key).await.expect("a permitted get");
    }
    let revoke = AuthRoleRevokePermissionRequest { role: "role".to_owned(), key: "a".into(), range_end: "b".into() };
    root.auth.role_revoke_permission(revoke).await.expect("a permission is revoked");
    check_refused(get(&mut user, "a").await, DENIED, "a get after the permission was revoked");
    check_refused(put(&mut user, "a").await, DENIED, "a put after the permission was revoked");
    grant_role(&mut root, "user", "root").await;
    get(&mut user, "a").await.expect("the role root permits everything");

    let change =
        AuthUserChangePasswordRequest { name: "user".to_owned(), password: "new".to_owned(), ..Default::default() };
    root.auth.user_change_password(change).await.expect("the password is changed");
    check_refused(get(&mut user, "a").await, INVALID_TOKEN, "a get after the password was changed");
    let failed = (Code::InvalidArgument, "etcdserver: authentication failed, invalid user ID or password");
    check_refused(user.log_in("user", &password("user")).await, failed, "the old password");
    let token = user.log_in("user", "new").await.expect("a login with the new password");
    user.act_with(Some(&token));
    get(&mut user, "a").await.expect("a get with the new token");

    root.auth.user_delete(AuthUserDeleteRequest { name: "user".to_owned() }).await.expect("the user is deleted");
    check_refused(get(&mut user, "a").await, INVALID_TOKEN, "a get after the user was deleted");
    // A new user of the same name is another one.
    add_user(&mut root, "user").await;
    grant_role(&mut root, "user", "root").await;
    check_refused(put(&mut user, "a").await, INVALID_TOKEN, "a put with the token of the deleted user");

    let _ = act_as(&mut user, "user").await;
    root.auth.auth_disable(AuthDisableRequest {}).await.expect("Auth is disabled");
    get(&mut user, "a").await.expect("tokens are ignored");
    root.auth.auth_enable(AuthEnableRequest {}).await.expect("Auth is enabled");
    check_refused(get(&mut user, "a").await, INVALID_TOKEN, "a get with a token from before Auth was disabled");
}

/// Sends a call that every user may send, and that reads no keys.
async fn send(client: &mut Client, call: &str) -> Result<(), Status> {
    match call {
        "alarms" => client.maintenance.alarm(AlarmRequest::default()).await.map(drop),
        "state" => client.history.state(HistoryStateRequest {}).await.map(drop),
        "moment" => client.history.moment(HistoryMomentRequest { unix_ms: 1 }).await.map(drop),
        _ => panic!("{call}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_user_is_refused_at_once_by_calls_that_need_no_right() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let one = Server::orlop_on(&datastore, &[&CHEAP[..], &["--name", "one"]].concat()).await;
    let two = Server::orlop_on(&datastore, &[&CHEAP[..], &["--name", "two"]].concat()).await;
    let (mut root, mut user) = (Client::connect(one.endpoint()).await, Client::connect(two.endpoint()).await);
    enable(&mut root).await;
    let _ = act_as(&mut root, "root").await;
    for round in 0..20 {
        for call in ["alarms", "state", "moment"] {
            let name = format!("{call} {round}");
            add_user(&mut root, &name).await;
            let _ = act_as(&mut user, &name).await;
            send(&mut user, call).await.expect("every user may send it");
            root.auth.user_delete(AuthUserDeleteRequest { name: name.clone() }).await.expect("the user is deleted");
            check_refused(send(&mut user, call).await, INVALID_TOKEN, &name);
        }
    }
}

/// The check of a password takes long on purpose.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn login_gives_no_token_for_a_user_that_is_replaced_during_the_check() {
    const LOGINS: &str = "grpc_server_started_total{grpc_method=\"Authenticate\",grpc_service=\"etcdserverpb.Auth\",\
        grpc_type=\"unary\"}";
    let flags = ["--bcrypt-cost", "12"];
    let server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is always there");
    let mut root = Client::connect(server.endpoint()).await;
    enable(&mut root).await;
    act_as(&mut root, "root").await;
    let earlier_logins = server.metric(LOGINS).await;
    let mut user = Client::connect(server.endpoint()).await;
    let mut caller = user.clone();
    let login = tokio::spawn(async move { caller.log_in("user", &password("user")).await });
    eventually("the login", async || {
        let logins = server.metric(LOGINS).await;
        if logins > earlier_logins { Ok(()) } else { Err(logins) }
    })
    .await;
    root.auth.user_delete(AuthUserDeleteRequest { name: "user".to_owned() }).await.expect("the user is deleted");
    let options = Some(UserAddOptions { no_password: true });
    let new = AuthUserAddRequest { name: "user".to_owned(), options, ..Default::default() };
    root.auth.user_add(new).await.expect("a user");
    grant_role(&mut root, "user", "root").await;
    // If the check ended before the user was deleted, the token is one of that user.
    if let Ok(token) = login.await.expect("the login ends") {
        user.act_with(Some(&token));
        check_refused(put(&mut user, "a").await, INVALID_TOKEN, "a put with the token of the replaced user");
    }
}

/// As in etcd, each use of a simple token extends its life.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simple_tokens_expire_when_they_are_not_used() {
    let flags = [&CHEAP[..], &["--auth-token-ttl", "10"]].concat();
    let server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    let used = act_as(&mut client, "user").await;
    let unused = client.log_in("root", &password("root")).await.expect("a login");
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(12) {
        client.act_with(Some(&used));
        get(&mut client, "a").await.expect("a token in use does not expire");
        sleep(Duration::from_millis(200)).await;
    }
    client.act_with(Some(&unused));
    check_refused(get(&mut client, "a").await, INVALID_TOKEN, "an expired token");
}

/// A token is signed with a key of its store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_of_another_store_are_refused() {
    let mut tokens = Vec::new();
    let mut clients = Vec::new();
    let mut servers = Vec::new();
    for _ in 0..2 {
        let server = Server::orlop_with(Backend::Sqlite, &CHEAP).await.expect("SQLite is always there");
        let mut client = Client::connect(server.endpoint()).await;
        enable(&mut client).await;
        tokens.push(act_as(&mut client, "root").await);
        clients.push(client);
        servers.push(server);
    }
    clients[0].act_with(Some(&tokens[1]));
    check_refused(get(&mut clients[0], "a").await, INVALID_TOKEN, "a token of another store");
    // A restart keeps the key.
    servers[0].restart().await;
    let mut client = Client::connect(servers[0].endpoint()).await;
    client.act_with(Some(&tokens[0]));
    get(&mut client, "a").await.expect("a token from before the restart");
}

/// Runs openssl in a folder.
fn openssl(folder: &Path, arguments: &str) {
    let output = Command::new("openssl").args(arguments.split(' ')).current_dir(folder).output().expect("openssl runs");
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The sign methods, and how openssl generates a private key for each.
const METHODS: [(&str, &str); 13] = [
    ("HS256", "rand -out private 32"),
    ("HS384", "rand -out private 48"),
    ("HS512", "rand -out private 64"),
    ("RS256", "genrsa -out private 2048"),
    ("RS384", "genrsa -out private 2048"),
    ("RS512", "genrsa -traditional -out private 2048"),
    ("PS256", "genrsa -out private 2048"),
    ("PS384", "genrsa -out private 2048"),
    ("PS512", "genrsa -out private 2048"),
    ("ES256", "ecparam -name prime256v1 -genkey -noout -out private"),
    ("ES384", "ecparam -name secp384r1 -genkey -noout -out private"),
    ("ES512", "genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-521 -out private"),
    ("EdDSA", "genpkey -algorithm ed25519 -out private"),
];

/// Creates the keys of a method in a folder. Returns the setting with both keys, and with the public key alone.
fn keys(folder: &Path, method: &str, generate: &str) -> (String, Option<String>) {
    openssl(folder, generate);
    let file = |name: &str| folder.join(name).display().to_string();
    let (private, public) = (file("private"), file("public"));
    if method.starts_with("HS") {
        return (format!("jwt,sign-method={method},priv-key={private}"), None);
    }
    openssl(folder, "pkey -in private -pubout -out public");
    (
        format!("jwt,sign-method={method},pub-key={public},priv-key={private},ttl=10m"),
        Some(format!("jwt,sign-method={method},pub-key={public}")),
    )
}

fn has_openssl() -> bool {
    let found = Command::new("openssl").arg("version").output().is_ok();
    if !found {
        skip("openssl");
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jwts_of_every_sign_method_are_given_and_accepted() {
    if !has_openssl() {
        return;
    }
    for (method, generate) in METHODS {
        let folder = TempDir::new().expect("a folder");
        let (both, public) = keys(folder.path(), method, generate);
        let flags = [&CHEAP[..], &["--auth-token", &both]].concat();
        let server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is always there");
        let mut client = Client::connect(server.endpoint()).await;
        enable(&mut client).await;
        let token = act_as(&mut client, "user").await;
        get(&mut client, "a").await.unwrap_or_else(|error| panic!("{method}: {error}"));
        let header = BASE64.decode(token.split('.').next().expect("a header")).expect("base64");
        assert!(String::from_utf8(header).expect("JSON").contains(&format!("\"alg\":\"{method}\"")), "{method}");

        // The same token, changed in each of its parts.
        for part in 0..3 {
            let mut parts: Vec<String> = token.split('.').map(str::to_owned).collect();
            let replaced = if parts[part].starts_with('A') { "B" } else { "A" };
            parts[part].replace_range(0..1, replaced);
            client.act_with(Some(&parts.join(".")));
            check_refused(get(&mut client, "a").await, INVALID_TOKEN, &format!("{method}: part {part} is changed"));
        }
        // A change makes tokens of an earlier revision old.
        let root = act_as(&mut client, "root").await;
        add_user(&mut client, "another").await;
        for (token, key) in [(&token, "a"), (&root, "x")] {
            client.act_with(Some(token));
            check_refused(get(&mut client, key).await, OLD_REVISION, method);
        }
        // With the public key alone, tokens are accepted and not given.
        let Some(public) = public else { continue };
        let flags = [&CHEAP[..], &["--auth-token", &public]].concat();
        let server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is always there");
        let mut client = Client::connect(server.endpoint()).await;
        enable(&mut client).await;
        client.act_with(Some(&token));
        get(&mut client, "a").await.unwrap_or_else(|error| panic!("{method}: {error}"));
        let only = (Code::Unknown, "auth: token signing attempted with verify-only key");
        check_refused(client.log_in("user", &password("user")).await, only, method);
    }
}

/// Signs a token as another program does.
fn signed(header: &str, claims: &str, folder: &Path) -> String {
    let signed = [header, claims].map(|part| BASE64.encode(part)).join(".");
    fs::write(folder.join("signed"), &signed).expect("a file can be written");
    openssl(folder, "dgst -sha256 -sign private -out signature signed");
    format!("{signed}.{}", BASE64.encode(fs::read(folder.join("signature")).expect("a signature")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_jwts_with_valid_claims_and_the_right_algorithm_are_accepted() {
    if !has_openssl() {
        return;
    }
    let folder = TempDir::new().expect("a folder");
    let (both, _) = keys(folder.path(), "RS256", "genrsa -out private 2048");
    let flags = [&CHEAP[..], &["--auth-token", &both]].concat();
    let server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    let rs256 = r#"{"alg":"RS256","typ":"JWT"}"#;
    let far = "4102444800";
    let claims = |more: &str| format!(r#"{{"username":"user","revision":100{more}}}"#);
    let table = [
        ("no expiry", signed(rs256, &claims(""), folder.path()), None),
        ("far expiry", signed(rs256, &claims(&format!(r#","exp":{far}"#)), folder.path()), None),
        ("an audience", signed(rs256, &claims(r#","aud":"x","iss":"y""#), folder.path()), None),
        ("expired", signed(rs256, &claims(r#","exp":1700000000"#), folder.path()), Some(INVALID_TOKEN)),
        ("expiry as text", signed(rs256, &claims(r#","exp":"4102444800""#), folder.path()), Some(INVALID_TOKEN)),
        ("not valid yet", signed(rs256, &claims(&format!(r#","nbf":{far}"#)), folder.path()), Some(INVALID_TOKEN)),
        ("no user", signed(rs256, r#"{"revision":100}"#, folder.path()), Some(INVALID_TOKEN)),
        ("no revision", signed(rs256, r#"{"username":"user"}"#, folder.path()), Some(INVALID_TOKEN)),
        ("another user", signed(rs256, r#"{"username":"none","revision":100}"#, folder.path()), Some(DENIED)),
        ("revision 1", signed(rs256, r#"{"username":"user","revision":1}"#, folder.path()), Some(OLD_REVISION)),
        ("another algorithm", signed(r#"{"alg":"PS256"}"#, &claims(""), folder.path()), Some(INVALID_TOKEN)),
        ("HS256 with the public key", hs256(&claims(""), folder.path()), Some(INVALID_TOKEN)),
        (
            "none",
            format!("{}.", [r#"{"alg":"none"}"#, &claims("")].map(|part| BASE64.encode(part)).join(".")),
            Some(INVALID_TOKEN),
        ),
        (
            "no signature",
            format!("{}.", [rs256, &claims("")].map(|part| BASE64.encode(part)).join(".")),
            Some(INVALID_TOKEN),
        ),
        ("two parts", [rs256, &claims("")].map(|part| BASE64.encode(part)).join("."), Some(INVALID_TOKEN)),
        ("no JSON", signed("x", "y", folder.path()), Some(INVALID_TOKEN)),
        ("nothing", String::new(), Some(INVALID_TOKEN)),
        ("long", "x".repeat(10_000), Some(INVALID_TOKEN)),
    ];
    for (what, token, refusal) in table {
        client.act_with(Some(&token));
        for _ in 0..2 {
            match refusal {
                None => get(&mut client, "a").await.unwrap_or_else(|error| panic!("{what}: {error}")),
                Some(refusal) => check_refused(get(&mut client, "a").await, refusal, what),
            }
        }
    }
    // A key of the same kind that the server does not know.
    openssl(folder.path(), "genrsa -out private 2048");
    client.act_with(Some(&signed(rs256, &claims(""), folder.path())));
    check_refused(get(&mut client, "a").await, INVALID_TOKEN, "another key");
}

/// The server remembers tokens that it has verified.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jwt_that_was_used_is_refused_after_its_expiry() {
    if !has_openssl() {
        return;
    }
    let folder = TempDir::new().expect("a folder");
    let (key, _) = keys(folder.path(), "HS256", "rand -out private 32");
    let token = format!("{key},ttl=5s");
    let flags = [&CHEAP[..], &["--auth-token", &token]].concat();
    let server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    act_as(&mut client, "user").await;
    get(&mut client, "a").await.expect("a get before the expiry");
    let refused = eventually("a refusal", || {
        let mut client = client.clone();
        async move { get(&mut client, "a").await.err().ok_or("a get is served") }
    })
    .await;
    check_refused(Err::<(), _>(refused), INVALID_TOKEN, "a get after the expiry");
}

/// Signs with the public key as the secret, which a server accepts that takes the algorithm from the token.
fn hs256(claims: &str, folder: &Path) -> String {
    let signed = [r#"{"alg":"HS256"}"#, claims].map(|part| BASE64.encode(part)).join(".");
    fs::write(folder.join("signed"), &signed).expect("a file can be written");
    let key: String =
        fs::read(folder.join("public")).expect("a key").iter().map(|byte| format!("{byte:02x}")).collect();
    openssl(folder, &format!("dgst -sha256 -mac HMAC -macopt hexkey:{key} -binary -out signature signed"));
    format!("{signed}.{}", BASE64.encode(fs::read(folder.join("signature")).expect("a signature")))
}

#[test]
fn unusable_keys_stop_the_start() {
    if !has_openssl() {
        return;
    }
    let (one, other) = (TempDir::new().expect("a folder"), TempDir::new().expect("a folder"));
    keys(one.path(), "RS256", "genrsa -out private 2048");
    keys(other.path(), "RS256", "genrsa -out private 2048");
    let file = |folder: &TempDir, name: &str| folder.path().join(name).display().to_string();
    let (public, private, empty) = (file(&one, "public"), file(&one, "private"), file(&one, "empty"));
    fs::write(&empty, "").expect("a file can be written");
    let setting = |options: String| format!("jwt,{options}");
    for (setting, because) in [
        (setting("sign-method=RS256".to_owned()), "pub-key and priv-key are missing"),
        (setting("sign-method=HS256".to_owned()), "priv-key is missing"),
        // Everybody could sign tokens.
        (setting(format!("sign-method=HS256,priv-key={empty}")), "priv-key is missing"),
        (setting(format!("sign-method=none,priv-key={private}")), "sign-method \"none\" is not one of HS256"),
        (setting("sign-method=RS256,pub-key=absent.pem".to_owned()), "cannot read absent.pem"),
        (setting(format!("sign-method=ES256,pub-key={public}")), "pub-key cannot be used with this sign-method"),
        (setting(format!("sign-method=EdDSA,priv-key={private}")), "priv-key cannot be used with this sign-method"),
        (
            setting(format!("sign-method=RS256,pub-key={public},priv-key={}", file(&other, "private"))),
            "pub-key and priv-key do not belong together",
        ),
    ] {
        start::check_refused(
            &["--auth-token", &setting, "--listen-client-urls", "http://127.0.0.1:0"],
            &[],
            &[because],
        );
    }
}

on_both_backends!(changes_are_in_force_at_once_at_every_instance,);
