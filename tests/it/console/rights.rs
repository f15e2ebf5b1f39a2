//! Visitors without the role root, and rights that are withdrawn while a visitor looks at events.

use orlop_wire::proto::client::etcdserverpb::{
    AuthUserAddRequest, AuthUserDeleteRequest, AuthUserGrantRoleRequest, AuthUserRevokeRoleRequest,
};

use super::page::Page;
use crate::{
    auth::{CHEAP, act_as, enable, password},
    support::{Backend, Client, Server, eventually, http_get, on_both_backends},
};

/// A watch goes on after its user has lost the rights, as in etcd.
async fn events_end_if_the_user_may_no_longer_read_them(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &CHEAP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    enable(&mut client).await;
    act_as(&mut client, "root").await;
    let other = || "other".to_owned();
    let user = AuthUserAddRequest { name: other(), password: password("other"), ..Default::default() };
    client.auth.user_add(user).await.expect("a user");
    let grant = AuthUserGrantRoleRequest { user: other(), role: "role".to_owned() };
    client.auth.user_grant_role(grant).await.expect("a grant");
    let page = Page::about(server.endpoint(), &[]);
    let (mut visitors, mut streams) = (Vec::new(), Vec::new());
    for name in ["user", "other"] {
        let mut visitor = page.visitor();
        assert_eq!(visitor.log_in(name, &password(name)).await.status, 303);
        let mut events = visitor.events("a").await;
        client.put(format!("a/{name}"), b"1").await;
        events.until(&format!("/key?key=a/{name}")).await;
        visitors.push(visitor);
        streams.push(events);
    }
    let revoke = AuthUserRevokeRoleRequest { name: "user".to_owned(), role: "role".to_owned() };
    client.auth.user_revoke_role(revoke).await.expect("a role is revoked");
    client.auth.user_delete(AuthUserDeleteRequest { name: other() }).await.expect("the user is deleted");
    for events in streams {
        events.ended().await;
    }
    // The session of a user who still exists stays. A visitor with a session is sent from the form to the first page.
    for (visitor, status) in visitors.iter_mut().zip([303, 200]) {
        assert_eq!(visitor.get("/login").await.status, status);
    }
}

/// Returns the number of calls for figures that the server has refused.
async fn refused_calls(server: &Server) -> f64 {
    let page = http_get(server.endpoint(), "/metrics").await.body;
    let labels = ["grpc_server_handled_total{", "\"orlopb.Insight\"", "\"PermissionDenied\""];
    let refused = page.lines().filter(|line| labels.iter().all(|label| line.contains(label)));
    refused.map(|line| line.rsplit(' ').next().and_then(|count| count.parse::<f64>().ok()).expect("a count")).sum()
}

async fn overview_neither_counts_nor_repeats_its_refused_calls(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &CHEAP).await else { return };
    enable(&mut Client::connect(server.endpoint()).await).await;
    let page = Page::about(server.endpoint(), &[]);
    let mut visitor = page.visitor();
    assert_eq!(visitor.log_in("user", &password("user")).await.status, 303);
    assert!(visitor.open("/").await.contains("only a user with the role root may read this"));
    // Each of the four parts was requested once.
    eventually("the refused calls are counted", async || {
        let refused = refused_calls(&server).await;
        if refused == 4.0 { Ok(()) } else { Err(refused) }
    })
    .await;
    let overview = eventually("rates", async || {
        let overview = visitor.clone().open("/overview/live").await;
        if overview.contains("being measured") { Err(overview) } else { Ok(overview) }
    })
    .await;
    assert!(overview.contains(">0 failed/s<"), "{overview}");
    assert!(overview.contains("only a user with the role root may read this"), "{overview}");
    assert_eq!(refused_calls(&server).await, 4.0);
}

on_both_backends!(
    events_end_if_the_user_may_no_longer_read_them,
    overview_neither_counts_nor_repeats_its_refused_calls,
);
