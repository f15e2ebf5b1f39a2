//! Where a command reads: a running server, or a database that a server in this process serves.

use std::{
    path::{Path, PathBuf},
    thread::JoinHandle,
};

use orlop_client::{Client, ServerFlags, describe};
use orlop_wire::proto::client::{
    mvccpb::KeyValue,
    orlopb::{
        HistoryChangesRequest, HistoryChangesResponse, HistoryMoment, HistoryMomentRequest, HistoryPairsRequest,
        HistoryPairsResponse, HistoryStateRequest, HistoryStateResponse,
    },
};
use parking_lot::Mutex;
use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
    sync::oneshot,
    time::sleep,
};
use tonic::{Code, Status, Streaming};

use super::{
    Result,
    time::{Found, Point, now_ms},
};
use crate::{
    config::{DatastoreFlags, Flags, Settings},
    datastore,
    hangup::hangups,
    server,
    text::shown_time,
};

/// Time by which the clocks of two machines may differ.
const CLOCK_DIFFERENCE_MAX_MS: i64 = 60_000;

/// The flags for the store of a command.
#[derive(Debug, clap::Args)]
pub(super) struct SourceFlags {
    #[command(flatten)]
    server: ServerFlags,

    #[command(flatten)]
    datastore: DatastoreFlags,
}

impl SourceFlags {
    /// Connects to the server or, if a database is named, opens it and serves it to this process alone.
    pub(super) async fn open(&self) -> Result<Source> {
        if !self.datastore.is_given() {
            return Ok(Source { session: Session::open(self.server.clone()).await?, local: None });
        }
        let settings = Settings::load(&Flags::from(self.datastore.clone()))?;
        // A server would create a database that does not exist.
        drop(datastore::view(&settings.datastore()?).await?);
        let local = Local::start(settings)?;
        let server = self.server.at(&format!("unix://{}", local.socket.display()))?;
        match local.connect(&server).await {
            Ok(client) => Ok(Source { session: Session { client: Mutex::new(client), server }, local: Some(local) }),
            // If the server could not start, its error tells why.
            Err(error) => Err(local.close().await.err().unwrap_or(error)),
        }
    }
}

/// The store of a command.
pub(super) struct Source {
    session: Session,
    local: Option<Local>,
}

/// A connection whose requests log in again when the token has expired: a command may wait for an answer, or for the
/// reader of its output, longer than a token is valid.
pub(super) struct Session {
    /// Replaced by one with a new token when the token has expired.
    client: Mutex<Client>,
    server: ServerFlags,
}

/// Why no revision is known for a time: it is before the first one that was recorded.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct TooEarly(String);

/// A server in this process. SIGINT, SIGTERM and SIGHUP remove its folder and end the process.
struct Local {
    stop: oneshot::Sender<()>,
    server: JoinHandle<std::result::Result<(), String>>,
    socket: PathBuf,
    /// Contains the socket; other users cannot enter it.
    _folder: tempfile::TempDir,
}

impl Local {
    fn start(settings: Settings) -> Result<Self> {
        let folder = tempfile::tempdir().map_err(|error| format!("cannot create a temporary folder: {error}"))?;
        let socket = folder.path().join("orlop.sock");
        let (stop, stopped) = oneshot::channel();
        let (listen_at, home) = (socket.clone(), folder.path().to_owned());
        let server = std::thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| error.to_string())?;
            let serving = server::serve_locally(settings, listen_at, async {
                // The sender is dropped when the command ends.
                let _ = stopped.await;
            });
            runtime.block_on(async {
                tokio::select! {
                    served = serving => served.map_err(|error| error.to_string()),
                    status = interrupted(&home) => std::process::exit(status),
                }
            })
        });
        Ok(Self { stop, server, socket, _folder: folder })
    }

    /// Connects when the server is ready. `flags` name its socket.
    async fn connect(&self, flags: &ServerFlags) -> Result<Client> {
        const PAUSE: std::time::Duration = std::time::Duration::from_millis(20);
        while !self.socket.exists() && !self.server.is_finished() {
            sleep(PAUSE).await;
        }
        loop {
            match flags.connect().await {
                Err(orlop_client::Error::Connect { .. }) if !self.server.is_finished() => sleep(PAUSE).await,
                client => return Ok(client?),
            }
        }
    }

    /// Ends the server.
    async fn close(self) -> Result<()> {
        drop(self.stop);
        let ended = tokio::task::spawn_blocking(|| self.server.join()).await?;
        Ok(ended.map_err(|_| "the server in this process has failed")??)
    }
}

/// Waits for a signal and removes the folder. Returns the exit status that a shell reports for the signal. This runs on
/// the server's thread, because the command's thread may wait for an answer on the terminal.
async fn interrupted(folder: &Path) -> i32 {
    let signals = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()), hangups());
    let (Ok(mut interrupt), Ok(mut terminate), Ok(mut hangups)) = signals else {
        return std::future::pending().await;
    };
    let status = tokio::select! {
        _ = interrupt.recv() => 130,
        _ = terminate.recv() => 143,
        Some(()) = async { hangups.as_mut()?.recv().await } => 129,
    };
    // The process ends whether or not it can be removed.
    std::fs::remove_dir_all(folder).ok();
    status
}

impl Session {
    async fn open(server: ServerFlags) -> Result<Self> {
        Ok(Self { client: Mutex::new(server.connect().await?), server })
    }

    fn client(&self) -> Client {
        self.client.lock().clone()
    }

    /// Sends a request. If the token has expired, the server has not executed the request, and it is sent once more with
    /// a new token.
    pub(super) async fn send<T>(
        &self,
        request: impl AsyncFn(&Client) -> std::result::Result<T, Status>,
    ) -> std::result::Result<T, Status> {
        let client = self.client();
        match request(&client).await {
            Err(status) if status.code() == Code::Unauthenticated => {
                let renewed = self.server.log_in_again(&client).await;
                let renewed = renewed.map_err(|error| Status::unauthenticated(error.to_string()))?;
                let Some(client) = renewed else { return Err(status) };
                *self.client.lock() = client.clone();
                request(&client).await
            }
            answer => answer,
        }
    }
}

impl Source {
    pub(super) fn client(&self) -> Client {
        self.session.client()
    }

    /// Opens another connection to the server. Pairs that were sent but not yet read occupy the flow-control windows of
    /// theirs, so an answer on the same connection may not arrive until they are read.
    pub(super) async fn connect_again(&self) -> Result<Session> {
        Session::open(self.session.server.clone()).await
    }

    /// Replaces the token, if the flags name a user. For requests whose errors [`Session::send`] does not see.
    pub(super) async fn log_in_again(&self) -> Result<()> {
        if let Some(client) = self.session.server.log_in_again(&self.client()).await? {
            *self.session.client.lock() = client;
        }
        Ok(())
    }

    /// Ends the server in this process, if there is one.
    pub(super) async fn close(self) -> Result<()> {
        drop(self.session);
        match self.local {
            Some(local) => local.close().await,
            None => Ok(()),
        }
    }

    pub(super) async fn state(&self) -> Result<HistoryStateResponse> {
        let answer = self.session.send(async |client| client.history().state(HistoryStateRequest {}).await).await;
        Ok(answer.map_err(|status| failed(&status))?.into_inner())
    }

    /// Returns the revision of a point in time; see [`Self::resolve`].
    pub(super) async fn revision_at(&self, point: Point) -> Result<i64> {
        Ok(self.resolve(point).await?.revision)
    }

    /// Returns the revision of a point in time, which exists and can be read. A duration ends now by the clock that records
    /// times. The error is [`TooEarly`] if it is a time before the first one that was recorded.
    pub(super) async fn resolve(&self, point: Point) -> Result<Found> {
        let state = self.state().await?;
        // Older servers do not tell the time.
        let now_ms = if state.now_unix_ms == 0 { now_ms() } else { state.now_unix_ms };
        check_not_future(point, now_ms)?;
        let Some(unix_ms) = point.unix_ms(now_ms) else {
            let Point::Revision(revision) = point else { return Ok(Found { revision: state.revision, unix_ms: None }) };
            check_readable(&state, revision)?;
            return Ok(Found { revision, unix_ms: None });
        };
        if point == Point::Now {
            return Ok(Found { revision: state.revision, unix_ms: None });
        }
        let moment = async |client: &Client| client.history().moment(HistoryMomentRequest { unix_ms }).await;
        let answer = self.session.send(moment).await.map_err(|status| failed(&status))?.into_inner();
        let moment = answer.moment.ok_or_else(|| TooEarly(too_early(unix_ms, state.first_moment)))?;
        if answer.may_lack_revisions {
            return Err(format!(
                "the newest revision at {} is not known: no times were recorded for some time after revision {}, or the \
                 clock was set; name a revision (`orlop history` shows them)",
                shown_time(unix_ms),
                moment.revision
            )
            .into());
        }
        check_readable(&state, moment.revision)?;
        Ok(Found { revision: moment.revision, unix_ms: Some(unix_ms) })
    }

    /// Returns the pairs of a range as of a revision.
    pub(super) async fn pairs(&self, range: (Vec<u8>, Vec<u8>), revision: i64) -> Result<PairStream> {
        let request = HistoryPairsRequest { key: range.0.into(), range_end: range.1.into(), revision };
        let answer = self.session.send(async |client| client.history().pairs(request.clone()).await).await;
        let stream = answer.map_err(|status| failed(&status))?.into_inner();
        Ok(PairStream { stream, page: Vec::new().into_iter() })
    }

    /// Returns one pair as of a revision; `None` also if the revision is older than the history.
    pub(super) async fn pair(&self, key: &[u8], revision: i64) -> Result<Option<KeyValue>> {
        let request = HistoryPairsRequest { key: key.to_vec().into(), range_end: Vec::new().into(), revision };
        match self.session.send(async |client| first_pair(client, request.clone()).await).await {
            Err(status) if status.code() == Code::OutOfRange => Ok(None),
            answer => Ok(answer.map_err(|status| failed(&status))?),
        }
    }

    pub(super) async fn changes(&self, request: HistoryChangesRequest) -> Result<Streaming<HistoryChangesResponse>> {
        let answer = self.session.send(async |client| client.history().changes(request.clone()).await).await;
        Ok(answer.map_err(|status| failed(&status))?.into_inner())
    }
}

async fn first_pair(client: &Client, request: HistoryPairsRequest) -> std::result::Result<Option<KeyValue>, Status> {
    let page = client.history().pairs(request).await?.into_inner().message().await?;
    Ok(page.and_then(|page| page.kvs.into_iter().next()))
}

/// Pairs in the order of keys.
pub(super) struct PairStream {
    stream: Streaming<HistoryPairsResponse>,
    page: std::vec::IntoIter<KeyValue>,
}

impl PairStream {
    pub(super) async fn next(&mut self) -> Result<Option<KeyValue>> {
        loop {
            if let Some(pair) = self.page.next() {
                return Ok(Some(pair));
            }
            match self.stream.message().await.map_err(|status| failed(&status))? {
                Some(page) => self.page = page.kvs.into_iter(),
                None => return Ok(None),
            }
        }
    }
}

/// Returns the text of a failed call.
pub(super) fn failed(status: &Status) -> String {
    if status.code() == Code::Unimplemented {
        return "the server has no history service: it is not Orlop, or an older version of it".to_owned();
    }
    describe(status)
}

/// Refuses a time in the future: most likely it is a local time, and means an earlier one.
fn check_not_future(point: Point, now_ms: i64) -> Result<()> {
    let Point::UnixMs(unix_ms) = point else { return Ok(()) };
    if unix_ms <= now_ms + CLOCK_DIFFERENCE_MAX_MS {
        return Ok(());
    }
    let (time, now) = (shown_time(unix_ms), shown_time(now_ms));
    Err(format!("{time} is in the future; times are in UTC, now is {now}").into())
}

fn check_readable(state: &HistoryStateResponse, revision: i64) -> Result<()> {
    if revision > state.revision {
        return Err(format!("revision {revision} does not exist; the newest one is {}", state.revision).into());
    }
    if revision < state.first_revision {
        return Err(format!(
            "revision {revision} is older than the history, which begins at revision {}{}",
            state.first_revision,
            retention_hint(state)
        )
        .into());
    }
    Ok(())
}

/// Returns the end of an error about missing rows, which names the remedy.
pub(super) fn retention_hint(state: &HistoryStateResponse) -> &'static str {
    if state.retention_seconds == 0 {
        "; the server keeps compacted rows if it runs with --history-retention"
    } else {
        ""
    }
}

/// Explains why no time is known.
pub(super) const NO_TIMES: &str = "the server records no times; it does if it runs with --history-retention";

fn too_early(unix_ms: i64, first: Option<HistoryMoment>) -> String {
    let time = shown_time(unix_ms);
    match first {
        Some(first) => format!(
            "no revision is known for {time}; times are known since {}, when revision {} was the newest one",
            shown_time(first.unix_ms),
            first.revision
        ),
        None => format!("no revision is known for {time}: {NO_TIMES}"),
    }
}
