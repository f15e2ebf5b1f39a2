//! `orlop defrag` and `orlop hashkv`, which work on a store without its server.

use orlop_core::{
    index::{ReadAt, Unreadable},
    store::{hash, replay},
    types::Revision,
};
use orlop_sql::SqliteLog;

use crate::{
    config::{Datastore, DatastoreFlags, Flags, Settings},
    datastore,
    output::{Format, print},
    text::bytes,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

#[derive(Debug, clap::Args)]
pub struct DefragArgs {
    #[command(flatten)]
    datastore: DatastoreFlags,
}

#[derive(Debug, clap::Args)]
pub struct HashArgs {
    /// Revision up to which pairs are hashed; 0: the newest one
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(i64).range(0..), value_name = "REVISION")]
    rev: i64,

    /// Output format; simple is one line: the hash, its revision and the compact revision, which is -1 if there is none
    #[arg(short, long, default_value = "simple", value_name = "FORMAT")]
    write_out: Format,

    #[command(flatten)]
    datastore: DatastoreFlags,
}

/// Defragments a SQLite database and prints its sizes.
///
/// # Errors
///
/// A text for the operator.
pub async fn defrag(args: DefragArgs) -> Result<()> {
    let datastore = Settings::load(&Flags::from(args.datastore))?.datastore()?;
    let Datastore::Sqlite(file) = &datastore else {
        return Err(
            "defrag is for SQLite; for Postgres, run etcdctl defrag on a server, or VACUUM in the database".into()
        );
    };
    let done = SqliteLog::defragment(file).await?;
    let (before, after) = (bytes(done.bytes_before), bytes(done.bytes_after));
    Ok(print(format!("defragmented {}: {before} before, {after} after\n", datastore.name()).as_bytes())?)
}

/// Prints the hash that HashKV of a server on this store returns.
///
/// # Errors
///
/// A text for the operator.
pub async fn hashkv(args: HashArgs) -> Result<()> {
    let datastore = Settings::load(&Flags::from(args.datastore))?.datastore()?;
    let view = datastore::view(&datastore).await?;
    let index = replay(&*view).await?.index;
    let at = if args.rev == 0 { ReadAt::Latest } else { ReadAt::Revision(Revision(args.rev)) };
    let revision = index.resolve(at).map_err(|unreadable| match unreadable {
        Unreadable::Future => format!("revision {} does not exist; the newest one is {}", args.rev, index.head()),
        Unreadable::Compacted => {
            let compacted = index.compact_revision().unwrap_or(Revision::EMPTY);
            format!("revision {} has been compacted; the oldest readable one is {compacted}", args.rev)
        }
    })?;
    let hashed = hash::of_log(&*view, &index, revision, index.compact_revision()).await?;
    let compact_revision = hashed.compact_revision.map_or(-1, |revision| revision.0);
    let text = match args.write_out {
        Format::Simple => format!("{}, {}, {compact_revision}\n", hashed.hash, hashed.revision),
        Format::Json => {
            let json = serde_json::json!({
                "hash": hashed.hash,
                "hashRevision": hashed.revision.0,
                "compactRevision": compact_revision,
            });
            format!("{json}\n")
        }
    };
    Ok(print(text.as_bytes())?)
}
