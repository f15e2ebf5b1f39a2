//! The one integration-test binary: it links once.

#![allow(clippy::wildcard_enum_match_arm, reason = "tests match only the variants under test")]

mod alarm;
mod ambiguity;
mod auth;
mod backup;
mod bench;
mod check;
mod commands;
mod console;
mod damaged;
mod debug;
mod differential;
mod drop_in;
mod durability;
mod etcdctl;
mod failover;
mod foreign;
mod gateway;
mod hashkv;
mod health;
mod history;
mod hostile;
mod insight;
mod instances;
mod kine;
mod kube_trace;
mod kv;
mod lease;
mod linearizability;
mod lock;
mod log;
mod metrics;
mod migrate;
mod outage;
mod private;
mod services;
mod size;
mod slow_watch;
mod snapshot;
mod start;
mod support;
mod tidy;
mod tls;
mod torture;
mod trace;
