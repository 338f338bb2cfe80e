//! High-throughput operations: checked operation -> kernel parameters -> launch.

mod agreement;
pub mod fault;
mod fingerprint;
mod grid;
mod memory;
mod nodes;
pub mod plan;
mod rows;
mod scaled;
mod shared;

use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::handle_header::GivenHeader;
use crate::backend::cuda::ht::agreement::{disagreement, verdict_refusing, verdict_with};
use crate::backend::cuda::ht::memory::{HandleMemory, block_at};
use crate::backend::cuda::ht::nodes::Rails;
use crate::backend::cuda::ht::plan::{HandleGrids, HtLaunch, HtPlan};
use crate::backend::cuda::ht::shared::{
    HtShared, Inputs, Outputs, combine_params, dispatch_params, saturated,
};
use crate::backend::cuda::kernels::{self, Kernel};
use crate::backend::cuda::network::Network;
use crate::backend::cuda::params::common::KernelOp;
use crate::backend::cuda::params::ht::{
    HtDispatchParams, HtHandleMemory, HtLayout, HtRouteParams, HtScaledDispatchParams,
};
use crate::backend::cuda::pool::Pool;
use crate::backend::cuda::regions::to_u32;
use crate::backend::{HtBackend, HtRouting, opened_again};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use crate::log;
use crate::model::handle_state::{GivenBlock, HandleHome, HtSections};
use crate::model::ops::{HtCombine, HtDispatch, Routing, RowType, Stream};
use crate::model::scales::Scaled;
use crate::model::tensor::DevPtr;
use std::ptr::{null, null_mut};
use std::sync::Arc;

/// The HT side of a group: on one node, or on several.
pub struct HtGroup {
    shared: Arc<HtShared>,
    memory: Arc<CudaMemory>,
    pool: Pool<HandleMemory>,
    tally: Buffer,
    /// `None` on one node.
    rails: Option<Arc<Rails>>,
}

impl HtGroup {
    /// The HT side of a group; `layout` has the offsets of `plan`'s regions in the windows.
    pub fn new(
        context: Arc<GroupContext>,
        network: Option<Arc<Network>>,
        memory: &Arc<CudaMemory>,
        plan: HtPlan,
        layout: HtLayout,
    ) -> Result<Self> {
        let shared = Arc::new(HtShared::new(context, memory, plan, layout)?);
        let rails = match (network, plan.nodes()) {
            (Some(network), Some(nodes)) => {
                Some(Arc::new(Rails::new(&shared, network, memory, nodes)?))
            }
            _ => None,
        };
        Ok(Self {
            shared,
            memory: Arc::clone(memory),
            pool: Pool::default(),
            tally: Buffer::zeroed(memory, plan.tally().bytes)?,
            rails,
        })
    }

    /// This rank's part of a new handle.
    pub fn open_handle(
        self: &Arc<Self>,
        wanted: Result<HtRouting>,
        stream: Stream,
    ) -> Result<Box<dyn HtBackend>> {
        self.shared.context.renew_tuning();
        Ok(match &self.rails {
            Some(rails) => Box::new(nodes::open_handle(&self.shared, rails, wanted, stream)?),
            None => Box::new(self.open_on_one_node(wanted, stream)?),
        })
    }

    /// A handle over what lies in `block`, of a group on one node.
    pub fn reopen_handle(
        self: &Arc<Self>,
        routing: Routing,
        block: GivenBlock,
    ) -> Result<Box<dyn HtBackend>> {
        let wanted = HtRouting {
            routing,
            counter: None,
            home: HandleHome::Given(block),
        };
        Ok(Box::new(self.handle(wanted, None, 0)?))
    }

    /// All ranks create handles in the same order, but none waits for another here: a rank that cannot take part
    /// announces that by a kernel, too.
    fn open_on_one_node(
        self: &Arc<Self>,
        wanted: Result<HtRouting>,
        stream: Stream,
    ) -> Result<CudaHt> {
        let epoch = self.shared.next_handle();
        let at = &self.shared.enter(stream)?;
        if at.is_captured() {
            // The exchange of a captured creation would be too late for the other ranks, and
            // repeated.
            return Err(Error::usage(
                Subject::Stream,
                InSequence::NoCaptureOfRouting,
            ));
        }
        let prepared = wanted.and_then(|wanted| {
            let handle = self.prepare(wanted, epoch)?;
            Ok((handle.route_params()?, handle))
        });
        match prepared {
            Ok((params, handle)) => {
                self.launch_route(handle.routing.tokens, &params, handle.header.as_ref(), at)?;
                Ok(handle)
            }
            Err(error) => {
                let params = self.route_params(epoch, verdict_refusing(&error));
                // If even this launch fails, the others find out at their deadline.
                self.launch_route(0, &params, None, at)
                    .unwrap_or_else(|cause| log::warn(&cause.text()));
                Err(error)
            }
        }
    }

    /// Handle number `epoch` of the group, before it is announced to the others.
    fn prepare(self: &Arc<Self>, wanted: HtRouting, epoch: u32) -> Result<CudaHt> {
        let Routing { tokens, top_k, .. } = wanted.routing;
        let bytes = match wanted.home {
            HandleHome::Own => self.shared.plan.handle(tokens, top_k).bytes,
            HandleHome::Given(_) => 0,
        };
        let context = self.shared.context.module.context();
        let waste = |memory: &HandleMemory| memory.waste(bytes);
        let make = || HandleMemory::new(context, &self.memory, bytes);
        self.handle(wanted, Some(self.pool.take(waste, make)?), epoch)
    }

    /// Handle number `epoch`; what the library has of its memory is `memory`.
    fn handle(
        self: &Arc<Self>,
        wanted: HtRouting,
        memory: Option<Arc<HandleMemory>>,
        epoch: u32,
    ) -> Result<CudaHt> {
        let (plan, routing) = (&self.shared.plan, wanted.routing);
        let given = wanted.home.given().map(|GivenBlock(block)| block);
        let own = memory.as_ref().and_then(|memory| memory.block());
        Ok(CudaHt {
            group: Arc::clone(self),
            memory,
            block: given.or(own).unwrap_or_default(),
            sections: plan.handle(routing.tokens, routing.top_k),
            header: given.map(|block| GivenHeader::new(block, plan.header(&routing, epoch))),
            grids: self.shared.grids(&routing),
            routing,
            top_k: to_u32(routing.top_k)?,
            counter: wanted.counter,
            epoch,
        })
    }

    /// Parameters of the exchange of handle number `epoch` that announces `verdict` and stores no
    /// result.
    fn route_params(&self, epoch: u32, verdict: u32) -> HtRouteParams {
        let (tally, layout) = (self.tally.data().0, self.shared.plan.tally());
        HtRouteParams {
            peers: self.shared.context.peers(),
            wait: self.shared.context.wait(KernelOp::HtRoute),
            layout: self.shared.layout,
            handle: HtHandleMemory {
                entries: null_mut(),
                begins: null_mut(),
                departures: null_mut(),
                counts: null_mut(),
                tokens: 0,
                top_k: 0,
            },
            topk_idx: null(),
            counter: null_mut(),
            received: null_mut(),
            tally: (tally + layout.tally) as *mut u32,
            own_counts: (tally + layout.own_counts) as *mut u64,
            max_tokens: saturated(self.shared.plan.max_tokens()),
            epoch,
            bank: 0,
            block_tokens: 0,
            verdict,
        }
    }

    /// `header` is that of a block in a caller's memory.
    fn launch_route(
        &self,
        tokens: usize,
        params: &HtRouteParams,
        header: Option<&GivenHeader>,
        at: &StreamScope,
    ) -> Result<()> {
        let (shape, block_tokens) = self.shared.plan.route_grid(tokens, self.shared.device)?;
        let params = HtRouteParams {
            bank: self.shared.next_bank(),
            block_tokens,
            ..*params
        };
        let Some(header) = header else {
            return self.shared.enqueue(kernels::ht_route(), shape, &params, at);
        };
        let context = &self.shared.context;
        let rows = params
            .handle
            .begins
            .wrapping_add(params.peers.ranks as usize);
        let turn = self.shared.order.begin(at)?;
        let routed = context
            .module
            .launch(kernels::ht_route(), shape, &params, at);
        turn.end_after(routed.and_then(|()| header.write(context, KernelOp::HtRoute, rows, at)))
    }
}

/// An HT handle. The results of its creation stay on the device.
pub struct CudaHt {
    group: Arc<HtGroup>,
    /// `None` if it was opened again.
    memory: Option<Arc<HandleMemory>>,
    block: DevPtr,
    sections: HtSections,
    /// Of a block in a caller's memory.
    header: Option<GivenHeader>,
    grids: HandleGrids,
    routing: Routing,
    /// Ids per token, in the kernels' integer type.
    top_k: u32,
    counter: Option<DevPtr>,
    epoch: u32,
}

impl CudaHt {
    fn route_params(&self) -> Result<HtRouteParams> {
        Ok(HtRouteParams {
            handle: self.handle_memory()?,
            topk_idx: self.routing.ids.0 as *const i64,
            counter: self.counter.unwrap_or_default().0 as *mut i32,
            received: (self.memory.as_ref()).map_or(null_mut(), |it| it.received.device()),
            ..self
                .group
                .route_params(self.epoch, verdict_with(self.top_k))
        })
    }

    /// The result of the exchange, once it is there: the number of rows that this rank receives, or
    /// why nothing runs on the handle.
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

    /// The number that an operation's fingerprint has: none for blocks that may be opened again, as only the device
    /// knows it there. So ranks must agree on where their blocks are.
    fn number(&self) -> u32 {
        match self.header {
            None => self.epoch,
            Some(_) => 0,
        }
    }

    fn handle_memory(&self) -> Result<HtHandleMemory> {
        let tokens = to_u32(self.routing.tokens)?;
        Ok(block_at(self.block, &self.sections, tokens, self.top_k))
    }

    /// Enqueues `kernel`, which is operation `op`; in a caller's memory behind a look at the header.
    fn enqueue<P>(
        &self,
        op: KernelOp,
        kernel: Kernel<P>,
        shape: LaunchShape,
        params: &P,
        at: &StreamScope,
    ) -> Result<()> {
        let group = &self.group.shared;
        let Some(header) = &self.header else {
            return group.enqueue(kernel, shape, params, at);
        };
        let turn = group.order.begin(at)?;
        let compared = header.compare(&group.context, op, at);
        let launch = || group.context.module.launch(kernel, shape, params, at);
        turn.end_after(compared.and_then(|()| launch()))
    }

    // Apart, so that rows without scales do not pay for it.
    #[inline(never)]
    fn dispatch_scaled(
        &self,
        (row, scaled): (RowType, &Scaled),
        rows: HtDispatchParams,
        launch: &HtLaunch,
        at: &StreamScope,
    ) -> Result<()> {
        let params = HtScaledDispatchParams {
            rows,
            scaled: scaled::from_caller(row, scaled, launch)?,
        };
        let kernel = match scaled.cast() {
            Some(_) => kernels::ht_dispatch_cast(),
            None => kernels::ht_dispatch_scaled(),
        };
        self.enqueue(KernelOp::HtDispatch, kernel, launch.launch, &params, at)
    }
}

impl HtBackend for CudaHt {
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()> {
        self.received()?;
        let group = &self.group.shared;
        let launch = group.plan.launch(op.into(), &op.into(), &self.grids)?;
        let memory = self.handle_memory()?;
        let at = &group.enter(stream)?;
        let common = group.common(KernelOp::HtDispatch, &launch, self.number(), memory);
        let params = dispatch_params(op, common, &Inputs::of(op));
        match &op.scaled {
            None => {
                let kernel = kernels::ht_dispatch();
                self.enqueue(KernelOp::HtDispatch, kernel, launch.launch, &params, at)
            }
            Some(scaled) => self.dispatch_scaled((op.row, scaled), params, &launch, at),
        }
    }

    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()> {
        self.received()?;
        let group = &self.group.shared;
        let launch = group.plan.launch(op.into(), &op.row.into(), &self.grids)?;
        let memory = self.handle_memory()?;
        let at = &group.enter(stream)?;
        let common = group.common(KernelOp::HtCombine, &launch, self.number(), memory);
        let params = combine_params(op, common, &Outputs::of(op));
        let kernel = kernels::ht_combine(op.row.dtype)?;
        self.enqueue(KernelOp::HtCombine, kernel, launch.launch, &params, at)
    }

    fn add_counts(&self, totals: DevPtr, stream: Stream) -> Result<()> {
        let group = &self.group.shared;
        let counts = self.handle_memory()?.counts;
        group.add_counts(counts, totals, &group.enter(stream)?)
    }

    /// Waits for the kernel that computes it, if need be.
    fn num_recv_tokens(&self) -> Result<usize> {
        if self.memory.is_none() {
            return Err(opened_again());
        }
        let rows = self.group.shared.wait_for_routing(|| self.received())?;
        Ok(rows as usize)
    }
}
