//! The wall clock, for people, names of files and monitoring. It may jump, so deadlines use tokio's clock.

use std::time::{SystemTime, UNIX_EPOCH};

#[expect(clippy::disallowed_methods, reason = "all other code calls this function")]
pub fn now() -> SystemTime {
    SystemTime::now()
}

/// Returns the milliseconds since 1970; 0 for a time before.
pub fn unix_ms(time: SystemTime) -> i64 {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_epoch.as_millis()).unwrap_or(i64::MAX)
}

/// Returns the seconds since 1970; 0 for a time before.
pub fn unix_secs(time: SystemTime) -> i64 {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_counted_from_1970() {
        let rows = [
            (UNIX_EPOCH, 0, 0),
            (UNIX_EPOCH - Duration::from_secs(1), 0, 0),
            (UNIX_EPOCH + Duration::from_millis(1_999), 1_999, 1),
        ];
        for (time, ms, secs) in rows {
            assert_eq!((unix_ms(time), unix_secs(time)), (ms, secs), "{time:?}");
        }
    }
}
