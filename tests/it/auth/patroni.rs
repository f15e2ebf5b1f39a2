//! A program that nobody here wrote, with a user of its own: Patroni elects a leader and bootstraps Postgres through the
//! JSON gateway, and may use its prefix alone.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
};

use orlop_wire::proto::client::etcdserverpb::{AuthEnableRequest, RangeRequest};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::{DENIED, act_as, add_role, add_user, check_refused, get, grant_role, password};
use crate::support::{Backend, Client, Postgres, Server, eventually, free_port, http_get, skip, user};

/// Patroni and its Postgres.
struct Patroni {
    process: Child,
    folder: TempDir,
    port: u16,
}

impl Patroni {
    /// Starts Patroni with a configuration in which it logs in with its name and password.
    fn start(etcd: &str, programs: &Path) -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory can be made");
        let (port, postgres_port) = (free_port(), free_port());
        let [home, programs] = [folder.path(), programs].map(|path| path.display().to_string());
        let etcd = etcd.strip_prefix("http://").expect("an http endpoint");
        let secret = password("patroni");
        let configuration = format!(
            "scope: demo\nname: one\n\
             restapi: {{listen: '127.0.0.1:{port}', connect_address: '127.0.0.1:{port}'}}\n\
             etcd3: {{hosts: '{etcd}', username: patroni, password: \"{secret}\"}}\n\
             bootstrap:\n  dcs: {{ttl: 20, loop_wait: 1, retry_timeout: 5}}\n\
             postgresql:\n  listen: 127.0.0.1:{postgres_port}\n  connect_address: 127.0.0.1:{postgres_port}\n  \
             data_dir: {home}/data\n  pgpass: {home}/pgpass\n  bin_dir: {programs}\n  authentication:\n    \
             superuser: {{username: postgres, password: x}}\n    replication: {{username: rep, password: x}}\n  \
             parameters: {{unix_socket_directories: {home}}}\n"
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
        Self { process, folder, port }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Waits until Patroni runs a primary.
    async fn wait_for_primary(&self) {
        eventually("Patroni runs a primary", async || {
            let address = format!("127.0.0.1:{}", self.port);
            tokio::net::TcpStream::connect(&address).await.map_err(|error| format!("{error}: {}", self.log()))?;
            let answer = http_get(&format!("http://{address}"), "/primary").await;
            if answer.status == 200 { Ok(()) } else { Err(self.log()) }
        })
        .await;
    }
}

impl Drop for Patroni {
    /// Stops Patroni, which stops its Postgres.
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw) {
            // It may have ended already.
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.process.wait();
    }
}

async fn patroni_uses_its_prefix_alone(backend: Backend) {
    let Some(programs) = Postgres::programs() else { return skip("postgres") };
    if Command::new("patroni").arg("--version").output().is_err() {
        return skip("patroni");
    }
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for user in ["root", "patroni"] {
        add_user(&mut client, user).await;
    }
    grant_role(&mut client, "root", "root").await;
    add_role(&mut client, "service", "/service/", "/service0").await;
    grant_role(&mut client, "patroni", "service").await;
    client.auth.auth_enable(AuthEnableRequest {}).await.expect("Auth is enabled");

    let patroni = Patroni::start(server.endpoint(), &programs);
    patroni.wait_for_primary().await;
    let _ = act_as(&mut client, "root").await;
    let all = RangeRequest { key: "\0".into(), range_end: "\0".into(), keys_only: true, ..Default::default() };
    let keys = client.kv.range(all).await.expect("a range").into_inner().kvs;
    let keys: Vec<_> = keys.iter().map(|kv| String::from_utf8_lossy(&kv.key)).collect();
    for key in ["/service/demo/config", "/service/demo/initialize", "/service/demo/leader"] {
        assert!(keys.iter().any(|found| found == key), "{keys:?}");
    }
    let _ = act_as(&mut client, "patroni").await;
    check_refused(get(&mut client, "/other").await, DENIED, "a key outside of its prefix");
}

crate::support::on_both_backends!(patroni_uses_its_prefix_alone,);
