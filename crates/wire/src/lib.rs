//! Wire-level code that the server and the load generator share: etcd's generated messages ([`proto`]) and write
//! coalescing for connections ([`write_coalescing`]).

pub mod proto;
pub mod write_coalescing;
