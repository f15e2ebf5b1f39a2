//! A MariaDB server in its own folder and on its own port. It is removed when the test process ends, even if the process
//! is killed.

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use sqlx::{AssertSqlSafe, Connection as _, MySqlConnection};
use tokio::sync::OnceCell;

use super::{eventually, free_port, home, skip};

/// A shell script that runs the server until its standard input ends, and removes the folder. `$1` is the folder; the
/// remaining arguments are the server's command.
const GUARD: &str = r#"
folder=$1; shift
"$@" >>"$folder/log" 2>&1 & server=$!
cat >/dev/null
kill -KILL "$server"; wait "$server"
rm -rf "$folder"
"#;

/// A running server.
pub struct MariaDb {
    port: u16,
    /// Its standard input ends with this process.
    _guard: Child,
    databases: AtomicU32,
}

static SHARED: OnceCell<Option<MariaDb>> = OnceCell::const_new();

impl MariaDb {
    /// Returns the server that all tests share; `None` if MariaDB is not installed.
    pub async fn shared() -> Option<&'static Self> {
        SHARED.get_or_init(Self::start).await.as_ref()
    }

    /// Creates a database and a user of the same name.
    pub async fn create_database(&self) -> MariaDatabase {
        let name = format!("kine_{}", self.databases.fetch_add(1, Ordering::Relaxed));
        let mut root = MySqlConnection::connect(&format!("mysql://root@127.0.0.1:{}/mysql", self.port))
            .await
            .expect("root can connect");
        let sql = format!(
            "CREATE DATABASE {name} CHARACTER SET utf8mb4; CREATE USER {name}@'127.0.0.1' IDENTIFIED BY 'pass/wo@rd'; \
             GRANT ALL ON {name}.* TO {name}@'127.0.0.1'"
        );
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut root).await.expect("a database can be created");
        root.close().await.expect("a connection can be closed");
        MariaDatabase { name, port: self.port }
    }

    async fn start() -> Option<Self> {
        let (Some(server), Some(install)) = (program("mariadbd"), program("mariadb-install-db")) else {
            skip("mariadb");
            return None;
        };
        // The guard removes the folder, because it runs even if this process is killed.
        let folder = home().keep();
        let data = format!("--datadir={}", folder.join("data").display());
        let user = String::from_utf8(Command::new("id").arg("-un").output().expect("id runs").stdout).expect("a name");
        let user = format!("--user={}", user.trim());
        let made = Command::new(install)
            .args(["--no-defaults", &data, &user, "--auth-root-authentication-method=normal", "--skip-test-db"])
            .output()
            .expect("mariadb-install-db can be started");
        assert!(made.status.success(), "mariadb-install-db: {}", String::from_utf8_lossy(&made.stderr));
        let port = free_port();
        let guard = Command::new("sh")
            .args(["-c", GUARD, "guard"])
            .arg(&folder)
            .arg(server)
            .args(["--no-defaults", &data, &user, "--bind-address=127.0.0.1", "--skip-log-bin"])
            .args(["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=16M", "--skip-name-resolve"])
            .arg(format!("--port={port}"))
            .arg(format!("--socket={}", folder.join("socket").display()))
            .arg(format!("--pid-file={}", folder.join("pid").display()))
            .stdin(Stdio::piped())
            .spawn()
            .expect("sh can be started");
        eventually("the start of MariaDB", async || {
            let connected = MySqlConnection::connect(&format!("mysql://root@127.0.0.1:{port}/mysql")).await;
            connected.map(drop).map_err(|error| {
                let log = fs::read_to_string(folder.join("log")).unwrap_or_default();
                format!("{error}\n{log}")
            })
        })
        .await;
        Some(Self { port, _guard: guard, databases: AtomicU32::new(0) })
    }
}

/// A database of a user of the same name.
pub struct MariaDatabase {
    name: String,
    port: u16,
}

impl MariaDatabase {
    /// Returns the URL that kine takes.
    pub fn go_url(&self) -> String {
        format!("mysql://{0}:pass/wo@rd@tcp(127.0.0.1:{1})/{0}", self.name, self.port)
    }

    pub fn url(&self) -> String {
        format!("mysql://{0}:pass%2Fwo%40rd@127.0.0.1:{1}/{0}", self.name, self.port)
    }
}

/// Returns a program on the PATH or in Debian's folder of servers.
fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}
