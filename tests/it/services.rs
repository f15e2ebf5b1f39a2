//! What stands around the data: members, status, health, reflection, what is not built.

use orlop::proto::client::etcdserverpb::{
    AlarmRequest, DefragmentRequest, HashKvRequest, MemberAddRequest, MemberListRequest, PutRequest, StatusRequest,
};
use tonic::Code;

use crate::support::{Backend, Client, Server, on_both_backends};

async fn status_names_a_leader_a_version_and_sizes(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.kv.put(PutRequest { key: "k".into(), ..Default::default() }).await.expect("a put");
    let status = client.maintenance.status(StatusRequest {}).await.expect("a status").into_inner();
    let header = status.header.expect("a header");
    assert!(header.cluster_id != 0 && header.member_id != 0 && header.raft_term != 0);
    assert_eq!((status.leader, header.revision), (header.member_id, 2));
    assert!(status.version.starts_with("3.6."), "kube-apiserver decides by it: {}", status.version);
    assert!(status.db_size >= status.db_size_in_use && status.db_size_in_use > 0);
    assert!(status.raft_index > 0 && status.raft_applied_index > 0 && status.errors.is_empty());
}

async fn identity_survives_a_restart(backend: Backend) {
    let Some(mut server) = Server::orlop_with(backend, &["--name", "one"]).await else { return };
    let mut seen = Vec::new();
    for _ in 0..2 {
        let mut client = Client::connect(server.endpoint()).await;
        let list = client.cluster.member_list(MemberListRequest::default()).await.expect("a list").into_inner();
        assert_eq!(list.members[0].client_ur_ls, [server.endpoint()], "clients can dial it");
        let header = list.header.expect("a header");
        seen.push((header.cluster_id, list.members[0].id));
        server.restart().await;
    }
    assert_eq!(seen[0], seen[1]);
}

async fn what_is_not_built_says_so(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let Client { mut maintenance, mut cluster, .. } = Client::connect(server.endpoint()).await;
    let refused = [
        maintenance.defragment(DefragmentRequest {}).await.map(drop),
        maintenance.hash_kv(HashKvRequest { revision: 0 }).await.map(drop),
        maintenance.alarm(AlarmRequest { action: 1, ..Default::default() }).await.map(drop),
        cluster.member_add(MemberAddRequest::default()).await.map(drop),
    ];
    for answer in refused {
        let status = answer.expect_err("it is not built");
        assert_eq!(status.code(), Code::Unimplemented);
        assert!(status.message().ends_with("is not implemented yet"), "{status:?}");
    }
    let alarms = maintenance.alarm(AlarmRequest::default()).await.expect("the list is there").into_inner().alarms;
    assert_eq!(alarms, []);
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
    for name in ["etcdserverpb.KV", "etcdserverpb.Watch", "etcdserverpb.Lease", "grpc.health.v1.Health"] {
        assert!(names.iter().any(|listed| listed == name), "{name} is in {names:?}");
    }
}

on_both_backends!(
    status_names_a_leader_a_version_and_sizes,
    identity_survives_a_restart,
    what_is_not_built_says_so,
    health_is_serving_and_reflection_lists_the_services,
);
