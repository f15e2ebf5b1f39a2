-- The archive: rows that compactions removed from the log, kept for some time. Empty unless an instance runs with
-- --history-retention.

-- A row as it was in kv_log or kv_log_more.
CREATE TABLE kv_archive (
    id              bigint  NOT NULL,          -- the revision
    sub             bigint  NOT NULL,          -- 0 for a row of kv_log
    key             bytea   NOT NULL,
    value           bytea,                     -- NULL for a delete
    lease           bigint  NOT NULL,
    version         bigint  NOT NULL,
    create_revision bigint  NOT NULL,
    prev_revision   bigint  NOT NULL,
    deleted         boolean NOT NULL,
    end_revision    bigint  NOT NULL,          -- the first revision whose state does not contain this row
    PRIMARY KEY (id, sub)
);

-- For the history of a key, and for the state of a range at a revision. An index entry has a limited length, so it
-- contains the beginning of the key.
CREATE INDEX kv_archive_key ON kv_archive (substr(key, 1, 256), id, sub);

-- For the deletion of the oldest rows.
CREATE INDEX kv_archive_end ON kv_archive (end_revision);

-- Moments: id was the newest revision at this time. At most one a second.
CREATE TABLE kv_time (
    id bigint PRIMARY KEY,
    at bigint NOT NULL                         -- milliseconds since 1970, by this server's clock; never decreases
);

CREATE INDEX kv_time_at ON kv_time (at);

-- Facts about the archive in meta, present once it was begun: archive_first, from which revision on everything is in the
-- log or the archive; archive_copied, the newest compaction whose rows are all copied; archive_bytes, archive_rows.

-- Begins the archive at the compact revision, unless it was begun before. The lock keeps a compaction from being recorded
-- meanwhile: its rows might be deleted by an instance that finds no archive.
CREATE FUNCTION orlop_begin_archive(compacted bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    begins bigint;
BEGIN
    IF EXISTS (SELECT FROM meta WHERE name = 'archive_first') THEN
        RETURN;
    END IF;
    PERFORM orlop_lock();
    SELECT greatest(compacted, (SELECT value FROM meta WHERE name = 'compact_revision')) INTO begins;
    INSERT INTO meta (name, value) VALUES ('archive_first', begins), ('archive_copied', begins), ('archive_bytes', 0),
        ('archive_rows', 0) ON CONFLICT DO NOTHING;
END
$$;

-- Copies rows of the log, if the archive was begun. Rows that are in the archive already, or not in the log, are skipped.
-- The first statement makes copies and deletions wait for one another, so that they change the facts in one order.
CREATE FUNCTION orlop_archive(ids bigint[], subs bigint[], ends bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM meta WHERE name = 'archive_first' FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    WITH wanted AS (
        SELECT * FROM unnest(ids, subs, ends) AS w (id, sub, end_revision)
    ), copied AS (
        INSERT INTO kv_archive
        SELECT l.id, 0, l.key, l.value, l.lease, l.version, l.create_revision, l.prev_revision, l.deleted, w.end_revision
        FROM wanted w JOIN kv_log l ON l.id = w.id WHERE w.sub = 0
        UNION ALL
        SELECT l.id, l.sub, l.key, l.value, l.lease, l.version, l.create_revision, l.prev_revision, l.deleted, w.end_revision
        FROM wanted w JOIN kv_log_more l ON l.id = w.id AND l.sub = w.sub
        ON CONFLICT DO NOTHING
        RETURNING octet_length(key) + coalesce(octet_length(value), 0) + 64 AS bytes
    ), added AS (
        SELECT count(*) AS rows, coalesce(sum(bytes), 0) AS bytes FROM copied
    )
    UPDATE meta SET value = value + CASE name WHEN 'archive_rows' THEN added.rows ELSE added.bytes END
    FROM added WHERE name IN ('archive_rows', 'archive_bytes');
END
$$;

-- Deletes compacted rows that were copied or given up. Otherwise the same as orlop_purge was.
CREATE FUNCTION orlop_purge_copied(
    expected_server bigint, compacted bigint, ids bigint[], more_ids bigint[], more_subs bigint[]
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF orlop_server() <> expected_server
        OR NOT EXISTS (SELECT 1 FROM meta WHERE name = 'compact_revision' AND value >= compacted) THEN
        RETURN false;
    END IF;
    UPDATE meta SET value = compacted WHERE name = 'purged_revision' AND value < compacted;
    DELETE FROM kv_log l WHERE l.id = ANY (ids) AND l.id <= compacted;
    DELETE FROM kv_log_more l USING unnest(more_ids, more_subs) AS m (id, sub)
    WHERE l.id = m.id AND l.sub = m.sub AND l.id <= compacted;
    RETURN true;
END
$$;

-- Called only by instances of a version that knows no archive, while the others are upgraded: the rows were not copied.
CREATE OR REPLACE FUNCTION orlop_purge(
    expected_server bigint, compacted bigint, ids bigint[], more_ids bigint[], more_subs bigint[]
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF NOT orlop_purge_copied(expected_server, compacted, ids, more_ids, more_subs) THEN
        RETURN false;
    END IF;
    UPDATE meta SET value = compacted WHERE name = 'archive_first' AND value < compacted;
    RETURN true;
END
$$;

-- Records that all rows of a compaction were copied. Returns false on another server, which may lack the copies.
CREATE FUNCTION orlop_finish_copy(expected_server bigint, compacted bigint) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF orlop_server() <> expected_server THEN
        RETURN false;
    END IF;
    UPDATE meta SET value = compacted WHERE name = 'archive_copied' AND value < compacted;
    RETURN true;
END
$$;

-- Records the head and the time. A crash of the server may lose it, so that it costs no sync.
CREATE FUNCTION orlop_note_time() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO kv_time (id, at)
    SELECT h.id, greatest((extract(epoch FROM clock_timestamp()) * 1000)::bigint, (SELECT max(t.at) FROM kv_time t))
    FROM (SELECT coalesce(max(l.id), 1) AS id FROM kv_log l) h
    WHERE h.id > coalesce((SELECT max(t.id) FROM kv_time t), 0)
    ON CONFLICT DO NOTHING;
END
$$;

-- Deletes up to row_limit rows that no revision from the first one on needs, and raises the first revision: to new_first, and
-- as far as it takes to have at most bytes_max. Returns whether there is more to delete.
CREATE FUNCTION orlop_prune_archive(new_first bigint, bytes_max bigint, row_limit bigint) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    first     bigint;
    too_many  bigint;
    reached   bigint;
    gone      bigint;
    gone_size bigint;
BEGIN
    UPDATE meta SET value = greatest(value, new_first) WHERE name = 'archive_first' RETURNING value INTO first;
    IF first IS NULL THEN
        RETURN false;
    END IF;
    WITH old AS (
        SELECT a.id, a.sub FROM kv_archive a WHERE a.end_revision <= first AND a.id < first
        ORDER BY a.end_revision LIMIT row_limit
    ), deleted AS (
        DELETE FROM kv_archive a USING old WHERE a.id = old.id AND a.sub = old.sub
        RETURNING octet_length(a.key) + coalesce(octet_length(a.value), 0) + 64 AS bytes
    )
    SELECT count(*), coalesce(sum(bytes), 0) INTO gone, gone_size FROM deleted;
    UPDATE meta SET value = value - CASE name WHEN 'archive_rows' THEN gone ELSE gone_size END
    WHERE name IN ('archive_rows', 'archive_bytes') AND gone > 0;
    IF gone = row_limit THEN
        RETURN true;
    END IF;
    DELETE FROM kv_time t WHERE t.id < (SELECT max(k.id) FROM kv_time k WHERE k.id <= first);
    SELECT value - bytes_max INTO too_many FROM meta WHERE name = 'archive_bytes';
    IF too_many <= 0 THEN
        RETURN false;
    END IF;
    SELECT max(greatest(o.end_revision, o.id + 1)) INTO reached FROM (
        SELECT a.id, a.end_revision, sum(a.bytes) OVER (ORDER BY a.end_revision, a.id, a.sub) - a.bytes AS before
        FROM (
            SELECT id, sub, end_revision, octet_length(key) + coalesce(octet_length(value), 0) + 64 AS bytes
            FROM kv_archive ORDER BY end_revision LIMIT row_limit
        ) a
    ) o WHERE o.before < too_many;
    IF reached IS NULL THEN
        RETURN false;                          -- no rows: the fact is wrong
    END IF;
    UPDATE meta SET value = greatest(value, reached) WHERE name = 'archive_first';
    RETURN true;
END
$$;
