//! What handles over several nodes share, the memory of each, and the banks that rows pass through.

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
use crate::backend::cuda::pool::{Pool, PooledMemory};
use crate::error::Result;
use crate::model::handle_state::HandleLife;
use crate::model::ops::HandleForm;
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::sync::Arc;

/// What the handles of a group over several nodes share.
pub struct Rails {
    pub plan: NodesPlan,
    pub network: Arc<Network>,
    pub memory: Arc<CudaMemory>,
    pub work: Buffer,
    pub own_counts: usize,
    pub handshake: Handshake,
    pub pool: Pool<NodesMemory>,
    /// For a rank that refuses its part in a handle.
    pub spare: PooledMemory<NodesMemory>,
    row_bytes: usize,
    ids: Mutex<Option<(Arc<Buffer>, usize)>>,
    /// The last ones serve new handles. Earlier ones stay, as operations that use them may outlive their handles.
    banks: Mutex<Vec<Arc<Banks>>>,
    /// Locked while an operation is enqueued.
    pub turn: Mutex<Turn>,
}

/// What one operation at a time uses.
pub struct Turn {
    pub join: DriverEvent,
    /// For the last two stages on the network.
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
            spare: PooledMemory::apart(spare, &HandleLife::default()),
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

    /// If rows lie by expert, the most slots that may be needed.
    pub fn slots(&self, most_tokens: usize, top_k: usize, form: HandleForm) -> usize {
        let slots = self.plan.ranks * most_tokens * top_k.min(self.plan.local_experts);
        if form.zones.is_some() { slots } else { 0 }
    }

    /// Banks with room for so many tokens of a rank in a stage. Grows geometrically: total <= 2 * largest.
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

    /// Memory for `bytes` of other ranks' ids, until the next handle is made.
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

/// One handle's memory: device memory, unused if the handle is in a caller's, and pages that host and device share.
pub struct NodesMemory {
    buffer: Buffer,
    bytes: usize,
    /// Counts of travelling tokens, the most that a rank has, and the rows that this one receives; with zones also the
    /// slots; then what ranks tell each other about room.
    pub announced: HostPage<HtCount>,
    /// The forwarded ranks, for `ht_route_nodes` alone.
    pub forwarded: HostPage<HtForwarded>,
}

impl NodesMemory {
    /// Allocates memory for a handle of this `size`.
    pub fn new(group: &GroupContext, memory: &Arc<CudaMemory>, plan: &NodesPlan, size: HandleSize) -> Result<Self> {
        let bytes = plan.memory(0, size)?.bytes;
        let announced = HostPage::new(&memory.context, plan.announced() + 1 + plan.ranks)?;
        let forwarded = HostPage::new(&memory.context, plan.forwarded)?;
        Ok(Self { buffer: group.block(memory, bytes)?, bytes, announced, forwarded })
    }

    /// The excess of this memory over `bytes`; `None` if it is too small.
    pub fn waste(&self, bytes: usize) -> Option<usize> {
        self.bytes.checked_sub(bytes)
    }

    /// The start of the device memory.
    pub fn data(&self) -> DevPtr {
        self.buffer.data()
    }
}

/// The messages of a stage on their way between nodes: those with the remote ranks, and this rank's own. Two of each,
/// used alternately.
pub struct Banks {
    buffer: Buffer,
    /// Most tokens of a rank in a stage.
    pub room: usize,
    /// Offset of a message's first row.
    first_row: usize,
    /// Bytes of a message.
    stride: usize,
    /// Messages per bank with the remote ranks, and per bank of this rank.
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

    /// The bank of stage number `stage` for messages with the remote ranks.
    pub fn of_remote(&self, stage: usize, bytes: TokenBytes) -> Bank {
        self.bank(stage % 2 * self.remote, bytes)
    }

    /// The bank of stage number `stage` for messages with the rail peers.
    pub fn own(&self, stage: usize, bytes: TokenBytes) -> Bank {
        self.bank(2 * self.remote + stage % 2 * self.others, bytes)
    }

    /// The bank that begins with message number `first` of all.
    fn bank(&self, first: usize, bytes: TokenBytes) -> Bank {
        Bank { rows: self.buffer.data().0 + first * self.stride + self.first_row, stride: self.stride, bytes }
    }
}
