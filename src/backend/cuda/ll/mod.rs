//! Low-latency operations: from checked operations to kernel launches.

mod by_rank;
mod chunks;
pub mod fingerprint;
mod handle;
mod launch;
mod memory;
mod network;
mod over_nodes;
pub mod plan;
mod staged;

use crate::backend::cuda::agreement::next_number;
use crate::backend::cuda::auxiliary::{self, CallerHeader};
use crate::backend::cuda::driver::memory::CudaMemory;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ll::handle::Handle;
use crate::backend::cuda::ll::launch::LaunchPart;
use crate::backend::cuda::ll::memory::{CopiedViews, HandleMemory, ViewBanks};
use crate::backend::cuda::ll::network::LlNetwork;
use crate::backend::cuda::ll::over_nodes::OverNodes;
use crate::backend::cuda::ll::plan::LlPlan;
use crate::backend::cuda::ll::staged::Staged;
use crate::backend::cuda::network::Network;
use crate::backend::cuda::order::Order;
use crate::backend::cuda::params::common::KernelOp;
use crate::backend::cuda::params::ll::LlLayout;
use crate::backend::cuda::pool::{MemoryRequest, Pool, Pooled};
use crate::backend::{LlBackend, LlGroupBackend};
use crate::error::Result;
use crate::model::handle_state::{CallerBlock, HandleStorage, header};
use crate::model::ops::{LlDispatch, LlOp, Routing, StagedSlot, Stream, ViewBank};
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// The LL state of a group, shared by its handles.
pub struct LlGroup {
    context: Arc<GroupContext>,
    /// `None` on one node.
    network: Option<LlNetwork>,
    /// Number of handles created so far.
    handles: AtomicU32,
    plan: LlPlan,
    layout: LlLayout,
    /// `None` over several nodes.
    views: Option<Arc<ViewBanks>>,
    copied_views: CopiedViews,
    order: Order,
    staged: Staged,
    memory: Arc<CudaMemory>,
    pool: Pool<HandleMemory>,
}

impl LlGroup {
    /// The LL state of a group whose LL regions, as in `plan`, begin at `start` of the windows.
    pub fn new(
        context: Arc<GroupContext>,
        network: Option<&Arc<Network>>,
        memory: &Arc<CudaMemory>,
        plan: LlPlan,
        start: usize,
    ) -> Result<Self> {
        let network = network.map(|network| LlNetwork::new(Arc::clone(network), memory, &plan.facts)).transpose()?;
        let order = Order::new(&context.module.context)?;
        let staged = Staged::new(&context.module.context)?;
        let views = plan.view_state(start).map(|state| {
            let state = DevPtr(context.own_window().0 + state);
            let bytes = [plan.view_bytes(), plan.facts.row_bytes];
            let few = plan.few_rows_of_view(context.multiprocessors);
            Arc::new(ViewBanks::new(state, bytes, few, context.rank()))
        });
        Ok(Self {
            context,
            network,
            handles: AtomicU32::new(0),
            layout: plan.layout(start),
            views,
            copied_views: CopiedViews::default(),
            plan,
            order,
            staged,
            memory: Arc::clone(memory),
            pool: Pool::default(),
        })
    }

    /// As [`ViewBanks::make`].
    pub fn make_views(&self, make: impl FnOnce(usize) -> Result<Box<[usize]>>) -> Result<()> {
        self.views.as_ref().map_or(Ok(()), |views| views.make(make))
    }

    /// Forgets abandoned staged operations, as the group was closed and none will follow.
    pub fn forget_staged(&self) {
        self.staged.close();
    }
}

impl LlGroupBackend for LlGroup {
    fn open_handle(
        self: Arc<Self>,
        routing: Result<Routing>,
        storage: HandleStorage,
        stream: Stream,
    ) -> Result<Box<dyn LlBackend>> {
        let number = next_number(&self.handles);
        let handle = routing.and_then(|routing| self.handle(number, routing, storage, stream));
        match (&self.network, &handle) {
            (None, _) => {}
            (Some(network), Ok(handle)) => handle.announce(network)?,
            // The error is this rank's own, even if announcing the refusal fails.
            (Some(network), Err(error)) => drop(network.refuse(&self.context, &self.memory, number, error)),
        }
        Ok(Box::new(CudaLl(Arc::new(InGroup { handle: handle?, group: self }))))
    }
}

impl LlGroup {
    /// Handle `number` of the group, not announced to other ranks yet.
    fn handle(&self, number: u32, routing: Routing, storage: HandleStorage, stream: Stream) -> Result<Handle> {
        let HandleStorage { caller_block, life } = storage;
        let capture = self.context.module.enter(stream).ok().and_then(|at| at.capture);
        let serves = |memory: &HandleMemory| memory.serves(&routing).then_some(0);
        let forwarded = self.network.as_ref().map(|network| network.view.forwarded().len());
        let make = || HandleMemory::new((&self.context, &self.memory), &self.plan, &routing, forwarded);
        Ok(Handle {
            plan: self.plan.of_handle(&routing, self.context.multiprocessors)?,
            context: Arc::clone(&self.context),
            layout: self.layout,
            views: self.views.clone(),
            memory: match caller_block {
                None => self.pool.take(&MemoryRequest { handle: &life, capture, shares: true }, serves, make)?,
                Some(block) => Pooled::apart(HandleMemory::in_caller_memory(&self.plan, &routing, block), &life),
            },
            header: caller_block
                .map(|CallerBlock(block)| CallerHeader::new(block, header(&self.plan.facts, &routing, 0))),
            number,
            source_tokens: OnceCell::new(),
            routing,
        })
    }
}

/// An LL handle.
struct CudaLl(Arc<InGroup>);

/// A handle together with its group, which orders the operations.
struct InGroup {
    group: Arc<LlGroup>,
    handle: Handle,
}

impl InGroup {
    fn enter(&self, stream: Stream) -> Result<StreamScope> {
        self.handle.context.module.enter(stream)
    }

    /// As [`Self::enter`], for running an operation.
    fn enter_to_run(&self, stream: Stream) -> Result<StreamScope> {
        let at = self.enter(stream)?;
        self.handle.memory.use_at(&at);
        Ok(at)
    }

    /// Makes `at` wait for receive phases on other streams that use the memory of `op`. These may be phases of other
    /// handles if the block is in a caller's memory, or if their rows arrive in the same view.
    fn follow_receivers(&self, op: &LlOp, at: &StreamScope) -> Result<()> {
        let follow = |slot| self.group.staged.follow(slot, at);
        let is_shared = self.handle.header.is_some();
        if is_shared || matches!(op, LlOp::Dispatch(LlDispatch { view: Some(_), .. })) {
            StagedSlot::ALL.into_iter().try_for_each(follow)?;
        }
        self.handle.memory.receivers.of(at.capture).try_for_each(follow)
    }

    /// What runs `part` of an operation over several nodes; `None` on one node.
    fn over_nodes(&self, part: LaunchPart) -> Result<Option<OverNodes<'_>>> {
        let on = |network| OverNodes::new(&self.handle, network, part);
        self.group.network.as_ref().map(on).transpose()
    }

    /// Enqueues, after a dispatch that counts, adding its counts to the caller's totals.
    fn count(&self, op: &LlOp, at: &StreamScope) -> Result<()> {
        let LlOp::Dispatch(op) = op else { return Ok(()) };
        op.counted().map_or(Ok(()), |(counts, totals)| {
            let (context, experts) = (&self.handle.context, self.group.plan.facts.local_experts());
            auxiliary::add_counts(context, KernelOp::LlDispatch, (counts.0 as *const i32, totals), experts, at)
        })
    }

    /// Enqueues the receive phase of a staged operation.
    fn receive(&self, op: &LlOp, part: LaunchPart, at: &StreamScope) -> Result<()> {
        match self.over_nodes(part)? {
            None => self.handle.launch(op, part, at),
            Some(network) => network.receive(op, at),
        }
    }
}

impl LlBackend for CudaLl {
    fn view(&self, op: &LlDispatch, staged: bool, bank: ViewBank) -> Result<Option<DevPtr>> {
        let group = &self.0.group;
        match &group.views {
            Some(views) if views.keep_in_place(op) && !staged => Ok(views.own(bank)),
            _ => (group.copied_views).at(&group.memory, bank, group.plan.view_bytes()).map(Some),
        }
    }

    fn run(&self, op: &LlOp, stream: Stream) -> Result<()> {
        let this = &self.0;
        let at = &this.enter_to_run(stream)?;
        this.follow_receivers(op, at)?;
        let network = this.over_nodes(LaunchPart::WHOLE)?;
        let turn = this.group.order.begin(at)?;
        let launched = match network {
            None => this.handle.launch(op, LaunchPart::WHOLE, at),
            Some(network) => network.run(op, at),
        };
        turn.end_after(launched.and_then(|()| this.count(op, at)))?;
        this.handle.memory.receivers.clear(at.capture);
        Ok(())
    }

    fn send(&self, op: &LlOp, slot: StagedSlot, stream: Stream) -> Result<()> {
        let this = &self.0;
        let at = &this.enter_to_run(stream)?;
        this.follow_receivers(op, at)?;
        let network = this.over_nodes(LaunchPart::send(slot))?;
        let phase = this.group.staged.begin_send(slot, at)?;
        let turn = this.group.order.begin(at)?;
        match network {
            None => {
                let sent = this.handle.launch(op, LaunchPart::send(slot), at);
                turn.end_after(sent.and_then(|()| phase.end(at)))?;
            }
            Some(network) => network.send(op, at, turn, |after| phase.end(after))?,
        }
        this.handle.memory.receivers.clear(at.capture);
        Ok(())
    }

    fn receive(&self, op: &LlOp, slot: StagedSlot, stream: Stream) -> Result<()> {
        let this = &self.0;
        let at = &this.enter_to_run(stream)?;
        let phase = this.group.staged.begin_receive(slot, at)?;
        this.receive(op, LaunchPart::receive(slot, true), at)?;
        let counted = this.count(op, at);
        phase.end()?;
        this.handle.memory.receivers.add(at.capture, slot);
        counted
    }

    fn abandon(&self, op: &LlOp, slot: StagedSlot) {
        let (this, op) = (Arc::clone(&self.0), *op);
        let discard = move |at: &StreamScope| {
            this.receive(&op, LaunchPart::receive(slot, false), at)?;
            this.handle.memory.receivers.add(at.capture, slot);
            Ok(())
        };
        self.0.group.staged.abandon(slot, Box::new(discard));
    }
}
