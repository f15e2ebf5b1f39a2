-- Times after the clock of the server was set back.

-- Records the head and the time. A clock that was set back by more than a minute was wrong before. A crash of the server
-- may lose the record, so that it costs no sync.
CREATE OR REPLACE FUNCTION orlop_note_time(has_gap boolean) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    now_ms bigint := (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    last_id bigint := 0;
    last_ms bigint := 0;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT t.id, t.at INTO last_id, last_ms FROM kv_time t ORDER BY t.id DESC LIMIT 1;
    INSERT INTO kv_time (id, at, gap)
    SELECT h.id, CASE WHEN last_ms BETWEEN now_ms AND now_ms + 60000 THEN last_ms ELSE now_ms END, has_gap
    FROM (SELECT coalesce(max(l.id), 1) AS id FROM kv_log l) h
    WHERE h.id > coalesce(last_id, 0)
    ON CONFLICT DO NOTHING;
END
$$;
