//! Which ranks a transport joins, by the numbers of the group and by those of its communicator.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::model::topology::Topology;

/// Who takes part, and by which numbers.
pub struct Ways {
    /// The nodes of the group.
    pub topology: Topology,
    /// This rank of the group.
    pub rank: usize,
    /// The communicator's ranks, as the group numbers them.
    pub members: Vec<usize>,
    /// The ranks that this one may send to.
    pub gateways: Vec<usize>,
    /// This rank and those that may send to it.
    pub sources: Vec<usize>,
    /// By rank of the group, the communicator's rank.
    places: Vec<Option<usize>>,
}

impl Ways {
    /// On equal nodes a communicator has one rank of each node, otherwise all ranks.
    pub fn new(topology: &Topology, rank: usize) -> Self {
        let sources = topology.sources(rank);
        let members = match topology.has_equal_nodes() {
            true => sources.clone(),
            false => (0..topology.ranks()).collect(),
        };
        let mut places = vec![None; topology.ranks()];
        for (place, &member) in members.iter().enumerate() {
            if let Some(of_rank) = places.get_mut(member) {
                *of_rank = Some(place);
            }
        }
        Self {
            places,
            members,
            gateways: topology.gateways(rank),
            sources,
            topology: topology.clone(),
            rank,
        }
    }

    /// A rank of the group as the communicator numbers it.
    pub fn member(&self, rank: usize) -> Result<usize> {
        let place = self.places.get(rank).copied().flatten();
        place.ok_or_else(|| Error::internal(format!("rank {rank} is on no way of this one")))
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
            match self.gateways.contains(&rank) {
                true => format!("rank {rank} (gateway on node {node})"),
                false => format!("rank {rank} (node {node})"),
            }
        };
        others.map(name).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::topology::NodeId;

    fn ways(nodes: &str, rank: usize) -> Ways {
        let name = |name: char| NodeId::from_text(&name.to_string());
        let ids: Vec<NodeId> = nodes.chars().map(name).collect();
        Ways::new(&Topology::from_ids(&ids), rank)
    }

    #[test]
    fn on_equal_nodes_a_rank_of_the_communicator_is_a_node() {
        let ways = ways("abba", 3);
        assert_eq!(ways.members, [3, 2]);
        assert_eq!(ways.member(2), Ok(1));
        assert!(ways.member(1).is_err());
    }

    #[test]
    fn on_unequal_nodes_all_ranks_are_in_one_communicator() {
        let small = ways("aaba", 2);
        assert_eq!(small.members, [0, 1, 2, 3]);
        assert_eq!(small.member(3), Ok(3));
        // It is no rail for a rank that hears of all, either.
        assert_eq!(ways("aab", 2).sources, ways("aab", 2).members);
    }

    #[test]
    fn ranks_are_named_with_their_nodes() {
        let ways = ways("aaba", 2);
        assert_eq!(ways.own_name(), "rank 2 of node 1");
        assert_eq!(
            ways.names(&[0, 1, 2]),
            "rank 0 (gateway on node 0), rank 1 (node 0)"
        );
    }
}
