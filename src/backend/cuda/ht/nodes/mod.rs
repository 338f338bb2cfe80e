//! High-throughput operations of a group over several nodes.
//!
//! Rows travel along rails: a token crosses the network once for each other node that hosts one of its experts, to the
//! rail peer there, which forwards it to the node's ranks just as it sends its own. Combine goes the other way: the
//! rail peer sums what the node's ranks return for a token and sends one row home, where it is added after the home
//! node's. Operations run in stages: while one is on the network, the previous one is on NVLink.

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
