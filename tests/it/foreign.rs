//! Databases of other applications, unsuitable connection poolers and unreachable databases: a start fails with an
//! error that names the remedy, and writes nothing.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use orlop_wire::proto::client::etcdserverpb::DefragmentRequest;
use rustix::process::Signal;
use sqlx::{ConnectOptions as _, Connection as _, Executor as _, sqlite::SqliteConnectOptions};
use tonic::Code;

use crate::{
    start::run,
    support::{
        Client, Lines, Place, Postgres, Server, Started, database_name, ended, get, orlop, send_signal, skip, user,
    },
};

/// Starts orlop with the arguments. The start must fail; returns its error output.
#[track_caller]
fn refusal(home: &Path, arguments: &[&str]) -> String {
    let listen = ["--listen-client-urls", "http://127.0.0.1:0"];
    let output = run(home, &[&listen[..], arguments].concat(), &[]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(!text.contains("at line"), "{text}");
    text
}

#[track_caller]
fn check_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part}: {text}");
    }
}

#[test]
fn data_directory_of_etcd_is_refused() {
    let home = tempfile::tempdir().expect("a folder");
    let data = home.path().join("default.etcd");
    fs::create_dir_all(data.join("member/snap")).expect("folders can be made");
    let text = refusal(home.path(), &["--data-dir", "default.etcd"]);
    check_contains(&text, &["default.etcd is the data directory of an etcd server", "orlop migrate"]);
    let left: Vec<_> =
        fs::read_dir(&data).expect("a folder").map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(left, ["member"], "nothing was written");
}

/// Creates a database with one table.
async fn sqlite_file(file: &Path, table: &'static str) {
    let options = SqliteConnectOptions::new().filename(file).create_if_missing(true);
    let mut connection = options.connect().await.expect("a database");
    connection.execute(table).await.expect("a table");
    connection.close().await.expect("it closes");
}

const KINES_TABLE: &str = "CREATE TABLE kine (id INTEGER PRIMARY KEY, name TEXT)";

#[tokio::test]
async fn sqlite_file_of_another_application_is_refused() {
    let home = tempfile::tempdir().expect("a folder");
    let file = home.path().join("state.db");
    sqlite_file(&file, KINES_TABLE).await;
    let before = fs::read(&file).expect("a file");
    let text = refusal(home.path(), &["--datastore-endpoint", "sqlite://state.db"]);
    let because =
        ["state.db is the database of another application", "table kine", "choose another file", "import kine"];
    check_contains(&text, &because);
    assert!(fs::read(&file).expect("a file") == before, "nothing was written");
}

/// An empty store in the folder `server/db` of a k3s would hide the keys of kine.
#[tokio::test]
async fn data_directory_with_the_database_of_kine_is_refused() {
    let home = tempfile::tempdir().expect("a folder");
    let data = home.path().join("db");
    fs::create_dir(&data).expect("a folder can be made");
    sqlite_file(&data.join("state.db"), KINES_TABLE).await;
    let text = refusal(home.path(), &["--data-dir", "db"]);
    check_contains(&text, &["db contains state.db, the database of kine", "orlop import kine --from db/state.db"]);
    let left: Vec<_> =
        fs::read_dir(&data).expect("a folder").map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(left, ["state.db"], "nothing was written");

    // Another application may have a file of this name.
    fs::remove_file(data.join("state.db")).expect("a file can be removed");
    sqlite_file(&data.join("state.db"), "CREATE TABLE other (id INTEGER)").await;
    let place = Place { data: Some(data), ..Place::default() };
    drop(Server::orlop_at(None, &[], place).await);
}

#[tokio::test]
async fn error_names_the_missing_privilege() {
    let Some(postgres) = Postgres::shared().await else { return };
    let endpoint = postgres.create_database();
    let database = database_name(&endpoint);
    postgres.psql(
        database,
        &format!("ALTER SCHEMA {database} OWNER TO postgres; GRANT USAGE ON SCHEMA {database} TO {database}"),
    );
    let home = tempfile::tempdir().expect("a folder");
    let text = refusal(home.path(), &["--datastore-endpoint", &endpoint]);
    check_contains(&text, &["permission denied for schema", "CREATE SCHEMA AUTHORIZATION"]);
}

/// New tables would be made in the first schema, and hide the store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_tables_in_a_later_schema_are_not_hidden() {
    let Some(postgres) = Postgres::shared().await else { return };
    let home = tempfile::tempdir().expect("a folder");
    let endpoint = postgres.create_database();
    let name = database_name(&endpoint);
    drop(Server::orlop_on(&endpoint, &[]).await);
    postgres.psql(
        name,
        &format!("CREATE SCHEMA first AUTHORIZATION {name}; ALTER ROLE {name} SET search_path = first, {name}"),
    );
    let text = refusal(home.path(), &["--datastore-endpoint", &endpoint]);
    let tables = format!("are in schema {name} of database");
    check_contains(&text, &[&tables, "but schema first precedes it", &format!("SET search_path = {name}")]);
    assert_eq!(postgres.psql(name, "SELECT count(*) FROM pg_tables WHERE schemaname = 'first'"), "0");

    // The store of another role.
    postgres.psql(name, &format!("ALTER TABLE {name}.kv_log OWNER TO postgres"));
    let server = Server::orlop_on(&endpoint, &[]).await;
    assert!(!server.log().contains("does not own the tables"), "{}", server.log());
}

#[tokio::test]
async fn postgres_database_of_another_application_or_none_is_refused() {
    let Some(postgres) = Postgres::shared().await else { return };
    let home = tempfile::tempdir().expect("a folder");
    let endpoint = postgres.create_database();
    let name = database_name(&endpoint);
    postgres.psql(name, &format!("CREATE TABLE {name}.kine (id bigint); ALTER TABLE {name}.kine OWNER TO {name}"));
    let text = refusal(home.path(), &["--datastore-endpoint", &endpoint]);
    check_contains(&text, &["tables of another application, for example kine", "create a database or a schema"]);
    assert_eq!(postgres.psql(name, "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'kv_log%'"), "0");

    let server = endpoint.rsplit_once('/').expect("a URL").0;
    let text = refusal(home.path(), &["--datastore-endpoint", &format!("{server}/none")]);
    check_contains(&text, &["database \"none\" does not exist"]);
    assert!(!text.contains("trying again"), "it is not retried: {text}");
    let address = server.rsplit_once('@').expect("a URL has a user").1;
    let text = refusal(home.path(), &["--datastore-endpoint", &format!("{server},{address}/none")]);
    check_contains(&text, &["none of 2 hosts is a primary", &format!("{address}: database \"none\" does not exist")]);
    assert!(!text.contains("trying again"), "it is not retried: {text}");
}

#[tokio::test]
async fn new_database_needs_an_encoding_for_all_names() {
    let Some(postgres) = Postgres::shared().await else { return };
    let home = tempfile::tempdir().expect("a folder");
    let endpoint = postgres.create_database();
    let name = database_name(&endpoint);
    let set = |encoding: &str| {
        let number = format!("pg_char_to_encoding('{encoding}')");
        postgres.psql("postgres", &format!("UPDATE pg_database SET encoding = {number} WHERE datname = '{name}'"));
    };
    set("LATIN1");
    let text = refusal(home.path(), &["--datastore-endpoint", &endpoint]);
    check_contains(&text, &[name, "has the encoding LATIN1", "ENCODING 'UTF8' TEMPLATE template0"]);
    assert_eq!(postgres.psql(name, "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'kv_log%'"), "0");

    set("UTF8");
    let mut server = Server::orlop_on(&endpoint, &[]).await;
    server.terminate().await;
    const WARNING: &str = "the encoding of the database lacks characters";
    assert!(!server.log().contains(WARNING), "{}", server.log());
    set("LATIN1");
    server.restart().await;
    check_contains(&server.log(), &[WARNING, "LATIN1"]);
}

/// As after `pg_restore --no-owner` by another role.
#[tokio::test]
async fn role_that_does_not_own_the_tables_is_warned_and_told_the_remedy() {
    let Some(postgres) = Postgres::shared().await else { return };
    let home = tempfile::tempdir().expect("a folder");
    let endpoint = postgres.create_database_of_the_first_schema().await;
    let role = database_name(&endpoint);
    let restorer = format!("{role}_restorer");
    postgres.psql(role, &format!("CREATE ROLE {restorer}"));
    let restored = format!(
        "REASSIGN OWNED BY {role} TO {restorer}; GRANT ALL ON SCHEMA {role} TO {role}; \
         GRANT ALL ON ALL TABLES IN SCHEMA {role} TO {role}"
    );
    postgres.psql(role, &restored);
    let text = refusal(home.path(), &["--datastore-endpoint", &endpoint]);
    check_contains(&text, &["must be owner of", &format!("REASSIGN OWNED BY ... TO {role}")]);

    postgres.psql(role, &format!("REASSIGN OWNED BY {restorer} TO {role}"));
    let mut server = Server::orlop_on(&endpoint, &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.maintenance.defragment(DefragmentRequest {}).await.expect("the owner defragments");
    server.terminate().await;

    postgres.psql(role, &restored);
    server.restart().await;
    check_contains(&server.log(), &["the role does not own the tables of Orlop", &restorer, "REASSIGN OWNED"]);
    let mut client = Client::connect(server.endpoint()).await;
    client.put("a", "").await;
    let refused = client.maintenance.defragment(DefragmentRequest {}).await.expect_err("it may not");
    let text = format!("the role {role} may not vacuum the table");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    check_contains(refused.message(), &[&text, &format!("whose owner is {restorer}")]);
}

/// Returns whether pgbouncer is installed.
pub fn has_pooler() -> bool {
    let is_installed = Command::new("pgbouncer").arg("--version").output().is_ok_and(|output| output.status.success());
    if !is_installed {
        skip("pgbouncer");
    }
    is_installed
}

/// Starts pgbouncer with a pool mode, which further lines with settings may follow, before the server on a port. Returns the
/// process and the endpoint that connects through it.
pub async fn pooler(home: &Path, server_port: u16, endpoint: &str, mode: &str) -> (Started, String) {
    let port = crate::support::free_port();
    let name = database_name(endpoint);
    fs::write(home.join("users.txt"), format!("\"{name}\" \"pass word\"\n")).expect("a file can be written");
    let settings = format!(
        "[databases]\n* = host=127.0.0.1 port={server_port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
         listen_port = {port}\nunix_socket_dir =\nauth_type = plain\nauth_file = {}\npool_mode = {mode}\n\
         server_login_retry = 1\n",
        home.join("users.txt").display()
    );
    let file = home.join("pgbouncer.ini");
    fs::write(&file, settings).expect("a file can be written");
    let (as_user, name) = user();
    assert!(Command::new("chown").arg("-R").arg(name).arg(home).status().is_ok_and(|status| status.success()));
    let mut command = Command::new(as_user[0]);
    command.args(&as_user[1..]).arg("pgbouncer").arg(&file).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut pooler = Started::spawn(&mut command);
    let mut lines = Lines::of(pooler.stderr.take().expect("stderr is piped"));
    assert!(lines.any(|line| line.contains("process up")), "pgbouncer starts");
    let direct = format!("127.0.0.1:{server_port}");
    (pooler, endpoint.replace(&direct, &format!("127.0.0.1:{port}")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pooler_is_refused_in_transaction_mode_and_serves_in_session_mode() {
    let Some(postgres) = Postgres::shared().await else { return };
    if !has_pooler() {
        return;
    }
    let endpoint = postgres.create_database();
    for mode in [
        "transaction",
        "statement",
        "transaction\nserver_reset_query_always = 1",
        "transaction\nserver_reset_query_always = 1\nserver_round_robin = 1\nmin_pool_size = 3",
    ] {
        let home = tempfile::tempdir().expect("a folder");
        let (_pooler, pooled) = pooler(home.path(), postgres.port(), &endpoint, mode).await;
        let text = refusal(home.path(), &["--datastore-endpoint", &pooled]);
        check_contains(&text, &["pool_mode = session", "connect to Postgres directly"]);
    }
    let home = tempfile::tempdir().expect("a folder");
    let (_pooler, pooled) = pooler(home.path(), postgres.port(), &endpoint, "session").await;
    let server = Server::orlop_on(&pooled, &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    for value in ["1", "2"] {
        client.put("k", value).await;
    }
    let found = client.kv.range(get("k")).await.expect("a range");
    assert_eq!(&found.into_inner().kvs[0].value[..], b"2");
}

#[test]
fn start_ends_at_sigterm_while_postgres_is_away() {
    let home = tempfile::tempdir().expect("a folder");
    let endpoint = format!("postgres://a@127.0.0.1:{}/b", crate::support::free_port());
    let mut start = orlop(["--listen-client-urls", "http://127.0.0.1:0", "--datastore-endpoint", &endpoint]);
    let mut process = Started::spawn(start.current_dir(home.path()).stderr(Stdio::piped()));
    let mut lines = Lines::of(process.stderr.take().expect("stderr is piped"));
    assert!(lines.any(|line| line.contains("cannot connect yet")), "the database is away");
    send_signal(process.id(), Signal::TERM);
    // A start that goes on waiting would fail, after five minutes, with status 1.
    let status = ended(process).status;
    assert_eq!(status.code(), Some(0), "{:?}", lines.collect::<Vec<_>>());
}
