//! The SQL of the archive in SQLite.

use crate::archive::archive_columns;

pub(super) const COLUMNS_OF_LOG: &str =
    "l.key, l.value, l.lease, l.version, l.create_revision, l.prev_revision, l.deleted";
pub(super) const INSERT: &str = "INSERT OR IGNORE INTO kv_archive (id, sub, key, value, lease, version, create_revision, \
    prev_revision, deleted, end_revision) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
pub(super) const ADD: &str =
    "UPDATE meta SET value = value + CASE name WHEN 'rows' THEN ? ELSE ? END WHERE name IN ('rows', 'bytes')";
pub(super) const BEGIN: &str = "INSERT OR IGNORE INTO meta (name, value) \
    VALUES ('first_revision', ?1), ('copied_revision', ?1), ('bytes', 0), ('rows', 0)";
pub(super) const CLUSTER: &str = "INSERT OR IGNORE INTO meta (name, value) VALUES ('cluster_id', ?)";
/// The cluster, the newest compaction that was copied (NULL before the archive is begun), and the newest recorded head.
pub(super) const KNOWN: &str = "SELECT (SELECT value FROM meta WHERE name = 'cluster_id'), \
    (SELECT value FROM meta WHERE name = 'copied_revision'), coalesce((SELECT max(id) FROM kv_time), 0)";
/// In the log: the newest compaction that was copied. An archive that does not know it is older than the log.
pub(super) const ARCHIVED_FACT: &str = "archived_revision";
pub(super) const READ_FACT: &str = "SELECT value FROM meta WHERE name = ?";
pub(in crate::sqlite) const STATE: &str = "SELECT (SELECT value FROM meta WHERE name = 'first_revision'), \
    (SELECT value FROM meta WHERE name = 'copied_revision'), (SELECT value FROM meta WHERE name = 'bytes'), \
    (SELECT value FROM meta WHERE name = 'rows')";
/// [`NOTE_TIME`] is not synced, and the connection stays in this mode. Rows are deleted from the log after others are.
pub(super) const SYNC: &str = "PRAGMA synchronous = FULL";
pub(super) const DO_NOT_SYNC: &str = "PRAGMA synchronous = NORMAL";
pub(super) const RAISE: &str = "UPDATE meta SET value = max(value, ?) WHERE name = ?";
pub(super) const DELETE_OLD: &str = "DELETE FROM kv_archive WHERE (id, sub) IN (SELECT id, sub FROM kv_archive \
    WHERE end_revision <= ?1 AND id < ?1 ORDER BY end_revision LIMIT ?2) \
    RETURNING length(key) + coalesce(length(value), 0)";
/// The times that remain begin above the deleted ones: otherwise a time that the clock has passed twice, of which the first
/// was deleted, would seem certain. The plus signs keep SQLite from walking all times by their index.
pub(super) const DELETE_TIMES: &str = "\
    WITH kept AS (SELECT max(id) AS first FROM kv_time WHERE id <= ?1), \
    gone AS (SELECT max(+at) AS at FROM kv_time WHERE id < (SELECT first FROM kept) AND +at <= ?2) \
    DELETE FROM kv_time WHERE id < (SELECT coalesce(\
    (SELECT min(t.id) FROM kv_time t WHERE t.id >= kept.first AND t.at > coalesce(gone.at, t.at - 1)), \
    (SELECT max(id) FROM kv_time WHERE kept.first IS NOT NULL)) FROM kept, gone)";
pub(super) const OLDEST: &str = "SELECT max(end_revision, id + 1), length(key) + coalesce(length(value), 0) FROM kv_archive \
    ORDER BY end_revision, id, sub LIMIT ?";
/// If the clock was set back by up to a minute, the time stands still.
pub(super) const NOTE_TIME: &str = "INSERT INTO kv_time (id, at, gap, back) \
    SELECT ?1, iif(last.at BETWEEN ?2 AND ?2 + 60000, last.at, ?2), ?3, coalesce(last.at > ?2 + 60000, 0) \
    FROM (SELECT coalesce(max(id), 0) AS id, at FROM kv_time) last WHERE ?1 > last.id";
pub(super) const MOMENT_AT: &str = "SELECT id, at FROM kv_time WHERE at <= ? ORDER BY at DESC, id DESC LIMIT 1";
pub(super) const RECORD_OF: &str =
    "SELECT id, at, gap FROM kv_time WHERE id >= ?1 AND ?1 > (SELECT min(id) FROM kv_time) ORDER BY id LIMIT 1";

/// `$order` is the direction of both columns.
macro_rules! changes_of_key {
    ($order:literal) => {
        concat!(
            "SELECT ",
            archive_columns!(),
            " FROM kv_archive WHERE key = ?1 AND (id, sub) >= (?2, ?3) AND (id, sub) <= (?4, ?5) ORDER BY id ",
            $order,
            ", sub ",
            $order,
            " LIMIT ?6"
        )
    };
}
pub(super) use changes_of_key;

/// The unary plus keeps SQLite from using the index on keys, which would need a sort.
pub(super) const CHANGES_OF_SPAN: &str = concat!(
    "SELECT ",
    archive_columns!(),
    " FROM kv_archive WHERE (id, sub) >= (?2, ?3) AND (id, sub) <= (?4, ?5) AND +key >= ?1 AND (?7 OR +key < ?8) \
     ORDER BY id, sub LIMIT ?6"
);

/// The row that ends a visit.
pub(super) const BOUND_OF_VISIT: &str = "SELECT id, sub FROM kv_archive WHERE (id, sub) >= (?1, ?2) AND (id, sub) <= (?3, ?4) \
    ORDER BY id, sub LIMIT 1 OFFSET ?5";

/// Visits one key after the other, so that a key with many versions costs no more than others. `$start` is the condition
/// for the first key, `$end` that for the end of the range.
macro_rules! pairs_at {
    ($start:literal, $end:literal) => {
        concat!(
            "WITH RECURSIVE v (key, number) AS (\
                 SELECT (SELECT key FROM kv_archive WHERE key ",
            $start,
            $end,
            " ORDER BY key LIMIT 1), 1 \
                 UNION ALL \
                 SELECT (SELECT h.key FROM kv_archive h WHERE h.key > v.key",
            $end,
            " ORDER BY h.key LIMIT 1), v.number + 1 FROM v WHERE v.key IS NOT NULL AND v.number < ?3\
             ) SELECT ",
            visited_columns!(),
            " FROM v LEFT JOIN kv_archive a ON a.rowid = (\
                 SELECT h.rowid FROM kv_archive h WHERE h.key = v.key AND h.id <= ?2 ORDER BY h.id DESC, h.sub DESC LIMIT 1\
             ) AND a.end_revision > ?2 AND a.deleted = 0 WHERE v.key IS NOT NULL ORDER BY v.number"
        )
    };
}
pub(super) use pairs_at;
