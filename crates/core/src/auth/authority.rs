//! Who may do what: the answer of one auth revision.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, OnceLock},
};

use super::{Access, AuthState, Error, KeySet, ROOT, User};
use crate::types::{Key, KeyRange};

/// Who sends a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Caller {
    /// The server itself.
    Server,
    /// A client without a token and without a certificate.
    #[default]
    Nobody,
    User(Arc<Identity>),
}

/// A user, as shown by a token or a certificate. Whether that user exists is not checked yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub user: String,
    pub credential: Credential,
}

/// What showed who the user is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credential {
    /// A token that follows changes of the user's rights, given at this auth revision.
    SimpleToken {
        given_at: u64,
    },
    /// A token that is good for one auth revision only.
    RevisionToken {
        revision: u64,
    },
    Certificate,
}

/// The users and roles of one auth revision, and what each user may do.
#[derive(Debug, Default)]
pub struct Authority {
    state: AuthState,
    /// What every request needs of each user.
    users: HashMap<String, Known>,
}

#[derive(Debug)]
struct Known {
    tokens_from: u64,
    /// Computed when they are first needed. Users with the same roles share them.
    rights: Arc<OnceLock<Rights>>,
}

impl From<AuthState> for Authority {
    fn from(state: AuthState) -> Self {
        Self { users: known_users(&state), state }
    }
}

fn known_users(state: &AuthState) -> HashMap<String, Known> {
    let mut by_roles: HashMap<&BTreeSet<String>, Arc<OnceLock<Rights>>> = HashMap::new();
    let mut known = HashMap::new();
    for (name, user) in &state.users {
        let rights = Arc::clone(by_roles.entry(&user.roles).or_default());
        known.insert(name.clone(), Known { tokens_from: user.tokens_from, rights });
    }
    known
}

impl Authority {
    pub fn state(&self) -> &AuthState {
        &self.state
    }

    /// Returns what a caller may do with keys.
    ///
    /// # Errors
    ///
    /// If the caller is nobody, or the credential is no longer valid, or there is no such user.
    pub fn rights(&self, caller: &Caller) -> Result<&Rights, Error> {
        if !self.state.enabled {
            return Ok(&Rights::Root);
        }
        let identity = match caller {
            Caller::Server => return Ok(&Rights::Root),
            Caller::Nobody => return Err(Error::UserEmpty),
            Caller::User(identity) => identity,
        };
        if let Credential::RevisionToken { revision } = identity.credential
            && revision < self.state.revision
        {
            // etcd takes revision 0 for a caller without a name.
            return Err(if revision == 0 { Error::UserEmpty } else { Error::OldRevision });
        }
        let known = self.known(identity)?;
        Ok(known.rights.get_or_init(|| self.compute(&identity.user)))
    }

    /// Checks that the caller has the role `root`. As in etcd, a token for an earlier revision suffices.
    ///
    /// # Errors
    ///
    /// If the caller is nobody, or the credential is no longer valid, or the user lacks the role.
    pub fn check_root(&self, caller: &Caller) -> Result<(), Error> {
        match self.known_user(caller)? {
            Some(user) if !user.roles.contains(ROOT) => Err(Error::PermissionDenied),
            _ => Ok(()),
        }
    }

    /// Checks that the caller is a user.
    ///
    /// # Errors
    ///
    /// If the caller is nobody, or the credential is no longer valid, or there is no such user.
    pub fn check_user(&self, caller: &Caller) -> Result<(), Error> {
        self.known_user(caller).map(drop)
    }

    /// Returns whether the caller may read a user's roles: as the user itself, or with the role `root`.
    pub fn check_reads_user(&self, caller: &Caller, user: &str) -> Result<(), Error> {
        self.check_root(caller).or_else(|error| match caller {
            Caller::User(identity) if identity.user == user => self.check_user(caller),
            Caller::Server | Caller::Nobody | Caller::User(_) => Err(error),
        })
    }

    /// Returns whether the caller may read a role's permissions: if it was granted to the user, or with the role
    /// `root`.
    pub fn check_reads_role(&self, caller: &Caller, role: &str) -> Result<(), Error> {
        self.check_root(caller).or_else(|error| match self.known_user(caller) {
            Ok(Some(user)) if user.roles.contains(role) => Ok(()),
            _ => Err(error),
        })
    }

    /// Returns the caller's user, or `None` if the caller may do everything.
    fn known_user(&self, caller: &Caller) -> Result<Option<&User>, Error> {
        match caller {
            _ if !self.state.enabled => Ok(None),
            Caller::Server => Ok(None),
            Caller::Nobody => Err(Error::UserEmpty),
            Caller::User(identity) => {
                self.known(identity)?;
                self.state.users.get(&identity.user).ok_or(Error::PermissionDenied).map(Some)
            }
        }
    }

    fn known(&self, identity: &Identity) -> Result<&Known, Error> {
        let known = self.users.get(&identity.user);
        match identity.credential {
            Credential::SimpleToken { given_at } => {
                known.filter(|known| known.tokens_from <= given_at).ok_or(Error::InvalidToken)
            }
            Credential::RevisionToken { .. } | Credential::Certificate => known.ok_or(Error::PermissionDenied),
        }
    }

    fn compute(&self, user: &str) -> Rights {
        let Some(user) = self.state.users.get(user) else {
            return Rights::Keys { read: KeySet::default(), write: KeySet::default() };
        };
        if user.roles.contains(ROOT) {
            return Rights::Root;
        }
        let granted = || user.roles.iter().filter_map(|role| self.state.roles.get(role)).flatten();
        let ranges = |allows: fn(Access) -> bool| {
            granted().filter(move |(_, access)| allows(**access)).map(|(range, _)| range).collect()
        };
        Rights::Keys { read: ranges(Access::reads), write: ranges(Access::writes) }
    }
}

/// What a user may do with keys.
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
    /// # Errors
    ///
    /// [`Error::PermissionDenied`] if the user may not read every key of the range.
    pub fn check_read(&self, range: &KeyRange) -> Result<(), Error> {
        self.check(|read, _| read.contains(range))
    }

    /// # Errors
    ///
    /// [`Error::PermissionDenied`] if the user may not write every key of the range.
    pub fn check_write(&self, range: &KeyRange) -> Result<(), Error> {
        self.check(|_, write| write.contains(range))
    }

    /// Like [`Self::check_read`], for one key.
    pub fn check_read_key(&self, key: &[u8]) -> Result<(), Error> {
        self.check(|read, _| read.contains_key(key))
    }

    /// Like [`Self::check_read`], for each of the keys.
    pub fn check_read_keys(&self, keys: &BTreeSet<Key>) -> Result<(), Error> {
        self.check(|read, _| read.outside(keys).next().is_none())
    }

    /// Like [`Self::check_write`], for one key.
    pub fn check_write_key(&self, key: &[u8]) -> Result<(), Error> {
        self.check(|_, write| write.contains_key(key))
    }

    /// Like [`Self::check_write`], for each of the keys.
    pub fn check_write_keys(&self, keys: &BTreeSet<Key>) -> Result<(), Error> {
        self.check(|_, write| write.outside(keys).next().is_none())
    }

    /// Checks the keys that the user may read and write, in this order. The role `root` needs no check.
    fn check(&self, permits: impl FnOnce(&KeySet, &KeySet) -> bool) -> Result<(), Error> {
        match self {
            Self::Keys { read, write } if !permits(read, write) => Err(Error::PermissionDenied),
            Self::Root | Self::Keys { .. } => Ok(()),
        }
    }
}
