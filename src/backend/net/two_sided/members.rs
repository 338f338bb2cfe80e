//! The ranks that a transport joins, as the group and as its communicator number them.

use crate::error::{Error, Result};
use crate::model::topology::Topology;

/// Those ranks, and with which of them this one exchanges.
pub struct Members {
    /// The nodes of the group.
    pub topology: Topology,
    /// This rank of the group.
    pub rank: usize,
    /// The communicator's ranks, as the group numbers them.
    pub ranks: Vec<usize>,
    /// The ranks that this one may send to.
    pub gateways: Vec<usize>,
    /// This rank and those that may send to it.
    pub sources: Vec<usize>,
    /// By rank of the group, the communicator's rank.
    comm_ranks: Vec<Option<usize>>,
}

impl Members {
    /// On equal nodes a communicator has one rank of each node, otherwise all ranks.
    pub fn new(topology: &Topology, rank: usize) -> Self {
        let sources = topology.sources(rank);
        let ranks = if topology.has_equal_nodes() {
            sources.clone()
        } else {
            (0..topology.ranks()).collect()
        };
        let mut comm_ranks = vec![None; topology.ranks()];
        for (comm_rank, &rank) in ranks.iter().enumerate() {
            if let Some(of_rank) = comm_ranks.get_mut(rank) {
                *of_rank = Some(comm_rank);
            }
        }
        Self {
            comm_ranks,
            ranks,
            gateways: topology.gateways(rank),
            sources,
            topology: topology.clone(),
            rank,
        }
    }

    /// A rank of the group as the communicator numbers it.
    pub fn comm_rank(&self, rank: usize) -> Result<usize> {
        let known = self.comm_ranks.get(rank).copied().flatten();
        known.ok_or_else(|| Error::internal(format!("rank {rank} is not in this communicator")))
    }

    /// How many ranks the communicator has, and which of them this one is.
    pub fn place(&self) -> Result<(usize, usize)> {
        Ok((self.ranks.len(), self.comm_rank(self.rank)?))
    }

    /// This rank in a text.
    pub fn own_name(&self) -> String {
        let node = self.topology.node_of(self.rank);
        format!("rank {} of node {node}", self.rank)
    }

    /// Other ranks in a text.
    pub fn names(&self, ranks: &[usize]) -> String {
        let others = ranks.iter().filter(|&&rank| rank != self.rank);
        let name = |&rank: &usize| {
            let node = self.topology.node_of(rank);
            if self.gateways.contains(&rank) {
                format!("rank {rank} (gateway on node {node})")
            } else {
                format!("rank {rank} (node {node})")
            }
        };
        others.map(name).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::topology::NodeId;

    fn members(nodes: &str, rank: usize) -> Members {
        let name = |name: char| NodeId::from_text(&name.to_string());
        let ids: Vec<NodeId> = nodes.chars().map(name).collect();
        Members::new(&Topology::from_ids(&ids), rank)
    }

    #[test]
    fn on_equal_nodes_a_rank_of_the_communicator_is_a_node() {
        let members = members("abba", 3);
        assert_eq!(members.ranks, [3, 2]);
        assert_eq!(members.comm_rank(2), Ok(1));
        assert!(members.comm_rank(1).is_err());
    }

    #[test]
    fn on_unequal_nodes_all_ranks_are_in_one_communicator() {
        let small = members("aaba", 2);
        assert_eq!(small.ranks, [0, 1, 2, 3]);
        assert_eq!(small.comm_rank(3), Ok(3));
        // It is no rail for a rank that hears of all, either.
        assert_eq!(members("aab", 2).sources, members("aab", 2).ranks);
    }

    #[test]
    fn ranks_are_named_with_their_nodes() {
        let members = members("aaba", 2);
        assert_eq!(members.own_name(), "rank 2 of node 1");
        assert_eq!(
            members.names(&[0, 1, 2]),
            "rank 0 (gateway on node 0), rank 1 (node 0)"
        );
    }
}
