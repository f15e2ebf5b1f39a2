-- Times that were recorded by a clock that was ahead.

-- Records the head and the time. If the clock was set back by more than a minute while times were recorded, it was ahead:
-- what has a later time was written by now. After more than a day, or a gap, the clock of now may be the wrong one, and the
-- times stay as they are: retention must not delete rows because of it. A crash of the server may lose the record, so that it
-- costs no sync.
CREATE OR REPLACE FUNCTION orlop_note_time(has_gap boolean) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    now_ms bigint := (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    last_id bigint := 0;
    last_ms bigint := 0;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    IF NOT has_gap THEN
        UPDATE kv_time SET at = now_ms, gap = true
        WHERE at > now_ms AND (SELECT max(t.at) FROM kv_time t) BETWEEN now_ms + 60001 AND now_ms + 86400000;
    END IF;
    SELECT t.id, t.at INTO last_id, last_ms FROM kv_time t ORDER BY t.id DESC LIMIT 1;
    INSERT INTO kv_time (id, at, gap)
    SELECT h.id, CASE WHEN last_ms BETWEEN now_ms AND now_ms + 60000 THEN last_ms ELSE now_ms END, has_gap
    FROM (SELECT coalesce(max(l.id), 1) AS id FROM kv_log l) h
    WHERE h.id > coalesce(last_id, 0)
    ON CONFLICT DO NOTHING;
END
$$;
