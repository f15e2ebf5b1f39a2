//! `orlop snapshot`: saves snapshots of running servers; inspects and restores snapshots without a server.

use std::path::PathBuf;

use clap::Subcommand;

use super::{
    Bump, Content, HashCheck, Purpose, Restored,
    report::{self, Format},
    restore,
    save::{SaveArgs, Saved, save},
    status,
};
use crate::{
    config::{DatastoreFlags, Flags, Settings},
    datastore::empty_database,
    output::print,
};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Save a snapshot of a running server, Orlop or etcd, to a file and print its name
    ///
    /// The file appears complete: the command writes to a temporary file in the same folder, verifies the checksum that
    /// the server has sent, syncs the file and renames it. Its mode is 0600.
    Save(SaveArgs),

    /// Verify a snapshot and print what etcdutl prints: hash, revision, keys, size and version
    ///
    /// The hash covers the whole file, as etcdutl's does; HashKV of a server returns another one.
    Status {
        #[command(flatten)]
        snapshot: SnapshotArgs,

        /// Output format
        #[arg(short, long, default_value = "simple", value_name = "FORMAT")]
        write_out: Format,
    },

    /// Restore a snapshot of Orlop or etcd into a new SQLite file or an empty Postgres database
    ///
    /// Then start a server on the database. It is a new cluster with the revisions, history, leases, users and roles of
    /// the snapshot. Leases start with their full TTL, or with the remaining one that etcd has saved; alarms are not
    /// restored.
    Restore {
        #[command(flatten)]
        snapshot: SnapshotArgs,

        /// Number of revisions to skip, so that clients which know later revisions than the snapshot's notice the restore
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..), requires = "mark_compacted")]
        bump_revision: Option<i64>,

        /// Compact the store at its new revision (required with --bump-revision)
        #[arg(long, requires = "bump_revision")]
        mark_compacted: bool,

        /// Leave out the history that the snapshot contains
        #[arg(long)]
        without_history: bool,

        #[command(flatten)]
        datastore: DatastoreFlags,

        #[command(flatten)]
        ignored: IgnoredFlags,
    },
}

/// Flags of `etcdutl snapshot restore` for the members of a cluster and the files of etcd. They have no effect, so that a
/// command line written for etcdutl restores a snapshot.
#[derive(Debug, clap::Args)]
struct IgnoredFlags {
    #[arg(long, hide = true)]
    name: Option<String>,

    #[arg(long, hide = true)]
    initial_cluster: Option<String>,

    #[arg(long, hide = true)]
    initial_cluster_token: Option<String>,

    #[arg(long, hide = true)]
    initial_advertise_peer_urls: Option<String>,

    #[arg(long, hide = true)]
    initial_memory_map_size: Option<String>,

    #[arg(long, hide = true)]
    wal_dir: Option<String>,
}

impl IgnoredFlags {
    /// Reports on standard error which flags are given.
    fn report(&self) {
        let flags = [
            ("name", &self.name),
            ("initial-cluster", &self.initial_cluster),
            ("initial-cluster-token", &self.initial_cluster_token),
            ("initial-advertise-peer-urls", &self.initial_advertise_peer_urls),
            ("initial-memory-map-size", &self.initial_memory_map_size),
            ("wal-dir", &self.wal_dir),
        ];
        let given: Vec<&str> = flags.iter().filter(|(_, value)| value.is_some()).map(|(name, _)| *name).collect();
        if !given.is_empty() {
            eprintln!("orlop: ignoring flags of etcdutl that have no effect in Orlop: {}", given.join(", "));
        }
    }
}

#[derive(Debug, clap::Args)]
struct SnapshotArgs {
    /// Snapshot file, written by snapshot save of orlop or etcdctl, or by the server (snapshot-interval); or the data
    /// directory of an etcd that has stopped
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Accept a file with a missing or wrong checksum, such as one copied from a data directory
    #[arg(long)]
    skip_hash_check: bool,
}

impl SnapshotArgs {
    fn check(&self) -> HashCheck {
        if self.skip_hash_check { HashCheck::Skip } else { HashCheck::Verify }
    }
}

/// Runs the command and prints its result.
///
/// # Errors
///
/// A text for the operator.
pub async fn run(args: Args) -> Result<(), Box<dyn std::error::Error>> {
    match args.command {
        Command::Save(args) => {
            let Saved { file, lacks_history } = save(&args).await?;
            if lacks_history {
                eprintln!("orlop: saved without history, because the server keeps none (history-retention)");
            }
            Ok(print(format!("{}\n", file.display()).as_bytes())?)
        }
        Command::Status { snapshot, write_out } => {
            let status = status(&snapshot.file, snapshot.check())?;
            Ok(print(format!("{}\n", report::text(&status, write_out)).as_bytes())?)
        }
        Command::Restore { snapshot, bump_revision, mark_compacted: _, without_history, datastore, ignored } => {
            ignored.report();
            let settings = Settings::load(&Flags::from(datastore))?;
            let datastore = settings.datastore()?;
            let purpose = Purpose::NewStore(bump_revision.map(Bump));
            let create = async { Ok::<_, Box<dyn std::error::Error>>(empty_database(&datastore).await?) };
            let content = if without_history { Content::Log } else { Content::LogAndArchive };
            let Restored { head, history } =
                restore(&snapshot.file, snapshot.check(), content, purpose, create).await?;
            let text = format!("restored into {}: revision {head}{history}\n", datastore.name());
            Ok(print(text.as_bytes())?)
        }
    }
}
