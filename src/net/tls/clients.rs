//! Verification of client certificates: root certificates, revocation list, accepted names.

use std::{path::Path, sync::Arc};

use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
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

use super::certificates;
use crate::config::TlsClients;

pub(super) fn verifier(settings: &TlsClients) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let file = settings.trusted_ca_file.display();
    let mut roots = RootCertStore::empty();
    for certificate in certificates("trusted-ca-file", &settings.trusted_ca_file)? {
        roots.add(certificate).map_err(|error| format!("trusted-ca-file {file}: {error}"))?;
    }
    let provider = Arc::new(ring::default_provider());
    let mut builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    if let Some(crl_file) = &settings.crl_file {
        // As in etcd, only certificates on the list are refused, not those with an unknown status.
        builder = builder
            .with_crls(revocation_lists(crl_file)?)
            .only_check_end_entity_revocation()
            .allow_unknown_revocation_status();
    }
    let verifier = builder.build().map_err(|error| match &settings.crl_file {
        Some(crl_file) => format!("trusted-ca-file {file}, client-crl-file {}: {error}", crl_file.display()),
        None => format!("trusted-ca-file {file}: {error}"),
    })?;
    if settings.allowed_hostnames.is_empty() {
        return Ok(verifier);
    }
    let names = settings.allowed_hostnames.iter().map(|name| {
        ServerName::try_from(name.clone())
            .map_err(|_| format!("client-cert-allowed-hostname: {name:?} is not a valid name for a certificate"))
    });
    Ok(Arc::new(NameVerifier { verifier, names: names.collect::<Result<_, _>>()? }))
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

/// Accepts clients whose certificate contains one of the names.
#[derive(Debug)]
struct NameVerifier {
    verifier: Arc<dyn ClientCertVerifier>,
    names: Vec<ServerName<'static>>,
}

impl ClientCertVerifier for NameVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.verifier.verify_client_cert(end_entity, intermediates, now)?;
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
