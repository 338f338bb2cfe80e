//! Launches that only handles that keep their ids need: reports in any integer width, ids and gradients ordered by k.

use crate::backend::cuda::auxiliary::IdCopy;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ht::shared::HtShared;
use crate::backend::cuda::kernels::{self, LaunchShape, to_u32};
use crate::backend::cuda::params::ht::{HtCount, HtNumbers, HtReport};
use crate::backend::cuda::params::ht_kept::{
    HT_BY_K_THREADS, HT_COUNTERS_THREADS, HtByKParams, HtCountersParams, HtZones,
};
use crate::error::Result;
use crate::model::ops::{HtCombine, HtDispatch, IntWidth, Numbers, Routing, RoutingCounters};
use std::ptr::null_mut;

/// Tokens per block of `ht_by_k`, a warp for each.
const BLOCK_TOKENS: usize = HT_BY_K_THREADS as usize / 32;
const MOST_BLOCKS: usize = 512;

/// The device memory that a routing's report to the caller is made from.
pub struct Report<'a> {
    /// The number of received rows, or `HT_DISAGREED`.
    pub rows: *const u32,
    /// The number of rows of each expert.
    pub counts: *const i32,
    pub counters: &'a RoutingCounters,
    /// If rows are ordered by expert.
    pub zones: Option<HtZones>,
}

/// Enqueues a routing's report to the caller, after the routing.
pub fn enqueue_report(group: &HtShared, report: &Report<'_>, at: &StreamScope) -> Result<()> {
    let Report { rows, counts, counters, zones } = *report;
    if *counters == RoutingCounters::default() {
        return Ok(());
    }
    let params = HtCountersParams {
        rows,
        counts,
        report: report_params(counters, None),
        zones: zones.unwrap_or(NO_ZONES),
        local_experts: group.layout.local_experts,
    };
    let shape = LaunchShape::new(1, HT_COUNTERS_THREADS);
    group.context.module.launch(kernels::ht_counters(), shape, &params, at)
}

/// The kernel parameters for a report; with zones, `page` in host memory gets the number of slots and the handle's.
pub fn report_params(counters: &RoutingCounters, page: Option<(*mut HtCount, u32)>) -> HtReport {
    let (page, epoch) = page.unwrap_or((null_mut(), 0));
    HtReport {
        experts: numbers(counters.experts),
        total: numbers(counters.total),
        offsets: numbers(counters.offsets),
        page,
        epoch,
    }
}

const NO_ZONES: HtZones =
    HtZones { slots: null_mut(), begins: null_mut(), most_slots: 0, limit: 0, alignment: 0, experts: 0 };

/// Enqueues, after a dispatch, rebasing the ids that it has delivered to the caller's numbering.
pub fn move_ids(group: &HtShared, op: &HtDispatch, top_k: u32, at: &StreamScope) -> Result<()> {
    let Some(out) = op.routing_out.filter(|_| op.first_id > 0) else {
        return Ok(());
    };
    let from = Numbers { data: out.ids, width: IntWidth::Bits64 };
    let copy = IdCopy { from, to: out.ids, count: out.rows * top_k as usize, offset: op.first_id };
    copy.enqueue(&group.context, at)
}

fn numbers(given: Option<Numbers>) -> HtNumbers {
    given.map_or(HtNumbers { data: null_mut(), is_wide: 0 }, |it| HtNumbers {
        data: it.data.0 as *mut _,
        is_wide: u32::from(it.width == IntWidth::Bits64),
    })
}

/// Enqueues, after a combine, moving its gradients to the positions of their ids in `routing`.
pub fn order_gradients(group: &HtShared, op: &HtCombine, routing: &Routing, at: &StreamScope) -> Result<()> {
    let Some(gradients) = op.gradients.filter(|it| it.by_k && routing.tokens > 0) else {
        return Ok(());
    };
    let params = HtByKParams {
        topk_idx: routing.ids.0 as *const i64,
        gradients: gradients.output.0 as *mut f32,
        experts: to_u32(group.plan.all_experts)?,
        tokens: to_u32(routing.tokens)?,
        top_k: to_u32(routing.top_k)?,
    };
    let blocks = routing.tokens.div_ceil(BLOCK_TOKENS).min(MOST_BLOCKS);
    let shape = LaunchShape::new(to_u32(blocks)?, HT_BY_K_THREADS);
    group.context.module.launch(kernels::ht_by_k(), shape, &params, at)
}
