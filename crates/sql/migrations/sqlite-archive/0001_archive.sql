-- The archive beside a database of Orlop: rows that compactions removed from the log, kept for some time.

-- A row as it was in kv_log or kv_log_more.
CREATE TABLE kv_archive (
    id              INTEGER NOT NULL,          -- the revision
    sub             INTEGER NOT NULL,          -- 0 for a row of kv_log
    key             BLOB    NOT NULL,
    value           BLOB,                      -- NULL for a delete
    lease           INTEGER NOT NULL,
    version         INTEGER NOT NULL,
    create_revision INTEGER NOT NULL,
    prev_revision   INTEGER NOT NULL,
    deleted         INTEGER NOT NULL,
    end_revision    INTEGER NOT NULL,          -- the first revision whose state does not contain this row
    PRIMARY KEY (id, sub)
) STRICT;

-- For the history of a key, and for the state of a range at a revision.
CREATE INDEX kv_archive_key ON kv_archive (key, id, sub);

-- For the deletion of the oldest rows.
CREATE INDEX kv_archive_end ON kv_archive (end_revision);

-- Moments: id was the newest revision at this time. At most one a second.
CREATE TABLE kv_time (
    id  INTEGER PRIMARY KEY,
    at  INTEGER NOT NULL,                      -- milliseconds since 1970
    -- Nobody recorded times for a while before this moment (1) or somebody did (0). The revisions between a moment with a
    -- gap and the one before it were written at an unknown time between the two.
    gap INTEGER NOT NULL,
    -- Whether the moment before it has a later time (1), because the clock was set back, or not (0).
    back INTEGER NOT NULL
) STRICT;

CREATE INDEX kv_time_at ON kv_time (at);

CREATE INDEX kv_time_back ON kv_time (id) WHERE back;

-- Facts about the archive: cluster_id; first_revision, from which on everything is in the log or here; copied_revision,
-- the newest compaction whose rows are all here; bytes and rows.
CREATE TABLE meta (
    name  TEXT    PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT;
