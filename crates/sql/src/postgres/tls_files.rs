//! The files with certificates and keys that the URL or the environment names, and errors about certificates.
//!
//! sqlx reads them at each connection, but its errors name neither the file nor the parameter, and a file without a
//! certificate only shows as an unknown issuer. This module reads them first. As with the file of passwords, an error is
//! not final: Kubernetes may mount a file later.

use std::{fs, io, path::PathBuf};

use percent_encoding::percent_decode_str;

/// What a file contains.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Roots,
    Certificate,
    Key,
}

impl Content {
    const ALL: [Self; 3] = [Self::Roots, Self::Certificate, Self::Key];

    /// Returns the content of the file that a parameter names, with sqlx's names of parameters.
    fn of_parameter(name: &str) -> Option<Self> {
        match name {
            "sslrootcert" | "ssl-root-cert" | "ssl-ca" => Some(Self::Roots),
            "sslcert" | "ssl-cert" => Some(Self::Certificate),
            "sslkey" | "ssl-key" => Some(Self::Key),
            _ => None,
        }
    }

    fn variable(self) -> &'static str {
        match self {
            Self::Roots => "PGSSLROOTCERT",
            Self::Certificate => "PGSSLCERT",
            Self::Key => "PGSSLKEY",
        }
    }

    /// Returns a text that a PEM file with this content has, and the name of the content.
    fn mark(self) -> (&'static str, &'static str) {
        match self {
            Self::Roots | Self::Certificate => ("-----BEGIN CERTIFICATE-----", "certificate"),
            Self::Key => ("PRIVATE KEY-----", "private key"),
        }
    }
}

/// Whether a connection uses TLS.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Off,
    /// If the server has it.
    Preferred,
    Required,
    /// The certificate of the server is verified.
    Verified,
}

impl Mode {
    /// Returns the mode of `sslmode`, as sqlx understands it.
    fn of(text: Option<&str>) -> Self {
        match text.map(str::to_ascii_lowercase).as_deref() {
            Some("disable" | "allow") => Self::Off,
            Some("require") => Self::Required,
            Some("verify-ca" | "verify-full") => Self::Verified,
            Some(_) | None => Self::Preferred,
        }
    }

    fn reads(self, content: Content) -> bool {
        match self {
            Self::Off => false,
            Self::Preferred | Self::Required => content != Content::Roots,
            Self::Verified => true,
        }
    }
}

/// A file with the name of the parameter, or of the variable, that names it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct TlsFile {
    content: Content,
    source: String,
    path: PathBuf,
}

impl TlsFile {
    /// Returns the file if the parameter names one. sqlx decodes its value like that of a form.
    pub(super) fn of_parameter(name: &str, value: &str) -> Option<Self> {
        let content = Content::of_parameter(name)?;
        let value = value.replace('+', " ");
        let path = percent_decode_str(&value).decode_utf8_lossy().into_owned().into();
        Some(Self { content, source: name.to_owned(), path })
    }

    /// Returns the file that a variable names. Its value can also be the content.
    fn of_variable(content: Content, variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let source = content.variable();
        let path = variable(source).filter(|value| !value.trim_start().starts_with("-----BEGIN"))?;
        Some(Self { content, source: source.to_owned(), path: path.into() })
    }

    fn check(&self) -> io::Result<()> {
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("{} {}: {error}", self.source, self.path.display()))
        };
        let text = fs::read(&self.path).map_err(named)?;
        let (mark, content) = self.content.mark();
        if String::from_utf8_lossy(&text).contains(mark) {
            return Ok(());
        }
        Err(named(io::Error::new(io::ErrorKind::InvalidData, format!("it contains no {content}"))))
    }
}

/// The files that a connection reads.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct TlsFiles {
    files: Vec<TlsFile>,
    mode: Mode,
}

impl TlsFiles {
    /// Chooses the files that a connection with this `sslmode` reads, from parameters, of which the last one counts, and
    /// from variables.
    pub(super) fn new(parameters: &[TlsFile], mode: Option<&str>, variable: impl Fn(&str) -> Option<String>) -> Self {
        let mode = Mode::of(mode);
        let file = |content: Content| {
            let parameter = parameters.iter().rfind(|file| file.content == content).cloned();
            parameter.or_else(|| TlsFile::of_variable(content, &variable))
        };
        let read = Content::ALL.into_iter().filter(|content| mode.reads(*content));
        Self { files: read.filter_map(file).collect(), mode }
    }

    /// Returns whether each connection needs the files, and not only one to a server that has TLS.
    pub(super) fn are_needed(&self) -> bool {
        matches!(self.mode, Mode::Required | Mode::Verified)
    }

    /// Reads the files.
    ///
    /// # Errors
    ///
    /// If one cannot be read, or lacks what it should contain.
    pub(super) fn check(&self) -> io::Result<()> {
        self.files.iter().try_for_each(TlsFile::check)
    }
}

/// Adds plain words to an error that states in the words of webpki what is wrong with the certificate of the server.
pub(super) fn explained(error: sqlx::Error) -> sqlx::Error {
    // sqlx passes the errors of a handshake on as such.
    let sqlx::Error::Io(cause) = &error else { return error };
    let text = cause.to_string();
    let reason = if text.contains("CaUsedAsEndEntity") {
        // libpq accepts such a certificate.
        "the server's certificate is itself a CA (CA:TRUE); issue it with basicConstraints=CA:FALSE"
    } else if ["UnknownIssuer", "BadSignature"].iter().any(|name| text.contains(name)) {
        // The second one: a root has the issuer's name and another key.
        "the server's certificate is not signed by sslrootcert or a root certificate of the system"
    } else {
        return error;
    };
    io::Error::new(cause.kind(), format!("{text}: {reason}")).into()
}

#[cfg(test)]
mod tests {
    use std::{fs, io};

    use super::explained;
    use crate::{
        error::describe,
        postgres::hosts::{Environment, Hosts},
    };

    fn check(query: &str, variables: &[(&str, &str)]) -> Result<(), String> {
        let get = |name: &str| variables.iter().find(|(it, _)| *it == name).map(|(_, value)| (*value).to_owned());
        let environment = Environment { variable: &get, default_host: "localhost".to_owned() };
        let hosts = Hosts::parse(&format!("postgres://a/db?{query}"), &environment).expect("it is valid");
        hosts.tls_files.check().map_err(|error| error.to_string())
    }

    #[test]
    fn missing_files_that_a_connection_reads_are_named() {
        let missing = |name: &str| Err(format!("{name}: No such file or directory (os error 2)"));
        for (query, variables, expected) in [
            ("sslmode=verify-full&sslrootcert=/no/roots", &[][..], missing("sslrootcert /no/roots")),
            ("sslmode=require&ssl-ca=/no%2Froots+a", &[], missing("ssl-ca /no/roots a")),
            ("sslmode=verify-ca", &[("PGSSLROOTCERT", "/no/roots")], missing("PGSSLROOTCERT /no/roots")),
            ("sslrootcert=/no/roots", &[("PGSSLMODE", "verify-ca")], missing("sslrootcert /no/roots")),
            ("sslmode=require&sslcert=/no/cert&sslkey=/no/key", &[], missing("sslcert /no/cert")),
            ("sslkey=/none&sslkey=/no/key", &[("PGSSLKEY", "/no")], missing("sslkey /no/key")),
            ("sslmode=verify-ca", &[("PGSSLROOTCERT", "-----BEGIN CERTIFICATE-----")], Ok(())),
            // As in libpq, the roots have no effect.
            ("sslrootcert=/no/roots", &[], Ok(())),
            ("sslmode=disable&sslcert=/no/cert&sslkey=/no/key", &[], Ok(())),
        ] {
            assert_eq!(check(query, variables), expected, "{query} {variables:?}");
        }
    }

    #[test]
    fn files_without_a_certificate_or_a_key_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("it can be written");
        write("cert", "a comment\n-----BEGIN CERTIFICATE-----\n");
        write("key", "-----BEGIN EC PRIVATE KEY-----\n");
        write("empty", "");
        for (roots, cert, key, expected) in [
            ("cert", "cert", "key", None),
            ("empty", "cert", "key", Some(("sslrootcert", "empty", "certificate"))),
            ("key", "cert", "key", Some(("sslrootcert", "key", "certificate"))),
            ("cert", "empty", "key", Some(("sslcert", "empty", "certificate"))),
            ("cert", "cert", "cert", Some(("sslkey", "cert", "private key"))),
        ] {
            let path = |name: &str| folder.path().join(name).display().to_string();
            let (roots, cert, key) = (path(roots), path(cert), path(key));
            let query = format!("sslmode=verify-full&sslrootcert={roots}&sslcert={cert}&sslkey={key}");
            let text = |(source, name, content): (&str, &str, &str)| {
                format!("{source} {}: it contains no {content}", path(name))
            };
            assert_eq!(check(&query, &[]).err(), expected.map(text), "{query}");
        }
    }

    #[test]
    fn errors_about_the_certificate_of_the_server_have_plain_words() {
        let authority = "the server's certificate is itself a CA (CA:TRUE); issue it with basicConstraints=CA:FALSE";
        let issuer = "the server's certificate is not signed by sslrootcert or a root certificate of the system";
        // The texts of rustls.
        for (text, reason) in [
            ("invalid peer certificate: Other(OtherError(CaUsedAsEndEntity))", Some(authority)),
            ("invalid peer certificate: UnknownIssuer", Some(issuer)),
            ("invalid peer certificate: BadSignature", Some(issuer)),
            ("invalid peer certificate: Expired", None),
        ] {
            let error = explained(io::Error::new(io::ErrorKind::InvalidData, text).into());
            let expected = reason.map_or_else(|| text.to_owned(), |reason| format!("{text}: {reason}"));
            assert_eq!(describe(&error), expected);
        }
        let other = explained(sqlx::Error::Tls("UnknownIssuer".into()));
        assert!(matches!(other, sqlx::Error::Tls(_)), "{other}");
    }
}
