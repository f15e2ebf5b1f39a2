-- Users, who may be permitted what by their roles.
CREATE TABLE auth_user (
    name        TEXT    PRIMARY KEY,
    password    TEXT,                          -- bcrypt hash; NULL: known by a client certificate only
    tokens_from INTEGER NOT NULL               -- auth revision; tokens given before it are not valid
) STRICT, WITHOUT ROWID;

CREATE TABLE auth_role (
    name TEXT PRIMARY KEY
) STRICT, WITHOUT ROWID;

-- The roles of users. The role root permits everything, also without a row in auth_role.
CREATE TABLE auth_user_role (
    user_name TEXT NOT NULL,
    role      TEXT NOT NULL,
    PRIMARY KEY (user_name, role)
) STRICT, WITHOUT ROWID;

-- What roles permit. No two rows have the same role, key and range_end. There is no unique index, because keys can be
-- longer than an entry of an index on Postgres.
CREATE TABLE auth_permission (
    role      TEXT NOT NULL,
    key       BLOB NOT NULL,
    range_end BLOB NOT NULL,                   -- empty: the key alone; one zero byte: all keys from key on
    access    TEXT NOT NULL                    -- read, write, readwrite
) STRICT;

CREATE INDEX auth_permission_role ON auth_permission (role);

-- The key that signs tokens, one row. Whoever knows it can act as any user.
CREATE TABLE auth_token_key (
    key BLOB NOT NULL
) STRICT;

INSERT INTO auth_token_key (key) VALUES (randomblob(32));

-- Facts in meta: auth_enabled is 0 or 1; auth_revision counts changes of users and roles. Without them Auth is disabled,
-- and the revision is 1.
