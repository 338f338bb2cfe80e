//! Messages between ranks on different nodes.
//!
//! [`Transport`] stands between what a group wants to send and what carries it. NCCL's host API is its
//! first implementation (`open`). There is no ready-to-receive message: NCCL buffers or blocks a send until the
//! matching receive is enqueued, and that runs after all earlier work of the receiver's stream.

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

use crate::backend::net::Net;
use crate::error::{Error, Result};
use crate::model::ids::GroupRank;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use std::fmt;
use std::time::Duration;

/// One direction between this rank and another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The other rank, as the group numbers it.
    pub peer: GroupRank,
    /// First byte, in device memory.
    pub data: DevPtr,
    /// How many; both sides must say the same. Where that is zero there is no message.
    pub bytes: usize,
}

/// What an operation is for, as texts of failures name it: "LL dispatch 42".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// In the caller's terms.
    pub what: &'static str,
    /// Which of them, as the caller counts.
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

/// What carries messages between nodes. Operations are the same, in the same order, on the ranks that take
/// part in them, and run one after the other, whatever their streams; one of them is captured into a graph on
/// all its ranks or on none.
///
/// An operation that waits longer than the deadline ends the transport on this rank, and so does an error that
/// the network reports: the group is told, what is on the streams comes to its end, and what it received is
/// undefined. For captured operations that holds in every replay.
///
/// Dropping it waits for its operations, at most as long as the deadline.
pub trait Transport: Net {
    /// Enqueues messages between this rank, its rail peers and the ranks that it forwards for as one operation, in
    /// which all progress together.
    fn exchange(&self, label: Label, sends: &[Message], receives: &[Message], stream: Stream) -> Result<()>;
    /// Ends it, as the deadline does, since the host has `waited` too long for the last operation for `label`, which may
    /// not have begun. Gives the failure that counts; none if that operation is over.
    fn end_late(&self, label: Label, waited: Duration) -> Option<Error>;
}

/// An operation, as texts name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// From 0.
    pub number: u64,
    pub label: Label,
}

impl Operation {
    /// The first of a transport.
    pub const WARM_UP: Self = Self { number: 0, label: Label::WARM_UP };
}

impl fmt::Display for Operation {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "network operation {}, {}", self.number, self.label)
    }
}

/// The operation that has run too long.
#[derive(Debug, PartialEq, Eq)]
pub struct Late {
    pub operation: Operation,
    /// The ranks that it exchanges with.
    pub peers: Vec<GroupRank>,
    pub waited: Duration,
    /// In a replay of the graph that it was captured into.
    pub is_replayed: bool,
    /// It may have been an earlier captured one instead.
    pub is_shared: bool,
    /// The first that has not run before it, if any.
    pub behind: Option<Operation>,
}

/// An operation that an error may be about.
#[derive(Debug, PartialEq, Eq)]
pub struct Recent {
    pub operation: Operation,
    /// The ranks that it exchanges with.
    pub peers: Vec<GroupRank>,
    pub runs: bool,
}

/// Each of `peers` once, in the order in which they come first.
pub fn distinct(peers: &[GroupRank]) -> Vec<GroupRank> {
    let mut distinct = Vec::new();
    for peer in peers {
        if !distinct.contains(peer) {
            distinct.push(*peer);
        }
    }
    distinct
}
