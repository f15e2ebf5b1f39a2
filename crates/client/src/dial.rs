//! Opens TCP connections to names with several addresses.
//!
//! An address that does not answer, such as one of IPv6 without a route back, does not delay the others for long: the
//! attempts overlap, and the first success is used (RFC 8305, without its sorting of addresses).

use std::{io, net::SocketAddr, time::Duration};

use tokio::{
    net::{TcpStream, lookup_host},
    task::JoinSet,
    time::timeout,
};

/// Time for an address to answer before the next one is tried too.
const HEAD_START: Duration = Duration::from_millis(250);

/// Connects to `authority`, a host and a port.
///
/// # Errors
///
/// The error of the name, or that of the address that failed last. There is no limit on the time.
pub(crate) async fn connect(authority: &str) -> io::Result<TcpStream> {
    let addresses = lookup_host(authority).await?.collect();
    first_of(addresses, TcpStream::connect).await
}

/// Opens `addresses` in their order and returns the first success. The other attempts are aborted.
async fn first_of<T, F>(addresses: Vec<SocketAddr>, open: impl Fn(SocketAddr) -> F) -> io::Result<T>
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + Send + 'static,
{
    let mut addresses = addresses.into_iter();
    let mut attempts = JoinSet::new();
    let mut error = io::Error::new(io::ErrorKind::InvalidInput, "could not resolve to any address");
    loop {
        let mut wait = Duration::MAX;
        if let Some(address) = addresses.next() {
            attempts.spawn(open(address));
            wait = HEAD_START;
        }
        match timeout(wait, attempts.join_next()).await {
            Ok(Some(attempt)) => match attempt? {
                Ok(opened) => return Ok(opened),
                Err(failed) => error = failed,
            },
            // All addresses have failed.
            Ok(None) => return Err(error),
            // The next address is tried too.
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{future::pending, io::ErrorKind, net::Ipv4Addr};

    use tokio::time::{Instant, sleep};

    use super::*;

    // Ports of servers that behave differently.
    const SILENT: u16 = 1;
    const REFUSES: u16 = 2;
    const UNREACHABLE: u16 = 3;
    /// Accepts after one and a half head starts.
    const SLOW: u16 = 4;
    const ACCEPTS: u16 = 5;

    async fn open(address: SocketAddr) -> io::Result<u16> {
        match address.port() {
            SILENT => pending().await,
            REFUSES => Err(ErrorKind::ConnectionRefused.into()),
            UNREACHABLE => Err(ErrorKind::HostUnreachable.into()),
            SLOW => {
                sleep(HEAD_START * 3 / 2).await;
                Ok(SLOW)
            }
            port => Ok(port),
        }
    }

    /// Checks which server is used, or the error, and the number of whole head starts until then.
    async fn check(ports: &[u16], expected: Result<u16, ErrorKind>, head_starts: u128) {
        let addresses = ports.iter().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, *port))).collect();
        let started = Instant::now();
        let result = first_of(addresses, open).await.map_err(|error| error.kind());
        let elapsed = started.elapsed().as_millis() / HEAD_START.as_millis();
        assert_eq!((result, elapsed), (expected, head_starts), "{ports:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_address_delays_the_next_by_a_head_start() {
        check(&[ACCEPTS, SILENT], Ok(ACCEPTS), 0).await;
        check(&[SILENT, ACCEPTS], Ok(ACCEPTS), 1).await;
        check(&[SILENT, SILENT, ACCEPTS], Ok(ACCEPTS), 2).await;
        check(&[SILENT, REFUSES, ACCEPTS], Ok(ACCEPTS), 1).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_address_is_used_if_it_answers_first() {
        check(&[SLOW], Ok(SLOW), 1).await;
        check(&[SLOW, SILENT], Ok(SLOW), 1).await;
        check(&[SLOW, REFUSES], Ok(SLOW), 1).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_address_delays_nothing_and_the_last_error_is_returned() {
        check(&[REFUSES, ACCEPTS], Ok(ACCEPTS), 0).await;
        check(&[REFUSES], Err(ErrorKind::ConnectionRefused), 0).await;
        check(&[UNREACHABLE, REFUSES], Err(ErrorKind::ConnectionRefused), 0).await;
        check(&[], Err(ErrorKind::InvalidInput), 0).await;
    }
}
