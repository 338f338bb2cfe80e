//! The sum of a token's rows, node by node.
//!
//! Rows of the home's own node enter the fp32 sum directly. Rows of another node are summed there in the same order,
//! and that sum is rounded to the rows' type, because it crosses the network as one row. The home's node comes first,
//! then the preceding nodes in ring order. On one node this is a plain sum.
//!
//! Invariant sums (`model::group::NodeSums`) also round the home's part, and add the nodes in ascending order, so that
//! nothing depends on a token's home.

use crate::backend::host::numeric;
use crate::error::Result;
use crate::model::ids::GroupRank;
use crate::model::ops::RowType;
use crate::model::topology::Topology;

/// Buffers for the sum of one token.
pub struct NodeSums<'a> {
    topology: &'a Topology,
    home: GroupRank,
    row: RowType,
    sum: Vec<f32>,
    of_node: Vec<f32>,
    rounded: Vec<u8>,
}

impl<'a> NodeSums<'a> {
    /// Sums of rows of type `row` for tokens of rank `home`.
    pub fn new(topology: &'a Topology, home: GroupRank, row: RowType) -> Self {
        Self {
            topology,
            home,
            row,
            sum: vec![0.0; row.hidden],
            of_node: vec![0.0; row.hidden],
            rounded: vec![0; row.bytes()],
        }
    }

    /// Writes the rounded sum of `parts` to `out`. `parts` are in their node's order; `source` returns a part's rank,
    /// and `add` adds the part to a sum.
    pub fn store<T>(
        &mut self,
        parts: &mut [T],
        source: impl Fn(&T) -> GroupRank,
        add: impl Fn(&mut [f32], &T) -> Result<()>,
        out: &mut [u8],
    ) -> Result<()> {
        let is_invariant = self.topology.own_place(self.home).is_some();
        let place = |part: &T| {
            if is_invariant {
                self.topology.node_of(source(part)).index()
            } else {
                self.topology.distance(self.home, source(part))
            }
        };
        // The sort is stable, so the order within a node is kept.
        parts.sort_by_key(place);
        self.sum.fill(0.0);
        for node in parts.chunk_by(|a, b| place(a) == place(b)) {
            if !is_invariant && node.first().is_some_and(|part| place(part) == 0) {
                node.iter().try_for_each(|part| add(&mut self.sum, part))?;
                continue;
            }
            self.of_node.fill(0.0);
            node.iter().try_for_each(|part| add(&mut self.of_node, part))?;
            numeric::store(&mut self.rounded, &self.of_node, self.row.dtype)?;
            numeric::add(&mut self.sum, &self.rounded, self.row.dtype)?;
        }
        numeric::store(out, &self.sum, self.row.dtype)
    }
}
