//! Connections to the instances, and the format of the values that clients write.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::{sleep, timeout};

use crate::support::Client as Connection;

/// The current addresses of the instances.
pub type Endpoints = Arc<Mutex<Vec<String>>>;

/// Connects to an instance. `number` counts in a circle: the number after the last instance is the first instance.
/// Returns `None` after a short pause if the instance does not accept the connection.
pub async fn connect(endpoints: &Endpoints, number: usize) -> Option<Connection> {
    let endpoint = {
        let endpoints = endpoints.lock().expect("the lock is not poisoned");
        endpoints[number % endpoints.len()].clone()
    };
    if let Ok(Ok(connection)) = timeout(Duration::from_secs(1), Connection::try_connect(&endpoint)).await {
        return Some(connection);
    }
    sleep(Duration::from_millis(20)).await;
    None
}

/// Parses a value, which is a number that only one write has, padded with spaces.
pub fn value(bytes: &[u8]) -> u64 {
    std::str::from_utf8(bytes).ok().and_then(|text| text.trim_end().parse().ok()).expect("values are numbers")
}
