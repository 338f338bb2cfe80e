//! The ranks that a transport connects, in the group's and in its communicator's numbering.

use crate::error::{Error, Result};
use crate::model::ids::{CommRank, GroupRank};
use crate::model::node_view::NodeView;
use crate::model::topology::Topology;
use std::sync::Arc;

/// Those ranks, and which of them this rank exchanges with.
pub struct Members {
    pub view: Arc<NodeView>,
    /// The communicator's ranks, by the group's numbering.
    pub ranks: Vec<GroupRank>,
    /// By rank of the group, the communicator's rank.
    comm_ranks: Vec<Option<CommRank>>,
}

/// The ranks in the communicator of `rank`: on nodes of equal size its rail, by node, otherwise all ranks.
pub fn comm_of(topology: &Topology, rank: GroupRank) -> Vec<GroupRank> {
    if !topology.has_equal_nodes() {
        return GroupRank::all(topology.ranks()).collect();
    }
    let mut rail = topology.forwarded_by(rank);
    rail.sort_by_key(|&rank| topology.node_of(rank));
    rail
}

impl Members {
    /// The members of this rank's communicator.
    pub fn new(view: Arc<NodeView>) -> Self {
        let ranks = comm_of(&view.topology, view.rank);
        let mut comm_ranks = vec![None; view.topology.ranks()];
        for (comm_rank, &rank) in CommRank::all(ranks.len()).zip(&ranks) {
            if let Some(of_rank) = comm_ranks.get_mut(rank.index()) {
                *of_rank = Some(comm_rank);
            }
        }
        Self { comm_ranks, ranks, view }
    }

    /// A rank of the group, by the communicator's numbering.
    pub fn comm_rank(&self, rank: GroupRank) -> Result<CommRank> {
        let known = self.comm_ranks.get(rank.index()).copied().flatten();
        known.ok_or_else(|| Error::internal(format!("rank {rank} is not in this communicator")))
    }

    /// The communicator's number of ranks, and this one's rank in it.
    pub fn place(&self) -> Result<(usize, CommRank)> {
        Ok((self.ranks.len(), self.comm_rank(self.view.rank)?))
    }

    pub fn own_name(&self) -> String {
        let rank = self.view.rank;
        format!("rank {rank} of node {}", self.view.topology.node_of(rank))
    }

    pub fn names(&self, ranks: &[GroupRank]) -> String {
        let others = ranks.iter().filter(|&&rank| rank != self.view.rank);
        let name = |&rank: &GroupRank| {
            let node = self.view.topology.node_of(rank);
            if self.view.rail_peers.contains(&rank) {
                format!("rank {rank} (rail peer on node {node})")
            } else {
                format!("rank {rank} (node {node})")
            }
        };
        others.map(name).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::model::node_view::tests::view;

    /// The members of `rank`; `nodes` has a letter per rank that names its node.
    pub fn members(nodes: &str, rank: usize) -> Members {
        Members::new(Arc::new(view(nodes, rank)))
    }

    #[test]
    fn on_equal_nodes_a_rank_of_the_communicator_is_a_node() {
        let members = members("abba", 3);
        assert_eq!(members.ranks, [3, 2].map(GroupRank::new));
        assert_eq!(members.comm_rank(GroupRank::new(2)), Ok(CommRank::new(1)));
        assert!(members.comm_rank(GroupRank::new(1)).is_err());
    }

    #[test]
    fn on_unequal_nodes_all_ranks_are_in_one_communicator() {
        let small = members("aaba", 2);
        assert_eq!(small.ranks, [0, 1, 2, 3].map(GroupRank::new));
        assert_eq!(small.comm_rank(GroupRank::new(3)), Ok(CommRank::new(3)));
    }

    #[test]
    fn ranks_are_named_with_their_nodes() {
        let members = members("aaba", 2);
        assert_eq!(members.own_name(), "rank 2 of node 1");
        assert_eq!(members.names(&[0, 1, 2].map(GroupRank::new)), "rank 0 (rail peer on node 0), rank 1 (node 0)");
    }
}
