//! Creates certificates with openssl, as an operator does.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use tempfile::TempDir;

use super::skip;

/// A certificate authority: a folder with its root certificate and the certificates that it signed.
pub struct Authority {
    folder: TempDir,
}

/// A certificate and its key.
#[derive(Clone)]
pub struct Certificate {
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Authority {
    /// Creates the root certificate. Returns `None` if the machine has no openssl.
    pub fn new() -> Option<Self> {
        if Command::new("openssl").arg("version").output().is_err() {
            skip("openssl");
            return None;
        }
        let folder = tempfile::tempdir().expect("a temporary directory can be made");
        let arguments = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout authority.key -out authority.pem -subj /CN=root -days 30";
        openssl(folder.path(), arguments);
        Some(Self { folder })
    }

    pub fn root(&self) -> PathBuf {
        self.folder.path().join("authority.pem")
    }

    /// Returns the root certificate and its key.
    pub fn certificate(&self) -> Certificate {
        Certificate { cert: self.root(), key: self.folder.path().join("authority.key") }
    }

    /// Creates a certificate for 127.0.0.1 and localhost, for servers and clients. It is valid for `days` days; if
    /// `days` is negative, it has expired.
    pub fn sign(&self, name: &str, days: i32) -> Certificate {
        self.issue(name, days, Some("subjectAltName=IP:127.0.0.1,DNS:localhost"))
    }

    /// Creates a certificate of an authority below this one.
    pub fn sign_authority(&self, name: &str, days: i32) -> Certificate {
        self.issue(name, days, Some("basicConstraints=critical,CA:TRUE"))
    }

    /// Like [`Authority::sign_authority`], for servers only.
    pub fn sign_server_authority(&self, name: &str) -> Certificate {
        self.issue(name, 30, Some("basicConstraints=critical,CA:TRUE\nextendedKeyUsage=serverAuth"))
    }

    /// Creates a certificate of X.509 version 1, as openssl 3.0 does without extensions. Returns `None` if the
    /// machine's openssl does not.
    pub fn sign_version_1(&self, name: &str) -> Option<Certificate> {
        let certificate = self.issue(name, 30, None);
        if openssl(self.folder.path(), &format!("x509 -in {name}.pem -noout -text")).contains("Version: 1 ") {
            return Some(certificate);
        }
        skip("openssl that writes X.509 version 1");
        None
    }

    fn issue(&self, name: &str, days: i32, extensions: Option<&str>) -> Certificate {
        let folder = self.folder.path();
        openssl(
            folder,
            &format!(
                "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}"
            ),
        );
        let mut sign = format!(
            "x509 -req -in {name}.csr -CA authority.pem -CAkey authority.key -CAcreateserial -days {days} -out {name}.pem"
        );
        if let Some(extensions) = extensions {
            std::fs::write(folder.join("extensions"), format!("{extensions}\n")).expect("a file can be written");
            sign += " -extfile extensions";
        }
        openssl(folder, &sign);
        Certificate { cert: folder.join(format!("{name}.pem")), key: folder.join(format!("{name}.key")) }
    }

    /// Returns a file with several certificates.
    pub fn bundle(&self, certificates: &[&Certificate]) -> PathBuf {
        let file = self.folder.path().join("bundle.pem");
        let read = |of: &&Certificate| std::fs::read(&of.cert).expect("a file can be read");
        std::fs::write(&file, certificates.iter().flat_map(read).collect::<Vec<u8>>()).expect("a file can be written");
        file
    }
}

impl Authority {
    /// Revokes a certificate. Returns the path of the revocation list in PEM; the same list in DER is next to it.
    pub fn revoke(&self, certificate: &Certificate) -> PathBuf {
        let folder = self.folder.path();
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("a file can be written");
        write("index", "");
        write("number", "01\n");
        write(
            "ca.cnf",
            "[ca]\ndefault_ca = own\n[own]\ndatabase = index\ncrlnumber = number\ndefault_md = sha256\n\
             default_crl_days = 30\ncrl_extensions = crl\n[crl]\nauthorityKeyIdentifier = keyid:always\n",
        );
        let name = certificate.cert.to_str().expect("a temporary path is text");
        let signer = "ca -config ca.cnf -cert authority.pem -keyfile authority.key";
        openssl(folder, &format!("{signer} -revoke {name}"));
        openssl(folder, &format!("{signer} -gencrl -out revoked.pem"));
        openssl(folder, "crl -in revoked.pem -outform DER -out revoked.der");
        folder.join("revoked.pem")
    }
}

impl Certificate {
    /// Replaces this certificate's files by those of another, as a renewal does.
    pub fn replace_by(&self, other: &Self) {
        for (from, to) in [(&other.key, &self.key), (&other.cert, &self.cert)] {
            let new = to.with_extension("new");
            std::fs::copy(from, &new).expect("a file can be copied");
            std::fs::rename(&new, to).expect("a file can be renamed");
        }
    }
}

/// Returns what openssl prints.
fn openssl(folder: &Path, arguments: &str) -> String {
    let output = Command::new("openssl").args(arguments.split(' ')).current_dir(folder).output();
    let output = output.expect("openssl can be started");
    assert!(output.status.success(), "openssl {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
