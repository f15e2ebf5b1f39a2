//! Errors of connections between a side with TLS and one without, and of certificates, with the remedy.
//!
//! The libraries below report a message of an unknown type, a broken pipe or the end of the stream.

use std::io;

use tokio_rustls::rustls::{CertificateError, Error as TlsError, InvalidMessage};

use crate::endpoint::{Address, Endpoint};

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
