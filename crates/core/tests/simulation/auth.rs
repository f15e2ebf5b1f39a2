//! Users and roles of a run: every state that the log has contained, and whether a response fits to one of those on
//! which its request may have been served.

use std::sync::Arc;

use tokio::time::Instant;

use super::{
    calls::{Call, range},
    random::{below, percent, pick},
};
use orlop_core::{
    auth::{Access, AuthChange, AuthState, Authority, Caller, Credential, Error, Identity, Password, ROOT, Rights},
    store::request::{Consistency, Op, TxnRequest},
    types::KeyRange,
};

const USERS: [&str; 2] = ["u", "v"];
const ROLES: [&str; 2] = ["r", "s"];

/// Every state of users and roles, in order.
pub(super) struct AuthTruth {
    states: Vec<Landed>,
}

struct Landed {
    /// The change that led to it; `None` for the first state.
    change: Option<AuthChange>,
    authority: Authority,
    at: Instant,
    /// When a client first received the acknowledgement of this change or of a later one.
    shown: Option<Instant>,
}

impl AuthTruth {
    pub fn new(state: AuthState) -> Self {
        let now = Instant::now();
        let first = Landed { change: None, authority: Authority::from(state), at: now, shown: Some(now) };
        Self { states: vec![first] }
    }

    pub fn newest(&self) -> &AuthState {
        self.states[self.states.len() - 1].authority.state()
    }

    /// Applies a change. Checks that it leads from the newest state to `next`.
    pub fn land(&mut self, change: &AuthChange, next: &AuthState) {
        let mut expected = self.newest().clone();
        assert_eq!(expected.apply(change), Ok(true), "{change:?} is appended");
        assert_eq!(&expected, next, "after {change:?}");
        let authority = Authority::from(next.clone());
        self.states.push(Landed { change: Some(change.clone()), authority, at: Instant::now(), shown: None });
    }

    /// Checks the acknowledgement of a change that was sent at `since`.
    pub fn acknowledged(&mut self, change: &AuthChange, since: Instant) {
        let landed = |state: &Landed| state.change.as_ref() == Some(change) && state.at >= since;
        if let Some(place) = self.states.iter().position(landed) {
            let now = Instant::now();
            self.states[..=place].iter_mut().for_each(|state| _ = state.shown.get_or_insert(now));
        } else {
            let has_no_effect = |state: &Landed| state.authority.state().clone().apply(change) == Ok(false);
            assert!(self.possible(since).iter().any(has_no_effect), "{change:?} is acknowledged, but not in the log");
        }
    }

    /// Returns the states on which a request that was sent at `since` may have been served: none that is older than
    /// one that a client had seen before.
    fn possible(&self, since: Instant) -> &[Landed] {
        let first = self.states.iter().rposition(|state| state.shown.is_some_and(|shown| shown < since));
        &self.states[first.unwrap_or(0)..]
    }

    fn possible_for(&self, call: &Call, since: Instant) -> &[Landed] {
        let is_stale = match call {
            Call::Range(request) => request.consistency == Consistency::Serializable,
            Call::Txn(request) => request.is_serializable(),
            // An instance that has not read yet that Auth was enabled renews leases without asking the log.
            Call::KeepAlive(_) => self.states.iter().any(|state| !state.authority.state().enabled),
            Call::Put(_) | Call::Delete(_) | Call::Grant(..) | Call::Revoke(_) | Call::Leases => false,
            Call::Compact(..) | Call::Auth(_) | Call::PastPairs(..) | Call::PastChanges(..) => false,
        };
        if is_stale { &self.states } else { self.possible(since) }
    }

    /// Checks that a request that was served was permitted.
    pub fn check_served(&self, caller: &Caller, call: &Call, since: Instant) {
        let permits = |state: &Landed| permits(&state.authority, caller, call).is_ok();
        assert!(self.possible_for(call, since).iter().any(permits), "{call:?} by {caller:?} is served without rights");
    }

    /// Checks that a request was refused for a reason.
    pub fn check_refused(&self, caller: &Caller, call: &Call, error: Error, since: Instant) {
        let is_reason = |state: &Landed| {
            permits(&state.authority, caller, call) == Err(error)
                || (needs_keys_of_leases(call) && may_lack_keys(&state.authority, caller, error))
                || matches!(call, Call::Auth(change) if state.authority.state().clone().apply(change) == Err(error))
        };
        assert!(
            self.possible_for(call, since).iter().any(is_reason),
            "{call:?} by {caller:?} is refused without a reason: {error}"
        );
    }

    /// Returns a random caller, with a token that was given now or some changes ago.
    pub fn draw_caller(&self) -> Caller {
        let revision = self.newest().revision.saturating_sub(if percent(70) { 0 } else { below(4) as u64 });
        let credential = match below(10) {
            0..4 => return Caller::Server,
            4 => return Caller::Nobody,
            5..8 => Credential::SimpleToken { given_at: revision },
            8 => Credential::RevisionToken { revision },
            _ => Credential::Certificate,
        };
        Caller::User(Arc::new(Identity { user: pick(&USERS).to_owned(), credential }))
    }
}

/// Returns the state at the start of a run: two users, one of which may write everything, the other read everything.
pub(super) fn first_state() -> AuthState {
    let mut state = AuthState::default();
    let mut changes = vec![add_user(ROOT), grant_role(ROOT, ROOT)];
    for ((user, role), access) in USERS.into_iter().zip(ROLES).zip([Access::ReadWrite, Access::Read]) {
        let grant = AuthChange::GrantPermission { role: role.to_owned(), range: all(), access };
        changes.extend([add_user(user), AuthChange::AddRole { role: role.to_owned() }, grant, grant_role(user, role)]);
    }
    changes.push(AuthChange::Enable);
    for change in changes {
        state.apply(&change).expect("a valid change");
    }
    state
}

/// Returns a random change.
pub(super) fn draw_change() -> AuthChange {
    let (user, role) = (pick(&USERS).to_owned(), pick(&ROLES).to_owned());
    let range = if percent(60) { all() } else { range() };
    match below(20) {
        0..4 => {
            AuthChange::GrantPermission { role, range, access: pick(&[Access::Read, Access::Write, Access::ReadWrite]) }
        }
        4..8 => AuthChange::RevokePermission { role, range },
        8..11 => AuthChange::GrantRole { user, role },
        11..14 => AuthChange::RevokeRole { user, role },
        14 => AuthChange::DeleteUser { user },
        15..17 => add_user(&user),
        17 => AuthChange::SetPassword { user, password: Password::None },
        18 => AuthChange::Disable,
        _ => AuthChange::Enable,
    }
}

fn add_user(user: &str) -> AuthChange {
    AuthChange::AddUser { user: user.to_owned(), password: Password::None }
}

fn grant_role(user: &str, role: &str) -> AuthChange {
    AuthChange::GrantRole { user: user.to_owned(), role: role.to_owned() }
}

/// The range of all keys, as clients send it.
fn all() -> KeyRange {
    KeyRange::from_wire(b"\0", b"\0")
}

/// Returns whether a state permits a request, not considering the keys of leases.
fn permits(authority: &Authority, caller: &Caller, call: &Call) -> Result<(), Error> {
    match call {
        Call::Put(put) => permits_op(authority.rights(caller)?, &Op::Put(put.clone())),
        Call::Delete(delete) => permits_op(authority.rights(caller)?, &Op::Delete(delete.clone())),
        Call::Txn(txn) => permits_txn(authority.rights(caller)?, txn),
        Call::Range(range) => authority.rights(caller)?.check_read(&range.range),
        Call::PastPairs(range, _) | Call::PastChanges(range, ..) => authority.rights(caller)?.check_read(range),
        Call::KeepAlive(_) | Call::Leases => authority.rights(caller).map(drop),
        Call::Grant(..) | Call::Revoke(_) => authority.check_user(caller),
        Call::Compact(..) | Call::Auth(_) => authority.check_root(caller),
    }
}

fn permits_txn(rights: &Rights, txn: &TxnRequest) -> Result<(), Error> {
    txn.compares.iter().try_for_each(|compare| rights.check_read(&compare.range))?;
    txn.success.iter().chain(&txn.failure).try_for_each(|op| permits_op(rights, op))
}

fn permits_op(rights: &Rights, op: &Op) -> Result<(), Error> {
    let (range, prev_kv) = match op {
        Op::Range(range) => return rights.check_read(&range.range),
        Op::Txn(nested) => return permits_txn(rights, nested),
        Op::Put(put) => (KeyRange::Single(put.key[..].into()), put.prev_kv),
        Op::Delete(delete) => (delete.range.clone(), delete.prev_kv),
    };
    rights.check_write(&range)?;
    if prev_kv { rights.check_read(&range) } else { Ok(()) }
}

/// Returns whether a caller can be refused with this error because of the keys of a lease.
fn may_lack_keys(authority: &Authority, caller: &Caller, error: Error) -> bool {
    match authority.rights(caller) {
        Ok(Rights::Root) => false,
        Ok(Rights::Keys { .. }) => error == Error::PermissionDenied,
        Err(refused) => refused == error,
    }
}

fn needs_keys_of_leases(call: &Call) -> bool {
    matches!(call, Call::Put(_) | Call::Txn(_) | Call::Revoke(_) | Call::KeepAlive(_) | Call::Leases)
}
