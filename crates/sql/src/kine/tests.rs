//! A table that changes while it is read.

use super::*;

const TABLE: &str = "CREATE TABLE kine (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT, created INTEGER, \
    deleted INTEGER, create_revision INTEGER, prev_revision INTEGER, lease INTEGER, value BLOB, old_value BLOB); \
    INSERT INTO kine (name, created, prev_revision) VALUES ('compact_rev_key', 1, 2), ('/a', 1, 0), ('/b', 1, 0)";

async fn execute(file: &Path, sql: &'static str) {
    let options = SqliteConnectOptions::new().filename(file).create_if_missing(true);
    let mut connection = options.connect().await.expect("a connection");
    sqlx::raw_sql(sql).execute(&mut connection).await.expect("a statement");
    connection.close().await.expect("a connection can be closed");
}

#[tokio::test]
async fn a_change_of_the_table_is_found() {
    for (change, is_change) in [
        ("SELECT 1", false),
        ("INSERT INTO kine (name) VALUES ('/c')", true),
        // An insert that failed has used an id.
        ("UPDATE sqlite_sequence SET seq = seq + 1", true),
        // A compaction.
        ("UPDATE kine SET prev_revision = 3 WHERE id = 1", true),
        ("DELETE FROM kine WHERE id = 2", true),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("state.db");
        execute(&file, TABLE).await;
        let mut table = KineTable::open(&file.display().to_string()).await.expect("a table");
        let state = table.state().await.expect("a state");
        assert_eq!(state, KineState { rows: 3, newest: 3, compact_revision: 2, sequence: 3 });
        assert_eq!(table.page(0, Values::Read).await.expect("a page").len(), 3);
        execute(&file, change).await;
        let checked = table.check_unchanged(&state).await;
        assert_eq!(checked.is_err(), is_change, "{change}: {checked:?}");
    }
}
