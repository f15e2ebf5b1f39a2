//! `GET /metrics`, in Prometheus' text format.

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse as _, Response},
    routing::any,
};
use prometheus::IntGauge;

use super::Settings;
use crate::api::{CLUSTER_VERSION, ETCD_VERSION};

const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

pub(super) fn routes(settings: &Settings) -> Router {
    let state = &settings.store.metrics().state;
    state.server_version.with_label_values(&[ETCD_VERSION]).set(1);
    // etcd's version without the patch.
    let minor = CLUSTER_VERSION.rsplit_once('.').map_or(CLUSTER_VERSION, |(minor, _)| minor);
    state.cluster_version.with_label_values(&[minor]).set(1);
    state.build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
    // The codes of Go's handler.
    for code in ["200", "500", "503"] {
        settings.store.metrics().scrapes.ended.with_label_values(&[code]);
    }
    // Any method is accepted, as in etcd.
    Router::new().route("/metrics", any(metrics)).with_state(settings.clone())
}

async fn metrics(State(Settings { store, tls, .. }): State<Settings>) -> Response {
    let metrics = store.metrics();
    let _in_flight = InFlight::new(&metrics.scrapes.in_flight);
    store.update_gauges().await;
    if let Some(tls) = tls {
        metrics.state.certificate_expiry.with_label_values::<&str>(&[]).set(tls.certificate_expiry());
    }
    let response = match metrics.text() {
        Ok(text) => ([(CONTENT_TYPE, TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("metrics: {error}\n")).into_response(),
    };
    metrics.scrapes.ended.with_label_values(&[response.status().as_str()]).inc();
    response
}

/// Counts a request until it ends, also if the client closes its connection.
struct InFlight<'a>(&'a IntGauge);

impl<'a> InFlight<'a> {
    fn new(gauge: &'a IntGauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}
