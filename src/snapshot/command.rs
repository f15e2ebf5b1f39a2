//! `orlop snapshot`: saves snapshots of running servers; inspects and restores snapshots without a server.

use std::{io::Write as _, path::PathBuf};

use clap::Subcommand;

use super::{
    HashCheck, Status, restore,
    save::{SaveArgs, save},
    status,
};
use crate::{
    config::{Datastore, DatastoreFlags, Flags, Settings},
    output::Format,
};
use orlop_core::log::Load;
use orlop_sql::{PostgresLoader, SqliteLoader};

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

    /// Verify a snapshot and print its revision, keys and size
    Status {
        #[command(flatten)]
        snapshot: SnapshotArgs,

        /// Output format
        #[arg(short, long, default_value = "simple", value_name = "FORMAT")]
        write_out: Format,
    },

    /// Restore a snapshot into an empty database
    ///
    /// Then start a server on the database. It is a new cluster with the revisions, history and leases of the snapshot.
    /// Leases start with their full TTL; alarms are not restored.
    Restore {
        #[command(flatten)]
        snapshot: SnapshotArgs,

        #[command(flatten)]
        datastore: DatastoreFlags,
    },
}

#[derive(Debug, clap::Args)]
struct SnapshotArgs {
    /// Snapshot file, written by snapshot save of orlop or etcdctl, or by the server (snapshot-interval)
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
            let file = save(&args).await?;
            Ok(writeln!(std::io::stdout(), "{}", file.display())?)
        }
        Command::Status { snapshot, write_out } => {
            let status = status(&snapshot.file, snapshot.check()).await?;
            let text = match write_out {
                Format::Simple => simple(&status),
                Format::Json => json(&status).to_string(),
            };
            Ok(writeln!(std::io::stdout(), "{text}")?)
        }
        Command::Restore { snapshot, datastore } => {
            let settings = Settings::load(&Flags::from(datastore))?;
            let datastore = settings.datastore()?;
            let status = restore(&snapshot.file, snapshot.check(), empty_database(&datastore)).await?;
            Ok(writeln!(
                std::io::stdout(),
                "restored into {}: revision {}, {} keys, {} leases",
                datastore.name(),
                status.revision,
                status.keys,
                status.leases
            )?)
        }
    }
}

/// Creates the empty database of a new server.
async fn empty_database(datastore: &Datastore) -> Result<Box<dyn Load>, Box<dyn std::error::Error>> {
    Ok(match datastore {
        Datastore::Sqlite(file) => Box::new(SqliteLoader::database(file).await?),
        Datastore::Postgres(endpoint) => Box::new(PostgresLoader::open(endpoint).await?),
    })
}

fn simple(status: &Status) -> String {
    let compact_revision = status.compact_revision.map_or("none".to_owned(), |revision| revision.to_string());
    format!(
        "hash              {}\n\
         revision          {}\n\
         compact revision  {compact_revision}\n\
         keys              {}\n\
         rows              {}\n\
         leases            {}\n\
         cluster           {:x}\n\
         bytes             {}",
        status.hash, status.revision, status.keys, status.rows, status.leases, status.cluster_id, status.bytes
    )
}

fn json(status: &Status) -> serde_json::Value {
    serde_json::json!({
        "hash": status.hash,
        "revision": status.revision.0,
        "compactRevision": status.compact_revision.map(|revision| revision.0),
        "totalKey": status.rows,
        "liveKey": status.keys,
        "leases": status.leases,
        "clusterId": status.cluster_id,
        "totalSize": status.bytes,
    })
}
