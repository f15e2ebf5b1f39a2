//! Errors of sqlx: their texts, and the errors of the log that they become.

use orlop_core::log::Error;
use sqlx::postgres::PgDatabaseError;

/// Returns the text of an error for the operator. For an error of Postgres, sqlx adds a line number of Postgres' source
/// code, which is omitted.
pub(super) fn describe(error: &sqlx::Error) -> String {
    if let Some(error) = error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>()) {
        return error.message().to_owned();
    }
    // Without sqlx's introductions, which tell an operator nothing.
    if let sqlx::Error::Configuration(error) = error {
        return error.to_string();
    }
    if let sqlx::Error::Io(error) = error { error.to_string() } else { error.to_string() }
}

/// Carries the error of a row in an error of sqlx, so that a read has one type of error. Such a read is not retried.
/// [`unavailable`] returns the error of the row.
pub(super) fn in_row(error: Error) -> sqlx::Error {
    sqlx::Error::Decode(Box::new(error))
}

/// Returns the error of a row that [`in_row`] has carried.
pub(super) fn of_row(error: &sqlx::Error) -> Option<Error> {
    if let sqlx::Error::Decode(source) = error { source.downcast_ref::<Error>().cloned() } else { None }
}

pub(super) fn unavailable(error: sqlx::Error) -> Error {
    of_row(&error).unwrap_or_else(|| Error::Unavailable(describe(&error)))
}

pub(super) fn corrupt(error: sqlx::Error) -> Error {
    Error::Corrupt(describe(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_row_stays_corrupt() {
        let damaged = unavailable(in_row(Error::Corrupt("row 5".to_owned())));
        assert!(matches!(&damaged, Error::Corrupt(text) if text == "row 5"), "{damaged}");
        let other = unavailable(sqlx::Error::Decode("not a number".into()));
        assert!(matches!(other, Error::Unavailable(_)), "{other}");
    }
}
