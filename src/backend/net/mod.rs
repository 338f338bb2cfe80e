//! Networks between nodes.
//!
//! There is one, [`two_sided`]: NCCL's grouped sends and receives, enqueued by the hosts. It brings requirements that
//! are dealt with there. Both hosts must know the size of each message. NCCL's kernels wait without a deadline, so
//! operations are marked, also in graphs, and a thread watches the marks, reports late operations, and aborts the
//! communicator. Ending one synchronizes the device, so it outlives its group until the device is quiescent. Its
//! bindings are beside the others of their libraries: `nccl::own`, `nccl::network`, and `graph_marks` of CUDA's driver.
//!
//! A one-sided network, in which kernels put messages into windows on other nodes and signal them, must provide what
//! groups and operations need:
//!
//! - when a group opens: connections, with reachable memory, to the ranks that this one sends to or receives from;
//! - a way to send packed data, and with each message a word that names its operation, so that kernels can wait for it
//!   with the group's deadline and say who is missing;
//! - room that is not overwritten before its reader has released it;
//! - for the host, the failure that ended it, and an end after which no other node writes to this one.
//!
//! It needs no watchdog, marks or aborts: its waits are in the group's own kernels.

pub mod two_sided;

use crate::error::Error;

/// Told of the failure that ends a network, before the network's operations are ended.
pub trait OnFault: Send + Sync {
    /// Called once, on any thread. Must return at once.
    fn failed(&self, error: &Error);
    /// Tells the device, on a thread that may wait: kernels that begin from now on exit at once, as what they received
    /// is undefined.
    fn mark(&self);
    /// Whether the group has failed for another reason. Then the network ends, too.
    fn has_failed(&self) -> bool;
}
