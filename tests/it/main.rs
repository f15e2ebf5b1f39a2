//! The one integration-test binary: it links once.

mod differential;
mod etcdctl;
mod kube_trace;
mod support;
