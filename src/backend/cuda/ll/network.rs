//! What LL operations over several nodes have beside those on one: memory for what crosses the network, and the order
//! of what runs behind the caller's own work.

use crate::backend::cuda::driver::event::DriverEvent;
use crate::backend::cuda::driver::memory::CudaMemory;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ll::messages::ChannelMemory;
use crate::backend::cuda::network::Network;
use crate::backend::cuda::order::Order;
use crate::backend::cuda::params::common::RankOnNode;
use crate::backend::cuda::params::ll::{LL_CHANNELS, LlNodes};
use crate::backend::cuda::regions::to_u32;
use crate::error::{Error, Result};
use crate::model::group::GroupFacts;
use parking_lot::Mutex;
use std::ops::Deref;
use std::sync::Arc;

/// The LL side of a group's network.
pub struct LlNetwork {
    network: Arc<Network>,
    channels: Vec<ChannelMemory>,
    /// Bound of tokens per rank.
    pub max_tokens: usize,
    /// The order of what staged operations send, on a side stream.
    pub background_order: Order,
    /// Where a side stream begins to follow a caller's, or that one the side stream.
    pub join: Mutex<DriverEvent>,
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
        let context = memory.context();
        let channel = |_| ChannelMemory::new(memory, &network.view, facts);
        Ok(Self {
            channels: (0..LL_CHANNELS).map(channel).collect::<Result<_>>()?,
            max_tokens: facts.max_tokens.unwrap_or(0),
            background_order: Order::new(context)?,
            join: Mutex::new(DriverEvent::new(context)?),
            network,
        })
    }

    /// The memory of channel `channel`.
    pub fn channel(&self, channel: u32) -> Result<&ChannelMemory> {
        let found = self.channels.get(channel as usize);
        found.ok_or_else(|| Error::internal(format!("no channel {channel}")))
    }

    /// What kernels need of the network: where messages lie, and the number of the handle and the most tokens of a
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

    /// The side stream for what belongs to an operation at `at`. It does not follow `at` yet. Refuses a capture if too
    /// many are open.
    pub fn background_of(&self, at: &StreamScope) -> Result<StreamScope> {
        at.of_same_capture(self.on_device.side.of(at.capture)?)
    }
}
