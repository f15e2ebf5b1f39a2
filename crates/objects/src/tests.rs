//! Tests of the whole crate: the recorded values of a Kubernetes control plane, masking, differences, writers, hostile bytes.

mod managers;
mod recorded;
mod secrets;

use std::{collections::BTreeSet, io::Read as _, sync::LazyLock};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use flate2::read::GzDecoder;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::{
    Form, ManagedFields, Manager, Secrets, Shown, Style, View, diff,
    envelope::MAGIC,
    lines::{TEXT_BYTES_MAX, is_hazard},
    wire::{Fields, WireValue},
};

/// The values that a Kubernetes control plane wrote to etcd. See `tests/data/README.md`.
static RECORDED: LazyLock<BTreeSet<Vec<u8>>> = LazyLock::new(|| {
    let mut text = String::new();
    let recording: &[u8] = include_bytes!("../../../tests/data/kube-trace.jsonl.gz");
    GzDecoder::new(recording).read_to_string(&mut text).expect("the recording is complete");
    let mut values = BTreeSet::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).expect("a line is JSON");
        let body = BASE64_STANDARD.decode(line["body"].as_str().unwrap_or_default()).expect("a body is base64");
        collect(&body, &mut values);
    }
    values
});

/// Collects the Kubernetes objects in an encoded request or response of etcd.
fn collect(message: &[u8], values: &mut BTreeSet<Vec<u8>>) {
    for (_, field) in Fields::of(message).flatten() {
        let WireValue::Bytes(bytes) = field else { continue };
        if bytes.starts_with(MAGIC) || bytes.starts_with(b"{\"") {
            values.insert(bytes.to_vec());
        } else if bytes.len() > 8 {
            collect(bytes, values);
        }
    }
}

fn encode(fields: &[(u32, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, bytes) in fields {
        varint(&mut out, u64::from(*number) << 3 | 2);
        varint(&mut out, bytes.len() as u64);
        out.extend_from_slice(bytes);
    }
    out
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn number(field: u32, value: i64) -> Vec<u8> {
    let mut out = Vec::new();
    varint(&mut out, u64::from(field) << 3);
    varint(&mut out, value.cast_unsigned());
    out
}

/// Returns an object in protobuf.
fn object(api_version: &str, kind: &str, raw: &[u8]) -> Vec<u8> {
    let types = encode(&[(1, api_version.as_bytes()), (2, kind.as_bytes())]);
    [MAGIC, &encode(&[(1, &types), (2, raw), (3, b""), (4, b"")])].concat()
}

#[track_caller]
fn check_text(value: &[u8], text: &str) {
    assert_eq!(Shown::of(value, Secrets::Mask).text(), text);
}

#[track_caller]
fn check_bounds(value: &[u8]) {
    for secrets in [Secrets::Mask, Secrets::Show] {
        let shown = Shown::of(value, secrets);
        let text = shown.text();
        assert!(text.len() <= TEXT_BYTES_MAX + (1 << 20), "{} bytes", text.len());
        let hazard = |c: char| is_hazard(c) && c != '\n' && c != '\t';
        assert!(!text.contains(hazard), "{text:?}");
        assert!(!shown.remarks.iter().any(|remark| remark.contains(hazard)));
        assert!(diff(Some(&shown), Some(&shown), 3).hunks.is_empty());
    }
    let writers = managers::writers_of_first(value);
    let is_hazardous = |writer: &Manager| writer.to_string().contains(|c| is_hazard(c) && c != '\t');
    assert!(writers.len() <= 16 && !writers.iter().any(is_hazardous), "{writers:?}");
}

#[track_caller]
fn check_object(api_version: &str, kind: &str, raw: &[u8], mut expected: Value) {
    let shown = Shown::of(&object(api_version, kind, raw), Secrets::Mask);
    expected["apiVersion"] = api_version.into();
    expected["kind"] = kind.into();
    assert_eq!(shown.json, expected);
    assert_eq!(shown.remarks, Vec::<String>::new());
}

#[test]
fn messages_have_the_form_of_their_json() {
    let time = encode(&[(8, &number(1, 1_709_210_096))]);
    let table: [(&str, &str, Vec<u8>, Value); 8] = [
        ("v1", "ConfigMap", encode(&[(1, &time)]), json!({"metadata": {"creationTimestamp": "2024-02-29T12:34:56Z"}})),
        (
            "coordination.k8s.io/v1",
            "Lease",
            encode(&[(2, &encode(&[(4, &[number(1, 1), number(2, 2_000)].concat())]))]),
            json!({"spec": {"renewTime": "1970-01-01T00:00:01.000002Z"}}),
        ),
        // A pointer of zero is shown, an omitempty of zero is not.
        (
            "apps/v1",
            "Deployment",
            encode(&[(2, &[number(1, 0), number(5, 0)].concat())]),
            json!({"spec": {"replicas": 0}}),
        ),
        // A field that JSON always has, negative and large numbers.
        ("scheduling.k8s.io/v1", "PriorityClass", [number(2, -5), number(3, 0)].concat(), json!({"value": -5})),
        (
            "v1",
            "ResourceQuota",
            encode(&[(2, &encode(&[(1, &encode(&[(1, b"cpu"), (2, &encode(&[(1, b"100m")]))]))]))]),
            json!({"spec": {"hard": {"cpu": "100m"}}}),
        ),
        (
            "v1",
            "Service",
            encode(&[(2, &encode(&[(1, &[number(3, 80), encode(&[(4, &number(2, 8080))])].concat())]))]),
            json!({"spec": {"ports": [{"port": 80, "targetPort": 8080}]}}),
        ),
        (
            "v1",
            "Service",
            encode(&[(2, &encode(&[(1, &encode(&[(4, &[number(1, 1), encode(&[(3, b"http")])].concat())]))]))]),
            json!({"spec": {"ports": [{"targetPort": "http"}]}}),
        ),
        (
            "apps/v1",
            "ControllerRevision",
            [encode(&[(2, &encode(&[(1, br#"{"spec":{"a":[1]}}"#)]))]), number(3, 7)].concat(),
            json!({"data": {"spec": {"a": [1]}}, "revision": 7}),
        ),
    ];
    for (api_version, kind, raw, expected) in table {
        check_object(api_version, kind, &raw, expected);
    }
}

#[test]
fn fields_have_the_names_and_places_of_their_json() {
    let parameters = encode(&[(1, b"g"), (2, b"Parameters"), (3, b"p")]);
    let device = encode(&[(1, &encode(&[(1, b"gpu"), (2, &encode(&[(1, br#"{"a":1}"#)]))]))]);
    let table: [(&str, &str, Vec<u8>, Value); 2] = [
        (
            "networking.k8s.io/v1",
            "IngressClass",
            encode(&[(2, &encode(&[(2, &parameters)]))]),
            json!({"spec": {"parameters": {"apiGroup": "g", "kind": "Parameters", "name": "p"}}}),
        ),
        (
            "resource.k8s.io/v1",
            "ResourceClaim",
            encode(&[(2, &encode(&[(1, &encode(&[(3, &encode(&[(1, b"r"), (2, &device)]))]))]))]),
            json!({"spec": {"devices": {"config": [
                {"requests": ["r"], "opaque": {"driver": "gpu", "parameters": {"a": 1}}}
            ]}}}),
        ),
    ];
    for (api_version, kind, raw, expected) in table {
        check_object(api_version, kind, &raw, expected);
    }
}

#[test]
fn empty_fields_are_omitted_where_their_json_omits_them() {
    let nested = |fields: &[u32], inner: &[u8]| {
        fields.iter().rev().fold(inner.to_vec(), |inner, field| encode(&[(*field, &inner)]))
    };
    let taint = encode(&[(1, b"k"), (2, b""), (3, b"NoSchedule")]);
    let toleration = encode(&[(1, b""), (2, b""), (3, b""), (4, b"")]);
    let table: [(&str, &str, Vec<u8>, Value); 7] = [
        ("v1", "Event", encode(&[(14, b""), (15, b"")]), json!({"reportingComponent": "", "reportingInstance": ""})),
        (
            "v1",
            "Pod",
            nested(&[3, 8, 13, 1], &[number(1, 0), number(2, 0)].concat()),
            json!({"status": {"containerStatuses": [{"user": {"linux": {"uid": 0, "gid": 0}}}]}}),
        ),
        (
            "v1",
            "Pod",
            nested(&[2, 1, 2, 26, 1, 6], &encode(&[(1, b"s"), (4, b""), (5, b""), (6, b"")])),
            json!({"spec": {"volumes": [{"projected": {"sources": [{"podCertificate": {"signerName": "s"}}]}}]}}),
        ),
        (
            "resource.k8s.io/v1",
            "ResourceSlice",
            nested(&[2, 2], &number(2, 0)),
            json!({"spec": {"pool": {"generation": 0}}}),
        ),
        (
            "resource.k8s.io/v1",
            "ResourceSlice",
            nested(&[2, 6, 8], &taint),
            json!({"spec": {"devices": [{"taints": [{"key": "k", "effect": "NoSchedule"}]}]}}),
        ),
        (
            "resource.k8s.io/v1",
            "ResourceClaim",
            nested(&[2, 1, 1, 2, 6], &toleration),
            json!({"spec": {"devices": {"requests": [{"exactly": {"tolerations": [{}]}}]}}}),
        ),
        (
            "resource.k8s.io/v1",
            "ResourceClaim",
            nested(&[3, 4, 6], &encode(&[(1, b""), (3, b"")])),
            json!({"status": {"devices": [{"networkData": {}}]}}),
        ),
    ];
    for (api_version, kind, raw, expected) in table {
        check_object(api_version, kind, &raw, expected);
    }
}

#[test]
fn schemas_of_custom_resources_have_their_json_names() {
    let items = encode(&[(1, &encode(&[(5, b"string")]))]);
    let schema = [
        encode(&[(3, b"#/a"), (5, b"object"), (24, &items)]),
        number(38, 1),
        encode(&[(29, &encode(&[(1, b"p"), (2, &encode(&[(5, b"integer")]))]))]),
        encode(&[(30, &number(1, 1))]),
    ]
    .concat();
    let version = encode(&[(1, b"v1"), (4, &encode(&[(1, &schema)]))]);
    let value =
        object("apiextensions.k8s.io/v1", "CustomResourceDefinition", &encode(&[(2, &encode(&[(7, &version)]))]));
    let shown = Shown::of(&value, Secrets::Mask);
    let schema = &shown.json["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let expected = json!({
        "$ref": "#/a", "type": "object", "items": {"type": "string"}, "properties": {"p": {"type": "integer"}},
        "additionalProperties": true, "x-kubernetes-preserve-unknown-fields": true,
    });
    assert_eq!(*schema, expected, "{:?}", shown.remarks);
}

#[test]
fn unknown_fields_are_reported_with_their_place() {
    let container = [encode(&[(1, b"a")]), number(999, 7)].concat();
    let raw = [encode(&[(2, &encode(&[(2, &container)]))]), encode(&[(77, b"x\x1b")])].concat();
    let shown = Shown::of(&object("v1", "Pod", &raw), Secrets::Mask);
    assert_eq!(
        shown.remarks,
        ["spec.containers[0]: unknown field 999: 7", "the object: unknown field 77: 78 1b (2 bytes)"]
    );
    assert!(shown.text().contains("# spec.containers[0]: unknown field 999: 7\n"));
}

#[test]
fn damage_inside_an_object_hides_only_what_is_damaged() {
    let raw = [encode(&[(1, &encode(&[(1, b"a")]))]), vec![0x12, 0x7f, 1]].concat();
    let shown = Shown::of(&object("v1", "ConfigMap", &raw), Secrets::Mask);
    assert_eq!(shown.json["metadata"]["name"], "a");
    assert_eq!(shown.remarks.len(), 1, "{:?}", shown.remarks);
}

#[test]
fn objects_of_unknown_kinds_are_shown_by_field_numbers() {
    let raw = [encode(&[(1, b"text"), (1, &[0xff]), (4, &[8, 1])]), number(3, 7)].concat();
    let shown = Shown::of(&object("example.com/v1", "Thing", &raw), Secrets::Mask);
    assert_eq!(shown.form, Form::Kubernetes { api_version: "example.com/v1".into(), kind: "Thing".into() });
    assert_eq!(shown.json["fields"], json!({"1": ["text", "/w=="], "3": 7, "4": {"1": 1}}));
    assert!(shown.remarks[0].contains("not known"));
}

#[test]
fn managed_fields_are_hidden_unless_asked_for() {
    let value = br#"{"apiVersion":"a","kind":"K","metadata":{"managedFields":[],"name":"web"}}"#;
    check_text(value, "apiVersion: a\nkind: K\nmetadata:\n  name: web\n");
    let view = View { secrets: Secrets::Mask, managed_fields: ManagedFields::Show };
    assert!(Shown::of(value, view).text().contains("  managedFields: []\n"));
}

#[test]
fn forms_are_recognised() {
    let cases: [(&[u8], Form, &str); 12] = [
        (b"", Form::Text, "\n"),
        (b"a\nb", Form::Text, "a\nb\n"),
        (b"123", Form::Text, "123\n"),
        (b"\"a\"", Form::Text, "\"a\"\n"),
        (b"a\x1b[31mb\r\x07\x7f", Form::Text, "a\\x1b[31mb\\x0d\\x07\\x7f\n"),
        ("a\u{202e}b\u{9b}".as_bytes(), Form::Text, "a\\u202eb\\x9b\n"),
        (br#"{"b":[1,{}],"a":"\u001b"}"#, Form::Json, "{\n  \"a\": \"\\u001b\",\n  \"b\": [\n    1,\n    {}\n  ]\n}\n"),
        (b"[]", Form::Json, "[]\n"),
        (b"{\"a\":", Form::Text, "{\"a\":\n"),
        (b"\x00\xffab", Form::Binary, "# 4 bytes\n00000000  00 ff 61 62                                      |..ab|\n"),
        (
            b"k8s:enc:aescbc:v1:key1:\x01\x02",
            Form::Encrypted { provider: "aescbc:v1:key1".into() },
            "# encrypted by Kubernetes: aescbc:v1:key1\n# 3 bytes\n00000000  3a 01 02                                         |:..|\n",
        ),
        (
            br#"{"apiVersion":"e.com/v1","kind":"T","n":"1","l":[{"a":1,"b":[]}]}"#,
            Form::Kubernetes { api_version: "e.com/v1".into(), kind: "T".into() },
            "apiVersion: e.com/v1\nkind: T\nl:\n- a: 1\n  b: []\n\"n\": \"1\"\n",
        ),
    ];
    for (value, form, text) in cases {
        assert_eq!(Shown::of(value, Secrets::Mask).form, form, "{}", value.escape_ascii());
        check_text(value, text);
    }
}

#[test]
fn json_that_would_read_back_as_something_else_is_shown_as_it_is() {
    for (value, form) in [
        (r#"{"id":100000000000000000001}"#, Form::Text),
        (r#"[0.1000000000000000055511151231257827]"#, Form::Text),
        (r#"{"a":1,"a":2}"#, Form::Text),
        (r#"{"a":[{"b":{},"b":{}}]}"#, Form::Text),
        (r#"{"apiVersion":"a","kind":"K","kind":"L"}"#, Form::Text),
        (r#"[18446744073709551615,-9223372036854775808,1.10,1e2,12E-3,0.0010,-0,0e5]"#, Form::Json),
        (r#"{"a":{"b":1,"a":":\\\":1e400"},"c":[{"b":1},{"b":"100000000000000000001"}]}"#, Form::Json),
    ] {
        let shown = Shown::of(value.as_bytes(), Secrets::Mask);
        assert_eq!(shown.form, form, "{value}");
        assert!(form == Form::Json || shown.text() == format!("{value}\n"), "{}", shown.text());
    }
}

#[test]
fn texts_in_yaml_are_quoted_as_needed() {
    let table = [
        ("plain", "plain"),
        ("--flag=a", "--flag=a"),
        ("10.0.0.1", "10.0.0.1"),
        ("100m", "100m"),
        ("25%", "25%"),
        ("", "\"\""),
        ("1", "\"1\""),
        ("1e3", "\"1e3\""),
        ("0x1f", "\"0x1f\""),
        ("0X1F", "\"0X1F\""),
        ("-0B1", "\"-0B1\""),
        ("0O7", "\"0O7\""),
        ("0x1f \"a\" \\n", "\"0x1f \\\"a\\\" \\\\n\""),
        ("2024-01-02: \"a\\b\"", "\"2024-01-02: \\\"a\\\\b\\\"\""),
        ("1:30", "\"1:30\""),
        ("yes", "\"yes\""),
        ("Null", "\"Null\""),
        (".inf", "\".inf\""),
        ("2024-01-02", "\"2024-01-02\""),
        ("*", "'*'"),
        ("a: b", "'a: b'"),
        ("a #b", "'a #b'"),
        ("it's: ", "'it''s: '"),
        ("- a", "'- a'"),
        ("? a", "'? a'"),
        ("?\ta", "\"?\\ta\""),
        ("---", "'---'"),
        ("a\nb", "|-\n  a\n  b"),
        ("a\n\n b\n", "|\n  a\n\n   b"),
        ("a\n\n", "|+\n  a\n"),
        (" a\nb", "\" a\\nb\""),
        ("a\tb\n\u{1b}", "\"a\\tb\\n\\x1b\""),
        ("\u{202e}", "\"\\u202e\""),
        ("\u{fffe}\u{ffff}", "\"\\ufffe\\uffff\""),
    ];
    for (text, yaml) in table {
        let value = json!({"apiVersion": "a", "kind": "K", "z": text}).to_string();
        check_text(value.as_bytes(), &format!("apiVersion: a\nkind: K\nz: {yaml}\n"));
    }
}

#[test]
fn diff_shows_changed_lines_with_context() {
    let show = |text: &str| Shown::of(text.as_bytes(), Secrets::Mask);
    let (old, new) = (show("a\nb\nc\nd\ne\nf\ng\nh"), show("a\nB\nc\nd\ne\nf\ng\nh\ni"));
    let change = diff(Some(&old), Some(&new), 1);
    assert_eq!(change.render(Style::Plain), "@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n@@ -8,1 +8,2 @@\n h\n+i\n");
    assert!(change.render(Style::Coloured).contains("\x1b[31m-b\x1b[0m\n\x1b[32m+B\x1b[0m\n"));
    assert_eq!(diff(None, Some(&show("a\nb")), 3).render(Style::Plain), "@@ -0,0 +1,2 @@\n+a\n+b\n");
    assert_eq!(diff(Some(&show("a")), None, 3).render(Style::Plain), "@@ -1,1 +0,0 @@\n-a\n");
    assert_eq!(diff(None, None, 3).render(Style::Plain), "");
    let (one, other) = (show(r#"{"a":1,"b":2}"#), show(r#"{"b":2,"a":1}"#));
    let change = diff(Some(&one), Some(&other), 3);
    assert!(change.hunks.is_empty() && change.bytes_differ);
}

#[test]
fn change_behind_the_cut_of_a_dump_is_shown() {
    let (mut old, mut new) = (vec![0; 5000], vec![0; 5000]);
    (old[4999], new[4999]) = (1, 2);
    let show = |value: &[u8]| Shown::of(value, Secrets::Mask);
    assert_eq!(
        diff(Some(&show(&old)), Some(&show(&new)), 0).render(Style::Plain),
        "@@ -258,1 +258,1 @@\n-# cut: 904 more bytes\n+# cut: 904 more bytes  # changed\n"
    );
}

#[test]
fn hostile_values_are_bounded() {
    const SIZE: usize = 3 << 20;
    let nested = |depth: usize| (0..depth).fold(Vec::new(), |inner, _| encode(&[(1, &inner)]));
    let lists = "[".repeat(SIZE / 2) + &"]".repeat(SIZE / 2);
    // Each level adds two spaces to the indentation of the elements in the innermost list.
    let indented = "[".repeat(120) + &"1,".repeat(SIZE / 2) + "1" + &"]".repeat(120);
    let schema = (0..20_000).fold(Vec::new(), |inner, _| encode(&[(25, &inner)]));
    let crd = encode(&[(2, &encode(&[(7, &encode(&[(4, &encode(&[(1, &schema)]))]))]))]);
    for value in [
        vec![0x1b; SIZE],
        vec![0xff; SIZE],
        vec![b'\n'; SIZE],
        vec![b'a'; SIZE],
        lists.into_bytes(),
        indented.into_bytes(),
        object("v1", "Pod", &nested(10_000)),
        object("example.com/v1", "Thing", &nested(10_000)),
        object("example.com/v1", "Thing", &[0x0a, 0].repeat(SIZE / 2)),
        object("v1", "Pod", &encode(&[(2, &[0x12, 0].repeat(SIZE / 2))])),
        object("v1", "Pod", &number(500, 1).repeat(SIZE / 3)),
        object("apiextensions.k8s.io/v1", "CustomResourceDefinition", &crd),
        object("v1\x1b]0;x\x07", "Pod\u{202e}", b""),
        b"k8s:enc:\x1b".to_vec(),
    ] {
        check_bounds(&value);
    }
}

/// A recorded value with some bytes changed, inserted, removed or cut.
fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let edits = proptest::collection::vec((any::<prop::sample::Index>(), 0..4u8, any::<u8>()), 1..6);
    (any::<prop::sample::Index>(), edits).prop_map(|(which, edits)| {
        let mut value = which.get(&RECORDED.iter().collect::<Vec<_>>()).to_vec();
        for (at, edit, byte) in edits {
            let at = at.index(value.len().max(1));
            match edit {
                _ if value.is_empty() => value.push(byte),
                0 => value[at] = byte,
                1 => value.insert(at, byte),
                2 => drop(value.remove(at)),
                _ => value.truncate(at.max(value.len() / 2)),
            }
        }
        value
    })
}

proptest! {
    #[test]
    fn random_bytes_are_shown_within_bounds(bytes: Vec<u8>, start in 0..4usize) {
        let lead: &[u8] = [&b""[..], MAGIC, b"k8s:enc:", b"{\"kind\":"][start];
        check_bounds(&[lead, &bytes].concat());
    }

    #[test]
    fn random_fields_of_known_kinds_are_shown_within_bounds(bytes: Vec<u8>, kind in 0..3usize) {
        let (api_version, kind) = [("v1", "Pod"), ("apps/v1", "Deployment"), ("v1", "Secret")][kind];
        check_bounds(&object(api_version, kind, &bytes));
    }

    #[test]
    fn mutated_objects_are_shown_within_bounds(value in mutated()) {
        check_bounds(&value);
    }
}
