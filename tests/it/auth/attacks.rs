//! Attacks by clients with and without an account: they are bounded, and delay nobody else.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD as BASE64};
use futures_util::future::join_all;
use orlop_wire::proto::client::{
    authpb::Permission,
    etcdserverpb::{
        AuthRoleAddRequest, AuthRoleGrantPermissionRequest, AuthUserAddRequest, AuthUserChangePasswordRequest,
        AuthUserGrantRoleRequest, LeaseGrantRequest, PutRequest, RequestOp, TxnRequest, auth_client::AuthClient,
        request_op::Request,
    },
};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout},
};
use tonic::{Code, transport::Endpoint};

use super::{CHEAP, DENIED, INVALID_TOKEN, act_as, check_refused, enable, get, grant_role, password, put};
use crate::support::{Backend, Client, DEADLINE, Random, Server, http, on_both_backends};

async fn names_are_bounded(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &CHEAP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let refused = (Code::InvalidArgument, "orlop: the name of a user or role has at most 1024 bytes and no zero byte");
    for name in ["x".repeat(1_025), "x".repeat(200_000), "a\0b".to_owned()] {
        let user = AuthUserAddRequest { name: name.clone(), password: "p".to_owned(), ..Default::default() };
        check_refused(client.auth.user_add(user).await, refused, "a user");
        check_refused(client.auth.role_add(AuthRoleAddRequest { name }).await, refused, "a role");
    }
    let name = "x".repeat(1 << 20);
    let user = AuthUserAddRequest { name: name.clone(), password: "p".to_owned(), ..Default::default() };
    let refusal = client.auth.user_add(user).await.expect_err("a message that is too long");
    assert_eq!(refusal.code(), Code::ResourceExhausted, "{refusal:?}");
    for name in ["x".repeat(1_024), "\u{1F511} name with 'quotes' and \"others\"".to_owned()] {
        client.auth.role_add(AuthRoleAddRequest { name: name.clone() }).await.expect("a role");
        let user = AuthUserAddRequest { name: name.clone(), password: "p".to_owned(), ..Default::default() };
        client.auth.user_add(user).await.expect("a user");
        client
            .auth
            .user_grant_role(AuthUserGrantRoleRequest { user: name.clone(), role: name })
            .await
            .expect("a grant");
    }
    // Long ranges are permissions, too.
    let (key, range_end) = (vec![b'k'; 100_000].into(), vec![b'l'; 100_000].into());
    let perm = Some(Permission { perm_type: 2, key, range_end });
    let grant = AuthRoleGrantPermissionRequest { name: "x".repeat(1_024), perm };
    for _ in 0..2 {
        client.auth.role_grant_permission(grant.clone()).await.expect("a permission");
    }
}

/// Rights are looked up in a sorted list.
async fn only_keys_of_a_permission_are_written(backend: Backend) {
    const PERMISSIONS: usize = 100;
    let Some(server) = Server::orlop_with(backend, &CHEAP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    let _ = act_as(&mut client, "root").await;
    client.auth.role_add(AuthRoleAddRequest { name: "many".to_owned() }).await.expect("a role");
    grant_role(&mut client, "user", "many").await;
    for number in 0..PERMISSIONS {
        let perm = Some(Permission { perm_type: 2, key: format!("m{number:02}").into(), range_end: "".into() });
        let grant = AuthRoleGrantPermissionRequest { name: "many".to_owned(), perm };
        client.auth.role_grant_permission(grant).await.expect("a permission");
    }
    let _ = act_as(&mut client, "user").await;
    for number in 0..PERMISSIONS {
        put(&mut client, &format!("m{number:02}")).await.expect("a permitted put");
    }
    for (key, what) in [
        ("m", "a key before all permissions"),
        ("m00x", "a key between two permissions"),
        ("m99x", "a key behind all permissions"),
    ] {
        check_refused(put(&mut client, key).await, DENIED, what);
    }
}

/// A user may set a lease if it may write all keys of the lease. A request checks each lease once, and skips the keys of a
/// permitted range.
async fn leases_of_many_keys_do_not_slow_requests(backend: Backend) {
    const KEYS: usize = 100_000;
    const OPS: usize = 10_000;
    let flags = [&CHEAP[..], &["--max-txn-ops", "10000"]].concat();
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let mut root = Client::connect(server.endpoint()).await;
    enable(&mut root).await;
    let _ = act_as(&mut root, "root").await;
    let lease = root.lease.lease_grant(LeaseGrantRequest { ttl: 3_600, id: 0 }).await.expect("a lease");
    let lease = lease.into_inner().id;
    let leased = |key: String| PutRequest { key: key.into(), lease, ..Default::default() };
    let txn = |first: usize| {
        let puts = (first..first + OPS).map(|number| Request::RequestPut(leased(format!("a{number:06}"))));
        let success = puts.map(|put| RequestOp { request: Some(put) }).collect();
        TxnRequest { success, ..Default::default() }
    };
    for first in (0..KEYS).step_by(OPS) {
        root.kv.txn(txn(first)).await.expect("keys are put");
    }
    let mut user = Client::connect(server.endpoint()).await;
    let _ = act_as(&mut user, "user").await;
    let begun = Instant::now();
    let served = timeout(DEADLINE, user.kv.txn(txn(0))).await.expect("a transaction in time");
    served.expect("a permitted transaction");
    println!("a transaction with {OPS} puts with a lease of {KEYS} keys in {:?}", begun.elapsed());
    let begun = Instant::now();
    let puts = (0..4_000).map(|number| {
        let (mut kv, put) = (user.kv.clone(), leased(format!("a{number:06}")));
        async move { kv.put(put).await.expect("a permitted put") }
    });
    timeout(DEADLINE, join_all(puts)).await.expect("puts in time");
    println!("4,000 puts with a lease of {KEYS} keys in {:?}", begun.elapsed());
    root.kv.put(leased("z".to_owned())).await.expect("root may put every key");
    check_refused(user.kv.put(leased("a".to_owned())).await, DENIED, "a put with a lease that has another key");
    check_refused(user.kv.txn(txn(0)).await, DENIED, "a transaction with such puts");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guessed_tokens_are_refused() {
    let server = Server::orlop_with(Backend::Sqlite, &CHEAP).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    let good = client.log_in("user", &password("user")).await.expect("a login");
    let mut random = Random::new(7);
    for guess in 0..2_000 {
        let mut token = good.clone().into_bytes();
        let place = random.below(token.len());
        let before = token[place];
        token[place] = random.pick(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.");
        // The last character of a part has bits that do not count.
        let is_last = token.get(place + 1).is_none_or(|next| *next == b'.');
        if token[place] == before || is_last {
            continue;
        }
        let token = String::from_utf8(token).expect("ASCII");
        client.act_with(Some(&token));
        check_refused(get(&mut client, "a").await, INVALID_TOKEN, &format!("guess {guess}: {token}"));
    }
    client.act_with(Some(&good));
    get(&mut client, "a").await.expect("the token is still good");
}

/// A hundred wrong passwords at once are checked one after the other, on a thread of their own.
async fn flood_of_wrong_passwords_delays_nobody(backend: Backend) {
    // The default cost, with which a check takes about 50 ms.
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    let _ = act_as(&mut client, "user").await;
    let attackers = join_all((0..4).map(|_| Client::connect(server.endpoint()))).await;
    let flood = tokio::spawn(async move {
        let attempts = (0..100).map(|number| {
            let mut client = attackers[number % attackers.len()].clone();
            async move { client.log_in("root", "wrong").await.expect_err("a wrong password").code() }
        });
        join_all(attempts).await
    });
    let mut slowest = Duration::ZERO;
    let mut served = 0;
    while !flood.is_finished() {
        let begun = Instant::now();
        get(&mut client, "a").await.expect("a get");
        put(&mut client, "a").await.expect("a put");
        slowest = slowest.max(begun.elapsed());
        served += 1;
    }
    println!("{served} gets and puts during the flood; the slowest pair took {slowest:?}");
    let codes = flood.await.expect("the flood ends");
    assert!(codes.iter().all(|code| [Code::InvalidArgument, Code::ResourceExhausted].contains(code)), "{codes:?}");
    assert!(served >= 5, "only {served} gets and puts were served during the flood");
}

/// The path of the guesses is percent-encoded, so that it does not end as that of a log-in does.
async fn guesses_count_for_their_own_address(backend: Backend) {
    // The default cost, with which 128 checks take seconds. More of one address are refused.
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    let token = act_as(&mut client, "root").await;
    let elsewhere = Endpoint::from_shared(server.endpoint().to_owned()).expect("an endpoint");
    let elsewhere = elsewhere.local_address(Some([127, 0, 0, 2].into())).connect().await.expect("a connection");
    let (mut guesses, checked) = (JoinSet::new(), Arc::new(AtomicUsize::new(0)));
    for _ in 0..300 {
        let (endpoint, checked) = (server.endpoint().to_owned(), Arc::clone(&checked));
        guesses.spawn(async move {
            let guess = r#"{"name": "root", "password": "wrong"}"#;
            let answer = http(&endpoint, "POST", "/v3/auth/authenticat%65", guess).await;
            if answer.status != 429 {
                assert_eq!(answer.status, 400, "{}", answer.body);
                checked.fetch_add(1, Ordering::Relaxed);
            }
            answer.status
        });
    }
    while guesses.join_next().await.expect("a guess is refused").expect("an answer") != 429 {}
    // If both had the same address, the change would be refused too, or would follow 127 guesses.
    let before = checked.load(Ordering::Relaxed);
    let change =
        AuthUserChangePasswordRequest { name: "user".to_owned(), password: "new".to_owned(), ..Default::default() };
    let mut change = tonic::Request::new(change);
    change.metadata_mut().insert("token", token.parse().expect("a token is ASCII"));
    AuthClient::new(elsewhere).user_change_password(change).await.expect("another address has its own turn");
    let meanwhile = checked.load(Ordering::Relaxed) - before;
    assert!(meanwhile < 100, "{meanwhile} guesses were checked before");
}

/// A script whose variable with the new password is unset must not open the account.
async fn change_to_an_empty_password_locks_the_user(backend: Backend) {
    const REFUSED: &str = "etcdserver: authentication failed, invalid user ID or password";
    let Some(server) = Server::orlop_with(backend, &CHEAP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    let _ = act_as(&mut client, "root").await;
    for (new, works) in [("", false), ("again", true)] {
        let change =
            AuthUserChangePasswordRequest { name: "user".to_owned(), password: new.to_owned(), ..Default::default() };
        client.auth.user_change_password(change).await.expect("the password is changed");
        for password in ["", &password("user"), new] {
            let entered = Client::connect(server.endpoint()).await.log_in("user", password).await;
            let entered = entered.map(drop).map_err(|refusal| refusal.message().to_owned());
            let expected = if works && password == new { Ok(()) } else { Err(REFUSED.to_owned()) };
            assert_eq!(entered, expected, "{password:?} after {new:?}");
        }
    }
}

/// A request may contain the hash of the new password. Anything else there must not lock the user out.
async fn change_to_a_hash_takes_only_one_of_bcrypt(backend: Backend) {
    const REFUSED: (Code, &str) =
        (Code::Unknown, "auth: authentication failed, password was given for no password user");
    let Some(server) = Server::orlop_with(backend, &CHEAP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    let _ = act_as(&mut client, "root").await;
    let (old, hash) = (password("user"), bcrypt::hash("new", 4).expect("a hash"));
    for (what, hashed_password, is_taken) in [
        ("no base64", "###".to_owned(), false),
        ("a hash that is not in base64", hash.clone(), false),
        ("another text", BASE64.encode("abc"), false),
        ("a part of a hash", BASE64.encode(&hash[..59]), false),
        ("a hash with another cost than bcrypt has", BASE64.encode(hash.replacen("$04$", "$99$", 1)), false),
        ("a hash", BASE64.encode(&hash), true),
    ] {
        let change = AuthUserChangePasswordRequest { name: "user".to_owned(), hashed_password, ..Default::default() };
        let changed = client.auth.user_change_password(change).await;
        let (right, wrong) = if is_taken {
            changed.expect(what);
            ("new", old.as_str())
        } else {
            check_refused(changed, REFUSED, what);
            (old.as_str(), "new")
        };
        let mut user = Client::connect(server.endpoint()).await;
        user.log_in("user", right).await.expect(what);
        user.log_in("user", wrong).await.expect_err(what);
    }
}

on_both_backends!(
    change_to_an_empty_password_locks_the_user,
    change_to_a_hash_takes_only_one_of_bcrypt,
    names_are_bounded,
    only_keys_of_a_permission_are_written,
    leases_of_many_keys_do_not_slow_requests,
    flood_of_wrong_passwords_delays_nobody,
    guesses_count_for_their_own_address,
);
