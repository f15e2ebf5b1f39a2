//! Users, roles and what they permit.
//!
//! Everything here is a pure value: it needs no clock, log or lock. [`AuthState`] is what the log stores, [`Authority`]
//! answers whether a [`Caller`] may do something.

mod authority;
mod key_set;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

pub use self::{
    authority::{Authority, Caller, Credential, Identity, Rights},
    key_set::KeySet,
};
use crate::types::KeyRange;

/// Name of the user that must exist, and of the role that permits everything.
pub const ROOT: &str = "root";

/// A user's password, as it is stored.
#[derive(Clone, PartialEq, Eq)]
pub enum Password {
    /// A bcrypt hash.
    Hash(String),
    /// The user can only be identified by a client certificate.
    None,
}

impl Password {
    /// Returns a hash that no password has: nobody can log in with a password until it is changed.
    pub fn locked() -> Self {
        Self::Hash(format!("$2a$10${}", ".".repeat(53)))
    }
}

/// Hashes are not logged.
impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hash(_) => "Hash",
            Self::None => "None",
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub password: Password,
    pub roles: BTreeSet<String>,
    /// The auth revision from which tokens of this user are valid. Earlier tokens were given before the user was
    /// added, the password was changed, or Auth was disabled.
    pub tokens_from: u64,
}

/// What a permission allows with its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
    ReadWrite,
}

impl Access {
    fn reads(self) -> bool {
        matches!(self, Self::Read | Self::ReadWrite)
    }

    fn writes(self) -> bool {
        matches!(self, Self::Write | Self::ReadWrite)
    }
}

/// The permissions of a role, by range.
pub type Permissions = BTreeMap<KeyRange, Access>;

/// One change of users, roles or of the switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthChange {
    Enable,
    Disable,
    AddUser { user: String, password: Password },
    DeleteUser { user: String },
    SetPassword { user: String, password: Password },
    GrantRole { user: String, role: String },
    RevokeRole { user: String, role: String },
    AddRole { role: String },
    DeleteRole { role: String },
    GrantPermission { role: String, range: KeyRange, access: Access },
    RevokePermission { role: String, range: KeyRange },
}

impl AuthChange {
    /// Approximate size in memory.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Enable | Self::Disable => 0,
            Self::AddUser { user: name, .. }
            | Self::DeleteUser { user: name }
            | Self::SetPassword { user: name, .. }
            | Self::AddRole { role: name }
            | Self::DeleteRole { role: name } => name.len(),
            Self::GrantRole { user, role } | Self::RevokeRole { user, role } => user.len() + role.len(),
            Self::GrantPermission { role, range, .. } | Self::RevokePermission { role, range } => {
                let end = match range {
                    KeyRange::Span { end: Some(end), .. } => end.len(),
                    KeyRange::Single(_) | KeyRange::Span { end: None, .. } => 0,
                };
                role.len() + range.start().len() + end
            }
        }
    }
}

/// Why a change or a request was refused. The texts are etcd's, without the prefix `etcdserver: `.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The caller may not do this, or is not a user.
    #[error("permission denied")]
    PermissionDenied,
    /// The token was given for an earlier auth revision: the caller has to authenticate again.
    #[error("revision of auth store is old")]
    OldRevision,
    /// The token is unknown, expired or no longer valid.
    #[error("invalid auth token")]
    InvalidToken,
    #[error("root user does not exist")]
    RootUserNotExist,
    #[error("root user does not have root role")]
    RootRoleNotExist,
    /// A user to add has no name, or the caller is nobody.
    #[error("user name is empty")]
    UserEmpty,
    #[error("user name already exists")]
    UserAlreadyExist,
    #[error("user name not found")]
    UserNotFound,
    #[error("role name is empty")]
    RoleEmpty,
    #[error("role name already exists")]
    RoleAlreadyExist,
    #[error("role name not found")]
    RoleNotFound,
    #[error("role is not granted to the user")]
    RoleNotGranted,
    #[error("permission is not granted to the role")]
    PermissionNotGranted,
    #[error("invalid auth management")]
    InvalidAuthManagement,
}

/// All users and roles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthState {
    pub enabled: bool,
    /// Starts at 1. Each change increases it by 1, except enabling and changes without an effect.
    pub revision: u64,
    pub users: BTreeMap<String, User>,
    pub roles: BTreeMap<String, Permissions>,
}

impl Default for AuthState {
    fn default() -> Self {
        Self { enabled: false, revision: 1, users: BTreeMap::new(), roles: BTreeMap::new() }
    }
}

impl AuthState {
    /// Applies a change. Returns whether it had an effect.
    ///
    /// # Errors
    ///
    /// If etcd refuses the change; the state is then as before.
    pub fn apply(&mut self, change: &AuthChange) -> Result<bool, Error> {
        let next = self.revision + 1;
        let has_effect = match change {
            AuthChange::Enable => return self.enable(),
            AuthChange::Disable => self.disable(next),
            AuthChange::AddUser { user, .. } if user.is_empty() => return Err(Error::UserEmpty),
            AuthChange::AddUser { user, .. } if self.users.contains_key(user) => return Err(Error::UserAlreadyExist),
            AuthChange::AddUser { user, password } => {
                let added = User { password: password.clone(), roles: BTreeSet::new(), tokens_from: next };
                self.users.insert(user.clone(), added).is_none()
            }
            AuthChange::DeleteUser { user } => {
                if self.enabled && user == ROOT {
                    return Err(Error::InvalidAuthManagement);
                }
                self.users.remove(user).map(|_| true).ok_or(Error::UserNotFound)?
            }
            AuthChange::SetPassword { user, password } => {
                let user = self.user_mut(user)?;
                // As in etcd, a user that was added without a password stays without.
                if user.password != Password::None {
                    user.password = password.clone();
                }
                user.tokens_from = next;
                true
            }
            AuthChange::GrantRole { user, role } => {
                let exists = role == ROOT || self.roles.contains_key(role);
                let user = self.user_mut(user)?;
                if !exists {
                    return Err(Error::RoleNotFound);
                }
                user.roles.insert(role.clone())
            }
            AuthChange::RevokeRole { user, role } => {
                if self.enabled && user == ROOT && role == ROOT {
                    return Err(Error::InvalidAuthManagement);
                }
                let was_granted = self.user_mut(user)?.roles.remove(role);
                was_granted.then_some(true).ok_or(Error::RoleNotGranted)?
            }
            AuthChange::AddRole { role } if role.is_empty() => return Err(Error::RoleEmpty),
            AuthChange::AddRole { role } if self.roles.contains_key(role) => return Err(Error::RoleAlreadyExist),
            AuthChange::AddRole { role } => self.roles.insert(role.clone(), Permissions::new()).is_none(),
            AuthChange::DeleteRole { role } => {
                if self.enabled && role == ROOT {
                    return Err(Error::InvalidAuthManagement);
                }
                self.roles.remove(role).ok_or(Error::RoleNotFound)?;
                for user in self.users.values_mut() {
                    user.roles.remove(role);
                }
                true
            }
            AuthChange::GrantPermission { range, .. } if !is_permission(range) => {
                return Err(Error::InvalidAuthManagement);
            }
            AuthChange::GrantPermission { role, range, access } => {
                self.role_mut(role)?.insert(range.clone(), *access);
                true
            }
            AuthChange::RevokePermission { role, range } => {
                self.role_mut(role)?.remove(range).map(|_| true).ok_or(Error::PermissionNotGranted)?
            }
        };
        self.revision += u64::from(has_effect);
        Ok(has_effect)
    }

    fn enable(&mut self) -> Result<bool, Error> {
        let root = self.users.get(ROOT).ok_or(Error::RootUserNotExist)?;
        if !root.roles.contains(ROOT) {
            return Err(Error::RootRoleNotExist);
        }
        Ok(!std::mem::replace(&mut self.enabled, true))
    }

    fn disable(&mut self, next: u64) -> bool {
        let was_enabled = std::mem::replace(&mut self.enabled, false);
        if was_enabled {
            self.users.values_mut().for_each(|user| user.tokens_from = next);
        }
        was_enabled
    }

    fn user_mut(&mut self, user: &str) -> Result<&mut User, Error> {
        self.users.get_mut(user).ok_or(Error::UserNotFound)
    }

    fn role_mut(&mut self, role: &str) -> Result<&mut Permissions, Error> {
        self.roles.get_mut(role).ok_or(Error::RoleNotFound)
    }
}

/// Returns whether a permission may have this range: it has a key, and is not empty.
pub fn is_permission(range: &KeyRange) -> bool {
    !range.start().is_empty() && !range.is_empty()
}

#[cfg(test)]
mod tests;
