//! Who wrote each version: the field managers of Kubernetes' objects in `orlop history`, and `--managed-fields`.

use std::time::Duration;

use orlop_core::clock;
use serde_json::{Value, json};

use super::{
    KEEP,
    commands::{at, without_times},
};
use crate::support::{Backend, Client, Server, delete, eventually, on_both_backends};

const KEY: &str = "/registry/configmaps/default/web";

/// Returns a ConfigMap with (manager, operation, time).
fn config_map(data: &str, managers: &[(&str, &str, &str)]) -> String {
    let entry = |(manager, operation, time): &(&str, &str, &str)| {
        json!({"manager": manager, "operation": operation, "apiVersion": "v1", "time": time, "fieldsType": "FieldsV1",
            "fieldsV1": {"f:data": {}}})
    };
    let entries: Vec<Value> = managers.iter().map(entry).collect();
    let metadata = json!({"name": "web", "namespace": "default", "managedFields": entries});
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"key": data}}).to_string()
}

const EDIT: (&str, &str, &str) = ("kubectl-edit", "Update", "2020-02-03T04:05:00Z");
const HELM: (&str, &str, &str) = ("helm", "Apply", "2020-02-03T04:05:05Z");

async fn history_names_the_field_managers_of_each_version(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let (first, second) = (config_map("one", &[EDIT]), config_map("two", &[EDIT, HELM]));
    client.put(KEY, &first).await;
    client.put(KEY, &second).await;
    // No manager has recorded this change, and the others write earlier versions again.
    client.put(KEY, config_map("three", &[EDIT, HELM])).await;
    client.put(KEY, &first).await;
    client.kv.delete_range(delete(KEY)).await.expect("a delete");
    client.put(KEY, &second).await;
    let (edit, helm) = ("by kubectl-edit (Update)  ", "by helm (Apply)  ");
    let expected: String = [
        ("revision 2  created", first.len(), edit),
        ("revision 3  version 2", second.len(), helm),
        ("revision 4  version 3", second.len() + 2, ""),
        ("revision 5  version 4", first.len(), ""),
        ("revision 6  deleted", 0, ""),
        ("revision 7  created", second.len(), ""),
    ]
    .map(|(version, bytes, by)| match bytes {
        0 => format!("{version}  {KEY}\n"),
        bytes => format!("{version}  {bytes} bytes  {by}{KEY}\n"),
    })
    .concat();
    for arguments in [&["history", KEY][..], &["history", KEY, "--brief"], &["history", "/registry/"]] {
        let (status, text, error) = at(&server, arguments).await;
        assert_eq!((status, &*error), (0, ""), "{arguments:?}");
        let headings: Vec<&str> = text.lines().filter(|line| line.starts_with("revision ")).collect();
        assert_eq!(without_times(&headings.join("\n")), expected, "{arguments:?}");
        assert!(!text.contains("managedFields"), "{text}");
    }
    let (_, text, _) = at(&server, &["history", KEY, "-w", "json"]).await;
    let versions: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect();
    let managers: Vec<&Value> = versions.iter().map(|version| &version["managers"]).collect();
    let [edit, helm] =
        [EDIT, HELM].map(|(manager, operation, _)| json!([{"manager": manager, "operation": operation}]));
    assert_eq!(managers, [&edit, &helm, &Value::Null, &Value::Null, &Value::Null, &Value::Null]);
    assert_eq!(versions[0]["value"]["metadata"], json!({"name": "web", "namespace": "default"}));

    // The version before is read to print what changed, and not for a line alone.
    for (flags, expected) in [(&["--limit", "5"][..], "by helm (Apply)"), (&["--limit", "5", "--brief"], "")] {
        let (_, text, _) = at(&server, &[&["history", KEY], flags].concat()).await;
        let line = text.lines().next().expect("a line");
        assert!(line.starts_with("revision 3 ") && line.contains(expected), "{flags:?}: {text}");
        assert_eq!(line.contains(" (Apply)"), !expected.is_empty(), "{flags:?}: {text}");
    }
}

/// Without the version before, the manager is the one whose time is that of the version.
async fn first_lines_name_managers_whose_time_is_that_of_the_version(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.put(KEY, config_map("one", &[EDIT])).await;
    // The time may be recorded late, and may differ by five seconds.
    let time = humantime::format_rfc3339_seconds(clock::now() + Duration::from_secs(4)).to_string();
    client.put(KEY, config_map("two", &[EDIT, ("helm", "Apply", &time)])).await;
    client.put("/registry/other", config_map("one", &[EDIT])).await;
    client.put("/registry/other", config_map("two", &[EDIT])).await;
    // Times are recorded once a second.
    let brief = ["history", "/registry/", "--brief", "--since", "3"];
    eventually("the time of the version", async || {
        let (_, text, _) = at(&server, &brief).await;
        let is_named = text.lines().next().is_some_and(|line| line.contains("  by helm (Apply)  "));
        if is_named { Ok(()) } else { Err(text) }
    })
    .await;
    let (_, text, _) = at(&server, &["history", "/registry/other", "--brief", "--since", "5"]).await;
    assert!(text.starts_with("revision 5 ") && !text.contains("kubectl-edit"), "{text}");
}

async fn managed_fields_are_shown_on_request(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.put(KEY, config_map("one", &[EDIT])).await;
    client.put(KEY, config_map("one", &[EDIT, HELM])).await;
    for arguments in [
        &["get", KEY][..],
        &["get", KEY, "-w", "json"],
        &["history", KEY],
        &["history", KEY, "-w", "json"],
        &["diff", KEY, "--from", "2"],
        &["diff", KEY, "--from", "2", "-w", "json"],
        &["rewind", KEY, "--to", "2", "--dry-run"],
        &["rewind", KEY, "--to", "2", "--dry-run", "-w", "json"],
    ] {
        let hidden = at(&server, arguments).await;
        let shown = at(&server, &[arguments, &["--managed-fields"]].concat()).await;
        assert_eq!((shown.0, &*shown.2), (hidden.0, ""), "{arguments:?}");
        let entry = if arguments.contains(&"json") { "\"time\":\"2020-02-03T04:05:05Z\"" } else { "manager: helm\n" };
        assert!(!hidden.1.contains(entry), "{arguments:?}: {}", hidden.1);
        assert!(shown.1.contains(entry), "{arguments:?}: {}", shown.1);
    }
}

on_both_backends!(
    history_names_the_field_managers_of_each_version,
    first_lines_name_managers_whose_time_is_that_of_the_version,
    managed_fields_are_shown_on_request,
);
