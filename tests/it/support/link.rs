//! A TCP proxy that simulates network failures for any protocol.

use std::{
    collections::BTreeSet,
    io,
    sync::{
        Arc,
        atomic::{AtomicU16, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::AsyncReadExt as _,
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};

/// Maximum number of pieces in flight in one direction. If there are more, the sender waits, as with a full TCP window.
const PIECES_MAX: usize = 1_024;
const PIECE_BYTES_MAX: usize = 64 << 10;

/// The simulated state of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkState {
    Normal,
    /// Delivers all data later by this duration.
    Slow(Duration),
    /// Delivers nothing and closes nothing; all data that was sent arrives after the failure ends.
    Silent,
    /// Resets new connections at once; open ones are not affected.
    Down,
}

/// The proxy; it runs until the test's runtime ends.
pub struct Link {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    target: AtomicU16,
    network: watch::Sender<NetworkState>,
    /// Increases when all connections are to be reset.
    resets: watch::Sender<u64>,
    /// The newest connection to lose.
    lost: watch::Sender<BTreeSet<u16>>,
    open: AtomicUsize,
}

impl Link {
    pub async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let own = listener.local_addr().expect("a bound socket has an address").port();
        let shared = Arc::new(Shared {
            target: AtomicU16::new(port),
            network: watch::Sender::new(NetworkState::Normal),
            resets: watch::Sender::new(0),
            lost: watch::Sender::default(),
            open: AtomicUsize::new(0),
        });
        let accepting = Arc::clone(&shared);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let shared = Arc::clone(&accepting);
                tokio::spawn(async move {
                    shared.open.fetch_add(1, Ordering::Relaxed);
                    // An error needs no handling: dropping the sockets closes both connections.
                    let _ = carry(client, &shared).await;
                    shared.open.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
        Self { port: own, shared }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the endpoint with this proxy in place of the server.
    pub fn endpoint(&self, endpoint: &str) -> String {
        let target = self.shared.target.load(Ordering::Relaxed);
        endpoint.replace(&format!(":{target}/"), &format!(":{}/", self.port))
    }

    /// Sets the target of new connections.
    pub fn set_target(&self, port: u16) {
        self.shared.target.store(port, Ordering::Relaxed);
    }

    pub fn set_network(&self, network: NetworkState) {
        self.shared.network.send_replace(network);
    }

    /// Delivers nothing more on one open connection and closes it on neither side. `port` is the client's as the server
    /// sees it.
    pub fn lose(&self, port: u16) {
        self.shared.lost.send_if_modified(|lost| lost.insert(port));
    }

    /// Resets all open connections on both sides. Returns their number.
    pub fn reset(&self) -> usize {
        self.shared.resets.send_modify(|resets| *resets += 1);
        self.shared.open.load(Ordering::Relaxed)
    }
}

async fn carry(client: TcpStream, shared: &Shared) -> io::Result<()> {
    let (mut resets, mut lost) = (shared.resets.subscribe(), shared.lost.subscribe());
    if *shared.network.borrow() == NetworkState::Down {
        return client.set_zero_linger();
    }
    let connecting = TcpStream::connect(("127.0.0.1", shared.target.load(Ordering::Relaxed)));
    let server = match connecting.await {
        Ok(server) => server,
        Err(_) => return client.set_zero_linger(),
    };
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let port = server.local_addr()?.port();
    let is_lost = async {
        // It fails when the test ends.
        let _ = lost.wait_for(|lost| lost.contains(&port)).await;
    };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        _ = resets.changed() => {
            to_client.as_ref().set_zero_linger()?;
            to_server.as_ref().set_zero_linger()?;
            Ok(())
        }
        () = is_lost => std::future::pending().await,
        ended = direction(from_client, &to_server, shared) => ended,
        ended = direction(from_server, &to_client, shared) => ended,
    }
}

/// Forwards the data of one direction until either side closes; the caller then closes both.
async fn direction(mut from: OwnedReadHalf, to: &OwnedWriteHalf, shared: &Shared) -> io::Result<()> {
    let (pieces, mut under_way) = mpsc::channel::<(Instant, Vec<u8>)>(PIECES_MAX);
    let reading = async {
        let mut buffer = vec![0; PIECE_BYTES_MAX];
        loop {
            let read = from.read(&mut buffer).await?;
            let delay = match *shared.network.borrow() {
                NetworkState::Slow(delay) => delay,
                NetworkState::Normal | NetworkState::Silent | NetworkState::Down => Duration::ZERO,
            };
            if read == 0 || pieces.send((Instant::now() + delay, buffer[..read].to_vec())).await.is_err() {
                return Ok(());
            }
        }
    };
    let writing = async {
        let mut network = shared.network.subscribe();
        while let Some((due, piece)) = under_way.recv().await {
            sleep_until(due).await;
            if network.wait_for(|network| *network != NetworkState::Silent).await.is_err() {
                return Ok(());
            }
            let mut rest = &piece[..];
            while !rest.is_empty() {
                to.writable().await?;
                match to.try_write(rest) {
                    Ok(written) => rest = &rest[written..],
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    };
    tokio::select! {
        ended = reading => ended,
        ended = writing => ended,
    }
}
