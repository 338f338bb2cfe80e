//! What the handles of a group over several nodes share.

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::event::DriverEvent;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::ht::nodes::memory::{Banks, NodesMemory};
use crate::backend::cuda::ht::nodes::plan::{HandleSize, NodesPlan};
use crate::backend::cuda::ht::shared::HtShared;
use crate::backend::cuda::network::Network;
use crate::backend::cuda::network::two_sided::handshake::Handshake;
use crate::backend::cuda::params::common::RankOnNode;
use crate::backend::cuda::params::ht_nodes::HtNodes;
use crate::backend::cuda::pool::Pool;
use crate::backend::cuda::regions::to_u32;
use crate::error::Result;
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
    /// For a rank that refuses its part of a handle.
    pub spare: Arc<NodesMemory>,
    row_bytes: usize,
    ids: Mutex<Option<(Arc<Buffer>, usize)>>,
    /// The last serve new handles. Earlier ones stay, as operations that use them may outlive their handles.
    banks: Mutex<Vec<Arc<Banks>>>,
    /// As well, of `HtSpreadParams`.
    apart: Mutex<Vec<(Arc<Buffer>, usize)>>,
    /// Locked while an operation is enqueued.
    pub turn: Mutex<Turn>,
}

/// What operations need one at a time.
pub struct Turn {
    pub join: DriverEvent,
    /// Of the last two stages on the network.
    pub landed: [DriverEvent; 2],
}

impl Rails {
    /// The rails of a group with the plan `plan`.
    pub fn new(shared: &HtShared, network: Arc<Network>, memory: &Arc<CudaMemory>, plan: NodesPlan) -> Result<Self> {
        let on: &Arc<Context> = shared.context.module.context();
        let tally_bytes = (plan.forwarded * plan.locals * plan.local_experts * size_of::<u32>()).next_multiple_of(256);
        let turn = Turn { join: DriverEvent::new(on)?, landed: [DriverEvent::new(on)?, DriverEvent::new(on)?] };
        let spare = NodesMemory::new(on, memory, &plan, HandleSize::default())?;
        let rails = Self {
            plan,
            network,
            memory: Arc::clone(memory),
            work: Buffer::zeroed(memory, tally_bytes + 2 * plan.counts_bytes())?,
            own_counts: tally_bytes,
            handshake: Handshake::new(memory, plan.forwarded)?,
            pool: Pool::default(),
            spare: Arc::new(spare),
            row_bytes: shared.plan.row_bytes(),
            ids: Mutex::default(),
            banks: Mutex::default(),
            apart: Mutex::default(),
            turn: Mutex::new(turn),
        };
        if let Some(tokens) = shared.plan.bound() {
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

    /// Memory for `bytes` of rows as they come, where they lie by expert.
    pub fn apart_for(&self, bytes: usize) -> Result<Arc<Buffer>> {
        let mut all = self.apart.lock();
        if let Some((present, _)) = all.last().filter(|(_, there)| *there >= bytes) {
            return Ok(Arc::clone(present));
        }
        let bytes = bytes.next_power_of_two();
        let larger = Arc::new(Buffer::new(&self.memory, bytes)?);
        all.push((Arc::clone(&larger), bytes));
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
