//! The Auth service: users, roles, and whether they are checked.

use tonic::{Request, Response, Status};

use super::{
    Context,
    convert::{access, listed},
    status::{NO_PASSWORD_USER, PERMISSION_NOT_GIVEN, from_store},
};
use crate::{auth::sent_hash, net::Remote};
use orlop_core::{
    auth::{AuthChange, Caller, Error, Password, ROOT},
    types::{KeyRange, Revision},
};
use orlop_wire::proto::server::{
    authpb::{Permission, permission::Type},
    etcdserverpb::{self as pb, auth_server::Auth},
};

/// Maximum size of the name of a user or a role.
const NAME_BYTES_MAX: usize = 1_024;

impl Context {
    /// Changes users and roles as the caller of a request. An invalid request is refused after a caller without rights.
    async fn change<T>(
        &self,
        request: Request<T>,
        change: impl FnOnce(T) -> Result<AuthChange, Status>,
    ) -> Result<Option<pb::ResponseHeader>, Status> {
        let caller = self.caller_of(&request).await?;
        match change(request.into_inner()) {
            Ok(change) => self.change_as(&caller, change).await,
            Err(invalid) => {
                self.store.check_root(&caller).await.map_err(from_store)?;
                Err(invalid)
            }
        }
    }

    async fn change_as(&self, caller: &Caller, change: AuthChange) -> Result<Option<pb::ResponseHeader>, Status> {
        let revision: Revision = self.store.change_auth(caller, change).await.map_err(from_store)?;
        Ok(self.header(revision))
    }

    /// Returns the hash of a password, for a caller that may change users: hashing takes long.
    async fn hash(&self, caller: &Caller, remote: Option<&Remote>, password: String) -> Result<Password, Status> {
        self.store.check_root(caller).await.map_err(from_store)?;
        Ok(Password::Hash(self.authenticator.passwords.hash(remote, password).await?))
    }
}

#[tonic::async_trait]
impl Auth for Context {
    async fn auth_enable(
        &self,
        request: Request<pb::AuthEnableRequest>,
    ) -> Result<Response<pb::AuthEnableResponse>, Status> {
        let header = self.change(request, |_| Ok(AuthChange::Enable)).await?;
        Ok(Response::new(pb::AuthEnableResponse { header }))
    }

    async fn auth_disable(
        &self,
        request: Request<pb::AuthDisableRequest>,
    ) -> Result<Response<pb::AuthDisableResponse>, Status> {
        let header = self.change(request, |_| Ok(AuthChange::Disable)).await?;
        Ok(Response::new(pb::AuthDisableResponse { header }))
    }

    async fn auth_status(
        &self,
        request: Request<pb::AuthStatusRequest>,
    ) -> Result<Response<pb::AuthStatusResponse>, Status> {
        self.check_root(&request).await?;
        let (authority, header) = (self.store.authority(), self.header(self.store.head()));
        let state = authority.state();
        Ok(Response::new(pb::AuthStatusResponse { header, enabled: state.enabled, auth_revision: state.revision }))
    }

    async fn authenticate(
        &self,
        request: Request<pb::AuthenticateRequest>,
    ) -> Result<Response<pb::AuthenticateResponse>, Status> {
        let remote = request.extensions().get::<Remote>().cloned();
        let pb::AuthenticateRequest { name, password } = request.into_inner();
        let token = self.authenticator.log_in(&self.store, remote.as_ref(), &name, password).await?;
        Ok(Response::new(pb::AuthenticateResponse { header: self.header(self.store.head()), token }))
    }

    async fn user_add(
        &self,
        request: Request<pb::AuthUserAddRequest>,
    ) -> Result<Response<pb::AuthUserAddResponse>, Status> {
        let (caller, remote) = (self.caller_of(&request).await?, request.extensions().get::<Remote>().cloned());
        let pb::AuthUserAddRequest { name: user, password, options, .. } = request.into_inner();
        check_name(&user)?;
        let password = match options {
            Some(options) if options.no_password => Password::None,
            // As in etcd, the field hashedPassword is used only when a password is changed.
            _ => self.hash(&caller, remote.as_ref(), password).await?,
        };
        let header = self.change_as(&caller, AuthChange::AddUser { user, password }).await?;
        Ok(Response::new(pb::AuthUserAddResponse { header }))
    }

    async fn user_list(
        &self,
        request: Request<pb::AuthUserListRequest>,
    ) -> Result<Response<pb::AuthUserListResponse>, Status> {
        self.check_root(&request).await?;
        let users = self.store.authority().state().users.keys().cloned().collect();
        Ok(Response::new(pb::AuthUserListResponse { header: self.header(self.store.head()), users }))
    }

    async fn user_get(
        &self,
        request: Request<pb::AuthUserGetRequest>,
    ) -> Result<Response<pb::AuthUserGetResponse>, Status> {
        let caller = self.caller_of(&request).await?;
        let user = request.into_inner().name;
        let authority = self.store.confirmed_authority().await.map_err(from_store)?;
        authority.check_reads_user(&caller, &user).map_err(refused)?;
        let user = authority.state().users.get(&user).ok_or(Error::UserNotFound).map_err(refused)?;
        let (header, roles) = (self.header(self.store.head()), user.roles.iter().cloned().collect());
        Ok(Response::new(pb::AuthUserGetResponse { header, roles }))
    }

    async fn user_delete(
        &self,
        request: Request<pb::AuthUserDeleteRequest>,
    ) -> Result<Response<pb::AuthUserDeleteResponse>, Status> {
        let header = self.change(request, |request| Ok(AuthChange::DeleteUser { user: request.name })).await?;
        Ok(Response::new(pb::AuthUserDeleteResponse { header }))
    }

    async fn user_change_password(
        &self,
        request: Request<pb::AuthUserChangePasswordRequest>,
    ) -> Result<Response<pb::AuthUserChangePasswordResponse>, Status> {
        let (caller, remote) = (self.caller_of(&request).await?, request.extensions().get::<Remote>().cloned());
        let pb::AuthUserChangePasswordRequest { name: user, password, hashed_password } = request.into_inner();
        let password = if password.is_empty() && hashed_password.is_empty() {
            // As in etcd, an empty password opens no account here: a script may have lost the new one.
            Password::locked()
        } else if password.is_empty() {
            self.store.check_root(&caller).await.map_err(from_store)?;
            // etcd also takes what is no hash of bcrypt, and the account is locked.
            Password::Hash(sent_hash(&hashed_password).ok_or(NO_PASSWORD_USER)?)
        } else {
            self.hash(&caller, remote.as_ref(), password).await?
        };
        let header = self.change_as(&caller, AuthChange::SetPassword { user, password }).await?;
        Ok(Response::new(pb::AuthUserChangePasswordResponse { header }))
    }

    async fn user_grant_role(
        &self,
        request: Request<pb::AuthUserGrantRoleRequest>,
    ) -> Result<Response<pb::AuthUserGrantRoleResponse>, Status> {
        let grant = |request: pb::AuthUserGrantRoleRequest| {
            Ok(AuthChange::GrantRole { user: request.user, role: request.role })
        };
        Ok(Response::new(pb::AuthUserGrantRoleResponse { header: self.change(request, grant).await? }))
    }

    async fn user_revoke_role(
        &self,
        request: Request<pb::AuthUserRevokeRoleRequest>,
    ) -> Result<Response<pb::AuthUserRevokeRoleResponse>, Status> {
        let revoke = |request: pb::AuthUserRevokeRoleRequest| {
            Ok(AuthChange::RevokeRole { user: request.name, role: request.role })
        };
        Ok(Response::new(pb::AuthUserRevokeRoleResponse { header: self.change(request, revoke).await? }))
    }

    async fn role_add(
        &self,
        request: Request<pb::AuthRoleAddRequest>,
    ) -> Result<Response<pb::AuthRoleAddResponse>, Status> {
        let add = |request: pb::AuthRoleAddRequest| {
            check_name(&request.name)?;
            Ok(AuthChange::AddRole { role: request.name })
        };
        Ok(Response::new(pb::AuthRoleAddResponse { header: self.change(request, add).await? }))
    }

    async fn role_list(
        &self,
        request: Request<pb::AuthRoleListRequest>,
    ) -> Result<Response<pb::AuthRoleListResponse>, Status> {
        self.check_root(&request).await?;
        let roles = self.store.authority().state().roles.keys().cloned().collect();
        Ok(Response::new(pb::AuthRoleListResponse { header: self.header(self.store.head()), roles }))
    }

    async fn role_get(
        &self,
        request: Request<pb::AuthRoleGetRequest>,
    ) -> Result<Response<pb::AuthRoleGetResponse>, Status> {
        let caller = self.caller_of(&request).await?;
        let role = request.into_inner().role;
        let authority = self.store.confirmed_authority().await.map_err(from_store)?;
        authority.check_reads_role(&caller, &role).map_err(refused)?;
        let permissions = authority.state().roles.get(&role).ok_or(Error::RoleNotFound).map_err(refused)?;
        let perm = if role == ROOT { vec![of_root()] } else { listed(permissions) };
        Ok(Response::new(pb::AuthRoleGetResponse { header: self.header(self.store.head()), perm }))
    }

    async fn role_delete(
        &self,
        request: Request<pb::AuthRoleDeleteRequest>,
    ) -> Result<Response<pb::AuthRoleDeleteResponse>, Status> {
        let header = self.change(request, |request| Ok(AuthChange::DeleteRole { role: request.role })).await?;
        Ok(Response::new(pb::AuthRoleDeleteResponse { header }))
    }

    async fn role_grant_permission(
        &self,
        request: Request<pb::AuthRoleGrantPermissionRequest>,
    ) -> Result<Response<pb::AuthRoleGrantPermissionResponse>, Status> {
        let grant = |request: pb::AuthRoleGrantPermissionRequest| {
            let permission = request.perm.ok_or(PERMISSION_NOT_GIVEN)?;
            let access = access(permission.perm_type)?;
            let range = KeyRange::from_wire(&permission.key, &permission.range_end);
            Ok(AuthChange::GrantPermission { role: request.name, range, access })
        };
        Ok(Response::new(pb::AuthRoleGrantPermissionResponse { header: self.change(request, grant).await? }))
    }

    async fn role_revoke_permission(
        &self,
        request: Request<pb::AuthRoleRevokePermissionRequest>,
    ) -> Result<Response<pb::AuthRoleRevokePermissionResponse>, Status> {
        let revoke = |request: pb::AuthRoleRevokePermissionRequest| {
            let range = KeyRange::from_wire(&request.key, &request.range_end);
            Ok(AuthChange::RevokePermission { role: request.role, range })
        };
        Ok(Response::new(pb::AuthRoleRevokePermissionResponse { header: self.change(request, revoke).await? }))
    }
}

fn refused(error: Error) -> Status {
    from_store(error.into())
}

/// Checks the name of a user or a role to add. An empty one is refused later, with etcd's error.
fn check_name(name: &str) -> Result<(), Status> {
    if name.len() <= NAME_BYTES_MAX && !name.contains('\0') {
        return Ok(());
    }
    Err(Status::invalid_argument(format!(
        "orlop: the name of a user or role has at most {NAME_BYTES_MAX} bytes and no zero byte"
    )))
}

/// Returns what the role `root` permits, as etcd shows it.
fn of_root() -> Permission {
    Permission { perm_type: Type::Readwrite.into(), key: Default::default(), range_end: b"\0"[..].into() }
}
