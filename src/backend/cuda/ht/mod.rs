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

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ht::agreement::{disagreement, verdict_refusing, verdict_with};
use crate::backend::cuda::ht::memory::HandleMemory;
use crate::backend::cuda::ht::nodes::Rails;
use crate::backend::cuda::ht::plan::{HandleGrids, HandleLayout, HtLaunch, HtPlan};
use crate::backend::cuda::ht::shared::{
    HtShared, Inputs, Outputs, combine_params, dispatch_params, saturated,
};
use crate::backend::cuda::kernels;
use crate::backend::cuda::network::Network;
use crate::backend::cuda::params::common::KernelOp;
use crate::backend::cuda::params::ht::{
    HtDispatchParams, HtHandleMemory, HtLayout, HtRouteParams, HtScaledDispatchParams,
};
use crate::backend::cuda::pool::Pool;
use crate::backend::cuda::regions::to_u32;
use crate::backend::{HtBackend, HtRouting};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use crate::log;
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
                self.launch_route(handle.routing.tokens, &params, at)?;
                Ok(handle)
            }
            Err(error) => {
                let params = self.route_params(epoch, verdict_refusing(&error));
                // If even this launch fails, the others find out at their deadline.
                self.launch_route(0, &params, at)
                    .unwrap_or_else(|cause| log::warn(&cause.text()));
                Err(error)
            }
        }
    }

    /// Handle number `epoch` of the group, before it is announced to the others.
    fn prepare(self: &Arc<Self>, wanted: HtRouting, epoch: u32) -> Result<CudaHt> {
        let Routing { tokens, top_k, .. } = wanted.routing;
        let layout = self.shared.plan.handle(tokens, top_k);
        let waste = |memory: &HandleMemory| memory.waste(layout.bytes);
        let make = || {
            HandleMemory::new(
                self.shared.context.module.context(),
                &self.memory,
                layout.bytes,
            )
        };
        Ok(CudaHt {
            group: Arc::clone(self),
            memory: self.pool.take(waste, make)?,
            layout,
            grids: self.shared.grids(&wanted.routing),
            routing: wanted.routing,
            top_k: to_u32(top_k)?,
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

    fn launch_route(&self, tokens: usize, params: &HtRouteParams, at: &StreamScope) -> Result<()> {
        let (shape, block_tokens) = self.shared.plan.route_grid(tokens, self.shared.device)?;
        let params = HtRouteParams {
            bank: self.shared.next_bank(),
            block_tokens,
            ..*params
        };
        self.shared.enqueue(kernels::ht_route(), shape, &params, at)
    }
}

/// An HT handle. The results of its creation stay on the device.
pub struct CudaHt {
    group: Arc<HtGroup>,
    memory: Arc<HandleMemory>,
    layout: HandleLayout,
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
            received: self.memory.received.device(),
            ..self
                .group
                .route_params(self.epoch, verdict_with(self.top_k))
        })
    }

    /// The result of the exchange, once it is there: the number of rows that this rank receives, or
    /// why nothing runs on the handle.
    fn received(&self) -> Result<Option<u32>> {
        let page = &self.memory.received;
        let Some(seen) = page.complete(0, |it| it.epoch == self.epoch) else {
            return Ok(None);
        };
        match disagreement(seen.value, self.top_k) {
            Some(error) => Err(error),
            None => Ok(Some(seen.value)),
        }
    }

    fn handle_memory(&self) -> Result<HtHandleMemory> {
        let tokens = to_u32(self.routing.tokens)?;
        Ok(self.memory.memory(self.layout, tokens, self.top_k))
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
        let group = &self.group.shared;
        group.enqueue(kernel, launch.launch, &params, at)
    }
}

impl HtBackend for CudaHt {
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()> {
        self.received()?;
        let group = &self.group.shared;
        let launch = group.plan.launch(op.into(), &op.into(), &self.grids)?;
        let memory = self.handle_memory()?;
        let at = &group.enter(stream)?;
        let common = group.common(KernelOp::HtDispatch, &launch, self.epoch, memory);
        let params = dispatch_params(op, common, &Inputs::of(op));
        match &op.scaled {
            None => group.enqueue(kernels::ht_dispatch(), launch.launch, &params, at),
            Some(scaled) => self.dispatch_scaled((op.row, scaled), params, &launch, at),
        }
    }

    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()> {
        self.received()?;
        let group = &self.group.shared;
        let launch = group.plan.launch(op.into(), &op.row.into(), &self.grids)?;
        let memory = self.handle_memory()?;
        let at = &group.enter(stream)?;
        let common = group.common(KernelOp::HtCombine, &launch, self.epoch, memory);
        let params = combine_params(op, common, &Outputs::of(op));
        let kernel = kernels::ht_combine(op.row.dtype)?;
        group.enqueue(kernel, launch.launch, &params, at)
    }

    /// Waits for the kernel that computes it, if need be.
    fn num_recv_tokens(&self) -> Result<usize> {
        let rows = self.group.shared.wait_for_routing(|| self.received())?;
        Ok(rows as usize)
    }
}
