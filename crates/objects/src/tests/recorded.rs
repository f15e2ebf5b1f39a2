//! Every value that a control plane wrote is decoded wholly.

use super::*;

const WHOLE: View = View { secrets: Secrets::Show, managed_fields: ManagedFields::Show };

#[test]
fn every_recorded_value_renders_without_remarks() {
    let mut kinds = BTreeSet::new();
    for value in &*RECORDED {
        let shown = Shown::of(value, WHOLE);
        assert_eq!(shown.remarks, Vec::<String>::new(), "{}", shown.text());
        let Form::Kubernetes { kind, .. } = shown.form else { panic!("{:?}", shown.form) };
        kinds.insert(kind);
    }
    assert!(RECORDED.len() > 500 && kinds.len() > 20, "{} values of {kinds:?}", RECORDED.len());
}

/// `managedFields` names fields as JSON does, so each name that it contains is one of the rendered object, unless
/// the field was empty from the start or emptied by another manager.
#[test]
fn fields_have_the_names_that_managed_fields_use() {
    let (mut found, mut missing) = (BTreeSet::new(), BTreeSet::new());
    for value in &*RECORDED {
        let json = Shown::of(value, WHOLE).json;
        for manager in json["metadata"]["managedFields"].as_array().into_iter().flatten() {
            compare(&manager["fieldsV1"], &json, &mut found, &mut missing);
        }
    }
    // Absent in one object and present in another: the name is right.
    let wrong: Vec<_> = missing.difference(&found).collect();
    assert!(wrong.iter().all(|name| EMPTY.contains(&name.as_str())), "{wrong:?}");
    assert!(found.len() > 140, "{} names", found.len());
}

fn compare(fields: &Value, node: &Value, found: &mut BTreeSet<String>, missing: &mut BTreeSet<String>) {
    for (path, inner) in fields.as_object().into_iter().flatten() {
        let child = if let Some(name) = path.strip_prefix("f:") {
            let child = node.get(name);
            if child.is_some() {
                found.insert(name.to_owned())
            } else {
                missing.insert(name.to_owned())
            };
            child
        } else if let Some(key) = path.strip_prefix("k:") {
            let key: Value = serde_json::from_str(key).expect("a key is JSON");
            let key = key.as_object().expect("a key is an object");
            let matches = |item: &&Value| key.iter().all(|(name, value)| item.get(name) == Some(value));
            node.as_array().and_then(|items| items.iter().find(matches))
        } else {
            None
        };
        if let Some(child) = child {
            compare(inner, child, found, missing);
        }
    }
}

/// Names that occur only with empty values, or in another version of the kind: events are stored as `v1`.
const EMPTY: [&str; 4] = ["lastProbeTime", "note", "regarding", "reportingController"];

#[test]
fn deployment_renders_as_kubectl_shows_it() {
    let find = |value: &&Vec<u8>| {
        let json = Shown::of(value, Secrets::Mask).json;
        json["kind"] == "Deployment" && json["status"]["replicas"].is_number()
    };
    let shown = Shown::of(RECORDED.iter().find(find).expect("a Deployment was recorded"), Secrets::Mask);
    let text = shown.text();
    for part in [
        "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n",
        "  creationTimestamp: \"20",
        "    rollingUpdate:\n      maxSurge: 25%\n      maxUnavailable: 25%\n    type: RollingUpdate\n",
        "      containers:\n      - image: ",
        "        resources: {}\n",
        "      terminationGracePeriodSeconds: ",
    ] {
        assert!(text.contains(part), "{part}\nin\n{text}");
    }
}
