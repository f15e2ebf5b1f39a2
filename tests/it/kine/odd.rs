//! Tables with revisions that have no change, with rows that make no sense, and tables that are refused.

use super::*;
use crate::support::{MySql, orlop, run};

/// A table, and what is served after its import.
struct Case<'a> {
    name: &'a str,
    rows: Vec<Row>,
    /// Statements after the rows were inserted.
    sql: &'a str,
    head: i64,
    compacted: i64,
    pairs: Vec<Pair<'a>>,
    report: &'a [&'a str],
}

/// A table without compaction that ends with these rows.
fn rows(rows: &[Row]) -> Vec<Row> {
    [&[Row::compaction(1, 0), Row::create(2, "/a", 0, "1")], rows].concat()
}

const A: Pair<'_> = ("/a", 2, 2, 1, "1");

fn holes() -> Vec<Case<'static>> {
    let case =
        |name, rows, head, compacted, pairs, report| Case { name, rows, sql: "", head, compacted, pairs, report };
    let b = |id| Row::create(id, "/b", 0, "1");
    vec![
        case(
            "a gap row",
            rows(&[Row::gap(3), b(4)]),
            4,
            3,
            vec![A, ("/b", 4, 4, 1, "1")],
            &["1 revisions above it have no change; the last of them is 3", "1 gap rows", "No key is lost"],
        ),
        case("a gap row at the end", rows(&[b(3), Row::gap(4)]), 4, 4, vec![A, ("/b", 3, 3, 1, "1")], &["is 4"]),
        case(
            "a name like a gap row's",
            rows(&[Row::create(3, "gap-4", 0, "")]),
            3,
            0,
            vec![A, ("gap-4", 3, 3, 1, "")],
            &["none"],
        ),
        case("missing ids", rows(&[b(6)]), 6, 5, vec![A, ("/b", 6, 6, 1, "1")], &["3 revisions above it have no"]),
        case(
            "the first ids are missing",
            vec![Row::compaction(1, 0), b(3)],
            3,
            3,
            vec![("/b", 3, 3, 1, "1")],
            &["1 revisions above it"],
        ),
        case(
            "two rows of the compact revision",
            vec![Row::compaction(1, 0), Row::compaction(2, 3), b(3), Row::update(4, "/b", 3, 3, "2")],
            4,
            3,
            vec![("/b", 3, 4, 2, "2")],
            &["2 compact_rev_key", "compact revision   3"],
        ),
        case(
            "a compact revision above all rows",
            vec![Row::compaction(1, 9), Row::create(2, "/a", 0, "1")],
            9,
            9,
            vec![A],
            &[
                "compact revision   9",
                "kine's is above its newest row 2 and its sequence 2: damaged, or rows are missing",
            ],
        ),
        Case {
            sql: "DELETE FROM kine WHERE id = 5",
            ..case(
                "a sequence above all rows",
                rows(&[b(3), Row::create(5, "/c", 0, "")]),
                5,
                5,
                vec![A, ("/b", 3, 3, 1, "1")],
                &["above kine's newest 3, because a failed write", "the last of them is 5"],
            )
        },
    ]
}

fn without_keys() -> Vec<Case<'static>> {
    let case =
        |name, rows, head, compacted, report| Case { name, rows, sql: "", head, compacted, pairs: vec![], report };
    vec![
        case("no rows", vec![], 1, 0, &["revision           1, that of an empty store: kine's table has no rows\n"]),
        case("an empty table", vec![Row::compaction(1, 0)], 1, 0, &["revision           1\n", "keys               0"]),
        case(
            "a gap row alone",
            vec![Row::compaction(1, 0), Row::gap(2)],
            3,
            3,
            &["revision           3, above kine's newest 2, because no lower one can be compacted"],
        ),
    ]
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn without_sense() -> Vec<Case<'static>> {
    let case =
        |name, rows, head, compacted, pairs, report| Case { name, rows, sql: "", head, compacted, pairs, report };
    let b = ("/b", 4, 4, 1, "1");
    let and_b = |row: Row| rows(&[row, Row::create(4, "/b", 0, "1")]);
    vec![
        case(
            "a delete of nothing",
            and_b(Row::delete(3, "/c", 0)),
            4,
            3,
            vec![A, b],
            &["1: 1 skipped, 0 taken", "row 3, name \"/c\": it deletes a key that does not exist: skipped"],
        ),
        case("no name", and_b(Row::create(3, "", 0, "1")), 4, 3, vec![A, b], &["row 3, name \"\": it has no name"]),
        case(
            "a second creation",
            and_b(Row::create(3, "/a", 2, "2")),
            4,
            3,
            vec![("/a", 3, 3, 1, "2"), b],
            &["row 3, name \"/a\": it creates a key that exists", "row 3 contradicts the rows before it"],
        ),
        case(
            "an update of nothing",
            and_b(Row::update(3, "/c", 2, 0, "2")),
            4,
            3,
            vec![A, b, ("/c", 2, 3, 2, "2")],
            &["row 3, name \"/c\": it updates a key that does not exist"],
        ),
        case(
            "an update of nothing without a create revision",
            and_b(Row::update(3, "/c", 0, 0, "2")),
            4,
            3,
            vec![A, b, ("/c", 3, 3, 1, "2")],
            &["its create_revision is 0: taken as the creation of the key", "1: 0 skipped, 1 taken"],
        ),
        case(
            "another create revision",
            rows(&[Row::update(3, "/a", 1, 2, "2")]),
            3,
            0,
            vec![("/a", 2, 3, 2, "2")],
            &["its create_revision is 1: taken as 2"],
        ),
        case(
            "another previous row",
            rows(&[Row::update(3, "/a", 2, 1, "2")]),
            3,
            0,
            vec![("/a", 2, 3, 2, "2")],
            &["its prev_revision is 1, not that of the row before: ignored"],
        ),
        case(
            "a negative TTL",
            rows(&[Row::create(3, "/b", 0, "").lease(-5)]),
            3,
            0,
            vec![A, ("/b", 3, 3, 1, "")],
            &["its TTL is -5 seconds: taken as 0", "leases             none"],
        ),
        case(
            "a created delete",
            rows(&[Row { created: true, ..Row::delete(3, "/a", 2) }]),
            3,
            0,
            vec![],
            &["taken as the delete"],
        ),
        case(
            "the old row of kube-apiserver",
            rows(&[Row::create(3, "compact_rev_key_apiserver", 0, "1"), Row::create(4, "/b", 0, "1")]),
            4,
            3,
            vec![A, b],
            &["1 compact_rev_key_apiserver without a value"],
        ),
        case(
            "kube-apiserver's row after a compaction",
            vec![Row::compaction(1, 8), Row::update(8, "compact_rev_key_apiserver", 3, 7, "5|70")],
            8,
            8,
            vec![("compact_rev_key", 3, 8, 5, "70")],
            &["none"],
        ),
        case(
            "kube-apiserver's row with a version that no key can have",
            vec![Row::compaction(1, 8), Row::update(8, "compact_rev_key_apiserver", 3, 7, "9223372036854775807|70")],
            8,
            8,
            vec![],
            &["1 compact_rev_key_apiserver without a value"],
        ),
        case(
            "many rows without sense",
            rows(&(3..40).map(|id| Row::delete(id, &format!("/{id}"), 0)).collect::<Vec<_>>()),
            39,
            39,
            vec![A],
            &["37: 37 skipped", "and 17 more"],
        ),
    ]
}

async fn check(backend: Backend, kind: Kind, case: Case<'_>) {
    let Some(source) = Source::of(kind, &case.rows).await else { return };
    if !case.sql.is_empty() {
        source.sql(case.sql).await;
    }
    let Some(mut imported) = Imported::from(backend, &source.url).await else { return };
    let what = format!("{}\n{}", case.name, imported.report);
    let (pairs, head) = imported.range(0).await;
    Imported::check_pairs(&pairs, &case.pairs, &what);
    assert_eq!(head, case.head, "{what}");
    imported.check_compacted(case.compacted).await;
    for part in case.report {
        assert!(imported.report.contains(part), "{part}: {what}");
    }
    imported.check_next(case.head + 1).await;
}

async fn revisions_without_a_change_are_compacted(backend: Backend) {
    for case in holes().into_iter().chain(without_keys()) {
        check(backend, Kind::Sqlite, case).await;
    }
}

async fn unused_sequence_values_are_not_given_again(backend: Backend) {
    for kind in [Kind::Postgres, Kind::MySql] {
        let rows = rows(&[Row::create(3, "/b", 0, "1")]);
        let sql = match kind {
            Kind::Postgres => "SELECT setval('kine_id_seq', 5)",
            _ => "ALTER TABLE kine AUTO_INCREMENT = 6",
        };
        let pairs = vec![A, ("/b", 3, 3, 1, "1")];
        let report = &["the last of them is 5"];
        check(backend, kind, Case { name: "a sequence", rows, sql, head: 5, compacted: 5, pairs, report }).await;
    }
}

async fn rows_without_sense_are_listed(backend: Backend) {
    for case in without_sense() {
        check(backend, Kind::Sqlite, case).await;
    }
}

/// Names that kine's SQLite table before 0.16.3 has converted, and bytes that are no UTF-8.
async fn names_are_taken_as_stored(backend: Backend) {
    let Some(source) = Source::new(Kind::Sqlite, Schema::Old).await else { return };
    source.add(&rows(&[Row::create(3, "007", 0, "x"), Row::create(4, "1e3", 0, "y")])).await;
    let Some(mut imported) = Imported::from(backend, &source.url).await else { return };
    let pairs = [A, ("1000", 4, 4, 1, "y"), ("7", 3, 3, 1, "x")];
    Imported::check_pairs(&imported.range(0).await.0, &pairs, &imported.report);
    assert!(imported.report.contains("numeric names      2 rows"), "{}", imported.report);

    let bytes = Row { name: vec![b'/', 0xff, 0xfe, 0], ..Row::create(3, "", 0, "x") };
    let Some(source) = Source::of(Kind::Sqlite, &rows(&[bytes])).await else { return };
    let Some(mut imported) = Imported::from(backend, &source.url).await else { return };
    assert_eq!(&imported.range(0).await.0[1].key[..], [b'/', 0xff, 0xfe, 0], "{}", imported.report);
}

/// MySQL takes names that differ in case for equal; to etcd's clients they are not.
async fn names_that_differ_in_case_are_different_keys(backend: Backend) {
    let table = rows(&[
        Row::create(3, "/Case", 0, "upper"),
        Row::update(4, "/case", 3, 3, "lower"),
        Row::create(5, "/b", 0, "1"),
    ]);
    let Some(source) = Source::of(Kind::MySql, &table).await else { return };
    let Some(mut imported) = Imported::from(backend, &source.url).await else { return };
    let pairs = [("/Case", 3, 3, 1, "upper"), A, ("/b", 5, 5, 1, "1"), ("/case", 3, 4, 2, "lower")];
    Imported::check_pairs(&imported.range(0).await.0, &pairs, &imported.report);
    imported.check_compacted(4).await;
    assert!(imported.report.contains("row 4, name \"/case\": it updates a key"), "{}", imported.report);
}

/// Runs an import that must fail, and returns its error. The target stays empty.
async fn refused(backend: Backend, url: &str) -> Option<String> {
    let home = home();
    let datastore = backend.empty_database(home.path(), "imported.db").await?;
    let output = run(&mut orlop(["import", "kine", "--from", url, "--datastore-endpoint", &datastore]));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && output.stdout.is_empty(), "{text}");
    let passwords = [":pass", "wo@rd", "wo%40rd", "pass%20word"];
    assert!(!passwords.iter().any(|password| text.contains(password)), "no password: {text}");
    let server = Server::orlop_on(&datastore, &[]).await;
    let answer = Client::connect(server.endpoint()).await.kv.range(get("k")).await.expect("a range").into_inner();
    assert_eq!(answer.header.expect("a header").revision, 1, "the target is empty");
    Some(text)
}

async fn tables_that_are_not_sound_are_refused(backend: Backend) {
    let cases = [
        (Row::update(3, "/a", 2, 3, ""), "row 3: its prev_revision is 3, expected an earlier row"),
        (Row::update(3, "/a", 2, -1, ""), "row 3: its prev_revision is -1"),
        (Row::create(0, "/b", 0, ""), "row 0: its id is below 1"),
        (Row::create(i64::MAX, "/b", 0, ""), "kine's newest revision is stated as 9223372036854775807"),
        (Row::compaction(3, (1 << 62) + 1), "compact revision 4611686018427387905"),
    ];
    for (row, expected) in cases {
        let Some(source) = Source::of(Kind::Sqlite, &rows(&[row])).await else { return };
        let Some(text) = refused(backend, &source.url).await else { return };
        assert!(text.contains(expected), "{text}");
    }
    let Some(source) = Source::of(Kind::Sqlite, &rows(&[])).await else { return };
    source.sql("UPDATE sqlite_sequence SET seq = 9223372036854775806").await;
    let Some(text) = refused(backend, &source.url).await else { return };
    assert!(text.contains("more than a store can have written") && text.contains("newest row 2"), "{text}");
    let Some(source) = Source::of(Kind::Sqlite, &[Row::create(1, "/a", 0, "")]).await else { return };
    let Some(text) = refused(backend, &source.url).await else { return };
    assert!(text.contains("row 1 is the key \"/a\"") && !text.contains("damaged"), "{text}");

    let Some(source) = Source::of(Kind::MySql, &rows(&[])).await else { return };
    source.sql("INSERT INTO kine (id, name, created) VALUES (9223372036854775808, '/b', 1)").await;
    let Some(text) = refused(backend, &source.url).await else { return };
    assert!(text.contains("1 rows have an id above 9223372036854775807"), "{text}");
}

async fn foreign_databases_are_refused(backend: Backend) {
    for kind in Kind::ALL {
        let Some(source) = Source::empty(kind).await else { continue };
        source.sql("CREATE TABLE other (id INTEGER)").await;
        let Some(text) = refused(backend, &source.url).await else { return };
        assert!(text.contains("has no table of kine"), "{text}");
        source.sql("CREATE TABLE kine (id INTEGER, name TEXT)").await;
        let Some(text) = refused(backend, &source.url).await else { return };
        assert!(text.contains("has no table of kine") && text.contains("created"), "{text}");
    }
    let home = home();
    let file = home.path().join("text");
    std::fs::write(&file, "not a database").expect("a file can be written");
    let k3s = home.path().join("k3s");
    std::fs::create_dir_all(k3s.join("server/db")).expect("folders can be made");
    std::fs::write(k3s.join("server/db/state.db"), "").expect("a file can be written");
    for (url, expected) in [
        (home.path().display().to_string(), "is a folder; give the file, usually state.db in it"),
        (k3s.display().to_string(), "/k3s/server/db/state.db"),
        (file.display().to_string(), "is not a SQLite database"),
        (home.path().join("missing").display().to_string(), "cannot open"),
        ("nats://127.0.0.1".to_owned(), "use sqlite://PATH"),
        ("mysql://k:pass@tcp(127.0.0.1:1)/k".to_owned(), "cannot open mysql://127.0.0.1:1/k"),
        ("postgres://k:pass@127.0.0.1:1/k".to_owned(), "cannot open postgres://127.0.0.1:1/k"),
    ] {
        let Some(text) = refused(backend, &url).await else { return };
        assert!(text.contains(expected), "{url}: {text}");
    }
}

/// A kine that runs has the file open, or a session.
async fn running_kine_is_detected(backend: Backend) {
    let Some(source) = Source::of(Kind::Sqlite, &live_example()).await else { return };
    let mut connection = source.sqlite().await;
    let sql = "PRAGMA journal_mode = WAL; SELECT count(*) FROM kine";
    sqlx::raw_sql(sql).execute(&mut connection).await.expect("a statement");
    let Some(text) = refused(backend, &source.url).await else { return };
    assert!(text.contains("is in use by another process: stop kine or k3s first"), "{text}");

    for kind in [Kind::Postgres, Kind::MySql] {
        let Some(source) = Source::of(kind, &live_example()).await else { continue };
        let session = source.session().await;
        let Some(text) = refused(backend, &source.url).await else { return };
        assert!(text.contains("is in use by 1 other sessions: stop kine or k3s"), "{text}");
        drop(session);
        let home = home();
        let Some(datastore) = backend.empty_database(home.path(), "imported.db").await else { return };
        eventually("an import after the end of the session", async || {
            let output = run(&mut orlop(["import", "kine", "--from", &source.url, "--datastore-endpoint", &datastore]));
            if output.status.success() { Ok(()) } else { Err(output) }
        })
        .await;
    }
}

/// MySQL checks the first password of a user only over TLS, which it has without settings; MariaDB has no TLS here.
async fn users_of_mysql_log_in(backend: Backend) {
    let Some(server) = MySql::shared().await else { return };
    let go = |source: &Source, parameters: &str| format!("{}{parameters}", source.url);
    if server.is_mariadb() {
        let Some(source) = Source::of(Kind::MySql, &live_example()).await else { return };
        let Some(_) = Imported::from(backend, &go(&source, "?tls=false")).await else { return };
        let Some(text) = refused(backend, &go(&source, "?tls=skip-verify")).await else { return };
        assert!(text.contains("server does not support TLS"), "{text}");
        return;
    }
    let Some(unknown) = Source::empty(Kind::MySql).await else { return };
    let Some(text) = refused(backend, &go(&unknown, "?tls=false")).await else { return };
    assert!(text.contains("can log in only over TLS") && !text.contains("feature"), "{text}");
    let Some(text) = refused(backend, &go(&unknown, "?tls=true")).await else { return };
    assert!(text.contains("certificate"), "{text}");
    let Some(text) = refused(backend, &unknown.url.replace("pass/", "sap/")).await else { return };
    assert!(text.contains("Access denied for user"), "{text}");
    for parameters in ["", "?tls=preferred", "?tls=skip-verify"] {
        let Some(source) = Source::of(Kind::MySql, &live_example()).await else { return };
        let Some(_) = Imported::from(backend, &go(&source, parameters)).await else { return };
    }
    let Some(source) = Source::of(Kind::MySql, &live_example()).await else { return };
    let authority = server.authority();
    let url = format!("{}?ssl-mode=VERIFY_CA&ssl-ca={}", source.own, authority.display());
    let Some(_) = Imported::from(backend, &url).await else { return };
}

async fn target_with_content_is_refused(backend: Backend) {
    let Some(source) = Source::of(Kind::Sqlite, &live_example()).await else { return };
    let home = home();
    let Some(datastore) = backend.empty_database(home.path(), "imported.db").await else { return };
    let arguments = ["import", "kine", "--from", &source.url, "--datastore-endpoint", &datastore];
    prints(&arguments);
    let output = run(&mut orlop(arguments));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && (text.contains("exists already") || text.contains("already contains")),
        "{text}"
    );
}

on_both_backends!(
    revisions_without_a_change_are_compacted,
    unused_sequence_values_are_not_given_again,
    rows_without_sense_are_listed,
    names_are_taken_as_stored,
    names_that_differ_in_case_are_different_keys,
    tables_that_are_not_sound_are_refused,
    foreign_databases_are_refused,
    running_kine_is_detected,
    users_of_mysql_log_in,
    target_with_content_is_refused,
);
