//! The exchanges of an LL operation over several nodes. Each is one message per rank, as each costs the network's
//! latency.

use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ll::messages::{HEADER_BYTES, Leg};
use crate::backend::cuda::ll::over_nodes::OverNodes;
use crate::backend::net::two_sided::{Label, Message};
use crate::error::Result;
use crate::model::ids::GroupRank;
use crate::model::ops::{LlDispatch, RowType};
use crate::model::tensor::DevPtr;

impl OverNodes<'_> {
    /// This rank's rows and ids, rank-major also its weights, go to the rail peers, those of the remote ranks come here.
    pub(super) fn send_rows(&self, label: Label, op: &LlDispatch, at: &StreamScope) -> Result<()> {
        let entry = size_of::<i64>() + op.beside.map_or(0, |_| size_of::<f32>());
        let bytes = op.wire().slot_bytes() + self.handle.routing.top_k * entry;
        self.send_there(label, &self.memory.rows, bytes, at)
    }

    /// This rank's weights go to the rail peers, those of the remote ranks come here.
    pub(super) fn send_weights(&self, label: Label, at: &StreamScope) -> Result<()> {
        let weights = self.handle.routing.top_k * size_of::<f32>();
        self.send_there(label, &self.memory.weights, weights, at)
    }

    /// The sums of this node go to the remote ranks, those of the rail peers' nodes come here: each the way that its
    /// row took, back.
    pub(super) fn send_sums(&self, label: Label, row: RowType, at: &StreamScope) -> Result<()> {
        let (leg, bytes) = (self.memory.rows.back(), row.bytes());
        let own = self.handle.routing.tokens;
        let sends = self.of_remote(leg.sends, leg.stride, bytes);
        let peers = self.network.view.rail_peers.iter().enumerate();
        let receives = peers.map(|(node, &peer)| {
            let data = DevPtr(leg.receives.0 + node * leg.stride);
            message(peer, data, own, bytes)
        });
        let exchanges = &self.network.exchanges;
        exchanges.enqueue(label, sends, receives, at.stream)
    }

    /// This rank's message in `leg` goes to the rail peers, those of the remote ranks come here.
    fn send_there(&self, label: Label, leg: &Leg, bytes: usize, at: &StreamScope) -> Result<()> {
        let own = self.handle.routing.tokens;
        let peers = self.network.view.rail_peers.iter();
        let sends = peers.map(|&peer| message(peer, leg.sends, own, bytes));
        let receives = self.of_remote(leg.receives, leg.stride, bytes);
        let exchanges = &self.network.exchanges;
        exchanges.enqueue(label, sends, receives, at.stream)
    }

    /// Messages to or from the remote ranks, `stride` apart.
    fn of_remote(&self, first: DevPtr, stride: usize, bytes: usize) -> impl Iterator<Item = Message> {
        let ranks = self.network.view.remote().iter().zip(&self.tokens.of);
        ranks
            .enumerate()
            .map(move |(index, (&rank, &tokens))| message(rank, DevPtr(first.0 + index * stride), tokens, bytes))
    }
}

/// A message to or from `peer`, of a header and of `bytes` for each of its `tokens`.
fn message(peer: GroupRank, data: DevPtr, tokens: usize, bytes: usize) -> Message {
    Message { peer, data, bytes: HEADER_BYTES + tokens * bytes }
}
