//! The host backend: the operations in plain Rust, ranks being processes or threads of one machine.
//!
//! Written for reading: it is the executable definition of the semantics and the oracle that kernels
//! are compared with. Every operation is one exchange (`exchange`): each rank posts a message in its
//! own window, reads the messages of all ranks, and lets go of them. It runs on the caller's stream as
//! a host function of the CPU stand-ins, so missing synchronisation shows as it would on a GPU.

mod device;
mod exchange;
mod group;
mod group_state;
mod ht;
mod ll;
mod message;
mod node_sums;
mod numeric;
mod order;
mod rows;
mod runtime;
mod signal;
mod terms;
mod window;

pub use group::HostPlatform;
