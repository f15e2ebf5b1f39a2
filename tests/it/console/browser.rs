//! The web page in a real browser: each view is opened and clicked through, with the store of a control plane.
//!
//! With `ORLOP_TEST_PICTURES=FOLDER` the tests write pictures of the views. With `ORLOP_TEST_AXE=FILE`, the file `axe.min.js` of axe-core, they
//! check each view for barriers to people with disabilities.

use std::path::PathBuf;

use orlop_wire::proto::client::etcdserverpb::{AuthUserChangePasswordRequest, WatchCreateRequest};
use serde_json::Value;

use super::{
    page::{PAGE_PASSWORD, Page},
    webdriver::{Browser, Colours},
};
use crate::{
    auth::{CHEAP, act_as, enable, password},
    kube_trace::{compare::Peer, replay, trace},
    support::{Backend, Client, Link, Server, delete, put},
};

/// A key of the recorded control plane that has several versions.
const KEY: &str = "/registry/deployments/default/web";

/// A key that was deleted.
const DELETED_KEY: &str = "/registry/deployments/default/old";

/// Starts a server with the store of the recorded control plane, more versions of a key, and a deleted key.
async fn full_server() -> (Server, Client) {
    let server =
        Server::orlop_with(Backend::Sqlite, &["--history-retention", "1h", "--warning-unary-request-duration", "2ms"])
            .await;
    let server = server.expect("SQLite is always there");
    replay::replay(&[server.endpoint()], Peer::Orlop, trace::load())
        .await
        .unwrap_or_else(|mismatch| panic!("{mismatch}"));
    let mut client = Client::connect(server.endpoint()).await;
    let versions =
        [(2, "web:1.0", "helm", 1), (2, "web:1.1", "argocd-controller", 2), (5, "web:1.1", "kubectl-edit", 3)];
    for (replicas, image, manager, second) in versions {
        let object = format!(
            r#"{{"apiVersion":"apps/v1","kind":"Deployment","metadata":{{"name":"web","namespace":"default","managedFields":[{{"manager":"{manager}","operation":"Update","apiVersion":"apps/v1","time":"2026-11-29T14:02:0{second}Z"}}]}},"spec":{{"replicas":{replicas},"template":{{"spec":{{"containers":[{{"image":"{image}","name":"web"}}]}}}}}}}}"#
        );
        client.put(KEY, object).await;
    }
    client.put(DELETED_KEY, "{}").await;
    client.kv.delete_range(delete(DELETED_KEY)).await.expect("a delete");
    (server, client)
}

/// Writes and reads until it is dropped.
fn load(client: &Client) -> tokio::task::JoinHandle<()> {
    let mut client = client.clone();
    tokio::spawn(async move {
        for number in 0.. {
            let key = format!("/registry/events/default/web.{}", number % 300);
            if client.kv.put(put(key, [b'x'; 900])).await.is_err() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(3)).await;
        }
    })
}

/// Waits until a view shows something if a picture of it is taken.
async fn fill_picture(name: &str, seconds: u64) {
    if picture(name).is_some() {
        tokio::time::sleep(std::time::Duration::from_secs(seconds)).await;
    }
}

fn picture(name: &str) -> Option<PathBuf> {
    std::env::var_os("ORLOP_TEST_PICTURES").map(|folder| PathBuf::from(folder).join(format!("{name}.png")))
}

/// Checks what every view must have, and takes a picture.
async fn look(browser: &Browser, name: &str) {
    browser.check_console(name).await;
    look_without_console(browser, name).await;
}

/// The same for a view with an error status, which the browser reports in its console.
async fn look_without_console(browser: &Browser, name: &str) {
    browser.check_width(name).await;
    if let Some(file) = picture(name) {
        browser.picture(&file).await;
    }
    let Some(axe) = std::env::var_os("ORLOP_TEST_AXE") else { return };
    let axe = std::fs::read_to_string(axe).expect("axe-core can be read");
    browser.run(&axe).await;
    let found = browser
        .run_async(
            "const done = arguments[arguments.length - 1];
             axe.run().then((found) => done(found.violations.map((fault) =>
               [fault.impact, fault.id, fault.help, fault.nodes.map((node) => node.html.slice(0, 200))])));",
        )
        .await;
    let faults: Vec<&Value> = found.as_array().expect("faults").iter().collect();
    println!("{name}: {} faults {faults:?}", faults.len());
    let serious: Vec<_> =
        faults.iter().filter(|fault| ["serious", "critical"].iter().any(|impact| fault[0] == *impact)).collect();
    assert!(serious.is_empty(), "{name}: {serious:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_view_works_in_a_browser() {
    let Some(browser) = Browser::open(Colours::Light, 1200, 800).await else { return };
    let (server, mut client) = full_server().await;
    let page = Page::with_password(server.endpoint(), &[]);
    let mut watch = crate::support::Stream::open(&mut client).await;
    for prefix in ["/registry/events/", "/registry/pods/", "/registry/deployments/"] {
        let range_end = format!("{}0", prefix.trim_end_matches('/'));
        let request =
            WatchCreateRequest { key: prefix.to_owned().into(), range_end: range_end.into(), ..Default::default() };
        watch.create(request).await;
    }
    let load = load(&client);

    browser.go(&format!("{}/login", page.url)).await;
    browser.wait_for("Use the password of this page").await;
    browser.type_in("#password", PAGE_PASSWORD).await;
    browser.click("form.login button").await;
    browser.wait_for("KV/Put").await;
    fill_picture("overview", 20).await;
    look(&browser, "overview").await;

    browser.click("nav a[href='/sizes']").await;
    browser.wait_for("By prefix").await;
    browser.click(".treemap.wide a[href='/sizes?prefix=/registry/events/']").await;
    browser.wait_for("default/").await;
    browser.go(&format!("{}/sizes?prefix=/registry/", page.url)).await;
    browser.wait_for("By prefix").await;
    look(&browser, "sizes").await;

    browser.click("nav a[href='/keys']").await;
    browser.wait_for("compact_rev_key").await;
    browser.click("a[href='/keys?prefix=/registry/']").await;
    browser.wait_for("deployments/").await;
    look(&browser, "keys").await;
    browser.type_in("#prefix", "/registry/deployments/def").await;
    browser.click(".search button").await;
    browser.click(&format!("a[href='/key?key={KEY}']")).await;
    browser.wait_for("replicas: 5").await;
    browser.wait_for("kubectl-edit").await;
    look(&browser, "key").await;

    // The last version and the one before are chosen.
    browser.click("form[action='/diff'] button").await;
    browser.wait_for("+   replicas: 5").await;
    look(&browser, "difference").await;
    browser.click("a[href^='/put-back']").await;
    browser.wait_for("What changes").await;
    look(&browser, "put-back").await;
    browser.click("button.danger").await;
    browser.wait_for("The version was put back").await;
    browser.wait_for("replicas: 2").await;

    browser.go(&format!("{}/keys?prefix=/registry/deployments/default/", page.url)).await;
    browser.click("a[href^='/deleted']").await;
    browser.wait_for(DELETED_KEY).await;
    look(&browser, "deleted").await;

    browser.go(&format!("{}/events?prefix=/registry/events/", page.url)).await;
    browser.wait_for("/registry/events/default/web.").await;
    fill_picture("events", 4).await;
    look(&browser, "events").await;
    browser.click("[data-pause]").await;
    browser.wait_for("Paused").await;
    browser.go(&format!("{}/key?key=/registry/secrets/default/none", page.url)).await;
    browser.wait_for("This does not exist").await;
    load.abort();
}

/// A browser has six connections to a site, and the stream of events is one of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_pause_while_nobody_sees_the_page() {
    let Some(browser) = Browser::open(Colours::Light, 1000, 700).await else { return };
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    let page = Page::about(server.endpoint(), &[]);
    browser.go(&format!("{}/events?prefix=/r/", page.url)).await;
    browser.wait_for("Waiting for events").await;
    client.put("/r/before", b"1").await;
    browser.wait_for("/r/before").await;
    browser
        .run(
            "Object.defineProperty(document, 'hidden', { value: true, configurable: true });
             document.dispatchEvent(new Event('visibilitychange'));",
        )
        .await;
    browser.wait_for("Paused").await;
    client.put("/r/meanwhile", b"1").await;
    browser.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'));").await;
    browser.wait_for("/r/meanwhile").await;
    browser.check_console("events").await;
}

/// EventSource connects again after a stream has ended, and gives up when the response is an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_go_on_after_the_server_was_away() {
    let Some(browser) = Browser::open(Colours::Light, 1000, 700).await else { return };
    let mut server = Server::orlop(Backend::Sqlite).await.expect("SQLite is always there");
    let port =
        |server: &Server| server.endpoint().rsplit_once(':').expect("a port").1.parse::<u16>().expect("a number");
    let link = Link::to(port(&server)).await;
    let page = Page::about(&format!("http://127.0.0.1:{}", link.port()), &[]);
    browser.go(&format!("{}/events?prefix=/r/", page.url)).await;
    browser.wait_for("Waiting for events").await;
    Client::connect(server.endpoint()).await.put("/r/before", b"1").await;
    browser.wait_for("/r/before").await;
    server.kill();
    browser.wait_for("The server does not answer.").await;
    server.restart().await;
    Client::connect(server.endpoint()).await.put("/r/meanwhile", b"1").await;
    link.set_target(port(&server));
    browser.wait_for("/r/meanwhile").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_view_fits_a_telephone_in_the_dark() {
    let Some(browser) = Browser::open(Colours::Dark, 390, 844).await else { return };
    let (server, client) = full_server().await;
    let page = Page::about(server.endpoint(), &[]);
    let load = load(&client);
    browser.go(&page.url).await;
    browser.wait_for("KV/Put").await;
    look(&browser, "overview-telephone").await;
    for (name, path, wanted) in [
        ("sizes-telephone", "/sizes?prefix=/registry/", "By prefix"),
        ("keys-telephone", "/keys?prefix=/registry/", "deployments/"),
        ("deleted-telephone", "/deleted?prefix=/registry/deployments/", DELETED_KEY),
        ("key-telephone", "/key?key=/registry/deployments/default/web", "replicas: 5"),
        ("events-telephone", "/events?prefix=/registry/", "/registry/events/default/web."),
    ] {
        browser.go(&format!("{}{path}", page.url)).await;
        browser.wait_for(wanted).await;
        look(&browser, name).await;
    }
    load.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn person_logs_in_and_out() {
    let Some(browser) = Browser::open(Colours::Dark, 1000, 700).await else { return };
    let server = Server::orlop_with(Backend::Sqlite, &CHEAP).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    client.put("a/1", b"<script>document.title = 'hacked'</script><b>bold</b>\n").await;
    enable(&mut client).await;
    let page = Page::about(server.endpoint(), &["--user", "user"]);
    browser.go(&format!("{}/key?key=a/1", page.url)).await;
    browser.wait_for("Log in").await;
    // The form to log in answers 401, which browsers report.
    browser.type_in("#password", &password("user")).await;
    look_without_console(&browser, "login").await;
    browser.click("form.login button").await;
    browser.wait_for("<script>document.title = 'hacked'</script><b>bold</b>").await;
    assert_eq!(browser.run("return document.title").await, "a/1 - Orlop");
    assert_eq!(browser.run("return document.cookie").await, "", "scripts cannot read the cookies");
    browser.go(&format!("{}/key?key=b/1", page.url)).await;
    browser.wait_for("Your user does not have the right to do this.").await;
    browser.click("form[action='/logout'] button").await;
    browser.wait_for("Log in").await;
    browser.go(&format!("{}/key?key=a/1", page.url)).await;
    browser.wait_for("Use a name and a password of the server.").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_token_leads_from_events_to_the_form_to_log_in() {
    let Some(browser) = Browser::open(Colours::Light, 1000, 700).await else { return };
    let server = Server::orlop_with(Backend::Sqlite, &CHEAP).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    let page = Page::about(server.endpoint(), &["--user", "user"]);
    browser.go(&format!("{}/events?prefix=a", page.url)).await;
    browser.type_in("#password", &password("user")).await;
    browser.click("form.login button").await;
    browser.wait_for("Waiting for events").await;
    browser.click("[data-pause]").await;
    browser.wait_for("Paused").await;
    act_as(&mut client, "root").await;
    let (name, password) = ("user".to_owned(), "new".to_owned());
    let change = AuthUserChangePasswordRequest { name, password, ..Default::default() };
    client.auth.user_change_password(change).await.expect("the password is changed");
    browser.click("[data-pause]").await;
    browser.wait_for("Use a name and a password of the server.").await;
}
