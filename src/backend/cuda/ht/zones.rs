//! Handles whose rows are ordered by expert: the kernels that assign slots to rows, and that drop rows.

use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ht::grid::WARP;
use crate::backend::cuda::ht::handle::{CudaHt, SLOTS_OF_PAGE};
use crate::backend::cuda::ht::kept;
use crate::backend::cuda::ht::shared::HtShared;
use crate::backend::cuda::kernels::{self, LaunchShape, to_u32};
use crate::backend::cuda::params::common::{KernelOp, PeerTable};
use crate::backend::cuda::params::ht::{HtFinish, HtHandleMemory, HtReport};
use crate::backend::cuda::params::ht_kept::{
    HT_CUT_THREADS, HT_NO_SLOT, HT_ZONES_THREADS, HtCutParams, HtZones, HtZonesParams,
};
use crate::error::Result;
use crate::model::ops::{RoutingCounters, Zones};
use crate::model::tensor::DevPtr;
use std::ptr::null;

/// Over several nodes: the most blocks that notify other ranks of a rank's tokens.
const MOST_SENDERS: usize = 32;

/// The slots that a launch assigns.
pub struct SlotsOf {
    /// The address of the number of rows.
    pub rows: *const u32,
    /// The number of source ranks, and the source of the rows that this rank notifies of.
    pub sources: u32,
    pub source: u32,
    /// Over several nodes, the epoch of the route.
    pub epoch: Option<u32>,
    /// If this rank's slots are assigned, too: what to report about them.
    pub finds: Option<HtReport>,
    pub finish: HtFinish,
}

impl CudaHt {
    /// The slots of the handle's rows, if they are ordered by expert.
    pub fn zones(&self) -> Result<Option<HtZones>> {
        let at = |offset: usize| DevPtr(self.block.0 + offset);
        let (slots, begins) = (at(self.sections.slots), at(self.sections.zones));
        self.group.zones(self.routing.form.zones, (slots, begins), self.routing.top_k)
    }

    /// Enqueues the kernel that assigns slots, after the one that has counted rows into `handle`.
    pub fn find_slots(&self, handle: &HtHandleMemory, zones: &HtZones, at: &StreamScope) -> Result<()> {
        let PeerTable { ranks, rank, .. } = *self.group.context.peers();
        let page = self.memory.as_ref().map(|memory| memory.received.device().wrapping_add(SLOTS_OF_PAGE));
        let report = kept::report_params(&self.counters, page.map(|page| (page, self.epoch)));
        let of = SlotsOf {
            rows: self.rows_of(handle),
            sources: ranks,
            source: rank,
            epoch: None,
            finds: Some(report),
            finish: self.finish(),
        };
        self.group.find_slots(handle, zones, &of, at)
    }

    /// Enqueues the kernel that drops rows beyond `most`, after the one that has counted them into `handle`.
    pub fn cut(&self, handle: &HtHandleMemory, most: usize, at: &StreamScope) -> Result<()> {
        let group = &*self.group;
        let (peers, tally, layout) = (*group.context.peers(), group.tally(), group.plan.tally());
        let params = HtCutParams {
            peers,
            wait: group.context.wait(KernelOp::HtRoute),
            handle: *handle,
            ids: self.routing.ids.0 as *mut i64,
            limit: to_u32(most)?,
            max_tokens: to_u32(group.plan.max_tokens)?,
            layout: group.layout,
            own_counts: (tally + layout.own_counts) as *const u64,
            epochs: group.epochs().cast_const(),
            tally: ((tally + layout.tally) as *mut u32).wrapping_add(2 + peers.ranks as usize),
            packets: group.plan.packets(&group.layout),
            report: kept::report_params(&self.counters, None),
            finish: self.finish(),
        };
        group.context.module.launch(kernels::ht_cut(), LaunchShape::new(1, HT_CUT_THREADS), &params, at)
    }
}

impl HtShared {
    /// The parameters of a handle's slots, if rows are ordered by expert, with the tables `at` of slots and zones.
    pub fn zones(&self, form: Option<Zones>, at: (DevPtr, DevPtr), top_k: usize) -> Result<Option<HtZones>> {
        let Some(Zones { alignment, most_slots }) = form else {
            return Ok(None);
        };
        let (slots, begins) = (at.0.0 as *mut u32, at.1.0 as *mut u32);
        let experts = self.layout.local_experts;
        Ok(Some(HtZones {
            slots,
            begins,
            most_slots: to_u32(top_k)?.min(experts),
            limit: most_slots.map_or(Ok(HT_NO_SLOT), to_u32)?,
            alignment: to_u32(alignment)?,
            experts,
        }))
    }

    /// Enqueues the kernel that assigns slots.
    pub fn find_slots(&self, handle: &HtHandleMemory, zones: &HtZones, of: &SlotsOf, at: &StreamScope) -> Result<()> {
        let senders = match of.epoch {
            Some(_) => (handle.tokens as usize).div_ceil(WARP as usize).clamp(1, MOST_SENDERS),
            None => 0,
        };
        let own_counts = self.tally() + self.plan.tally().own_counts;
        let params = HtZonesParams {
            peers: *self.context.peers(),
            wait: self.context.wait(KernelOp::HtRoute),
            handle: *handle,
            zones: *zones,
            rows: of.rows,
            sources: of.sources,
            source: of.source,
            layout: self.layout,
            own_counts: own_counts as *const u64,
            report: of.finds.unwrap_or(kept::report_params(&RoutingCounters::default(), None)),
            packets: self.plan.packets(&self.layout),
            max_tokens: to_u32(self.plan.max_tokens)?,
            epochs: of.epoch.map_or(self.epochs().cast_const(), |_| null()),
            epoch: of.epoch.unwrap_or(0),
            send_blocks: to_u32(senders)?,
            finish: of.finish,
        };
        // Over several nodes, one block counts the rows of all sources.
        let sources = if of.epoch.is_some() { 1 } else { of.sources };
        let blocks = params.send_blocks + of.finds.map_or(0, |_| zones.experts * sources);
        let shape = LaunchShape::new(blocks, HT_ZONES_THREADS);
        self.context.launch_following(kernels::ht_zones(), shape, &params, false, at)
    }
}
