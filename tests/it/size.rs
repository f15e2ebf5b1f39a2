//! A large store is loaded, read in pages, deleted and compacted; memory and files shrink again.
//!
//! `ORLOP_SIZE_KEYS` sets the number of keys. The default is 150,000. If `CI` is set, it is 1,000,000 on SQLite and 300,000
//! on Postgres.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

use orlop_wire::proto::client::etcdserverpb::{
    CompactionRequest, DefragmentRequest, DeleteRangeRequest, RangeRequest, RequestOp, StatusRequest, StatusResponse,
    TxnRequest, request_op::Request,
};

use sqlx::{ConnectOptions as _, Connection as _, Executor as _, PgConnection, sqlite::SqliteConnectOptions};
use tokio::time::timeout;
use tonic::Code;

use crate::support::{
    Backend, Client, DEADLINE, Postgres, Random, Server, database_name, env_number, eventually, memory_kib,
    on_both_backends, prints, put, range, skip,
};

const LOADERS: usize = 8;
const TXN_KEYS: usize = 128;
const PAGE_KEYS: i64 = 10_000;

async fn large_store_is_read_in_pages_and_shrinks_after_compaction(backend: Backend) {
    let default = match (std::env::var_os("CI").is_some(), backend) {
        (true, Backend::Sqlite) => 1_000_000,
        (true, Backend::Postgres) => 300_000,
        (false, _) => 150_000,
    };
    let keys: usize = env_number("ORLOP_SIZE_KEYS").unwrap_or(default);
    // A small value cache, so that the test measures the index.
    let Some(mut server) = Server::orlop_with(backend, &["--value-cache-bytes", "8388608"]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    load(server.endpoint(), keys).await;
    read_in_pages(&mut client, keys).await;

    let restart = Instant::now();
    server.restart().await;
    println!("{keys} keys: started in {:?}", restart.elapsed());
    let mut client = Client::connect(server.endpoint()).await;
    let file = file_bytes(&mut client).await;

    // A compaction at the revision of the delete would keep the tombstones. A compaction at a later revision, which a
    // put creates, deletes them.
    // On a busy machine, Postgres's time limit for a statement is too short for all keys at once.
    for part in 0..16 {
        delete(&client, keys * part / 16..keys * (part + 1) / 16).await;
    }
    // The index now has two rows of each key.
    let memory = memory_kib(server.pid(), "VmRSS");
    for _ in 0..2 {
        let revision = client.put("last", "").await;
        client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
    }
    let memory_after = memory_kib(server.pid(), "VmRSS");
    println!("memory {memory} to {memory_after} KiB");
    // The allocator may retain more memory than a small index frees.
    if keys >= 1_000_000 {
        assert!(memory_after < memory * 3 / 4, "the index frees memory: {memory_after} of {memory} KiB are left");
    }
    read_in_pages(&mut client, 1).await;
    match server.datastore() {
        None => file_shrinks(&mut client, &server, file).await,
        Some(database) => tables_shrink(&mut client, database, file).await,
    }
}

/// Deletes keys, again if the database did not answer in time.
async fn delete(client: &Client, keys: Range<usize>) {
    let request =
        DeleteRangeRequest { key: key(keys.start).into(), range_end: key(keys.end).into(), ..Default::default() };
    let attempts = AtomicUsize::new(0);
    let deleted = eventually("a delete", async || {
        attempts.fetch_add(1, Ordering::Relaxed);
        match client.clone().kv.delete_range(request.clone()).await {
            Err(error) if error.code() == Code::Unavailable => Err(error),
            deleted => Ok(deleted.expect("a delete").into_inner().deleted),
        }
    })
    .await;
    // An attempt without an answer may have deleted the keys.
    let is_all = deleted == keys.len() as i64;
    assert!(is_all || attempts.into_inner() > 1 && deleted == 0, "{deleted} of {} keys", keys.len());
}

/// SQLite returns unused pages to the file system.
async fn file_shrinks(client: &mut Client, server: &Server, before: i64) {
    eventually("the decrease of the reported size", || {
        let mut client = client.clone();
        async move {
            let after = file_bytes(&mut client).await;
            if after < before / 4 { Ok(()) } else { Err(after) }
        }
    })
    .await;
    let database = server.data_dir().join("orlop.db");
    eventually("the decrease of the file's size on the disk", || {
        let bytes = database.metadata().map(|metadata| metadata.len()).unwrap_or(u64::MAX);
        async move { if bytes < before.cast_unsigned() / 4 { Ok(()) } else { Err(bytes) } }
    })
    .await;
}

/// A file that another program created, for example from a dump: it never returns free pages.
#[tokio::test]
async fn defragmentation_ends_on_a_file_without_auto_vacuum() {
    let mut server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    assert!(server.terminate().await.success());
    let options = SqliteConnectOptions::new().filename(server.data_dir().join("orlop.db"));
    let mut connection = options.connect().await.expect("the database opens");
    connection.execute("PRAGMA auto_vacuum = 0").await.expect("the setting");
    connection.execute("VACUUM").await.expect("the file is written again");
    connection.close().await.expect("the connection closes");
    server.restart().await;
    let mut client = Client::connect(server.endpoint()).await;
    let mut revision = 0;
    for _ in 0..20 {
        revision = client.put("a", vec![7; 100_000]).await;
    }
    client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
    let ended = timeout(DEADLINE, client.maintenance.defragment(DefragmentRequest {})).await;
    ended.expect("the defragmentation ends").expect("a defragmentation");
    assert!(server.log().contains("without auto_vacuum"), "{}", server.log_tail());
}

/// Postgres keeps the pages of deleted rows until a vacuum, and autovacuum may run much later.
async fn tables_shrink(client: &mut Client, database: &str, before: i64) {
    let mut database = PgConnection::connect(database).await.expect("the database exists");
    let count = sqlx::query_scalar("SELECT (SELECT count(*) FROM kv_log) + (SELECT count(*) FROM kv_log_more)");
    let rows: i64 = count.fetch_one(&mut database).await.expect("the tables can be read");
    assert!(rows < 10, "compacted rows are deleted: {rows} are left");
    sqlx::query("VACUUM kv_log, kv_log_more").execute(&mut database).await.expect("an owner may vacuum");
    let after = file_bytes(client).await;
    println!("tables {before} to {after} bytes");
    assert!(after < before / 2, "deleted rows use no space: {after} of {before} bytes are left");
}

/// Postgres' default, pglz, takes several times as long.
#[tokio::test]
async fn large_values_are_compressed_with_lz4_unless_a_setting_says_otherwise() {
    let Some(postgres) = Postgres::shared().await else { return };
    let has_lz4 =
        "SELECT count(*) FROM pg_settings WHERE name = 'default_toast_compression' AND 'lz4' = ANY (enumvals)";
    if postgres.psql("postgres", has_lz4) == "0" {
        return skip("lz4 in Postgres");
    }
    for (setting, compression) in [("work_mem = '8MB'", "lz4"), ("default_toast_compression = pglz", "pglz")] {
        let endpoint = postgres.create_database();
        let database = database_name(&endpoint);
        postgres.psql("postgres", &format!("ALTER DATABASE {database} SET {setting}"));
        let server = Server::orlop_on(&endpoint, &[]).await;
        let puts = ["a", "b"].map(|key| {
            let put = put(key, "compressible ".repeat(1_000));
            RequestOp { request: Some(Request::RequestPut(put)) }
        });
        let txn = TxnRequest { success: puts.into(), ..Default::default() };
        Client::connect(server.endpoint()).await.kv.txn(txn).await.expect("a transaction");
        for table in ["kv_log", "kv_log_more"] {
            let used = format!("SELECT pg_column_compression(value) FROM {database}.{table} WHERE value IS NOT NULL");
            assert_eq!(postgres.psql(database, &used), compression, "{table}, {setting}");
        }
    }
}

/// The bytes in use of a table of more than 64 MiB are those of a sample of its pages, multiplied.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn free_space_of_large_tables_is_found_near_the_quota() {
    const KEYS: usize = 66_000;
    const VALUE_BYTES: usize = 1_900;
    let Some(postgres) = Postgres::shared().await else { return };
    let endpoint = postgres.create_database();
    let mut server = Server::orlop_on(&endpoint, &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    let mut random = Random::new(1);
    for txn in 0..KEYS / TXN_KEYS {
        // Every third key is kept, so each page has some free space later.
        let puts = (0..TXN_KEYS).map(|number| {
            let prefix = if number % 3 == 0 { "kept" } else { "deleted" };
            let value: Vec<u8> = (0..VALUE_BYTES).map(|_| random.below(256) as u8).collect();
            let put = put(format!("{prefix}/{txn}/{number}"), value);
            RequestOp { request: Some(Request::RequestPut(put)) }
        });
        client.kv.txn(TxnRequest { success: puts.collect(), ..Default::default() }).await.expect("there is space");
    }
    let full = file_bytes(&mut client).await;
    let delete = DeleteRangeRequest { key: "deleted/".into(), range_end: "deleted0".into(), ..Default::default() };
    client.kv.delete_range(delete).await.expect("a delete");
    let revision = client.put("last", "").await;
    client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
    assert!(server.terminate().await.success());
    // The size is measured because the kept keys take more than three quarters of this quota.
    let server = Server::orlop_on(&endpoint, &["--quota-backend-bytes=60000000"]).await;
    let client = Client::connect(server.endpoint()).await;
    let (low, high) = (full * 30 / 100, full * 36 / 100);
    eventually("the size of the kept keys", async || {
        let status = client.clone().maintenance.status(StatusRequest {}).await.expect("a status").into_inner();
        match status.db_size_in_use {
            in_use if (low..high).contains(&in_use) => Ok(()),
            in_use => Err(format!("{in_use} of {full} bytes are in use, expected {low} to {high}")),
        }
    })
    .await;
}

/// Revisions only increase, so a page of an index of which a compaction leaves one entry is never filled again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_indexes_with_few_entries_use_no_quota_and_are_returned() {
    let Some(postgres) = Postgres::shared().await else { return };
    let endpoint = postgres.create_database();
    let schema = database_name(&endpoint);
    let mut server = Server::orlop_on(&endpoint, &[]).await;
    write_sparsely(&mut Client::connect(server.endpoint()).await).await;
    postgres.psql(schema, &format!("VACUUM {schema}.kv_log_more"));
    // As a rebuild that failed leaves it.
    let leftover = format!(
        "CREATE UNIQUE INDEX kv_log_more_pkey_ccnew ON {schema}.kv_log_more (id, sub); \
         UPDATE pg_index SET indisvalid = false WHERE indexrelid = '{schema}.kv_log_more_pkey_ccnew'::regclass"
    );
    postgres.psql(schema, &leftover);

    server.restart_with(&["--quota-backend-bytes", "1000000"]).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.kv.put(put("more", "")).await.expect("there is space");
    let before = status(&mut client).await;
    client.maintenance.defragment(DefragmentRequest {}).await.expect("a defragmentation");
    let after = status(&mut client).await;
    assert!(after.db_size < before.db_size - 1_500_000, "{} of {} bytes are left", after.db_size, before.db_size);
    // 401 rows of about 125 bytes, and the table of facts.
    assert!(after.db_size_in_use < 200_000, "{} bytes are in use", after.db_size_in_use);
    let indexes = format!(
        "SELECT relname FROM pg_class JOIN pg_index ON indexrelid = oid \
         WHERE indrelid = '{schema}.kv_log_more'::regclass"
    );
    assert_eq!(postgres.psql(schema, &indexes), "kv_log_more_pkey");

    fill_and_empty(&mut client).await;
    prints(&["check", "--datastore-endpoint", &endpoint]);
}

/// Writes 60,000 versions of 100 keys, and a key after each 200 of them. Compacts, so that one row of about 200 is left.
async fn write_sparsely(client: &mut Client) {
    let put = |key: String| RequestOp { request: Some(Request::RequestPut(put(key, ""))) };
    let mut revision = 0;
    for number in 0..600 {
        let kept = (number % 2 == 0).then(|| format!("kept/{number}"));
        let success = (0..100).map(|key| format!("replaced/{key}")).chain(kept).map(put).collect();
        let written = client.kv.txn(TxnRequest { success, ..Default::default() }).await.expect("a transaction");
        revision = written.into_inner().header.expect("a header").revision;
    }
    client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
}

/// Writes until the quota is used up, deletes everything, and waits until writes are accepted again.
async fn fill_and_empty(client: &mut Client) {
    // Random values, so that the database cannot compress them.
    let mut random = Random::new(1);
    let mut written = 0;
    let refused = loop {
        let value: Vec<u8> = (0..50_000).map(|_| random.below(256) as u8).collect();
        match client.kv.put(put("filler", value)).await {
            Ok(_) => written += 1,
            Err(refused) => break refused,
        }
        assert!(written < 100, "5 MB were written, although the quota is 1 MB");
    };
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
    let all = DeleteRangeRequest { key: "\0".into(), range_end: "\0".into(), ..Default::default() };
    let deleted = client.kv.delete_range(all).await.expect("deletes are served").into_inner();
    let revision = deleted.header.expect("a header").revision;
    client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("compactions are served");
    client.maintenance.defragment(DefragmentRequest {}).await.expect("a defragmentation");
    eventually("free space", async || client.clone().kv.put(put("more", "")).await.map(drop)).await;
}

fn key(number: usize) -> String {
    format!("/registry/things/{number:08}")
}

async fn load(endpoint: &str, keys: usize) {
    let started = Instant::now();
    let mut loaders = Vec::new();
    for loader in 0..LOADERS {
        let mut client = Client::connect(endpoint).await;
        loaders.push(tokio::spawn(async move {
            let own: Vec<usize> = (loader..keys).step_by(LOADERS).collect();
            for chunk in own.chunks(TXN_KEYS) {
                let put = |number: &usize| put(key(*number), [b'v'; 100]);
                let success = chunk.iter().map(|number| RequestOp { request: Some(Request::RequestPut(put(number))) });
                let txn = TxnRequest { success: success.collect(), ..Default::default() };
                client.kv.txn(txn).await.expect("a transaction");
            }
        }));
    }
    for loader in loaders {
        loader.await.expect("every transaction is answered");
    }
    println!("{keys} keys: loaded in {:?}", started.elapsed());
}

/// Lists as Kubernetes does: all pages at the revision of the first page. Each response contains the number of keys
/// from its page on.
async fn read_in_pages(client: &mut Client, keys: usize) {
    let (mut from, mut revision, mut seen) = (b"\0".to_vec(), 0, 0);
    loop {
        let request = RangeRequest { limit: PAGE_KEYS, revision, ..range(from, "\0") };
        let page = client.kv.range(request).await.expect("a page").into_inner();
        assert_eq!(page.count, (keys - seen) as i64);
        assert!(page.kvs.is_sorted_by(|a, b| a.key < b.key));
        seen += page.kvs.len();
        if !page.more {
            break;
        }
        revision = page.header.expect("a header").revision;
        from = [&page.kvs.last().expect("a page that is not the last has pairs").key[..], &[0]].concat();
    }
    assert_eq!(seen, keys);
}

async fn file_bytes(client: &mut Client) -> i64 {
    status(client).await.db_size
}

async fn status(client: &mut Client) -> StatusResponse {
    client.maintenance.status(StatusRequest {}).await.expect("a status").into_inner()
}

on_both_backends!(large_store_is_read_in_pages_and_shrinks_after_compaction,);
