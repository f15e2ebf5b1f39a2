//! Users, roles and what they permit.
//!
//! The state is a pure value: it needs no clock, log or lock. Facts about etcd's Auth are held by the differential test.

mod key_set;

use std::collections::{BTreeMap, BTreeSet};

pub use self::key_set::KeySet;
use crate::types::KeyRange;

/// Name of the user that must exist, and of the role that permits everything.
pub const ROOT: &str = "root";

/// A user's password, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Password {
    /// A bcrypt hash.
    Hash(String),
    /// The user can only be identified by a client certificate.
    None,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub password: Password,
    pub roles: BTreeSet<String>,
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

/// Errors of changes. The texts are etcd's, without the prefix `etcdserver: `.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("root user does not exist")]
    RootUserNotExist,
    #[error("root user does not have root role")]
    RootRoleNotExist,
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
        let has_effect = match change {
            AuthChange::Enable => return self.enable(),
            AuthChange::Disable => std::mem::replace(&mut self.enabled, false),
            AuthChange::AddUser { user, .. } if user.is_empty() => return Err(Error::UserEmpty),
            AuthChange::AddUser { user, .. } if self.users.contains_key(user) => return Err(Error::UserAlreadyExist),
            AuthChange::AddUser { user, password } => {
                let added = User { password: password.clone(), roles: BTreeSet::new() };
                self.users.insert(user.clone(), added);
                true
            }
            AuthChange::DeleteUser { user } => {
                if self.enabled && user == ROOT {
                    return Err(Error::InvalidAuthManagement);
                }
                self.users.remove(user).map(|_| true).ok_or(Error::UserNotFound)?
            }
            AuthChange::SetPassword { user, password } => {
                self.user_mut(user)?.password = password.clone();
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
            AuthChange::GrantPermission { range, .. } if range.is_empty() => return Err(Error::InvalidAuthManagement),
            AuthChange::GrantPermission { role, range, access } => {
                self.role_mut(role)?.insert(range.clone(), *access) != Some(*access)
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

    fn user_mut(&mut self, user: &str) -> Result<&mut User, Error> {
        self.users.get_mut(user).ok_or(Error::UserNotFound)
    }

    fn role_mut(&mut self, role: &str) -> Result<&mut Permissions, Error> {
        self.roles.get_mut(role).ok_or(Error::RoleNotFound)
    }

    /// Returns what a user may do; `None` if there is no such user.
    pub fn rights(&self, user: &str) -> Option<Rights> {
        let user = self.users.get(user)?;
        if user.roles.contains(ROOT) {
            return Some(Rights::Root);
        }
        let granted = || user.roles.iter().filter_map(|role| self.roles.get(role)).flatten();
        let ranges = |allows: fn(Access) -> bool| {
            granted().filter(move |(_, access)| allows(**access)).map(|(range, _)| range).collect()
        };
        Some(Rights::Keys { read: ranges(Access::reads), write: ranges(Access::writes) })
    }
}

/// What a user may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rights {
    /// The user has the role `root`: everything.
    Root,
    Keys {
        read: KeySet,
        write: KeySet,
    },
}

impl Rights {
    pub fn may_read(&self, range: &KeyRange) -> bool {
        match self {
            Self::Root => true,
            Self::Keys { read, .. } => read.contains(range),
        }
    }

    pub fn may_write(&self, range: &KeyRange) -> bool {
        match self {
            Self::Root => true,
            Self::Keys { write, .. } => write.contains(range),
        }
    }
}

#[cfg(test)]
mod tests;
