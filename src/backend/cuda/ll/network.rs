//! What LL operations need only over several nodes: memory for what crosses the network, and the order of background
//! work.
//!
//! Messages are received into plain device memory, one buffer per channel. No acknowledgements are needed: a receive is
//! enqueued after all readers of the previous message.

use crate::backend::cuda::agreement::verdict_refusing;
use crate::backend::cuda::driver::context_handle::ApartFromCaptures;
use crate::backend::cuda::driver::event::DriverEvent;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::kernels::to_u32;
use crate::backend::cuda::network::Network;
use crate::backend::cuda::network::two_sided::handshake::{Announced, Handshake, NewHandle};
use crate::backend::cuda::order::Order;
use crate::backend::cuda::params::common::{MessageHeader, RankOnNode};
use crate::backend::cuda::params::ll::{LL_CHANNELS, LL_MAX_TOP_K, LlNodes};
use crate::error::{Error, Result};
use crate::model::group::GroupFacts;
use crate::model::node_view::NodeView;
use crate::model::regions::Regions;
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::ops::Deref;
use std::sync::Arc;

/// The LL side of a group's network.
pub struct LlNetwork {
    network: Arc<Network>,
    channels: Vec<ChannelMemory>,
    /// The bound on tokens per rank.
    pub max_tokens: usize,
    /// The order of what staged operations send, on a side stream.
    pub background_order: Order,
    /// Joins a side stream to a caller's, and back.
    pub join: Mutex<DriverEvent>,
    /// With which this rank announces that it refuses a handle, as memory for the handle itself may be lacking. One is
    /// allocated from the start.
    refusals: Mutex<Vec<Handshake>>,
}

impl Deref for LlNetwork {
    type Target = Network;

    fn deref(&self) -> &Network {
        &self.network
    }
}

impl LlNetwork {
    /// The LL side of `network`, for operations with the bounds of `facts`.
    pub fn new(network: Arc<Network>, memory: &Arc<CudaMemory>, facts: &GroupFacts) -> Result<Self> {
        let context = &memory.context;
        let channel = |_| ChannelMemory::new(memory, &network.view, facts);
        Ok(Self {
            channels: (0..LL_CHANNELS).map(channel).collect::<Result<_>>()?,
            max_tokens: facts.max_tokens.unwrap_or(0),
            background_order: Order::new(context)?,
            join: Mutex::new(DriverEvent::new(context)?),
            refusals: Mutex::new(vec![Handshake::new(memory, network.view.forwarded().len())?]),
            network,
        })
    }

    /// The memory of channel `channel`.
    pub fn channel(&self, channel: u32) -> Result<&ChannelMemory> {
        let found = self.channels.get(channel as usize);
        found.ok_or_else(|| Error::internal(format!("no channel {channel}")))
    }

    /// The network's parameters for kernels: the addresses of messages, the handle's number, and the most tokens of a
    /// forwarded rank.
    pub fn nodes(&self, memory: &ChannelMemory, (handle, most_tokens): (u32, u32)) -> Result<LlNodes> {
        let (view, tables) = (&self.view, &self.on_device);
        let (sums, weights) = (memory.rows.back(), memory.weights);
        Ok(LlNodes {
            of_rank: tables.of_rank.0 as *const RankOnNode,
            rank_of_peer: tables.local_ranks.0 as *const u32,
            rank_of_source: tables.forwarded.0 as *const u32,
            rail_peers: tables.rail_peers.0 as *const u32,
            rows: sums.sends.0 as *mut u8,
            weights: weights.receives.0 as *const u8,
            returned: sums.receives.0 as *const u8,
            rows_stride: sums.stride as u64,
            weights_stride: weights.stride as u64,
            ranks: to_u32(view.topology.ranks())?,
            rank: view.rank.word(),
            sources: to_u32(view.forwarded().len())?,
            most_tokens,
            handle,
            other_nodes: to_u32(view.others())?,
            own_place: self.own_place(),
        })
    }

    /// Handle `number`, about to be announced to the rail peers.
    pub fn new_handle<'a>(&'a self, context: &'a GroupContext, number: u32) -> NewHandle<'a> {
        NewHandle { network: self, faults: &context.faults, what: "LL handle", number }
    }

    /// Announces this rank's part of handle `number` to the rail peers, with a handshake that is free.
    pub fn announce(&self, context: &GroupContext, number: u32, by: &Handshake, own: Announced) -> Result<()> {
        let _apart = ApartFromCaptures::enter()?;
        let at = &context.module.enter(self.on_device.side.outside())?;
        let turn = self.background_order.begin(at)?;
        turn.end_after(by.send(&self.new_handle(context, number), own, at))
    }

    /// Announces that this rank refuses handle `number`.
    pub fn refuse(&self, context: &GroupContext, memory: &Arc<CudaMemory>, number: u32, error: &Error) -> Result<()> {
        let own = Announced { tokens: 0, verdict: verdict_refusing(error) };
        let mut refusals = self.refusals.lock();
        let by = match refusals.iter().position(Handshake::is_free) {
            Some(free) => refusals.swap_remove(free),
            None => Handshake::new(memory, self.view.forwarded().len())?,
        };
        let announced = self.announce(context, number, &by, own);
        refusals.push(by);
        announced
    }

    /// The side stream for background work of an operation at `at`, not ordered after `at` yet. Refuses a capture if
    /// too many are open.
    pub fn background_of(&self, at: &StreamScope) -> Result<StreamScope> {
        Ok(at.of_same_capture(self.on_device.side.of(at.capture)?))
    }
}

const REGION_ALIGN: usize = 256;
/// Bytes in front of each message.
pub const HEADER_BYTES: usize = size_of::<MessageHeader>();

/// A channel's memory for what crosses the network.
pub struct ChannelMemory {
    _buffer: Buffer,
    /// Messages with a row for each token. A dispatch sends one to all rail peers, and receives one from each source.
    /// On the way back, a combine sends one to each source, and receives one from each other node.
    pub rows: Leg,
    /// Messages with a weight for each entry, which travel the same way, but not back.
    pub weights: Leg,
}

/// The messages of one exchange. Each begins with a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leg {
    /// The first message that this rank sends.
    pub sends: DevPtr,
    /// The first message that it receives.
    pub receives: DevPtr,
    /// Distance from one message to the next.
    pub stride: usize,
}

impl ChannelMemory {
    /// Memory for a rank of a group with the bounds of `facts`.
    pub fn new(memory: &Arc<CudaMemory>, view: &NodeView, facts: &GroupFacts) -> Result<Self> {
        let entries = facts.max_tokens.unwrap_or(0) * LL_MAX_TOP_K as usize;
        let mut regions = Regions::new(REGION_ALIGN);
        let mut leg = |sends: usize, bytes: usize| {
            let stride = (HEADER_BYTES + bytes).next_multiple_of(REGION_ALIGN);
            let mut take = |messages: usize| DevPtr(regions.take(messages * stride));
            Leg { sends: take(sends), receives: take(view.remote().len()), stride }
        };
        let rows = leg(view.others(), most_rows_bytes(facts));
        let weights = leg(1, entries * size_of::<f32>());
        // Must not look like the header of any operation.
        let buffer = Buffer::zeroed(memory, regions.bytes())?;
        Ok(Self { rows: rows.moved(buffer.data()), weights: weights.moved(buffer.data()), _buffer: buffer })
    }
}

/// Most bytes behind the header of a message in a group with the bounds of `facts`: for each token a row, ids and
/// weights.
pub fn most_rows_bytes(facts: &GroupFacts) -> usize {
    let entry = size_of::<i64>() + size_of::<f32>();
    let of_token = facts.row_bytes + LL_MAX_TOP_K as usize * entry;
    facts.max_tokens.unwrap_or(0) * of_token
}

impl Leg {
    /// The way back: messages go where others came from.
    pub fn back(self) -> Self {
        Self { sends: self.receives, receives: self.sends, ..self }
    }

    fn moved(self, base: DevPtr) -> Self {
        Self { sends: DevPtr(base.0 + self.sends.0), receives: DevPtr(base.0 + self.receives.0), ..self }
    }
}
