//! Which ranks can reach each other's memory.
//!
//! A node is a set of ranks with the same identity (`NCCL_HOSTID`, else the kernel's boot id), not
//! a range of rank numbers: ranks may be distributed over the machines in any order.

use crate::model::group::NodeSums;
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

/// The ranks of one node as one of them sees them: they map each other's memory. A rank's place in their
/// ascending order is its *local index*.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalRanks {
    ranks: Vec<usize>,
    own: usize,
}

impl LocalRanks {
    /// All ranks of a group on one node, of which `rank` is this one.
    pub fn all(ranks: usize, rank: usize) -> Self {
        Self {
            ranks: (0..ranks).collect(),
            own: rank,
        }
    }

    /// How many they are.
    pub fn count(&self) -> usize {
        self.ranks.len()
    }

    /// This rank's local index.
    pub fn own_index(&self) -> usize {
        self.own
    }

    /// This rank.
    pub fn own_rank(&self) -> usize {
        self.rank(self.own)
    }

    /// The rank with the local index `index`; `index` itself if there is none.
    pub fn rank(&self, index: usize) -> usize {
        self.ranks.get(index).copied().unwrap_or(index)
    }

    /// The ranks, ascending.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// The local index of `rank`; `None` if it is on another node.
    pub fn index(&self, rank: usize) -> Option<usize> {
        self.ranks.iter().position(|&other| other == rank)
    }
}

/// The nodes of a group, numbered by their lowest rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    sums: NodeSums,
    /// Of each rank.
    places: Vec<Place>,
    /// The ranks of each node, ascending.
    nodes: Vec<Vec<usize>>,
}

/// Where a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    node: usize,
    /// How many ranks of its node come before it.
    local_index: usize,
}

impl Topology {
    /// Groups ranks into nodes.
    pub fn from_ids(ids: &[NodeId]) -> Self {
        let mut seen: Vec<NodeId> = Vec::new();
        let mut nodes: Vec<Vec<usize>> = Vec::new();
        let mut places = Vec::with_capacity(ids.len());
        for (rank, id) in ids.iter().enumerate() {
            let known = seen.iter().position(|known| known == id);
            let node = known.unwrap_or(seen.len());
            if known.is_none() {
                seen.push(*id);
                nodes.push(Vec::new());
            }
            if let Some(ranks) = nodes.get_mut(node) {
                let local_index = ranks.len();
                places.push(Place { node, local_index });
                ranks.push(rank);
            }
        }
        Self {
            sums: NodeSums::default(),
            places,
            nodes,
        }
    }

    /// The same, where the sums of nodes are added like this.
    pub fn with_sums(self, sums: NodeSums) -> Self {
        Self { sums, ..self }
    }

    /// The place of `rank`'s node in invariant sums of its tokens; in others it comes first.
    pub fn own_place(&self, rank: usize) -> Option<usize> {
        (self.sums == NodeSums::Invariant && self.nodes() > 1).then(|| self.node_of(rank))
    }

    /// Number of nodes.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// The node of `rank`.
    pub fn node_of(&self, rank: usize) -> usize {
        self.places.get(rank).map_or(0, |place| place.node)
    }

    /// How many nodes after `rank`'s own the node of `other` comes around the ring; 0 for the same
    /// node. Sums over nodes follow this order, unless they are invariant.
    pub fn distance(&self, rank: usize, other: usize) -> usize {
        (self.node_of(rank) + self.nodes() - self.node_of(other)) % self.nodes().max(1)
    }

    /// The first rank that is not on rank 0's node.
    pub fn first_remote_rank(&self) -> Option<usize> {
        self.places.iter().position(|place| place.node != 0)
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.places.len()
    }

    /// The ranks of `node`, ascending.
    pub fn ranks_of(&self, node: usize) -> &[usize] {
        self.nodes.get(node).map_or(&[], Vec::as_slice)
    }

    /// The ranks of `rank`'s node.
    pub fn local_ranks(&self, rank: usize) -> LocalRanks {
        LocalRanks {
            ranks: self.ranks_of(self.node_of(rank)).to_vec(),
            own: self.local_index(rank),
        }
    }

    /// How many ranks of its node come before `rank`.
    pub fn local_index(&self, rank: usize) -> usize {
        self.places.get(rank).map_or(0, |place| place.local_index)
    }

    /// Whether all nodes have as many ranks. Then the ranks with one local index are a *rail*: each is the
    /// gateway of all the others.
    pub fn has_equal_nodes(&self) -> bool {
        let sizes = || self.nodes.iter().map(Vec::len);
        sizes().min() == sizes().max()
    }

    /// The rank of `node` that takes what `rank` sends there: its local index is that of `rank`, modulo the
    /// number of ranks there.
    pub fn gateway(&self, rank: usize, node: usize) -> usize {
        let ranks = self.ranks_of(node);
        let index = self.local_index(rank) % ranks.len().max(1);
        ranks.get(index).copied().unwrap_or(rank)
    }

    /// The rank of `node` that stands there for `rank`: itself on its own node, elsewhere its gateway.
    pub fn carrier(&self, rank: usize, node: usize) -> usize {
        // On its own node a rank's local index is its own, so it is its own gateway.
        self.gateway(rank, node)
    }

    /// The ranks that `rank` carries on its node: itself first, then others in the order of nodes, then ranks.
    pub fn carried_by(&self, rank: usize) -> Vec<usize> {
        let others = self.sources(rank).into_iter();
        let others = others.filter(|&source| source != rank);
        std::iter::once(rank).chain(others).collect()
    }

    /// The gateways of `rank`, of the node before its own first: the order in which sums add the nodes.
    pub fn gateways_by_distance(&self, rank: usize) -> Vec<usize> {
        let mut gateways = self.gateways(rank);
        gateways.sort_by_key(|&gateway| self.distance(rank, gateway));
        gateways
    }

    /// The gateways of `rank`, one on each other node, in the order of nodes.
    pub fn gateways(&self, rank: usize) -> Vec<usize> {
        let others = (0..self.nodes()).filter(|&node| node != self.node_of(rank));
        others.map(|node| self.gateway(rank, node)).collect()
    }

    /// The ranks that have `rank` as their gateway or are `rank` itself, in the order of nodes, then ranks.
    /// On equal nodes this is the rail.
    pub fn sources(&self, rank: usize) -> Vec<usize> {
        let own = self.node_of(rank);
        let all = self.nodes.iter().flatten().copied();
        all.filter(|&other| match self.node_of(other) == own {
            true => other == rank,
            false => self.gateway(other, own) == rank,
        })
        .collect()
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

    fn on_nodes(names: &str) -> Topology {
        let ids: Vec<NodeId> = names
            .chars()
            .map(|name| NodeId::from_text(&name.to_string()))
            .collect();
        Topology::from_ids(&ids)
    }

    #[test]
    fn ranks_have_places_on_their_nodes() {
        let topology = on_nodes("abba");
        assert_eq!(topology.ranks(), 4);
        assert_eq!(topology.ranks_of(0), [0, 3]);
        assert_eq!(topology.ranks_of(1), [1, 2]);
        assert_eq!(
            [0, 1, 2, 3].map(|rank| topology.local_index(rank)),
            [0, 0, 1, 1]
        );
        let local = topology.local_ranks(3);
        assert_eq!(
            (local.count(), local.own_index(), local.own_rank()),
            (2, 1, 3)
        );
        assert_eq!(
            (local.rank(0), local.index(3), local.index(1)),
            (0, Some(1), None)
        );
        assert!(topology.has_equal_nodes());
        assert!(!on_nodes("abb").has_equal_nodes());
        assert!(on_nodes("a").has_equal_nodes());
    }

    #[test]
    fn kept_places_are_those_by_definition() {
        for names in ["a", "ab", "abba", "aabcc", "cabbage", "aaaab", "abcabcab"] {
            let topology = on_nodes(names);
            let nodes: Vec<char> = names.chars().collect();
            let on_node_of = |rank: usize| -> Vec<usize> {
                let ranks = 0..nodes.len();
                ranks.filter(|&it| nodes[it] == nodes[rank]).collect()
            };
            let index = |rank: usize| on_node_of(rank).iter().position(|&it| it == rank).unwrap();
            for rank in 0..nodes.len() {
                assert_eq!(topology.local_index(rank), index(rank), "{names}");
                let own = topology.node_of(rank);
                assert_eq!(topology.ranks_of(own), on_node_of(rank), "{names}");
                for other in 0..nodes.len() {
                    let there = on_node_of(other);
                    let gateway = there[index(rank) % there.len()];
                    let node = topology.node_of(other);
                    assert_eq!(topology.gateway(rank, node), gateway, "{names}");
                }
            }
        }
    }

    #[test]
    fn on_equal_nodes_gateways_are_a_rail() {
        let topology = on_nodes("abbacc");
        assert_eq!(topology.gateways(0), [1, 4]);
        assert_eq!(topology.gateways(2), [3, 5]);
        for rank in 0..topology.ranks() {
            let rail = topology.sources(rank);
            assert_eq!(rail.len(), topology.nodes());
            assert_eq!(rail.get(topology.node_of(rank)), Some(&rank));
            for &other in rail.iter().filter(|&&other| other != rank) {
                assert_eq!(topology.sources(other), rail);
                assert!(topology.gateways(rank).contains(&other));
            }
        }
        assert_eq!(on_nodes("aa").gateways(1), [0; 0]);
        assert_eq!(on_nodes("aa").sources(1), [1]);
    }

    #[test]
    fn on_unequal_nodes_a_gateway_serves_several_ranks_or_none() {
        // Three ranks of node 0 and one of node 1.
        let topology = on_nodes("aaba");
        assert_eq!([0, 1, 3].map(|rank| topology.gateway(rank, 1)), [2, 2, 2]);
        assert_eq!(topology.gateways(2), [0]);
        assert_eq!(topology.sources(0), [0, 2]);
        assert_eq!(topology.sources(1), [1]);
        assert_eq!(topology.sources(2), [0, 1, 3, 2]);
    }

    #[test]
    fn a_rank_carries_itself_first() {
        let topology = on_nodes("aaba");
        assert_eq!(topology.carried_by(0), [0, 2]);
        assert_eq!(topology.carried_by(1), [1]);
        assert_eq!(topology.carried_by(2), [2, 0, 1, 3]);
    }

    #[test]
    fn every_rank_has_a_carrier_on_every_node() {
        for names in ["ab", "aabb", "abab", "aaba", "abc", "aabcc"] {
            let topology = on_nodes(names);
            for rank in 0..topology.ranks() {
                assert_eq!(topology.carried_by(rank).first(), Some(&rank));
                for node in 0..topology.nodes() {
                    let carrier = topology.carrier(rank, node);
                    assert_eq!(topology.node_of(carrier), node, "{names}");
                    assert!(topology.carried_by(carrier).contains(&rank), "{names}");
                    assert!(node != topology.node_of(rank) || carrier == rank);
                }
                let gateways = topology.gateways_by_distance(rank);
                let distances = gateways.iter().map(|&it| topology.distance(rank, it));
                assert!(distances.eq(1..topology.nodes()), "{names}");
            }
        }
    }

    #[test]
    fn what_one_sends_the_other_receives() {
        for names in ["ab", "aab", "abca", "aabbb", "abcabcab", "aaaab", "abbcccc"] {
            let topology = on_nodes(names);
            let mut sent = Vec::new();
            let mut received = Vec::new();
            for rank in 0..topology.ranks() {
                sent.extend(topology.gateways(rank).into_iter().map(|to| (rank, to)));
                let others = topology
                    .sources(rank)
                    .into_iter()
                    .filter(|&from| from != rank);
                received.extend(others.map(|from| (from, rank)));
            }
            sent.sort_unstable();
            received.sort_unstable();
            assert_eq!(sent, received, "{names}");
        }
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
