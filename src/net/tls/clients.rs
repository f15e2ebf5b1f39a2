//! Verification of client certificates: root certificates, revocation list, accepted names.

use std::{path::Path, sync::Arc};

use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore, SignatureScheme,
    client::{danger::HandshakeSignatureValid, verify_server_name},
    crypto::ring,
    pki_types::{
        CertificateDer, CertificateRevocationListDer, ServerName, UnixTime,
        pem::{self, PemObject as _},
    },
    server::{
        ParsedCertificate, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use x509_parser::{parse_x509_certificate, parse_x509_crl};

use super::certificates;
use crate::config::TlsClients;

/// What is wrong with a client's certificate, in the words of webpki.
pub(super) const VERSION_1: &str = "UnsupportedCertVersion";
pub(super) const AUTHORITY: &str = "CaUsedAsEndEntity";

/// Returns the text of a reason that rustls has no variant for.
pub(super) fn other_reason(error: &Error) -> Option<String> {
    let Error::InvalidCertificate(CertificateError::Other(OtherError(reason))) = error else { return None };
    Some(reason.to_string())
}

pub(super) fn verifier(settings: &TlsClients) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let file = settings.trusted_ca_file.display();
    let trusted = certificates("trusted-ca-file", &settings.trusted_ca_file)?;
    let lists = settings.crl_file.as_deref().map_or(Ok(Vec::new()), revocation_lists)?;
    let mut roots = RootCertStore::empty();
    for certificate in &trusted {
        roots.add(certificate.clone()).map_err(|error| format!("trusted-ca-file {file}: {error}"))?;
    }
    let trusted = with_revocation(trusted, &lists);
    let provider = Arc::new(ring::default_provider());
    let mut builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    if !lists.is_empty() {
        // As in etcd, only certificates on the list are refused, not those with an unknown status.
        builder = builder.with_crls(lists).only_check_end_entity_revocation().allow_unknown_revocation_status();
    }
    let verifier = builder.build().map_err(|error| match &settings.crl_file {
        Some(crl_file) => format!("trusted-ca-file {file}, client-crl-file {}: {error}", crl_file.display()),
        None => format!("trusted-ca-file {file}: {error}"),
    })?;
    let names = settings.allowed_hostnames.iter().map(|name| {
        ServerName::try_from(name.clone())
            .map_err(|_| format!("client-cert-allowed-hostname: {name:?} is not a valid name for a certificate"))
    });
    Ok(Arc::new(Verifier { verifier, trusted, names: names.collect::<Result<_, _>>()? }))
}

fn revocation_lists(file: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, String> {
    let unreadable = |reason: String| format!("client-crl-file {}: {reason}", file.display());
    let bytes = std::fs::read(file).map_err(|error| unreadable(error.to_string()))?;
    let lists: Vec<_> = CertificateRevocationListDer::pem_slice_iter(&bytes)
        .collect::<Result<_, pem::Error>>()
        .map_err(|error| unreadable(error.to_string()))?;
    if !lists.is_empty() {
        return Ok(lists);
    }
    // The file is then DER, which is parsed by the verifier.
    if bytes.first() == Some(&0x30) {
        return Ok(vec![CertificateRevocationListDer::from(bytes)]);
    }
    Err(unreadable("it contains no revocation list in PEM or DER format".to_owned()))
}

/// A certificate of `trusted-ca-file`, which a client may present as its own.
#[derive(Debug)]
struct Trusted {
    certificate: CertificateDer<'static>,
    is_revoked: bool,
}

/// Looks up which certificates are revoked. The lists' signatures need no check: a wrong list can only revoke too much,
/// and the operator has chosen its file. A list that only webpki can read revokes all certificates.
fn with_revocation(trusted: Vec<CertificateDer<'static>>, lists: &[CertificateRevocationListDer<'_>]) -> Vec<Trusted> {
    let lists: Result<Vec<_>, _> = lists.iter().map(|list| parse_x509_crl(list)).collect();
    let is_revoked = |certificate: &CertificateDer<'_>| {
        let (Ok(lists), Ok((_, certificate))) = (&lists, parse_x509_certificate(certificate)) else { return true };
        lists.iter().any(|(_, list)| {
            list.issuer() == certificate.issuer()
                && list.iter_revoked_certificates().any(|revoked| *revoked.serial() == certificate.serial)
        })
    };
    trusted.into_iter().map(|certificate| Trusted { is_revoked: is_revoked(&certificate), certificate }).collect()
}

impl Trusted {
    /// Verifies a client that presents this certificate. It needs no chain, because it is trusted itself.
    fn verify_client(&self) -> Result<ClientCertVerified, Error> {
        let (_, parsed) = parse_x509_certificate(&self.certificate).map_err(|_| CertificateError::BadEncoding)?;
        let usage = parsed.extended_key_usage();
        let is_for_clients = usage.is_ok_and(|usage| usage.is_none_or(|usage| usage.value.client_auth));
        // webpki looks at the dates before it finds an authority, at the purpose only afterwards.
        if !parsed.validity().is_valid() {
            return Err(CertificateError::Expired.into());
        }
        if !is_for_clients {
            return Err(CertificateError::InvalidPurpose.into());
        }
        if self.is_revoked {
            return Err(CertificateError::Revoked.into());
        }
        Ok(ClientCertVerified::assertion())
    }
}

/// Verifies clients as webpki does. In addition, a client may present a certificate of `trusted-ca-file` that is one of
/// an authority, as in etcd, and its certificate must contain one of the names.
#[derive(Debug)]
struct Verifier {
    verifier: Arc<dyn ClientCertVerifier>,
    trusted: Vec<Trusted>,
    /// Accepted names; empty: any.
    names: Vec<ServerName<'static>>,
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = match self.verifier.verify_client_cert(end_entity, intermediates, now) {
            Err(error) if other_reason(&error).is_some_and(|reason| reason == AUTHORITY) => {
                let trusted = self.trusted.iter().find(|trusted| trusted.certificate == *end_entity);
                trusted.ok_or(error)?.verify_client()?
            }
            verified => verified?,
        };
        if self.names.is_empty() {
            return Ok(verified);
        }
        let parsed = ParsedCertificate::try_from(end_entity)?;
        if self.names.iter().any(|name| verify_server_name(&parsed, name).is_ok()) {
            return Ok(verified);
        }
        Err(Error::InvalidCertificate(CertificateError::NotValidForName))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }

    fn offer_client_auth(&self) -> bool {
        self.verifier.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.verifier.client_auth_mandatory()
    }
}
