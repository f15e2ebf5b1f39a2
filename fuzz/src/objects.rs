//! Stored values are rendered within bounds, a terminal can be trusted with the result, and masked values do not leak.

use orlop_objects::{LastManagers, Managers, Secrets, Shown, Style, diff};

/// Maximum size of a rendered value in bytes for an input of at most 1 MiB.
const TEXT_BYTES_MAX: usize = 16 << 20;

/// Input: a stored value. It is shown, and compared with the value that ends in the middle of it.
pub fn run(value: &[u8]) {
    let half = Shown::of(&value[..value.len() / 2], Secrets::Mask);
    for secrets in [Secrets::Mask, Secrets::Show] {
        let shown = Shown::of(value, secrets);
        let text = shown.text();
        assert!(text.len() <= TEXT_BYTES_MAX, "{} bytes", text.len());
        assert!(!text.contains(|c: char| c.is_control() && c != '\n' && c != '\t'), "{text:?}");
        assert!(diff(Some(&shown), Some(&shown), 3).hunks.is_empty(), "a value equals itself");
        let changed = diff(Some(&half), Some(&shown), 1);
        assert!(!changed.hunks.is_empty() || half.lines().eq(shown.lines()), "{text:?}");
        assert!(!changed.render(Style::Plain).contains('\x1b'));
    }
    let writers = LastManagers::Known(Managers::default()).advance(Managers::of(value), None);
    assert!(writers.iter().all(|writer| !writer.to_string().contains('\x1b')), "{writers:?}");
}

pub fn seeds() -> Vec<Vec<u8>> {
    let pod = b"k8s\0\n\t\n\x02v1\x12\x03Pod\x12\x12\n\x03\n\x01a\x12\x0b\x12\x05\n\x01c\x12\x00\x1a\x02No".to_vec();
    let secret = b"k8s\0\n\x0c\n\x02v1\x12\x06Secret\x12\x0d\n\x03\n\x01a\x12\x06\n\x01k\x12\x01v".to_vec();
    let texts = [
        r#"{"apiVersion":"v1","kind":"Secret","data":{"k":"dg=="},"metadata":{"annotations":{"kubectl.kubernetes.io/last-applied-configuration":"{\"kind\":\"Secret\",\"data\":{\"k\":\"dg==\"}}"}}}"#,
        r#"{"apiVersion":"v1","kind":"A","metadata":{"managedFields":[{"manager":"a","operation":"Update","time":"2026-01-01T00:00:00Z"}]}}"#,
        r#"{"a":[1,-2.5e3,null,true,{"b":"\u001b[31m"}]}"#,
        "text\nof two lines\n",
        "k8s:enc:aescbc:v1:key1:\u{1}",
    ];
    texts.iter().map(|text| text.as_bytes().to_vec()).chain([pod, secret]).collect()
}
