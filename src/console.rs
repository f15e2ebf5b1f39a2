//! The web page of Orlop: load and state, sizes, keys with their history, and events, in a browser.
//!
//! It is served by `orlop console`, a process of its own, about any Orlop or etcd, and by a server about itself at
//! `console-listen-url`. Both serve the same routes and reach the server through gRPC: a server connects to itself
//! through a pipe. So a browser can do what its user's rights permit, and no more.
//!
//! - [`command`]: `orlop console`; [`server`]: the state and the routes; [`embedded`]: the page in the server
//! - [`guard`]: checks of `Host` and `Origin`, and the headers of responses; [`session`]: log in, cookies, tokens against
//!   cross-site requests; [`password`]: the page's own password; [`limits`]: how many forms, log-ins and large pages
//!   there are at the same time
//! - [`backend`]: what the pages need from a server; [`figures`]: rates while somebody looks; [`events`]: a watch as
//!   Server-Sent Events
//! - [`query`]: keys, which are any bytes, in URLs; [`treemap`], [`chart`]: SVG
//! - [`pages`]: HTML. Its macro escapes all text.
//!
//! A page works without its script, which only refreshes parts of it. Nothing runs while nobody looks.
//!
//! Known limits: a key of more than 5,000 bytes does not fit into a URL, so it has no page. Sessions are lost at a restart.
//! Behind a proxy with TLS, cookies have no `Secure`: any client could claim TLS in `X-Forwarded-Proto`.

mod backend;
mod chart;
pub mod command;
pub mod embedded;
mod events;
mod figures;
mod guard;
mod limits;
mod pages;
mod password;
mod query;
mod server;
mod session;
mod treemap;

use self::server::{Console, routes};
