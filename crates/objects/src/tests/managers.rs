//! Who wrote the versions of an object, in JSON and in protobuf.

use super::*;
use crate::{LastManagers, Managers};

/// Returns the writers of the first version of a key.
pub(super) fn writers_of_first(value: &[u8]) -> Vec<Manager> {
    LastManagers::Known(Managers::default()).advance(Managers::of(value), None)
}

/// Returns an object in JSON and in protobuf. Its managers are words: `a@5` has the time 5, `a` has none.
fn objects(managers: &str) -> [Vec<u8>; 2] {
    let (mut entries, mut metadata) = (Vec::new(), encode(&[(1, b"web")]));
    for word in managers.split_whitespace() {
        let (name, secs) = word.split_once('@').map_or((word, None), |(name, secs)| (name, secs.parse::<i64>().ok()));
        let mut entry = json!({"manager": name, "operation": "Update", "apiVersion": "v1", "fieldsV1": {"f:data": {}}});
        let mut wire = encode(&[(1, name.as_bytes()), (2, b"Update"), (3, b"v1")]);
        if let Some(secs) = secs {
            entry["time"] = format!("1970-01-01T00:00:{secs:02}Z").into();
            wire.extend(encode(&[(4, &number(1, secs))]));
        }
        entries.push(entry);
        metadata.extend(encode(&[(17, &wire)]));
    }
    let json = json!({"apiVersion": "v1", "kind": "T", "metadata": {"name": "web", "managedFields": entries}});
    [json.to_string().into_bytes(), object("v1", "T", &encode(&[(1, &metadata), (2, b"")]))]
}

fn names(writers: Vec<Manager>) -> String {
    let names: Vec<String> = writers.into_iter().map(|writer| writer.manager).collect();
    names.join(" ")
}

#[test]
fn writer_is_the_newest_manager_that_no_version_before_has() {
    // The managers of each version, and its writers.
    let table: [&[(&str, &str)]; 8] = [
        &[("kubectl@1", "kubectl"), ("kubectl@1 helm@5", "helm"), ("kubectl@9 helm@5", "kubectl")],
        // Writes in the same second.
        &[("a@1", "a"), ("a@1 b@1", "b"), ("a@1 b@1", ""), ("a@2 b@2", "a b"), ("b@2", "")],
        // A removed field changes no time.
        &[("a@1 b@2", "b"), ("a@1 b@2", ""), ("a@3 b@2", "a")],
        // The first version is written again, then the second one.
        &[("a@1", "a"), ("a@2", "a"), ("a@1", ""), ("a@2", ""), ("a@3", "a")],
        // kube-apiserver merges old entries to a new one with their time.
        &[("a@1 b@2 c@3", "c"), ("ancient-changes@2 c@3 d@4", "d")],
        // The entry of the subresource `scale` has no time.
        &[("a@1", "a"), ("a@1 scale", "scale"), ("a@1 scale", ""), ("a@2 scale", "a")],
        &[("scale", "scale"), ("scale a@1", "a")],
        &[("", ""), ("a@1", "a"), ("", ""), ("a@1", ""), ("b@2", "b")],
    ];
    for versions in table {
        for form in 0..2 {
            let mut last = LastManagers::default();
            last.begin();
            for (managers, expected) in versions {
                let writers = last.advance(Managers::of(&objects(managers)[form]), None);
                assert_eq!(names(writers), *expected, "{managers} in {versions:?}");
            }
        }
    }
}

#[test]
fn version_after_an_unknown_one_has_a_writer_if_the_times_agree() {
    for (unix_ms, expected) in
        [(None, ""), (Some(30_999), "a"), (Some(35_999), "a"), (Some(36_000), ""), (Some(24_999), ""), (Some(-1), "")]
    {
        for value in objects("a@30 b@29 c") {
            let mut last = LastManagers::Unknown;
            assert_eq!(names(last.advance(Managers::of(&value), unix_ms)), expected, "{unix_ms:?}");
            assert_eq!(names(last.advance(Managers::of(&value), unix_ms)), "", "the version is known now");
            last.begin();
            assert_eq!(names(last.advance(Managers::of(&value), unix_ms)), "", "the former versions stay known");
        }
    }
}

#[test]
fn managers_have_their_operation_and_subresource() {
    let time = number(1, 7);
    let kubelet = encode(&[(1, b"kubelet"), (2, b"Update"), (4, &time), (8, b"status")]);
    let metadata = encode(&[(17, &kubelet), (17, &encode(&[(1, b"a\x1b b"), (2, b"Apply"), (4, &time)]))]);
    let writers = writers_of_first(&object("v1", "Pod", &encode(&[(1, &metadata)])));
    let texts: Vec<String> = writers.iter().map(Manager::to_string).collect();
    assert_eq!(texts, ["kubelet (Update of status)", "\"a\\x1b b\" (Apply)"]);
    let expected = json!([
        {"manager": "kubelet", "operation": "Update", "subresource": "status"},
        {"manager": "a\u{1b} b", "operation": "Apply"},
    ]);
    assert_eq!(json!(writers), expected);
}

#[test]
fn names_that_could_be_read_as_something_else_are_in_quotes() {
    for (manager, subresource, text) in [
        ("k3s_agent@host:1/v1.2+a", "", "k3s_agent@host:1/v1.2+a (Update)"),
        ("kubectl (Update)  /registry/forged", "", "\"kubectl (Update)  /registry/forged\" (Update)"),
        ("a", "x)  /registry/forged", "a (Update of \"x)  /registry/forged\")"),
        ("a, b", "", "\"a, b\" (Update)"),
        ("\" (Update)  \\", "", "\"\\\" (Update)  \\\\\" (Update)"),
        ("ü\u{202e}", "", "\"ü\\u202e\" (Update)"),
    ] {
        let [manager, subresource] = [manager, subresource].map(str::to_owned);
        assert_eq!(Manager { manager, operation: "Update".to_owned(), subresource }.to_string(), text);
    }
}

#[test]
fn other_values_and_invalid_entries_have_no_writer() {
    let entry = r#"{"manager":"a","operation":"Update","time":"2026-11-26T14:02:00Z"}"#;
    let of = |entries: &str| format!(r#"{{"apiVersion":"v1","kind":"T","metadata":{{"managedFields":{entries}}}}}"#);
    assert_eq!(names(writers_of_first(of(&format!("[{entry}]")).as_bytes())), "a");
    let [long, metadata] = ["x".repeat(129), format!(r#"{{"managedFields":[{entry}]}}"#)];
    for value in [
        "text".to_owned(),
        "k8s:enc:aescbc:v1:key1:x".to_owned(),
        format!(r#"{{"kind":"T","metadata":{metadata}}}"#),
        format!(r#"["v1","T",{metadata}]"#),
        format!(r#"{{"apiVersion":"v1","kind":"T","spec":{metadata}}}"#),
        of(&format!("[{entry}")),
        of(entry),
        of("null"),
        of(&format!("[{entry},1]")),
        of(&format!("[{}]", entry.replace("\"a\"", "\"\""))),
        of(&format!("[{}]", entry.replace("\"a\"", "null"))),
        of(&format!("[{}]", entry.replace("\"a\"", &format!("{long:?}")))),
        of(&format!("[{}]", entry.replace("Update", "Delete"))),
    ] {
        assert_eq!(names(writers_of_first(value.as_bytes())), "", "{value}");
    }
    let mut damaged = objects("a@1")[1].clone();
    damaged.truncate(damaged.len() - 1);
    assert_eq!(names(writers_of_first(&damaged)), "");
}

#[test]
fn managers_of_recorded_objects_are_those_of_their_json() {
    let view = View { secrets: Secrets::Show, managed_fields: ManagedFields::Show };
    let mut found = 0;
    for value in &*RECORDED {
        let json = Shown::of(value, view).json;
        let entries: Vec<&Value> = json["metadata"]["managedFields"].as_array().into_iter().flatten().collect();
        // Times of the same form have the order of their texts.
        let newest = entries.iter().filter_map(|entry| entry["time"].as_str()).max();
        let text = |entry: &Value, name: &str| entry[name].as_str().unwrap_or_default().to_owned();
        let manager = |entry: &Value| Manager {
            manager: text(entry, "manager"),
            operation: text(entry, "operation"),
            subresource: text(entry, "subresource"),
        };
        let expected: Vec<Manager> =
            entries.iter().filter(|entry| entry["time"].as_str() == newest).map(|entry| manager(entry)).collect();
        assert_eq!(writers_of_first(value), expected, "{}", json["metadata"]);
        found += usize::from(!expected.is_empty());
    }
    assert!(found > 300, "{found} objects have managers");
}
