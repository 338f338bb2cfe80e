//! The nodes of a group: which ranks can map each other's memory, and which forward for others.
//!
//! A node is a set of ranks with the same identity (`NCCL_HOSTID`, else the kernel's boot id), not a range of ranks:
//! ranks may be distributed over the machines in any order.

use crate::model::group::NodeSums;
use crate::model::hash::fnv1a;
use crate::model::ids::{GroupRank, LocalRank, Node};

/// Bytes of a [`NodeId`].
pub const NODE_ID_BYTES: usize = 64;

/// The identity of the node that a rank runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeId(pub [u8; NODE_ID_BYTES]);

impl NodeId {
    /// The identity for `text`: the text itself if it fits, otherwise its beginning and a hash of all of it.
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
    sums: NodeSums,
    /// By rank.
    positions: Vec<RankPosition>,
    /// The ranks of each node, ascending.
    nodes: Vec<Vec<GroupRank>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RankPosition {
    node: Node,
    /// How many ranks of the node precede the rank.
    local: LocalRank,
}

impl Topology {
    /// Groups ranks into nodes.
    pub fn from_ids(ids: &[NodeId]) -> Self {
        let mut seen: Vec<NodeId> = Vec::new();
        let mut nodes: Vec<Vec<GroupRank>> = Vec::new();
        let mut positions = Vec::with_capacity(ids.len());
        for (rank, id) in GroupRank::all(ids.len()).zip(ids) {
            let known = seen.iter().position(|known| known == id);
            let node = known.unwrap_or(seen.len());
            if known.is_none() {
                seen.push(*id);
                nodes.push(Vec::new());
            }
            if let Some(ranks) = nodes.get_mut(node) {
                let (node, local) = (Node::new(node), LocalRank::new(ranks.len()));
                positions.push(RankPosition { node, local });
                ranks.push(rank);
            }
        }
        Self { sums: NodeSums::default(), positions, nodes }
    }

    /// This topology, with `sums` as the order in which nodes' sums are added.
    pub fn with_sums(self, sums: NodeSums) -> Self {
        Self { sums, ..self }
    }

    /// The position of `rank`'s node in invariant sums of its tokens; `None` if it is first, as in other sums.
    pub fn own_place(&self, rank: GroupRank) -> Option<Node> {
        (self.sums == NodeSums::Invariant && self.nodes() > 1).then(|| self.node_of(rank))
    }

    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    pub fn ranks(&self) -> usize {
        self.positions.len()
    }

    fn position(&self, rank: GroupRank) -> RankPosition {
        self.positions.get(rank.index()).copied().unwrap_or_default()
    }

    pub fn node_of(&self, rank: GroupRank) -> Node {
        self.position(rank).node
    }

    /// The *local index* of `rank`: how many ranks of its node precede it. The ranks of a node map each other's memory.
    pub fn local_index(&self, rank: GroupRank) -> LocalRank {
        self.position(rank).local
    }

    /// By how many nodes, in ring order, the node of `other` follows that of `rank`; 0 on the same node. Sums over
    /// nodes are in this order, unless they are invariant.
    pub fn distance(&self, rank: GroupRank, other: GroupRank) -> usize {
        let [from, to] = [rank, other].map(|it| self.node_of(it).index());
        (from + self.nodes() - to) % self.nodes().max(1)
    }

    /// The ranks of `node`, ascending.
    pub fn ranks_of(&self, node: Node) -> &[GroupRank] {
        self.nodes.get(node.index()).map_or(&[], Vec::as_slice)
    }

    /// Whether all nodes have equally many ranks. Then ranks with the same local index form a *rail*, and are rail
    /// peers of each other.
    pub fn has_equal_nodes(&self) -> bool {
        let sizes = || self.nodes.iter().map(Vec::len);
        sizes().min() == sizes().max()
    }

    /// The *forwarder* of `rank` on `node`: on its own node itself, elsewhere its *rail peer*, the rank whose local
    /// index is that of `rank` modulo the number of ranks there.
    pub fn forwarder(&self, rank: GroupRank, node: Node) -> GroupRank {
        let ranks = self.ranks_of(node);
        ranks.get(self.local_index(rank).index() % ranks.len().max(1)).copied().unwrap_or(rank)
    }

    /// The rail peers of `rank` in the order in which nodes' sums are added: beginning with the node before its own.
    pub fn rail_peers(&self, rank: GroupRank) -> Vec<GroupRank> {
        let (own, nodes) = (self.node_of(rank).index(), self.nodes());
        let before = |distance| Node::new((own + nodes - distance) % nodes);
        (1..nodes).map(|it| self.forwarder(rank, before(it))).collect()
    }

    /// The ranks that `rank` forwards for on its node: itself first, then others by node, then rank.
    pub fn forwarded_by(&self, rank: GroupRank) -> Vec<GroupRank> {
        let own = self.node_of(rank);
        let others = self.nodes.iter().flatten().copied().filter(|&it| self.node_of(it) != own);
        std::iter::once(rank).chain(others.filter(|&it| self.forwarder(it, own) == rank)).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A topology with a letter per rank that names its node.
    pub fn on_nodes(names: &str) -> Topology {
        let id = |name: char| NodeId::from_text(&name.to_string());
        Topology::from_ids(&names.chars().map(id).collect::<Vec<_>>())
    }

    fn rank(index: usize) -> GroupRank {
        GroupRank::new(index)
    }

    fn ranks<const N: usize>(indices: [usize; N]) -> [GroupRank; N] {
        indices.map(rank)
    }

    #[test]
    fn distances_go_around_the_nodes() {
        let topology = on_nodes("abca");
        let distances = |from| ranks([0, 1, 2, 3]).map(|to| topology.distance(rank(from), to));
        assert_eq!(distances(0), [0, 2, 1, 0]);
        assert_eq!(distances(1), [1, 0, 2, 1]);
        assert_eq!(distances(3), distances(0));
    }

    #[test]
    fn ranks_have_places_on_their_nodes() {
        let topology = on_nodes("abba");
        assert_eq!((topology.ranks(), topology.nodes()), (4, 2));
        assert!(topology.has_equal_nodes());
        assert!(!on_nodes("abb").has_equal_nodes());
        assert!(on_nodes("a").has_equal_nodes());
    }

    #[test]
    fn kept_places_are_those_by_definition() {
        for names in ["a", "ab", "abba", "aabcc", "cabbage", "aaaab", "abcabcab"] {
            let topology = on_nodes(names);
            let nodes: Vec<char> = names.chars().collect();
            let on_node_of = |rank: GroupRank| -> Vec<GroupRank> {
                GroupRank::all(nodes.len()).filter(|it| nodes[it.index()] == nodes[rank.index()]).collect()
            };
            let index = |rank| on_node_of(rank).iter().position(|&it| it == rank).unwrap();
            for rank in GroupRank::all(nodes.len()) {
                assert_eq!(topology.local_index(rank).index(), index(rank), "{names}");
                assert_eq!(topology.ranks_of(topology.node_of(rank)), on_node_of(rank), "{names}");
                for other in GroupRank::all(nodes.len()) {
                    let there = on_node_of(other);
                    let forwarder = there[index(rank) % there.len()];
                    assert_eq!(topology.forwarder(rank, topology.node_of(other)), forwarder, "{names}");
                }
            }
        }
    }

    #[test]
    fn on_equal_nodes_rail_peers_are_a_rail() {
        let topology = on_nodes("abbacc");
        assert_eq!(topology.rail_peers(rank(0)), ranks([4, 1]));
        assert_eq!(topology.forwarded_by(rank(2)), ranks([2, 3, 5]));
        assert_eq!(on_nodes("aa").rail_peers(rank(1)), []);
        assert_eq!(on_nodes("aa").forwarded_by(rank(1)), ranks([1]));
    }

    #[test]
    fn on_unequal_nodes_a_rank_forwards_for_several_or_none() {
        // Three ranks of node 0 and one of node 1.
        let topology = on_nodes("aaba");
        assert_eq!(topology.rail_peers(rank(2)), ranks([0]));
        assert_eq!(topology.forwarded_by(rank(0)), ranks([0, 2]));
        assert_eq!(topology.forwarded_by(rank(1)), ranks([1]));
        assert_eq!(topology.forwarded_by(rank(2)), ranks([2, 0, 1, 3]));
    }

    #[test]
    fn what_one_sends_the_other_forwards() {
        for names in ["ab", "aab", "abca", "aabbb", "abcabcab", "aaaab", "abbcccc"] {
            let topology = on_nodes(names);
            let (mut sent, mut received) = (Vec::new(), Vec::new());
            for rank in GroupRank::all(topology.ranks()) {
                let peers = topology.rail_peers(rank);
                assert!(peers.iter().map(|&it| topology.distance(rank, it)).eq(1..topology.nodes()), "{names}");
                sent.extend(peers.into_iter().map(|to| (rank, to)));
                received.extend(topology.forwarded_by(rank).into_iter().skip(1).map(|from| (from, rank)));
            }
            sent.sort_unstable();
            received.sort_unstable();
            assert_eq!(sent, received, "{names}");
        }
    }

    #[test]
    fn long_identities_stay_distinct() {
        let long = "x".repeat(100);
        assert_ne!(NodeId::from_text(&long), NodeId::from_text(&format!("{long}y")));
    }
}
