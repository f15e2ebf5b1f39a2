//! Users and roles as of the last applied change, and the requests that change and read them.

use std::sync::{Arc, atomic::Ordering};

use super::{error::Result, handle::Store, shared::Shared, write_request::Request};
use crate::{
    auth::{AuthChange, AuthState, Authority, Caller},
    log::AuthMark,
    sync::{AtomicBool, RwLock},
    types::{KeyRange, LeaseId, Revision},
};

/// The current [`Authority`]. It is replaced under the lock of the lease table, because both belong to one epoch.
#[derive(Default)]
pub(super) struct CurrentAuthority {
    /// Whether Auth is enabled. While it is not, requests read nothing else.
    is_enabled: AtomicBool,
    current: RwLock<Arc<Authority>>,
}

impl CurrentAuthority {
    pub(super) fn get(&self) -> Arc<Authority> {
        Arc::clone(&self.current.read())
    }

    /// Returns the authority that has to permit requests; `None` while Auth is disabled.
    pub(super) fn if_enabled(&self) -> Option<Arc<Authority>> {
        self.is_enabled.load(Ordering::Acquire).then(|| self.get())
    }

    pub(super) fn set(&self, state: AuthState) {
        let is_enabled = state.enabled;
        *self.current.write() = Arc::new(Authority::from(state));
        self.is_enabled.store(is_enabled, Ordering::Release);
    }

    /// Returns whether this is the state that `mark` identifies.
    pub(super) fn is_at(&self, mark: AuthMark) -> bool {
        AuthMark::of(self.current.read().state()) == mark
    }
}

impl Shared {
    /// Checks that the caller may read every key of the range.
    pub(super) fn check_read(&self, caller: &Caller, range: &KeyRange) -> Result<()> {
        if let Some(authority) = self.authority.if_enabled() {
            authority.rights(caller)?.check_read(range)?;
        }
        Ok(())
    }

    /// Checks that the caller is a user, as of the last applied change.
    pub(super) fn check_user(&self, caller: &Caller) -> Result<()> {
        if let Some(authority) = self.authority.if_enabled() {
            authority.check_user(caller)?;
        }
        Ok(())
    }
}

impl Store {
    /// Returns users and roles as of the last applied change.
    pub fn authority(&self) -> Arc<Authority> {
        self.shared.authority.get()
    }

    /// Returns whether Auth is enabled.
    pub fn is_auth_enabled(&self) -> bool {
        self.shared.authority.is_enabled.load(Ordering::Acquire)
    }

    /// Returns users and roles, including every change that any instance acknowledged before the call.
    pub async fn confirmed_authority(&self) -> Result<Arc<Authority>> {
        self.confirm().await?;
        Ok(self.authority())
    }

    /// Changes users and roles, or enables or disables Auth. The caller needs the role `root`. Returns the head.
    pub async fn change_auth(&self, caller: &Caller, change: AuthChange) -> Result<Revision> {
        self.submit_for_revision(caller, Request::Auth(change)).await
    }

    /// Checks that the caller may do what only the role `root` permits. What is read after it includes every change that any
    /// instance acknowledged before the call.
    pub async fn check_root(&self, caller: &Caller) -> Result<()> {
        Ok(self.confirmed_authority().await?.check_root(caller)?)
    }

    /// Checks that the caller is a user. See [`Store::check_root`].
    pub async fn check_user(&self, caller: &Caller) -> Result<()> {
        Ok(self.confirmed_authority().await?.check_user(caller)?)
    }

    /// Checks that the caller is a user, as of the last applied change: one whom this instance knows is answered without the
    /// database. Another one may have been added at another instance.
    pub async fn check_known_user(&self, caller: &Caller) -> Result<()> {
        if self.authority().check_user(caller).is_ok() { Ok(()) } else { self.check_user(caller).await }
    }

    /// Checks that the caller may read every key of the range, for a watch.
    pub async fn check_watch(&self, caller: &Caller, range: &KeyRange) -> Result<()> {
        if self.is_auth_enabled() {
            self.confirm().await?;
        }
        self.shared.check_read(caller, range)
    }

    /// Checks that the caller may renew a lease: it needs the right to write all of its keys.
    pub(super) async fn check_lease(&self, caller: &Caller, id: LeaseId) -> Result<()> {
        if !self.is_auth_enabled() {
            return Ok(());
        }
        self.confirm().await?;
        let leases = self.shared.leases.lock();
        let authority = self.shared.authority.get();
        Ok(authority.rights(caller)?.check_write_keys(leases.keys(id))?)
    }
}
