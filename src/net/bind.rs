//! Binds the addresses of listeners.

use std::{
    fs::Permissions,
    io,
    net::{Ipv6Addr, SocketAddr},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    time::Duration,
};

use rustix::net::sockopt::{set_ipv6_v6only, set_socket_keepalive, set_tcp_keepidle, set_tcp_keepintvl};
use tokio::net::{TcpListener, TcpSocket, UnixListener, UnixSocket};

use crate::config::FileMode;

/// Maximum number of clients that wait to be accepted; the kernel lowers it to `net.core.somaxconn`. Further ones wait for a
/// second on TCP, and are refused on a unix socket.
const BACKLOG: u32 = 4_096;
/// Pause between the probes of a silent connection, as in etcd. They end the connections of clients that have vanished, and
/// load balancers and firewalls do not forget the others. HTTP/2 has pings, but HTTP/1 has none.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);

/// Binds a TCP address. Returns the socket, and the address with its actual port. The host remains as configured, so
/// that the advertised name matches certificates.
pub(super) async fn bind_tcp(address: &str) -> io::Result<(TcpListener, String)> {
    let found = preferred(tokio::net::lookup_host(address).await?);
    let found = found.ok_or_else(|| io::Error::other(format!("{address} has no address")))?;
    let all = found.ip().is_unspecified().then(|| listen_on_all(found.port()));
    let socket = match all {
        Some(Ok(socket)) => socket,
        Some(Err(error)) if error.kind() == io::ErrorKind::AddrInUse => return Err(error),
        // This system may lack IPv6.
        Some(Err(_)) | None => listen(if found.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?, found)?,
    };
    let port = socket.local_addr()?.port();
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    Ok((socket, format!("{host}:{port}")))
}

/// Listens on all addresses of IPv6 and IPv4, as Go does for either.
fn listen_on_all(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v6()?;
    set_ipv6_v6only(&socket, false)?;
    listen(socket, (Ipv6Addr::UNSPECIFIED, port).into())
}

fn listen(socket: TcpSocket, address: SocketAddr) -> io::Result<TcpListener> {
    // Otherwise a restarted server could not bind while connections of the last one are in TIME_WAIT.
    socket.set_reuseaddr(true)?;
    // Accepted sockets inherit these.
    set_socket_keepalive(&socket, true)?;
    set_tcp_keepidle(&socket, TCP_KEEPALIVE)?;
    set_tcp_keepintvl(&socket, TCP_KEEPALIVE)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Returns the address that etcd binds of a name such as localhost: the first of IPv4, or else the first.
fn preferred(addresses: impl Iterator<Item = SocketAddr>) -> Option<SocketAddr> {
    addresses.min_by_key(SocketAddr::is_ipv6)
}

/// Binds a unix socket. Sets its mode before clients can connect.
pub(super) fn bind_unix(path: &Path, mode: FileMode) -> io::Result<UnixListener> {
    let socket = UnixSocket::new_stream()?;
    socket.bind(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(mode.0))?;
    socket.listen(BACKLOG)
}

#[cfg(test)]
mod tests {
    use rustix::net::sockopt;
    use tokio::{
        net::{TcpStream, UnixStream},
        time::timeout,
    };
    use tokio_util::either::Either;

    use super::*;
    use crate::net::Socket;

    #[test]
    fn names_are_bound_to_ipv4_as_by_etcd() {
        let parsed = |text: &&str| text.parse::<SocketAddr>().expect("an address");
        for (resolved, bound) in [
            (&["[::1]:1", "127.0.0.1:1"][..], Some("127.0.0.1:1")),
            (&["127.0.0.2:1", "127.0.0.1:1"], Some("127.0.0.2:1")),
            (&["[::2]:1", "[::1]:1"], Some("[::2]:1")),
            (&[], None),
        ] {
            assert_eq!(preferred(resolved.iter().map(parsed)), bound.map(|text| parsed(&text)), "{resolved:?}");
        }
    }

    #[tokio::test]
    async fn unspecified_addresses_are_those_of_both_families() {
        let has_ipv6 = TcpListener::bind("[::1]:0").await.is_ok();
        for address in ["0.0.0.0:0", "[::]:0"].into_iter().take(if has_ipv6 { 2 } else { 1 }) {
            let (socket, bound) = bind_tcp(address).await.expect("a port is free");
            assert_eq!(bound.rsplit_once(':').map(|(host, _)| host), address.strip_suffix(":0"));
            let port = socket.local_addr().expect("an address").port();
            let socket = Socket::Tcp(socket);
            for host in ["127.0.0.1", "::1"].into_iter().take(if has_ipv6 { 2 } else { 1 }) {
                let _client = TcpStream::connect((host, port)).await.expect("a connection");
                let (stream, remote) = socket.accept().await.expect("a client");
                let remote: SocketAddr = remote.parse().expect("an address");
                assert_eq!(remote.ip().to_string(), host, "a client of {address}");
                let Either::Left(stream) = stream else { panic!("a TCP stream") };
                assert!(
                    sockopt::socket_keepalive(&stream).expect("an option"),
                    "the kernel ends it if {host} vanishes"
                );
                assert_eq!(sockopt::tcp_keepidle(&stream).expect("an option"), TCP_KEEPALIVE);
            }
        }
    }

    #[tokio::test]
    async fn clients_that_connect_at_once_wait_to_be_accepted() {
        const CLIENTS: usize = 300;
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let _unix = bind_unix(&path, FileMode(0o600)).expect("a socket");
        let mut clients = Vec::new();
        for number in 0..CLIENTS {
            clients.push(UnixStream::connect(&path).await.unwrap_or_else(|error| panic!("client {number}: {error}")));
        }
        drop(clients);
        let (_tcp, address) = bind_tcp("127.0.0.1:0").await.expect("a port is free");
        let mut clients = Vec::new();
        for number in 0..CLIENTS {
            let connected = timeout(Duration::from_secs(10), TcpStream::connect(&address)).await;
            clients.push(connected.unwrap_or_else(|_| panic!("client {number} waits")).expect("a connection"));
        }
    }
}
