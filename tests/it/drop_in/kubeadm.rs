//! The command line of etcd in a control plane.

use orlop_wire::proto::client::etcdserverpb::MemberListRequest;

use crate::support::{Backend, Client, Server};

/// The command line as kubeadm writes it into a control plane's manifest.
#[tokio::test]
async fn etcd_command_line_is_accepted() {
    let flags = [
        "--advertise-client-urls=http://10.0.0.1:2379",
        "--feature-gates=InitialCorruptCheck=true",
        "--initial-advertise-peer-urls=https://10.0.0.1:2380",
        "--initial-cluster=node=https://10.0.0.1:2380",
        "--initial-cluster-state=new",
        "--listen-metrics-urls=http://127.0.0.1:0",
        "--listen-peer-urls=https://10.0.0.1:2380",
        "--peer-cert-file=/etc/kubernetes/pki/etcd/peer.crt",
        "--peer-client-cert-auth=true",
        "--peer-key-file",
        "/etc/kubernetes/pki/etcd/peer.key",
        "--snapshot-count=10000",
        "--experimental-watch-progress-notify-interval=5s",
        "--pre-vote",
        "--raft-read-timeout=5s",
        "--enable-log-rotation=false",
        "-v2-deprecation",
        "not-yet",
        "--name=given twice",
        "-name=node",
        "--log-format=console",
    ];
    check_etcd_command_line(&flags).await;
    check_etcd_command_line(&[&["serve"][..], &flags].concat()).await;
}

async fn check_etcd_command_line(arguments: &[&str]) {
    let server = Server::orlop_with(Backend::Sqlite, arguments).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    let list = client.cluster.member_list(MemberListRequest::default()).await.expect("members answer").into_inner();
    assert_eq!((&*list.members[0].name, &*list.members[0].client_ur_ls[0]), ("node", "http://10.0.0.1:2379"));
    let log = server.log_tail();
    for ignored in [
        "feature-gates",
        "initial-cluster-state",
        "peer-client-cert-auth",
        "peer-key-file",
        "pre-vote",
        "raft-read-timeout",
        "v2-deprecation",
    ] {
        assert!(log.contains(ignored), "{ignored} is named: {log}");
    }
    let deprecated =
        "--experimental-watch-progress-notify-interval is deprecated; use --watch-progress-notify-interval";
    assert!(log.contains(deprecated) && !log.contains("metrics"), "{log}");
}
