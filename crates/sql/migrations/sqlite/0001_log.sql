-- One row a revision: the first (for most transactions the only) change that a transaction made.
-- Rows are only ever appended, and deleted by compaction; no column of a row changes. The newest row is never deleted,
-- so max(id) is the store's revision. There is no index but the primary key: Orlop keeps key -> revisions in memory.
CREATE TABLE kv_log (
    id              INTEGER PRIMARY KEY,       -- the revision, without gaps; the empty store stands at 1
    key             BLOB    NOT NULL,
    value           BLOB,                      -- NULL for a delete
    lease           INTEGER NOT NULL,          -- 0: none
    version         INTEGER NOT NULL,          -- puts since the key was created, from 1; 0 for a delete
    create_revision INTEGER NOT NULL,          -- id of the key's first put since it was last absent; 0 for a delete
    prev_revision   INTEGER NOT NULL,          -- id of the version that this change replaced; 0: there was none
    deleted         INTEGER NOT NULL           -- 1: this change deleted the key
) STRICT;

-- The second and further changes of a transaction, in their order. `id` is the transaction's revision.
CREATE TABLE kv_log_more (
    id              INTEGER NOT NULL,
    sub             INTEGER NOT NULL,          -- from 1
    key             BLOB    NOT NULL,
    value           BLOB,
    lease           INTEGER NOT NULL,
    version         INTEGER NOT NULL,
    create_revision INTEGER NOT NULL,
    prev_revision   INTEGER NOT NULL,
    deleted         INTEGER NOT NULL,
    PRIMARY KEY (id, sub)
) STRICT, WITHOUT ROWID;

-- Every change in order, for people with a SQL prompt.
CREATE VIEW kv_events AS
    SELECT id, 0 AS sub, key, value, lease, version, create_revision, prev_revision, deleted FROM kv_log
    UNION ALL
    SELECT id, sub, key, value, lease, version, create_revision, prev_revision, deleted FROM kv_log_more;

-- Leases that were granted and neither revoked nor expired. Which keys hang on one is told by kv_log.
CREATE TABLE lease (
    id  INTEGER PRIMARY KEY,
    ttl INTEGER NOT NULL                       -- seconds, as granted
) STRICT;

-- Facts about the store: cluster_id, compact_revision.
CREATE TABLE meta (
    name  TEXT    PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO meta (name, value) VALUES
    ('cluster_id', abs(random() % 9223372036854775807) + 1),
    ('member_id',  abs(random() % 9223372036854775807) + 1);
