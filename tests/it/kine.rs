//! `orlop import kine`: the table of a kine, from each kind of database to both backends.

mod model;
mod odd;
mod source;
mod trace;

use orlop_wire::proto::client::{
    etcdserverpb::{LeaseLeasesRequest, LeaseTimeToLiveRequest, RangeRequest, WatchCreateRequest},
    mvccpb::{Event, KeyValue},
};
use sqlx::{Connection as _, PgConnection};
use tempfile::TempDir;

use self::source::{Kind, Row, Schema, Source};
use crate::support::{
    Backend, Client, Server, Stream, all, eventually, everything, get, home, on_both_backends, orlop, prints, run,
};

/// Key, create revision, mod revision, version and value of a pair.
type Pair<'a> = (&'a str, i64, i64, i64, &'a str);

/// A store that was filled from kine's table, served.
struct Imported {
    server: Server,
    client: Client,
    report: String,
    _home: TempDir,
}

impl Imported {
    /// Imports from an address. The store must be sound.
    async fn from(backend: Backend, url: &str) -> Option<Self> {
        let home = home();
        let datastore = backend.empty_database(home.path(), "imported.db").await?;
        let report = prints(&["import", "kine", "--from", url, "--datastore-endpoint", &datastore]);
        assert!(report.starts_with("imported ") && !report.contains("pass"), "{report}");
        let checked = prints(&["check", "--datastore-endpoint", &datastore]);
        assert!(checked.contains("The store is sound."), "{report}{checked}");
        let server = Server::orlop_on(&datastore, &[]).await;
        let client = Client::connect(server.endpoint()).await;
        Some(Self { server, client, report, _home: home })
    }

    /// Returns all pairs at a revision, 0 for the newest, and the newest revision.
    async fn range(&mut self, revision: i64) -> (Vec<KeyValue>, i64) {
        let range = RangeRequest { revision, ..all() };
        let answer = self.client.kv.range(range).await.expect("a range").into_inner();
        (answer.kvs, answer.header.expect("a header").revision)
    }

    /// Compares the pairs at a revision. Leases are not compared.
    #[track_caller]
    fn check_pairs(found: &[KeyValue], expected: &[Pair<'_>], what: &str) {
        let found: Vec<_> = found
            .iter()
            .map(|kv| {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                (text(&kv.key), kv.create_revision, kv.mod_revision, kv.version, text(&kv.value))
            })
            .collect();
        let expected: Vec<_> = expected
            .iter()
            .map(|(key, create, modified, version, value)| {
                ((*key).to_owned(), *create, *modified, *version, (*value).to_owned())
            })
            .collect();
        assert_eq!(found, expected, "{what}");
    }

    /// Checks that the oldest readable revision is `compacted`, 0 if there is none.
    async fn check_compacted(&mut self, compacted: i64) {
        let mut stream = Stream::open(&mut self.client).await;
        if compacted > 1 {
            let below = WatchCreateRequest { key: "\0".into(), start_revision: compacted - 1, ..Default::default() };
            stream.create(below).await;
            let answer = stream.next().await;
            assert!(answer.canceled && answer.compact_revision == compacted, "{answer:?}\n{}", self.report);
            let range = RangeRequest { revision: compacted - 1, ..get("k") };
            let refused = self.client.kv.range(range).await.expect_err("a compacted revision");
            assert!(refused.message().contains("has been compacted"), "{refused}");
        }
        let range = RangeRequest { revision: compacted, ..get("k") };
        self.client.kv.range(range).await.expect("the compact revision can be read");
    }

    /// Returns the events from a revision to the newest one, with previous pairs.
    async fn events(&mut self, from: i64) -> Vec<Event> {
        let (_, head) = self.range(0).await;
        let mut events = Vec::new();
        if from > head {
            return events;
        }
        let mut stream = Stream::open(&mut self.client).await;
        stream.create(WatchCreateRequest { prev_kv: true, ..everything(from) }).await;
        while events.last().and_then(|event: &Event| event.kv.as_ref()).is_none_or(|kv| kv.mod_revision < head) {
            events.extend(stream.next().await.events);
        }
        events
    }

    /// Checks that the next change has the next revision.
    async fn check_next(&mut self, expected: i64) {
        assert_eq!(self.client.put("next", "1").await, expected, "{}", self.report);
    }

    /// Returns the TTLs of all leases.
    async fn ttls(&mut self) -> Vec<i64> {
        let mut ttls = Vec::new();
        let listed = self.client.lease.lease_leases(LeaseLeasesRequest {}).await.expect("leases").into_inner();
        for lease in listed.leases {
            let asked = LeaseTimeToLiveRequest { id: lease.id, keys: true };
            let lease = self.client.lease.lease_time_to_live(asked).await.expect("a lease").into_inner();
            assert_eq!(lease.keys.len(), 1, "{lease:?}");
            ttls.push(lease.granted_ttl);
        }
        ttls.sort_unstable();
        ttls
    }
}

/// A table as kine 0.16 wrote it.
fn live_example() -> Vec<Row> {
    vec![
        Row::compaction(1, 0),
        Row::create(2, "/registry/health", 0, r#"{"health":"true"}"#),
        Row::create(3, "/a", 0, "1"),
        Row::create(4, "/b", 0, "x"),
        Row::update(5, "/a", 3, 3, "2"),
        Row::delete(6, "/b", 4),
        Row::create(7, "/l", 0, "v").lease(96),
        Row::update(8, "/l", 7, 7, "v2").lease(60),
        Row::create(9, "/b", 6, "again"),
        Row::delete(10, "/l", 8),
        Row::create(11, "compact_rev_key_apiserver", 0, "1|7"),
    ]
}

const HEALTH: Pair<'_> = ("/registry/health", 2, 2, 1, r#"{"health":"true"}"#);

async fn table_of_kine_is_imported(backend: Backend) {
    for kind in Kind::ALL {
        let Some(source) = Source::of(kind, &live_example()).await else { continue };
        let Some(mut imported) = Imported::from(backend, &source.url).await else { return };
        let (pairs, head) = imported.range(0).await;
        assert_eq!(head, 11, "{}", imported.report);
        let (a, b, apiserver) = (("/a", 3, 5, 2, "2"), ("/b", 9, 9, 1, "again"), ("compact_rev_key", 11, 11, 1, "7"));
        Imported::check_pairs(&pairs, &[a, b, HEALTH, apiserver], "at the newest revision");
        let at_4 = [("/a", 3, 3, 1, "1"), ("/b", 4, 4, 1, "x"), HEALTH];
        Imported::check_pairs(&imported.range(4).await.0, &at_4, "at revision 4");
        let at_8 = [a, ("/l", 7, 8, 2, "v2"), HEALTH];
        Imported::check_pairs(&imported.range(8).await.0, &at_8, "at revision 8");
        imported.check_compacted(0).await;
        let events = imported.events(2).await;
        let revisions: Vec<i64> = events.iter().filter_map(|event| Some(event.kv.as_ref()?.mod_revision)).collect();
        assert_eq!(revisions, (2..=11).collect::<Vec<i64>>(), "each row is one event");
        let before = |at: usize| events[at - 2].prev_kv.as_ref().map(|kv| kv.value.to_vec());
        assert_eq!(before(5), Some(b"1".to_vec()));
        assert_eq!(before(6), Some(b"x".to_vec()));
        assert_eq!(before(9), None, "a creation");
        assert_eq!(imported.ttls().await, [0_i64; 0], "the key with a TTL is deleted");
        assert!(imported.report.contains("rows without sense none"), "{}", imported.report);
        imported.check_next(12).await;
    }
}

async fn compacted_table_of_kine_is_imported(backend: Backend) {
    let mut rows = live_example();
    rows[0] = Row::compaction(1, 11);
    rows.retain(|row| [1, 2, 5, 9, 11].contains(&row.id));
    for kind in Kind::ALL {
        let Some(source) = Source::of(kind, &rows).await else { continue };
        let Some(mut imported) = Imported::from(backend, &source.url).await else { return };
        let pairs = [("/a", 3, 5, 2, "2"), ("/b", 9, 9, 1, "again"), HEALTH, ("compact_rev_key", 11, 11, 1, "7")];
        let (found, head) = imported.range(0).await;
        Imported::check_pairs(&found, &pairs, "at the newest revision");
        assert_eq!(head, 11);
        imported.check_compacted(11).await;
        assert!(imported.report.contains("1 keys, whose creation kine has compacted"), "{}", imported.report);
        imported.check_next(12).await;
        imported.server.restart().await;
        imported.client = Client::connect(imported.server.endpoint()).await;
        assert_eq!(imported.events(12).await.len(), 1, "{}", imported.report);
    }
}

/// kine's compact revision is kept if every revision above it has a change, so that its clients can go on.
async fn watches_resume_above_the_compact_revision(backend: Backend) {
    let rows = [
        Row::compaction(1, 4),
        Row::update(4, "/a", 2, 3, "at 4"),
        Row::create(5, "/b", 0, "at 5"),
        Row::update(6, "/a", 2, 4, "at 6"),
        Row::delete(7, "/a", 6),
    ];
    for kind in Kind::ALL {
        let Some(source) = Source::of(kind, &rows).await else { continue };
        let Some(mut imported) = Imported::from(backend, &source.url).await else { return };
        imported.check_compacted(4).await;
        Imported::check_pairs(&imported.range(4).await.0, &[("/a", 2, 4, 2, "at 4")], "at the compact revision");
        let events = imported.events(5).await;
        let seen = events.iter().map(|event| {
            let kv = event.kv.as_ref().expect("an event has a pair");
            let prev = event.prev_kv.as_ref().map(|kv| (kv.mod_revision, kv.version));
            (event.r#type, kv.mod_revision, kv.version, prev)
        });
        let expected = [(0, 5, 1, None), (0, 6, 3, Some((4, 2))), (1, 7, 0, Some((6, 3)))];
        assert_eq!(seen.collect::<Vec<_>>(), expected);
    }
}

async fn keys_with_a_ttl_get_a_lease_each(backend: Backend) {
    let rows = [
        Row::compaction(1, 0),
        Row::create(2, "/a", 0, "1").lease(3_600),
        Row::create(3, "/b", 0, "1").lease(3_600),
        Row::create(4, "/c", 0, "1").lease(60),
        Row::update(5, "/c", 4, 4, "2").lease(600),
        Row::create(6, "/d", 0, "1").lease(60),
        Row::update(7, "/d", 6, 6, "2"),
        Row::create(8, "/short", 0, "1").lease(1),
        Row::create(9, "/gone", 0, "1").lease(60),
        Row::delete(10, "/gone", 9).lease(60),
    ];
    for kind in Kind::ALL {
        let Some(source) = Source::of(kind, &rows).await else { continue };
        let Some(mut imported) = Imported::from(backend, &source.url).await else { return };
        assert!(imported.report.contains("leases             4,"), "{}", imported.report);
        let expired = |(pairs, head): (Vec<KeyValue>, i64)| if pairs.len() == 4 { Ok(head) } else { Err(pairs) };
        let mut head = 0;
        for _ in 0..300 {
            match expired(imported.range(0).await) {
                Ok(at) => {
                    head = at;
                    break;
                }
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(100)).await,
            }
        }
        assert_eq!(head, 11, "the key with a TTL of one second is deleted");
        assert_eq!(imported.ttls().await, [600, 3_600, 3_600]);
        let (pairs, _) = imported.range(0).await;
        let leases: Vec<i64> = pairs.iter().map(|kv| kv.lease).collect();
        assert!(leases[0] != leases[1] && !leases.contains(&3_600) && leases[3] == 0, "{leases:?}");
    }
}

async fn narrow_columns_of_old_tables_are_read(backend: Backend) {
    for kind in Kind::ALL {
        let Some(source) = Source::new(kind, Schema::Old).await else { continue };
        source.add(&live_example()).await;
        let Some(mut imported) = Imported::from(backend, &source.url).await else { return };
        let (pairs, head) = imported.range(0).await;
        assert_eq!((pairs.len(), head), (4, 11), "{}", imported.report);
    }
}

/// Each page is read by the index. Reading to the end of the table for each of them takes minutes for a large table.
async fn pages_of_large_tables_are_found_by_index(backend: Backend) {
    for schema in [Schema::Current, Schema::Old] {
        let Some(source) = Source::new(Kind::Postgres, schema).await else { return };
        source.add(&[Row::compaction(1, 0)]).await;
        let rows = "INSERT INTO kine (id, name, created, prev_revision) \
            SELECT id, '/' || id, 1, 0 FROM generate_series(2, 20000) AS id; ANALYZE kine";
        source.sql(rows).await;
        let Some(imported) = Imported::from(backend, &source.url).await else { return };
        assert!(imported.report.contains("revision           20000"), "{}", imported.report);
        let sql = "SELECT (seq_tup_read + idx_tup_fetch)::bigint FROM pg_stat_user_tables WHERE relname = 'kine'";
        // A session reports its reads when it ends.
        let reads = eventually("the number of reads", async || {
            let mut connection = PgConnection::connect(&source.own).await.expect("a connection");
            let reads: i64 = sqlx::query_scalar(sql).fetch_one(&mut connection).await.expect("a number");
            if reads >= 40_000 { Ok(reads) } else { Err(reads) }
        })
        .await;
        assert!(reads < 200_000, "{reads} reads of rows");
    }
}

/// MySQL's addresses in both forms; the path of a file; a file with a WAL that a killed process has left.
async fn every_form_of_address_is_accepted(backend: Backend) {
    if let Some(source) = Source::of(Kind::MySql, &live_example()).await {
        let url = source.own.clone();
        let Some(imported) = Imported::from(backend, &url).await else { return };
        assert!(imported.report.starts_with("imported mysql://127.0.0.1:"), "{}", imported.report);
    }
    let Some(source) = Source::of(Kind::Sqlite, &live_example()).await else { return };
    let mut connection = source.sqlite().await;
    let sql = "PRAGMA journal_mode = WAL; PRAGMA wal_autocheckpoint = 0; UPDATE kine SET value = 'wal' WHERE id = 5";
    sqlx::raw_sql(sql).execute(&mut connection).await.expect("a statement");
    let copy = TempDir::new().expect("a folder");
    for suffix in ["", "-wal"] {
        let name = format!("state.db{suffix}");
        std::fs::copy(source.file().with_file_name(&name), copy.path().join(&name)).expect("a copy");
    }
    let file = copy.path().join("state.db");
    let Some(mut imported) = Imported::from(backend, &file.display().to_string()).await else { return };
    assert_eq!(&imported.range(0).await.0[0].value[..], b"wal");
}

/// kine has no quota, and a server refuses writes while its store is above its quota.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn table_above_the_quota_is_imported_with_a_warning() {
    let (first, second) = ("1".repeat(100_000), "2".repeat(100_000));
    let rows = [Row::compaction(1, 0), Row::create(2, "/a", 0, &first), Row::update(3, "/a", 2, 2, &second)];
    let source = Source::of(Kind::Sqlite, &rows).await.expect("SQLite is built in");
    for (quota, is_above) in [("150000", true), ("250000", false)] {
        let home = home();
        let datastore = Backend::Sqlite.empty_database(home.path(), "imported.db").await.expect("SQLite is built in");
        let mut import = orlop(["import", "kine", "--from", &source.url, "--datastore-endpoint", &datastore]);
        let output = run(import.env("ORLOP_QUOTA_BACKEND_BYTES", quota));
        let report = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{quota}: {report}{}", String::from_utf8_lossy(&output.stderr));
        assert!(report.contains("size               about 195.5 KiB"), "{quota}: {report}");
        assert_eq!(report.contains("Warning: a server with the quota"), is_above, "{quota}: {report}");
    }
}

on_both_backends!(
    table_of_kine_is_imported,
    compacted_table_of_kine_is_imported,
    watches_resume_above_the_compact_revision,
    keys_with_a_ttl_get_a_lease_each,
    narrow_columns_of_old_tables_are_read,
    pages_of_large_tables_are_found_by_index,
    every_form_of_address_is_accepted,
);
