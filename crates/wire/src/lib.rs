//! Code that the server and the load generator share on the wire: etcd's messages, and connections that send what is
//! written in one turn of the scheduler together.

pub mod proto;
pub mod write_coalescing;
