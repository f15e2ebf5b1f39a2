//! Endpoints, TLS settings and credentials of servers, with etcdctl's flags.

use std::{fmt, path::PathBuf, str::FromStr, sync::Arc};

use http::HeaderValue;
use tokio_rustls::rustls::{
    ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _},
};

use crate::{Client, Error, mismatch::Tls};

/// The address of a server: `http://host:port`, `https://host:port`, `host:port`, `unix://path` or `unixs://path`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub address: Address,
    pub has_tls: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// Host and port.
    Tcp(String),
    Unix(PathBuf),
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        for (scheme, has_tls) in [("unix:", false), ("unixs:", true)] {
            let Some(path) = text.strip_prefix(scheme) else { continue };
            let path = path.strip_prefix("//").unwrap_or(path);
            let address = Address::Unix(path.into());
            return if path.is_empty() { Err("no path".to_owned()) } else { Ok(Self { address, has_tls }) };
        }
        let (scheme, rest) = text.split_once("://").unwrap_or(("http", text));
        let has_tls = match scheme {
            "http" => false,
            "https" => true,
            scheme => return Err(format!("unknown scheme `{scheme}`")),
        };
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        let parsed: http::uri::Authority = authority.parse().map_err(|error| format!("{error}"))?;
        match parsed.port_u16() {
            Some(_) => Ok(Self { address: Address::Tcp(authority.to_owned()), has_tls }),
            None => Err("no port".to_owned()),
        }
    }
}

impl Default for Endpoint {
    fn default() -> Self {
        Self { address: Address::Tcp("127.0.0.1:2379".to_owned()), has_tls: false }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let secure = if self.has_tls { "s" } else { "" };
        match &self.address {
            Address::Tcp(authority) => write!(f, "http{secure}://{authority}"),
            Address::Unix(path) => write!(f, "unix{secure}://{}", path.display()),
        }
    }
}

/// The flags for TLS and authentication. etcdctl has flags with the same names.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Credentials {
    /// CA certificates that the server certificates are verified with, PEM [default: those of the system]
    #[arg(long, global = true, value_name = "FILE")]
    cacert: Option<PathBuf>,

    /// Client certificate, PEM
    #[arg(long, global = true, requires = "key", value_name = "FILE")]
    cert: Option<PathBuf>,

    /// Private key of the client certificate, PEM
    #[arg(long, global = true, requires = "cert", value_name = "FILE")]
    key: Option<PathBuf>,

    /// Do not verify the server certificates
    #[arg(long, global = true)]
    insecure_skip_tls_verify: bool,

    /// User to log in as
    #[arg(long, global = true, value_name = "NAME[:PASSWORD]", env = "ETCDCTL_USER", hide_env_values = true)]
    user: Option<String>,

    /// Password of the user
    #[arg(
        long,
        global = true,
        requires = "user",
        value_name = "PASSWORD",
        env = "ETCDCTL_PASSWORD",
        hide_env_values = true
    )]
    password: Option<String>,
}

impl Credentials {
    /// Returns the name of the user, if the flags contain one.
    pub fn user(&self) -> Option<&str> {
        let user = self.user.as_deref()?;
        let name = if self.password.is_some() { None } else { user.split_once(':').map(|(name, _)| name) };
        Some(name.unwrap_or(user))
    }

    /// Returns the name and the password of the user, if the flags contain one.
    ///
    /// # Errors
    ///
    /// [`Error::Flags`] if they contain a name alone, for which etcdctl asks for the password. An empty password must be
    /// given as one: `NAME:`.
    pub fn login(&self) -> Result<Option<(String, String)>, Error> {
        let Some(user) = self.user.as_deref() else { return Ok(None) };
        match (&self.password, user.split_once(':')) {
            (Some(password), _) => Ok(Some((user.to_owned(), password.clone()))),
            (None, Some((name, password))) => Ok(Some((name.to_owned(), password.to_owned()))),
            (None, None) => Err(Error::Flags(format!(
                "no password for the user {user}: use --user NAME:PASSWORD, --password or the variable ETCDCTL_PASSWORD"
            ))),
        }
    }

    /// Returns the TLS configuration.
    ///
    /// # Errors
    ///
    /// [`Error::Flags`], which names the flag and the file.
    pub(crate) fn tls(&self) -> Result<Tls, Error> {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| Error::Flags(format!("cannot set up TLS: {error}")))?;
        let builder = if self.insecure_skip_tls_verify {
            builder.dangerous().with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate(provider)))
        } else {
            builder.with_root_certificates(self.roots()?)
        };
        let mut config = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => {
                let unusable = |reason: String| Error::Flags(format!("--cert {}: {reason}", cert.display()));
                let certificates = CertificateDer::pem_file_iter(cert).and_then(Iterator::collect);
                let certificates = certificates.map_err(|error| unusable(error.to_string()))?;
                let key = PrivateKeyDer::from_pem_file(key)
                    .map_err(|error| Error::Flags(format!("--key {}: {error}", key.display())))?;
                builder.with_client_auth_cert(certificates, key).map_err(|error| unusable(error.to_string()))?
            }
            _ => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Tls::new(config))
    }

    fn roots(&self) -> Result<RootCertStore, Error> {
        let mut roots = RootCertStore::empty();
        let Some(file) = &self.cacert else {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            return Ok(roots);
        };
        let unusable = |reason: String| Error::Flags(format!("--cacert {}: {reason}", file.display()));
        for certificate in CertificateDer::pem_file_iter(file).map_err(|error| unusable(error.to_string()))? {
            let certificate = certificate.map_err(|error| unusable(error.to_string()))?;
            roots.add(certificate).map_err(|error| unusable(error.to_string()))?;
        }
        if roots.is_empty() { Err(unusable("the file contains no certificate".to_owned())) } else { Ok(roots) }
    }
}

/// The flags of a command that addresses one server.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Server")]
pub struct ServerFlags {
    /// Endpoint of the server: http://HOST:PORT, https://HOST:PORT, unix://PATH or unixs://PATH
    #[arg(long, default_value_t, value_parser = parse_one, value_name = "URL")]
    endpoints: Endpoint,

    #[command(flatten)]
    credentials: Credentials,
}

impl ServerFlags {
    /// Connects to the server, and logs in if the flags contain a user.
    ///
    /// # Errors
    ///
    /// If a file cannot be used, a password is missing, or the server cannot be reached or refuses the user.
    pub async fn connect(&self) -> Result<Client, Error> {
        let target = Target::new(vec![self.endpoints.clone()], &self.credentials).await?;
        Client::connect(&self.endpoints, &target).await
    }

    /// Returns the same flags for another endpoint.
    ///
    /// # Errors
    ///
    /// If the text is not an endpoint.
    pub fn at(&self, endpoint: &str) -> Result<Self, Error> {
        let endpoints = parse_one(endpoint).map_err(Error::Flags)?;
        Ok(Self { endpoints, ..self.clone() })
    }

    /// Connects to the server and does not log in.
    ///
    /// # Errors
    ///
    /// If a file cannot be used or the server cannot be reached.
    pub async fn connect_without_login(&self) -> Result<Client, Error> {
        let credentials = Credentials { user: None, password: None, ..self.credentials.clone() };
        let target = Target::new(vec![self.endpoints.clone()], &credentials).await?;
        Client::connect(&self.endpoints, &target).await
    }

    /// Logs in again over the connection of a client whose token has expired. Returns a client with the new token, or
    /// `None` if the flags contain no user.
    ///
    /// # Errors
    ///
    /// If the flags contain no password, or the server refuses the user.
    pub async fn log_in_again(&self, client: &Client) -> Result<Option<Client>, Error> {
        let Some((name, password)) = self.credentials.login()? else { return Ok(None) };
        let client = client.with_token(None);
        let token = client.log_in(name, password).await?;
        Ok(Some(client.with_token(token)))
    }

    /// Returns the name of the user in the flags.
    pub fn user(&self) -> Option<String> {
        self.credentials.user().map(str::to_owned)
    }

    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoints
    }
}

/// Parses exactly one endpoint. The flag has etcdctl's name, which is a plural.
fn parse_one(text: &str) -> Result<Endpoint, String> {
    const ACCEPTED: &str = "use one of http://HOST:PORT, https://HOST:PORT, unix://PATH or unixs://PATH";
    if text.contains(',') {
        return Err(format!("only one endpoint is possible; {ACCEPTED}"));
    }
    text.parse().map_err(|error| format!("{error}; {ACCEPTED}"))
}

/// The endpoints, with everything that is needed to connect to them.
#[derive(Clone)]
pub struct Target {
    pub endpoints: Vec<Endpoint>,
    pub tls: Option<Tls>,
    /// Sent with every request.
    pub token: Option<HeaderValue>,
}

impl Target {
    /// Reads the files of the flags, and logs in if the flags contain a user.
    ///
    /// # Errors
    ///
    /// If a file cannot be used, a password is missing, or the first endpoint refuses the user.
    pub async fn new(endpoints: Vec<Endpoint>, credentials: &Credentials) -> Result<Self, Error> {
        let login = credentials.login()?;
        let needs_tls = endpoints.iter().any(|endpoint| endpoint.has_tls);
        let tls = if needs_tls { Some(credentials.tls()?) } else { None };
        let mut target = Self { endpoints, tls, token: None };
        if let (Some((name, password)), Some(endpoint)) = (login, target.endpoints.first()) {
            target.token = Client::connect(endpoint, &target).await?.log_in(name, password).await?;
        }
        Ok(target)
    }
}

/// Accepts every server certificate.
#[derive(Debug)]
struct AcceptAnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, want: Result<&str, &str>) {
        let got = text.parse::<Endpoint>().map(|endpoint| endpoint.to_string());
        assert_eq!(got.as_deref().map_err(String::as_str), want, "{text}");
    }

    #[test]
    fn endpoints_parse() {
        check("http://127.0.0.1:2379", Ok("http://127.0.0.1:2379"));
        check("http://[::1]:2379/", Ok("http://[::1]:2379"));
        check("db-1.example:80", Ok("http://db-1.example:80"));
        check("https://localhost:2379", Ok("https://localhost:2379"));
        check("unix:///run/orlop.sock", Ok("unix:///run/orlop.sock"));
        check("unixs:///run/orlop.sock", Ok("unixs:///run/orlop.sock"));
        check("unix://orlop.sock", Ok("unix://orlop.sock"));
        check("unix:orlop.sock", Ok("unix://orlop.sock"));
        check("unix://", Err("no path"));
        check("http://localhost", Err("no port"));
        check("grpc://localhost:2379", Err("unknown scheme `grpc`"));
    }

    #[test]
    fn password_is_given_in_either_flag() {
        let credentials = |user: Option<&str>, password: Option<&str>| Credentials {
            user: user.map(str::to_owned),
            password: password.map(str::to_owned),
            ..Credentials::default()
        };
        for (given, user, want) in [
            (credentials(None, None), None, None),
            (credentials(Some("root:a:b"), None), Some("root"), Some(("root", "a:b"))),
            (credentials(Some("root:"), None), Some("root"), Some(("root", ""))),
            (credentials(Some("root"), Some("secret")), Some("root"), Some(("root", "secret"))),
            (credentials(Some("a:b"), Some("secret")), Some("a:b"), Some(("a:b", "secret"))),
        ] {
            let login = given.login().expect("there is a password");
            assert_eq!(login, want.map(|(name, password)| (name.to_owned(), password.to_owned())));
            assert_eq!(given.user(), user);
        }
        let alone = credentials(Some("root"), None);
        assert_eq!(alone.user(), Some("root"));
        let error = alone.login().expect_err("there is no password").to_string();
        assert!(error.starts_with("no password for the user root: use --user NAME:PASSWORD"), "{error}");
    }
}
