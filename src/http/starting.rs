//! The addresses for probes while the server starts: `/livez` succeeds, because a restart would begin anew, and `/readyz` says
//! how far the start is. Later they serve the usual endpoints.

use std::sync::{Arc, OnceLock};

use axum::{
    Router,
    extract::{Request, State},
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use orlop_core::store::ReadProgress;
use tonic::service::Routes;
use tower::ServiceExt as _;

/// A server that starts.
#[derive(Clone, Default)]
pub struct Starting {
    ready: Arc<OnceLock<Router>>,
    pub progress: Arc<ReadProgress>,
}

impl Starting {
    /// Returns what to serve from the beginning on.
    pub fn routes(&self) -> Routes {
        Routes::from(Router::new().fallback(respond).with_state(self.clone()))
    }

    /// Serves these endpoints from now on.
    pub fn is_ready(&self, routes: Routes) {
        // It is called once; a second call would change nothing.
        let _ = self.ready.set(routes.into_axum_router());
    }
}

async fn respond(State(starting): State<Starting>, request: Request) -> Response {
    let path = request.uri().path();
    match starting.ready.get() {
        Some(routes) => {
            let Ok(response) = routes.clone().oneshot(request).await;
            response
        }
        None if path == "/livez" || path.starts_with("/livez/") => "ok\n".into_response(),
        None => {
            let reason = format!("the server starts: {}", starting.progress);
            let text = match path {
                "/health" => super::health::body(Some(&reason)),
                "/readyz" => format!("[-]start failed: {reason}\nreadyz check failed\n"),
                _ => format!("{reason}\n"),
            };
            (StatusCode::SERVICE_UNAVAILABLE, [super::NO_SNIFF], text).into_response()
        }
    }
}
