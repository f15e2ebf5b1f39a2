//! The TLS settings of listeners, put together from the single settings.

use std::path::PathBuf;

use super::{SelfSigned, Settings, Tls, TlsClients, TlsVersion};

impl Settings {
    /// Returns the TLS settings of https and unixs addresses, if there are any.
    ///
    /// # Errors
    ///
    /// If a setting is given without another one that it requires.
    pub fn tls(&self) -> Result<Option<Tls>, String> {
        let given = |file: &PathBuf| (!file.as_os_str().is_empty()).then(|| file.clone());
        let versions = (self.tls_min_version, self.tls_max_version);
        if versions == (TlsVersion::Tls13, TlsVersion::Tls12) {
            return Err("tls-min-version TLS1.3 is above tls-max-version TLS1.2".to_owned());
        }
        let clients = self.tls_clients()?;
        let (cert_file, key_file, self_signed) = match (given(&self.cert_file), given(&self.key_file)) {
            (Some(cert_file), Some(key_file)) => (cert_file, key_file, None),
            (None, None) if self.auto_tls => {
                // etcd's directory.
                let folder = self.data_dir.join("fixtures/client");
                (folder.join("cert.pem"), folder.join("key.pem"), Some(self.self_signed()))
            }
            (None, None) if clients.is_none() => return Ok(None),
            (None, None) => return Err("trusted-ca-file requires cert-file and key-file".to_owned()),
            (Some(_), None) => return Err("cert-file requires key-file, the private key of the certificate".to_owned()),
            (None, Some(_)) => return Err("key-file requires cert-file, the certificate of the private key".to_owned()),
        };
        let cipher_suites = self.cipher_suites.0.clone();
        Ok(Some(Tls { cert_file, key_file, self_signed, clients, versions, cipher_suites }))
    }

    fn tls_clients(&self) -> Result<Option<TlsClients>, String> {
        let has_crl = !self.client_crl_file.as_os_str().is_empty();
        if self.trusted_ca_file.as_os_str().is_empty() {
            for (given, setting) in [
                (self.client_cert_auth, "client-cert-auth"),
                (has_crl, "client-crl-file"),
                (!self.client_cert_allowed_hostname.0.is_empty(), "client-cert-allowed-hostname"),
            ] {
                if given {
                    return Err(format!(
                        "{setting} requires trusted-ca-file, the root certificates for verifying clients"
                    ));
                }
            }
            return Ok(None);
        }
        Ok(Some(TlsClients {
            trusted_ca_file: self.trusted_ca_file.clone(),
            crl_file: has_crl.then(|| self.client_crl_file.clone()),
            allowed_hostnames: self.client_cert_allowed_hostname.0.clone(),
        }))
    }

    /// Returns the settings of a self-signed certificate for all known host names of the server.
    fn self_signed(&self) -> SelfSigned {
        let urls = self.listen_client_urls.0.iter().chain(&self.advertise_client_urls.0);
        let mut hosts: Vec<String> = urls.filter_map(|url| url.host()).map(str::to_owned).collect();
        hosts.extend(["localhost", "127.0.0.1", "::1"].map(str::to_owned));
        hosts.retain(|host| !host.is_empty());
        hosts.sort();
        hosts.dedup();
        SelfSigned { hosts, validity_years: self.self_signed_cert_validity }
    }
}
