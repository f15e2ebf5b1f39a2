//! What Orlop's commands say if a server refuses their certificate, or the lack of one. In TLS 1.3 the refusal arrives
//! after the client's handshake.

use tokio::process::Command;

use crate::support::{Authority, Backend, Certificate, Server, orlop_program, run_async, text};

const NEEDED: &str = "the server requires a client certificate: use --cert and --key";
const REFUSED: &str = "the server refused the client certificate; its log has the reason";

/// Runs a command against the server, with a certificate or without. Returns whether it succeeded, and its messages.
async fn ask(server: &Server, root: &str, certificate: Option<&Certificate>, arguments: &[&str]) -> (bool, String) {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let mut command = Command::new(orlop_program());
    let address = if arguments[0] == "migrate" { "--from" } else { "--endpoints" };
    command.args(arguments).args([address, server.endpoint(), "--cacert", root]).current_dir(&folder);
    if let Some(Certificate { cert, key }) = certificate {
        command.args(["--cert", text(cert), "--key", text(key)]);
    }
    let ended = run_async(command).await;
    (ended.status.success(), String::from_utf8_lossy(&ended.stderr).into_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_say_that_the_server_requires_or_refused_a_certificate() {
    let (Some(ours), Some(theirs)) = (Authority::new(), Authority::new()) else { return };
    let (own, client, foreign) = (ours.sign("server", 30), ours.sign("client", 30), theirs.sign("client", 30));
    let root = ours.root();
    let tls = ["--listen-client-urls", "https://127.0.0.1:0", "--cert-file", text(&own.cert), "--key-file"];
    let tls = [&tls[..], &[text(&own.key), "--trusted-ca-file", text(&root)]].concat();
    for version in ["TLS1.2", "TLS1.3"] {
        let flags = [&tls[..], &["--tls-min-version", version, "--tls-max-version", version]].concat();
        let server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is always there");
        for command in [
            &["status"][..],
            &["status", "--user", "a:b"],
            &["top", "--once"],
            &["history", "a"],
            &["get", "a"],
            &["diff", "a", "--from", "1"],
            &["rewind", "a", "--to", "1", "--yes"],
            &["snapshot", "save", "saved.db"],
            &["migrate", "--once", "--data-dir", "copy"],
            &["bench", "put", "--total", "1"],
        ] {
            for (certificate, want) in [(None, NEEDED), (Some(&foreign), REFUSED)] {
                let (succeeded, said) = ask(&server, text(&root), certificate, command).await;
                assert!(!succeeded && said.contains(want), "{version} {command:?}: {said}");
            }
        }
        let (succeeded, said) = ask(&server, text(&root), Some(&client), &["status"]).await;
        assert!(succeeded, "{version}: {said}");
    }
}

/// A server that the client does not trust may also ask for a certificate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_the_servers_certificate_are_not_those_of_the_clients() {
    let (Some(ours), Some(theirs)) = (Authority::new(), Authority::new()) else { return };
    let (own, root, other) = (ours.sign("server", 30), ours.root(), theirs.root());
    let flags = ["--listen-client-urls", "https://127.0.0.1:0", "--cert-file", text(&own.cert), "--key-file"];
    let flags = [&flags[..], &[text(&own.key), "--trusted-ca-file", text(&root)]].concat();
    let server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is always there");
    let (succeeded, said) = ask(&server, text(&other), None, &["status"]).await;
    assert!(!succeeded && said.contains("invalid peer certificate") && !said.contains("client certificate"), "{said}");
}
