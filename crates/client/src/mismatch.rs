//! Errors of connections between a side with TLS and one without, and of certificates, with the remedy.
//!
//! The libraries below report a message of an unknown type, a broken pipe or the end of the stream.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio_rustls::rustls::{
    CertificateError, ClientConfig, Error as TlsError, InvalidMessage, SignatureScheme, client::ResolvesClientCert,
    sign::CertifiedKey,
};

use crate::endpoint::{Address, Endpoint};

/// The TLS settings of connections.
#[derive(Clone, Debug)]
pub struct Tls {
    pub(crate) config: Arc<ClientConfig>,
    certificate: Arc<ClientCertificate>,
}

/// Selects the client certificate as the settings do, and records that a server has asked for one. rustls does not
/// report it.
#[derive(Debug)]
struct ClientCertificate {
    selects: Arc<dyn ResolvesClientCert>,
    is_asked_for: AtomicBool,
}

impl Tls {
    pub(crate) fn new(mut config: ClientConfig) -> Self {
        let selects = Arc::clone(&config.client_auth_cert_resolver);
        let certificate = Arc::new(ClientCertificate { selects, is_asked_for: AtomicBool::new(false) });
        config.client_auth_cert_resolver = Arc::<ClientCertificate>::clone(&certificate);
        Self { config: Arc::new(config), certificate }
    }

    /// Explains an error of opening a connection by the client certificate if the server has asked for one.
    pub(crate) fn explained(&self, error: io::Error) -> io::Error {
        let of_tls = error.get_ref().and_then(|cause| cause.downcast_ref::<TlsError>());
        // The client finds the other errors of TLS, for example in the server's certificate.
        let is_found_by_server = matches!(of_tls, None | Some(TlsError::AlertReceived(_)));
        self.refusal().filter(|_| is_found_by_server).unwrap_or(error)
    }

    /// Returns the error for a server that closes the connection, if it has asked for a certificate. In TLS 1.3 it
    /// verifies the certificate after the client's handshake, and its alert is lost if the client is sending data.
    pub(crate) fn refusal(&self) -> Option<io::Error> {
        if !self.certificate.is_asked_for.load(Ordering::Relaxed) {
            return None;
        }
        Some(io::Error::other(if self.certificate.has_certs() {
            "the server refused the client certificate; its log has the reason"
        } else {
            "the server requires a client certificate: use --cert and --key"
        }))
    }
}

impl ResolvesClientCert for ClientCertificate {
    fn resolve(&self, root_hint_subjects: &[&[u8]], sigschemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.is_asked_for.store(true, Ordering::Relaxed);
        self.selects.resolve(root_hint_subjects, sigschemes)
    }

    fn only_raw_public_keys(&self) -> bool {
        self.selects.only_raw_public_keys()
    }

    fn has_certs(&self) -> bool {
        self.selects.has_certs()
    }
}

/// Returns the error for a server that does not answer without TLS.
pub(crate) fn needs_tls(address: &Address) -> io::Error {
    let [_, secure] = schemes(address);
    io::Error::other(format!("the server does not answer without TLS; does it use {secure}?"))
}

/// Says what to do about an error of connecting to the endpoint.
pub(crate) fn explained(error: io::Error, endpoint: &Endpoint) -> io::Error {
    if !endpoint.has_tls {
        return error;
    }
    let [plain, _] = schemes(&endpoint.address);
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<TlsError>());
    let text = if matches!(cause, Some(TlsError::InvalidMessage(InvalidMessage::InvalidContentType))) {
        format!("the server does not use TLS: use {plain}")
    } else if matches!(cause, Some(TlsError::InvalidCertificate(CertificateError::UnknownIssuer))) {
        format!("{error}; name the certificate of its authority with --cacert")
    } else if error.to_string().contains("CaUsedAsEndEntity") {
        // The certificate that `openssl req -x509` creates by default, which Go's clients accept.
        "the server's certificate is one of a certificate authority; use a certificate that an authority has signed, \
         or create it with `-addext basicConstraints=critical,CA:FALSE`"
            .to_owned()
    } else if error.kind() == io::ErrorKind::UnexpectedEof {
        format!("the server has closed the connection during the TLS handshake; does it use {plain}?")
    } else {
        return error;
    };
    io::Error::new(error.kind(), text)
}

/// Returns how URLs of such an address begin: without TLS, and with it.
fn schemes(address: &Address) -> [&'static str; 2] {
    match address {
        Address::Tcp(_) => ["http://", "https://"],
        Address::Unix(_) => ["unix://", "unixs://"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(text: &str) -> Endpoint {
        text.parse().expect("an endpoint")
    }

    #[test]
    fn errors_of_tls_name_the_remedy() {
        let of_tls = |error: TlsError| io::Error::new(io::ErrorKind::InvalidData, error);
        let plain = || of_tls(TlsError::InvalidMessage(InvalidMessage::InvalidContentType));
        for (url, error, want) in [
            ("https://a:1", plain(), "the server does not use TLS: use http://"),
            ("unixs://a", plain(), "the server does not use TLS: use unix://"),
            (
                "https://a:1",
                of_tls(TlsError::InvalidCertificate(CertificateError::UnknownIssuer)),
                "invalid peer certificate: UnknownIssuer; name the certificate of its authority with --cacert",
            ),
            (
                "https://a:1",
                io::Error::new(io::ErrorKind::UnexpectedEof, "tls handshake eof"),
                "the server has closed the connection during the TLS handshake; does it use http://?",
            ),
            ("https://a:1", io::Error::other("other"), "other"),
            ("http://a:1", io::Error::other("CaUsedAsEndEntity"), "CaUsedAsEndEntity"),
        ] {
            assert_eq!(explained(error, &endpoint(url)).to_string(), want);
        }
    }
}
