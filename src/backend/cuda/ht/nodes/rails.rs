//! A group's HT state over several nodes: what handles share, their memory, and the banks that messages pass through.

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::event::DriverEvent;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory, HostPage};
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ht::nodes::messages::{Bank, TokenBytes};
use crate::backend::cuda::ht::nodes::plan::{HandleSize, NodesPlan, message_sizes};
use crate::backend::cuda::ht::shared::HtShared;
use crate::backend::cuda::kernels::to_u32;
use crate::backend::cuda::network::Network;
use crate::backend::cuda::network::two_sided::handshake::Handshake;
use crate::backend::cuda::params::common::RankOnNode;
use crate::backend::cuda::params::ht::HtCount;
use crate::backend::cuda::params::ht_nodes::{HtForwarded, HtNodes};
use crate::backend::cuda::pool::{Pool, Pooled};
use crate::error::Result;
use crate::model::handle_state::HandleLife;
use crate::model::ops::HandleForm;
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::sync::Arc;

/// A group's HT state over several nodes, shared by its handles.
pub struct Rails {
    pub plan: NodesPlan,
    pub network: Arc<Network>,
    pub memory: Arc<CudaMemory>,
    pub work: Buffer,
    pub own_counts: usize,
    pub handshake: Handshake,
    pub pool: Pool<NodesMemory>,
    /// For exchanges in which this rank refuses a handle.
    pub spare: Pooled<NodesMemory>,
    row_bytes: usize,
    ids: Mutex<Option<(Arc<Buffer>, usize)>>,
    /// New handles get the last banks. Earlier ones stay, as operations that use them may outlive their handles.
    banks: Mutex<Vec<Arc<Banks>>>,
    /// Locked while an operation is being enqueued.
    pub turn: Mutex<Turn>,
}

/// What only one operation at a time may use.
pub struct Turn {
    pub join: DriverEvent,
    /// Recorded after the messages of the last two stages.
    pub landed: [DriverEvent; 2],
}

impl Rails {
    /// The rails of a group with the plan `plan`.
    pub fn new(shared: &HtShared, network: Arc<Network>, memory: &Arc<CudaMemory>, plan: NodesPlan) -> Result<Self> {
        let on: &Arc<Context> = &shared.context.module.context;
        let tally_bytes = (plan.forwarded * plan.locals * plan.local_experts * size_of::<u32>()).next_multiple_of(256);
        let turn = Turn { join: DriverEvent::new(on)?, landed: [DriverEvent::new(on)?, DriverEvent::new(on)?] };
        let spare = NodesMemory::new(&shared.context, memory, &plan, HandleSize::default())?;
        let rails = Self {
            plan,
            network,
            memory: Arc::clone(memory),
            work: Buffer::zeroed(memory, tally_bytes + 2 * plan.counts_bytes())?,
            own_counts: tally_bytes,
            handshake: Handshake::new(memory, plan.forwarded)?,
            pool: Pool::default(),
            spare: Pooled::apart(spare, &HandleLife::default()),
            row_bytes: shared.plan.facts.row_bytes,
            ids: Mutex::default(),
            banks: Mutex::default(),
            turn: Mutex::new(turn),
        };
        if let Some(tokens) = shared.plan.facts.max_tokens {
            rails.banks_for(rails.plan.room(tokens))?;
        }
        Ok(rails)
    }

    /// The tables as a kernel parameter.
    pub fn nodes(&self) -> Result<HtNodes> {
        let plan = &self.plan;
        Ok(HtNodes {
            of_rank: self.network.on_device.of_rank.0 as *const RankOnNode,
            forwarded_by: self.network.on_device.forwarded_by.0 as *const u32,
            ranks: to_u32(plan.ranks)?,
            others: to_u32(plan.others)?,
            width: to_u32(plan.width)?,
            forwarded: to_u32(plan.forwarded)?,
            chunks: to_u32(plan.chunks)?,
        })
    }

    /// If rows are ordered by expert, the most slots that may be needed.
    pub fn slots(&self, most_tokens: usize, top_k: usize, form: HandleForm) -> usize {
        let slots = self.plan.ranks * most_tokens * top_k.min(self.plan.local_experts);
        if form.zones.is_some() { slots } else { 0 }
    }

    /// Banks for `room` tokens of a rank per stage. Grows geometrically, so that all banks are <= 2 * the largest.
    pub fn banks_for(&self, room: usize) -> Result<Arc<Banks>> {
        let mut banks = self.banks.lock();
        let present = banks.last();
        if let Some(present) = present.filter(|it| it.room >= room) {
            return Ok(Arc::clone(present));
        }
        let room = room.max(present.map_or(0, |it| 2 * it.room));
        let larger = Arc::new(Banks::new(&self.memory, &self.plan, room, self.row_bytes)?);
        banks.push(Arc::clone(&larger));
        Ok(larger)
    }

    /// Memory for `bytes` of other ranks' ids, valid until the next handle is created.
    pub fn ids_for(&self, bytes: usize) -> Result<Arc<Buffer>> {
        let mut ids = self.ids.lock();
        if let Some((present, _)) = ids.as_ref().filter(|(_, there)| *there >= bytes) {
            return Ok(Arc::clone(present));
        }
        let bytes = bytes.next_power_of_two();
        let larger = Arc::new(Buffer::new(&self.memory, bytes)?);
        *ids = Some((Arc::clone(&larger), bytes));
        Ok(larger)
    }
}

/// A handle's memory: pages shared by host and device, and device memory, not used if the caller provides a block.
pub struct NodesMemory {
    buffer: Buffer,
    bytes: usize,
    /// Counts of tokens that cross the network, the most tokens of a rank, the rows that this one receives, with zones
    /// also the slots; then how many rows ranks keep.
    pub announced: HostPage<HtCount>,
    /// The forwarded ranks, read only by `ht_route_nodes`.
    pub forwarded: HostPage<HtForwarded>,
}

impl NodesMemory {
    /// Memory for a handle of this `size`.
    pub fn new(group: &GroupContext, memory: &Arc<CudaMemory>, plan: &NodesPlan, size: HandleSize) -> Result<Self> {
        let bytes = plan.memory(0, size)?.bytes;
        let announced = HostPage::new(&memory.context, plan.announced() + 1 + plan.ranks)?;
        let forwarded = HostPage::new(&memory.context, plan.forwarded)?;
        Ok(Self { buffer: group.block(memory, bytes)?, bytes, announced, forwarded })
    }

    /// By how much this memory exceeds `bytes`; `None` if it is too small.
    pub fn waste(&self, bytes: usize) -> Option<usize> {
        self.bytes.checked_sub(bytes)
    }

    /// The start of the device memory.
    pub fn data(&self) -> DevPtr {
        self.buffer.data()
    }
}

/// Memory for the messages of stages: two banks for those of remote sources and two for this rank's own, which stages
/// use alternately.
pub struct Banks {
    buffer: Buffer,
    /// Most tokens of a rank in a stage.
    pub room: usize,
    /// Offset of a message's first row.
    first_row: usize,
    /// Bytes of a message.
    stride: usize,
    /// Messages per bank of remote sources, and per bank of this rank's own.
    remote: usize,
    others: usize,
}

impl Banks {
    /// Banks for stages of up to `room` tokens of a rank, with rows of up to `row_bytes`.
    pub fn new(memory: &Arc<CudaMemory>, plan: &NodesPlan, room: usize, row_bytes: usize) -> Result<Self> {
        let (first_row, stride) = message_sizes(room, row_bytes);
        let (remote, others) = (plan.forwarded - 1, plan.others);
        Ok(Self {
            buffer: Buffer::new(memory, 2 * (remote + others) * stride)?,
            room,
            first_row,
            stride,
            remote,
            others,
        })
    }

    /// The bank of stage `stage` for messages to or from remote sources.
    pub fn of_remote(&self, stage: usize, bytes: TokenBytes) -> Bank {
        self.bank(stage % 2 * self.remote, bytes)
    }

    /// The bank of stage `stage` for messages to or from rail peers.
    pub fn own(&self, stage: usize, bytes: TokenBytes) -> Bank {
        self.bank(2 * self.remote + stage % 2 * self.others, bytes)
    }

    /// The bank that begins with message number `first` of the memory.
    fn bank(&self, first: usize, bytes: TokenBytes) -> Bank {
        Bank { rows: self.buffer.data().0 + first * self.stride + self.first_row, stride: self.stride, bytes }
    }
}
