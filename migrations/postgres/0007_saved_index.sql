-- The index of an instance, so that a start reads only the rows of kv_log behind its head.

-- A cache: all rows are replaced in one transaction, and may be deleted at any time. Unlogged: after a crash it is empty, and
-- saving it costs no WAL and no traffic to standbys.
CREATE UNLOGGED TABLE saved_index (
    -- From 0 on. The last part has an empty block.
    part bigint PRIMARY KEY,
    -- The index contains all revisions up to this one.
    head bigint NOT NULL,
    -- NULL if the log was never compacted.
    compact_revision bigint,
    -- About this number of keys.
    keys bigint NOT NULL,
    -- CRC-32C of the block.
    checksum bigint NOT NULL,
    block bytea NOT NULL
);
