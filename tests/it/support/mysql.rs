//! A MySQL or MariaDB server in its own folder and on its own port. It is removed when the test process ends, even if the
//! process is killed.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, MySqlConnection, mysql::MySqlConnectOptions};
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
pub struct MySql {
    is_mariadb: bool,
    folder: PathBuf,
    port: u16,
    /// Its standard input ends with this process.
    _guard: Child,
    databases: AtomicU32,
}

/// The programs of a server: of MariaDB, or of the MySQL whose mysqld `ORLOP_TEST_MYSQL` names.
enum Programs {
    MariaDb { server: PathBuf, install: PathBuf },
    MySql { server: PathBuf },
}

static SHARED: OnceCell<Option<MySql>> = OnceCell::const_new();

impl MySql {
    /// Returns the server that all tests share; `None` if none is installed.
    pub async fn shared() -> Option<&'static Self> {
        SHARED.get_or_init(Self::start).await.as_ref()
    }

    pub fn is_mariadb(&self) -> bool {
        self.is_mariadb
    }

    /// Returns the file with the certificates that MySQL has made for itself.
    pub fn authority(&self) -> PathBuf {
        self.folder.join("data/ca.pem")
    }

    /// Creates a database and a user of the same name, whose password is checked as the server does by default.
    pub async fn create_database(&self) -> MySqlDatabase {
        let name = format!("kine_{}", self.databases.fetch_add(1, Ordering::Relaxed));
        let mut root = root(&self.folder).await.expect("root can connect");
        let sql = format!(
            "CREATE DATABASE {name} CHARACTER SET utf8mb4; CREATE USER {name}@'127.0.0.1' IDENTIFIED BY 'pass/wo@rd'; \
             GRANT ALL ON {name}.* TO {name}@'127.0.0.1'"
        );
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut root).await.expect("a database can be created");
        // MySQL closes the connection before the end of TLS is sent.
        let _ = root.close().await;
        MySqlDatabase { name, port: self.port }
    }

    async fn start() -> Option<Self> {
        let Some(programs) = Programs::find() else {
            skip("mariadb");
            return None;
        };
        // The guard removes the folder, because it runs even if this process is killed.
        let folder = home().keep();
        let user = String::from_utf8(Command::new("id").arg("-un").output().expect("id runs").stdout).expect("a name");
        let common = [format!("--datadir={}", folder.join("data").display()), format!("--user={}", user.trim())];
        let made = programs.install(&common).output().expect("the program can be started");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&[made.stdout, made.stderr].concat()));
        let port = free_port();
        let server = programs.server(&common);
        let guard = Command::new("sh")
            .args(["-c", GUARD, "guard"])
            .arg(&folder)
            .arg(server.get_program())
            .args(server.get_args())
            .args(["--bind-address=127.0.0.1", "--skip-log-bin", "--skip-name-resolve"])
            .args(["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=16M"])
            .arg(format!("--port={port}"))
            .arg(format!("--socket={}", socket(&folder).display()))
            .arg(format!("--pid-file={}", folder.join("pid").display()))
            .stdin(Stdio::piped())
            .spawn()
            .expect("sh can be started");
        eventually("the start of the server", async || {
            root(&folder).await.map(drop).map_err(|error| {
                let log = fs::read_to_string(folder.join("log")).unwrap_or_default();
                format!("{error}\n{log}")
            })
        })
        .await;
        let is_mariadb = matches!(programs, Programs::MariaDb { .. });
        Some(Self { is_mariadb, folder, port, _guard: guard, databases: AtomicU32::new(0) })
    }
}

impl Programs {
    fn find() -> Option<Self> {
        if let Some(server) = std::env::var_os("ORLOP_TEST_MYSQL") {
            return Some(Self::MySql { server: server.into() });
        }
        Some(Self::MariaDb { server: program("mariadbd")?, install: program("mariadb-install-db")? })
    }

    /// Returns the command that fills the data directory.
    fn install(&self, common: &[String]) -> Command {
        match self {
            Self::MariaDb { install, .. } => {
                let mut command = Command::new(install);
                command.arg("--no-defaults").args(common);
                command.args(["--auth-root-authentication-method=normal", "--skip-test-db"]);
                command
            }
            Self::MySql { .. } => {
                let mut command = self.server(common);
                command.arg("--initialize-insecure");
                command
            }
        }
    }

    /// Returns the command of the server, which more arguments may follow.
    fn server(&self, common: &[String]) -> Command {
        let (Self::MariaDb { server, .. } | Self::MySql { server }) = self;
        let mut command = Command::new(server);
        command.arg("--no-defaults").args(common);
        if let Self::MySql { server } = self {
            // mysqld is in `sbin` or `bin` of the folder that has its messages.
            let base = server.ancestors().nth(2).expect("the path of a program in a folder");
            command.arg(format!("--basedir={}", base.display()));
            // Debian's default is a folder that its package creates.
            command.args(["--secure-file-priv=NULL", "--mysqlx=OFF", "--innodb-redo-log-capacity=16M"]);
        }
        command
    }
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("socket")
}

/// Connects as root, who has no password.
async fn root(folder: &Path) -> sqlx::Result<MySqlConnection> {
    let options = MySqlConnectOptions::new().socket(socket(folder)).username("root").database("mysql");
    options.connect().await
}

/// A database of a user of the same name.
pub struct MySqlDatabase {
    name: String,
    port: u16,
}

impl MySqlDatabase {
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
