//! Requests outside the key space: members, status, health, reflection, and unimplemented calls.

use orlop_wire::proto::client::etcdserverpb::{
    AuthDisableRequest, AuthEnableRequest, AuthRoleDeleteRequest, AuthRoleGetRequest, AuthRoleListRequest,
    AuthStatusRequest, AuthUserDeleteRequest, AuthUserGetRequest, AuthUserGrantRoleRequest, AuthUserListRequest,
    AuthenticateRequest, DowngradeRequest, MemberAddRequest, MemberListRequest, MemberPromoteRequest,
    MemberRemoveRequest, MemberUpdateRequest, MoveLeaderRequest, StatusRequest, auth_client::AuthClient,
    downgrade_request::DowngradeAction,
};
use tokio::time::timeout;
use tonic::{Code, transport::Channel};

use crate::support::{Backend, Client, DEADLINE, Server, on_both_backends};

async fn status_names_a_leader_a_version_and_sizes(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.put("k", "").await;
    let status = client.maintenance.status(StatusRequest {}).await.expect("a status").into_inner();
    let header = status.header.expect("a header");
    assert!(header.cluster_id != 0 && header.member_id != 0 && header.raft_term != 0);
    assert_eq!((status.leader, header.revision), (header.member_id, 2));
    assert!(status.version.starts_with("3.6."), "kube-apiserver relies on this version: {}", status.version);
    assert!(status.db_size >= status.db_size_in_use && status.db_size_in_use > 0);
    assert!(status.raft_index > 0 && status.raft_applied_index > 0 && status.errors.is_empty());
}

async fn identity_survives_a_restart(backend: Backend) {
    let Some(mut server) = Server::orlop_with(backend, &["--name", "one"]).await else { return };
    let mut seen = Vec::new();
    for _ in 0..2 {
        let mut client = Client::connect(server.endpoint()).await;
        let list = client.cluster.member_list(MemberListRequest::default()).await.expect("a list").into_inner();
        assert_eq!(list.members[0].client_ur_ls, [server.endpoint()], "clients can connect to this URL");
        assert_eq!(list.members[0].peer_ur_ls, [server.endpoint()], "clients index these URLs too");
        let header = list.header.expect("a header");
        seen.push((header.cluster_id, list.members[0].id));
        server.restart().await;
    }
    assert_eq!(seen[0], seen[1]);
}

async fn auth(server: &Server) -> AuthClient<Channel> {
    AuthClient::connect(server.endpoint().to_owned()).await.expect("a ready server accepts connections")
}

/// A client with a name and a password continues without them if the server reports that authentication is off.
async fn auth_responds_as_if_never_enabled(backend: Backend) {
    let Some(server) = Server::under_test(backend).await else { return };
    let mut auth = auth(&server).await;
    let status = auth.auth_status(AuthStatusRequest {}).await.expect("a status").into_inner();
    assert_eq!((status.enabled, status.auth_revision), (false, 1));
    assert_eq!(status.header.expect("a header").revision, 1);
    auth.auth_disable(AuthDisableRequest {}).await.expect("authentication is off");
    assert!(auth.user_list(AuthUserListRequest {}).await.expect("a list").into_inner().users.is_empty());
    assert!(auth.role_list(AuthRoleListRequest {}).await.expect("a list").into_inner().roles.is_empty());
    let (name, role) = ("u".to_owned(), "r".to_owned());
    let login = AuthenticateRequest { name: name.clone(), password: "p".to_owned() };
    let grant = AuthUserGrantRoleRequest { user: name.clone(), role: role.clone() };
    let rows = [
        (auth.authenticate(login).await.map(drop), "authentication is not enabled"),
        (auth.auth_enable(AuthEnableRequest {}).await.map(drop), "root user does not exist"),
        (auth.user_get(AuthUserGetRequest { name: name.clone() }).await.map(drop), "user name not found"),
        (auth.user_delete(AuthUserDeleteRequest { name }).await.map(drop), "user name not found"),
        (auth.user_grant_role(grant).await.map(drop), "user name not found"),
        (auth.role_get(AuthRoleGetRequest { role: role.clone() }).await.map(drop), "role name not found"),
        (auth.role_delete(AuthRoleDeleteRequest { role }).await.map(drop), "role name not found"),
    ];
    for (answer, text) in rows {
        let status = answer.expect_err(text);
        assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, &*format!("etcdserver: {text}")));
    }
}

/// Instances join when they start, leave when they stop, and all accept writes. So requests to change the membership or
/// the leader are checked as in etcd, but have no effect.
async fn raft_requests_are_answered_without_raft(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let Client { mut maintenance, mut cluster, .. } = Client::connect(server.endpoint()).await;
    let status = maintenance.status(StatusRequest {}).await.expect("a status").into_inner();
    let own = status.leader;
    let urls = || vec!["http://127.0.0.1:2380".to_owned()];
    let check = |what: &str, answer: Result<(), tonic::Status>, code: Code, text: &str| {
        let status = answer.expect_err(what);
        assert_eq!((status.code(), status.message()), (code, text), "{what}");
    };
    let bad_urls = "etcdserver: given member URLs are invalid";
    let add = |peer_ur_ls| MemberAddRequest { peer_ur_ls, ..Default::default() };
    check("add no URL", cluster.member_add(add(Vec::new())).await.map(drop), Code::InvalidArgument, bad_urls);
    check("a bad URL", cluster.member_add(add(vec!["x".to_owned()])).await.map(drop), Code::InvalidArgument, bad_urls);
    let no_adding = "orlop: a member joins when it is started on the same database";
    check("add a valid URL", cluster.member_add(add(urls())).await.map(drop), Code::Unimplemented, no_adding);
    let unknown = "etcdserver: member not found";
    let remove = |id| MemberRemoveRequest { id };
    check("remove an unknown member", cluster.member_remove(remove(1)).await.map(drop), Code::NotFound, unknown);
    let too_few = "etcdserver: re-configuration failed due to not enough started members";
    check("remove itself", cluster.member_remove(remove(own)).await.map(drop), Code::FailedPrecondition, too_few);
    let promote = |id| MemberPromoteRequest { id };
    check("promote an unknown member", cluster.member_promote(promote(1)).await.map(drop), Code::NotFound, unknown);
    let no_learner = "etcdserver: can only promote a learner member";
    check("promote itself", cluster.member_promote(promote(own)).await.map(drop), Code::FailedPrecondition, no_learner);
    let update = |id, peer_ur_ls| MemberUpdateRequest { id, peer_ur_ls };
    check("update unknown member", cluster.member_update(update(1, urls())).await.map(drop), Code::NotFound, unknown);
    let no_peers = "orlop: the URLs of a member are those of its advertise-client-urls";
    check("update itself", cluster.member_update(update(own, urls())).await.map(drop), Code::Unimplemented, no_peers);

    let move_to = |target_id| MoveLeaderRequest { target_id };
    let bad_target = "etcdserver: bad leader transferee";
    check("move to unknown", maintenance.move_leader(move_to(1)).await.map(drop), Code::FailedPrecondition, bad_target);
    let moved = maintenance.move_leader(move_to(own)).await.expect("this member is the leader").into_inner();
    assert_eq!(moved.header, None);
    let downgrade = |action: DowngradeAction, version: &str| DowngradeRequest {
        action: action.into(),
        version: version.to_owned(),
    };
    for (version, text) in [
        ("x", "etcdserver: wrong downgrade target version format"),
        ("3.6.0", "etcdserver: invalid downgrade target version"),
        ("3.4.0", "etcdserver: invalid downgrade target version"),
    ] {
        let answer = maintenance.downgrade(downgrade(DowngradeAction::Validate, version)).await.map(drop);
        check(version, answer, Code::InvalidArgument, text);
    }
    maintenance.downgrade(downgrade(DowngradeAction::Validate, "3.5.0")).await.expect("a valid target version");
    let no_job = "etcdserver: no inflight downgrade job";
    let cancel = maintenance.downgrade(downgrade(DowngradeAction::Cancel, "")).await.map(drop);
    check("cancel a downgrade", cancel, Code::FailedPrecondition, no_job);
}

async fn health_is_serving_and_reflection_lists_the_services(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let channel = tonic::transport::Endpoint::from_shared(server.endpoint().to_owned()).expect("a URL").connect().await;
    let channel = channel.expect("a ready server accepts connections");
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel.clone());
    let answer =
        health.check(tonic_health::pb::HealthCheckRequest::default()).await.expect("health answers").into_inner();
    assert_eq!(answer.status(), tonic_health::pb::health_check_response::ServingStatus::Serving);

    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let request = ServerReflectionRequest {
        message_request: Some(MessageRequest::ListServices(String::new())),
        ..Default::default()
    };
    let mut answers = ServerReflectionClient::new(channel)
        .server_reflection_info(tokio_stream::iter([request]))
        .await
        .expect("reflection answers")
        .into_inner();
    let answer = answers.message().await.expect("an answer").expect("an answer").message_response;
    let Some(MessageResponse::ListServicesResponse(list)) = answer else { panic!("{answer:?}") };
    let names: Vec<String> = list.service.into_iter().map(|service| service.name).collect();
    for name in
        ["etcdserverpb.KV", "etcdserverpb.Watch", "etcdserverpb.Lease", "orlopb.Insight", "grpc.health.v1.Health"]
    {
        assert!(names.iter().any(|listed| listed == name), "{name} is in {names:?}");
    }
}

async fn health_streams_end_when_the_server_stops(backend: Backend) {
    use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

    let Some(mut server) = Server::orlop(backend).await else { return };
    let channel = tonic::transport::Endpoint::from_shared(server.endpoint().to_owned()).expect("a URL").connect().await;
    let mut health = HealthClient::new(channel.expect("a ready server accepts connections"));
    let mut states = health.watch(HealthCheckRequest::default()).await.expect("a stream").into_inner();
    let first = states.message().await.expect("a state").expect("a state");
    assert_eq!(first.status(), ServingStatus::Serving);
    let rest = async {
        let last = states.message().await.expect("a state").expect("a state");
        assert_eq!(last.status(), ServingStatus::NotServing);
        assert_eq!(states.message().await.expect("the stream ends in order"), None);
    };
    tokio::join!(server.terminate(), rest);
}

/// As in etcd. A limit of 0 would let every call wait.
async fn zero_concurrent_streams_mean_no_limit(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &["--max-concurrent-streams", "0"]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    timeout(DEADLINE, client.put("k", "")).await.expect("the call does not hang");
}

on_both_backends!(
    status_names_a_leader_a_version_and_sizes,
    identity_survives_a_restart,
    auth_responds_as_if_never_enabled,
    raft_requests_are_answered_without_raft,
    health_is_serving_and_reflection_lists_the_services,
    health_streams_end_when_the_server_stops,
    zero_concurrent_streams_mean_no_limit,
);
