//! The LL state for groups over several nodes: memory for messages, and the order of background work.
//!
//! Messages arrive in plain device memory, one buffer per channel. This needs no acknowledgements: stream order puts a
//! receive after all readers of the previous message.

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

/// A group's LL state over several nodes.
pub struct LlNetwork {
    network: Arc<Network>,
    channels: Vec<ChannelMemory>,
    /// The group's bound on tokens per rank.
    pub max_tokens: usize,
    /// The order of what staged operations send in the background, on a side stream.
    pub background_order: Order,
    /// The event that makes a side stream wait for a caller's, or the other way round.
    pub join: Mutex<DriverEvent>,
    /// For announcing that this rank refuses a handle, possibly because there is no memory for it; so the first one is
    /// allocated in advance.
    refusals: Mutex<Vec<Handshake>>,
}

impl Deref for LlNetwork {
    type Target = Network;

    fn deref(&self) -> &Network {
        &self.network
    }
}

impl LlNetwork {
    /// The LL state over `network`, for operations within the bounds of `facts`.
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

    /// The memory of `channel`.
    pub fn channel(&self, channel: u32) -> Result<&ChannelMemory> {
        let found = self.channels.get(channel as usize);
        found.ok_or_else(|| Error::internal(format!("no channel {channel}")))
    }

    /// The kernel parameters for messages in `memory`, for a handle with this number whose forwarded ranks have at most
    /// `most_tokens`.
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
            own_place: self.own_node_order(),
        })
    }

    /// Handle `number`, as it is announced to the rail peers.
    pub fn new_handle<'a>(&'a self, context: &'a GroupContext, number: u32) -> NewHandle<'a> {
        NewHandle { network: self, faults: &context.faults, what: "LL handle", number }
    }

    /// Announces handle `number` to the rail peers with the handshake `by`, which must be free.
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

    /// The side stream for background work of an operation at `at`, not ordered after `at` yet. An error if too many
    /// captures are open.
    pub fn background_of(&self, at: &StreamScope) -> Result<StreamScope> {
        Ok(at.of_same_capture(self.on_device.side.of(at.capture)?))
    }
}

const REGION_ALIGN: usize = 256;
/// Bytes before the content of each message.
pub const HEADER_BYTES: usize = size_of::<MessageHeader>();

/// A channel's memory for messages between nodes.
pub struct ChannelMemory {
    _buffer: Buffer,
    /// For rows, one per token. A dispatch sends the same message to all rail peers, and receives one from each source.
    /// A combine uses the buffers the other way round: sends a message to each source, and receives one per other node.
    pub rows: MessageBuffers,
    /// For weights, one per entry, sent and received as a dispatch's rows.
    pub weights: MessageBuffers,
}

/// Where the messages of an exchange are; each begins with a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageBuffers {
    /// The first message that this rank sends.
    pub sends: DevPtr,
    /// The first message that this rank receives.
    pub receives: DevPtr,
    /// Distance from one message to the next.
    pub stride: usize,
}

impl ChannelMemory {
    /// Memory for a rank of a group with the bounds of `facts`.
    pub fn new(memory: &Arc<CudaMemory>, view: &NodeView, facts: &GroupFacts) -> Result<Self> {
        let entries = facts.max_tokens.unwrap_or(0) * LL_MAX_TOP_K as usize;
        let mut regions = Regions::new(REGION_ALIGN);
        let mut buffers = |sends: usize, bytes: usize| {
            let stride = (HEADER_BYTES + bytes).next_multiple_of(REGION_ALIGN);
            let mut take = |messages: usize| DevPtr(regions.take(messages * stride));
            MessageBuffers { sends: take(sends), receives: take(view.remote().len()), stride }
        };
        let rows = buffers(view.others(), most_rows_bytes(facts));
        let weights = buffers(1, entries * size_of::<f32>());
        // Zeros, so that no message has a valid header before it has arrived.
        let buffer = Buffer::zeroed(memory, regions.bytes())?;
        Ok(Self { rows: rows.moved(buffer.data()), weights: weights.moved(buffer.data()), _buffer: buffer })
    }
}

/// Most bytes after a message's header within the bounds of `facts`: for each token a row, ids and weights.
pub fn most_rows_bytes(facts: &GroupFacts) -> usize {
    let entry = size_of::<i64>() + size_of::<f32>();
    let of_token = facts.row_bytes + LL_MAX_TOP_K as usize * entry;
    facts.max_tokens.unwrap_or(0) * of_token
}

impl MessageBuffers {
    /// The buffers with directions swapped, for answers.
    pub fn back(self) -> Self {
        Self { sends: self.receives, receives: self.sends, ..self }
    }

    fn moved(self, base: DevPtr) -> Self {
        Self { sends: DevPtr(base.0 + self.sends.0), receives: DevPtr(base.0 + self.receives.0), ..self }
    }
}
