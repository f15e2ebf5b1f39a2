//! Verification of client certificates: root certificates, revocation list, accepted names.

use std::{collections::HashSet, path::Path, sync::Arc};

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
use x509_parser::{certificate::X509Certificate, parse_x509_certificate, parse_x509_crl};

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
    let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
    let builder = || WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
    let verifier = builder().build().map_err(|error| format!("trusted-ca-file {file}: {error}"))?;
    let revoked = match &settings.crl_file {
        Some(crl_file) => {
            let unreadable = |reason| format!("client-crl-file {}: {reason}", crl_file.display());
            // webpki refuses what this module would read in part: more than one list in DER, delta lists, indirect lists.
            builder().with_crls(lists.clone()).build().map_err(|error| unreadable(error.to_string()))?;
            Revoked::read(&lists).map_err(unreadable)?
        }
        None => Revoked::default(),
    };
    let names = settings.allowed_hostnames.iter().map(|name| {
        ServerName::try_from(name.clone())
            .map_err(|_| format!("client-cert-allowed-hostname: {name:?} is not a valid name for a certificate"))
    });
    Ok(Arc::new(Verifier { verifier, trusted, revoked, names: names.collect::<Result<_, _>>()? }))
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
    // The file is then DER.
    if bytes.first() == Some(&0x30) {
        return Ok(vec![CertificateRevocationListDer::from(bytes)]);
    }
    Err(unreadable("it contains no revocation list in PEM or DER format".to_owned()))
}

/// The revoked certificates of some authorities.
#[derive(Debug, Default)]
struct Revoked(HashSet<(Vec<u8>, Vec<u8>)>);

impl Revoked {
    /// Reads the lists. Their signatures need no check: a wrong list can only revoke too much, and the operator has chosen its
    /// file. webpki's check would refuse the clients of an authority that has the name of another one and no list, such as
    /// the old and the new one while its key is replaced.
    fn read(lists: &[CertificateRevocationListDer<'_>]) -> Result<Self, String> {
        let mut revoked = HashSet::new();
        for list in lists {
            let (_, list) = parse_x509_crl(list).map_err(|error| format!("a revocation list is invalid: {error}"))?;
            let issuer = list.issuer().as_raw();
            let serials = list.iter_revoked_certificates().map(|revoked| revoked.serial().to_bytes_be());
            revoked.extend(serials.map(|serial| (issuer.to_vec(), serial)));
        }
        Ok(Self(revoked))
    }

    fn contains(&self, certificate: &X509Certificate<'_>) -> bool {
        self.0.contains(&(certificate.issuer().as_raw().to_vec(), certificate.serial.to_bytes_be()))
    }
}

/// Verifies a client that presents a certificate of `trusted-ca-file`. It needs no chain, because it is trusted itself.
fn verify_trusted(certificate: &X509Certificate<'_>) -> Result<ClientCertVerified, Error> {
    let usage = certificate.extended_key_usage();
    let is_for_clients = usage.is_ok_and(|usage| usage.is_none_or(|usage| usage.value.client_auth));
    // webpki looks at the dates before it finds an authority, at the purpose only afterwards.
    if !certificate.validity().is_valid() {
        return Err(CertificateError::Expired.into());
    }
    if !is_for_clients {
        return Err(CertificateError::InvalidPurpose.into());
    }
    Ok(ClientCertVerified::assertion())
}

/// Verifies clients as webpki does. In addition, a client may present a certificate of `trusted-ca-file` that is one of
/// an authority, as in etcd, and its certificate must not be revoked and contain one of the names.
#[derive(Debug)]
struct Verifier {
    verifier: Arc<dyn ClientCertVerifier>,
    trusted: Vec<CertificateDer<'static>>,
    revoked: Revoked,
    /// Accepted names; empty: any.
    names: Vec<ServerName<'static>>,
}

fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, CertificateError> {
    parse_x509_certificate(certificate).map(|(_, parsed)| parsed).map_err(|_| CertificateError::BadEncoding)
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
                if !self.trusted.contains(end_entity) {
                    return Err(error);
                }
                verify_trusted(&parse(end_entity)?)?
            }
            verified => verified?,
        };
        if !self.revoked.0.is_empty() && self.revoked.contains(&parse(end_entity)?) {
            return Err(CertificateError::Revoked.into());
        }
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
