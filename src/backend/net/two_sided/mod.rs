//! Messages between ranks on different nodes.
//!
//! [`Transport`] separates what a group sends from what carries it. NCCL's host API is the first implementation
//! (`open`). There is no ready-to-receive message: NCCL buffers or blocks a send until the matching receive is
//! enqueued, which runs after all earlier work on the receiver's stream.

mod ending;
mod failing;
mod members;
pub mod open;
pub mod outstanding;
mod over_nccl;
pub mod replays;
mod spare;
mod warm_up;
pub mod watchdog;

use crate::error::{Error, Result};
use crate::model::ids::GroupRank;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use std::fmt;
use std::time::Duration;

/// A message in one direction between this rank and another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The other rank, by the group's numbering.
    pub peer: GroupRank,
    /// First byte, in device memory.
    pub data: DevPtr,
    /// Size; equal on both sides. Zero bytes: no message.
    pub bytes: usize,
}

/// An operation's purpose, for failure reports: "LL dispatch 42".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// In the caller's terms.
    pub what: &'static str,
    /// The caller's count of them.
    pub number: u64,
}

impl Label {
    /// The first messages of a transport.
    const WARM_UP: Self = Self { what: "warm-up", number: 0 };
}

impl fmt::Display for Label {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{} {}", self.what, self.number)
    }
}

/// Carries messages between nodes. The ranks of an operation enqueue the same operations in the same order; they run
/// one after the other, whatever their streams. An operation is captured into a graph on all its ranks or on none.
///
/// An operation that waits past the deadline ends the transport on this rank, as does an error that the network
/// reports: the group is told, what is on the streams is ended, and what it received is undefined. For captured
/// operations that holds in every replay.
///
/// Dropping it waits for its operations, at most until the deadline.
pub trait Transport: Send + Sync {
    /// Enqueues messages between this rank, its rail peers and the ranks that it forwards for as one operation, in
    /// which all progress together.
    fn exchange(&self, label: Label, sends: &[Message], receives: &[Message], stream: Stream) -> Result<()>;
    /// The failure that ended it.
    fn health(&self) -> Option<Error>;
    /// Ends it, as a failure would; does not wait.
    fn abort(&self);
    /// Ends it because of a failure that this rank found on the host; does not wait.
    fn fail(&self, error: &Error);
    /// Ends it as the deadline does, because the host has `waited` too long for the last operation for `label`, which
    /// may not have begun. Returns the failure that counts; none if that operation is over.
    fn end_late(&self, label: Label, waited: Duration) -> Option<Error>;
}

/// An operation, as reports name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// From 0.
    pub number: u64,
    pub label: Label,
}

impl Operation {
    /// The first operation of a transport.
    pub const WARM_UP: Self = Self { number: 0, label: Label::WARM_UP };
}

impl fmt::Display for Operation {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "network operation {}, {}", self.number, self.label)
    }
}

/// An operation past its deadline.
#[derive(Debug, PartialEq, Eq)]
pub struct Late {
    pub operation: Operation,
    /// The ranks that it exchanges with.
    pub peers: Vec<GroupRank>,
    pub waited: Duration,
    /// It ran in a replay of the graph that captured it.
    pub is_replayed: bool,
    /// It may instead be an earlier captured one that shares its place.
    pub is_shared: bool,
    /// The first earlier operation that has not run, if any.
    pub behind: Option<Operation>,
}

/// The operation that an error may be about.
#[derive(Debug, PartialEq, Eq)]
pub struct Recent {
    pub operation: Operation,
    /// The ranks that it exchanges with.
    pub peers: Vec<GroupRank>,
    pub runs: bool,
}

/// Each of `peers` once, in order of first appearance.
pub fn distinct(peers: &[GroupRank]) -> Vec<GroupRank> {
    let mut distinct = Vec::new();
    for peer in peers {
        if !distinct.contains(peer) {
            distinct.push(*peer);
        }
    }
    distinct
}
