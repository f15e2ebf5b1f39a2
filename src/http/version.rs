//! `GET /version`.

use axum::{Json, Router, routing::get};
use serde::Serialize;

use crate::api::{CLUSTER_VERSION, ETCD_VERSION, STORAGE_VERSION};

#[derive(Serialize)]
struct Versions {
    etcdserver: &'static str,
    etcdcluster: &'static str,
    storage: &'static str,
}

pub(super) fn routes() -> Router {
    Router::new().route("/version", get(version))
}

async fn version() -> Json<Versions> {
    Json(Versions { etcdserver: ETCD_VERSION, etcdcluster: CLUSTER_VERSION, storage: STORAGE_VERSION })
}
