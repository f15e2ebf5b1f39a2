-- Users and roles, appends behind changes of other instances, the record of changed leases, the archive, and the saved index.
--
-- No instance of the release 0.2.0, which knows only the first migration, may run beside others that use this schema. One that
-- was not stopped can no longer write: see orlop_append.

-- Users. Their roles determine what they may do.
CREATE TABLE auth_user (
    name        text   PRIMARY KEY,
    password    text,                          -- bcrypt hash; NULL: known by a client certificate only
    tokens_from bigint NOT NULL                -- auth revision; tokens given before it are not valid
);

CREATE TABLE auth_role (
    name text PRIMARY KEY
);

-- The roles of users. The role root permits everything, also without a row in auth_role.
CREATE TABLE auth_user_role (
    user_name text NOT NULL,
    role      text NOT NULL,
    PRIMARY KEY (user_name, role)
);

-- What roles permit. No two rows have the same role, key and range_end. There is no unique index, because keys can be
-- longer than an entry of an index.
CREATE TABLE auth_permission (
    role      text  NOT NULL,
    key       bytea NOT NULL,
    range_end bytea NOT NULL,                  -- empty: the key alone; one zero byte: all keys from key on
    access    text  NOT NULL                   -- read, write, readwrite
);

CREATE INDEX auth_permission_role ON auth_permission (role);

-- Logical replication sends a DELETE of a table without a primary key only if the whole row identifies it.
ALTER TABLE auth_permission REPLICA IDENTITY FULL;

-- The key that signs tokens, one row. Anyone who has it can act as any user.
CREATE TABLE auth_token_key (
    key bytea NOT NULL
);

ALTER TABLE auth_token_key REPLICA IDENTITY FULL;

-- A random UUID has 122 random bits from the server's strong source.
INSERT INTO auth_token_key (key) VALUES (uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()));

-- Facts in meta: auth_enabled is 0 or 1; auth_revision counts changes of users and roles. Without them Auth is disabled,
-- and the revision is 1.

-- Identifies the log: the run of the server, and the table. The number changes when the table is created again, and not
-- by VACUUM FULL, CLUSTER or REINDEX. An instance that finds another number than before compares the end of the log.
-- The functions that append contain the expression, because a call would take 3 µs.
CREATE OR REPLACE FUNCTION orlop_server() RETURNS bigint LANGUAGE sql AS $$
    SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint # ('kv_log'::regclass::oid::bigint << 20)
$$;

-- Which leases the newest appends changed. An instance that catches up reads these leases, instead of all, if each epoch
-- that it has not applied has a row. An epoch of an alarm, of users and roles, or of a restore has none.
CREATE TABLE lease_change (
    epoch  bigint   PRIMARY KEY,               -- the one that the append began
    leases bigint[] NOT NULL                   -- leases that it granted or ended; empty for a compaction
);

-- Records which leases an append changed. At least the last 10,000 epochs are kept.
CREATE FUNCTION orlop_note_leases(new_epoch bigint, changed bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- A row of this epoch may be left if older facts were restored by hand.
    INSERT INTO lease_change (epoch, leases) VALUES (new_epoch, changed)
    ON CONFLICT (epoch) DO UPDATE SET leases = excluded.leases;
    -- Not at each append: a deletion first passes the index entries of rows that were deleted and not yet vacuumed.
    IF new_epoch % 1000 = 0 THEN
        DELETE FROM lease_change WHERE epoch <= new_epoch - 10000;
    END IF;
END
$$;

-- The functions that an instance of the release 0.2.0 calls to write. Such an instance checks no rights of users, and records
-- neither changes of leases nor copies of rows. So from this migration on its appends, its deletions of rows and its heartbeats
-- fail; it can still read, and renew leases. Without heartbeats it is no longer a member: it could be the leader, and nobody
-- else would compact by schedule.
--
-- orlop_append remains, and fails, as does orlop_alarm, which calls it. 0.2.0 fails a write at once if it receives this SQLSTATE,
-- and repeats it for 7 s if the function does not exist.
DROP FUNCTION orlop_append, orlop_purge;

ALTER FUNCTION orlop_beat RENAME TO orlop_heartbeat;

CREATE FUNCTION orlop_append(
    bigint, bigint, bigint,
    bytea[], bytea[], bigint[], bigint[], bigint[], bigint[], boolean[],
    bigint[], bigint[], bytea[], bytea[], bigint[], bigint[], bigint[], bigint[], boolean[],
    bigint[], bigint[], bigint[], bigint[], bigint, bigint
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RAISE 'a newer version of Orlop has migrated the database: stop this instance, which can no longer write'
        USING ERRCODE = 'feature_not_supported';
END
$$;

-- Compare-and-append. Adds everything and returns true if the log is at the expected position. Otherwise it adds nothing
-- and returns false, also if a lease to expire was renewed.
--
-- The advisory lock excludes other appends until this transaction has committed, and the statements after it see all
-- that they committed: a VOLATILE function takes a snapshot for each of its statements, but only at READ COMMITTED.
-- The comparison with the head, instead of the primary key, refuses an instance that was paused until the rows above
-- its head had been written and compacted away.
CREATE FUNCTION orlop_append_at(
    expected_head bigint, expected_epoch bigint, expected_server bigint,
    keys bytea[], vals bytea[], leases bigint[], versions bigint[], creates bigint[], prevs bigint[], deletes boolean[],
    more_ids bigint[], more_subs bigint[], more_keys bytea[], more_vals bytea[], more_leases bigint[],
    more_versions bigint[], more_creates bigint[], more_prevs bigint[], more_deletes boolean[],
    grants bigint[], ttls bigint[], revokes bigint[], expires bigint[], compact bigint, own_run bigint
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    head   bigint;
    epoch  bigint;
    server bigint;
    due    bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE 'orlop_append_at needs transaction isolation read committed, not %', current_setting('transaction_isolation');
    END IF;
    PERFORM pg_advisory_xact_lock((1869771888::bigint << 32) | 'kv_log'::regclass::oid::bigint);
    SELECT (SELECT coalesce(max(l.id), 1) FROM kv_log l), (SELECT m.value FROM meta m WHERE m.name = 'epoch'),
        (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint # ('kv_log'::regclass::oid::bigint << 20)
    INTO head, epoch, server;
    IF (head, epoch, server) <> (expected_head, expected_epoch, expected_server) THEN
        RETURN false;
    END IF;
    IF cardinality(grants) > 0 OR cardinality(expires) > 0 THEN
        PERFORM orlop_settle();
    END IF;
    IF cardinality(expires) > 0 THEN
        -- Locked, so that no renewal comes between this check and the deletion.
        PERFORM 1 FROM lease l WHERE l.id = ANY (expires) AND l.deadline <= clock_timestamp() ORDER BY l.id FOR UPDATE;
        GET DIAGNOSTICS due = ROW_COUNT;
        IF due < cardinality(expires) THEN
            RETURN false;
        END IF;
    END IF;
    IF cardinality(keys) > 0 THEN
        INSERT INTO kv_log (id, key, value, lease, version, create_revision, prev_revision, deleted)
        SELECT expected_head + r.place, r.key, r.val, r.lease, r.version, r.create_revision, r.prev_revision, r.deleted
        FROM unnest(keys, vals, leases, versions, creates, prevs, deletes) WITH ORDINALITY
            AS r (key, val, lease, version, create_revision, prev_revision, deleted, place);
    END IF;
    IF cardinality(more_ids) > 0 THEN
        INSERT INTO kv_log_more (id, sub, key, value, lease, version, create_revision, prev_revision, deleted)
        SELECT * FROM unnest(more_ids, more_subs, more_keys, more_vals, more_leases, more_versions, more_creates,
            more_prevs, more_deletes);
    END IF;
    IF cardinality(grants) > 0 OR cardinality(revokes) > 0 OR cardinality(expires) > 0 OR compact IS NOT NULL THEN
        DELETE FROM lease l WHERE l.id = ANY (revokes || expires);  -- an OR of two would need a bitmap scan
        INSERT INTO lease (id, ttl, deadline)
        SELECT g.id, g.ttl, clock_timestamp() + make_interval(secs => g.ttl) FROM unnest(grants, ttls) AS g (id, ttl);
        IF compact IS NOT NULL THEN
            INSERT INTO meta AS m (name, value) VALUES ('compact_revision', compact)
            ON CONFLICT (name) DO UPDATE SET value = greatest(m.value, excluded.value);
        END IF;
        UPDATE meta m SET value = m.value + 1 WHERE m.name = 'epoch';
        PERFORM orlop_note_leases(expected_epoch + 1, revokes || expires || grants);
    END IF;
    -- A notification costs a lone append a fifth of its time and more. An append during which an instance joins does not
    -- notify that instance, which polls too.
    IF EXISTS (SELECT 1 FROM member m WHERE m.run <> own_run AND m.beat > clock_timestamp() - interval '1 minute') THEN
        PERFORM pg_notify('orlop_' || 'kv_log'::regclass::oid, (expected_head + cardinality(keys))::text);
    END IF;
    RETURN true;
END
$$;

-- As orlop_append_at, for a fact: it is set or, without a value, removed.
CREATE FUNCTION orlop_set_fact(
    expected_head bigint, expected_epoch bigint, expected_server bigint, fact text, fact_value bigint, own_run bigint
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF NOT orlop_append_at(expected_head, expected_epoch, expected_server, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}',
        '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', NULL, own_run) THEN
        RETURN false;
    END IF;
    DELETE FROM meta WHERE name = fact;
    IF fact_value IS NOT NULL THEN
        INSERT INTO meta (name, value) VALUES (fact, fact_value);
    END IF;
    UPDATE meta SET value = value + 1 WHERE name = 'epoch';
    RETURN true;
END
$$;

-- The same as orlop_append_at, also behind changes of other instances. An instance without others calls orlop_append_at,
-- which takes less time.
--
-- Returns no row and adds nothing if the log is not at the expected position, unless all appends since then were
-- changes of keys, none of which the caller looked at. Then it adds the caller's rows behind them: each revision above
-- the expected head increases by the number of revisions in between. It also returns no row if there are too many
-- changes to compare, and if a lease to expire was renewed.
--
-- The first row that it returns has the head before the caller's rows in id and NULL in all other columns. The rows of
-- the other instances above the expected head follow if they are few: the lock is held until the client has received
-- them. Otherwise the caller reads them from the log.
--
-- read_keys are the keys that the caller looked at, and read_starts and read_ends the ranges; an end that is NULL is
-- unbounded.
--
-- Planning a statement takes longer than executing it here, and plans must not depend on statistics, which lag behind a
-- table that grows. So plans are generic, and tables are read by their indexes only. The costs that this assigns to some
-- plans would start the JIT compiler.
CREATE FUNCTION orlop_append_behind(
    expected_head bigint, expected_epoch bigint, expected_server bigint,
    keys bytea[], vals bytea[], leases bigint[], versions bigint[], creates bigint[], prevs bigint[], deletes boolean[],
    more_ids bigint[], more_subs bigint[], more_keys bytea[], more_vals bytea[], more_leases bigint[],
    more_versions bigint[], more_creates bigint[], more_prevs bigint[], more_deletes boolean[],
    grants bigint[], ttls bigint[], revokes bigint[], expires bigint[], compact bigint, own_run bigint,
    read_keys bytea[], read_starts bytea[], read_ends bytea[]
) RETURNS TABLE (
    id bigint, sub bigint, key bytea, value bytea, lease bigint, version bigint, create_revision bigint,
    prev_revision bigint, deleted bigint
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    -- Maximum numbers of revisions, and of further changes of transactions, that are compared.
    revisions_max CONSTANT bigint := 5000;
    more_max      CONSTANT bigint := 5000;
    -- Maximum bytes of the returned rows; this much fits into the buffers of a connection whose client does not read.
    bytes_max     CONSTANT bigint := 64 * 1024;
    row_bytes     CONSTANT bigint := 100;      -- of a row without key and value
    head      bigint;
    epoch     bigint;
    server    bigint;
    moved     bigint;
    others    bytea[];
    size      bigint;
    more_size bigint;
    more      bigint;
    due       bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE 'orlop_append_behind needs transaction isolation read committed, not %',
            current_setting('transaction_isolation');
    END IF;
    PERFORM pg_advisory_xact_lock((1869771888::bigint << 32) | 'kv_log'::regclass::oid::bigint);
    SELECT (SELECT coalesce(max(l.id), 1) FROM kv_log l), (SELECT m.value FROM meta m WHERE m.name = 'epoch'),
        (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint # ('kv_log'::regclass::oid::bigint << 20)
    INTO head, epoch, server;
    moved := head - expected_head;
    IF (epoch, server) <> (expected_epoch, expected_server) OR moved < 0 OR moved > revisions_max THEN
        RETURN;
    END IF;
    IF moved > 0 THEN
        -- Rows that the caller has not read may be deleted already.
        IF (SELECT m.value FROM meta m WHERE m.name = 'purged_revision') > expected_head THEN
            RETURN;
        END IF;
        SELECT array_agg(l.key), sum(octet_length(l.key) + coalesce(octet_length(l.value), 0) + row_bytes)
        INTO others, size FROM kv_log l WHERE l.id > expected_head;
        SELECT count(*) INTO more FROM (SELECT 1 FROM kv_log_more l WHERE l.id > expected_head LIMIT more_max + 1) m;
        IF more > more_max THEN
            RETURN;
        END IF;
        IF more > 0 THEN
            SELECT others || array_agg(l.key), sum(octet_length(l.key) + coalesce(octet_length(l.value), 0) + row_bytes)
            INTO others, more_size FROM kv_log_more l WHERE l.id > expected_head;
            size := size + more_size;
        END IF;
        -- A set operation is hashed or sorted, so its time does not grow with the product of the two numbers of keys.
        IF EXISTS (SELECT unnest(others) INTERSECT SELECT unnest(read_keys)) THEN
            RETURN;
        END IF;
        IF cardinality(read_starts) > 0 AND EXISTS (
            SELECT 1 FROM unnest(others) AS o (key), unnest(read_starts, read_ends) AS r (range_start, range_end)
            WHERE o.key >= r.range_start AND (r.range_end IS NULL OR o.key < r.range_end)
        ) THEN
            RETURN;
        END IF;
    END IF;
    IF cardinality(grants) > 0 OR cardinality(expires) > 0 THEN
        PERFORM orlop_settle();
    END IF;
    IF cardinality(expires) > 0 THEN
        -- Locked, so that no renewal comes between this check and the deletion.
        PERFORM 1 FROM lease l WHERE l.id = ANY (expires) AND l.deadline <= clock_timestamp() ORDER BY l.id FOR UPDATE;
        GET DIAGNOSTICS due = ROW_COUNT;
        IF due < cardinality(expires) THEN
            RETURN;
        END IF;
    END IF;
    id := head;
    RETURN NEXT;
    IF moved > 0 AND size <= bytes_max THEN
        RETURN QUERY SELECT l.id, 0::bigint, l.key, l.value, l.lease, l.version, l.create_revision, l.prev_revision,
            l.deleted::int::bigint
        FROM kv_log l WHERE l.id > expected_head ORDER BY l.id;
        IF more > 0 THEN
            RETURN QUERY SELECT l.id, l.sub, l.key, l.value, l.lease, l.version, l.create_revision, l.prev_revision,
                l.deleted::int::bigint
            FROM kv_log_more l WHERE l.id > expected_head ORDER BY l.id, l.sub;
        END IF;
    END IF;
    IF cardinality(keys) > 0 THEN
        INSERT INTO kv_log (id, key, value, lease, version, create_revision, prev_revision, deleted)
        SELECT head + r.place, r.key, r.val, r.lease, r.version,
            r.create_revision + CASE WHEN r.create_revision > expected_head THEN moved ELSE 0 END,
            r.prev_revision + CASE WHEN r.prev_revision > expected_head THEN moved ELSE 0 END, r.deleted
        FROM unnest(keys, vals, leases, versions, creates, prevs, deletes) WITH ORDINALITY
            AS r (key, val, lease, version, create_revision, prev_revision, deleted, place);
    END IF;
    IF cardinality(more_ids) > 0 THEN
        INSERT INTO kv_log_more (id, sub, key, value, lease, version, create_revision, prev_revision, deleted)
        SELECT r.id + moved, r.sub, r.key, r.val, r.lease, r.version,
            r.create_revision + CASE WHEN r.create_revision > expected_head THEN moved ELSE 0 END,
            r.prev_revision + CASE WHEN r.prev_revision > expected_head THEN moved ELSE 0 END, r.deleted
        FROM unnest(more_ids, more_subs, more_keys, more_vals, more_leases, more_versions, more_creates, more_prevs,
            more_deletes) AS r (id, sub, key, val, lease, version, create_revision, prev_revision, deleted);
    END IF;
    IF cardinality(grants) > 0 OR cardinality(revokes) > 0 OR cardinality(expires) > 0 OR compact IS NOT NULL THEN
        DELETE FROM lease l WHERE l.id = ANY (revokes || expires);
        INSERT INTO lease (id, ttl, deadline)
        SELECT g.id, g.ttl, clock_timestamp() + make_interval(secs => g.ttl) FROM unnest(grants, ttls) AS g (id, ttl);
        IF compact IS NOT NULL THEN
            INSERT INTO meta AS m (name, value) VALUES ('compact_revision', compact)
            ON CONFLICT (name) DO UPDATE SET value = greatest(m.value, excluded.value);
        END IF;
        UPDATE meta m SET value = m.value + 1 WHERE m.name = 'epoch';
        PERFORM orlop_note_leases(expected_epoch + 1, revokes || expires || grants);
    END IF;
    -- A notification costs a lone append a fifth of its time and more. An append during which an instance joins does not
    -- notify that instance, which polls too.
    IF EXISTS (SELECT 1 FROM member m WHERE m.run <> own_run AND m.beat > clock_timestamp() - interval '1 minute') THEN
        PERFORM pg_notify('orlop_' || 'kv_log'::regclass::oid, (head + cardinality(keys))::text);
    END IF;
END
$$;

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
    id  bigint  PRIMARY KEY,
    at  bigint  NOT NULL,                      -- milliseconds since 1970, by this server's clock
    -- Whether nobody recorded times for a while before this moment. The revisions between a moment with a gap and the
    -- one before it were written at an unknown time between the two.
    gap boolean NOT NULL,
    -- Whether the moment before it has a later time, because the clock was set back.
    back boolean NOT NULL
);

CREATE INDEX kv_time_at ON kv_time (at);

CREATE INDEX kv_time_back ON kv_time (id) WHERE back;

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
        INSERT INTO kv_archive (id, sub, key, value, lease, version, create_revision, prev_revision, deleted, end_revision)
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

-- Deletes rows that the compaction at the revision `compacted` freed, on the server on which they were found. If there is
-- an archive, they were copied to it or given up.
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

-- Records the head and the time. If the clock was set back by up to a minute, the time stands still. A crash of the server
-- may lose the record, so that it costs no sync.
CREATE FUNCTION orlop_note_time(has_gap boolean) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    now_ms bigint := (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    last_id bigint := 0;
    last_ms bigint := 0;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT t.id, t.at INTO last_id, last_ms FROM kv_time t ORDER BY t.id DESC LIMIT 1;
    INSERT INTO kv_time (id, at, gap, back)
    SELECT h.id, CASE WHEN last_ms BETWEEN now_ms AND now_ms + 60000 THEN last_ms ELSE now_ms END, has_gap,
        coalesce(last_ms > now_ms + 60000, false)
    FROM (SELECT coalesce(max(l.id), 1) AS id FROM kv_log l) h
    WHERE h.id > coalesce(last_id, 0)
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
    first_time bigint;
    gone_ms   bigint;
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
    -- The times that remain begin above the deleted ones: otherwise a time that the clock has passed twice, of which the first
    -- was deleted, would seem certain.
    SELECT max(t.id) INTO first_time FROM kv_time t WHERE t.id <= first;
    -- OFFSET keeps Postgres from walking all times by their index.
    SELECT max(t.at) INTO gone_ms FROM (SELECT k.at FROM kv_time k WHERE k.id < first_time ORDER BY k.id OFFSET 0) t
    WHERE t.at <= (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    DELETE FROM kv_time t WHERE t.id < coalesce(
        (SELECT min(k.id) FROM kv_time k WHERE k.id >= first_time AND k.at > coalesce(gone_ms, k.at - 1)),
        (SELECT max(k.id) FROM kv_time k WHERE first_time IS NOT NULL));
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
