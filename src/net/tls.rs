//! TLS for listeners: the server's certificate and the verification of clients. Both are reloaded when their files
//! change.
//!
//! The files are checked when a client connects or reads the metrics, at most once per second, so a renewed certificate
//! requires no restart and closes no connection. If the files do not match, for example while they are being replaced,
//! the previous ones stay in use.

mod clients;
mod self_signed;

use std::{
    fs::Metadata,
    io,
    path::Path,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        Error as TlsError, InvalidMessage, ServerConfig, SupportedCipherSuite, SupportedProtocolVersion,
        crypto::{CryptoProvider, ring},
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
        server::NoServerSessionStorage,
        version::{TLS12, TLS13},
    },
    server::TlsStream,
};
use tracing::{info, warn};

use crate::config::{CipherSuite, Tls, TlsVersion};

/// Maximum time of a TLS handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Minimum time between two checks of the files.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Accepts TLS connections.
#[derive(Debug)]
pub struct Acceptor {
    settings: Tls,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    loaded: Loaded,
    /// Identification of the files when they were read.
    stamps: Vec<Option<FileStamp>>,
    checked_at: Instant,
    /// The last reported reason for which changed files cannot be used.
    failure: Option<String>,
}

/// The content of the files.
#[derive(Clone, Debug)]
struct Loaded {
    config: Arc<ServerConfig>,
    pair: Arc<Pair>,
}

/// The server's certificate with its chain, and its key.
#[derive(Debug)]
struct Pair {
    certificates: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    /// End of the certificate's validity in seconds since 1970.
    expires_at: i64,
}

/// Identifies the content of a file: modification time and size. Symbolic links are followed, so a link to another file
/// is detected.
type FileStamp = (Option<SystemTime>, u64);

impl Acceptor {
    /// Loads the files; generates a self-signed certificate if it is configured.
    ///
    /// # Errors
    ///
    /// A text for the operator that names the setting and the file.
    pub fn new(settings: Tls) -> Result<Self, String> {
        if let Some(wanted) = &settings.self_signed {
            self_signed::ensure(wanted, &settings.cert_file, &settings.key_file)?;
        }
        let stamps = stamps(&settings);
        let state = State { stamps, loaded: load(&settings)?, checked_at: Instant::now(), failure: None };
        Ok(Self { settings, state: Mutex::new(state) })
    }

    /// Performs the handshake with a client.
    ///
    /// # Errors
    ///
    /// If the handshake fails or takes too long.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<TlsStream<S>> {
        let handshake = TlsAcceptor::from(self.loaded().config).accept(stream);
        let accepted = timeout(HANDSHAKE_MAX, handshake).await.unwrap_or_else(|_| {
            Err(io::Error::new(io::ErrorKind::TimedOut, format!("no TLS handshake within {HANDSHAKE_MAX:?}")))
        });
        accepted.map_err(explained)
    }

    /// Returns whether every client must present a certificate.
    pub fn verifies_clients(&self) -> bool {
        self.settings.clients.is_some()
    }

    /// Returns the end of the validity of the certificate that new connections get, in seconds since 1970.
    pub fn certificate_expiry(&self) -> i64 {
        self.loaded().pair.expires_at
    }

    fn loaded(&self) -> Loaded {
        let mut state = self.state.lock();
        if state.checked_at.elapsed() >= CHECK_INTERVAL {
            state.checked_at = Instant::now();
            let stamps = stamps(&self.settings);
            if stamps != state.stamps {
                match load(&self.settings) {
                    Ok(loaded) => {
                        info!(cert_file = %self.settings.cert_file.display(), "certificates reloaded");
                        state.loaded = loaded;
                        state.stamps = stamps;
                        state.failure = None;
                    }
                    // Tried again: rights and the clock can change without the stamps.
                    Err(error) => {
                        // Clients can be revoked also while the server's certificate is wrong.
                        if let Ok(config) = config(&self.settings, &state.loaded.pair) {
                            state.loaded.config = config;
                        }
                        if state.failure.as_ref() != Some(&error) {
                            warn!(error, "cannot use the changed certificates; keeping the previous ones");
                            state.failure = Some(error);
                        }
                    }
                }
            }
        }
        state.loaded.clone()
    }
}

/// Names the cause of errors that do not tell it: a client that does not begin with TLS, and certificates that Go, and
/// so etcd, accepts.
fn explained(error: io::Error) -> io::Error {
    let Some(cause) = error.get_ref().and_then(|cause| cause.downcast_ref::<TlsError>()) else { return error };
    let text = match clients::other_reason(cause).as_deref() {
        Some(clients::VERSION_1) => {
            "the client certificate is X.509 version 1; issue it with extensions (openssl x509 -req -extfile ...)"
        }
        Some(clients::AUTHORITY) => {
            "the client certificate is itself a CA (CA:TRUE); issue it with basicConstraints=CA:FALSE"
        }
        _ if matches!(cause, TlsError::InvalidMessage(InvalidMessage::InvalidContentType)) => {
            "the client does not use TLS"
        }
        _ => return error,
    };
    io::Error::new(error.kind(), text)
}

fn stamps(settings: &Tls) -> Vec<Option<FileStamp>> {
    let stamp = |metadata: Metadata| (metadata.modified().ok(), metadata.len());
    let clients = settings.clients.iter();
    let of_clients = clients.flat_map(|clients| [Some(&clients.trusted_ca_file), clients.crl_file.as_ref()]);
    [Some(&settings.cert_file), Some(&settings.key_file)]
        .into_iter()
        .chain(of_clients)
        .flatten()
        .map(|file| std::fs::metadata(file).ok().map(stamp))
        .collect()
}

static VERSIONS: [&SupportedProtocolVersion; 2] = [&TLS12, &TLS13];

/// Returns the versions from the minimum to the maximum.
fn versions((min, max): (TlsVersion, TlsVersion)) -> &'static [&'static SupportedProtocolVersion] {
    let index = |version| match version {
        TlsVersion::Tls12 => 0,
        TlsVersion::Tls13 => 1,
    };
    &VERSIONS[index(min)..=index(max)]
}

fn load(settings: &Tls) -> Result<Loaded, String> {
    let certificates = certificates("cert-file", &settings.cert_file)?;
    let expires_at = check_time("cert-file", &settings.cert_file, &certificates[0])?;
    let key = PrivateKeyDer::from_pem_file(&settings.key_file)
        .map_err(|error| format!("key-file {}: cannot read a private key: {error}", settings.key_file.display()))?;
    let pair = Arc::new(Pair { certificates, key, expires_at });
    Ok(Loaded { config: config(settings, &pair)?, pair })
}

/// Reads the files for the verification of clients.
fn config(settings: &Tls, pair: &Pair) -> Result<Arc<ServerConfig>, String> {
    let builder = ServerConfig::builder_with_provider(provider(&settings.cipher_suites))
        .with_protocol_versions(versions(settings.versions))
        .map_err(|error| format!("tls-min-version, tls-max-version, cipher-suites: {error}"))?;
    let builder = match &settings.clients {
        Some(clients) => builder.with_client_cert_verifier(clients::verifier(clients)?),
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_single_cert(pair.certificates.clone(), pair.key.clone_key()).map_err(|error| {
        let (certificate, key) = (settings.cert_file.display(), settings.key_file.display());
        format!("cert-file {certificate} and key-file {key} cannot be used together: {error}")
    })?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    if settings.clients.is_some() {
        // rustls would resume a session without a look at the client's certificate, which may have expired.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    }
    Ok(Arc::new(config))
}

fn certificates(setting: &str, file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let name = file.display();
    let found: Vec<_> = CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect)
        .map_err(|error| format!("{setting} {name}: cannot read a certificate: {error}"))?;
    if found.is_empty() {
        return Err(format!("{setting} {name} contains no certificate in PEM format"));
    }
    Ok(found)
}

/// Returns a provider with the configured cipher suites, or with all if none is configured. If no suite of TLS 1.3 is
/// configured, all suites of TLS 1.3 are added, as in etcd.
fn provider(named: &[CipherSuite]) -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    let name = |suite: &SupportedCipherSuite| format!("{:?}", suite.suite()).replace("TLS13_", "TLS_");
    let is_named = |suite: &SupportedCipherSuite| named.iter().any(|named| named.name() == name(suite));
    let any_of_tls13 = provider.cipher_suites.iter().any(|suite| suite.tls13().is_some() && is_named(suite));
    if !named.is_empty() {
        provider.cipher_suites.retain(|suite| is_named(suite) || (suite.tls13().is_some() && !any_of_tls13));
    }
    Arc::new(provider)
}

/// Returns the last common name of a certificate's subject, which is the one that etcd uses.
pub(super) fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    let name = parsed.subject().iter_common_name().last()?.as_str().ok()?;
    Some(name.to_owned())
}

/// Checks that the certificate is valid now, so that the start fails instead of every connection. Returns the end of
/// its validity in seconds since 1970.
fn check_time(setting: &str, file: &Path, certificate: &CertificateDer<'_>) -> Result<i64, String> {
    let name = file.display();
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate)
        .map_err(|error| format!("{setting} {name}: cannot parse the certificate: {error}"))?;
    let validity = parsed.validity();
    if validity.is_valid() {
        return Ok(validity.not_after.timestamp());
    }
    Err(format!(
        "{setting} {name}: the certificate is valid from {} to {}, but not now",
        validity.not_before, validity.not_after
    ))
}

#[cfg(test)]
mod tests {
    use base64::{Engine as _, prelude::BASE64_STANDARD};

    use super::*;

    /// Go's, and so etcd's, name of a certificate is the last one.
    #[test]
    fn last_common_name_counts() {
        // Self-signed by openssl, with the subject CN=alice, CN=root.
        const CERTIFICATE: &str = "\
            MIIBlDCCATugAwIBAgIUPHWzkNTHUjs8/r5JVQzyI1ZVRzswCgYIKoZIzj0EAwIwHzEOMAwGA1UEAwwFYWxpY2UxDTALBgNVBAMMBHJvb3QwIB\
            cNMjYxMTI4MDkyNzAxWhgPMjEyNjExMDQwOTI3MDFaMB8xDjAMBgNVBAMMBWFsaWNlMQ0wCwYDVQQDDARyb290MFkwEwYHKoZIzj0CAQYIKoZI\
            zj0DAQcDQgAEufqh6l70xDb5tJ0MDWyCqpCnnuVe8IcgakaWux7LKmzB8FnrItRZq43sOGFivCd2QNTH0qoz3ciHb24wPcjEJ6NTMFEwHQYDVR\
            0OBBYEFK5aJAFSwwAFqXCCj6LKjt6rsIs3MB8GA1UdIwQYMBaAFK5aJAFSwwAFqXCCj6LKjt6rsIs3MA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZI\
            zj0EAwIDRwAwRAIgewJFzA0uw8CMXFKO7ERAvs72kpR0220mf2B9pXEgyiECIGcb7pyw8NpPt/yGkIoM7U0wThasORflwwE9rplYIBIP";
        let certificate = CertificateDer::from(BASE64_STANDARD.decode(CERTIFICATE).expect("base64"));
        assert_eq!(common_name(&certificate).as_deref(), Some("root"));
    }
}
