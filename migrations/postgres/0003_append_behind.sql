-- Compare-and-append, also behind changes of other instances. An instance without others calls orlop_append, which takes
-- less time.
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
-- The advisory lock excludes other appends until this transaction has committed, and the statements after it see all
-- that they committed: a VOLATILE function takes a snapshot for each of its statements, but only at READ COMMITTED.
-- The comparison with the head, instead of the primary key, refuses an instance that was paused until the rows above
-- its head had been written and compacted away.
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
        (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint
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
    END IF;
    -- A notification costs a lone append a fifth of its time and more. An append during which an instance joins does not
    -- notify that instance, which polls too.
    IF EXISTS (SELECT 1 FROM member m WHERE m.run <> own_run AND m.beat > clock_timestamp() - interval '1 minute') THEN
        PERFORM pg_notify('orlop_' || 'kv_log'::regclass::oid, (head + cardinality(keys))::text);
    END IF;
END
$$;
