//! Who wrote the versions of an object, and its managed fields.

use super::page::Page;
use crate::support::{Backend, Client, Server, on_both_backends};

async fn history_names_field_managers_and_their_fields_are_shown_on_request(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let entry = |name: &str, time: &str| format!(r#"{{"manager":"{name}","operation":"Update","time":"{time}"}}"#);
    let value = |entries: &[String]| {
        let entries = entries.join(",");
        format!(r#"{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"name":"c","managedFields":[{entries}]}}}}"#)
    };
    let [edit, helm] = [entry("kubectl-edit", "2020-02-03T04:05:00Z"), entry("helm<br>", "2020-02-03T04:05:05Z")];
    let old = client.put("c", value(std::slice::from_ref(&edit))).await;
    let new = client.put("c", value(&[edit, helm])).await;
    // Longer values are read on another thread.
    client.put("c", "x".repeat(64 << 10)).await;
    let page = Page::about(server.endpoint(), &[]);
    let mut visitor = page.visitor();
    let object = visitor.open("/key?key=c").await;
    for (revision, manager) in [(old, "kubectl-edit (Update)"), (new, "&quot;helm&lt;br&gt;&quot; (Update)")] {
        let (_, entry) = object.split_once(&format!("</span> revision {revision} ")).expect("the version");
        let (entry, _) = entry.split_once("</li>").expect("its end");
        assert!(entry.contains(&format!(" by {manager}</span>")), "{revision}: {entry}");
    }
    assert_eq!(object.matches("(Update)").count(), 2, "{object}");
    for path in [
        format!("/key?key=c&revision={new}"),
        format!("/diff?key=c&from={old}&to={new}"),
        format!("/put-back?key=c&revision={new}"),
    ] {
        let hidden = visitor.open(&path).await;
        assert!(hidden.contains(">Show managed fields</a>") && !hidden.contains("operation: Update"), "{hidden}");
        let shown = visitor.open(&format!("{path}&managed-fields=show")).await;
        assert!(shown.contains(">Hide managed fields</a>") && shown.contains("operation: Update"), "{shown}");
    }
}

on_both_backends!(history_names_field_managers_and_their_fields_are_shown_on_request);
