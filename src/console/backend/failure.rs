//! Why a page cannot be shown: the answers of servers, by what a visitor can do about them.

use orlop_client::{Error, describe};
use tonic::{Code, Status};

use crate::insight::ONLY_ROOT;

/// Why a page cannot be shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::console) enum Failure {
    /// The user has to log in, for the first time or again.
    LoggedOut,
    /// The user's rights do not suffice; the server's text.
    Denied(String),
    /// The request is not valid.
    Invalid(String),
    /// The server does not answer.
    Unavailable(String),
    /// What was requested does not exist, or not any more.
    Missing(String),
    /// The form is not from a page of this process, or the session has changed.
    Forged,
    /// Too many event streams are open.
    TooMany,
    /// Too many large pages are made or not read yet.
    Busy,
}

/// etcd's answers to a request without a user, to one with an invalid token, and to one with a token of before a change of
/// the users.
const NOT_LOGGED_IN: [&str; 3] = ["user name is empty", "invalid auth token", "revision of auth store is old"];

impl Failure {
    /// Returns the failure that a text describes: why figures or a part of them cannot be read, which [`describe`] has made
    /// of a status, or why the server has refused a watch.
    pub fn of_text(reason: String) -> Self {
        if reason.starts_with("Unauthenticated") || NOT_LOGGED_IN.iter().any(|known| reason.contains(known)) {
            return Self::LoggedOut;
        }
        if reason == ONLY_ROOT || reason.contains("permission denied") {
            return Self::Denied(reason);
        }
        Self::Unavailable(reason)
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let text = status.message().to_owned();
        if status.code() == Code::Unauthenticated || NOT_LOGGED_IN.iter().any(|known| text.contains(known)) {
            return Self::LoggedOut;
        }
        if status.code() == Code::PermissionDenied {
            return Self::Denied(text);
        }
        if status.code() == Code::OutOfRange {
            return Self::Missing(text);
        }
        if status.code() == Code::InvalidArgument {
            return Self::Invalid(text);
        }
        Self::Unavailable(describe(&status))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Request { error, .. } => Self::of_text(error),
            Error::Flags(_) | Error::Connect { .. } | Error::LogIn { .. } => Self::Unavailable(error.to_string()),
        }
    }
}

/// Returns whether users have to log in, from the failure of a request without a user.
pub(super) fn must_log_in(failure: Status) -> Result<bool, Failure> {
    let failure = Failure::from(failure);
    if matches!(failure, Failure::LoggedOut | Failure::Denied(_)) { Ok(true) } else { Err(failure) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_tokens_require_a_log_in() {
        for (code, text, is_logged_out) in [
            (Code::Unauthenticated, "etcdserver: invalid auth token", true),
            (Code::Unauthenticated, "etcdserver: another text", true),
            (Code::InvalidArgument, "etcdserver: user name is empty", true),
            (Code::InvalidArgument, "etcdserver: revision of auth store is old", true),
            (Code::InvalidArgument, "etcdserver: key is not provided", false),
            (Code::Unavailable, "etcdserver: request timed out", false),
        ] {
            let status = Status::new(code, text);
            let of_text = Failure::of_text(describe(&status));
            let of_figures = Error::Request { endpoint: "http://a:1".to_owned(), error: describe(&status) };
            let failures = [of_text, of_figures.into(), status.into()].map(|failure| failure == Failure::LoggedOut);
            assert_eq!(failures, [is_logged_out; 3], "{code:?} {text}");
        }
    }

    #[test]
    fn failure_of_a_server_is_no_reason_to_log_in() {
        for (code, text, expected) in [
            (Code::InvalidArgument, "etcdserver: user name is empty", Some(true)),
            (Code::Unauthenticated, "etcdserver: invalid auth token", Some(true)),
            (Code::PermissionDenied, "etcdserver: permission denied", Some(true)),
            (Code::Unavailable, "etcdserver: request timed out", None),
            (Code::Unknown, "grpc-status header missing, mapped from HTTP status code 500", None),
            (Code::Internal, "h2 protocol error", None),
            (Code::Unimplemented, "", None),
            (Code::ResourceExhausted, "etcdserver: too many requests", None),
        ] {
            assert_eq!(must_log_in(Status::new(code, text)).ok(), expected, "{code:?} {text}");
        }
    }

    #[test]
    fn refusals_require_a_log_in_or_a_right() {
        let code = |code: &str, text: &str| format!("rpc error: code = {code} desc = etcdserver: {text}");
        let [denied, other] = [code("PermissionDenied", "permission denied"), "the watch ended".to_owned()];
        let of_etcd = describe(&Status::permission_denied("etcdserver: permission denied"));
        for (reason, expected) in [
            (code("Unauthenticated", "invalid auth token"), Failure::LoggedOut),
            (code("InvalidArgument", "revision of auth store is old"), Failure::LoggedOut),
            (denied.clone(), Failure::Denied(denied)),
            (ONLY_ROOT.to_owned(), Failure::Denied(ONLY_ROOT.to_owned())),
            (of_etcd.clone(), Failure::Denied(of_etcd)),
            (other.clone(), Failure::Unavailable(other)),
        ] {
            assert_eq!(Failure::of_text(reason.clone()), expected, "{reason}");
        }
    }
}
