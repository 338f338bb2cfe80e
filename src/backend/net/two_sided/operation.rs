//! Operations, as texts of failures name them.

use crate::backend::net::two_sided::Label;
use crate::model::ids::GroupRank;
use std::fmt;
use std::time::Duration;

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
