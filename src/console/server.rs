//! The state of the page, and its routes.

use std::{path::Path, sync::Arc};

use axum::{
    Router,
    http::header,
    middleware::from_fn_with_state,
    response::IntoResponse,
    routing::{get, post},
};
use tokio::sync::{Semaphore, watch};

use super::{
    backend::{Backend, Place},
    events,
    guard::{Hosts, guard},
    limits::{Forms, LargePages, LogIns, Renderer},
    pages,
    password::PasswordFile,
    session::Sessions,
};
use crate::config::{HostName, ListenUrl};

const SCRIPT: &str = include_str!("assets/script.js");
const ICON: &str = include_str!("assets/icon.svg");

/// Maximum number of open event streams.
const STREAMS_MAX: usize = 32;

/// The state of the page. Cloned for every request.
#[derive(Clone)]
pub(super) struct Console(Arc<State>);

pub(super) struct State {
    pub backend: Backend,
    pub sessions: Sessions,
    /// The password of the page, if it has one.
    pub password: Option<PasswordFile>,
    /// Permits for event streams.
    pub streams: Arc<Semaphore>,
    pub forms: Forms,
    pub log_ins: LogIns,
    pub renderer: Renderer,
    pub large_pages: LargePages,
    /// True once the process stops.
    pub stopping: watch::Receiver<bool>,
    hosts: Arc<Hosts>,
}

impl std::ops::Deref for Console {
    type Target = State;

    fn deref(&self) -> &State {
        &self.0
    }
}

impl Console {
    /// Returns the state for the address `listen`, which must be the bound one, with its port. An empty `password_file`
    /// stands for none.
    ///
    /// # Errors
    ///
    /// If there are no random numbers, or the file cannot be used.
    pub(super) fn new(
        place: Place,
        listen: &ListenUrl,
        allowed_hosts: &[HostName],
        password_file: &Path,
        stopping: watch::Receiver<bool>,
    ) -> Result<Self, String> {
        let port = match listen {
            ListenUrl::Tcp(address, _) => address.rsplit_once(':').map_or("", |(_, port)| port),
            ListenUrl::Unix(..) => "unix",
        };
        let sessions = Sessions::new(listen.scheme(), port).map_err(|_| "there are no random numbers".to_owned())?;
        Ok(Self(Arc::new(State {
            backend: Backend::new(place),
            sessions,
            password: PasswordFile::open(password_file)?,
            streams: Arc::new(Semaphore::new(STREAMS_MAX)),
            forms: Forms::default(),
            log_ins: LogIns::default(),
            renderer: Renderer::default(),
            large_pages: LargePages::default(),
            stopping,
            hosts: Arc::new(Hosts::new(listen, allowed_hosts)),
        })))
    }
}

/// Returns the routes of the page.
pub(super) fn routes(console: Console) -> Router {
    let hosts = Arc::clone(&console.hosts);
    Router::new()
        .route("/", get(pages::overview::page))
        .route("/overview/live", get(pages::overview::live))
        .route("/sizes", get(pages::sizes::page))
        .route("/sizes/live", get(pages::sizes::live))
        .route("/keys", get(pages::keys::page))
        .route("/deleted", get(pages::deleted::page))
        .route("/key", get(pages::object::page))
        .route("/diff", get(pages::diff::page))
        .route("/put-back", get(pages::put_back::page).post(pages::put_back::write))
        .route("/events", get(pages::events::page))
        .route("/events/stream", get(events::stream))
        .route("/login", get(pages::login::page).post(pages::login::log_in))
        .route("/logout", post(pages::login::log_out))
        .route("/assets/script.js", get(|| asset("text/javascript; charset=utf-8", SCRIPT)))
        .route("/assets/icon.svg", get(|| asset("image/svg+xml", ICON)))
        .fallback(pages::unknown)
        .layer(from_fn_with_state(hosts, guard))
        .with_state(console)
}

async fn asset(kind: &'static str, content: &'static str) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, kind)], content)
}
