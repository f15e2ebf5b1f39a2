//! The choice of a server, and the options of a connection.

use std::time::Duration;

use sqlx::ConnectOptions as _;
use tokio::time::Instant;

use super::{Known, Primary, Refusal, Timeline, refusal};

#[test]
fn password_in_a_file_is_that_of_the_listed_host() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let lines = "192.0.2.1:*:*:*:ofaddress\ndb.example:*:*:*:ofname\n";
    std::fs::write(&file, lines).expect("it can be written");
    for (host, password) in [("db.example", "ofname"), ("", "ofaddress")] {
        let url = format!("postgres://{host}/db?user=u&hostaddr=192.0.2.1&passfile={}", file.path().display());
        let primary = Primary::new(&url).expect("it is valid");
        let options = primary.parse(0).and_then(|options| primary.with_password(0, options));
        let options = options.expect("the file can be read");
        assert_eq!(options.get_host(), "192.0.2.1", "{url}");
        assert_eq!(options.to_url_lossy().password(), Some(password), "{url}");
    }
}

#[test]
fn plus_in_a_parameter_is_a_plus() {
    let primary = Primary::new("postgres://a/db?user=u&password=a+b").expect("it is valid");
    let options = primary.parse(0).expect("it is valid");
    assert_eq!(options.to_url_lossy().password(), Some("a%2Bb"));
}

#[test]
fn former_primary_and_other_cluster_are_refused() {
    let older = |found, highest| Some(Refusal::Older(Timeline(found), Timeline(highest)));
    let other = |found: &str, expected: &str| Some(Refusal::OtherSystem(expected.to_owned(), found.to_owned()));
    // 0 and an empty identifier: not known, or not reported.
    for (known, server, expected) in [
        (("", 0), ("s", 3), None),
        (("s", 3), ("s", 3), None),
        (("s", 3), ("s", 4), None),
        (("s", 3), ("s", 2), older(2, 3)),
        (("s", 3), ("t", 3), other("t", "s")),
        (("s", 3), ("t", 4), other("t", "s")),
        (("s", 3), ("", 0), None),
        (("", 3), ("t", 2), older(2, 3)),
    ] {
        let system = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let found = refusal((&system(known.0), Timeline(known.1)), (&system(server.0), Timeline(server.1)));
        assert_eq!(found, expected, "{known:?} {server:?}");
    }
}

#[test]
fn refusal_names_the_remedy_after_a_restore() {
    let text = Refusal::Older(Timeline(1), Timeline(3)).to_string();
    assert!(text.contains("timeline is 1") && text.ends_with("was restored, restart this instance"), "{text}");
}

#[test]
fn refusal_is_logged_once_a_minute_while_no_server_is_accepted() {
    let (mut known, start) = (Known::default(), Instant::now());
    for (after_secs, host, text, is_due) in [
        (0, 0, "a", true),
        (59, 0, "a", false),
        (60, 0, "a", true),
        (61, 0, "b", true),
        (62, 0, "b", false),
        (62, 1, "c", true),
        (63, 0, "b", false),
        (64, 1, "c", false),
        (200, 0, "b", true),
    ] {
        let now = start + Duration::from_secs(after_secs);
        assert_eq!(known.is_refusal_due(host, text.to_owned(), now), is_due, "{text} after {after_secs} s");
    }
}
