//! The one integration-test binary: it links once.

#![allow(clippy::wildcard_enum_match_arm, reason = "a test speaks of the variants that it means")]

mod differential;
mod etcdctl;
mod kube_trace;
mod support;
mod tidy;
