//! Deleted keys: they are found by their name and below their prefix, and put back.

use orlop_wire::proto::client::etcdserverpb::{
    CompactionRequest, DeleteRangeRequest, RequestOp, TxnRequest, request_op::Request,
};

use super::{get, link, page::Page};
use crate::support::{Backend, Client, Server, delete, on_both_backends, put};

/// Puts keys, many in each revision.
async fn put_all(client: &mut Client, keys: &[String]) {
    for keys in keys.chunks(100) {
        let success = keys.iter().map(|key| RequestOp { request: Some(Request::RequestPut(put(key, "1"))) }).collect();
        client.kv.txn(TxnRequest { success, ..TxnRequest::default() }).await.expect("a transaction");
    }
}

/// Returns the keys to whose pages a page has links.
fn keys(page: &str) -> Vec<&str> {
    let links = page.split("href=\"/key?key=").skip(1);
    links.map(|link| link.split(['"', '&']).next().expect("the end of a link")).collect()
}

async fn deleted_key_is_found_and_put_back(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &["--history-retention", "1h"]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for key in ["/r/a", "/r/ab", "/r/again", "/other"] {
        client.put(key, b"value\n").await;
        client.kv.delete_range(delete(key)).await.expect("a delete");
    }
    client.put("/r/again", b"value\n").await;
    client.put("/r/abc", b"value\n").await;
    let page = Page::with_password(server.endpoint(), &[]);
    let mut visitor = page.writer().await;
    // Its own name is a prefix of no key, or of another key.
    for key in ["/other", "/r/a"] {
        let names = visitor.open(&format!("/keys?prefix={key}")).await;
        assert_eq!(names.contains("There are no keys with this prefix."), key == "/other", "{names}");
        let history = names.find("not a key now").unwrap_or_else(|| panic!("no hint: {names}"));
        assert!(visitor.open(&link(&names[history..], "/key?key=")).await.contains("The key does not exist."));
    }
    for path in ["/keys?prefix=/r/", "/keys?prefix=/r/again"] {
        assert!(!visitor.open(path).await.contains("not a key now"), "{path}");
    }

    let names = visitor.open("/keys?prefix=/r/").await;
    let deleted = link(&names, "/deleted?prefix=");
    let found = visitor.open(&deleted).await;
    assert_eq!(keys(&found), ["/r/ab", "/r/a"], "{found}");
    assert_eq!(found.matches("<time ").count(), 2, "{found}");
    // The same from the archive.
    let revision = client.put("/r/abc", b"other\n").await;
    client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
    let found = visitor.open(&deleted).await;
    assert_eq!(keys(&found), ["/r/ab", "/r/a"], "{found}");

    let object = visitor.open(&link(&found, "/key?key=/r/a\"")).await;
    let form = visitor.open(&link(&object, "/put-back?key=/r/a")).await;
    assert_eq!(visitor.confirm(&form, &[]).await.status, 303);
    assert_eq!(get(&mut client, "/r/a").await.map(|(value, _)| value), Some(b"value\n".to_vec()));
    let found = visitor.open(&deleted).await;
    assert_eq!(keys(&found), ["/r/ab"], "{found}");
    assert!(visitor.open("/deleted?prefix=nothing").await.contains("There are none in these revisions."));
}

/// A page has at most 200 keys. The first search reads more than one span of revisions.
async fn search_ends_and_goes_on_where_it_ended(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let written: Vec<String> = (0..260).map(|number| format!("/r/{number:03}")).collect();
    put_all(&mut client, &written).await;
    for key in &written {
        client.kv.delete_range(delete(key)).await.expect("a delete");
    }
    for _ in 0..400 {
        client.put("/other", b"1").await;
    }
    let page = Page::about(server.endpoint(), &[]);
    let mut visitor = page.visitor();
    let (mut path, mut found) = ("/deleted?prefix=/r/".to_owned(), Vec::new());
    loop {
        let page = visitor.open(&path).await;
        let shown = keys(&page);
        assert!(shown.len() <= 200, "{} keys", shown.len());
        found.extend(shown.into_iter().map(str::to_owned));
        let Some(next) = page.find("rel=\"next\"") else { break };
        assert!(page.contains("A search ends after 200 keys or 3 s."), "{page}");
        path = link(&page[next..], "/deleted?prefix=");
    }
    let newest_first: Vec<String> = written.into_iter().rev().collect();
    assert_eq!(found, newest_first);

    // More keys of one revision than a page has.
    let written: Vec<String> = (0..300).map(|number| format!("/s/{number:03}")).collect();
    put_all(&mut client, &written).await;
    let request = DeleteRangeRequest { key: "/s/".into(), range_end: "/s0".into(), ..Default::default() };
    client.kv.delete_range(request).await.expect("a delete");
    for (prefix, count, is_cut) in [("/s/", 200, true), ("/s/2", 100, false)] {
        let page = visitor.open(&format!("/deleted?prefix={prefix}")).await;
        assert_eq!(keys(&page).len(), count, "{prefix}: {page}");
        assert_eq!(page.contains("search for a longer prefix"), is_cut, "{prefix}: {page}");
    }
}

on_both_backends!(deleted_key_is_found_and_put_back, search_ends_and_goes_on_where_it_ended);
