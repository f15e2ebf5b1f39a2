-- A log that was restored while the server runs counts as another server's. Tables without a primary key can be
-- replicated.

-- Identifies the log: the run of the server, and the table. The number changes when the table is created again, and not
-- by VACUUM FULL, CLUSTER or REINDEX. An instance that finds another number than before compares the end of the log.
-- Instances that run during this migration do so once, and then continue.
CREATE OR REPLACE FUNCTION orlop_server() RETURNS bigint LANGUAGE sql AS $$
    SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint # ('kv_log'::regclass::oid::bigint << 20)
$$;

-- The functions of migrations 1 and 3 contain the number of the server, because a call would take 3 µs. Nothing else in
-- them changes.
DO $$
DECLARE
    start_time CONSTANT text := '(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint';
    log_table  CONSTANT text := '(''kv_log''::regclass::oid::bigint << 20)';
    definition text;
    name       text;
BEGIN
    FOREACH name IN ARRAY ARRAY ['orlop_append', 'orlop_append_behind'] LOOP
        definition := pg_get_functiondef(name::regproc);
        IF strpos(definition, start_time) = 0 THEN
            RAISE 'the function % does not contain %', name, start_time;
        END IF;
        EXECUTE replace(definition, start_time, start_time || ' # ' || log_table);
    END LOOP;
END
$$;

-- Logical replication sends a DELETE of a table without a primary key only if the whole row identifies it.
ALTER TABLE auth_permission REPLICA IDENTITY FULL;
ALTER TABLE auth_token_key REPLICA IDENTITY FULL;
