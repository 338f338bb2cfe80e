//! An HT handle on one node: kernel parameters and launches of its operations.

use crate::backend::cuda::agreement::disagreement;
use crate::backend::cuda::auxiliary::{CallerHeader, LIBRARY_BLOCK};
use crate::backend::cuda::driver;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory, HostPage};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ht::kept::{self, Report};
use crate::backend::cuda::ht::plan::{HandleGrids, HtLaunch};
use crate::backend::cuda::ht::shared::{
    HtShared, Inputs, Outputs, combine_params, dispatch_params, scaled_rows_of_caller,
};
use crate::backend::cuda::kernels::{self, Kernel, LaunchShape, to_u32};
use crate::backend::cuda::params::common::{CallerBlock, KernelOp};
use crate::backend::cuda::params::ht::{
    HT_DISAGREED, HtCount, HtDispatchParams, HtEntry, HtFinish, HtHandleMemory, HtReport, HtScaledDispatchParams,
};
use crate::backend::cuda::params::ht_kept::{
    HtZones, HtZonesCombineParams, HtZonesDispatchParams, HtZonesScaledDispatchParams,
};
use crate::backend::cuda::pool::Pooled;
use crate::backend::{HtBackend, opened_again};
use crate::error::Result;
use crate::model::handle_state::HtSections;
use crate::model::ops::{HtCombine, HtDispatch, IntWidth, Numbers, Routing, RoutingCounters, RowType, Stream};
use crate::model::scales::Scaled;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An HT handle on one node. What its creation computes stays on the device.
pub struct CudaHt {
    pub group: Arc<HtShared>,
    /// `None` if the handle was reopened from a caller's memory.
    pub memory: Option<Pooled<HandleMemory>>,
    pub block: DevPtr,
    pub sections: HtSections,
    /// The header of the block, if it is in a caller's memory.
    pub header: Option<CallerHeader>,
    pub grids: HandleGrids,
    /// With the ids that operations read: the caller's, or the handle's copy.
    pub routing: Routing,
    /// The caller's ids.
    pub caller_ids: Numbers,
    /// Ids per token, in the kernels' integer type.
    pub top_k: u32,
    pub counter: Option<DevPtr>,
    pub counters: RoutingCounters,
    pub epoch: u32,
    /// When the caller first queried the number of rows.
    pub first_query: OnceCell<Instant>,
}

impl CudaHt {
    /// What the routing kernel reports to the caller: everything, or only the counter, before a later kernel.
    pub fn reported_at_once(&self) -> HtReport {
        let form = &self.routing.form;
        let rows = self.counter.map(|data| Numbers { data, width: IntWidth::Bits32 });
        let of_rows = RoutingCounters { experts: rows, ..RoutingCounters::default() };
        let is_all = self.counter.is_none() && form.zones.is_none() && form.most_rows.is_none();
        kept::report_params(if is_all { &self.counters } else { &of_rows }, None)
    }

    /// Enqueues what follows the kernel that has filled `block`: finding slots if rows are ordered by expert, else
    /// dropping rows beyond a limit.
    pub fn finish_block(&self, block: &HtHandleMemory, at: &StreamScope) -> Result<()> {
        match (self.zones()?, self.routing.form.most_rows) {
            (Some(zones), _) => self.find_slots(block, &zones, at),
            (None, Some(most)) => self.cut(block, most, at),
            (None, None) => Ok(()),
        }
    }

    /// What the last of the kernels that fill the block does: the routing kernel, or that of [`Self::finish_block`].
    pub fn finish(&self) -> HtFinish {
        self.group.finish(self.caller_block())
    }

    /// What the routing kernel does at its end.
    pub fn finish_after_routing(&self) -> HtFinish {
        let form = &self.routing.form;
        let is_last = form.zones.is_none() && form.most_rows.is_none();
        if is_last { self.finish() } else { self.group.finish(LIBRARY_BLOCK) }
    }

    /// The address of the number of received rows.
    pub fn rows_of(&self, block: &HtHandleMemory) -> *const u32 {
        block.begins.wrapping_add(self.group.context.peers().ranks as usize)
    }

    /// The number of rows that this rank receives, or the error if ranks disagree on the handle; `None` until the
    /// routing kernel has reported.
    fn received(&self) -> Result<Option<u32>> {
        let page = self.memory.as_ref().map(|memory| &memory.received);
        let seen = page.and_then(|page| page.complete(0, |it| it.epoch == self.epoch));
        let Some(seen) = seen else {
            return Ok(None);
        };
        match disagreement(seen.value, self.top_k) {
            Some(error) => Err(error),
            None => Ok(Some(seen.value)),
        }
    }

    /// The handle's number in an operation's fingerprint. Zero if the block is in a caller's memory, as the host does
    /// not know the number of a reopened one; so either all ranks' blocks must be in callers' memory, or none.
    fn number(&self) -> u32 {
        match self.header {
            None => self.epoch,
            Some(_) => 0,
        }
    }

    pub fn handle_memory(&self) -> Result<HtHandleMemory> {
        let tokens = to_u32(self.routing.tokens)?;
        Ok(block_at(self.block, &self.sections, tokens, self.top_k))
    }

    /// What an operation compares of the block.
    fn caller_block(&self) -> CallerBlock {
        self.header.as_ref().map_or(LIBRARY_BLOCK, CallerHeader::block)
    }

    /// Enqueues `kernel`, then what `after` does.
    pub fn enqueue<P>(
        &self,
        kernel: Kernel<P>,
        shape: LaunchShape,
        params: &P,
        at: &StreamScope,
        after: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let group = &*self.group;
        if let Some(memory) = &self.memory {
            memory.use_at(at);
        }
        let turn = group.order.begin(at)?;
        let launched = group.context.module.launch(kernel, shape, params, at);
        turn.end_after(launched.and_then(|()| after()))
    }

    // Not inlined, for the same reason as `dispatch_scaled`.
    #[inline(never)]
    fn dispatch_by_expert(
        &self,
        op: &HtDispatch,
        (rows, zones): (HtDispatchParams, HtZones),
        launch: &HtLaunch,
        at: &StreamScope,
        after: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let shape = launch.launch;
        let Some(scaled) = &op.scaled else {
            let params = HtZonesDispatchParams { rows, zones };
            let kernel = kernels::ht_dispatch_zones();
            return self.enqueue(kernel, shape, &params, at, after);
        };
        let scaled = scaled_rows_of_caller(op.row, scaled, launch)?;
        let rows = HtScaledDispatchParams { rows, scaled };
        let params = HtZonesScaledDispatchParams { rows, zones };
        let kernel = kernels::ht_dispatch_zones_scaled();
        self.enqueue(kernel, shape, &params, at, after)
    }

    // Not inlined, so that rows without scales do not carry these parameters.
    #[inline(never)]
    fn dispatch_scaled(
        &self,
        (row, scaled): (RowType, &Scaled),
        rows: HtDispatchParams,
        launch: &HtLaunch,
        at: &StreamScope,
        after: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let params = HtScaledDispatchParams { rows, scaled: scaled_rows_of_caller(row, scaled, launch)? };
        let kernel = match scaled.cast() {
            Some(_) => kernels::ht_dispatch_cast(),
            None => kernels::ht_dispatch_scaled(),
        };
        self.enqueue(kernel, launch.launch, &params, at, after)
    }
}

impl HtBackend for CudaHt {
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()> {
        self.received()?;
        let group = &*self.group;
        let (grids, requested) = (&self.grids, op.launch);
        let launch = group.plan.launch(op.into(), &op.into(), grids, requested)?;
        let memory = self.handle_memory()?;
        let at = &group.enter(stream)?;
        let common = group.common(KernelOp::HtDispatch, &launch, self.number(), memory, self.caller_block());
        let params = dispatch_params(op, common, &Inputs::of(op, &self.routing));
        let zones = self.zones()?;
        let after = || {
            kept::move_ids(group, op, self.top_k, at)?;
            let rows = self.rows_of(&memory);
            kept::enqueue_report(group, &Report { rows, counts: memory.counts, counters: &op.counters, zones }, at)
        };
        if let Some(zones) = zones {
            return self.dispatch_by_expert(op, (params, zones), &launch, at, after);
        }
        if self.makes_offers() {
            return self.dispatch_with_offers(op, params, &launch, at, after);
        }
        match &op.scaled {
            None => {
                let (kernel, shape) = (kernels::ht_dispatch(), launch.launch);
                self.enqueue(kernel, shape, &params, at, after)
            }
            Some(scaled) => self.dispatch_scaled((op.row, scaled), params, &launch, at, after),
        }
    }

    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()> {
        self.received()?;
        let group = &*self.group;
        let (grids, requested) = (&self.grids, op.launch);
        let launch = group.plan.launch(op.into(), &op.row.into(), grids, requested)?;
        let memory = self.handle_memory()?;
        let at = &group.enter(stream)?;
        let common = group.common(KernelOp::HtCombine, &launch, self.number(), memory, self.caller_block());
        let params = combine_params(op, common, &Outputs::of(op));
        let after = || kept::order_gradients(group, op, &self.routing, at);
        let shape = launch.launch;
        if let Some(zones) = self.zones()? {
            let params = HtZonesCombineParams { rows: params, zones };
            let kernel = kernels::ht_combine_zones(op.row.dtype)?;
            return self.enqueue(kernel, shape, &params, at, after);
        }
        if self.makes_offers() {
            return self.combine_with_offers(op, params, &launch, at, after);
        }
        let kernel = kernels::ht_combine(op.row.dtype)?;
        self.enqueue(kernel, shape, &params, at, after)
    }

    fn add_counts(&self, totals: DevPtr, stream: Stream) -> Result<()> {
        let counts = self.handle_memory()?.counts;
        (self.group).add_counts(counts, totals, &self.group.enter(stream)?)
    }

    /// Waits for the routing kernel if it has not reported yet.
    fn num_recv_tokens(&self, within: Duration) -> Result<Option<usize>> {
        let page = &self.memory.as_ref().ok_or_else(opened_again)?.received;
        let slots = || page.complete(SLOTS_OF_PAGE, |it| it.epoch == self.epoch).map(|it| it.value);
        let since = *self.first_query.get_or_init(Instant::now);
        self.group.wait_within(within, since, || {
            let rows = self.received()?;
            Ok(if self.routing.form.zones.is_none() { rows } else { rows.and_then(|_| slots()) }.map(|it| it as usize))
        })
    }

    fn num_recv_tokens_in_block(&self, stream: Stream) -> Result<Option<usize>> {
        let Some(header) = &self.header else { return self.num_recv_tokens(Duration::MAX) };
        let _at = self.group.enter(stream)?;
        let rows = header.rows(stream)?.filter(|rows| rows & HT_DISAGREED == 0);
        let slots = |zones: HtZones| {
            let end = zones.begins.wrapping_add(zones.experts as usize);
            driver::download_words(1, DevPtr(end as usize), stream).map(|words| words.first().copied())
        };
        let rows = match (rows, self.zones()?) {
            (Some(_), Some(zones)) => slots(zones)?,
            (rows, _) => rows,
        };
        Ok(rows.map(|it| it as usize))
    }
}

/// The library's part of a handle's memory: the page of host memory, and the block unless the caller provides it.
pub struct HandleMemory {
    buffer: Option<Buffer>,
    bytes: usize,
    pub received: HostPage<HtCount>,
}

/// The number of rows, and the number of slots if rows are ordered by expert.
const COUNTS: usize = 2;
pub const SLOTS_OF_PAGE: usize = 1;

impl HandleMemory {
    /// Allocates the page, and a block of `bytes` unless that is 0.
    pub fn new(group: &GroupContext, memory: &Arc<CudaMemory>, bytes: usize) -> Result<Self> {
        let received = HostPage::new(&memory.context, COUNTS)?;
        let buffer = (bytes > 0).then(|| group.block(memory, bytes)).transpose()?;
        Ok(Self { buffer, bytes, received })
    }

    /// By how much the block exceeds `bytes`; `None` if it is too small, or would not be used.
    pub fn waste(&self, bytes: usize) -> Option<usize> {
        let fits = (bytes > 0) == self.buffer.is_some();
        self.bytes.checked_sub(bytes).filter(|_| fits)
    }

    /// The library's block, if there is one.
    pub fn block(&self) -> Option<DevPtr> {
        self.buffer.as_ref().map(Buffer::data)
    }
}

/// The kernel parameters for the block at `block`.
pub fn block_at(block: DevPtr, sections: &HtSections, tokens: u32, top_k: u32) -> HtHandleMemory {
    let at = |offset: usize| block.0 + offset;
    HtHandleMemory {
        entries: at(sections.entries) as *mut HtEntry,
        begins: at(sections.begins) as *mut u32,
        departures: at(sections.departures) as *mut u32,
        counts: at(sections.counts) as *mut i32,
        tokens,
        top_k,
    }
}
