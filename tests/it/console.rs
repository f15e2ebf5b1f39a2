//! The web page: every view, who may see and write what, hostile requests and values; and in a real browser.

mod browser;
mod deleted;
mod events;
mod limits;
mod managers;
mod page;
mod password;
mod rights;
mod webdriver;

use orlop_wire::proto::client::etcdserverpb::{AuthUserChangePasswordRequest, CompactionRequest};

use self::page::{Page, Visitor, encoded, value_of};
use crate::{
    auth::{CHEAP, act_as, enable, password},
    kube_trace::{compare::Peer, replay, trace},
    support::{self, Backend, Client, Server, delete, free_port, on_both_backends},
};

const SECRET: &[u8] = br#"{"apiVersion":"v1","kind":"Secret","data":{"password":"aHVudGVyMg=="}}"#;
/// HTML, a script, control characters, a change of the direction of text, and bytes that are not UTF-8.
const HOSTILE: &[&[u8]] = &[
    b"<script>alert(1)</script><img src=x onerror=alert(2)>\"'&",
    b"\x1b[2J\x1b]0;title\x07 \xe2\x80\xae gnp",
    b"</pre></main><script src=//evil.example></script>",
    br#"{"apiVersion":"v1","kind":"<b>Pod</b>","metadata":{"name":"</script><script>alert(3)</script>"}}"#,
    b"\xff\xfe<script>",
];

/// Returns the value of a key, and its revision.
async fn get(client: &mut Client, key: &str) -> Option<(Vec<u8>, i64)> {
    let answer = client.kv.range(support::get(key)).await.expect("a range").into_inner();
    answer.kvs.first().map(|kv| (kv.value.to_vec(), kv.mod_revision))
}

async fn every_page_answers_with_a_full_store(backend: Backend) {
    let port = free_port();
    let url = format!("http://127.0.0.1:{port}");
    let Some(server) = Server::orlop_with(backend, &["--console-listen-url", &url]).await else { return };
    replay::replay(&[server.endpoint()], Peer::Orlop, trace::load())
        .await
        .unwrap_or_else(|mismatch| panic!("{mismatch}"));
    let page = Page::about(server.endpoint(), &[]);
    for mut visitor in [Visitor::new(&url), page.visitor()] {
        let names = visitor.open("/keys?prefix=/registry/namespaces/").await;
        let key = link(&names, "/key?key=");
        let object = visitor.open(&key).await;
        let revision = value_of(&object[object.find("class=\"timeline\"").expect("a history")..], "from");
        let back = format!("{}&revision={revision}", key.replacen("/key", "/put-back", 1));
        let diff = format!("{}&from={revision}&to={revision}", key.replacen("/key", "/diff", 1));
        for (path, wanted) in [
            ("/", "Requests"),
            ("/keys?prefix=none", "prefers-color-scheme"),
            ("/overview/live", "Revision"),
            ("/sizes", "Sizes"),
            ("/keys", "/keys?prefix=/registry/\">"),
            ("/keys?prefix=/registry/", "/keys?prefix=/registry/namespaces/"),
            ("/keys?prefix=/registry/names", "/key?key=/registry/namespaces/default"),
            ("/keys?prefix=nothing", "There are no keys"),
            ("/deleted", "were searched"),
            (&key, "apiVersion: v1"),
            (&diff, "Both versions are equal."),
            (&back, "Put revision"),
            ("/events?prefix=/registry/", "data-events=\"/events/stream?prefix=/registry/\""),
            ("/assets/script.js", "EventSource"),
            ("/assets/icon.svg", "<svg"),
        ] {
            let answer = visitor.get(path).await;
            assert!(answer.status == 200 && answer.body.contains(wanted), "{path}: {} {}", answer.status, answer.body);
            for (header, want) in [
                ("x-content-type-options", "nosniff"),
                ("cache-control", "no-store"),
                ("x-frame-options", "DENY"),
                ("referrer-policy", "strict-origin"),
            ] {
                assert_eq!(answer.header(header), Some(want), "{path}");
            }
            let policy = answer.header("content-security-policy").expect("a policy");
            assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"), "{policy}");
            assert!(!policy.contains("unsafe") && !answer.body.contains(" style=\""), "{path}: {policy}");
        }
        for path in ["/nothing", "/key?key=nothing", "/put-back?key=nothing&revision=1"] {
            assert_eq!(visitor.get(path).await.status, 404, "{path}");
        }
        for path in ["/key", "/diff?key=a", "/put-back?key=a", "/key?key=a&revision=99999999"] {
            let status = visitor.get(path).await.status;
            assert!([400, 404].contains(&status), "{path}: {status}");
        }
        for path in ["/sizes/live", "/sizes/live?prefix=/registry/"] {
            let sizes = crate::support::eventually("sizes", async || {
                let sizes = visitor.clone().open(path).await;
                if sizes.contains("data-complete") { Ok(sizes) } else { Err(sizes) }
            });
            let sizes = sizes.await;
            assert!(
                sizes.contains("<svg class=\"treemap wide\"") && sizes.contains("/sizes?prefix=/registry/namespaces/"),
                "{path}: {sizes}"
            );
            // `compact_rev_key` is not below the registry.
            assert_eq!(sizes.contains("Elsewhere: "), path == "/sizes/live", "{path}: {sizes}");
        }
    }
}

/// Returns the first link that begins with `start`.
fn link(page: &str, start: &str) -> String {
    let at = page.find(&format!("href=\"{start}")).unwrap_or_else(|| panic!("no link {start}: {page}"));
    page[at + 6..].split('"').next().expect("a link").replace("&amp;", "&")
}

async fn requests_from_elsewhere_are_refused(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let old = client.put("a", b"old").await;
    let new = client.put("a", b"new").await;
    let page = Page::with_password(server.endpoint(), &["--console-allowed-hosts", "orlop.example,etcd.example"]);
    let mut visitor = page.writer().await;
    let host = page.url.strip_prefix("http://").expect("an address");
    for (headers, want) in [
        (&[("Host", "evil.example")][..], 403),
        (&[("Host", "evil.example:2382")], 403),
        (&[("Host", "")], 403),
        (&[("Host", "localhost:1")], 200),
        (&[("Host", "orlop.example")], 200),
        (&[("Origin", "http://evil.example")], 403),
        (&[("Origin", "null")], 403),
        (&[("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "no-cors")], 403),
        (&[("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate")], 200),
    ] {
        for path in ["/", "/key?key=a", "/events", "/assets/script.js"] {
            assert_eq!(visitor.send("GET", path, headers, "").await.status, want, "{path} with {headers:?}");
        }
    }
    let form = visitor.open(&format!("/put-back?key=a&revision={old}")).await;
    let (token, origin) = (value_of(&form, "token"), format!("http://{host}"));
    let body = |token: &str| format!("token={token}&key=a&revision={old}&expected={new}");
    for (headers, token) in [
        (&[("Origin", "http://evil.example")][..], token.as_str()),
        (&[("Origin", "http://127.0.0.1:1")], &token),
        (&[("Origin", &origin), ("Sec-Fetch-Site", "same-site")], &token),
        (&[("Origin", &origin)], ""),
        (&[("Origin", &origin)], "AAAA"),
        (&[], ""),
    ] {
        let answer = visitor.send("POST", "/put-back", headers, &body(token)).await;
        assert_eq!(answer.status, 403, "{headers:?} {token}: {}", answer.body);
    }
    // Another browser's token.
    let mut other = page.writer().await;
    let foreign = value_of(&other.open(&format!("/put-back?key=a&revision={old}")).await, "token");
    assert_eq!(visitor.send("POST", "/put-back", &[("Origin", &origin)], &body(&foreign)).await.status, 403);
    assert_eq!(get(&mut client, "a").await, Some((b"new".to_vec(), new)), "nothing was written");
    assert_eq!(visitor.send("PUT", "/put-back", &[], "").await.status, 405);
    // A proxy with TLS, which replaces `Host`.
    let headers = [("Origin", "https://orlop.example"), ("Sec-Fetch-Site", "same-origin")];
    assert_eq!(visitor.send("POST", "/put-back", &headers, &body(&token)).await.status, 303);
}

async fn log_in_is_required_where_auth_is_on(backend: Backend) {
    let url = format!("http://127.0.0.1:{}", free_port());
    let flags = [&CHEAP[..], &["--console-listen-url", &url]].concat();
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let old = client.put("a/1", b"old").await;
    let new = client.put("a/1", b"new").await;
    client.put("b/1", b"other").await;
    enable(&mut client).await;
    let page = Page::about(server.endpoint(), &["--user", "root:root's password"]);
    for url in [url.as_str(), &page.url] {
        let mut visitor = Visitor::new(url);
        for path in
            ["/", "/overview/live", "/sizes", "/sizes/live", "/keys", "/key?key=a/1", "/events", "/events/stream"]
        {
            let answer = visitor.get(path).await;
            assert_eq!(answer.status, 401, "{path}: {}", answer.body);
            assert!(!answer.body.contains("a/1</"), "{path}: {}", answer.body);
        }
        let form = visitor.get("/keys").await.body;
        let write = [("token", value_of(&form, "token")), ("key", "a/1".into()), ("revision", old.to_string())];
        let write: Vec<(&str, &str)> = write.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(visitor.post("/put-back", &write).await.status, 401);
        assert_eq!(visitor.log_in("user", "wrong").await.status, 401);
        assert_eq!(visitor.log_in("nobody", "").await.status, 401);
        // Without the form's token.
        let fields = [("name", "user"), ("password", &password("user"))];
        assert_eq!(page.visitor().post("/login", &fields).await.status, 403);

        let answer = visitor.log_in("user", &password("user")).await;
        assert_eq!((answer.status, answer.header("location")), (303, Some("/")), "{}", answer.body);
        let cookie = answer.header("set-cookie").expect("a cookie").to_owned();
        assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"), "{cookie}");
        assert!(!answer.body.contains(".") && !cookie.contains(&password("user")), "{cookie}");

        // `user` may read and write what begins with `a`.
        assert!(visitor.open("/keys?prefix=a").await.contains("/keys?prefix=a/"));
        assert!(visitor.open("/key?key=a/1").await.contains("new"));
        for path in ["/key?key=b/1", "/keys", "/keys?prefix=b", "/deleted", "/events/stream"] {
            let answer = visitor.get(path).await;
            assert_eq!(answer.status, 403, "{path}: {}", answer.body);
            assert!(answer.body.contains("does not have the right"), "{path}: {}", answer.body);
        }
        for (path, want) in [("/keys", "/keys?prefix=a/"), ("/deleted", "were searched")] {
            // The form is there, for a prefix that the user may read.
            let refused = visitor.get(path).await.body;
            assert!(
                refused.contains(&format!("action=\"{path}\"")) && refused.contains("name=\"prefix\""),
                "{refused}"
            );
            assert!(visitor.open(&format!("{path}?prefix=a")).await.contains(want), "{path}");
        }
        assert!(visitor.open("/").await.contains("only a user with the role root may read this"));

        let form = visitor.open("/keys?prefix=a").await;
        let answer = visitor.post("/logout", &[("token", "AAAA")]).await;
        assert_eq!(answer.status, 403);
        assert_eq!(visitor.post("/logout", &[("token", &value_of(&form, "token"))]).await.status, 303);
        assert_eq!(visitor.get("/keys?prefix=a").await.status, 401, "the session has ended");
    }
    act_as(&mut client, "root").await;
    assert_eq!(get(&mut client, "a/1").await, Some((b"new".to_vec(), new)));
}

async fn refused_token_leads_to_the_form_to_log_in(backend: Backend) {
    let url = format!("http://127.0.0.1:{}", free_port());
    let flags = [&CHEAP[..], &["--console-listen-url", &url]].concat();
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    let page = Page::about(server.endpoint(), &[]);
    let mut visitors = Vec::new();
    for url in [&url, &page.url] {
        for path in ["/overview/live", "/sizes/live", "/", "/sizes", "/keys", "/events/stream"] {
            let mut visitor = Visitor::new(url);
            assert_eq!(visitor.log_in("root", &password("root")).await.status, 303);
            visitor.open("/events").await;
            visitors.push((path, visitor));
        }
    }
    // Tokens of the user are refused from now on, as those that have expired.
    act_as(&mut client, "root").await;
    let (name, password) = ("root".to_owned(), "new".to_owned());
    let change = AuthUserChangePasswordRequest { name, password, ..Default::default() };
    client.auth.user_change_password(change).await.expect("the password is changed");
    for (path, mut visitor) in visitors {
        // The script loads the page again if a part of it has the status 401. Sizes are read in the background.
        crate::support::eventually(path, async || {
            let answer = visitor.clone().get(path).await;
            if answer.status == 401 { Ok(()) } else { Err(answer) }
        })
        .await;
        // This page needs nothing of the server.
        assert_eq!(visitor.get("/events").await.status, 401, "the session goes on after {path}");
        let token = value_of(&visitor.get("/").await.body, "token");
        let fields = [("token", token.as_str()), ("name", "root"), ("password", "new")];
        assert_eq!(visitor.post("/login", &fields).await.status, 303);
        visitor.open("/").await;
    }
}

async fn put_back_writes_unless_the_key_has_changed(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &["--history-retention", "1h"]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let old = client.put("a", b"first\n").await;
    let new = client.put("a", b"second\n").await;
    let page = Page::with_password(server.endpoint(), &[]);
    let mut visitor = page.writer().await;

    let object = visitor.open("/key?key=a").await;
    assert!(object.contains(&format!("/put-back?key=a&amp;revision={old}")), "{object}");
    assert!(object.contains(&format!(" old<span class=\"hidden\"> revision {old}</span>")), "{object}");
    let form = visitor.open(&format!("/put-back?key=a&revision={old}")).await;
    assert!(form.contains("<del>- second</del>") && form.contains("<ins>+ first</ins>"), "{form}");
    let changed = client.put("a", b"third\n").await;
    let answer = visitor.confirm(&form, &[]).await;
    assert_eq!(answer.status, 409, "{}", answer.body);
    assert!(answer.body.contains("has changed meanwhile"), "{}", answer.body);
    assert_eq!(get(&mut client, "a").await, Some((b"third\n".to_vec(), changed)));

    let form = visitor.open(&format!("/put-back?key=a&revision={old}")).await;
    let answer = visitor.confirm(&form, &[]).await;
    assert_eq!(answer.status, 303, "{}", answer.body);
    let written = changed + 1;
    assert_eq!(answer.header("location"), Some(format!("/key?key=a&written={written}").as_str()));
    assert_eq!(get(&mut client, "a").await, Some((b"first\n".to_vec(), written)));
    // The same form again.
    assert_eq!(visitor.confirm(&form, &[]).await.status, 409);

    // A deleted key, from a compacted version.
    client.kv.delete_range(delete("a")).await.expect("a delete");
    let request = CompactionRequest { revision: written + 1, physical: true };
    client.kv.compact(request).await.expect("a compaction");
    let object = visitor.open("/key?key=a").await;
    assert!(object.contains("The key does not exist") && object.contains("deleted"), "{object}");
    let form = visitor.open(&format!("/put-back?key=a&revision={new}")).await;
    assert_eq!(value_of(&form, "expected"), "0");
    assert_eq!(visitor.confirm(&form, &[]).await.status, 303);
    assert_eq!(get(&mut client, "a").await, Some((b"second\n".to_vec(), written + 2)));
    // A version that does not exist, and one that was deleted.
    assert_eq!(visitor.confirm(&form, &[("revision", &(written + 1).to_string())]).await.status, 404);
    assert_eq!(visitor.confirm(&form, &[("key64", "")]).await.status, 400);
    let diff = visitor.open(&format!("/diff?key=a&from={}&to={}", written + 1, written + 2)).await;
    assert!(diff.contains("does not exist at the old revision") && diff.contains("<ins>+ second</ins>"), "{diff}");
}

async fn write_needs_the_right(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &CHEAP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let old = client.put("c/1", b"old").await;
    let new = client.put("c/1", b"new").await;
    enable(&mut client).await;
    act_as(&mut client, "root").await;
    // `user` may read these keys, but not write them.
    let perm = orlop_wire::proto::client::authpb::Permission { perm_type: 0, key: "c".into(), range_end: "d".into() };
    let grant = orlop_wire::proto::client::etcdserverpb::AuthRoleGrantPermissionRequest {
        name: "role".to_owned(),
        perm: Some(perm),
    };
    client.auth.role_grant_permission(grant).await.expect("a permission");
    let page = Page::about(server.endpoint(), &[]);
    let mut visitor = page.visitor();
    assert_eq!(visitor.log_in("user", &password("user")).await.status, 303);
    let form = visitor.open(&format!("/put-back?key=c/1&revision={old}")).await;
    let answer = visitor.confirm(&form, &[]).await;
    assert_eq!(answer.status, 403, "{}", answer.body);
    assert!(answer.body.contains("does not have the right"), "{}", answer.body);
    assert_eq!(get(&mut client, "c/1").await, Some((b"new".to_vec(), new)));
}

async fn hostile_values_are_text(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let page = Page::about(server.endpoint(), &[]);
    let mut visitor = page.visitor();
    let mut events = visitor.events("").await;
    for (number, value) in HOSTILE.iter().enumerate() {
        let key = [&b"/x/"[..], value, format!("/{number}").as_bytes()].concat();
        let first = client.put(&key, value).await;
        client.put(&key, value.repeat(2)).await;
        let key = encoded(&key);
        for path in [
            "/keys?prefix=/x/".to_owned(),
            format!("/keys?prefix={}", encoded(value)),
            format!("/keys?prefix={}", key.trim_end_matches(|c: char| c.is_ascii_digit())),
            format!("/key?key={key}"),
            format!("/diff?key={key}&from={first}&to={}", first + 1),
            format!("/put-back?key={key}&revision={first}"),
            format!("/events?prefix={}", encoded(value)),
            format!("/login?next={}", encoded(value)),
            "/sizes/live?prefix=/x/".to_owned(),
            format!("/deleted?prefix={}", encoded(value)),
        ] {
            check_harmless(&visitor.get(&path).await.body, &path);
        }
    }
    let seen = events.until(&format!("number\">{}</td>", 1 + 2 * HOSTILE.len())).await;
    check_harmless(seen, "events");
}

/// Checks that a page has no scripts but its own, and no control characters.
#[track_caller]
fn check_harmless(page: &str, path: &str) {
    let own = page.matches("<script src=\"/assets/script.js\" defer></script>").count();
    assert_eq!(page.matches("<script").count(), own, "{path}: {page}");
    assert!(!page.contains("<img") && !page.contains("<b>") && page.matches("</pre>").count() < 2, "{path}: {page}");
    let control = page.chars().find(|c| (c.is_control() && !"\n\r\t".contains(*c)) || *c == '\u{202e}');
    assert_eq!(control, None, "{path}: {page}");
}

async fn secrets_are_masked_unless_they_are_asked_for(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let old = client.put("/registry/secrets/default/s", SECRET).await;
    let changed = String::from_utf8_lossy(SECRET).replace("aHVudGVyMg==", "b3RoZXI=");
    let new = client.put("/registry/secrets/default/s", changed.as_bytes()).await;
    let page = Page::about(server.endpoint(), &[]);
    let mut visitor = page.visitor();
    for path in [
        "/key?key=/registry/secrets/default/s".to_owned(),
        format!("/key?key=/registry/secrets/default/s&revision={old}"),
        format!("/diff?key=/registry/secrets/default/s&from={old}&to={new}"),
        format!("/put-back?key=/registry/secrets/default/s&revision={old}"),
    ] {
        let masked = visitor.open(&path).await;
        assert!(masked.contains("masked") && masked.contains("Show secrets"), "{path}: {masked}");
        let shown = visitor.open(&format!("{path}&secrets=show")).await;
        for secret in ["aHVudGVyMg==", "b3RoZXI=", "hunter2"] {
            assert!(!masked.contains(secret), "{path}: {masked}");
        }
        assert!(shown.contains("aHVudGVyMg==") || shown.contains("b3RoZXI="), "{path}: {shown}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_shown_too() {
    let Some(server) = Server::etcd().await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut revisions = Vec::new();
    for number in 0..4 {
        revisions.push(client.put("/r/a/1", format!("number {number}\n")).await);
    }
    for number in 0..450 {
        client.put(format!("/r/b/{number:03}"), b"x").await;
    }
    client.put("/r/c", b"x").await;
    let page = Page::with_password(server.endpoint(), &[]);
    let mut visitor = page.writer().await;
    let names = visitor.open("/keys").await;
    for wanted in ["/keys?prefix=/r/a/", "/keys?prefix=/r/b/", "/key?key=/r/c"] {
        assert_eq!(names.matches(&format!("\"{wanted}\"")).count(), 1, "{wanted}: {names}");
    }
    let (mut path, mut found) = ("/keys?prefix=/r/b/".to_owned(), 0);
    loop {
        let names = visitor.open(&path).await;
        found += names.matches("href=\"/key?key=/r/b/").count();
        if !names.contains("rel=\"next\"") {
            break;
        }
        path = link(&names[names.find("rel=\"next\"").expect("a link")..], "/keys?prefix=");
    }
    assert_eq!(found, 450);
    let object = visitor.open("/key?key=/r/a/1").await;
    assert_eq!(object.matches("name=\"from\"").count(), 4, "{object}");
    let form = visitor.open(&format!("/put-back?key=/r/a/1&revision={}", revisions[0])).await;
    assert_eq!(visitor.confirm(&form, &[]).await.status, 303);
    assert_eq!(get(&mut client, "/r/a/1").await.map(|(value, _)| value), Some(b"number 0\n".to_vec()));
    for path in ["/", "/sizes", "/events"] {
        visitor.open(path).await;
    }
    // etcd has no service for the history.
    let none = visitor.open("/keys?prefix=nothing").await;
    assert!(!names.contains("/deleted") && !none.contains("not a key now"), "{none}");
    assert_eq!(visitor.get("/deleted?prefix=/r/").await.status, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_answers_while_the_server_is_away() {
    let Some(mut server) = Server::orlop(Backend::Sqlite).await else { return };
    let page = Page::about(server.endpoint(), &[]);
    let mut visitor = page.visitor();
    visitor.open("/").await;
    server.kill();
    for path in ["/", "/keys", "/overview/live", "/sizes/live", "/events/stream"] {
        let answer = visitor.get(path).await;
        assert!(answer.status == 502 && answer.body.contains("The server does not answer"), "{path}: {answer:?}");
        // The script inserts parts of pages.
        assert!(!path.ends_with("/live") || !answer.body.contains("<html"), "{path}: {answer:?}");
    }
}

on_both_backends!(
    every_page_answers_with_a_full_store,
    requests_from_elsewhere_are_refused,
    log_in_is_required_where_auth_is_on,
    refused_token_leads_to_the_form_to_log_in,
    put_back_writes_unless_the_key_has_changed,
    write_needs_the_right,
    hostile_values_are_text,
    secrets_are_masked_unless_they_are_asked_for,
);
