//! Low-latency operations: checked operation -> kernel parameters -> launch.
#![forbid(unsafe_code)]

use crate::backend::cuda::device_name::device_name;
use crate::backend::cuda::kernels::{self, Kernel};
use crate::backend::cuda::launch::launch;
use crate::backend::cuda::ll_grid::Grid;
use crate::backend::cuda::ll_plan::LlPlan;
use crate::backend::cuda::ll_pool::{Piece, Pool};
use crate::backend::cuda::memory::{Buffer, CudaMemory};
use crate::backend::cuda::open::Open;
use crate::backend::cuda::order::Order;
use crate::backend::cuda::params::{
    LL_PHASE_RECEIVE, LL_PHASE_SEND, LL_TRACKS, LL_WHOLE_TRACK, LlCombineParams, LlCommon,
    LlDispatchParams, LlHandleMemory, LlLayout, LlShape, LlTrackState, OP_LL_COMBINE,
    OP_LL_DISPATCH,
};
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
    states: Buffer,
    pool: Pool,
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
        let states = Buffer::zeroed(memory, LL_TRACKS as usize * size_of::<LlTrackState>())?;
        let tracks = Tracks::new(open.module.context())?;
        Ok(Self {
            open,
            plan,
            layout,
            order,
            tracks,
            states,
            pool: Pool::new(memory),
        })
    }

    /// A handle with the ids `routing`.
    pub(super) fn open_handle(self: &Arc<Self>, routing: Routing) -> Result<CudaLl> {
        Ok(CudaLl(Arc::new(Handle {
            group: Arc::clone(self),
            piece: Some(self.pool.take(&self.plan, routing.top_k)?),
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
    /// Given back in the end.
    piece: Option<Piece>,
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
        track: LL_WHOLE_TRACK,
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
    /// Enqueues an operation on `stream` by `enqueue`, behind a receive phase that may be on another
    /// stream: that uses the handle's memory.
    fn follow_staged(&self, stream: Stream, enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
        let piece = self.piece()?;
        let track = piece.received_on();
        if track == LL_WHOLE_TRACK {
            return enqueue();
        }
        let _entered = self.group.open.module.context().enter()?;
        let follows = self.group.tracks.follow(track, stream)?;
        enqueue()?;
        if follows {
            piece.set_received_on(LL_WHOLE_TRACK);
        }
        Ok(())
    }

    fn piece(&self) -> Result<&Piece> {
        let piece = self.piece.as_ref();
        piece.ok_or_else(|| Error::internal("an LL handle without memory"))
    }

    fn launch(&self, op: &LlOp, part: Part, stream: Stream) -> Result<()> {
        match op {
            LlOp::Dispatch(op) => self.launch_dispatch(op, part, stream),
            LlOp::Combine(op) => self.launch_combine(op, part, stream),
        }
    }

    fn launch_dispatch(&self, op: &LlDispatch, part: Part, stream: Stream) -> Result<()> {
        let plan = &self.group.plan;
        let grid = plan.dispatch_grid(self.routing.tokens, self.group.open.multiprocessors);
        let given = self.shape_and_memory(op.row)?;
        let params = LlDispatchParams {
            common: self.common(OP_LL_DISPATCH, given, grid, part),
            tokens: op.tokens.0 as *const u8,
            topk_idx: self.routing.ids.0 as *const i64,
            out: part.kept(op.out) as *mut u8,
            counter: part.kept(op.counter.unwrap_or_default()) as *mut i32,
        };
        let shape = grid.launch_shape(plan.dispatch_shared_bytes());
        let module = &self.group.open.module;
        launch(module, Kernel::LlDispatch, shape, &params, stream)
    }

    fn launch_combine(&self, op: &LlCombine, part: Part, stream: Stream) -> Result<()> {
        let plan = &self.group.plan;
        let grid = plan.combine_grid(self.routing.tokens, self.group.open.multiprocessors);
        let given = self.shape_and_memory(op.row)?;
        let params = LlCombineParams {
            common: self.common(OP_LL_COMBINE, given, grid, part),
            rows: op.expert_rows.0 as *const u8,
            topk_idx: self.routing.ids.0 as *const i64,
            weights: part.kept(op.weights) as *const f32,
            out: part.kept(op.out) as *mut u8,
            exact: u32::from(plan.mode() == LlCombineMode::Exact),
        };
        let kernel = kernels::for_rows::<LlCombineParams>(op.row.dtype)?;
        let shape = grid.launch_shape(0);
        let module = &self.group.open.module;
        launch(module, kernel, shape, &params, stream)
    }

    fn shape_and_memory(&self, row: RowType) -> Result<(LlShape, LlHandleMemory)> {
        let shape = self.group.plan.shape(&self.routing, row)?;
        Ok((shape, self.piece()?.memory()))
    }

    // Inlined, so that the better part of a kilobyte is written once and not moved about.
    #[inline]
    fn common(
        &self,
        op: u32,
        (shape, handle): (LlShape, LlHandleMemory),
        grid: Grid,
        part: Part,
    ) -> LlCommon {
        let states = self.group.states.data().0 as *mut LlTrackState;
        LlCommon {
            peers: self.group.open.peers(),
            wait: self.group.open.wait(op),
            layout: self.group.layout,
            shape,
            handle,
            track_state: states.wrapping_add(part.track as usize),
            track: part.track,
            phases: part.phases,
            send_blocks: grid.send_blocks,
            receive_blocks: grid.receive_blocks,
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(piece) = self.piece.take() {
            self.group.pool.put(piece);
        }
    }
}

impl LlBackend for CudaLl {
    fn run(&self, op: &LlOp, stream: Stream) -> Result<()> {
        let run = || self.0.launch(op, Part::WHOLE, stream);
        let enqueue = || self.0.group.order.enqueue(stream, run);
        self.0.follow_staged(stream, enqueue)
    }

    fn send(&self, op: &LlOp, slot: usize, stream: Stream) -> Result<Ticket> {
        let group = &self.0.group;
        let _entered = group.open.module.context().enter()?;
        let track = track_of_slot(slot)?;
        let start = || self.0.launch(op, Part::send(track), stream);
        let in_order = || group.order.enqueue(stream, start);
        let enqueue = || group.tracks.send(track, stream, in_order);
        self.0.follow_staged(stream, enqueue)?;
        Ok(Ticket(u64::from(track)))
    }

    fn receive(&self, op: &LlOp, ticket: Ticket, stream: Stream) -> Result<()> {
        let track = track_of(ticket)?;
        let group = &self.0.group;
        let _entered = group.open.module.context().enter()?;
        let finish = || self.0.launch(op, Part::receive(track, true), stream);
        group.tracks.receive(track, stream, finish)?;
        self.0.piece()?.set_received_on(track);
        Ok(())
    }

    fn abandon(&self, op: &LlOp, ticket: Ticket) {
        let (handle, op) = (Arc::clone(&self.0), *op);
        if let Ok(track) = track_of(ticket) {
            let discard = move |stream| {
                let part = Part::receive(track, false);
                handle.launch(&op, part, stream)?;
                handle.piece()?.set_received_on(track);
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
