//! TLS with certificates from openssl and independent clients: etcdctl for gRPC, curl for HTTP.

mod reloading;

use std::{
    path::Path,
    process::{Output, Stdio},
};

use tokio::{process::Command, time::timeout};

use crate::{
    start::check_refused,
    support::{
        Authority, Backend, Certificate, DEADLINE, Server, etcd_tool, eventually, free_port, http_get, orlop_program,
        skip, text,
    },
};

/// Starts a server with this certificate and with additional flags.
async fn server(certificate: &Certificate, more: &[&str]) -> Server {
    let flags = ["--listen-client-urls", "https://127.0.0.1:0", "--cert-file", text(&certificate.cert), "--key-file"];
    let flags = [&flags[..], &[text(&certificate.key)], more].concat();
    Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is always there")
}

/// The limits of an etcdctl that the server accepts.
const SERVED: [&str; 4] = ["--dial-timeout", "30s", "--command-timeout", "30s"];
/// The limits of an etcdctl that the server may refuse: it tries to connect until then.
const REFUSED: [&str; 4] = ["--dial-timeout", "2s", "--command-timeout", "3s"];

/// The certificate that a client presents and the root that it trusts.
struct Identity<'a> {
    root: &'a Path,
    certificate: Option<&'a Certificate>,
}

impl Identity<'_> {
    /// Returns an etcdctl command that uses this identity, or `None` if etcdctl is not installed.
    fn etcdctl(&self, endpoint: &str, limits: [&str; 4], arguments: &[&str]) -> Option<Command> {
        let Some(program) = etcd_tool("etcdctl", "ORLOP_ETCDCTL") else {
            skip("etcdctl");
            return None;
        };
        let mut command = Command::new(program);
        command.env("ETCDCTL_API", "3").args(["--endpoints", endpoint, "--cacert", text(self.root)]);
        command.args(limits);
        if let Some(certificate) = self.certificate {
            command.args(["--cert", text(&certificate.cert), "--key", text(&certificate.key)]);
        }
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        Some(command)
    }

    fn curl(&self, url: &str, more: &[&str]) -> Command {
        let mut command = Command::new("curl");
        command.args(["-sS", "--max-time", "30", "--cacert", text(self.root)]).args(more);
        if let Some(certificate) = self.certificate {
            command.args(["--cert", text(&certificate.cert), "--key", text(&certificate.key)]);
        }
        command.arg(url).kill_on_drop(true);
        command
    }

    /// Returns whether the server accepts etcdctl and curl with this identity; `None` if etcdctl is not installed.
    async fn is_served(&self, endpoint: &str, limits: [&str; 4]) -> Option<[bool; 2]> {
        let put = output(&mut self.etcdctl(endpoint, limits, &["put", "k", "v"])?).await;
        let version = output(&mut self.curl(&format!("{endpoint}/version"), &[])).await;
        let has_version = String::from_utf8_lossy(&version.stdout).contains("etcdserver");
        Some([put.status.success(), version.status.success() && has_version])
    }
}

async fn output(command: &mut Command) -> Output {
    let output = timeout(DEADLINE * 2, command.output()).await;
    output.expect("the command ends").expect("the command can be started")
}

fn has_curl() -> bool {
    let found = std::process::Command::new("curl").arg("--version").output().is_ok();
    if !found {
        skip("curl");
    }
    found
}

/// A session that is resumed would be that of a certificate which may have expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_with_certificates_are_verified_at_each_connection() {
    let Some(authority) = Authority::new() else { return };
    let (own, client, root) = (authority.sign("server", 30), authority.sign("client", 30), authority.root());
    let open = server(&own, &[]).await;
    let closed = server(&own, &["--trusted-ca-file", text(&root), "--client-cert-auth"]).await;
    let folder = tempfile::tempdir().expect("a folder");
    for version in ["-tls1_2", "-tls1_3"] {
        for (server, is_resumed) in [(&open, true), (&closed, false)] {
            let session = folder.path().join(format!("{version}-{is_resumed}"));
            let connect = async |more: &[&str]| {
                let address = server.endpoint().trim_start_matches("https://");
                let mut command = Command::new("openssl");
                command.args(["s_client", "-connect", address, "-ign_eof", version, "-CAfile", text(&root), "-cert"]);
                command.args([text(&client.cert), "-key", text(&client.key)]).args(more).kill_on_drop(true);
                let request = folder.path().join("request");
                std::fs::write(&request, "GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                    .expect("a file can be written");
                command.stdin(std::fs::File::open(&request).expect("a file can be read"));
                let printed = String::from_utf8_lossy(&output(&mut command).await.stdout).into_owned();
                assert!(printed.contains("etcdserver"), "{version}: {printed}");
                printed
            };
            connect(&["-sess_out", text(&session)]).await;
            // Without a ticket, openssl has no session of TLS 1.3 to store.
            let resumes = session.exists() && connect(&["-sess_in", text(&session)]).await.contains("Reused, ");
            assert_eq!(resumes, is_resumed, "{version}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_clients_with_a_trusted_certificate_are_served() {
    let (Some(ours), Some(theirs), true) = (Authority::new(), Authority::new(), has_curl()) else { return };
    let own = ours.sign("server", 30);
    let open = server(&own, &[]).await;
    let root = ours.root();
    let closed = server(&own, &["--trusted-ca-file", text(&root), "--client-cert-auth"]).await;
    let (client, expired, foreign) = (ours.sign("client", 30), ours.sign("expired", -1), theirs.sign("client", 30));
    for (what, root, certificate, served_by_open, served_by_closed) in [
        ("a client without a certificate", ours.root(), None, true, false),
        ("a client with a certificate", ours.root(), Some(&client), true, true),
        ("a client with an expired certificate", ours.root(), Some(&expired), true, false),
        ("a client with a certificate of another root", ours.root(), Some(&foreign), true, false),
        ("a client that trusts another root", theirs.root(), Some(&client), false, false),
    ] {
        let identity = Identity { root: &root, certificate };
        for (server, served) in [(&open, served_by_open), (&closed, served_by_closed)] {
            let limits = if served { SERVED } else { REFUSED };
            let Some(found) = identity.is_served(server.endpoint(), limits).await else { return };
            assert_eq!(found, [served; 2], "{what}, client certificate required: {}", std::ptr::eq(server, &closed));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_are_refused_by_revocation_and_by_name() {
    let (Some(authority), true) = (Authority::new(), has_curl()) else { return };
    let (own, good, bad) = (authority.sign("server", 30), authority.sign("good", 30), authority.sign("bad", 30));
    let root = authority.root();
    let revoked = authority.revoke(&bad);
    let der = revoked.with_extension("der");
    for (flags, good_is_served, bad_is_served) in [
        (&[][..], true, true),
        (&["--client-crl-file", text(&revoked)], true, false),
        (&["--client-crl-file", text(&der)], true, false),
        // All certificates are for 127.0.0.1 and localhost.
        (&["--client-cert-allowed-hostname", "localhost"], true, true),
        (&["--client-cert-allowed-hostname", "elsewhere.example,127.0.0.1"], true, true),
        (&["--client-cert-allowed-hostname", "elsewhere.example"], false, false),
    ] {
        let server = server(&own, &[&["--trusted-ca-file", text(&root)], flags].concat()).await;
        for (certificate, served) in [(&good, good_is_served), (&bad, bad_is_served)] {
            let identity = Identity { root: &root, certificate: Some(certificate) };
            let limits = if served { SERVED } else { REFUSED };
            let Some(found) = identity.is_served(server.endpoint(), limits).await else { return };
            assert_eq!(found, [served; 2], "{flags:?} {:?}", certificate.cert);
        }
    }
}

/// The certificates are those of authorities, and of version 1. etcd accepts them unless they are revoked or expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_that_openssl_makes_by_default_are_served_or_refused_with_a_reason() {
    let (Some(authority), true) = (Authority::new(), has_curl()) else { return };
    let (own, ca, issued) = (authority.sign("server", 30), authority.certificate(), authority.sign_authority("b", 30));
    let (expired, old) = (authority.sign_authority("expired", -1), authority.sign_version_1("old"));
    let servers = authority.sign_server_authority("servers");
    let (root, all) = (authority.root(), authority.bundle(&[&ca, &issued, &expired, &servers]));
    let list = authority.revoke(&ca);
    let revoking = ["--client-crl-file", text(&list)];
    let named = ["--client-cert-allowed-hostname", "localhost"];
    for (trusted, flags, certificate, refused) in [
        (&root, &[][..], Some(&ca), None),
        (&root, &revoking, Some(&ca), Some("Revoked")),
        (&root, &named, Some(&ca), Some("NotValidForName")),
        (&root, &[], Some(&issued), Some("the client certificate is itself a CA (CA:TRUE)")),
        (&all, &revoking, Some(&issued), None),
        (&all, &[], Some(&expired), Some("Expired")),
        (&all, &[], Some(&servers), Some("InvalidPurpose")),
        (&root, &[], old.as_ref(), Some("the client certificate is X.509 version 1")),
    ] {
        let Some(Certificate { cert, .. }) = certificate else { continue };
        let server = server(&own, &[&["--trusted-ca-file", text(trusted)], flags].concat()).await;
        let limits = if refused.is_none() { SERVED } else { REFUSED };
        let identity = Identity { root: &root, certificate };
        let Some(found) = identity.is_served(server.endpoint(), limits).await else { return };
        assert_eq!(found, [refused.is_none(); 2], "{trusted:?} {flags:?} {cert:?}");
        eventually("the reason in the log", async || {
            let log = server.log();
            if refused.is_none_or(|reason| log.contains(reason)) { Ok(()) } else { Err(log) }
        })
        .await;
    }
}

/// `orlop bench` has the TLS flags of etcdctl.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bench_command_uses_certificate_and_root() {
    let (Some(ours), Some(theirs)) = (Authority::new(), Authority::new()) else { return };
    let (own, client, root) = (ours.sign("server", 30), ours.sign("client", 30), ours.root());
    let server = server(&own, &["--trusted-ca-file", text(&root)]).await;
    let certificate = ["--cert", text(&client.cert), "--key", text(&client.key)];
    let other = theirs.root();
    for (what, flags, served) in [
        ("a certificate and the right root", [&["--cacert", text(&root)][..], &certificate].concat(), true),
        ("another root", [&["--cacert", text(&other)][..], &certificate].concat(), false),
        ("any root", [&["--insecure-skip-tls-verify"][..], &certificate].concat(), true),
        ("no certificate", vec!["--cacert", text(&root)], false),
        (
            "a login where auth is off",
            [&["--cacert", text(&root), "--user", "root:x"][..], &certificate].concat(),
            true,
        ),
    ] {
        let mut bench = Command::new(orlop_program());
        bench.args(["bench", "--endpoints", server.endpoint(), "--total", "20", "--warmup", "0s", "--json"]);
        let ended = output(bench.args(&flags).arg("put")).await;
        assert_eq!(ended.status.success(), served, "{what}: {ended:?}");
    }
}

/// The certificate that `openssl req -x509` creates by default.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_say_what_is_wrong_with_the_certificate_of_an_authority() {
    let Some(authority) = Authority::new() else { return };
    let server = server(&authority.certificate(), &[]).await;
    let mut status = Command::new(orlop_program());
    let ended =
        output(status.args(["status", "--endpoints", server.endpoint(), "--cacert", text(&authority.root())])).await;
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.contains("the server's certificate is one of a certificate authority; use a"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_name_the_scheme_and_the_authority_that_are_missing() {
    let Some(authority) = Authority::new() else { return };
    let secure = server(&authority.sign("server", 30), &[]).await;
    let plain = Server::orlop_with(Backend::Sqlite, &[]).await.expect("SQLite is always there");
    let without_tls = secure.endpoint().replace("https://", "http://");
    let with_tls = plain.endpoint().replace("http://", "https://");
    for (endpoint, named) in [
        (&*without_tls, "the server does not answer without TLS; does it use https://?"),
        (&*with_tls, "the server does not use TLS: use http://"),
        (secure.endpoint(), "UnknownIssuer; name the certificate of its authority with --cacert"),
    ] {
        for command in [&["status"][..], &["get", "a"], &["status", "--user", "a:b"], &["bench", "put", "--total", "1"]]
        {
            let mut orlop = Command::new(orlop_program());
            let ended = output(orlop.args(command).args(["--endpoints", endpoint])).await;
            let said = String::from_utf8_lossy(&ended.stderr);
            assert!(!ended.status.success() && said.contains(named), "{command:?} {endpoint}: {said}");
        }
    }
    eventually("a message about a client without TLS", async || {
        let log = secure.log();
        if log.contains("the client does not use TLS") { Ok(()) } else { Err(log) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unix_sockets_support_tls() {
    let (Some(authority), true) = (Authority::new(), has_curl()) else { return };
    let home = tempfile::tempdir().expect("a temporary directory can be made");
    let socket = home.path().join("orlop.sock");
    let url = format!("unixs://{}", text(&socket));
    let (own, root) = (authority.sign("server", 30), authority.root());
    let flags = ["--listen-client-urls", &url, "--cert-file", text(&own.cert), "--key-file", text(&own.key)];
    let server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is always there");
    assert_eq!(server.endpoint(), url);
    let identity = Identity { root: &root, certificate: None };
    let asked = output(&mut identity.curl("https://localhost/version", &["--unix-socket", text(&socket)])).await;
    assert!(String::from_utf8_lossy(&asked.stdout).contains("etcdserver"), "{asked:?}");
    let plain = output(&mut identity.curl("http://localhost/version", &["--unix-socket", text(&socket)])).await;
    assert!(!plain.status.success(), "{plain:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_listed_ciphers_are_accepted() {
    let (Some(authority), true) = (Authority::new(), has_curl()) else { return };
    let (certificate, root) = (authority.sign("server", 30), authority.root());
    let identity = Identity { root: &root, certificate: None };
    const AES_128: &str = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256";
    for (flags, served) in [
        (&[][..], [true, true, true, true]),
        (&["--cipher-suites", AES_128], [true, false, true, true]),
        (&["--cipher-suites", "TLS_AES_256_GCM_SHA384"], [false, false, false, true]),
    ] {
        let server = server(&certificate, flags).await;
        let mut found = Vec::new();
        for only in [
            ["--tls-max", "1.2", "--ciphers", "ECDHE-ECDSA-AES128-GCM-SHA256"],
            ["--tls-max", "1.2", "--ciphers", "ECDHE-ECDSA-AES256-GCM-SHA384"],
            ["--tlsv1.3", "--tls13-ciphers", "TLS_AES_128_GCM_SHA256", "-s"],
            ["--tlsv1.3", "--tls13-ciphers", "TLS_AES_256_GCM_SHA384", "-s"],
        ] {
            let asked = output(&mut identity.curl(&format!("{}/version", server.endpoint()), &only)).await;
            found.push(asked.status.success());
        }
        assert_eq!(found, served, "{flags:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn generated_certificate_survives_a_restart() {
    if !has_curl() {
        return;
    }
    let flags = ["--listen-client-urls", "https://127.0.0.1:0", "--auto-tls", "--self-signed-cert-validity", "3"];
    let mut server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is always there");
    let made = server.data_dir().join("fixtures/client/cert.pem");
    let first = std::fs::read(&made).expect("the certificate is at the same path as etcd's");
    for _ in 0..2 {
        // A client trusts the generated certificate only if it has this file.
        let trusting = Identity { root: &made, certificate: None };
        let asked = output(&mut trusting.curl(&format!("{}/version", server.endpoint()), &[])).await;
        assert!(asked.status.success(), "{asked:?}");
        server.restart().await;
    }
    assert_eq!(std::fs::read(&made).expect("the certificate exists"), first);
    let Some(other) = Authority::new() else { return };
    let root = other.root();
    let distrusting = Identity { root: &root, certificate: None };
    assert!(!output(&mut distrusting.curl(&format!("{}/version", server.endpoint()), &[])).await.status.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_are_served_on_their_own_address() {
    let (Some(authority), true) = (Authority::new(), has_curl()) else { return };
    let root = authority.root();
    let metrics = format!("http://127.0.0.1:{}", free_port());
    let flags = ["--trusted-ca-file", text(&root), "--listen-metrics-urls", &metrics];
    let _server = server(&authority.sign("server", 30), &flags).await;
    let identity = Identity { root: &root, certificate: None };
    for (path, status) in
        [("/metrics", "200"), ("/livez", "200"), ("/readyz", "200"), ("/health", "200"), ("/v3/kv/put", "404")]
    {
        let asked =
            output(&mut identity.curl(&format!("{metrics}{path}"), &["-o", "/dev/null", "-w", "%{http_code}"])).await;
        assert_eq!(
            String::from_utf8_lossy(&asked.stdout),
            status,
            "{path}: no certificate is needed, and no data is served"
        );
    }
}

/// The expiry of a renewed certificate is exported although no client connects with TLS.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificate_expiry_is_exported() {
    const DAY: f64 = 24.0 * 60.0 * 60.0;
    let Some(authority) = Authority::new() else { return };
    let metrics = format!("http://127.0.0.1:{}", free_port());
    let certificate = authority.sign("server", 30);
    let _server = server(&certificate, &["--listen-metrics-urls", &metrics]).await;
    let expiry = async || {
        let text = http_get(&metrics, "/metrics").await.body;
        let value = |line: &str| line.strip_prefix("orlop_tls_certificate_expiry_timestamp_seconds ")?.parse().ok();
        text.lines().find_map(value).unwrap_or_else(|| panic!("no expiry: {text}"))
    };
    let first: f64 = expiry().await;
    certificate.replace_by(&authority.sign("renewed", 60));
    eventually("the expiry of the renewed certificate", async || {
        let renewed = expiry().await;
        if (renewed - first - 30.0 * DAY).abs() < 600.0 { Ok(()) } else { Err(renewed - first) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_versions_follow_the_settings() {
    let (Some(authority), true) = (Authority::new(), has_curl()) else { return };
    let certificate = authority.sign("server", 30);
    let root = authority.root();
    let identity = Identity { root: &root, certificate: None };
    for (flags, served) in [
        (&[][..], [true, true]),
        (&["--tls-min-version", "TLS1.3"], [false, true]),
        (&["--tls-max-version", "TLS1.2"], [true, false]),
    ] {
        let server = server(&certificate, flags).await;
        let mut found = Vec::new();
        for only in [&["--tlsv1.2", "--tls-max", "1.2"][..], &["--tlsv1.3"]] {
            let asked = output(&mut identity.curl(&format!("{}/version", server.endpoint()), only)).await;
            found.push(asked.status.success());
        }
        assert_eq!(found, served, "TLS 1.2 and 1.3 with {flags:?}");
    }
}

#[test]
fn errors_name_unusable_files() {
    let Some(authority) = Authority::new() else { return };
    let (one, two, expired) = (authority.sign("one", 30), authority.sign("two", 30), authority.sign("expired", -1));
    let url = ["--listen-client-urls", "https://127.0.0.1:0"];
    let root = authority.root();
    let (cert, key) = (text(&one.cert), text(&one.key));
    let with_clients = ["--cert-file", cert, "--key-file", key, "--trusted-ca-file", text(&root)];
    for (flags, named) in [
        (&[][..], &["https://127.0.0.1:0", "cert-file", "key-file"][..]),
        (&["--cert-file", cert], &["cert-file requires key-file"]),
        (&["--key-file", key], &["key-file requires cert-file"]),
        (&["--cert-file", "none.pem", "--key-file", key], &["cert-file none.pem"]),
        (&["--cert-file", cert, "--key-file", "none.pem"], &["key-file none.pem"]),
        (&["--cert-file", "garbage.db", "--key-file", key], &["cert-file garbage.db", "contains no certificate"]),
        (&["--cert-file", cert, "--key-file", cert], &["key-file", "cannot read a private key"]),
        (&["--cert-file", cert, "--key-file", text(&two.key)], &["cannot be used together"]),
        (&["--cert-file", text(&expired.cert), "--key-file", text(&expired.key)], &["cert-file", "valid from"]),
        (
            &["--cert-file", cert, "--key-file", key, "--client-cert-auth"],
            &["client-cert-auth requires trusted-ca-file"],
        ),
        (
            &["--cert-file", cert, "--key-file", key, "--trusted-ca-file", key],
            &["trusted-ca-file", "contains no certificate"],
        ),
        (&["--trusted-ca-file", text(&root)], &["trusted-ca-file requires cert-file"]),
        (&["--client-crl-file", cert], &["client-crl-file requires trusted-ca-file"]),
        (&["--client-cert-allowed-hostname", "a"], &["client-cert-allowed-hostname requires trusted-ca-file"]),
        (&[&with_clients[..], &["--client-crl-file", "none.pem"]].concat(), &["client-crl-file none.pem"]),
        (&[&with_clients[..], &["--client-crl-file", cert]].concat(), &["client-crl-file", "no revocation list"]),
        (&[&with_clients[..], &["--client-cert-allowed-hostname", "a b"]].concat(), &["hostname", "a b"]),
        (&["--cipher-suites", "TLS_RSA_WITH_RC4_128_SHA"], &["TLS_RSA_WITH_RC4_128_SHA", "TLS_AES_128_GCM_SHA256"]),
        (&["--auto-tls", "--self-signed-cert-validity", "0"], &["self-signed-cert-validity", "from 1 to 100"]),
        (&["--tls-min-version", "TLS1.1"], &["TLS1.1", "TLS1.2", "TLS1.3"]),
        (&["--tls-min-version", "TLS1.3", "--tls-max-version", "TLS1.2"], &["tls-min-version", "above"]),
    ] {
        check_refused(&[&url[..], flags].concat(), &[], named);
    }
}
