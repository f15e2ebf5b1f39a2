//! `orlop snapshot save`: saves a snapshot of a running server, Orlop or etcd.

use std::{
    io::{ErrorKind, Write as _},
    num::NonZeroUsize,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{Stream, TryStreamExt as _};
use orlop_client::{Client, ServerFlags, hint_at_root};
use orlop_wire::proto::client::{etcdserverpb::SnapshotRequest, orlopb::HistorySnapshotRequest};
use tempfile::NamedTempFile;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::timeout,
};
use tonic::{Code, Status};

use super::{
    Content, Error, Result, checksum, dated::DatedFolder, file_error, import::has_archive, new_file_in, publish,
};
use crate::hangup::hangups;
use orlop_core::{clock::now, files::folder_of};

/// Maximum time between two pieces of a snapshot. A server with a large store may take long before it sends the first one.
const PIECE_WAIT_MAX: Duration = Duration::from_secs(10 * 60);

#[derive(Debug, clap::Args)]
pub struct SaveArgs {
    /// File to write, also through a symbolic link, or an existing folder, in which the file is named
    /// orlop-YYYYMMDDTHHMMSSZ.db (UTC)
    #[arg(value_name = "PATH")]
    path: PathBuf,

    /// In a folder: delete all but the newest N files with such names
    #[arg(long, value_name = "N")]
    keep: Option<NonZeroUsize>,

    /// Include the compacted rows that the server keeps (history-retention), and the times of revisions; snapshot status
    /// --write-out json prints their number
    #[arg(long)]
    history: bool,

    #[command(flatten)]
    server: ServerFlags,
}

impl SaveArgs {
    fn content(&self) -> Content {
        if self.history { Content::LogAndArchive } else { Content::Log }
    }
}

/// What was saved.
pub(super) struct Saved {
    pub(super) file: PathBuf,
    /// Whether the history was requested and the server keeps none.
    pub(super) lacks_history: bool,
}

/// Saves a snapshot.
///
/// # Errors
///
/// A text for the operator. There is no file then, and an older file with the same name is unchanged; unless only the
/// deletion of old files failed.
///
/// # Cancel safety
///
/// If the future is dropped, the temporary file is removed.
pub(super) async fn save(args: &SaveArgs) -> std::result::Result<Saved, Box<dyn std::error::Error>> {
    let target = Target::new(args)?;
    let client = args.server.connect().await?;
    let endpoint = args.server.endpoint();
    let lacks_history = tokio::select! {
        file = receive(&client, args.content(), target.folder(), |_, _| {}) => {
            let file = file.map_err(|error| match &error {
                Error::Server(status) if status.code() == Code::Unimplemented && args.history => format!(
                    "cannot save the history of {endpoint}: the server does not send it: it is etcd or an older version of \
                     Orlop"
                ),
                Error::Server(status) => {
                    format!("cannot save a snapshot of {endpoint}: {error}{}", hint_at_root(status))
                }
                Error::File(_) | Error::Log(_) | Error::History(_) => {
                    format!("cannot save a snapshot of {endpoint}: {error}")
                }
            })?;
            let lacks_history = args.history && !has_archive(file.path())?;
            publish(file, &target.file)?;
            lacks_history
        }
        () = interrupted()? => return Err("interrupted; nothing was saved".into()),
    };
    if let (Some(folder), Some(keep)) = (&target.dated, args.keep) {
        folder.prune(&target.file, keep, now()).map_err(|error| {
            format!("the snapshot is saved as {}, but old ones remain: {error}", target.file.display())
        })?;
    } else {
        // They may belong to another user, for example in `/tmp`.
        let _ = DatedFolder::new(target.folder().to_owned()).delete_abandoned(now());
    }
    Ok(Saved { file: target.file, lacks_history })
}

/// Where a snapshot is saved.
struct Target {
    file: PathBuf,
    /// The folder, if the file is named by its time.
    dated: Option<DatedFolder>,
}

impl Target {
    fn new(args: &SaveArgs) -> Result<Self> {
        let path = &args.path;
        if path.is_dir() {
            let folder = DatedFolder::new(path.clone());
            return Ok(Self { file: folder.file_at(now()), dated: Some(folder) });
        }
        if path.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(Error::File(format!("the folder {} does not exist", path.display())));
        }
        if args.keep.is_some() {
            return Err(Error::File(format!(
                "--keep needs a folder, in which the files are named by their times; {} is not a folder",
                path.display()
            )));
        }
        match path.metadata() {
            // A rename would replace it.
            Ok(metadata) if !metadata.is_file() => {
                let text = format!("{} is not a file; give the name of a file or of a folder", path.display());
                return Err(Error::File(text));
            }
            // The kernel refuses some links, such as those of other users in /tmp.
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(Error::File(format!("cannot use {}: {error}", path.display())));
            }
            Ok(_) | Err(_) => {}
        }
        Ok(Self { file: behind_links(path), dated: None })
    }

    /// Returns the folder of the file. The temporary file is in it too, so that it can be renamed.
    fn folder(&self) -> &Path {
        folder_of(&self.file)
    }
}

/// Returns the file to which symbolic links lead, which need not exist. A rename would replace the link.
fn behind_links(path: &Path) -> PathBuf {
    let mut file = path.to_owned();
    while let Ok(next) = file.read_link() {
        file = folder_of(&file).join(next);
    }
    file
}

/// Receives a snapshot of a server into a temporary file and verifies its checksum. After each piece `progress` gets the
/// bytes received and the bytes to come.
///
/// # Errors
///
/// If the server does not send it completely, or the file cannot be written. The code is `Unimplemented` if the server
/// sends no archives: it is etcd, or an older Orlop.
pub async fn receive(
    client: &Client,
    content: Content,
    folder: &Path,
    progress: impl FnMut(u64, u64),
) -> Result<NamedTempFile> {
    let failed = |status: Status| Error::Server(Box::new(status));
    // First, so that the server does not read its store for a folder that cannot be written.
    let file = new_file_in(folder)?;
    match content {
        Content::Log => {
            let mut maintenance = client.maintenance();
            let pieces = in_time(maintenance.snapshot(SnapshotRequest {})).await.map_err(failed)?.into_inner();
            let pieces = pieces.map_ok(|piece| (piece.blob, piece.remaining_bytes));
            write(pieces, file, folder, progress).await
        }
        Content::LogAndArchive => {
            let mut history = client.history();
            let pieces = in_time(history.snapshot(HistorySnapshotRequest {})).await.map_err(failed)?.into_inner();
            let pieces = pieces.map_ok(|piece| (piece.blob, piece.remaining_bytes));
            write(pieces, file, folder, progress).await
        }
    }
}

/// Writes pieces, each with the bytes to come, to a temporary file in `folder`.
async fn write(
    mut pieces: impl Stream<Item = std::result::Result<(Bytes, u64), Status>> + Unpin,
    mut file: NamedTempFile,
    folder: &Path,
    mut progress: impl FnMut(u64, u64),
) -> Result<NamedTempFile> {
    let mut received = 0;
    let failed = |status: Status| Error::Server(Box::new(status));
    while let Some((blob, remaining_bytes)) = in_time(pieces.try_next()).await.map_err(failed)? {
        let written = file.write_all(&blob);
        written.map_err(|error| file_error("write a file in", folder, &error))?;
        received += blob.len() as u64;
        progress(received, remaining_bytes);
    }
    checksum::verify_received(file.path())?;
    Ok(file)
}

async fn in_time<T>(answer: impl Future<Output = std::result::Result<T, Status>>) -> std::result::Result<T, Status> {
    let late = |_| Status::deadline_exceeded(format!("nothing was sent for {} seconds", PIECE_WAIT_MAX.as_secs()));
    timeout(PIECE_WAIT_MAX, answer).await.unwrap_or_else(|elapsed| Err(late(elapsed)))
}

/// Completes when the process shall end.
fn interrupted() -> std::io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangups = hangups()?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            Some(()) = async { hangups.as_mut()?.recv().await } => {}
        }
    })
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use sha2::{Digest as _, Sha256};

    use super::*;

    #[tokio::test]
    async fn snapshot_that_differs_from_the_sent_one_is_refused() {
        let mut sent = vec![7_u8; 1_024];
        let checksum = Sha256::digest(&sent);
        sent.extend_from_slice(&checksum[..]);
        for changed in [None, Some(0), Some(700), Some(1_023), Some(1_024), Some(1_055)] {
            let mut received = sent.clone();
            if let Some(at) = changed {
                received[at] ^= 1;
            }
            let folder = tempfile::tempdir().expect("a folder");
            let file = new_file_in(folder.path()).expect("a file");
            let pieces = received.chunks(600).map(|piece| Ok((Bytes::copy_from_slice(piece), 0)));
            let written = write(stream::iter(pieces), file, folder.path(), |_, _| {}).await;
            let error = written.as_ref().err().map(ToString::to_string);
            let expected = changed.map(|_| "the received snapshot is damaged: its checksum does not match".to_owned());
            assert_eq!(error, expected, "changed byte: {changed:?}");
            let files = std::fs::read_dir(folder.path()).expect("a folder").count();
            assert_eq!(files, usize::from(changed.is_none()), "changed byte: {changed:?}");
        }
    }
}
