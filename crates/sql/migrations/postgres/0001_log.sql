-- One row a revision: the first (for most transactions the only) change that a transaction made.
-- Rows are only ever appended, and deleted by compaction; no column of a row changes. The newest row is never deleted,
-- so max(id) is the store's revision. There is no index but the primary key: Orlop keeps key -> revisions in memory.
CREATE TABLE kv_log (
    id              bigint  PRIMARY KEY,       -- the revision, without gaps; the empty store stands at 1
    key             bytea   NOT NULL,
    value           bytea,                     -- NULL for a delete
    lease           bigint  NOT NULL,          -- 0: none
    version         bigint  NOT NULL,          -- puts since the key was created, from 1; 0 for a delete
    create_revision bigint  NOT NULL,          -- id of the key's first put since it was last absent; 0 for a delete
    prev_revision   bigint  NOT NULL,          -- id of the version that this change replaced; 0: there was none
    deleted         boolean NOT NULL           -- this change deleted the key
);

-- The second and further changes of a transaction, in their order. id is the transaction's revision.
CREATE TABLE kv_log_more (
    id              bigint  NOT NULL,
    sub             bigint  NOT NULL,          -- from 1
    key             bytea   NOT NULL,
    value           bytea,
    lease           bigint  NOT NULL,
    version         bigint  NOT NULL,
    create_revision bigint  NOT NULL,
    prev_revision   bigint  NOT NULL,
    deleted         boolean NOT NULL,
    PRIMARY KEY (id, sub)
);

-- Every change in order, for people with a SQL prompt.
CREATE VIEW kv_events AS
    SELECT id, 0::bigint AS sub, key, value, lease, version, create_revision, prev_revision, deleted FROM kv_log
    UNION ALL
    SELECT id, sub, key, value, lease, version, create_revision, prev_revision, deleted FROM kv_log_more;

-- Leases that were granted and neither revoked nor expired. Which keys hang on one is told by kv_log.
CREATE TABLE lease (
    id       bigint      PRIMARY KEY,
    ttl      bigint      NOT NULL,             -- seconds, as granted
    deadline timestamptz NOT NULL              -- by this server's clock, which all instances go by
);

-- Instances of Orlop that serve this log. One that has not been heard of for some seconds is gone.
CREATE TABLE member (
    id          bigint      PRIMARY KEY,
    name        text        NOT NULL,
    client_urls text[]      NOT NULL,
    run         bigint      NOT NULL,          -- another number at each start
    started     timestamptz NOT NULL,
    beat        timestamptz NOT NULL           -- when it was last heard of
);

-- Facts about the store.
CREATE TABLE meta (
    name  text   PRIMARY KEY,
    value bigint NOT NULL
);

INSERT INTO meta (name, value) VALUES
    ('cluster_id', ('x' || substr(md5(random()::text || clock_timestamp()::text), 1, 15))::bit(60)::bigint),
    ('epoch', 0),                              -- counts appends that changed leases or alarms or recorded a compaction
    ('purged_revision', 0),                    -- the compact revision of the newest compaction that deleted rows
    ('last_beat', 0);                          -- microseconds since 1970: when any instance was last heard of
    -- compact_revision joins them with the first compaction, alarm/KIND/MEMBER with an alarm.

-- The lock under which the log is appended to. Its number is told apart from other programs' by the table's.
CREATE FUNCTION orlop_lock() RETURNS void LANGUAGE sql AS
    'SELECT pg_advisory_xact_lock((1869771888::bigint << 32) | ''kv_log''::regclass::oid::bigint)';

-- The channel on which appends are told.
CREATE FUNCTION orlop_channel() RETURNS text LANGUAGE sql AS
    'SELECT ''orlop_'' || ''kv_log''::regclass::oid';

-- Which run of which server this is. A failover or a restart gives another number.
CREATE FUNCTION orlop_server() RETURNS bigint LANGUAGE sql AS
    'SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint';

-- Sees to it that deadlines mean what they say, before any is made or looked at.
--
-- Instances beat every second. So where the last beat is long ago, or still to come, either none was there, and leases do
-- not run down while none is there to renew them; or the server's clock was set. All deadlines are moved by as much.
CREATE FUNCTION orlop_settle() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    free_secs CONSTANT double precision := 2;  -- a shorter silence counts, and a smaller jump is not noticed
    silence   double precision;
BEGIN
    SELECT extract(epoch FROM clock_timestamp()) - value / 1000000.0 INTO silence FROM meta
    WHERE name = 'last_beat' AND value > 0;
    IF silence IS NULL OR abs(silence) <= free_secs THEN
        RETURN;
    END IF;
    -- Another may have done it in the meantime.
    SELECT extract(epoch FROM clock_timestamp()) - value / 1000000.0 INTO silence FROM meta
    WHERE name = 'last_beat' FOR UPDATE;
    IF abs(silence) > free_secs THEN
        UPDATE lease SET deadline = deadline + make_interval(secs => silence);
        IF silence < 0 THEN
            UPDATE member SET
                started = started + make_interval(secs => silence), beat = beat + make_interval(secs => silence);
        END IF;
        UPDATE meta SET value = (extract(epoch FROM clock_timestamp()) * 1000000)::bigint WHERE name = 'last_beat';
    END IF;
END
$$;

-- Leases with the seconds that they have left, those that are unknown left out; if told to, with their whole time before
-- them again, unless it is over. Locked in one order, so that two instances that renew the same do not wait for one another.
--
-- Each time is for a little more, which nobody is told of, and within which nothing is written for who renews again: that is
-- a commit less.
CREATE FUNCTION orlop_leases(ids bigint[], renew boolean) RETURNS TABLE (id bigint, ttl bigint, secs_left double precision)
LANGUAGE plpgsql AS $$
DECLARE
    spare CONSTANT interval := '0.1 seconds';
BEGIN
    PERFORM orlop_settle();
    -- An update that finds nothing to do costs as much as all of the rest.
    IF renew AND EXISTS (
        SELECT FROM lease k WHERE k.id = ANY (ids)
            AND k.deadline > clock_timestamp() AND k.deadline < clock_timestamp() + make_interval(secs => k.ttl)
    ) THEN
        UPDATE lease l SET deadline = clock_timestamp() + make_interval(secs => l.ttl) + spare
        WHERE l.id IN (
            SELECT k.id FROM lease k
            WHERE k.id = ANY (ids) AND k.deadline < clock_timestamp() + make_interval(secs => k.ttl)
            ORDER BY k.id FOR UPDATE
        ) AND l.deadline > clock_timestamp();
    END IF;
    RETURN QUERY SELECT l.id, l.ttl, least(extract(epoch FROM l.deadline - clock_timestamp())::float8, l.ttl) FROM lease l
    WHERE l.id = ANY (ids);
END
$$;

-- Compare-and-append. Adds all of it and returns true if the log stands where the caller expects it; else adds nothing.
--
-- The lock keeps rivals out until this transaction has committed, and the statement behind it sees all that they committed
-- before: a VOLATILE function takes a snapshot for each of its statements, but only at READ COMMITTED. Comparing with the
-- head, and not leaving it to the primary key, is what holds off an instance that was paused until the rows above its head
-- had been written and compacted away.
-- What the other functions here do is written out where every append needs it: a call of one costs as much as an insert.
CREATE FUNCTION orlop_append(
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
        RAISE 'orlop_append needs transaction isolation read committed, not %', current_setting('transaction_isolation');
    END IF;
    PERFORM pg_advisory_xact_lock((1869771888::bigint << 32) | 'kv_log'::regclass::oid::bigint);
    SELECT (SELECT coalesce(max(l.id), 1) FROM kv_log l), (SELECT m.value FROM meta m WHERE m.name = 'epoch'),
        (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint
    INTO head, epoch, server;
    IF (head, epoch, server) <> (expected_head, expected_epoch, expected_server) THEN
        RETURN false;
    END IF;
    IF cardinality(grants) > 0 OR cardinality(expires) > 0 THEN
        PERFORM orlop_settle();
    END IF;
    IF cardinality(expires) > 0 THEN
        -- Locked, so that no renewal comes between the look and the deletion.
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
        DELETE FROM lease l WHERE l.id = ANY (revokes) OR l.id = ANY (expires);
        INSERT INTO lease (id, ttl, deadline)
        SELECT g.id, g.ttl, clock_timestamp() + make_interval(secs => g.ttl) FROM unnest(grants, ttls) AS g (id, ttl);
        IF compact IS NOT NULL THEN
            INSERT INTO meta AS m (name, value) VALUES ('compact_revision', compact)
            ON CONFLICT (name) DO UPDATE SET value = greatest(m.value, excluded.value);
        END IF;
        UPDATE meta m SET value = m.value + 1 WHERE m.name = 'epoch';
    END IF;
    -- Told to nobody, it costs a lone append a fifth of its time and more. One under way while an instance joins is not told to it:
    -- that one looks from time to time, too.
    IF EXISTS (SELECT 1 FROM member m WHERE m.run <> own_run AND m.beat > clock_timestamp() - interval '1 minute') THEN
        PERFORM pg_notify('orlop_' || 'kv_log'::regclass::oid, (expected_head + cardinality(keys))::text);
    END IF;
    RETURN true;
END
$$;

-- As orlop_append, for a fact that tells of an alarm: it is set or, without a value, removed.
CREATE FUNCTION orlop_alarm(
    expected_head bigint, expected_epoch bigint, expected_server bigint, fact text, fact_value bigint, own_run bigint
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF NOT orlop_append(expected_head, expected_epoch, expected_server, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}',
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

-- Deletes rows that a compaction at the revision `compacted` freed, on the server that they were found on.
CREATE FUNCTION orlop_purge(
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

-- Says that an instance lives. Returns the run under which its name was last heard of.
CREATE FUNCTION orlop_beat(
    member_id bigint, member_name text, member_urls text[], member_run bigint
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    heard bigint;
BEGIN
    PERFORM 1 FROM meta WHERE name = 'last_beat' FOR UPDATE;
    PERFORM orlop_settle();
    UPDATE meta SET value = greatest(value, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
    WHERE name = 'last_beat';
    SELECT run INTO heard FROM member WHERE id = member_id;
    INSERT INTO member AS m (id, name, client_urls, run, started, beat)
    VALUES (member_id, member_name, member_urls, member_run, clock_timestamp(), clock_timestamp())
    ON CONFLICT (id) DO UPDATE SET
        name = excluded.name, client_urls = excluded.client_urls, run = excluded.run, beat = excluded.beat,
        started = CASE WHEN m.run = excluded.run THEN m.started ELSE excluded.started END;
    DELETE FROM member WHERE beat < clock_timestamp() - interval '1 hour';
    RETURN heard;
END
$$;
