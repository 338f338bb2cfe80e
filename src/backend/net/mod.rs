//! Networks between nodes.
//!
//! There is one, [`two_sided`]: NCCL's grouped sends and receives, which the hosts enqueue. Much exists for its sake
//! alone, and lives there. Both hosts must know the bytes of each message. NCCL's kernels wait without a deadline, so
//! operations are marked, in graphs too, and a thread watches the marks, reports what is late, and aborts the
//! communicator. Ending one waits for the device, so it outlives its group until the device is quiescent. Its bindings
//! are beside the others of their libraries: `nccl::own`, `nccl::network`, and `graph_marks` of CUDA's driver.
//!
//! A one-sided network, in which kernels put messages into windows of other nodes and signal them, would stand beside
//! it as another [`Net`], and has to give what groups and operations ask for:
//!
//! - when a group opens: the ranks that this one sends to and hears of, connected, with memory that they can reach;
//! - a way to send what is packed, and a word with each message that says which operation it is of, so that kernels can
//!   wait for it with the group's deadline and say who is missing;
//! - room that is not written again before its reader has let go of it;
//! - the failure that has ended it, for the host, and an end after which no other node writes to this one.
//!
//! It needs no watchdog, no marks and no aborts: its waits are those of the group's own kernels.

pub mod two_sided;

use crate::error::Error;

/// A group's network, whatever carries its messages, as the group knows it. Dropping it ends it.
pub trait Net: Send + Sync {
    /// The failure that has ended it.
    fn health(&self) -> Option<Error>;
    /// Ends it, as a failure would; does not wait.
    fn abort(&self);
    /// Ends it by a failure that this rank has found on the host; does not wait.
    fn fail(&self, error: &Error);
}

/// Who is told of the failure that ends a network, before its operations are ended.
pub trait OnFault: Send + Sync {
    /// Told on any thread, once. Returns at once.
    fn failed(&self, error: &Error);
    /// Tells the device, on a thread that may wait: kernels that begin from now on leave at once, as what they
    /// received is undefined.
    fn mark(&self);
    /// Whether the group has failed otherwise. Then the network ends, too.
    fn has_failed(&self) -> bool;
}
