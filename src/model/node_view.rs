//! The nodes of a group as one rank sees them: who forwards for whom. Used by both modes' operations over nodes.
//!
//! On each node every rank of the group has a *forwarder*: itself at home, elsewhere its *rail peer*. A forwarder does
//! on its node what the rank does at home: it sends the rank's rows to the ranks there, and collects what they return.

use crate::model::ids::{GroupRank, LocalRank, SourceIx};
use crate::model::topology::Topology;

/// The nodes as one rank sees them.
#[derive(Clone, Debug)]
pub struct NodeView {
    pub topology: Topology,
    pub rank: GroupRank,
    /// Its index within its node.
    pub own: LocalRank,
    /// The ranks of its node, ascending: they map each other's memory.
    pub locals: Vec<GroupRank>,
    /// One per other node, beginning with the node before this one: the order in which sums add the nodes.
    pub rail_peers: Vec<GroupRank>,
    /// For each rank of this node, whom it forwards for: itself first, then others by node, then rank.
    forwarded: Vec<Vec<GroupRank>>,
    /// Where each rank of the group is.
    pub of_rank: Vec<SeenRank>,
}

/// Where a rank of the group is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SeenRank {
    /// `None` if on another node.
    pub local: Option<LocalRank>,
    /// Its forwarder here.
    pub forwarder: LocalRank,
    /// Its index among the ranks that its forwarder forwards for.
    pub source: SourceIx,
    /// How many nodes before this one its node is, in ring order.
    pub distance: usize,
}

impl NodeView {
    pub fn new(topology: Topology, rank: GroupRank) -> Self {
        let locals = topology.ranks_of(topology.node_of(rank)).to_vec();
        let forwarded: Vec<_> = locals.iter().map(|&it| topology.forwarded_by(it)).collect();
        let mut of_rank = vec![SeenRank::default(); topology.ranks()];
        // Each rank of the group has one forwarder here.
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

    /// The rank of this node with index `local`; the index itself if there is none.
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

    /// Those on other nodes: sources 1 and up.
    pub fn remote(&self) -> &[GroupRank] {
        self.forwarded().get(1..).unwrap_or_default()
    }

    /// The most remote ranks that any rank of this node forwards for.
    pub fn width(&self) -> usize {
        self.forwarded.iter().map(Vec::len).max().unwrap_or(1) - 1
    }

    /// For each rank of this node, whom it forwards for.
    pub fn forwarded_by_all(&self) -> &[Vec<GroupRank>] {
        &self.forwarded
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::model::topology::tests::on_nodes;

    /// What `rank` sees; `nodes` has a letter per rank that names its node.
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
