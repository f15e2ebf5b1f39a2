//! The status of a snapshot as `etcdutl snapshot status` of etcd 3.6 prints it. JSON and fields also have the number of
//! archived rows, if the snapshot has an archive.

use clap::ValueEnum;
use orlop_objects::without_hazards;

use super::Status;

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum Format {
    /// One line: hash, revision, keys, size, version
    Simple,
    Json,
    Table,
    /// One line per property
    Fields,
}

pub(super) fn text(status: &Status, format: Format) -> String {
    let Status { hash, revision, keys, bytes, version, archived_rows, .. } = status;
    match format {
        Format::Simple => format!("{hash:x}, {revision}, {keys}, {}, {version}", size(*bytes)),
        Format::Json => {
            let mut json = serde_json::json!({
                "hash": hash,
                "revision": revision.0,
                "totalKey": keys,
                "totalSize": bytes,
                "version": version,
            });
            if let Some(rows) = archived_rows {
                json["archivedRows"] = (*rows).into();
            }
            without_hazards(json.to_string())
        }
        Format::Table => table(&[
            ("HASH", format!("{hash:x}")),
            ("REVISION", revision.to_string()),
            ("TOTAL KEYS", keys.to_string()),
            ("TOTAL SIZE", size(*bytes)),
            ("STORAGE VERSION", version.clone()),
        ]),
        Format::Fields => {
            let archived = archived_rows.map_or_else(String::new, |rows| format!("\n\"Archived rows\" : {rows}"));
            format!(
                "\"Hash\" : {hash}\n\"Revision\" : {revision}\n\"Keys\" : {keys}\n\"Size\" : {bytes}\n\
                 \"Version\" : {version:?}{archived}"
            )
        }
    }
}

fn table(columns: &[(&str, String)]) -> String {
    let widths = columns.iter().map(|(title, value)| title.len().max(value.len()));
    let line: String = widths.clone().map(|width| format!("+{}", "-".repeat(width + 2))).collect::<String>() + "+";
    let titles: String =
        columns.iter().zip(widths.clone()).map(|((title, _), width)| format!("| {title:^width$} ")).collect();
    let values: String = columns.iter().zip(widths).map(|((_, value), width)| format!("| {value:>width$} ")).collect();
    format!("{line}\n{titles}|\n{line}\n{values}|\n{line}")
}

/// Formats a size in powers of 1,000, with one decimal below 10.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "kB", "MB", "GB", "TB", "PB"];
    let (mut number, mut unit) = (bytes as f64, 0);
    while number >= 1000.0 && unit + 1 < UNITS.len() {
        (number, unit) = (number / 1000.0, unit + 1);
    }
    let rounded = (number * 10.0 + 0.5).floor() / 10.0;
    match unit {
        0 => format!("{bytes} B"),
        _ if rounded < 10.0 => format!("{rounded:.1} {}", UNITS[unit]),
        _ => format!("{rounded:.0} {}", UNITS[unit]),
    }
}

#[test]
fn sizes_are_rounded_as_etcdutl_does() {
    for (bytes, text) in
        [(0, "0 B"), (999, "999 B"), (1_000, "1.0 kB"), (9_949, "9.9 kB"), (20_480, "20 kB"), (2_097_152, "2.1 MB")]
    {
        assert_eq!(size(bytes), text);
    }
}
