//! Patroni with its Postgres; the server under test is its configuration store, through the JSON gateway.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::{Postgres, eventually, free_port, http_get, skip, user};

/// What the nodes of one Patroni cluster have in common.
pub struct Scope<'a> {
    /// The endpoint of the configuration store.
    pub etcd: &'a str,
    /// Additional settings of `etcd3`, such as user and password.
    pub login: &'a str,
    /// Additional settings of the cluster.
    pub dcs: &'a str,
}

/// One node: Patroni and its Postgres, which end when this value is dropped.
pub struct Patroni {
    process: Child,
    folder: TempDir,
    port: u16,
    postgres_port: u16,
}

impl Patroni {
    /// Returns whether Patroni and Postgres are installed.
    pub fn is_installed() -> bool {
        for (name, is_installed) in [
            ("postgres", Postgres::is_installed()),
            ("patroni", Command::new("patroni").arg("--version").output().is_ok()),
        ] {
            if !is_installed {
                skip(name);
                return false;
            }
        }
        true
    }

    /// Starts a node.
    pub fn start(scope: &Scope<'_>, name: &str) -> Self {
        let folder = super::home();
        let (port, postgres_port) = (free_port(), free_port());
        let programs = Postgres::programs().expect("Postgres is installed");
        let [home, programs] = [folder.path(), &programs].map(|path: &Path| path.display().to_string());
        let etcd = scope.etcd.strip_prefix("http://").expect("an http endpoint");
        let Scope { login, dcs, .. } = scope;
        // An asynchronous standby that was ahead of the new primary would never follow it, and in strict mode no commit end.
        let configuration = format!(
            "scope: demo\nname: {name}\n\
             restapi: {{listen: '127.0.0.1:{port}', connect_address: '127.0.0.1:{port}'}}\n\
             etcd3: {{hosts: '{etcd}'{login}}}\n\
             bootstrap:\n  dcs: {{ttl: 20, loop_wait: 1, retry_timeout: 5{dcs}}}\n\
             postgresql:\n  remove_data_directory_on_diverged_timelines: true\n  \
             listen: 127.0.0.1:{postgres_port}\n  connect_address: 127.0.0.1:{postgres_port}\n  \
             data_dir: {home}/data\n  pgpass: {home}/pgpass\n  bin_dir: {programs}\n  authentication:\n    \
             superuser: {{username: postgres, password: x}}\n    replication: {{username: rep, password: x}}\n  \
             parameters: {{unix_socket_directories: {home}, dynamic_shared_memory_type: mmap}}\n  basebackup: {{checkpoint: fast}}\n"
        );
        fs::write(folder.path().join("patroni.yml"), configuration).expect("a file can be written");
        let (as_user, user) = user();
        let chown = Command::new("chown").args(["-R", &user]).arg(folder.path()).status();
        assert!(chown.is_ok_and(|status| status.success()), "the folder can be given to {user}");
        let log = fs::File::create(folder.path().join("log")).expect("a file can be created");
        let process = Command::new(as_user[0])
            .args(&as_user[1..])
            .arg("patroni")
            .arg(folder.path().join("patroni.yml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a handle"))
            .stderr(log)
            .spawn()
            .expect("patroni can be started");
        Self { process, folder, port, postgres_port }
    }

    pub fn postgres_port(&self) -> u16 {
        self.postgres_port
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Waits until the node's REST API confirms a role, such as `/primary` or `/synchronous`.
    pub async fn wait_for(&self, role: &str) {
        eventually(role, async || if self.is(role).await { Ok(()) } else { Err(self.log()) }).await;
    }

    /// Returns whether the node has a role.
    pub async fn is(&self, role: &str) -> bool {
        let address = format!("127.0.0.1:{}", self.port);
        let listens = tokio::net::TcpStream::connect(&address).await.is_ok();
        listens && http_get(&format!("http://{address}"), role).await.status == 200
    }

    /// Kills Patroni and Postgres without a chance to tell the others.
    pub fn crash(&mut self) {
        let postmaster = fs::read_to_string(self.folder.path().join("data/postmaster.pid")).expect("Postgres runs");
        let postmaster: Option<i32> = postmaster.lines().next().and_then(|pid| pid.parse().ok());
        let patroni = i32::try_from(self.process.id()).ok();
        for pid in [patroni, postmaster] {
            let pid = pid.and_then(Pid::from_raw).expect("a process ID");
            kill_process(pid, Signal::KILL).expect("the process runs");
        }
        let _ = self.process.wait();
    }

    /// Moves the role of the primary from one node to another.
    pub fn switch_over(&self, from: &str, to: &str) {
        let (as_user, _) = user();
        let output = Command::new(as_user[0])
            .args(&as_user[1..])
            .args(["patronictl", "-c"])
            .arg(self.folder.path().join("patroni.yml"))
            .args(["switchover", "demo", "--leader", from, "--candidate", to, "--force"])
            // The locale that its library requires.
            .env("LC_ALL", "C.UTF-8")
            .output()
            .expect("patronictl can be started");
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success() && text.contains("Successfully switched over"), "{text}");
    }
}

impl Drop for Patroni {
    /// Stops Patroni, which stops its Postgres, unless it was just starting it.
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw) {
            // It may have ended already.
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.process.wait();
        let (Some(programs), (as_user, _)) = (Postgres::programs(), user()) else { return };
        let mut stop = Command::new(as_user[0]);
        stop.args(&as_user[1..]).arg(programs.join("pg_ctl")).args(["stop", "-s", "-m", "immediate", "-D"]);
        // It fails if Postgres has ended, which is the usual case.
        let _ = stop.arg(self.folder.path().join("data")).stderr(Stdio::null()).status();
    }
}
