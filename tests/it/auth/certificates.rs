//! Users that are known by the common names of their certificates.

use std::{path::Path, process::Output};

use tokio::{process::Command, time::timeout};

use super::CHEAP;
use crate::support::{Authority, Backend, Certificate, DEADLINE, Server, etcd_tool, skip, text};

async fn output(program: &Path, arguments: &[&str]) -> Output {
    let output = Command::new(program).env("ETCDCTL_API", "3").args(arguments).kill_on_drop(true).output();
    timeout(DEADLINE, output).await.expect("the command ends").expect("the command can be started")
}

/// A client with a certificate.
struct Holder<'a> {
    endpoint: &'a str,
    root: &'a Path,
    certificate: &'a Certificate,
}

impl Holder<'_> {
    fn flags(&self) -> [&str; 6] {
        let Certificate { cert, key } = self.certificate;
        ["--cacert", text(self.root), "--cert", text(cert), "--key", text(key)]
    }

    /// Returns what etcdctl prints to both outputs.
    async fn etcdctl(&self, arguments: &[&str]) -> String {
        let program = etcd_tool("etcdctl", "ORLOP_ETCDCTL").expect("etcdctl was found before");
        let arguments = [&["--endpoints", self.endpoint], &self.flags()[..], arguments].concat();
        let Output { stdout, stderr, .. } = output(&program, &arguments).await;
        String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned()
    }

    /// Reads a key through the gateway, and returns the answer.
    async fn gateway(&self, token: Option<&str>) -> String {
        let url = format!("{}/v3/kv/range", self.endpoint);
        let header = token.map(|token| format!("Authorization: {token}"));
        let header = header.as_ref().map_or(Vec::new(), |header| vec!["-H", header.as_str()]);
        let arguments = [&["-sS", "-d", r#"{"key":"YQ=="}"#, &url], &self.flags()[..], &header].concat();
        String::from_utf8(output(Path::new("curl"), &arguments).await.stdout).expect("text")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn common_name_is_the_user_except_through_the_gateway() {
    let Some(authority) = Authority::new() else { return };
    if etcd_tool("etcdctl", "ORLOP_ETCDCTL").is_none() || std::process::Command::new("curl").arg("-V").output().is_err()
    {
        return skip("etcdctl or curl");
    }
    let own = authority.sign("server", 30);
    let root = authority.root();
    let tls =
        ["--listen-client-urls", "https://127.0.0.1:0", "--cert-file", text(&own.cert), "--key-file", text(&own.key)];
    for (requires_certificates, flags) in [
        (true, &["--trusted-ca-file", text(&root), "--client-cert-auth"][..]),
        // As in etcd, names are not users without client-cert-auth.
        (false, &["--trusted-ca-file", text(&root)]),
    ] {
        let server = Server::orlop_with(Backend::Sqlite, &[&CHEAP[..], &tls, flags].concat()).await;
        let server = server.expect("SQLite is always there");
        // The name in the certificate of the authority is root.
        let [user, stranger] = ["user", "stranger"].map(|name| authority.sign(name, 30));
        let certificates = [authority.certificate(), user, stranger];
        let [admin, user, stranger] =
            certificates.each_ref().map(|certificate| Holder { endpoint: server.endpoint(), root: &root, certificate });
        for command in [
            "user add root --no-password",
            "user grant-role root root",
            "role add r",
            "role grant-permission r readwrite a b",
            "user add user --no-password",
            "user grant-role user r",
            "user add other:password",
            "user grant-role other r",
            "auth enable",
        ] {
            let answer = admin.etcdctl(&command.split(' ').collect::<Vec<_>>()).await;
            assert!(!answer.contains("Error"), "{command}: {answer}");
        }
        let denied = "permission denied";
        let nobody = "user name is empty";
        let expected = if requires_certificates { ["OK", "OK", denied, denied, "OK"] } else { [nobody; 5] };
        for ((who, command), expected) in
            [(&user, "put a1 v"), (&admin, "put x v"), (&user, "put x v"), (&stranger, "put a v"), (&admin, "put y v")]
                .into_iter()
                .zip(expected)
        {
            let answer = who.etcdctl(&command.split(' ').collect::<Vec<_>>()).await;
            assert!(answer.contains(expected), "{requires_certificates} {command}: {answer}");
        }
        // A token is stronger than the name.
        let answer = admin.etcdctl(&["--user", "other:password", "put", "x", "v"]).await;
        assert!(answer.contains(denied), "{answer}");
        assert!(admin.gateway(None).await.contains(nobody));
        let url = format!("{}/v3/auth/authenticate", server.endpoint());
        let log_in = [&["-sS", "-d", r#"{"name":"other","password":"password"}"#, &url], &admin.flags()[..]].concat();
        let answer = output(Path::new("curl"), &log_in).await.stdout;
        let answer: serde_json::Value = serde_json::from_slice(&answer).expect("JSON");
        let token = answer["token"].as_str().expect("a token");
        for token in [token.to_owned(), format!("Bearer {token}")] {
            let answer = admin.gateway(Some(&token)).await;
            assert!(answer.contains("header") && !answer.contains("code"), "{answer}");
        }
        assert!(admin.gateway(Some("x")).await.contains("invalid auth token"));
    }
}
