//! Low-latency operations: checked operation -> kernel parameters -> launch.
#![forbid(unsafe_code)]

use crate::backend::cuda::device_name::device_name;
use crate::backend::cuda::kernels::{self, Kernel};
use crate::backend::cuda::launch::launch;
use crate::backend::cuda::ll_grid::Grid;
use crate::backend::cuda::ll_piece::Piece;
use crate::backend::cuda::ll_plan::LlPlan;
use crate::backend::cuda::ll_signature::Signature;
use crate::backend::cuda::memory::CudaMemory;
use crate::backend::cuda::open::Open;
use crate::backend::cuda::order::Order;
use crate::backend::cuda::params::{
    LL_PHASE_RECEIVE, LL_PHASE_SEND, LL_WHOLE_CHANNEL, LlCombineParams, LlCommon, LlDispatchParams,
    LlHandleMemory, LlLayout, LlShape, OP_LL_COMBINE, OP_LL_DISPATCH,
};
use crate::backend::cuda::pool::Pool;
use crate::backend::cuda::streams::Place;
use crate::backend::cuda::tracks::Tracks;
use crate::backend::{LlBackend, Ticket};
use crate::error::{Error, Result};
use crate::model::group::LlCombineMode;
use crate::model::ops::{LlCombine, LlDispatch, LlOp, Routing, RowType, Stream};
use crate::model::tensor::DevPtr;
use std::sync::Arc;

/// What the LL handles of a group share.
pub(super) struct LlGroup {
    open: Arc<Open>,
    plan: LlPlan,
    layout: LlLayout,
    order: Order,
    tracks: Tracks,
    memory: Arc<CudaMemory>,
    pool: Pool<Piece>,
}

impl LlGroup {
    /// The LL side of `open`; `layout` says where `plan`'s regions lie in the windows.
    pub(super) fn new(
        open: Arc<Open>,
        memory: &Arc<CudaMemory>,
        plan: LlPlan,
        layout: LlLayout,
    ) -> Result<Self> {
        let gpu = device_name(open.module.context())?;
        let plan = plan.tuned(&gpu, open.multiprocessors);
        let order = Order::new(open.module.context())?;
        let tracks = Tracks::new(open.module.context())?;
        Ok(Self {
            open,
            plan,
            layout,
            order,
            tracks,
            memory: Arc::clone(memory),
            pool: Pool::default(),
        })
    }

    /// A handle with the ids `routing`.
    pub(super) fn open_handle(self: &Arc<Self>, routing: Routing) -> Result<CudaLl> {
        let serves = |piece: &Piece| piece.serves(routing.top_k).then_some(0);
        let make = || Piece::new(&self.memory, &self.plan, routing.top_k);
        Ok(CudaLl(Arc::new(Handle {
            group: Arc::clone(self),
            piece: self.pool.take(serves, make)?,
            routing,
        })))
    }

    /// The group was closed: nothing will follow an operation that was given up.
    pub(super) fn close(&self) {
        self.tracks.close();
    }
}

/// An LL handle. What a dispatch leaves for its combine stays on the device.
pub(super) struct CudaLl(Arc<Handle>);

struct Handle {
    group: Arc<LlGroup>,
    routing: Routing,
    piece: Arc<Piece>,
}

/// Which part of an operation a launch runs, and on which track.
#[derive(Clone, Copy)]
struct Part {
    track: u32,
    phases: u32,
    /// Whether the operation's outputs are wanted.
    keep: bool,
}

impl Part {
    const WHOLE: Self = Self {
        track: LL_WHOLE_CHANNEL,
        phases: LL_PHASE_SEND | LL_PHASE_RECEIVE,
        keep: true,
    };

    fn send(track: u32) -> Self {
        Self {
            track,
            phases: LL_PHASE_SEND,
            keep: true,
        }
    }

    fn receive(track: u32, keep: bool) -> Self {
        Self {
            track,
            phases: LL_PHASE_RECEIVE,
            keep,
        }
    }

    /// The caller's memory, or NULL when it may be gone and the outputs are not wanted.
    fn kept(&self, data: DevPtr) -> usize {
        if self.keep { data.0 } else { 0 }
    }
}

impl Handle {
    fn enter(&self, stream: Stream) -> Result<Place> {
        Place::enter(self.group.open.module.context(), stream)
    }

    /// Enqueues an operation by `enqueue`, behind a receive phase that may be on another stream: that uses
    /// the handle's memory.
    fn follow_staged(&self, at: &Place, enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
        let track = self.piece.received_on();
        if track == LL_WHOLE_CHANNEL {
            return enqueue();
        }
        let follows = self.group.tracks.follow(track, at)?;
        enqueue()?;
        if follows {
            self.piece.set_received_on(LL_WHOLE_CHANNEL);
        }
        Ok(())
    }

    fn launch(&self, op: &LlOp, part: Part, at: &Place) -> Result<()> {
        match op {
            LlOp::Dispatch(op) => self.launch_dispatch(op, part, at),
            LlOp::Combine(op) => self.launch_combine(op, part, at),
        }
    }

    fn launch_dispatch(&self, op: &LlDispatch, part: Part, at: &Place) -> Result<()> {
        let plan = &self.group.plan;
        let multiprocessors = self.group.open.multiprocessors;
        let (grid, notify_blocks) = plan.dispatch_grid(self.routing.tokens, multiprocessors);
        let signature = self.signature(OP_LL_DISPATCH, op.row);
        let given = self.shape_and_memory(op.row)?;
        let params = LlDispatchParams {
            common: self.common(signature, given, grid, part),
            tokens: op.tokens.0 as *const u8,
            topk_idx: self.routing.ids.0 as *const i64,
            out: part.kept(op.out) as *mut u8,
            counter: part.kept(op.counter.unwrap_or_default()) as *mut i32,
            notify_blocks,
        };
        let shape = grid.launch_shape(plan.dispatch_shared_bytes());
        let module = &self.group.open.module;
        launch(module, Kernel::LlDispatch, shape, &params, at)
    }

    fn launch_combine(&self, op: &LlCombine, part: Part, at: &Place) -> Result<()> {
        let plan = &self.group.plan;
        let grid = plan.combine_grid(self.routing.tokens, self.group.open.multiprocessors);
        let signature = self.signature(OP_LL_COMBINE, op.row);
        let given = self.shape_and_memory(op.row)?;
        let params = LlCombineParams {
            common: self.common(signature, given, grid, part),
            rows: op.expert_rows.0 as *const u8,
            topk_idx: self.routing.ids.0 as *const i64,
            weights: part.kept(op.weights) as *const f32,
            out: part.kept(op.out) as *mut u8,
            exact: u32::from(plan.mode() == LlCombineMode::Exact),
        };
        let kernel = kernels::for_rows::<LlCombineParams>(op.row.dtype)?;
        let shape = grid.launch_shape(0);
        let module = &self.group.open.module;
        launch(module, kernel, shape, &params, at)
    }

    fn shape_and_memory(&self, row: RowType) -> Result<(LlShape, LlHandleMemory)> {
        let shape = self.group.plan.shape(&self.routing, row)?;
        Ok((shape, self.piece.memory()))
    }

    /// What operation `op` on rows of type `row` tells its peers. The group has checked that both sizes
    /// fit.
    fn signature(&self, op: u32, row: RowType) -> Signature {
        Signature {
            op,
            dtype: row.dtype as u32,
            top_k: self.routing.top_k as u32,
            row_bytes: row.bytes() as u32,
        }
    }

    // Inlined, so that the better part of a kilobyte is written once and not moved about.
    #[inline]
    fn common(
        &self,
        signature: Signature,
        (shape, handle): (LlShape, LlHandleMemory),
        grid: Grid,
        part: Part,
    ) -> LlCommon {
        let states = self.group.open.track_states();
        LlCommon {
            peers: self.group.open.peers(),
            wait: self.group.open.wait(signature.op),
            layout: self.group.layout,
            shape,
            handle,
            channel_state: states.wrapping_add(part.track as usize),
            channel: part.track,
            phases: part.phases,
            signature: signature.to_word(),
            send_blocks: grid.send_blocks,
            receive_blocks: grid.receive_blocks,
        }
    }
}

impl LlBackend for CudaLl {
    fn run(&self, op: &LlOp, stream: Stream) -> Result<()> {
        let at = &self.0.enter(stream)?;
        let run = || self.0.launch(op, Part::WHOLE, at);
        let enqueue = || self.0.group.order.enqueue(at, run);
        self.0.follow_staged(at, enqueue)
    }

    fn send(&self, op: &LlOp, slot: usize, stream: Stream) -> Result<Ticket> {
        let group = &self.0.group;
        let track = track_of_slot(slot)?;
        let at = &self.0.enter(stream)?;
        let start = || self.0.launch(op, Part::send(track), at);
        let in_order = || group.order.enqueue(at, start);
        let enqueue = || group.tracks.send(track, at, in_order);
        self.0.follow_staged(at, enqueue)?;
        Ok(Ticket(u64::from(track)))
    }

    fn receive(&self, op: &LlOp, ticket: Ticket, stream: Stream) -> Result<()> {
        let track = track_of(ticket)?;
        let at = &self.0.enter(stream)?;
        let finish = || self.0.launch(op, Part::receive(track, true), at);
        self.0.group.tracks.receive(track, at, finish)?;
        self.0.piece.set_received_on(track);
        Ok(())
    }

    fn abandon(&self, op: &LlOp, ticket: Ticket) {
        let (handle, op) = (Arc::clone(&self.0), *op);
        if let Ok(track) = track_of(ticket) {
            let discard = move |at: &Place| {
                handle.launch(&op, Part::receive(track, false), at)?;
                handle.piece.set_received_on(track);
                Ok(())
            };
            self.0.group.tracks.abandon(track, Box::new(discard));
        }
    }
}

/// The track of the staged operations in slot `slot`; 0 is that of whole ones.
fn track_of_slot(slot: usize) -> Result<u32> {
    u32::try_from(slot + 1).map_err(|_| Error::internal("a slot that has no track"))
}

fn track_of(ticket: Ticket) -> Result<u32> {
    u32::try_from(ticket.0).map_err(|_| Error::internal("a ticket that names no track"))
}
