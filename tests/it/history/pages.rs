//! Pages of states and changes: how large a message is, and that nothing is missing between two of them.

use super::*;

/// The first key and the end of a range of keys.
type Range<'a> = (&'a [u8], &'a [u8]);

const VALUE_BYTES: usize = 1 << 20;
const MESSAGE_BYTES_MAX: usize = 8 << 20;

/// Checks the bytes of a message: of its keys and values, and of the other fields, which are less than 100 per pair.
#[track_caller]
fn check_size<'a>(pairs: impl Iterator<Item = &'a KeyValue>, what: &str) {
    let bytes: usize = pairs.map(|kv| kv.key.len() + kv.value.len() + 100).sum();
    assert!(bytes < MESSAGE_BYTES_MAX, "{what}: a message of {bytes} bytes");
}

/// Compares the state at a revision, without printing values.
async fn check_pairs(client: &mut Client, model: &Model, revision: i64) {
    let (key, range_end) = ("\0".into(), "\0".into());
    let mut pages = client.history.pairs(HistoryPairsRequest { key, range_end, revision }).await.expect("a state");
    let mut found = Vec::new();
    while let Some(page) = pages.get_mut().message().await.expect("a page") {
        check_size(page.kvs.iter(), &format!("the state at {revision}"));
        found.extend(page.kvs);
    }
    assert!(found == model.pairs(revision, |_| true), "{} pairs at {revision}", found.len());
}

async fn check_changes(client: &mut Client, model: &Model, range: (&[u8], &[u8]), newest_first: bool) {
    let request = HistoryChangesRequest { newest_first, ..changes_of(range, 1, model.head()) };
    let mut pages = client.history.changes(request).await.expect("changes");
    let mut found: Vec<ModelChange> = Vec::new();
    while let Some(page) = pages.get_mut().message().await.expect("a page") {
        check_size(page.changes.iter().filter_map(|change| change.kv.as_ref()), &format!("changes of {range:?}"));
        for change in page.changes {
            let kv = change.kv.expect("a change has a pair");
            found.push((kv.mod_revision, kv.key.to_vec(), (!change.deleted).then_some(kv)));
        }
    }
    let mut expected = model.changes(1, model.head(), |key| contains(range, key));
    if newest_first {
        expected.reverse();
    }
    assert!(found == expected, "{} changes of {range:?}, newest first: {newest_first}", found.len());
}

async fn pages_of_large_values_are_bounded(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    for number in 0..10 {
        let value = number.to_string().repeat(VALUE_BYTES);
        put(&mut client, &mut model, "a", &value).await;
        put(&mut client, &mut model, &format!("key/{number}"), &value).await;
    }
    let before = model.head();
    for number in [0, 1, 5] {
        put(&mut client, &mut model, &format!("key/{number}"), &"x".repeat(VALUE_BYTES)).await;
    }
    for is_compacted in [false, true] {
        if is_compacted {
            // Old values of `a`, and two pairs of the state before, are in the archive from now on.
            compact(&mut client, before + 2).await;
        }
        for revision in [before, model.head()] {
            check_pairs(&mut client, &model, revision).await;
        }
        let ranges: [(Range<'_>, bool); 3] = [((b"a", b""), false), ((b"a", b""), true), ((b"key/", b"key0"), false)];
        for (range, newest_first) in ranges {
            check_changes(&mut client, &model, range, newest_first).await;
        }
    }
}

on_both_backends!(pages_of_large_values_are_bounded);
