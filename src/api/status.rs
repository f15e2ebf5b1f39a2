//! The table of errors: the gRPC code and the text of each, as in etcd.

use tonic::{Code, Status};

use orlop_core::{auth, overload::REQUEST_TIME_MAX, store, watch::NotCreated};

/// The text for [`store::Error::Stopped`].
const SERVER_STOPPED: &str = "etcdserver: server stopped";
/// The text for [`store::Error::Compacted`].
pub(super) const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";
/// The reason for which a watch of no key is not created.
pub(super) const WATCH_RANGE_EMPTY: &str = "mvcc: watcher range is empty";
/// The text for a log in at a server that cannot sign tokens.
pub const VERIFY_ONLY_KEY: &str = "auth: token signing attempted with verify-only key";

/// An error that is not one of the store: etcd's code and text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal(Code, &'static str);

impl From<Refusal> for Status {
    fn from(Refusal(code, text): Refusal) -> Self {
        Self::new(code, text)
    }
}

pub const AUTH_NOT_ENABLED: Refusal = Refusal(Code::FailedPrecondition, "etcdserver: authentication is not enabled");
pub const NO_PASSWORD_USER: Refusal =
    Refusal(Code::Unknown, "auth: authentication failed, password was given for no password user");
pub const WRONG_PASSWORD: Refusal =
    Refusal(Code::InvalidArgument, "etcdserver: authentication failed, invalid user ID or password");
pub const PERMISSION_NOT_GIVEN: Refusal = Refusal(Code::InvalidArgument, "etcdserver: permission not given");
pub const MEMBER_NOT_FOUND: Refusal = Refusal(Code::NotFound, "etcdserver: member not found");
pub const MEMBER_NOT_LEARNER: Refusal =
    Refusal(Code::FailedPrecondition, "etcdserver: can only promote a learner member");
pub const MEMBER_URLS_INVALID: Refusal = Refusal(Code::InvalidArgument, "etcdserver: given member URLs are invalid");
pub const NOT_ENOUGH_MEMBERS: Refusal =
    Refusal(Code::FailedPrecondition, "etcdserver: re-configuration failed due to not enough started members");
pub const NOT_LEADER: Refusal = Refusal(Code::FailedPrecondition, "etcdserver: not leader");
pub const BAD_LEADER_TRANSFEREE: Refusal = Refusal(Code::FailedPrecondition, "etcdserver: bad leader transferee");
pub const NO_DOWNGRADE: Refusal = Refusal(Code::FailedPrecondition, "etcdserver: no inflight downgrade job");
pub const DOWNGRADE_FORMAT: Refusal =
    Refusal(Code::InvalidArgument, "etcdserver: wrong downgrade target version format");
pub const DOWNGRADE_TARGET: Refusal = Refusal(Code::InvalidArgument, "etcdserver: invalid downgrade target version");
pub const DEADLINE_EXCEEDED: Refusal = Refusal(Code::DeadlineExceeded, "context deadline exceeded");
pub const LOCK_SESSION_EXPIRED: Refusal = Refusal(Code::Unknown, "mutex: session is expired");
pub const ELECTION_NO_LEADER: Refusal = Refusal(Code::Unknown, "election: no leader");
pub const ELECTION_NOT_LEADER: Refusal = Refusal(Code::Unknown, "election: not leader");
pub const ELECTION_LEADER_MISSING: Refusal = Refusal(Code::Unknown, "\"leader\" field must be provided");

/// A request that is invalid in any state of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Invalid {
    KeyMissing,
    ValueProvided,
    LeaseProvided,
    SortOption,
    TooManyOps,
    DuplicateKey,
    /// An operation of a transaction without a request. etcd returns this text.
    EmptyOp,
    TooLarge,
}

impl Invalid {
    const fn text(self) -> &'static str {
        match self {
            Self::KeyMissing => "etcdserver: key is not provided",
            Self::ValueProvided => "etcdserver: value is provided",
            Self::LeaseProvided => "etcdserver: lease is provided",
            Self::SortOption => "etcdserver: invalid sort option",
            Self::TooManyOps => "etcdserver: too many operations in txn request",
            Self::DuplicateKey => "etcdserver: duplicate key given in txn request",
            Self::EmptyOp => "etcdserver: key not found",
            Self::TooLarge => "etcdserver: request is too large",
        }
    }
}

impl From<Invalid> for Status {
    fn from(invalid: Invalid) -> Self {
        Self::invalid_argument(invalid.text())
    }
}

/// Returns the status of an error of the store. Usage: `map_err(from_store)`.
pub fn from_store(error: store::Error) -> Status {
    use store::Error;
    let (code, text) = match error {
        Error::Compacted => (Code::OutOfRange, COMPACTED),
        Error::FutureRevision => (Code::OutOfRange, "etcdserver: mvcc: required revision is a future revision"),
        Error::KeyNotFound => (Code::InvalidArgument, "etcdserver: key not found"),
        Error::LeaseNotFound => (Code::NotFound, "etcdserver: requested lease not found"),
        Error::LeaseExists => (Code::FailedPrecondition, "etcdserver: lease already exists"),
        Error::LeaseTtlTooLarge => (Code::OutOfRange, "etcdserver: too large lease TTL"),
        Error::TooManyRequests => (Code::ResourceExhausted, "etcdserver: too many requests"),
        Error::NoSpace => (Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded"),
        Error::OutcomeUnknown => (Code::Unavailable, "etcdserver: request timed out"),
        Error::Unavailable => (Code::Unavailable, "etcdserver: no leader"),
        Error::Stopped => (Code::Unavailable, SERVER_STOPPED),
        Error::Corrupt => (Code::DataLoss, "etcdserver: corrupt cluster"),
        Error::Refused(reason) => {
            return Status::failed_precondition(format!("orlop: the database refused the request: {reason}"));
        }
        Error::Auth(error) => return Status::new(auth_code(error), format!("etcdserver: {error}")),
    };
    Status::new(code, text)
}

/// Returns the code of an error about users and roles. Its text is etcd's.
fn auth_code(error: auth::Error) -> Code {
    use auth::Error;
    match error {
        Error::PermissionDenied => Code::PermissionDenied,
        Error::InvalidToken => Code::Unauthenticated,
        Error::OldRevision | Error::UserEmpty | Error::RoleEmpty | Error::InvalidAuthManagement => {
            Code::InvalidArgument
        }
        Error::RootUserNotExist
        | Error::RootRoleNotExist
        | Error::UserAlreadyExist
        | Error::UserNotFound
        | Error::RoleAlreadyExist
        | Error::RoleNotFound
        | Error::RoleNotGranted
        | Error::PermissionNotGranted => Code::FailedPrecondition,
    }
}

/// Returns the `cancel_reason` of a watch that was not created.
pub(super) fn cancel_reason(reason: NotCreated) -> String {
    match reason {
        NotCreated::DuplicateId => "mvcc: duplicate watch ID provided on the WatchStream".to_owned(),
        NotCreated::TooManyRequests => too_many_requests().message().to_owned(),
        NotCreated::Other(text) => text.into_owned(),
    }
}

/// Returns the error of a request that was rejected because a memory limit is reached.
pub fn too_many_requests() -> Status {
    from_store(store::Error::TooManyRequests)
}

/// Returns the error of a request whose message did not arrive in time.
pub fn request_too_late() -> Status {
    Status::deadline_exceeded(format!("orlop: the message was not complete within {REQUEST_TIME_MAX:?}"))
}

/// Returns whether a status is that of [`store::Error::Stopped`].
pub fn is_stopped(status: &Status) -> bool {
    status.code() == Code::Unavailable && status.message() == SERVER_STOPPED
}

/// Returns the error of a request that panicked.
pub fn panicked() -> Status {
    Status::internal("orlop: internal error; see the server's log")
}

/// Returns etcd's error for a method that a service does not have.
pub fn unknown_method(path: &str) -> Status {
    let (service, method) = path.trim_start_matches('/').split_once('/').unwrap_or((path, ""));
    Status::unimplemented(format!("unknown method {method} for service {service}"))
}

/// Returns the error of a message that is too long, with the text of etcd's gRPC library.
pub fn message_too_large(bytes: usize, bytes_max: usize) -> Status {
    Status::resource_exhausted(format!("grpc: received message larger than max ({bytes} vs. {bytes_max})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients parse etcd's texts.
    #[test]
    fn errors_have_etcds_codes_and_texts() {
        use store::Error;
        let table = [
            (Error::Compacted, Code::OutOfRange, "mvcc: required revision has been compacted"),
            (Error::FutureRevision, Code::OutOfRange, "mvcc: required revision is a future revision"),
            (Error::KeyNotFound, Code::InvalidArgument, "key not found"),
            (Error::LeaseNotFound, Code::NotFound, "requested lease not found"),
            (Error::LeaseExists, Code::FailedPrecondition, "lease already exists"),
            (Error::LeaseTtlTooLarge, Code::OutOfRange, "too large lease TTL"),
            (Error::TooManyRequests, Code::ResourceExhausted, "too many requests"),
            (Error::NoSpace, Code::ResourceExhausted, "mvcc: database space exceeded"),
            (Error::OutcomeUnknown, Code::Unavailable, "request timed out"),
            (Error::Unavailable, Code::Unavailable, "no leader"),
            (Error::Stopped, Code::Unavailable, "server stopped"),
            (Error::Corrupt, Code::DataLoss, "corrupt cluster"),
            (auth::Error::PermissionDenied.into(), Code::PermissionDenied, "permission denied"),
            (auth::Error::OldRevision.into(), Code::InvalidArgument, "revision of auth store is old"),
            (auth::Error::InvalidToken.into(), Code::Unauthenticated, "invalid auth token"),
            (auth::Error::RootUserNotExist.into(), Code::FailedPrecondition, "root user does not exist"),
            (auth::Error::RootRoleNotExist.into(), Code::FailedPrecondition, "root user does not have root role"),
            (auth::Error::UserEmpty.into(), Code::InvalidArgument, "user name is empty"),
            (auth::Error::UserAlreadyExist.into(), Code::FailedPrecondition, "user name already exists"),
            (auth::Error::UserNotFound.into(), Code::FailedPrecondition, "user name not found"),
            (auth::Error::RoleEmpty.into(), Code::InvalidArgument, "role name is empty"),
            (auth::Error::RoleAlreadyExist.into(), Code::FailedPrecondition, "role name already exists"),
            (auth::Error::RoleNotFound.into(), Code::FailedPrecondition, "role name not found"),
            (auth::Error::RoleNotGranted.into(), Code::FailedPrecondition, "role is not granted to the user"),
            (
                auth::Error::PermissionNotGranted.into(),
                Code::FailedPrecondition,
                "permission is not granted to the role",
            ),
            (auth::Error::InvalidAuthManagement.into(), Code::InvalidArgument, "invalid auth management"),
        ];
        for (error, code, text) in table {
            let status = from_store(error);
            assert_eq!((status.code(), status.message()), (code, format!("etcdserver: {text}").as_str()));
        }
        let refused = from_store(Error::Refused("a reason".to_owned()));
        let text = "orlop: the database refused the request: a reason";
        assert_eq!((refused.code(), refused.message()), (Code::FailedPrecondition, text));
    }
}
