//! The host backend: the operations in plain Rust, ranks being processes or threads of one machine.
//!
//! Written for reading: this is the executable definition of the semantics and the oracle for the kernels. Every
//! operation is one exchange (`mailboxes`): each rank posts a message in its own window, reads all ranks' messages, and
//! releases them. It runs on the caller's stream as a host function of the CPU stand-ins, so missing synchronisation
//! shows as it would on a GPU.

mod block;
mod device;
mod e4m3;
mod fingerprint;
mod group;
mod group_state;
mod ht;
mod ll;
mod mailboxes;
mod message;
mod node_sums;
mod numeric;
mod objects;
mod order;
mod runtime;
mod scaled;
mod shared_file;
mod window;

pub use runtime::HostRuntime;
