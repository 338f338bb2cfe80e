//! An LL handle: its memory, and the parameters of the kernels that run its operations.

use crate::backend::cuda::driver::capture_mode::ApartFromCaptures;
use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::handle_header::GivenHeader;
use crate::backend::cuda::kernels::{self, Kernel};
use crate::backend::cuda::ll::fingerprint::LlFingerprint;
use crate::backend::cuda::ll::launch::{
    Chunks, CombineKernel, DispatchGrid, Grid, HandlePlan, Part,
};
use crate::backend::cuda::ll::network::LlNetwork;
use crate::backend::cuda::ll::plan::LlPlan;
use crate::backend::cuda::network::two_sided::handshake::{Announced, Handshake, NewHandle};
use crate::backend::cuda::params::common::{KernelOp, ScaledRows};
use crate::backend::cuda::params::ll::{
    LlCombineParams, LlCommon, LlDispatchParams, LlHandleMemory, LlLayout, LlPhase,
    LlScaledDispatchParams,
};
use crate::backend::cuda::regions::to_u32;
use crate::backend::cuda::scaled_rows::{ScalesWord, scaled_rows};
use crate::error::refusal::{AmongRanks, Role, Subject};
use crate::error::{Error, Result};
use crate::model::handle_state::{GivenBlock, LlSections};
use crate::model::layout::Layout;
use crate::model::ops::{LlCombine, LlDispatch, LlOp, Routing, StagedSlot};
use crate::model::scales::{Scaled, WireRow};
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::ptr::null;
use std::sync::Arc;

/// One routing of a group's LL operations. The data that a dispatch stores for its combine stays on the device.
pub struct Handle {
    pub context: Arc<GroupContext>,
    /// Where things lie in the windows.
    pub layout: LlLayout,
    pub plan: HandlePlan,
    pub routing: Routing,
    pub memory: Arc<HandleMemory>,
    /// Of a block in a caller's memory.
    pub header: Option<GivenHeader>,
    /// In the order of creation, from 1 on.
    pub number: u32,
    /// What the forwarded ranks have announced, once an operation has asked.
    pub source_tokens: OnceCell<SourceTokens>,
}

/// The tokens of the ranks from 1 on that this one forwards for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTokens {
    /// Of each.
    pub of: Vec<usize>,
    /// Of the one that has most.
    pub most: u32,
}

impl Handle {
    fn new_handle<'a>(&'a self, network: &'a LlNetwork) -> NewHandle<'a> {
        NewHandle {
            network,
            faults: &self.context.faults,
            what: "LL handle",
            number: self.number,
        }
    }

    /// Announces the handle to the rail peers.
    pub fn announce(&self, network: &LlNetwork) -> Result<()> {
        let Routing { tokens, top_k, .. } = self.routing;
        let verdict = to_u32(top_k)?;
        let _apart = ApartFromCaptures::enter()?;
        let side = network.on_device.side.outside();
        let at = &self.context.module.enter(side)?;
        let turn = network.background_order.begin(at)?;
        let handshake = self.memory.handshake()?;
        let own = Announced { tokens, verdict };
        turn.end_after(handshake.send(&self.new_handle(network), own, at))
    }

    /// What the forwarded ranks have announced of the handle; the first call may wait for it.
    pub fn source_tokens(&self, network: &LlNetwork) -> Result<&SourceTokens> {
        let agree = |rank, announced: Announced| {
            let (ours, theirs) = (self.routing.top_k, announced.verdict as usize);
            if ours == theirs {
                return Ok(());
            }
            let same = AmongRanks::Same { rank };
            Err(Error::usage(Subject::Size(Role::Ids, 1), same).got(ours, theirs))
        };
        self.source_tokens.get_or_try_init(|| {
            let handshake = self.memory.handshake()?;
            let handle = self.new_handle(network);
            let all = handshake.wait(&handle, network.max_tokens, agree)?;
            let of: Vec<_> = all.iter().map(|announced| announced.tokens).collect();
            let most = to_u32(of.iter().copied().max().unwrap_or(0))?;
            Ok(SourceTokens { of, most })
        })
    }

    /// Enqueues `part` of an operation on one node. In a caller's memory a dispatch writes the header once its block is
    /// complete, and a combine looks at it first.
    pub fn launch(&self, op: &LlOp, part: Part, at: &StreamScope) -> Result<()> {
        let Some(header) = &self.header else {
            return self.launch_kernel(op, part, at);
        };
        let header = header.of_layout(op.layout());
        match op {
            LlOp::Combine(_) if part.phases != LlPhase::Receive => {
                header.compare(&self.context, KernelOp::LlCombine, at)?;
                self.launch_kernel(op, part, at)
            }
            LlOp::Dispatch(_) if part.phases != LlPhase::Send && part.keep => {
                self.launch_kernel(op, part, at)?;
                header.write(&self.context, KernelOp::LlDispatch, null(), at)
            }
            _ => self.launch_kernel(op, part, at),
        }
    }

    fn launch_kernel(&self, op: &LlOp, part: Part, at: &StreamScope) -> Result<()> {
        match op {
            LlOp::Dispatch(op) => match (&op.beside, &op.scaled) {
                (None, None) => self.launch_dispatch(op, part, at),
                (None, Some(scaled)) => self.launch_scaled_dispatch((op, scaled), part, at),
                (Some(beside), _) => self.launch_rank_dispatch(op, beside, part, at),
            },
            LlOp::Combine(op) => self.launch_combine(op, part, at),
        }
    }

    fn launch_dispatch(&self, op: &LlDispatch, part: Part, at: &StreamScope) -> Result<()> {
        let grid = &self.plan.dispatch;
        let params = self.dispatch_params((op, op.tokens), grid, part);
        self.launch_following(kernels::ll_dispatch(), grid.launch, &params, at)
    }

    // Apart, so that a dispatch without scales does not carry its parameters.
    #[inline(never)]
    fn launch_scaled_dispatch(
        &self,
        (op, scaled): (&LlDispatch, &Scaled),
        part: Part,
        at: &StreamScope,
    ) -> Result<()> {
        let (grid, kernel) = match scaled.cast() {
            Some(cast) => (
                &self.plan.cast_dispatch,
                kernels::ll_dispatch_cast(cast.from)?,
            ),
            None => (&self.plan.scaled_dispatch, kernels::ll_dispatch_scaled()),
        };
        let params = LlScaledDispatchParams {
            dispatch: self.dispatch_params((op, op.tokens), grid, part),
            rows: rows_with_scales(op, scaled)?,
        };
        self.launch_following(kernel, grid.launch, &params, at)
    }

    fn launch_combine(&self, op: &LlCombine, part: Part, at: &StreamScope) -> Result<()> {
        let params = self.combine_params(op, &self.plan.combine, part);
        if op.layout.is_rank_major() {
            let kernel = kernels::ll_rank_combine(op.row.dtype)?;
            let module = &self.context.module;
            return module.launch(kernel, self.plan.combine_launch, &params, at);
        }
        let kernel = match self.plan.combine_kernel {
            CombineKernel::FewTokens => kernels::ll_combine(op.row.dtype)?,
            CombineKernel::ManyTokens => kernels::ll_combine_many(op.row.dtype)?,
            CombineKernel::Exact => kernels::ll_combine_exact(op.row.dtype)?,
            CombineKernel::OverNodes => {
                return Err(Error::internal("a combine over nodes on one node"));
            }
        };
        self.launch_following(kernel, self.plan.combine_launch, &params, at)
    }

    /// Enqueues a kernel that begins with `follow_grid` (`cuda/base/ptx.cuh`).
    fn launch_following<P>(
        &self,
        kernel: Kernel<P>,
        shape: LaunchShape,
        params: &P,
        at: &StreamScope,
    ) -> Result<()> {
        let module = &self.context.module;
        if self.context.programmatic {
            module.launch_early(kernel, shape, params, at)
        } else {
            module.launch(kernel, shape, params, at)
        }
    }

    /// The parameters of `part` of a dispatch that reads its rows at `rows`: the caller's, or those in a message.
    // Inlined, so that nearly a kilobyte of parameters is written once and not moved.
    #[inline]
    pub fn dispatch_params(
        &self,
        (op, rows): (&LlDispatch, DevPtr),
        grid: &DispatchGrid,
        part: Part,
    ) -> LlDispatchParams {
        LlDispatchParams {
            common: self.common(
                self.fingerprint_of_dispatch(op),
                op.wire(),
                &grid.grid,
                part,
            ),
            tokens: rows.0 as *const u8,
            topk_idx: self.routing.ids.0 as *const i64,
            out: kept(part, op.out) as *mut u8,
            counter: kept(part, op.counter.unwrap_or_default()) as *mut i32,
            notify_blocks: grid.notify_blocks,
        }
    }

    /// The parameters of `part` of a combine.
    // Inlined as above.
    #[inline]
    pub fn combine_params(&self, op: &LlCombine, grid: &Grid, part: Part) -> LlCombineParams {
        LlCombineParams {
            common: self.common(
                self.fingerprint(KernelOp::LlCombine, op.row.into(), op.layout),
                op.row.into(),
                grid,
                part,
            ),
            rows: op.expert_rows.0 as *const u8,
            topk_idx: self.routing.ids.0 as *const i64,
            weights: kept(part, op.weights.unwrap_or_default()) as *const f32,
            out: kept(part, op.out) as *mut u8,
        }
    }

    // Inlined as above.
    #[inline]
    fn common(
        &self,
        fingerprint: LlFingerprint,
        row: WireRow,
        grid: &Grid,
        part: Part,
    ) -> LlCommon {
        LlCommon {
            peers: self.context.peers(),
            wait: self.context.wait(fingerprint.operation()),
            layout: self.layout,
            shape: self.plan.shape(row),
            handle: self.memory.memory(),
            channel_state: self.context.channel_state(part.channel),
            channel: part.channel,
            phases: part.phases,
            fingerprint: fingerprint.to_word(),
            scales_word: ScalesWord::of(row).0,
            send_blocks: grid.send_blocks,
            receive_blocks: grid.receive_blocks,
        }
    }

    /// That of a dispatch.
    pub fn fingerprint_of_dispatch(&self, op: &LlDispatch) -> LlFingerprint {
        self.fingerprint(KernelOp::LlDispatch, op.wire(), op.layout)
    }

    /// The fingerprint of operation `op` on rows that travel as `row`, for the other ranks.
    // The group has checked that both sizes fit.
    fn fingerprint(&self, op: KernelOp, row: WireRow, layout: Layout) -> LlFingerprint {
        LlFingerprint {
            by_rank: layout.is_rank_major(),
            op: op as u32,
            scaled: row.scales.is_some(),
            dtype: row.payload.dtype as u32,
            top_k: self.routing.top_k as u32,
            row_bytes: row.payload.bytes() as u32,
        }
    }
}

/// The caller's memory; NULL if `part` does not want the outputs, as it may be gone then.
#[inline]
pub fn kept(part: Part, data: DevPtr) -> usize {
    if part.keep { data.0 } else { 0 }
}

/// The `scaled` rows of a dispatch, as kernels take them.
pub fn rows_with_scales(op: &LlDispatch, scaled: &Scaled) -> Result<ScaledRows> {
    Ok(ScaledRows {
        scale_chunk_bytes: Chunks::of(op.wire()).scales as u32,
        ..scaled_rows(op.row, scaled)?
    })
}

/// One handle's memory: the data that its dispatch stores for its combine.
pub struct HandleMemory {
    /// `None` if the block is in a caller's memory.
    _buffer: Option<Buffer>,
    block: DevPtr,
    sections: LlSections,
    top_k: usize,
    /// `None` on one node.
    handshake: Option<Handshake>,
    receiver: Mutex<Option<StagedSlot>>,
}

impl HandleMemory {
    /// The content is arbitrary, or left by an earlier handle. Initialising it would have to wait
    /// for kernels, hence for other ranks, and a dispatch writes everything that its combine reads.
    /// But that dispatch may be in a graph that was never launched, which the host cannot see.
    /// Kernels then access no wrong address, but the group's results are meaningless from there on.
    ///
    /// Over several nodes the rank forwards for so many, itself included.
    pub fn new(
        memory: &Arc<CudaMemory>,
        plan: &LlPlan,
        (top_k, forwarded): (usize, Option<usize>),
    ) -> Result<Self> {
        let sections = plan.handle_memory(top_k);
        let buffer = Buffer::new(memory, sections.bytes)?;
        Ok(Self {
            block: buffer.data(),
            _buffer: Some(buffer),
            sections,
            top_k,
            handshake: forwarded
                .map(|forwarded| Handshake::new(memory, forwarded))
                .transpose()?,
            receiver: Mutex::default(),
        })
    }

    /// The block of a handle with `top_k` ids per token in a caller's memory, of a group on one node.
    pub fn given(plan: &LlPlan, top_k: usize, GivenBlock(block): GivenBlock) -> Self {
        Self {
            _buffer: None,
            block,
            sections: plan.handle_memory(top_k),
            top_k,
            handshake: None,
            receiver: Mutex::default(),
        }
    }

    /// Whether the memory fits a handle with `top_k` ids per token.
    pub fn serves(&self, top_k: usize) -> bool {
        self.top_k == top_k && self.handshake.as_ref().is_none_or(Handshake::is_free)
    }

    fn handshake(&self) -> Result<&Handshake> {
        let handshake = self.handshake.as_ref();
        handshake.ok_or_else(|| Error::internal("a handshake on one node"))
    }

    /// The memory as a kernel parameter.
    pub fn memory(&self) -> LlHandleMemory {
        let at = |offset: usize| self.block.0 + offset;
        LlHandleMemory {
            expert_of: at(self.sections.expert_of) as *mut i32,
            row_of: at(self.sections.row_of) as *mut i32,
            tokens_of: at(self.sections.tokens_of) as *mut u32,
        }
    }

    /// The slot whose receive phase last used this memory, if no later operation used it. The next
    /// user must wait for that phase, as receive phases are not in the group's order.
    pub fn receiver(&self) -> Option<StagedSlot> {
        *self.receiver.lock()
    }

    /// Records that slot, or `None` after a later operation was enqueued.
    pub fn set_receiver(&self, slot: Option<StagedSlot>) {
        *self.receiver.lock() = slot;
    }
}
