//! Rights that are withdrawn while a visitor looks at events.

use orlop_wire::proto::client::etcdserverpb::{
    AuthUserAddRequest, AuthUserDeleteRequest, AuthUserGrantRoleRequest, AuthUserRevokeRoleRequest,
};

use super::page::Page;
use crate::{
    auth::{CHEAP, act_as, enable, password},
    support::{Backend, Client, Server, on_both_backends},
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

on_both_backends!(events_end_if_the_user_may_no_longer_read_them);
