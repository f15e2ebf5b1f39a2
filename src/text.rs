//! Keys, times, sizes and other numbers as short texts for people.

use std::time::{Duration, UNIX_EPOCH};

use orlop_objects::{Manager, is_hazard};

/// Formats a key with the escapes that `orlop history` and the other commands about the past read. The text cannot control
/// a terminal or the direction of text.
pub(crate) fn shown_key(key: &[u8]) -> String {
    let mut shown = String::with_capacity(key.len());
    for chunk in key.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\\' => shown.push_str("\\\\"),
                character if is_hazard(character) => {
                    let mut buffer = [0; 4];
                    character
                        .encode_utf8(&mut buffer)
                        .bytes()
                        .for_each(|byte| shown.push_str(&format!("\\x{byte:02x}")));
                }
                character => shown.push(character),
            }
        }
        chunk.invalid().iter().for_each(|byte| shown.push_str(&format!("\\x{byte:02x}")));
    }
    shown
}

/// Formats the field managers that wrote a version. The text cannot control a terminal or the direction of text.
pub(crate) fn shown_managers(managers: &[Manager]) -> String {
    let texts: Vec<String> = managers.iter().map(ToString::to_string).collect();
    texts.join(", ")
}

/// The last second of the year 9999, after which a time has no RFC 3339 form.
const UNIX_MS_MAX: i64 = 253_402_300_799_000;

/// Formats a time to the second, in UTC. A time that has no such form, which only a broken server sends, becomes the next
/// one that has.
pub(crate) fn shown_time(unix_ms: i64) -> String {
    let time = UNIX_EPOCH + Duration::from_millis(unix_ms.clamp(0, UNIX_MS_MAX).cast_unsigned());
    humantime::format_rfc3339_seconds(time).to_string()
}

/// Formats a size.
pub(crate) fn bytes(bytes: i64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let (mut number, mut unit) = (bytes as f64, 0);
    while number >= 1024.0 && unit + 1 < UNITS.len() {
        (number, unit) = (number / 1024.0, unit + 1);
    }
    if unit == 0 { format!("{bytes} bytes") } else { format!("{number:.1} {}", UNITS[unit]) }
}

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
pub(crate) fn cut(text: &str, width: usize) -> String {
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
    fn sizes_have_units() {
        for (number, want) in [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")] {
            assert_eq!(bytes(number), want);
        }
    }

    #[test]
    fn times_without_an_rfc_3339_form_become_the_next_one() {
        assert_eq!(shown_time(1_795_701_720_999), "2026-11-26T14:02:00Z");
        assert_eq!(shown_time(i64::MAX), "9999-12-31T23:59:59Z");
        assert_eq!(shown_time(i64::MIN), "1970-01-01T00:00:00Z");
    }

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
