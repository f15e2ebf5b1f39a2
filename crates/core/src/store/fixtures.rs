//! A store without tasks, over a log in memory, for unit tests.

use std::sync::Arc;

use futures_util::FutureExt as _;

use super::{open::Settings, shared::Shared};
use crate::{
    index::TreeIndex,
    log::{ReadLog as _, memory::MemoryLog},
    overload::Steps,
};

pub(super) fn shared(cache_bytes: u64) -> Shared {
    let log = MemoryLog::default();
    let meta = log.meta().now_or_never().expect("a log in memory does not wait").expect("a log in memory");
    let settings = Settings { value_cache_bytes: cache_bytes, ..Settings::default() };
    Shared::new(Arc::new(log), &meta, TreeIndex::new(), Steps::new().0, &settings)
}
