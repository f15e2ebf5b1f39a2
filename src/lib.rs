pub mod bench;
pub mod index;
pub mod log;
pub mod proto;
pub mod types;
