-- Moments at which it is known that times are missing.

-- Whether nobody recorded times for a while before this moment. The revisions between a moment with a gap and the one before
-- it were written at an unknown time between the two.
ALTER TABLE kv_time ADD COLUMN gap boolean NOT NULL DEFAULT false;

-- Records the head and the time. A crash of the server may lose it, so that it costs no sync.
CREATE FUNCTION orlop_note_time(has_gap boolean) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO kv_time (id, at, gap)
    SELECT h.id, greatest((extract(epoch FROM clock_timestamp()) * 1000)::bigint, (SELECT max(t.at) FROM kv_time t)), has_gap
    FROM (SELECT coalesce(max(l.id), 1) AS id FROM kv_log l) h
    WHERE h.id > coalesce((SELECT max(t.id) FROM kv_time t), 0)
    ON CONFLICT DO NOTHING;
END
$$;

-- For an older Orlop during a rolling update.
CREATE OR REPLACE FUNCTION orlop_note_time() RETURNS void LANGUAGE sql AS $$
    SELECT orlop_note_time(false)
$$;
