//! The exchanges of an LL operation over several nodes. Each is one message per rank, as each costs the network's
//! latency.

use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ll::messages::{ChannelMemory, HEAD_BYTES, Leg};
use crate::backend::cuda::ll::network::LlNetwork;
use crate::backend::net::two_sided::{Label, Message};
use crate::error::Result;
use crate::model::ops::{LlDispatch, Routing, RowType};
use crate::model::tensor::DevPtr;

/// The exchanges of one operation, each with the label of that operation.
pub struct Exchanges<'a> {
    network: &'a LlNetwork,
    memory: &'a ChannelMemory,
    /// This rank's tokens, and ids of each.
    tokens: usize,
    top_k: usize,
    /// The tokens of its sources from 1 on.
    source_tokens: &'a [usize],
}

impl<'a> Exchanges<'a> {
    /// Those of an operation on `channel`, of a handle whose sources from 1 on have `source_tokens`.
    pub fn new(
        network: &'a LlNetwork,
        channel: u32,
        (routing, source_tokens): (&Routing, &'a [usize]),
    ) -> Result<Self> {
        Ok(Self {
            network,
            memory: network.channel(channel)?,
            tokens: routing.tokens,
            top_k: routing.top_k,
            source_tokens,
        })
    }

    /// Where the rows and ids of a dispatch lie.
    pub fn rows(&self) -> Leg {
        self.memory.rows
    }

    /// Where the weights of a combine lie.
    pub fn weights(&self) -> Leg {
        self.memory.weights
    }

    /// Where the sums of a combine lie: each comes home the way that its row took.
    pub fn sums(&self) -> Leg {
        self.memory.rows.back()
    }

    /// This rank's rows and ids go to the gateways, those of its sources come here.
    pub fn send_rows(&self, label: Label, op: &LlDispatch, at: &StreamScope) -> Result<()> {
        let bytes = self.dispatched_bytes(op);
        self.send_there(label, &self.rows(), bytes, at)
    }

    /// This rank's weights go to the gateways, those of its sources come here.
    pub fn send_weights(&self, label: Label, at: &StreamScope) -> Result<()> {
        self.send_there(label, &self.weights(), self.weight_bytes(), at)
    }

    /// The sums of this node go to the sources, those of the gateways' nodes come here.
    pub fn send_sums(&self, label: Label, row: RowType, at: &StreamScope) -> Result<()> {
        let leg = &self.sums();
        let fill = |gateways: &[usize], sends: &mut Vec<Message>, receives: &mut Vec<Message>| {
            sends.extend(self.of_sources((leg.sends, leg.stride), row.bytes()));
            receives.extend(gateways.iter().map(|&peer| {
                let node = self.network.distance(peer).saturating_sub(1);
                let data = DevPtr(leg.receives.0 + node * leg.stride);
                message(peer, data, self.tokens, row.bytes())
            }));
        };
        self.network.exchange(label, fill, at.stream)
    }

    /// Of a token, in a dispatch.
    fn dispatched_bytes(&self, op: &LlDispatch) -> usize {
        op.wire().slot_bytes() + self.top_k * size_of::<i64>()
    }

    /// Of a token, in a combine.
    fn weight_bytes(&self) -> usize {
        self.top_k * size_of::<f32>()
    }

    /// Messages to or from the sources from 1 on: `all` are `stride` apart.
    fn of_sources(
        &self,
        (all, stride): (DevPtr, usize),
        bytes: usize,
    ) -> impl Iterator<Item = Message> + '_ {
        let ranks = self.network.sources().iter().skip(1);
        let sources = ranks.zip(self.source_tokens).enumerate();
        sources.map(move |(index, (&rank, &tokens))| {
            message(rank, DevPtr(all.0 + index * stride), tokens, bytes)
        })
    }

    /// This rank's message in `leg` goes to the gateways, those of its sources come here.
    fn send_there(&self, label: Label, leg: &Leg, bytes: usize, at: &StreamScope) -> Result<()> {
        let fill = |gateways: &[usize], sends: &mut Vec<Message>, receives: &mut Vec<Message>| {
            let own = |&peer| message(peer, leg.sends, self.tokens, bytes);
            sends.extend(gateways.iter().map(own));
            receives.extend(self.of_sources((leg.receives, leg.stride), bytes));
        };
        self.network.exchange(label, fill, at.stream)
    }
}

/// A message to or from `peer`, of a head and of `bytes` for each of its `tokens`.
fn message(peer: usize, data: DevPtr, tokens: usize, bytes: usize) -> Message {
    Message {
        peer,
        data,
        bytes: HEAD_BYTES + tokens * bytes,
    }
}
