//! A proxy between Orlop and Postgres that parses enough of the protocol to cut a connection at a chosen point.
//!
//! A message is a type byte, a length that includes itself, and a body. Only the first message of a client has no type
//! byte. The proxy uses Parse (`P`: a statement's name and text), Bind (`B`: a portal
//! and the statement's name), ReadyForQuery (`Z`, which ends a response) and NotificationResponse (`A`).

use std::{
    collections::HashSet,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering},
    },
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::Notify,
};

/// The name in the statement that commits: the database function that appends to the log.
const APPEND: &[u8] = b"orlop_append";

/// The point at which a connection is cut when it carries an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Before the server receives the statement.
    Before,
    /// After the server has received the statement, while it may be executing it.
    During,
    /// After the server has executed the statement and before its response arrives.
    After,
}

/// The proxy; it runs until the test's runtime ends.
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    server_port: AtomicU16,
    /// The cut to apply to the next append.
    armed: Mutex<Option<Cut>>,
    cuts: AtomicUsize,
    drops_notifications: AtomicBool,
}

impl Proxy {
    pub async fn start(server_port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let shared = Arc::new(Shared {
            server_port: AtomicU16::new(server_port),
            armed: Mutex::new(None),
            cuts: AtomicUsize::new(0),
            drops_notifications: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(serve(client, Arc::clone(&accepting)));
            }
        });
        Self { port, shared }
    }

    /// Returns the endpoint with this proxy in place of the server.
    pub fn endpoint(&self, endpoint: &str) -> String {
        let server = format!(":{}/", self.shared.server_port.load(Ordering::Relaxed));
        endpoint.replace(&server, &format!(":{}/", self.port))
    }

    /// Cuts the connection of the next append, unless a cut is already pending.
    pub fn arm(&self, cut: Cut) {
        self.shared.armed.lock().expect("the lock is not poisoned").get_or_insert(cut);
    }

    /// Returns the number of appends that were cut.
    pub fn cuts(&self) -> usize {
        self.shared.cuts.load(Ordering::Relaxed)
    }

    pub fn drop_notifications(&self) {
        self.shared.drops_notifications.store(true, Ordering::Relaxed);
    }
}

/// One connection of a client.
struct Connection {
    shared: Arc<Shared>,
    /// The proxy withholds the server's current response, and ends the connection when this response is complete.
    is_last_answer: AtomicBool,
    end: Notify,
}

async fn serve(client: TcpStream, shared: Arc<Shared>) {
    let server = TcpStream::connect(("127.0.0.1", shared.server_port.load(Ordering::Relaxed))).await;
    let Ok(server) = server else { return };
    // Without this, a small message waits until the previous one is acknowledged, which takes 40 ms.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (mut from_client, mut to_client) = client.into_split();
    let Ok(start) = startup(&mut from_client, &mut to_client).await else { return };
    let (from_server, to_server) = server.into_split();
    let connection = Connection { shared, is_last_answer: AtomicBool::new(false), end: Notify::new() };
    // When one of these ends, all four halves of the sockets are dropped, which closes both connections.
    tokio::select! {
        _ = requests(&connection, start, from_client, to_server) => {}
        _ = answers(&connection, from_server, to_client) => {}
        () = connection.end.notified() => {}
    }
}

/// Returns the client's startup message, which is a length and a body. Refuses the request for TLS that may precede it.
async fn startup(from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf) -> io::Result<Vec<u8>> {
    const TLS: [u8; 4] = 80_877_103_u32.to_be_bytes();
    loop {
        let mut message = vec![0; 4];
        from.read_exact(&mut message).await?;
        let length = u32::from_be_bytes([message[0], message[1], message[2], message[3]]) as usize;
        message.resize(length, 0);
        from.read_exact(&mut message[4..]).await?;
        if message[4..] != TLS {
            return Ok(message);
        }
        to.write_all(b"N").await?;
    }
}

/// Forwards the client's messages, and cuts the connection at an append if a cut is armed.
async fn requests(
    connection: &Connection,
    start: Vec<u8>,
    mut client: OwnedReadHalf,
    mut server: OwnedWriteHalf,
) -> io::Result<()> {
    server.write_all(&start).await?;
    let mut appends: HashSet<Vec<u8>> = HashSet::new();
    loop {
        let message = read(&mut client).await?;
        match message[0] {
            b'P' if message.windows(APPEND.len()).any(|part| part == APPEND) => {
                appends.insert(text(&message[5..]).to_vec());
            }
            b'B' => {
                let portal = text(&message[5..]).len();
                let is_append = appends.contains(text(&message[5 + portal + 1..]));
                let cut = if is_append {
                    connection.shared.armed.lock().expect("the lock is not poisoned").take()
                } else {
                    None
                };
                if let Some(cut) = cut {
                    connection.shared.cuts.fetch_add(1, Ordering::Relaxed);
                    match cut {
                        Cut::Before => return Ok(()),
                        Cut::During => {
                            server.write_all(&message).await?;
                            // Execute and Sync follow.
                            for _ in 0..2 {
                                let rest = read(&mut client).await?;
                                server.write_all(&rest).await?;
                            }
                            return Ok(());
                        }
                        Cut::After => connection.is_last_answer.store(true, Ordering::Relaxed),
                    }
                }
            }
            _ => {}
        }
        server.write_all(&message).await?;
    }
}

/// Forwards the server's messages, except for a response that must not arrive and for unwanted notifications.
async fn answers(connection: &Connection, mut server: OwnedReadHalf, mut client: OwnedWriteHalf) -> io::Result<()> {
    loop {
        let message = read(&mut server).await?;
        if connection.is_last_answer.load(Ordering::Relaxed) {
            if message[0] == b'Z' {
                connection.end.notify_one();
            }
        } else if message[0] != b'A' || !connection.shared.drops_notifications.load(Ordering::Relaxed) {
            client.write_all(&message).await?;
        }
    }
}

/// Reads a whole message. Returns it with its type and length.
async fn read(from: &mut OwnedReadHalf) -> io::Result<Vec<u8>> {
    let mut message = vec![0; 5];
    from.read_exact(&mut message).await?;
    let length = u32::from_be_bytes([message[1], message[2], message[3], message[4]]) as usize;
    message.resize(1 + length, 0);
    from.read_exact(&mut message[5..]).await?;
    Ok(message)
}

/// Returns the bytes before the next zero byte.
fn text(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}
