//! A program that nobody here wrote, with a user of its own: Patroni elects a leader and bootstraps Postgres through the
//! JSON gateway, and may use its prefix alone.

use orlop_wire::proto::client::etcdserverpb::{AuthEnableRequest, RangeRequest};

use super::{CHEAP, DENIED, act_as, add_role, add_user, check_refused, get, grant_role, password};
use crate::support::{Backend, Client, Patroni, Scope, Server, all};

async fn patroni_uses_its_prefix_alone(backend: Backend) {
    if !Patroni::is_installed() {
        return;
    }
    let Some(server) = Server::orlop_with(backend, &CHEAP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for user in ["root", "patroni"] {
        add_user(&mut client, user).await;
    }
    grant_role(&mut client, "root", "root").await;
    add_role(&mut client, "service", "/service/", "/service0").await;
    grant_role(&mut client, "patroni", "service").await;
    client.auth.auth_enable(AuthEnableRequest {}).await.expect("Auth is enabled");

    let login = format!(", username: patroni, password: \"{}\"", password("patroni"));
    let patroni = Patroni::start(&Scope { etcd: server.endpoint(), login: &login, dcs: "" }, "one");
    patroni.wait_for("/primary").await;
    let _ = act_as(&mut client, "root").await;
    let keys = client.kv.range(RangeRequest { keys_only: true, ..all() }).await.expect("a range").into_inner().kvs;
    let keys: Vec<_> = keys.iter().map(|kv| String::from_utf8_lossy(&kv.key)).collect();
    for key in ["/service/demo/config", "/service/demo/initialize", "/service/demo/leader"] {
        assert!(keys.iter().any(|found| found == key), "{keys:?}");
    }
    let _ = act_as(&mut client, "patroni").await;
    check_refused(get(&mut client, "/other").await, DENIED, "a key outside of its prefix");
}

crate::support::on_both_backends!(patroni_uses_its_prefix_alone,);
