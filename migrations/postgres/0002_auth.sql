-- Users, who may be permitted what by their roles.
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

-- The key that signs tokens, one row. Whoever knows it can act as any user.
CREATE TABLE auth_token_key (
    key bytea NOT NULL
);

-- A random UUID has 122 random bits from the server's strong source.
INSERT INTO auth_token_key (key) VALUES (uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()));

-- Facts in meta: auth_enabled is 0 or 1; auth_revision counts changes of users and roles. Without them Auth is disabled,
-- and the revision is 1.

-- As orlop_append, for changes that the caller makes itself, in the same transaction, if this returns true.
CREATE FUNCTION orlop_advance_epoch(
    expected_head bigint, expected_epoch bigint, expected_server bigint, own_run bigint
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF NOT orlop_append(expected_head, expected_epoch, expected_server, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}',
        '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', NULL, own_run) THEN
        RETURN false;
    END IF;
    UPDATE meta SET value = value + 1 WHERE name = 'epoch';
    RETURN true;
END
$$;
