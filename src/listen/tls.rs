//! TLS for listeners: certificates, who may connect, and both anew when their files change.
//!
//! Files are looked at when somebody connects, at most once a second, so that a renewed certificate needs no restart and no
//! connection is dropped. Files that make no sense together, as they may while they are being replaced, leave what was.

use std::{
    fs::Metadata,
    io,
    path::Path,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use parking_lot::Mutex;
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        RootCertStore, ServerConfig, SupportedProtocolVersion,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
        server::{WebPkiClientVerifier, danger::ClientCertVerifier},
        version::{TLS12, TLS13},
    },
    server::TlsStream,
};
use tracing::{info, warn};

use crate::config::{TlsFiles, TlsVersion};

/// How long a client has to speak TLS.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// How often the files are looked at, at most.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Makes connections of clients' TLS. Cheap to share behind an [`Arc`].
#[derive(Debug)]
pub struct Acceptor {
    settings: TlsFiles,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    config: Arc<ServerConfig>,
    /// What the files looked like when they were read.
    stamps: Vec<Option<Stamp>>,
    looked: Instant,
}

/// What tells that a file is another one; a link that leads elsewhere is noticed too.
type Stamp = (Option<SystemTime>, u64);

impl Acceptor {
    /// # Errors
    ///
    /// A text for the operator that names setting and file.
    pub fn new(settings: TlsFiles) -> Result<Self, String> {
        let state = State { stamps: stamps(&settings), config: load(&settings)?, looked: Instant::now() };
        Ok(Self { settings, state: Mutex::new(state) })
    }

    /// Speaks TLS with a client.
    ///
    /// # Errors
    ///
    /// If the client does not, in time and in ways that are accepted.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let handshake = TlsAcceptor::from(self.config()).accept(stream);
        timeout(HANDSHAKE_MAX, handshake).await.unwrap_or_else(|_| {
            Err(io::Error::new(io::ErrorKind::TimedOut, format!("no TLS handshake within {HANDSHAKE_MAX:?}")))
        })
    }

    fn config(&self) -> Arc<ServerConfig> {
        let mut state = self.state.lock();
        if state.looked.elapsed() >= LOOK_INTERVAL {
            state.looked = Instant::now();
            let stamps = stamps(&self.settings);
            if stamps != state.stamps {
                match load(&self.settings) {
                    Ok(config) => {
                        info!(cert_file = %self.settings.cert_file.display(), "certificates read anew");
                        state.config = config;
                    }
                    Err(error) => {
                        warn!(error, "the changed certificates cannot be used; going on with the former ones")
                    }
                }
                state.stamps = stamps;
            }
        }
        Arc::clone(&state.config)
    }
}

fn stamps(settings: &TlsFiles) -> Vec<Option<Stamp>> {
    let stamp = |metadata: Metadata| (metadata.modified().ok(), metadata.len());
    [Some(&settings.cert_file), Some(&settings.key_file), settings.trusted_ca_file.as_ref()]
        .into_iter()
        .flatten()
        .map(|file| std::fs::metadata(file).ok().map(stamp))
        .collect()
}

static BOTH: [&SupportedProtocolVersion; 2] = [&TLS12, &TLS13];

/// From the oldest to the newest.
fn versions((min, max): (TlsVersion, TlsVersion)) -> &'static [&'static SupportedProtocolVersion] {
    let place = |version| match version {
        TlsVersion::Tls12 => 0,
        TlsVersion::Tls13 => 1,
    };
    &BOTH[place(min)..=place(max)]
}

fn load(settings: &TlsFiles) -> Result<Arc<ServerConfig>, String> {
    let cert_file = settings.cert_file.display();
    let certificates = certificates("cert-file", &settings.cert_file)?;
    check_time("cert-file", &settings.cert_file, &certificates[0])?;
    let key = PrivateKeyDer::from_pem_file(&settings.key_file)
        .map_err(|error| format!("key-file {}: no private key can be read: {error}", settings.key_file.display()))?;
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(versions(settings.versions))
        .map_err(|error| format!("tls-min-version, tls-max-version: {error}"))?;
    let builder = match &settings.trusted_ca_file {
        Some(file) => builder.with_client_cert_verifier(verifier(file)?),
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_single_cert(certificates, key).map_err(|error| {
        format!("cert-file {cert_file} and key-file {} cannot be used together: {error}", settings.key_file.display())
    })?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn certificates(setting: &str, file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let name = file.display();
    let found: Vec<_> = CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect)
        .map_err(|error| format!("{setting} {name}: no certificate can be read: {error}"))?;
    if found.is_empty() {
        return Err(format!("{setting} {name} holds no certificate in PEM form"));
    }
    Ok(found)
}

fn verifier(file: &Path) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("trusted-ca-file", file)? {
        roots.add(certificate).map_err(|error| format!("trusted-ca-file {}: {error}", file.display()))?;
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(ring::default_provider()))
        .build()
        .map_err(|error| format!("trusted-ca-file {}: {error}", file.display()))
}

/// A certificate that no client takes is better known at start.
fn check_time(setting: &str, file: &Path, certificate: &CertificateDer<'_>) -> Result<(), String> {
    let name = file.display();
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate)
        .map_err(|error| format!("{setting} {name}: the certificate cannot be understood: {error}"))?;
    let validity = parsed.validity();
    if validity.is_valid() {
        return Ok(());
    }
    Err(format!(
        "{setting} {name}: the certificate is valid from {} to {} only",
        validity.not_before, validity.not_after
    ))
}
