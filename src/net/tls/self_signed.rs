//! A self-signed certificate, as with etcd's `--auto-tls`: traffic is encrypted, but clients cannot verify the server.

use std::{io::Write as _, path::Path, time::Duration};

use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose};
use tracing::info;
use x509_parser::time::ASN1Time;

use super::{certificates, check_time};
use crate::config::SelfSigned;
use orlop_core::{files::sync_folder_of, private};

const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// The validity starts this long before now, for clients whose clocks are behind.
const CLOCK_SKEW_MAX: Duration = Duration::from_secs(60 * 60);

/// Creates the certificate and its key, unless they exist and the certificate is still valid.
///
/// # Errors
///
/// A text for the operator.
pub(super) fn ensure(wanted: &SelfSigned, cert_file: &Path, key_file: &Path) -> Result<(), String> {
    let usable = key_file.is_file()
        && certificates("auto-tls", cert_file).is_ok_and(|found| check_time("auto-tls", cert_file, &found[0]).is_ok());
    if usable {
        return Ok(());
    }
    let pem = generate(wanted).map_err(|error| format!("auto-tls: cannot generate a certificate: {error}"))?;
    for (file, text) in [(key_file, &pem.key), (cert_file, &pem.cert)] {
        write_private(file, text).map_err(|error| format!("auto-tls: cannot write {}: {error}", file.display()))?;
    }
    info!(cert_file = %cert_file.display(), hosts = ?wanted.hosts, "generated a certificate");
    Ok(())
}

struct Pem {
    cert: String,
    key: String,
}

fn generate(wanted: &SelfSigned) -> Result<Pem, rcgen::Error> {
    let mut params = CertificateParams::new(wanted.hosts.clone())?;
    params.distinguished_name.push(DnType::OrganizationName, "orlop");
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let now = ASN1Time::now().to_datetime();
    params.not_before = now - CLOCK_SKEW_MAX;
    params.not_after = now + YEAR * wanted.validity_years;
    let key = KeyPair::generate()?;
    Ok(Pem { cert: params.self_signed(&key)?.pem(), key: key.serialize_pem() })
}

/// Writes a file that only the server's user can read. Returns when the file and its name are on disk.
fn write_private(path: &Path, text: &str) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        private::make_folder(folder)?;
    }
    let mut file = private::file_options().write(true).truncate(true).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    sync_folder_of(path)
}
