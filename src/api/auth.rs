//! The Auth service. Users and roles cannot be created yet. Responses are those of an etcd in which auth was never
//! enabled, so that clients that have a user name and a password continue without a token.

use tonic::{Request, Response, Status};

use super::Context;
use orlop_wire::proto::server::etcdserverpb::{self as pb, auth_server::Auth};

/// etcd's auth revision before the first user.
const AUTH_REVISION: u64 = 1;

fn no_user<T>() -> Result<T, Status> {
    Err(Status::failed_precondition("etcdserver: user name not found"))
}

fn no_role<T>() -> Result<T, Status> {
    Err(Status::failed_precondition("etcdserver: role name not found"))
}

/// Returns the error of a call that is not implemented.
fn not_implemented<T>(feature: &str) -> Result<T, Status> {
    Err(Status::unimplemented(format!("orlop: {feature} are not implemented yet")))
}

#[tonic::async_trait]
impl Auth for Context {
    async fn auth_enable(&self, _: Request<pb::AuthEnableRequest>) -> Result<Response<pb::AuthEnableResponse>, Status> {
        Err(Status::failed_precondition("etcdserver: root user does not exist"))
    }

    async fn auth_disable(
        &self,
        _: Request<pb::AuthDisableRequest>,
    ) -> Result<Response<pb::AuthDisableResponse>, Status> {
        Ok(Response::new(pb::AuthDisableResponse { header: self.header(self.store.head()) }))
    }

    async fn auth_status(&self, _: Request<pb::AuthStatusRequest>) -> Result<Response<pb::AuthStatusResponse>, Status> {
        let header = self.header(self.store.head());
        Ok(Response::new(pb::AuthStatusResponse { header, enabled: false, auth_revision: AUTH_REVISION }))
    }

    async fn authenticate(
        &self,
        _: Request<pb::AuthenticateRequest>,
    ) -> Result<Response<pb::AuthenticateResponse>, Status> {
        Err(Status::failed_precondition("etcdserver: authentication is not enabled"))
    }

    async fn user_add(&self, _: Request<pb::AuthUserAddRequest>) -> Result<Response<pb::AuthUserAddResponse>, Status> {
        not_implemented("users")
    }

    async fn user_list(
        &self,
        _: Request<pb::AuthUserListRequest>,
    ) -> Result<Response<pb::AuthUserListResponse>, Status> {
        Ok(Response::new(pb::AuthUserListResponse { header: self.header(self.store.head()), users: Vec::new() }))
    }

    async fn user_get(&self, _: Request<pb::AuthUserGetRequest>) -> Result<Response<pb::AuthUserGetResponse>, Status> {
        no_user()
    }

    async fn user_delete(
        &self,
        _: Request<pb::AuthUserDeleteRequest>,
    ) -> Result<Response<pb::AuthUserDeleteResponse>, Status> {
        no_user()
    }

    async fn user_change_password(
        &self,
        _: Request<pb::AuthUserChangePasswordRequest>,
    ) -> Result<Response<pb::AuthUserChangePasswordResponse>, Status> {
        no_user()
    }

    async fn user_grant_role(
        &self,
        _: Request<pb::AuthUserGrantRoleRequest>,
    ) -> Result<Response<pb::AuthUserGrantRoleResponse>, Status> {
        no_user()
    }

    async fn user_revoke_role(
        &self,
        _: Request<pb::AuthUserRevokeRoleRequest>,
    ) -> Result<Response<pb::AuthUserRevokeRoleResponse>, Status> {
        no_user()
    }

    async fn role_add(&self, _: Request<pb::AuthRoleAddRequest>) -> Result<Response<pb::AuthRoleAddResponse>, Status> {
        not_implemented("roles")
    }

    async fn role_list(
        &self,
        _: Request<pb::AuthRoleListRequest>,
    ) -> Result<Response<pb::AuthRoleListResponse>, Status> {
        Ok(Response::new(pb::AuthRoleListResponse { header: self.header(self.store.head()), roles: Vec::new() }))
    }

    async fn role_get(&self, _: Request<pb::AuthRoleGetRequest>) -> Result<Response<pb::AuthRoleGetResponse>, Status> {
        no_role()
    }

    async fn role_delete(
        &self,
        _: Request<pb::AuthRoleDeleteRequest>,
    ) -> Result<Response<pb::AuthRoleDeleteResponse>, Status> {
        no_role()
    }

    async fn role_grant_permission(
        &self,
        _: Request<pb::AuthRoleGrantPermissionRequest>,
    ) -> Result<Response<pb::AuthRoleGrantPermissionResponse>, Status> {
        no_role()
    }

    async fn role_revoke_permission(
        &self,
        _: Request<pb::AuthRoleRevokePermissionRequest>,
    ) -> Result<Response<pb::AuthRoleRevokePermissionResponse>, Status> {
        no_role()
    }
}
