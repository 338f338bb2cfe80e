//! Low-latency operations: checked operation -> kernel parameters -> launch.
#![forbid(unsafe_code)]

mod exchanges;
mod grid;
mod handle_plan;
mod hello;
mod local_handle;
mod memory;
mod messages;
mod network;
mod over_nodes;
mod part;
pub mod plan;
mod scaled;
pub mod signature;
mod staged;

use crate::backend::LlBackend;
use crate::backend::cuda::driver::memory::CudaMemory;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::kernels;
use crate::backend::cuda::ll::grid::Grid;
use crate::backend::cuda::ll::handle_plan::{DispatchGrid, HandlePlan};
use crate::backend::cuda::ll::hello::SourceTokens;
use crate::backend::cuda::ll::local_handle::LocalHandle;
use crate::backend::cuda::ll::memory::HandleMemory;
use crate::backend::cuda::ll::network::LlNetwork;
use crate::backend::cuda::ll::over_nodes::OverNodes;
use crate::backend::cuda::ll::part::Part;
use crate::backend::cuda::ll::plan::LlPlan;
use crate::backend::cuda::ll::signature::Signature;
use crate::backend::cuda::ll::staged::Staged;
use crate::backend::cuda::network::Network;
use crate::backend::cuda::order::Order;
use crate::backend::cuda::params::common::{OP_LL_COMBINE, OP_LL_DISPATCH};
use crate::backend::cuda::params::ll::{LlCombineParams, LlCommon, LlDispatchParams, LlLayout};
use crate::backend::cuda::pool::Pool;
use crate::error::Result;
use crate::model::ops::{LlCombine, LlDispatch, LlOp, Routing, RowType, StagedSlot, Stream};
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// The state that the LL handles of a group share.
pub struct LlGroup {
    context: Arc<GroupContext>,
    /// `None` on one node.
    network: Option<LlNetwork>,
    /// How many handles were made.
    handles: AtomicU32,
    plan: LlPlan,
    layout: LlLayout,
    order: Order,
    staged: Staged,
    memory: Arc<CudaMemory>,
    pool: Pool<HandleMemory>,
}

impl LlGroup {
    /// The LL side of a group; `layout` has the offsets of `plan`'s regions in the windows.
    pub fn new(
        (context, network): (Arc<GroupContext>, Option<&Arc<Network>>),
        memory: &Arc<CudaMemory>,
        plan: LlPlan,
        layout: LlLayout,
    ) -> Result<Self> {
        let network = network
            .map(|network| LlNetwork::new(Arc::clone(network), memory, plan.facts()))
            .transpose()?;
        let order = Order::new(context.module.context())?;
        let staged = Staged::new(context.module.context())?;
        Ok(Self {
            context,
            network,
            handles: AtomicU32::new(0),
            plan,
            layout,
            order,
            staged,
            memory: Arc::clone(memory),
            pool: Pool::default(),
        })
    }

    /// A handle with the ids `routing`.
    pub fn open_handle(self: &Arc<Self>, routing: Routing) -> Result<CudaLl> {
        let serves = |memory: &HandleMemory| memory.serves(routing.top_k).then_some(0);
        let sources = self.network.as_ref().map(|network| network.sources().len());
        let make = || HandleMemory::new(&self.memory, &self.plan, (routing.top_k, sources));
        let handle = Handle {
            plan: self
                .plan
                .of_handle(&routing, self.context.multiprocessors)?,
            group: Arc::clone(self),
            memory: self.pool.take(serves, make)?,
            number: 1 + self.handles.fetch_add(1, Relaxed),
            source_tokens: OnceCell::new(),
            routing,
        };
        if let Some(network) = &self.network {
            let on = (&*self.context, network);
            handle.memory.hello()?.send(on, handle.number, &routing)?;
        }
        Ok(CudaLl(Arc::new(handle)))
    }

    /// What was decided when the group was created.
    pub fn plan(&self) -> &LlPlan {
        &self.plan
    }

    /// The group was closed: no operation will follow one that was given up.
    pub fn forget_staged(&self) {
        self.staged.close();
    }
}

/// An LL handle. The data that a dispatch stores for its combine stays on the device.
pub struct CudaLl(Arc<Handle>);

struct Handle {
    group: Arc<LlGroup>,
    plan: HandlePlan,
    routing: Routing,
    memory: Arc<HandleMemory>,
    /// In the order of creation, from 1 on.
    number: u32,
    /// What this rank's sources said, once an operation has asked.
    source_tokens: OnceCell<SourceTokens>,
}

impl Handle {
    fn enter(&self, stream: Stream) -> Result<StreamScope> {
        self.group.context.module.enter(stream)
    }

    /// Makes `at` wait for a receive phase that uses the handle's memory on another stream. Returns
    /// whether later work of `at` then runs after all receive phases of that memory.
    fn follow_receiver(&self, at: &StreamScope) -> Result<bool> {
        match self.memory.receiver() {
            None => Ok(false),
            Some(slot) => self.group.staged.follow(slot, at),
        }
    }

    fn launch(&self, op: &LlOp, part: Part, at: &StreamScope) -> Result<()> {
        match op {
            LlOp::Dispatch(op) => self.launch_dispatch(op, part, at),
            LlOp::Combine(op) => self.launch_combine(op, part, at),
        }
    }

    /// The receive phase of a staged operation.
    fn receive(&self, op: &LlOp, part: Part, at: &StreamScope) -> Result<()> {
        match self.over_nodes(part)? {
            None => self.launch(op, part, at),
            Some(network) => network.receive(op, at),
        }
    }

    /// `part` of an operation over several nodes; `None` on one node.
    fn over_nodes(&self, part: Part) -> Result<Option<OverNodes<'_, Self>>> {
        let network = self.group.network.as_ref();
        network.map(|it| OverNodes::new(self, it, part)).transpose()
    }

    fn launch_dispatch(&self, op: &LlDispatch, part: Part, at: &StreamScope) -> Result<()> {
        if let Some(scaled) = &op.scaled {
            return scaled::launch(self, (op, scaled), part, at);
        }
        let grid = &self.plan.dispatch;
        let params = self.dispatch_params(op, grid, part);
        let module = &self.group.context.module;
        module.launch(kernels::ll_dispatch(), grid.launch, &params, at)
    }

    fn launch_combine(&self, op: &LlCombine, part: Part, at: &StreamScope) -> Result<()> {
        let params = self.combine_params(op, &self.plan.combine, part);
        let kernel = kernels::ll_combine(op.row.dtype)?;
        let module = &self.group.context.module;
        module.launch(kernel, self.plan.combine_launch, &params, at)
    }

    // Inlined, so that nearly a kilobyte of parameters is written once and not moved.
    #[inline]
    fn common(&self, op: u32, row: RowType, grid: &Grid, part: Part) -> LlCommon {
        LlCommon {
            peers: self.group.context.peers(),
            wait: self.group.context.wait(op),
            layout: self.group.layout,
            shape: self.plan.shape(row),
            handle: self.memory.memory(),
            channel_state: self.group.context.channel_state(part.channel),
            channel: part.channel,
            phases: part.phases,
            signature: self.signature(op, row).to_word(),
            scales_word: 0,
            send_blocks: grid.send_blocks,
            receive_blocks: grid.receive_blocks,
        }
    }
}

impl LocalHandle for Handle {
    fn routing(&self) -> &Routing {
        &self.routing
    }

    fn plan(&self) -> &HandlePlan {
        &self.plan
    }

    fn number(&self) -> u32 {
        self.number
    }

    fn context(&self) -> &GroupContext {
        &self.group.context
    }

    fn source_tokens(&self, network: &LlNetwork) -> Result<&SourceTokens> {
        self.source_tokens.get_or_try_init(|| {
            let on = (&*self.group.context, network);
            let hello = self.memory.hello()?;
            hello.wait(on, self.number, &self.routing)
        })
    }

    // The group has checked that both sizes fit.
    fn signature(&self, op: u32, row: RowType) -> Signature {
        Signature {
            op,
            scaled: false,
            dtype: row.dtype as u32,
            top_k: self.routing.top_k as u32,
            row_bytes: row.bytes() as u32,
        }
    }

    // Inlined, so that nearly a kilobyte of parameters is written once and not moved.
    #[inline]
    fn dispatch_params(
        &self,
        op: &LlDispatch,
        grid: &DispatchGrid,
        part: Part,
    ) -> LlDispatchParams {
        LlDispatchParams {
            common: self.common(OP_LL_DISPATCH, op.row, &grid.grid, part),
            tokens: op.tokens.0 as *const u8,
            topk_idx: self.routing.ids.0 as *const i64,
            out: kept(part, op.out) as *mut u8,
            counter: kept(part, op.counter.unwrap_or_default()) as *mut i32,
            notify_blocks: grid.notify_blocks,
        }
    }

    // Inlined as above.
    #[inline]
    fn combine_params(&self, op: &LlCombine, grid: &Grid, part: Part) -> LlCombineParams {
        LlCombineParams {
            common: self.common(OP_LL_COMBINE, op.row, grid, part),
            rows: op.expert_rows.0 as *const u8,
            topk_idx: self.routing.ids.0 as *const i64,
            weights: kept(part, op.weights) as *const f32,
            out: kept(part, op.out) as *mut u8,
            exact: self.plan.exact,
        }
    }
}

/// The caller's memory; NULL if `part` does not want the outputs, as it may be gone then.
#[inline]
fn kept(part: Part, data: DevPtr) -> usize {
    if part.keep { data.0 } else { 0 }
}

impl LlBackend for CudaLl {
    fn run(&self, op: &LlOp, stream: Stream) -> Result<()> {
        let handle = &self.0;
        let at = &handle.enter(stream)?;
        let follows = handle.follow_receiver(at)?;
        let network = handle.over_nodes(Part::WHOLE)?;
        let turn = handle.group.order.begin(at)?;
        turn.end_after(match network {
            None => handle.launch(op, Part::WHOLE, at),
            Some(network) => network.run(op, at),
        })?;
        if follows {
            handle.memory.set_receiver(None);
        }
        Ok(())
    }

    fn send(&self, op: &LlOp, slot: StagedSlot, stream: Stream) -> Result<()> {
        let handle = &self.0;
        let at = &handle.enter(stream)?;
        let follows = handle.follow_receiver(at)?;
        let network = handle.over_nodes(Part::send(slot))?;
        let phase = handle.group.staged.begin_send(slot, at)?;
        let turn = handle.group.order.begin(at)?;
        match network {
            None => {
                let sent = handle.launch(op, Part::send(slot), at);
                turn.end_after(sent.and_then(|()| phase.end(at)))?;
            }
            Some(network) => network.send(op, at, turn, |after| phase.end(after))?,
        }
        if follows {
            handle.memory.set_receiver(None);
        }
        Ok(())
    }

    fn receive(&self, op: &LlOp, slot: StagedSlot, stream: Stream) -> Result<()> {
        let handle = &self.0;
        let at = &handle.enter(stream)?;
        let phase = handle.group.staged.begin_receive(slot, at)?;
        handle.receive(op, Part::receive(slot, true), at)?;
        phase.end()?;
        handle.memory.set_receiver(Some(slot));
        Ok(())
    }

    fn abandon(&self, op: &LlOp, slot: StagedSlot) {
        let (handle, op) = (Arc::clone(&self.0), *op);
        let discard = move |at: &StreamScope| {
            handle.receive(&op, Part::receive(slot, false), at)?;
            handle.memory.set_receiver(Some(slot));
            Ok(())
        };
        self.0.group.staged.abandon(slot, Box::new(discard));
    }
}
