//! `/debug/vars`, as Go's package expvar serves it, and with `enable-pprof` `/debug/pprof/`, as Go's net/http/pprof does.
//!
//! Only the client URLs serve them, as in etcd. The command line is shown without the URL of the database, which may
//! contain a password.

mod command_line;
mod memory;
mod profile;

use axum::{
    Router,
    extract::{Path, Query},
    http::{
        StatusCode,
        header::{CONTENT_DISPOSITION, CONTENT_TYPE},
    },
    response::{Html, IntoResponse as _, Redirect, Response},
    routing::get,
};
use serde_json::json;

use self::memory::Memory;
use super::NO_SNIFF;

const JSON: &str = "application/json; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";
const BINARY: &str = "application/octet-stream";

const INDEX: &str = r#"<html>
<head><title>/debug/pprof/</title></head>
<body>
<p>/debug/pprof/</p>
<table>
<tr><td><a href="cmdline">cmdline</a></td><td>the command line, without the URL of the database</td></tr>
<tr><td><a href="heap">heap</a></td><td>the memory of the process, in text</td></tr>
<tr><td><a href="profile?seconds=30">profile</a></td><td>CPU profile of the next seconds, for go tool pprof</td></tr>
</table>
</body>
</html>
"#;

/// Whether `/debug/pprof/` is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pprof {
    Served,
    Absent,
}

pub(super) fn routes(pprof: Pprof) -> Router {
    let vars = Router::new().route("/debug/vars", get(vars));
    match pprof {
        Pprof::Absent => vars,
        Pprof::Served => vars
            .route("/debug/pprof", get(async || Redirect::permanent("/debug/pprof/")))
            .route("/debug/pprof/", get(async || Html(INDEX)))
            .route("/debug/pprof/{profile}", get(profile)),
    }
}

async fn vars() -> Response {
    let memory = Memory::read();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let vars = json!({
        "cmdline": command_line::shown(),
        "file_descriptor_limit": limit,
        "memstats": memory.as_go(),
    });
    ([(CONTENT_TYPE, JSON)], format!("{vars:#}\n")).into_response()
}

/// Serves one of the profiles.
async fn profile(Path(name): Path<String>, Query(parameters): Query<Vec<(String, String)>>) -> Response {
    match name.as_str() {
        "profile" => cpu_profile(&parameters).await,
        "heap" => ([(CONTENT_TYPE, TEXT)], Memory::read().as_text()).into_response(),
        "cmdline" => ([(CONTENT_TYPE, TEXT)], command_line::shown().join("\0")).into_response(),
        _ => failed(StatusCode::NOT_FOUND, "Unknown profile; /debug/pprof/ lists the profiles"),
    }
}

async fn cpu_profile(parameters: &[(String, String)]) -> Response {
    let seconds = parameters.iter().find(|(name, _)| name == "seconds").map(|(_, value)| value.as_str());
    let duration = match profile::duration(seconds) {
        Ok(duration) => duration,
        Err(error) => return failed(StatusCode::BAD_REQUEST, &error),
    };
    match profile::record(duration).await {
        Ok(profile) => {
            let headers = [(CONTENT_TYPE, BINARY), (CONTENT_DISPOSITION, "attachment; filename=\"profile\"")];
            (headers, [NO_SNIFF], profile).into_response()
        }
        Err(error) => failed(StatusCode::INTERNAL_SERVER_ERROR, &error),
    }
}

fn failed(status: StatusCode, error: &str) -> Response {
    (status, [(CONTENT_TYPE, TEXT)], [NO_SNIFF], format!("{error}\n")).into_response()
}
