//! The password of the page: where the server has no users, who writes has logged in with it.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use orlop_wire::proto::client::etcdserverpb::AuthDisableRequest;
use tokio::time::timeout;

use super::{
    get,
    page::{PAGE_PASSWORD, Page, Visitor, password_file, value_of},
};
use crate::{
    auth::{CHEAP, act_as, enable, password},
    start::check_refused,
    support::{Backend, Client, Server, free_port, on_both_backends},
};

async fn page_without_a_password_only_reads(backend: Backend) {
    let url = format!("http://127.0.0.1:{}", free_port());
    let Some(server) = Server::orlop_with(backend, &["--console-listen-url", &url]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let old = client.put("a", b"old").await;
    let new = client.put("a", b"new").await;
    let page = Page::about(server.endpoint(), &[]);
    for mut visitor in [Visitor::new(&url), page.visitor()] {
        let form = visitor.open(&format!("/put-back?key=a&revision={old}")).await;
        assert!(form.contains("<ins>+ old</ins>") && form.contains("console-password-file"), "{form}");
        assert!(!form.contains("Put this version back"), "{form}");
        let answer = visitor.confirm(&form, &[]).await;
        assert_eq!(answer.status, 403, "{}", answer.body);
        assert!(answer.body.contains("nobody can log in"), "{}", answer.body);
        // There is nothing to log in to.
        let token = value_of(&form, "token");
        let fields = [("token", token.as_str()), ("name", ""), ("password", PAGE_PASSWORD)];
        assert_eq!(visitor.post("/login", &fields).await.status, 303);
        assert_eq!(visitor.confirm(&form, &[]).await.status, 403);
    }
    assert_eq!(get(&mut client, "a").await, Some((b"new".to_vec(), new)));
}

async fn password_opens_the_page_of_a_server_without_users(backend: Backend) {
    let (url, file) = (format!("http://127.0.0.1:{}", free_port()), password_file(PAGE_PASSWORD));
    let path = file.path().to_str().expect("a path in UTF-8");
    let flags = [&CHEAP[..], &["--console-listen-url", &url, "--console-password-file", path]].concat();
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let old = client.put("a", b"old").await;
    let mut newest = client.put("a", b"new").await;
    let page = Page::with_password(server.endpoint(), &[]);
    let mut writers = Vec::new();
    for url in [&url, &page.url] {
        let mut visitor = Visitor::new(url);
        for path in ["/", "/overview/live", "/sizes", "/keys", "/key?key=a", "/events", "/events/stream"] {
            let answer = visitor.get(path).await;
            assert_eq!(answer.status, 401, "{path}: {}", answer.body);
            assert!(answer.body.contains("password of this page"), "{path}: {}", answer.body);
        }
        for (name, password, want) in [
            ("", "", "Wrong password."),
            ("", &PAGE_PASSWORD[1..], "Wrong password."),
            ("", &format!("{PAGE_PASSWORD}\n"), "Wrong password."),
            ("root", PAGE_PASSWORD, "The server has no users."),
        ] {
            let answer = visitor.log_in(name, password).await;
            assert_eq!(answer.status, 401, "{name} {password}");
            assert!(answer.body.contains(want), "{name} {password}: {}", answer.body);
        }
        assert_eq!(visitor.get("/key?key=a").await.status, 401);
        assert_eq!(visitor.log_in("", PAGE_PASSWORD).await.status, 303);
        let form = visitor.open(&format!("/put-back?key=a&revision={old}")).await;
        assert!(form.contains("Log out"), "{form}");
        assert_eq!(visitor.confirm(&form, &[]).await.status, 303);
        assert_eq!(get(&mut client, "a").await, Some((b"old".to_vec(), newest + 1)));
        newest = client.put("a", b"new").await;
        visitor.events("").await;
        writers.push(visitor);
    }
    let mut leaving = writers[1].clone();
    let token = value_of(&leaving.open("/").await, "token");
    assert_eq!(leaving.post("/logout", &[("token", &token)]).await.status, 303);
    assert_eq!(leaving.get("/").await.status, 401, "the session has ended");

    enable(&mut client).await;
    for (mut visitor, url) in writers.into_iter().zip([&url, &page.url]) {
        assert_eq!(visitor.get("/key?key=a").await.status, 401, "the server has users now");
        let answer = Visitor::new(url).log_in("", PAGE_PASSWORD).await;
        assert_eq!(answer.status, 401, "{}", answer.body);
        assert_eq!(visitor.log_in("root", &password("root")).await.status, 303);
        assert!(visitor.open("/key?key=a").await.contains("new"));
    }
}

async fn sessions_end_when_visitors_log_in_differently(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &CHEAP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let old = client.put("a", b"old").await;
    client.put("a", b"new").await;
    let (open, closed) = (Page::about(server.endpoint(), &[]), Page::with_password(server.endpoint(), &[]));
    enable(&mut client).await;
    let mut users = [open.visitor(), closed.visitor()];
    for user in &mut users {
        assert_eq!(user.log_in("user", &password("user")).await.status, 303);
        assert!(user.open("/key?key=a").await.contains("Log out"));
    }
    act_as(&mut client, "root").await;
    client.auth.auth_disable(AuthDisableRequest {}).await.expect("Auth is disabled");
    let form = users[0].open(&format!("/put-back?key=a&revision={old}")).await;
    let answer = users[0].confirm(&form, &[]).await;
    assert_eq!(answer.status, 403, "{}", answer.body);
    assert!(answer.body.contains("nobody can log in"), "{}", answer.body);
    assert_eq!(users[1].get("/key?key=a").await.status, 401, "the page has a password");
}

on_both_backends! {
    sessions_end_when_visitors_log_in_differently,
    page_without_a_password_only_reads,
    password_opens_the_page_of_a_server_without_users,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_password_needs_no_restart() {
    let Some(server) = Server::orlop(Backend::Sqlite).await else { return };
    let page = Page::with_password(server.endpoint(), &[]);
    let mut visitor = page.visitor();
    page.change_password("another password\r\n");
    assert_eq!(visitor.log_in("", PAGE_PASSWORD).await.status, 401);
    assert_eq!(visitor.log_in("", "another password").await.status, 303);
    page.change_password("short");
    let answer = page.visitor().log_in("", "short").await;
    assert_eq!(answer.status, 401);
    assert!(answer.body.contains("cannot be read"), "{}", answer.body);
}

/// A browser that leaves at once does not try more passwords.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_password_takes_its_time_although_the_browser_leaves() {
    let Some(server) = Server::orlop(Backend::Sqlite).await else { return };
    let page = Page::with_password(server.endpoint(), &[]);
    let mut visitors: Vec<Visitor> = (0..4).map(|_| page.visitor()).collect();
    let mut tokens = Vec::new();
    for visitor in &mut visitors {
        tokens.push(value_of(&visitor.get("/login").await.body, "token"));
    }
    let begun = Instant::now();
    let wrong = visitors.iter_mut().zip(&tokens).map(async |(visitor, token)| {
        let fields = [("token", token.as_str()), ("name", ""), ("password", "a wrong password")];
        let answer = timeout(Duration::from_millis(500), visitor.post("/login", &fields)).await;
        assert!(answer.is_err(), "a wrong password is refused at once");
    });
    join_all(wrong).await;
    // As many are checked at the same time, so this one waits for them.
    assert_eq!(page.visitor().log_in("", PAGE_PASSWORD).await.status, 303);
    assert!(begun.elapsed() >= Duration::from_secs(1), "after {:?}", begun.elapsed());
}

#[test]
fn unusable_password_is_refused_at_the_start() {
    let (short, folder) = (password_file("12345678901"), tempfile::tempdir().expect("a folder"));
    let paths = [short.path(), folder.path(), std::path::Path::new("/nonexistent/password")];
    let wanted = ["the password has 11 bytes; at least 12 are required", "not a regular file", "No such file"];
    for (path, want) in paths.into_iter().zip(wanted) {
        let path = path.to_str().expect("a path in UTF-8");
        let password = ["--console-password-file", path];
        let console = ["console", "--listen-url", "http://127.0.0.1:0"];
        check_refused(&[&console[..], &password].concat(), &[], &["console-password-file", path, want]);
        let server = ["--listen-client-urls", "http://127.0.0.1:0", "--console-listen-url", "http://127.0.0.1:0"];
        check_refused(&[&server[..], &password].concat(), &[], &["console-password-file", path, want]);
    }
}
