//! Data of Secrets is masked, in every form in which it is stored, and nothing else.

use super::*;
use crate::envelope::Envelope;

/// Returns a Secret in protobuf with one entry and a copy of itself in an annotation.
fn secret(password: &str) -> Vec<u8> {
    let copy = json!({"apiVersion": "v1", "kind": "Secret", "stringData": {"password": password}}).to_string();
    let annotation =
        encode(&[(1, b"kubectl.kubernetes.io/last-applied-configuration"), (2, format!("{copy}\n").as_bytes())]);
    let metadata = encode(&[(1, b"a"), (12, &annotation)]);
    let entry = encode(&[(1, b"password"), (2, password.as_bytes())]);
    object("v1", "Secret", &encode(&[(1, &metadata), (2, &entry), (3, b"Opaque")]))
}

const HIDDEN: &str = "hunter2-and-more";

/// Secrets without data, but with copies of Secrets in annotations.
fn copies(secret: &Value) -> [Value; 4] {
    let base64 = BASE64_STANDARD.encode(HIDDEN);
    let copy = "kubectl.kubernetes.io/last-applied-configuration";
    let other_copy = json!({"kind": "Secret", "metadata": {"annotations": {
        "kapp.k14s.io/original": secret.to_string(),
        "kapp.k14s.io/original-diff": format!("- type: test\n  path: /data\n  value:\n    password: {base64}\n"),
    }}});
    // The API server ignores the fields, and kubectl keeps them in the copy.
    let misspelled = json!({"kind": "Secret", "stringdata": {"a": HIDDEN}, "Data": [base64], "StringData": HIDDEN});
    let misspelled = json!({"kind": "Secret", "metadata": {"annotations": {copy: misspelled.to_string()}}});
    let too_deep = json!({"kind": "Secret", "metadata": {"name": "a", "data": {"a": base64}, "stringData": HIDDEN}});
    let too_deep = json!({"kind": "Secret", "metadata": {"annotations": {copy: too_deep.to_string()}}});
    let no_metadata = json!({"kind": "Secret", "metadata": [{"stringData": {"a": HIDDEN}}]});
    let no_metadata = json!({"kind": "Secret", "metadata": {"annotations": {copy: no_metadata.to_string()}}});
    [other_copy, misspelled, too_deep, no_metadata]
}

/// Secrets in all the forms in which they are stored, whole and damaged.
fn secrets() -> Vec<Vec<u8>> {
    let base64 = BASE64_STANDARD.encode(HIDDEN);
    let stored = secret(HIDDEN);
    let json = json!({"apiVersion": "v1", "kind": "Secret", "data": {"a": base64}, "stringData": {"b": HIDDEN}});
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [json]});
    let secret_list = json!({"apiVersion": "v1", "kind": "SecretList", "items": [{"data": {"a": base64}}]});
    let odd = json!({"apiVersion": "v1", "kind": "Secret", "data": [base64], "stringData": HIDDEN});
    let copy = "kubectl.kubernetes.io/last-applied-configuration";
    let odd_copy = json!({"kind": "Secret", "metadata": {"annotations": {copy: format!("data: {HIDDEN}")}}});
    let raw = Envelope::of(&stored[4..]).raw.to_vec();
    let list_in_json = format!(r#"{{"items":[{json}],"n":1,"n":2}}"#);
    let types = encode(&[(1, b"v1"), (2, b"List")]);
    let list_in_envelope = encode(&[(1, &types), (2, list_in_json.as_bytes()), (4, b"application/json")]);
    let listed = json!({"apiVersion": "v1", "kind": "List", "items": [BASE64_STANDARD.encode(&stored)]});
    // Its names are not unique, so it is shown as base64.
    let embedded = format!(r#"{{"kind":"Secret","stringData":{{"a":"{HIDDEN}"}},"n":1,"n":2}}"#);
    let revision = encode(&[(2, &encode(&[(1, embedded.as_bytes())]))]);
    let text = |value: &Value| value.to_string().into_bytes();
    let mut all = vec![
        stored.clone(),
        object("v2", "Secret", &raw),
        object("v1", "Secret", &[&raw[..], &[0xff, 1, 2]].concat()),
        object("v1", "Secret", &encode(&[(2, HIDDEN.as_bytes()), (1, HIDDEN.as_bytes()), (9, HIDDEN.as_bytes())])),
        [MAGIC, &encode(&[(2, &raw)])].concat(),
        text(&json),
        text(&list),
        text(&secret_list),
        text(&odd),
        text(&odd_copy),
        text(&listed),
        format!("\u{feff}{json}").into_bytes(),
        [text(&json), vec![0xff]].concat(),
        [MAGIC, &list_in_envelope].concat(),
        object("apps/v1", "ControllerRevision", &revision),
        embedded.into_bytes(),
        format!(r#"{{"kind":"\u0053ecret","stringData":{{"a":"{HIDDEN}"}},"n":1e-30000}}"#).into_bytes(),
    ];
    let kinds = [
        "kind: Secret",
        "kind:  Secret",
        "kind:\tSecret",
        "kind : \"Secret\"",
        "kind: 'Secret'",
        "\"kind\": \"Secret\"",
        "'kind':\n  Secret",
        "kind: &k Secret",
        "kind: !!str Secret",
        "kind: >-\n  Secret",
        "kind: \"\\x53ecret\"",
        "kind: \"Se\\x63ret\"",
        "kind: # the kind\n  Secret",
        "\"k\\x69nd\": Secret",
        "\"k\\x69nd\": \"\\x53ecret\"",
    ];
    all.extend(copies(&json).iter().map(text));
    all.extend(kinds.map(|kind| format!("apiVersion: v1\n{kind}\nstringData:\n  a: {HIDDEN}\n").into_bytes()));
    all.extend((4..stored.len()).map(|end| stored[..end].to_vec()));
    let json = text(&json);
    all.extend((json.len() - 20..json.len()).map(|end| json[..end].to_vec()));
    all
}

#[test]
fn data_of_secrets_is_masked_in_every_form() {
    let leaks = [HIDDEN.to_owned(), BASE64_STANDARD.encode(HIDDEN), crate::hex::spaced(HIDDEN.as_bytes())];
    for value in secrets() {
        let masked = Shown::of(&value, Secrets::Mask);
        let output = format!("{}{}{masked:?}", masked.text(), masked.json);
        assert!(!leaks.iter().any(|leak| output.contains(&leak[..8])), "{}\n{output}", value.escape_ascii());
    }
    for value in secrets().iter().take(10) {
        let masked = Shown::of(value, Secrets::Mask);
        assert!(masked.masked > 0, "{}", masked.text());
    }
}

#[test]
fn manifests_of_other_kinds_are_shown() {
    for kind in ["ConfigMap", "'ConfigMap'", "\"MySecret\"", "# a comment", "&k ConfigMap"] {
        let manifest = format!("apiVersion: v1\nkind: {kind}\nmetadata: {{}}\n");
        check_text(manifest.as_bytes(), &format!("{manifest}\n"));
    }
    let manifest = "apiVersion: v1\nkind: ConfigMap\ndata:\n  a: b";
    check_text(manifest.as_bytes(), &format!("{manifest}\n"));
}

#[test]
fn short_annotations_of_secrets_are_shown() {
    let annotations = json!({"kubernetes.io/service-account.name": "default", "small": "{}"});
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"annotations": annotations}}).to_string();
    let shown = Shown::of(secret.as_bytes(), Secrets::Mask);
    let shown = &shown.json["metadata"]["annotations"];
    assert_eq!(*shown, json!({"kubernetes.io/service-account.name": "default", "small": "<masked: 2 bytes>"}));
}

#[test]
fn masks_tell_the_length_and_changes() {
    let show = |password: &str, secrets| Shown::of(&secret(password), secrets);
    let (old, new) = (show("abc", Secrets::Mask), show("xyz", Secrets::Mask));
    assert_eq!(old.json["data"], json!({"password": "<masked: 3 bytes>"}));
    assert_eq!(old.masked, 2);
    let copy = r#"{"apiVersion":"v1","kind":"Secret","stringData":{"password":"<masked: 3 bytes>"}}"#;
    assert_eq!(
        old.json["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"],
        format!("{copy}\n")
    );
    assert_eq!(old.text(), new.text());
    let change = diff(Some(&old), Some(&new), 0);
    assert_eq!(change.counts(), (2, 2), "{}", change.render(Style::Plain));
    assert!(
        change
            .hunks
            .iter()
            .flat_map(|hunk| &hunk.lines)
            .all(|line| line.hidden_change == (line.change == crate::Change::Added))
    );
    assert!(diff(Some(&old), Some(&show("abc", Secrets::Mask)), 3).hunks.is_empty());
    assert_eq!(show("abc", Secrets::Show).json["data"], json!({"password": "YWJj"}));
}

#[test]
fn change_of_a_masked_value_in_a_cut_line_is_shown() {
    let show = |password: &str| {
        let copy = json!({"stringData": {"password": password}, "type": "x".repeat(300 << 10)}).to_string();
        let annotations = json!({"kubectl.kubernetes.io/last-applied-configuration": copy});
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"annotations": annotations}});
        Shown::of(secret.to_string().as_bytes(), Secrets::Mask)
    };
    let (old, new) = (show("abc"), show("xyz"));
    assert_eq!(old.text(), new.text());
    assert_eq!(diff(Some(&old), Some(&new), 0).counts(), (1, 1));
}
