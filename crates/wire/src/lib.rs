//! Wire-level code of the server and its clients: etcd's generated messages ([`proto`]) and write coalescing for
//! connections ([`write_coalescing`]).

pub mod proto;
pub mod write_coalescing;
