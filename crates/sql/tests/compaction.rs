//! Tests of compaction in a SQLite log.

use std::sync::Arc;

use bytes::Bytes;
use orlop_core::{
    auth::Caller,
    store::{
        Settings, Store,
        request::{CompactionWait, DeleteRequest, Op, PutLease, PutRequest, PutValue, TxnRequest},
    },
    types::{KeyRange, Revision},
};
use orlop_sql::SqliteLog;

/// A transaction puts a key and then deletes all keys. A compaction at its revision must keep the first row, although
/// the second replaces it, because the head is read from the first rows.
#[tokio::test]
async fn compaction_at_the_head_keeps_the_head() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("log.db");
    let open = async || {
        let log = Arc::new(SqliteLog::open(&file).await.unwrap());
        Store::open(log, Settings { value_cache_bytes: 0, ..Settings::default() }).await.unwrap()
    };
    let put = || PutRequest {
        key: Bytes::from_static(b"a"),
        value: PutValue::New(Bytes::from_static(b"value")),
        lease: PutLease::Set(None),
        prev_kv: false,
    };
    let delete = DeleteRequest { range: KeyRange::from_wire(b"\0", b"\0"), prev_kv: false };

    let store = open().await;
    let success = vec![Op::Put(put()), Op::Delete(delete)];
    let txn = TxnRequest { compares: vec![], success, failure: vec![] };
    assert_eq!(store.txn(&Caller::Server, txn).await.unwrap().revision, Revision(2));
    store.compact(&Caller::Server, Revision(2), CompactionWait::ForRows).await.unwrap();
    assert_eq!(store.log().meta().await.unwrap().position.head, Revision(2));
    store.stop().await;
    drop(store);

    let store = open().await;
    assert_eq!(store.head(), Revision(2));
    assert_eq!(store.put(&Caller::Server, put()).await.unwrap().revision, Revision(3));
    store.stop().await;
}
