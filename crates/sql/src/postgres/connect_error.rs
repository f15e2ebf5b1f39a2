//! What the error of an attempt to connect means: whether another attempt may succeed, and whether room for connections is
//! missing. Errors of statements on an open connection have other meanings.

use std::fmt;

use super::{
    connection::{is_refusal, sqlstate},
    primary::Refusal,
};

/// With this code, Supavisor reports all of its errors, such as too many clients. It is Postgres' code for internal errors.
const OF_POOLER: &str = "XX000";
/// With this code, PgBouncer reports most of its errors.
const OF_PGBOUNCER: &str = "08P01";
/// A part of the names of PgBouncer's limits on clients, which its errors contain: `max_client_conn`,
/// `max_db_client_connections` and `max_user_client_connections`.
const LIMIT_OF_PGBOUNCER: &str = "client_conn";

/// The errors of several hosts.
#[derive(Debug)]
pub(super) struct NoPrimary {
    pub(super) text: String,
    /// Whether one of the hosts had no resources for a connection.
    pub(super) lacks_resources: bool,
}

impl fmt::Display for NoPrimary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for NoPrimary {}

/// Returns whether the server refused a connection for a reason that does not pass, other than its current role, which may
/// change.
pub(super) fn is_final(error: &sqlx::Error) -> bool {
    let is_of_role = matches!(error, sqlx::Error::Configuration(error) if error.is::<Refusal>());
    is_refusal(error) && !is_of_role && sqlstate(error).as_deref() != Some(OF_POOLER)
}

/// Returns whether the server or a pooler has no resources for a further connection, in most cases because of a limit on their
/// number. An error of a pooler that does not tell its reason counts as one.
pub(super) fn lacks_resources(error: &sqlx::Error) -> bool {
    if let sqlx::Error::Io(error) = error {
        let of_hosts = error.get_ref().and_then(|error| error.downcast_ref::<NoPrimary>());
        return of_hosts.is_some_and(|of_hosts| of_hosts.lacks_resources);
    }
    let Some(error) = error.as_database_error() else { return false };
    match error.code().as_deref() {
        Some(OF_POOLER) => true,
        Some(OF_PGBOUNCER) => error.message().contains(LIMIT_OF_PGBOUNCER),
        code => code.is_some_and(|code| code.starts_with("53")),
    }
}

#[cfg(test)]
mod tests {
    use std::{borrow::Cow, error::Error, fmt};

    use sqlx::error::{DatabaseError, ErrorKind};

    use super::{NoPrimary, Refusal, is_final, lacks_resources};

    /// An error of a server or a pooler: its code and its text.
    #[derive(Debug)]
    struct Answer(&'static str, &'static str);

    impl fmt::Display for Answer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.1)
        }
    }

    impl Error for Answer {}

    impl DatabaseError for Answer {
        fn message(&self) -> &str {
            self.1
        }

        fn code(&self) -> Option<Cow<'_, str>> {
            Some(self.0.into())
        }

        fn as_error(&self) -> &(dyn Error + Send + Sync + 'static) {
            self
        }

        fn as_error_mut(&mut self) -> &mut (dyn Error + Send + Sync + 'static) {
            self
        }

        fn into_error(self: Box<Self>) -> Box<dyn Error + Send + Sync + 'static> {
            self
        }

        fn kind(&self) -> ErrorKind {
            ErrorKind::Other
        }
    }

    #[test]
    fn answers_of_servers_and_poolers() {
        // The code, the text, whether it is final, and whether room is missing.
        for (code, text, ends, room) in [
            ("28P01", "password authentication failed for user \"u\"", true, false),
            ("3D000", "database \"d\" does not exist", true, false),
            ("57P03", "the database system is starting up", false, false),
            ("53300", "too many connections for role \"u\"", false, true),
            ("XX000", "MaxClientsInSessionMode: max clients reached", false, true),
            ("08P01", "no more connections allowed (max_client_conn)", false, true),
            ("08P01", "client connections exceeded (max_db_client_connections)", false, true),
            ("08P01", "client connections exceeded (max_user_client_connections)", false, true),
            ("08P01", "server login failed", false, false),
        ] {
            let error = sqlx::Error::Database(Box::new(Answer(code, text)));
            assert_eq!((is_final(&error), lacks_resources(&error)), (ends, room), "{code} {text}");
        }
    }

    #[test]
    fn errors_without_an_answer() {
        let of_hosts = |lacks_resources| {
            sqlx::Error::Io(std::io::Error::other(NoPrimary { text: String::new(), lacks_resources }))
        };
        for (error, ends, room) in [
            (sqlx::Error::Io(std::io::ErrorKind::ConnectionRefused.into()), false, false),
            (sqlx::Error::Configuration("a wrong address".into()), true, false),
            (sqlx::Error::Configuration(Box::new(Refusal::Standby)), false, false),
            (of_hosts(true), false, true),
            (of_hosts(false), false, false),
        ] {
            assert_eq!((is_final(&error), lacks_resources(&error)), (ends, room), "{error:?}");
        }
    }
}
