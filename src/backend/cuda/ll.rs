//! Low-latency operations: checked operation -> kernel parameters -> launch.
#![forbid(unsafe_code)]

use crate::backend::cuda::device_name::device_name;
use crate::backend::cuda::kernels::{self, Kernel};
use crate::backend::cuda::launch::launch;
use crate::backend::cuda::ll_plan::{Grid, LlPlan};
use crate::backend::cuda::memory::{Buffer, CudaMemory};
use crate::backend::cuda::open::Open;
use crate::backend::cuda::params::{
    LL_PHASE_RECEIVE, LL_PHASE_SEND, LL_TRACKS, LL_WHOLE_TRACK, LlCombineParams, LlCommon,
    LlDispatchParams, LlHandleMemory, LlLayout, LlTrackState, OP_LL_COMBINE, OP_LL_DISPATCH,
};
use crate::backend::cuda::tracks::Tracks;
use crate::backend::{LlBackend, Ticket};
use crate::error::{Error, Result};
use crate::model::group::LlCombineMode;
use crate::model::ops::{LlCombine, LlDispatch, LlOp, Routing, RowType, Stream};
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// What the LL handles of a group share.
pub(super) struct LlGroup {
    open: Arc<Open>,
    memory: Arc<CudaMemory>,
    plan: LlPlan,
    layout: LlLayout,
    tracks: Tracks,
    states: Buffer,
}

impl LlGroup {
    /// The LL side of `open`; `layout` says where `plan`'s regions lie in the windows.
    pub(super) fn new(
        open: Arc<Open>,
        memory: Arc<CudaMemory>,
        plan: LlPlan,
        layout: LlLayout,
    ) -> Result<Self> {
        let gpu = device_name(open.module.context())?;
        let plan = plan.tuned(&gpu, open.multiprocessors);
        let states = Buffer::zeroed(&memory, LL_TRACKS as usize * size_of::<LlTrackState>())?;
        let tracks = Tracks::new(open.module.context())?;
        Ok(Self {
            open,
            memory,
            plan,
            layout,
            tracks,
            states,
        })
    }

    /// A handle with the ids `routing`.
    pub(super) fn open_handle(self: &Arc<Self>, routing: Routing) -> Result<CudaLl> {
        let sizes = self.plan.handle_memory(routing.top_k);
        Ok(CudaLl(Arc::new(Handle {
            group: Arc::clone(self),
            routing,
            expert_of: Buffer::new(&self.memory, sizes.expert_of)?,
            row_of: Buffer::new(&self.memory, sizes.row_of)?,
            tokens_of: Buffer::zeroed(&self.memory, sizes.tokens_of)?,
            received_on: AtomicU32::new(LL_WHOLE_TRACK),
        })))
    }
}

/// An LL handle. What a dispatch leaves for its combine stays on the device.
pub(super) struct CudaLl(Arc<Handle>);

struct Handle {
    group: Arc<LlGroup>,
    routing: Routing,
    expert_of: Buffer,
    row_of: Buffer,
    tokens_of: Buffer,
    /// The track of a receive phase that the next operation has to follow, or [`LL_WHOLE_TRACK`] if the
    /// last one was whole: then the stream, or its caller, keeps the order.
    received_on: AtomicU32,
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
    const WHOLE: Part = Part {
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
    /// Puts what comes next on `stream` behind a receive phase that may be on another stream: it uses
    /// the handle's memory.
    fn follow_staged(&self, stream: Stream) -> Result<()> {
        match self.received_on.swap(LL_WHOLE_TRACK, Ordering::Relaxed) {
            LL_WHOLE_TRACK => Ok(()),
            track => self.group.tracks.follow(track, stream),
        }
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
        let params = LlDispatchParams {
            common: self.common(OP_LL_DISPATCH, op.row, grid, part)?,
            tokens: op.tokens.0 as *const u8,
            topk_idx: self.routing.ids.0 as *const i64,
            out: part.kept(op.out) as *mut u8,
            counter: part.kept(op.counter.unwrap_or_default()) as *mut i32,
        };
        let shape = grid.launch_shape(plan.dispatch_shared_bytes());
        launch(
            &self.group.open.module,
            Kernel::LlDispatch,
            shape,
            &params,
            stream,
        )
    }

    fn launch_combine(&self, op: &LlCombine, part: Part, stream: Stream) -> Result<()> {
        let plan = &self.group.plan;
        let grid = plan.combine_grid(self.routing.tokens, self.group.open.multiprocessors);
        let params = LlCombineParams {
            common: self.common(OP_LL_COMBINE, op.row, grid, part)?,
            rows: op.expert_rows.0 as *const u8,
            topk_idx: self.routing.ids.0 as *const i64,
            weights: part.kept(op.weights) as *const f32,
            out: part.kept(op.out) as *mut u8,
            exact: u32::from(plan.mode() == LlCombineMode::Exact),
        };
        let kernel = kernels::for_rows::<LlCombineParams>(op.row.dtype)?;
        let shape = grid.launch_shape(0);
        launch(&self.group.open.module, kernel, shape, &params, stream)
    }

    fn common(&self, op: u32, row: RowType, grid: Grid, part: Part) -> Result<LlCommon> {
        let states = self.group.states.data().0 as *mut LlTrackState;
        Ok(LlCommon {
            peers: self.group.open.peers(),
            wait: self.group.open.wait(op),
            layout: self.group.layout,
            shape: self.group.plan.shape(&self.routing, row)?,
            handle: LlHandleMemory {
                expert_of: self.expert_of.data().0 as *mut i32,
                row_of: self.row_of.data().0 as *mut i32,
                tokens_of: self.tokens_of.data().0 as *mut u32,
            },
            track_state: states.wrapping_add(part.track as usize),
            track: part.track,
            phases: part.phases,
            send_blocks: grid.send_blocks,
            receive_blocks: grid.receive_blocks,
        })
    }
}

impl LlBackend for CudaLl {
    fn run(&self, op: &LlOp, stream: Stream) -> Result<()> {
        self.0.follow_staged(stream)?;
        self.0.launch(op, Part::WHOLE, stream)
    }

    fn send(&self, op: &LlOp, stream: Stream) -> Result<Ticket> {
        self.0.follow_staged(stream)?;
        let start = |track| self.0.launch(op, Part::send(track), stream);
        self.0
            .group
            .tracks
            .send(stream, start)
            .map(|track| Ticket(u64::from(track)))
    }

    fn receive(&self, op: &LlOp, ticket: Ticket, stream: Stream) -> Result<()> {
        let track = track_of(ticket)?;
        let finish = || self.0.launch(op, Part::receive(track, true), stream);
        self.0.group.tracks.receive(track, stream, finish)?;
        self.0.received_on.store(track, Ordering::Relaxed);
        Ok(())
    }

    fn abandon(&self, op: &LlOp, ticket: Ticket) {
        let (handle, op) = (Arc::clone(&self.0), *op);
        if let Ok(track) = track_of(ticket) {
            let discard = move |stream| handle.launch(&op, Part::receive(track, false), stream);
            self.0.group.tracks.abandon(track, Box::new(discard));
        }
    }
}

fn track_of(ticket: Ticket) -> Result<u32> {
    u32::try_from(ticket.0).map_err(|_| Error::internal("a ticket that names no track"))
}
