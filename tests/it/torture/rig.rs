//! A store and the components around it that can fail.

use std::{os::unix::fs::PermissionsExt as _, process::Command, time::Duration};

use tokio::time::{Instant, sleep};

use super::{
    faults::{Environment, Fault},
    preload::Preload,
    workload::Workload,
};
use crate::support::{Disk, Link, Place, Postgres, Server};

/// Maximum time until every client succeeds again after the end of a fault.
const RECOVERY_TIME_MAX: Duration = Duration::from_secs(60);
/// Size of Orlop's disk: less than Orlop preallocates for its WAL on a larger disk.
const DISK_MEGABYTES: usize = 32;
/// Size of etcd's disk: more than etcd preallocates.
const ETCD_DISK_MEGABYTES: usize = 96;
/// Size of Postgres's disk: an empty cluster needs most of it.
const POSTGRES_DISK_MEGABYTES: usize = 192;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Sqlite,
    Postgres,
    Etcd,
}

impl Target {
    pub fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "SQLite",
            Self::Postgres => "Postgres",
            Self::Etcd => "etcd",
        }
    }
}

/// The servers of a test. Clients reach the servers over links, and the servers reach Postgres over another link.
/// The order of the fields is the order in which they are dropped: a server ends before its database and its disk.
pub struct Rig {
    pub target: Target,
    pub servers: Vec<Server>,
    /// The link over which clients reach each server.
    pub client_links: Vec<Link>,
    /// The link over which the servers reach Postgres.
    pub database_link: Option<Link>,
    /// A Postgres cluster for this rig alone, if the fault needs one.
    pub postgres: Option<Postgres>,
    pub preload: Option<Preload>,
    pub disk: Option<Disk>,
}

impl Rig {
    /// Starts the components that a fault needs. Returns `None` if this machine lacks one of them.
    pub async fn build(fault: &Fault, target: Target) -> Option<Self> {
        let preload =
            matches!(fault.environment, Environment::Preload | Environment::DatabaseUnderPreload).then(Preload::build);
        let disk = match fault.environment {
            Environment::SmallDisk => {
                let size = match target {
                    Target::Sqlite => DISK_MEGABYTES,
                    Target::Etcd => ETCD_DISK_MEGABYTES,
                    Target::Postgres => POSTGRES_DISK_MEGABYTES,
                };
                Some(Disk::mount(size)?)
            }
            _ => None,
        };
        let mut rig = Self {
            target,
            servers: Vec::new(),
            client_links: Vec::new(),
            database_link: None,
            postgres: None,
            preload,
            disk,
        };
        match target {
            Target::Sqlite => {
                let server = Server::orlop_at(None, &[], rig.place(fault)).await;
                rig.servers.push(server);
            }
            Target::Etcd => rig.servers.push(Server::etcd_at(rig.place(fault)).await?),
            Target::Postgres => {
                let datastore = rig.create_linked_database(fault).await?;
                let names: &[&str] =
                    if fault.environment == Environment::ThreeInstances { &["a", "b", "c"] } else { &["a"] };
                for name in names {
                    let place = rig.place(fault);
                    rig.servers.push(Server::orlop_at(Some(datastore.clone()), &["--name", name], place).await);
                }
            }
        }
        for server in &rig.servers {
            rig.client_links.push(Link::to(server.port()).await);
        }
        Some(rig)
    }

    /// Returns the folders and variables of a server. Its data is on a disk, not in memory, because the test covers
    /// syncs.
    fn place(&self, fault: &Fault) -> Place {
        let environment = match &self.preload {
            Some(preload) if fault.environment == Environment::Preload => preload.environment(),
            // By default the allocator reserves a gigabyte of address space.
            _ if fault.environment == Environment::LittleMemory => {
                vec![("MIMALLOC_ARENA_RESERVE".to_owned(), "32768".into())]
            }
            _ => Vec::new(),
        };
        let data = self.disk.as_ref().filter(|_| self.target != Target::Postgres).map(|disk| {
            let data = disk.path().join("data");
            std::fs::create_dir(&data).expect("a folder can be made");
            std::fs::set_permissions(&data, std::fs::Permissions::from_mode(0o700)).expect("a folder is ours");
            data
        });
        Place { folder: Some(std::env::temp_dir()), data, environment }
    }

    /// Creates a database and a link to it. Returns the database's endpoint over the link.
    async fn create_linked_database(&mut self, fault: &Fault) -> Option<String> {
        let (datastore, port) = match fault.environment {
            Environment::OwnPostgres | Environment::SmallDisk | Environment::DatabaseUnderPreload => {
                let folder = self.disk.as_ref().map(Disk::path);
                let environment: Vec<String> = match &self.preload {
                    Some(preload) => preload
                        .environment()
                        .into_iter()
                        .map(|(name, value)| format!("{name}={}", value.to_string_lossy()))
                        .collect(),
                    None => Vec::new(),
                };
                let postgres = Postgres::start_at(folder, &environment).await?;
                let found = (postgres.create_database(), postgres.port());
                self.postgres = Some(postgres);
                found
            }
            Environment::Plain | Environment::ThreeInstances | Environment::Preload | Environment::LittleMemory => {
                let postgres = Postgres::shared().await?;
                (postgres.create_database(), postgres.port())
            }
        };
        let link = Link::to(port).await;
        let endpoint = datastore.replace(&format!(":{port}/"), &format!(":{}/", link.port()));
        self.database_link = Some(link);
        Some(endpoint)
    }

    pub fn endpoints(&self) -> Vec<String> {
        self.client_links.iter().map(|link| format!("http://127.0.0.1:{}", link.port())).collect()
    }

    pub fn server(&mut self) -> &mut Server {
        &mut self.servers[0]
    }

    pub fn preload(&self) -> &Preload {
        self.preload.as_ref().expect("this fault preloads the library")
    }

    pub fn postgres(&self) -> &Postgres {
        self.postgres.as_ref().expect("this fault has its own cluster")
    }

    /// Kills a server, if it still runs, and starts it again. Directs its clients to the new port.
    pub async fn restart(&mut self, number: usize) {
        self.servers[number].restart().await;
        self.client_links[number].set_target(self.servers[number].port());
    }

    /// Waits until every client has a response to a request sent after this call.
    pub async fn wait_for_all_clients(&mut self, workload: &Workload) {
        let since = workload.now();
        let deadline = Instant::now() + RECOVERY_TIME_MAX;
        while workload.recovered_since(since) < workload.clients() {
            for number in 0..self.servers.len() {
                let server = &mut self.servers[number];
                if !server.runs() {
                    // etcd exits when it cannot write its database; it may detect this after the fault has ended.
                    let may_end = self.target == Target::Etcd && self.disk.is_some();
                    assert!(may_end, "a server ended by itself; it logged:\n{}", server.log_tail());
                    self.restart(number).await;
                }
            }
            assert!(
                Instant::now() < deadline,
                "{} of {} clients succeeded again within {RECOVERY_TIME_MAX:?}; the log:\n{}",
                workload.recovered_since(since),
                workload.clients(),
                self.servers[0].log_tail()
            );
            sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Sets a server's soft limit of a resource; the hard limit stays.
pub fn limit(server: &Server, resource: &str, soft: &str) {
    let (pid, limit) = (server.pid().to_string(), format!("--{resource}={soft}:"));
    let limited = Command::new("prlimit").args(["--pid", &pid, &limit]).status();
    assert!(limited.is_ok_and(|status| status.success()), "a child's limits can be set");
}
