//! A database file of SQLite has one process, by whatever name it is opened.

use std::{os::unix::fs::symlink, path::Path};

use orlop_wire::proto::client::etcdserverpb::PutRequest;

use crate::{
    start::run,
    support::{Client, Server},
};

fn put() -> PutRequest {
    PutRequest { key: "k".into(), value: "value".into(), ..Default::default() }
}

fn endpoint(file: &Path) -> String {
    format!("sqlite://{}", file.display())
}

/// Runs orlop, which must fail with an error that contains `because`.
#[track_caller]
fn check_fails(home: &Path, arguments: &[&str], because: &str) {
    let output = run(home, arguments, &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains(because), "{arguments:?}: {text}");
}

/// SQLite keeps the WAL beside the file to which a link leads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn link_to_the_file_is_followed() {
    let home = tempfile::tempdir().expect("a folder");
    let (file, link, dangling) =
        (home.path().join("real.db"), home.path().join("link.db"), home.path().join("nothing.db"));
    symlink(&file, &link).expect("a link can be made");
    symlink(home.path().join("absent/orlop.db"), &dangling).expect("a link can be made");
    let listen = ["--listen-client-urls", "http://127.0.0.1:0"];
    let start =
        |file: &Path| [&["--datastore-endpoint".to_owned(), endpoint(file)], &listen.map(str::to_owned)[..]].concat();
    let check_start_fails = |file: &Path, because: &str| {
        let arguments = start(file);
        check_fails(home.path(), &arguments.iter().map(String::as_str).collect::<Vec<_>>(), because);
    };
    check_start_fails(&link, "is a link");
    check_start_fails(&dangling, "is a link");

    let mut server = Server::orlop_on(&endpoint(&file), &[]).await;
    Client::connect(server.endpoint()).await.kv.put(put()).await.expect("a put");
    check_start_fails(&link, "is in use by another orlop process");
    server.kill();
    let restored = endpoint(&home.path().join("restored.db"));
    let restore = ["snapshot", "restore", "link.db", "--skip-hash-check", "--datastore-endpoint", &restored];
    check_fails(home.path(), &restore, "is incomplete: the last commits are in");
    let again = Server::orlop_on(&endpoint(&link), &[]).await;
    let kept = Client::connect(again.endpoint()).await.kv.put(put()).await.expect("a put").into_inner();
    assert_eq!(kept.header.expect("a header").revision, 3);
}
