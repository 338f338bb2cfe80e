//! The nodes of a group from one rank's point of view: which ranks forward for which. Used by both modes.
//!
//! On each node every rank of the group has a *forwarder*: itself at home, elsewhere its *rail peer*. A forwarder does
//! on its node what the rank does at home: it sends the rank's rows to the ranks there, and collects what they return.

use crate::model::ids::{GroupRank, LocalRank, SourceIx};
use crate::model::topology::Topology;

/// The nodes from one rank's point of view.
#[derive(Clone, Debug)]
pub struct NodeView {
    pub topology: Topology,
    pub rank: GroupRank,
    /// The rank's index within its node.
    pub own: LocalRank,
    /// The ranks of its node, ascending, which map each other's memory.
    pub locals: Vec<GroupRank>,
    /// One rank per other node, in the order in which nodes' sums are added: beginning with the node before this one.
    pub rail_peers: Vec<GroupRank>,
    /// For each rank of this node, the ranks that it forwards for: itself first, then others by node, then rank.
    forwarded: Vec<Vec<GroupRank>>,
    /// The position of each rank of the group.
    pub of_rank: Vec<SeenRank>,
}

/// The position of a rank of the group, seen from this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SeenRank {
    /// The rank's local index; `None` on another node.
    pub local: Option<LocalRank>,
    /// The rank's forwarder on this node.
    pub forwarder: LocalRank,
    /// The rank's index among those that its forwarder forwards for.
    pub source: SourceIx,
    /// By how many nodes, in ring order, the rank's node precedes this one.
    pub distance: usize,
}

impl NodeView {
    pub fn new(topology: Topology, rank: GroupRank) -> Self {
        let locals = topology.ranks_of(topology.node_of(rank)).to_vec();
        let forwarded: Vec<_> = locals.iter().map(|&it| topology.forwarded_by(it)).collect();
        let mut of_rank = vec![SeenRank::default(); topology.ranks()];
        // Each rank of the group has one forwarder on this node.
        for (forwarder, ranks) in LocalRank::all(forwarded.len()).zip(&forwarded) {
            for (source, &seen) in SourceIx::all(ranks.len()).zip(ranks) {
                if let Some(to) = of_rank.get_mut(seen.index()) {
                    *to = SeenRank {
                        local: (source == SourceIx::default()).then_some(forwarder),
                        forwarder,
                        source,
                        distance: topology.distance(rank, seen),
                    };
                }
            }
        }
        Self {
            rail_peers: topology.rail_peers(rank),
            own: topology.local_index(rank),
            locals,
            forwarded,
            of_rank,
            rank,
            topology,
        }
    }

    /// The rank with index `local` on this node; the index itself if there is none.
    pub fn rank_of(&self, local: LocalRank) -> GroupRank {
        self.locals.get(local.index()).copied().unwrap_or(GroupRank::from(local.word()))
    }

    pub fn others(&self) -> usize {
        self.rail_peers.len()
    }

    /// The ranks that this one forwards for, itself first.
    pub fn forwarded(&self) -> &[GroupRank] {
        self.forwarded.get(self.own.index()).map_or(&[], Vec::as_slice)
    }

    /// The ranks of other nodes that this one forwards for: sources 1 and up.
    pub fn remote(&self) -> &[GroupRank] {
        self.forwarded().get(1..).unwrap_or_default()
    }

    /// The most remote sources of any rank of this node.
    pub fn width(&self) -> usize {
        self.forwarded.iter().map(Vec::len).max().unwrap_or(1) - 1
    }

    /// For each rank of this node, the ranks that it forwards for.
    pub fn forwarded_by_all(&self) -> &[Vec<GroupRank>] {
        &self.forwarded
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::model::topology::tests::on_nodes;

    /// The view of `rank`; `nodes` has a letter per rank that names its node.
    pub fn view(nodes: &str, rank: usize) -> NodeView {
        NodeView::new(on_nodes(nodes), GroupRank::new(rank))
    }

    #[test]
    fn every_rank_has_a_forwarder_that_forwards_for_it() {
        for names in ["ab", "aabb", "abab", "aaba", "abc", "aabcc"] {
            let topology = on_nodes(names);
            for rank in GroupRank::all(topology.ranks()) {
                let view = view(names, rank.index());
                assert_eq!(view.forwarded().first(), Some(&rank), "{names}");
                assert_eq!(view.others(), topology.nodes() - 1);
                assert_eq!(view.rank_of(view.own), rank, "{names}");
                for (other, seen) in GroupRank::all(topology.ranks()).zip(&view.of_rank) {
                    assert_eq!(view.rank_of(seen.forwarder), topology.forwarder(other, topology.node_of(rank)));
                    let forwarded = &view.forwarded_by_all()[seen.forwarder.index()];
                    assert_eq!(forwarded[seen.source.index()], other, "{names}");
                    assert!(forwarded.len() <= 1 + view.width());
                    assert_eq!(seen.distance, topology.distance(rank, other), "{names}");
                    let is_here = seen.distance == 0;
                    assert_eq!(seen.local, is_here.then(|| topology.local_index(other)));
                    assert_eq!(seen.source == SourceIx::default(), is_here, "{names}");
                }
            }
        }
    }
}
