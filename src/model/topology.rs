//! Which ranks can reach each other's memory.
//!
//! A node is a set of ranks with the same identity (`NCCL_HOSTID`, else the kernel's boot id), not
//! a range of rank numbers: ranks may be distributed over the machines in any order.
#![forbid(unsafe_code)]

use crate::model::hash::fnv1a;

/// Bytes of a node identity, as ranks exchange them.
pub const NODE_ID_BYTES: usize = 64;

/// The identity of the node that a rank runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeId(pub [u8; NODE_ID_BYTES]);

impl NodeId {
    /// The identity for `text`: the text itself if it fits, else its two ends and a hash of the
    /// whole.
    pub fn from_text(text: &str) -> Self {
        let mut id = [0; NODE_ID_BYTES];
        let bytes = text.trim().as_bytes();
        for (to, from) in id.iter_mut().zip(bytes) {
            *to = *from;
        }
        if bytes.len() > NODE_ID_BYTES {
            let hash = fnv1a(bytes).to_le_bytes();
            for (to, from) in id.iter_mut().rev().zip(hash) {
                *to = from;
            }
        }
        Self(id)
    }
}

/// The nodes of a group, numbered by their lowest rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    node_of: Vec<usize>,
    nodes: usize,
}

impl Topology {
    /// Groups ranks into nodes.
    pub fn from_ids(ids: &[NodeId]) -> Self {
        let mut seen: Vec<NodeId> = Vec::new();
        let node_of = ids
            .iter()
            .map(|id| {
                let known = seen.iter().position(|known| known == id);
                known.unwrap_or_else(|| {
                    seen.push(*id);
                    seen.len() - 1
                })
            })
            .collect();
        Self {
            node_of,
            nodes: seen.len(),
        }
    }

    /// Number of nodes.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// The node of `rank`.
    pub fn node_of(&self, rank: usize) -> usize {
        self.node_of.get(rank).copied().unwrap_or(0)
    }

    /// How many nodes after `rank`'s own the node of `other` comes around the ring; 0 for the same
    /// node. Sums over nodes follow this order.
    pub fn distance(&self, rank: usize, other: usize) -> usize {
        (self.node_of(rank) + self.nodes - self.node_of(other)) % self.nodes.max(1)
    }

    /// The first rank that is not on rank 0's node.
    pub fn first_remote_rank(&self) -> Option<usize> {
        self.node_of.iter().position(|&node| node != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_found_by_identity_not_by_rank_order() {
        let left = NodeId::from_text("left");
        let right = NodeId::from_text("right");
        let topology = Topology::from_ids(&[left, right, left]);
        assert_eq!(topology.nodes(), 2);
        assert_eq!(topology.first_remote_rank(), Some(1));
        assert_eq!(Topology::from_ids(&[left, left]).first_remote_rank(), None);
    }

    #[test]
    fn distances_go_around_the_nodes() {
        let names = ["a", "b", "c", "a"].map(NodeId::from_text);
        let topology = Topology::from_ids(&names);
        let distances = |rank| [0, 1, 2, 3].map(|other| topology.distance(rank, other));
        assert_eq!(distances(0), [0, 2, 1, 0]);
        assert_eq!(distances(1), [1, 0, 2, 1]);
        assert_eq!(distances(3), distances(0));
    }

    #[test]
    fn long_identities_stay_distinct() {
        let long = "x".repeat(100);
        assert_ne!(
            NodeId::from_text(&long),
            NodeId::from_text(&format!("{long}y"))
        );
    }
}
