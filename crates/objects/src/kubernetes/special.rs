//! The types of Kubernetes' API whose JSON form is not an object with the message's fields, and the fields whose name
//! in JSON differs from the one in the proto files.

use std::collections::BTreeMap;

use base64::{Engine as _, prelude::BASE64_STANDARD};

use crate::{
    json,
    node::Node,
    wire::{Fields, WireValue},
};

const META: &str = "apimachinery.pkg.apis.meta.v1";

/// Returns the form of a type that consists of one value; `None` for all other types.
pub(super) fn of_bytes(message: &str, wire: &[u8]) -> Option<Node> {
    if let Some(name) = message.strip_prefix(META).and_then(|name| name.strip_prefix('.')) {
        return Some(match name {
            "Time" => timestamp(wire, Precision::Seconds),
            "MicroTime" => timestamp(wire, Precision::Micros),
            "Duration" => Node::Text(duration(number(wire, 1).cast_signed())),
            "FieldsV1" => json_or_base64(bytes(wire, 1)),
            _ => return None,
        });
    }
    match message {
        "apimachinery.pkg.runtime.RawExtension" => Some(json_or_base64(bytes(wire, 1))),
        "apimachinery.pkg.api.resource.Quantity" => {
            Some(Node::Text(String::from_utf8_lossy(bytes(wire, 1)).into_owned()))
        }
        "apimachinery.pkg.util.intstr.IntOrString" => Some(match number(wire, 1) {
            0 => Node::Number((number(wire, 2).cast_signed()).into()),
            _ => Node::Text(String::from_utf8_lossy(bytes(wire, 3)).into_owned()),
        }),
        _ if message.starts_with("apiextensions") && message.ends_with(".JSON") => Some(json_or_base64(bytes(wire, 1))),
        _ => None,
    }
}

/// Returns the form of a message with its decoded fields.
pub(super) fn of_fields(message: &str, mut map: BTreeMap<String, Node>) -> Node {
    // Lists that are a type of their own.
    if message.ends_with(".ExtraValue") || message == "apimachinery.pkg.apis.meta.v1.Verbs" {
        return map.remove("items").unwrap_or_else(|| Node::List(Vec::new()));
    }
    // Unions that the schemas of custom resources use.
    let (many, one) = match message.rsplit('.').next().unwrap_or_default() {
        "JSONSchemaPropsOrArray" => ("jSONSchemas", "schema"),
        "JSONSchemaPropsOrStringArray" => ("property", "schema"),
        "JSONSchemaPropsOrBool" => ("schema", "allows"),
        _ => return Node::Map(map),
    };
    map.remove(many).or_else(|| map.remove(one)).unwrap_or(Node::Null)
}

/// Returns the name of a field in JSON.
pub(super) fn json_name(message: &str, field: &str) -> String {
    match (message, field) {
        ("JSONSchemaProps", "ref" | "schema") => format!("${field}"),
        ("JSONSchemaProps", _) if field.starts_with("xKubernetes") => kebab(field),
        ("BoundObjectReference", "uID") => "uid".to_owned(),
        ("BoundObjectReference", "aPIVersion") => "apiVersion".to_owned(),
        ("IngressClassParametersReference", "aPIGroup") => "apiGroup".to_owned(),
        (_, "Webhooks" | "Expression" | "Name") => field.to_ascii_lowercase(),
        _ => field.to_owned(),
    }
}

fn kebab(name: &str) -> String {
    let mut out = String::with_capacity(name.len() + 6);
    for c in name.chars() {
        if c.is_ascii_uppercase() {
            out.push('-');
        }
        out.push(c.to_ascii_lowercase());
    }
    out
}

/// Returns the last value of a number field; 0 if it is absent.
fn number(wire: &[u8], wanted: u32) -> u64 {
    let found = Fields::of(wire).flatten().filter(|(number, _)| *number == wanted).last();
    match found {
        Some((_, WireValue::Varint(value))) => value,
        _ => 0,
    }
}

/// Returns the last value of a field of bytes; empty if it is absent.
fn bytes(wire: &[u8], wanted: u32) -> &[u8] {
    let found = Fields::of(wire).flatten().filter(|(number, _)| *number == wanted).last();
    match found {
        Some((_, WireValue::Bytes(bytes))) => bytes,
        _ => &[],
    }
}

fn json_or_base64(bytes: &[u8]) -> Node {
    if bytes.is_empty() {
        return Node::Null;
    }
    json::read(bytes).unwrap_or_else(|| Node::Text(BASE64_STANDARD.encode(bytes)))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Precision {
    Seconds,
    Micros,
}

/// Returns a time as RFC 3339 in UTC. An empty message is the zero time, which JSON omits.
fn timestamp(wire: &[u8], precision: Precision) -> Node {
    let (seconds, nanos) = (number(wire, 1).cast_signed(), number(wire, 2));
    if seconds == 0 && nanos == 0 {
        return Node::Null;
    }
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let Some((year, month, day)) = civil(days) else {
        return Node::Text(format!("{seconds} seconds since 1970"));
    };
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let fraction = match precision {
        Precision::Seconds => String::new(),
        Precision::Micros => format!(".{:06}", nanos / 1000 % 1_000_000),
    };
    Node::Text(format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{fraction}Z"))
}

/// Returns the date of a day counted from 1970-01-01; `None` outside the years 1 to 9999, which RFC 3339 cannot write.
///
/// Source: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`: years begin in March, so
/// that the leap day is the last one.
fn civil(days: i64) -> Option<(i64, i64, i64)> {
    if !(-719_162..=2_932_896).contains(&days) {
        return None;
    }
    let days = days + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    Some((year, month, day))
}

/// Returns a duration as Go writes it: `1h30m0s`, `1.5s`, `250ms`.
fn duration(nanos: i64) -> String {
    let sign = if nanos < 0 { "-" } else { "" };
    let nanos = nanos.unsigned_abs();
    let fraction = |value: u64, unit: u64, name: &str| {
        let digits = format!("{:0width$}", value % unit, width = unit.ilog10() as usize);
        let digits = digits.trim_end_matches('0');
        let dot = if digits.is_empty() { "" } else { "." };
        format!("{}{dot}{digits}{name}", value / unit)
    };
    let text = match nanos {
        0 => return "0s".to_owned(),
        1..1_000 => format!("{nanos}ns"),
        1_000..1_000_000 => fraction(nanos, 1_000, "µs"),
        1_000_000..1_000_000_000 => fraction(nanos, 1_000_000, "ms"),
        _ => {
            let minutes = nanos / 60_000_000_000;
            let seconds = fraction(nanos % 60_000_000_000, 1_000_000_000, "s");
            match minutes {
                0 => seconds,
                1..60 => format!("{minutes}m{seconds}"),
                _ => format!("{}h{}m{seconds}", minutes / 60, minutes % 60),
            }
        }
    };
    format!("{sign}{text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_as_in_go() {
        let table: [(i64, &str); 9] = [
            (0, "0s"),
            (1, "1ns"),
            (1_500, "1.5µs"),
            (250_000_000, "250ms"),
            (1_500_000_000, "1.5s"),
            (60_000_000_000, "1m0s"),
            (5_400_000_000_000, "1h30m0s"),
            (-3_000_000_000, "-3s"),
            (i64::MIN, "-2562047h47m16.854775808s"),
        ];
        for (nanos, text) in table {
            assert_eq!(duration(nanos), text);
        }
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        let table = [
            (0, Some((1970, 1, 1))),
            (19_782, Some((2024, 2, 29))),
            (11_016, Some((2000, 2, 29))),
            (-1, Some((1969, 12, 31))),
            (-719_162, Some((1, 1, 1))),
            (2_932_896, Some((9999, 12, 31))),
            (2_932_897, None),
            (i64::MIN / 86_400, None),
        ];
        for (days, date) in table {
            assert_eq!(civil(days), date, "day {days}");
        }
    }
}
