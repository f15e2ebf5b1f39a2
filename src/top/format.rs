//! Numbers as short texts.

/// Formats a duration in seconds with three digits.
pub(crate) fn secs(secs: f64) -> String {
    match secs {
        secs if secs < 0.000_999_5 => format!("{:.0} us", secs * 1e6),
        secs if secs < 0.009_995 => format!("{:.2} ms", secs * 1e3),
        secs if secs < 0.099_95 => format!("{:.1} ms", secs * 1e3),
        secs if secs < 0.999_5 => format!("{:.0} ms", secs * 1e3),
        secs if secs < 99.95 => format!("{secs:.1} s"),
        secs => format!("{secs:.0} s"),
    }
}

/// Formats a number per second.
pub(crate) fn rate(rate: f64) -> String {
    if rate >= 99.95 || rate == 0.0 { format!("{rate:.0}") } else { format!("{rate:.1}") }
}

pub(crate) fn micros(micros: u64) -> String {
    secs(micros as f64 / 1e6)
}

/// Formats the time of the day in UTC.
pub(crate) fn time_of_day(unix_ms: i64) -> String {
    let secs = unix_ms.div_euclid(1000).rem_euclid(86_400);
    format!("{:02}:{:02}:{:02}", secs / 3600, secs / 60 % 60, secs % 60)
}

/// Cuts a text to a number of characters.
pub(super) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(width.saturating_sub(1)).collect();
    if width > 0 {
        cut.push('~');
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (number, want) in [
            (0.000_012_4, "12 us"),
            (0.001_234, "1.23 ms"),
            (0.0123, "12.3 ms"),
            (0.123, "123 ms"),
            (1.23, "1.2 s"),
            (123.4, "123 s"),
        ] {
            assert_eq!(secs(number), want);
        }
        assert_eq!((rate(0.0), rate(1.26), rate(1234.5)), ("0".to_owned(), "1.3".to_owned(), "1234".to_owned()));
        assert_eq!((time_of_day(0), time_of_day(86_399_999)), ("00:00:00".to_owned(), "23:59:59".to_owned()));
        assert_eq!(
            (cut("abc", 3), cut("abcd", 3), cut("abcd", 0)),
            ("abc".to_owned(), "ab~".to_owned(), String::new())
        );
    }
}
