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
use crate::backend::cuda::ht::fingerprint::HtFingerprint;
use crate::backend::cuda::ht::grid::HtKind;
use crate::backend::cuda::ht::memory::HandleMemory;
use crate::backend::cuda::ht::nodes::Rails;
use crate::backend::cuda::ht::plan::{HandleLayout, HtLaunch, HtPlan};
use crate::backend::cuda::ht::shared::{HtShared, addresses, saturated};
use crate::backend::cuda::kernels;
use crate::backend::cuda::network::Network;
use crate::backend::cuda::params::common::KernelOp;
use crate::backend::cuda::params::ht::{
    HtCombineParams, HtCommon, HtDispatchParams, HtHandleMemory, HtLayout, HtRouteParams,
    HtScaledDispatchParams, HtShape,
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
                let sizes = plan.row_sizes();
                let rails = Rails::new(&shared, network, memory, nodes, sizes)?;
                Some(Arc::new(rails))
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
        let turn = self.shared.order.begin(at)?;
        let module = &self.shared.context.module;
        module.launch(kernels::ht_route(), shape, &params, at)?;
        turn.end()
    }
}

/// An HT handle. The results of its creation stay on the device.
pub struct CudaHt {
    group: Arc<HtGroup>,
    memory: Arc<HandleMemory>,
    layout: HandleLayout,
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
        match disagreement(seen.rows, self.top_k) {
            Some(error) => Err(error),
            None => Ok(Some(seen.rows)),
        }
    }

    /// Number of tokens, and of ids per token.
    fn sizes(&self) -> (usize, usize) {
        (self.routing.tokens, self.routing.top_k)
    }

    fn handle_memory(&self) -> Result<HtHandleMemory> {
        let tokens = to_u32(self.routing.tokens)?;
        Ok(self.memory.memory(self.layout, tokens, self.top_k))
    }

    // Inlined, so that nearly a kilobyte of parameters is written once and not moved.
    #[inline]
    fn common(&self, op: KernelOp, launch: &HtLaunch, handle: HtHandleMemory) -> HtCommon {
        let group = &self.group.shared;
        let fingerprint = HtFingerprint(launch.shape.fingerprint)
            .of_handle(self.epoch)
            .0;
        HtCommon {
            peers: group.context.peers(),
            wait: group.context.wait(op),
            layout: group.layout,
            handle,
            sequences: group.sequences(),
            shape: HtShape {
                fingerprint,
                ..launch.shape
            },
        }
    }
}

impl CudaHt {
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
        let turn = group.order.begin(at)?;
        let module = &group.context.module;
        module.launch(kernel, launch.launch, &params, at)?;
        turn.end()
    }
}

impl HtBackend for CudaHt {
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()> {
        self.received()?;
        let group = &self.group.shared;
        let kind = HtKind::Dispatch {
            forward: op.routing_in.is_some(),
        };
        let launch = group.launch(kind, &op.into(), self.sizes())?;
        let (ids, weights) = addresses(op.routing_in.map(|it| (it.ids, it.weights)));
        let (out_ids, out_weights) = addresses(op.routing_out.map(|it| (it.ids, it.weights)));
        let memory = self.handle_memory()?;
        let at = &group.enter(stream)?;
        let params = HtDispatchParams {
            common: self.common(KernelOp::HtDispatch, &launch, memory),
            tokens: op.tokens.0 as *const u8,
            topk_idx: ids as *const i64,
            weights: weights as *const f32,
            out: op.out.map_or(0, |out| out.data.0) as *mut u8,
            out_idx: out_ids as *mut i64,
            out_weights: out_weights as *mut f32,
            counter: op.counter.unwrap_or_default().0 as *mut i32,
            out_rows: op.out.map_or(u32::MAX, |out| saturated(out.rows)),
            routing_rows: op.routing_out.map_or(u32::MAX, |out| saturated(out.rows)),
        };
        match &op.scaled {
            None => {
                let turn = group.order.begin(at)?;
                let module = &group.context.module;
                module.launch(kernels::ht_dispatch(), launch.launch, &params, at)?;
                turn.end()
            }
            Some(scaled) => self.dispatch_scaled((op.row, scaled), params, &launch, at),
        }
    }

    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()> {
        self.received()?;
        let group = &self.group.shared;
        let columns = op.gradients.map_or(0, |gradients| gradients.top_k);
        let kind = HtKind::Combine { columns };
        let launch = group.launch(kind, &op.row.into(), self.sizes())?;
        let (gradients, out_gradients) = addresses(op.gradients.map(|it| (it.input, it.output)));
        let memory = self.handle_memory()?;
        let at = &group.enter(stream)?;
        let params = HtCombineParams {
            common: self.common(KernelOp::HtCombine, &launch, memory),
            rows: op.expert_rows.data.0 as *const u8,
            gradients: gradients as *const f32,
            out: op.out.0 as *mut u8,
            out_gradients: out_gradients as *mut f32,
            in_rows: saturated(op.expert_rows.rows),
            columns: saturated(columns),
        };
        let kernel = kernels::ht_combine(op.row.dtype)?;
        let turn = group.order.begin(at)?;
        let module = &group.context.module;
        module.launch(kernel, launch.launch, &params, at)?;
        turn.end()
    }

    /// Waits for the kernel that computes it, if need be.
    fn num_recv_tokens(&self) -> Result<usize> {
        let rows = self.group.shared.wait_for_routing(|| self.received())?;
        Ok(rows as usize)
    }
}
