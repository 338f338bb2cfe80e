//! Handles whose rows lie by expert: where their slots are found, and the kernels that know of them.

use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ht::grid::WARP;
use crate::backend::cuda::ht::handle::CudaHt;
use crate::backend::cuda::ht::kept;
use crate::backend::cuda::ht::memory::SLOTS_OF_PAGE;
use crate::backend::cuda::kernels;
use crate::backend::cuda::params::common::KernelOp;
use crate::backend::cuda::params::ht::HtHandleMemory;
use crate::backend::cuda::params::ht_kept::{HT_NO_SLOT, HT_ZONES_THREADS, HtZones, HtZonesParams};
use crate::backend::cuda::regions::to_u32;
use crate::error::Result;
use crate::model::ops::Zones;

/// Blocks that tell others of this rank's tokens.
const MOST_SENDERS: usize = 32;

impl CudaHt {
    /// The slots of its rows, if they lie by expert.
    pub fn zones(&self) -> Result<Option<HtZones>> {
        let Some(Zones { alignment, most_slots }) = self.routing.form.zones else {
            return Ok(None);
        };
        let at = |offset: usize| (self.block.0 + offset) as *mut u32;
        let experts = self.group.layout.local_experts;
        Ok(Some(HtZones {
            slots: at(self.sections.slots),
            begins: at(self.sections.zones),
            most_slots: self.top_k.min(experts),
            limit: most_slots.map_or(Ok(HT_NO_SLOT), to_u32)?,
            alignment: to_u32(alignment)?,
            experts,
        }))
    }

    /// Enqueues the kernel that finds the slots and tells the caller of them, behind that which has counted rows into
    /// `handle`.
    pub fn find_slots(&self, handle: &HtHandleMemory, zones: HtZones, at: &StreamScope) -> Result<()> {
        let group = &self.group;
        let senders = (handle.tokens as usize).div_ceil(WARP as usize).clamp(1, MOST_SENDERS);
        let page = self.memory.as_ref().map(|memory| memory.received.device().wrapping_add(SLOTS_OF_PAGE));
        let params = HtZonesParams {
            peers: group.context.peers(),
            wait: group.context.wait(KernelOp::HtRoute),
            handle: *handle,
            zones,
            layout: group.layout,
            own_counts: (group.tally() + group.plan.tally().own_counts) as *const u64,
            told: kept::told(&self.counters, page.map(|page| (page, self.epoch))),
            packets: group.plan.packets(&group.layout),
            max_tokens: to_u32(group.plan.max_tokens())?,
            epochs: group.epochs(),
            send_blocks: to_u32(senders)?,
        };
        let blocks = params.send_blocks + zones.experts * params.peers.ranks;
        let shape = LaunchShape::new(blocks, HT_ZONES_THREADS);
        let module = &group.context.module;
        module.launch(kernels::ht_zones(), shape, &params, at)
    }
}
