//! Changed files are loaded without a restart.

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
};

use tokio::io::{AsyncBufReadExt as _, BufReader};

use super::{Identity, REFUSED, SERVED, has_curl, output, server};
use crate::support::{Authority, Certificate, eventually, text};

fn copy(from: &Path, to: &Path) {
    fs::copy(from, to).expect("a file can be copied");
}

/// Each file is noticed although the others are unchanged or, as after a failed renewal, wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_changed_file_locks_a_client_out() {
    /// The changed file, additional flags, a client that is not locked out, the change, and a warning in the log.
    type Row<'a> = (&'static str, &'a [&'a str], &'a Certificate, &'a dyn Fn(), &'static str);
    let (Some(ours), Some(theirs), true) = (Authority::new(), Authority::new(), has_curl()) else { return };
    let [own, other, bad, good] = ["server", "other", "bad", "good"].map(|name| ours.sign(name, 30));
    let good_of_theirs = theirs.sign("good", 30);
    let trust_both = || ours.bundle(&[&ours.certificate(), &theirs.certificate()]);
    let (root, trusted, list) = (ours.root(), trust_both(), ours.revoke(&other));
    let revoking = ["--client-crl-file", text(&list)];
    let table: [Row<'_>; 3] = [
        ("the revocation list", &revoking, &good, &|| drop(ours.revoke(&bad)), ""),
        // The list is that of another authority with the same name.
        ("the trusted roots", &revoking, &good_of_theirs, &|| copy(&theirs.root(), &trusted), ""),
        // Last, because the certificate stays wrong.
        (
            "the revocation list beside a wrong certificate of the server",
            &revoking,
            &good,
            &|| {
                copy(&other.cert, &own.cert);
                ours.revoke(&bad);
            },
            "cannot use the changed certificates",
        ),
    ];
    for (what, flags, good, change, warning) in table {
        trust_both();
        ours.revoke(&other);
        let server = server(&own, &[&["--trusted-ca-file", text(&trusted)], flags].concat()).await;
        let is_served = async |certificate, limits| {
            Identity { root: &root, certificate: Some(certificate) }.is_served(server.endpoint(), limits).await
        };
        for certificate in [&bad, good] {
            let Some(found) = is_served(certificate, SERVED).await else { return };
            assert_eq!(found, [true; 2], "{:?} before the change of {what}", certificate.cert);
        }
        change();
        eventually(what, async || match is_served(&bad, REFUSED).await {
            Some([false, false]) => Ok(()),
            found => Err(found),
        })
        .await;
        assert_eq!(is_served(good, SERVED).await, Some([true; 2]), "after the change of {what}");
        assert!(server.log().contains(warning), "{what}: {}", server.log_tail());
    }
}

/// The server loads a renewed certificate and a new root without a restart, and open streams continue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_reloaded_while_streams_continue() {
    let (Some(old), Some(new)) = (Authority::new(), Authority::new()) else { return };
    let certificate = old.sign("server", 30);
    let server = server(&certificate, &[]).await;
    let (old_root, new_root) = (old.root(), new.root());
    let before = Identity { root: &old_root, certificate: None };
    let after = Identity { root: &new_root, certificate: None };
    let Some(mut watch) = before.etcdctl(server.endpoint(), SERVED, &["watch", "k"]) else { return };
    let mut watch = watch.spawn().expect("etcdctl can be started");
    let mut lines = BufReader::new(watch.stdout.take().expect("stdout is piped")).lines();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let keep = Arc::clone(&seen);
    tokio::spawn(async move {
        while let Ok(Some(line)) = lines.next_line().await {
            keep.lock().expect("the lock is not poisoned").push(line);
        }
    });
    let has_seen = |value: &str| {
        let seen = seen.lock().expect("the lock is not poisoned");
        if seen.iter().any(|line| line == value) { Ok(()) } else { Err(seen.clone()) }
    };
    eventually("an event", async || {
        let put = before.etcdctl(server.endpoint(), SERVED, &["put", "k", "before"]);
        output(&mut put.expect("etcdctl is installed")).await;
        has_seen("before")
    })
    .await;

    // While the changed files are invalid, the server keeps the old certificate.
    let renewed = new.sign("server", 30);
    copy(&renewed.key, &certificate.key);
    let renewed = fs::read(&renewed.cert).expect("a file can be read");
    fs::write(&certificate.cert, vec![b'x'; renewed.len()]).expect("a file can be written");
    let put = |identity: &Identity<'_>, limits| {
        identity.etcdctl(server.endpoint(), limits, &["put", "k", "after"]).expect("etcdctl is installed")
    };
    eventually("a warning", async || {
        assert!(output(&mut put(&before, SERVED)).await.status.success(), "the previous certificate stays in use");
        let log = server.log();
        if log.contains("cannot use the changed certificates") { Ok(()) } else { Err(log) }
    })
    .await;
    // Whatever makes the files valid may change neither time nor size of them, as new rights do.
    let modified = fs::metadata(&certificate.cert).and_then(|of| of.modified()).expect("it has a time");
    fs::write(&certificate.cert, renewed).expect("a file can be written");
    let file = fs::File::options().write(true).open(&certificate.cert).expect("a file can be opened");
    file.set_modified(modified).expect("the time can be set");
    eventually("the new certificate", async || {
        let answer = output(&mut put(&after, REFUSED)).await;
        if answer.status.success() { Ok(()) } else { Err(answer) }
    })
    .await;
    eventually("the event on the stream that was open", async || has_seen("after")).await;
    let exited = watch.try_wait().expect("our child can be waited for");
    assert!(exited.is_none(), "the stream has not ended");
}
