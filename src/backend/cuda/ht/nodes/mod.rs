//! High-throughput operations of a group over several nodes.
//!
//! Rows travel along rails: a token crosses the network once for each other node that has one of its experts, to
//! the rail peer there, which forwards it to the node's ranks as it sends its own. Combine goes the other way: the
//! rail peer sums what the node's ranks return for a token, and one row travels home, which adds its own node and
//! then the others. Operations run in stages: while one is on the network, that before it is on NVLink.

mod combine;
mod create;
mod cut;
mod dispatch;
mod given;
mod handle;
mod messages;
mod part;
pub mod plan;
mod rails;
mod stage;
mod zones;

pub use create::open_handle;
pub use given::{GivenHt, block_bytes};
pub use rails::Rails;
