-- Nobody recorded times for a while before this moment (1) or somebody did (0). The revisions between a moment with a gap and
-- the one before it were written at an unknown time between the two.
ALTER TABLE kv_time ADD COLUMN gap INTEGER NOT NULL DEFAULT 0;
