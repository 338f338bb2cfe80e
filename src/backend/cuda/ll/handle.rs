//! An LL handle: fills in the kernel parameters of its operations on one node, and launches them.

use crate::backend::cuda::agreement::{refusal_of, verdict_with};
use crate::backend::cuda::auxiliary::{CallerHeader, IdCopy};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::kernels::{self, Kernel, LaunchShape, to_u32};
use crate::backend::cuda::ll::chunks::{ChunkSize, Chunks};
use crate::backend::cuda::ll::fingerprint::LlFingerprint;
use crate::backend::cuda::ll::launch::{CombineKernel, DispatchGrid, FewGrids, Grid, HandlePlan, LaunchPart};
use crate::backend::cuda::ll::memory::{HandleMemory, ViewBanks};
use crate::backend::cuda::ll::network::LlNetwork;
use crate::backend::cuda::network::two_sided::handshake::Announced;
use crate::backend::cuda::params::common::{KernelOp, ScaledRows};
use crate::backend::cuda::params::ll::{
    LlCombineParams, LlCommon, LlDispatchParams, LlLayout, LlPhase, LlScaledDispatchParams,
};
use crate::backend::cuda::pool::Pooled;
use crate::backend::cuda::scaled_rows::{ScalesWord, scaled_rows};
use crate::error::refusal::{AmongRanks, Role, Subject};
use crate::error::{Error, Result};
use crate::model::ids::GroupRank;
use crate::model::layout::Layout;
use crate::model::ops::{IntWidth, Launch, LlCombine, LlDispatch, LlOp, Numbers, Routing, ViewBank};
use crate::model::scales::{Scaled, WireRow};
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::sync::Arc;

/// One routing of a group's LL operations. What a dispatch stores for its combine stays on the device.
pub struct Handle {
    pub context: Arc<GroupContext>,
    /// The offsets of the LL regions in a window.
    pub layout: LlLayout,
    /// The memory of views, on one node.
    pub views: Option<Arc<ViewBanks>>,
    pub plan: HandlePlan,
    pub routing: Routing,
    pub memory: Pooled<HandleMemory>,
    /// The header of the block, if it is in a caller's memory.
    pub header: Option<CallerHeader>,
    /// Counts the group's handles, from 1 on.
    pub number: u32,
    /// The numbers of tokens that the other forwarded ranks have announced; the first operation waits for them.
    pub source_tokens: OnceCell<SourceTokens>,
}

/// The numbers of tokens of the other ranks that this one forwards for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTokens {
    /// By rank of the group.
    pub of: Vec<usize>,
    /// The largest.
    pub most: u32,
}

impl Handle {
    /// Announces the handle to the rail peers.
    pub fn announce(&self, network: &LlNetwork) -> Result<()> {
        let Routing { tokens, top_k, .. } = self.routing;
        let own = Announced { tokens, verdict: verdict_with(to_u32(top_k)?) };
        network.announce(&self.context, self.number, self.memory.handshake()?, own)
    }

    /// The numbers of tokens that the forwarded ranks have announced for the handle; the first call may wait for them.
    /// If one of these ranks has refused the handle, the operation is refused, and the group goes on.
    pub fn source_tokens(&self, network: &LlNetwork) -> Result<&SourceTokens> {
        self.source_tokens.get_or_try_init(|| {
            let handle = network.new_handle(&self.context, self.number);
            let all = self.memory.handshake()?.wait(&handle, network.max_tokens)?;
            for (&rank, announced) in network.view.remote().iter().zip(&all) {
                refusal_of(rank, announced.verdict).map_or(Ok(()), Err)?;
                self.check_top_k(rank, announced.verdict).inspect_err(|error| network.fail(error))?;
            }
            let of: Vec<_> = all.iter().map(|announced| announced.tokens).collect();
            let most = to_u32(of.iter().copied().max().unwrap_or(0))?;
            Ok(SourceTokens { of, most })
        })
    }

    /// Refuses if `rank`'s number of ids per token, `theirs`, differs from this rank's.
    fn check_top_k(&self, rank: GroupRank, theirs: u32) -> Result<()> {
        let ours = self.routing.top_k;
        if verdict_with(to_u32(ours)?) == theirs {
            return Ok(());
        }
        Err(Error::usage(Subject::Size(Role::Ids, 1), AmongRanks::Same { rank }).got(ours, theirs))
    }

    /// Enqueues `part` of an operation on one node. If the handle's block is in a caller's memory, a dispatch ends with
    /// writing the header, and a combine begins with checking it.
    pub fn launch(&self, op: &LlOp, part: LaunchPart, at: &StreamScope) -> Result<()> {
        if part.phases != LlPhase::Receive {
            self.widen_ids(at)?;
        }
        let Some(header) = &self.header else {
            return self.launch_kernel(op, part, at);
        };
        let header = header.of_layout(op.layout());
        match op {
            LlOp::Combine(_) if part.phases != LlPhase::Receive => {
                header.compare(&self.context, at)?;
                self.launch_kernel(op, part, at)
            }
            LlOp::Dispatch(_) if part.phases != LlPhase::Send && part.wants_outputs => {
                self.launch_kernel(op, part, at)?;
                header.write(&self.context, at)
            }
            _ => self.launch_kernel(op, part, at),
        }
    }

    /// Enqueues widening 32-bit ids, as kernels read 64 bits; for every operation, as the caller may change ids.
    pub fn widen_ids(&self, at: &StreamScope) -> Result<()> {
        let Routing { ids, width, tokens, top_k, .. } = self.routing;
        if width == IntWidth::Bits64 {
            return Ok(());
        }
        let copy =
            IdCopy { from: Numbers { data: ids, width }, to: self.memory.ids(), count: tokens * top_k, offset: 0 };
        copy.enqueue(&self.context, at)
    }

    /// The 64-bit ids that kernels read.
    pub fn ids(&self) -> *const i64 {
        let ids = match self.routing.width {
            IntWidth::Bits64 => self.routing.ids,
            IntWidth::Bits32 => self.memory.ids(),
        };
        ids.0 as *const i64
    }

    fn launch_kernel(&self, op: &LlOp, part: LaunchPart, at: &StreamScope) -> Result<()> {
        match op {
            LlOp::Dispatch(op) => match (&op.topk, &op.scaled) {
                (None, None) => self.launch_dispatch(op, part, at),
                (None, Some(scaled)) => self.launch_scaled_dispatch((op, scaled), part, at),
                (Some(topk), _) => match self.bank_to_fill(op, part) {
                    Some(bank) => self.launch_dispatch_view((op, topk, bank), at),
                    None => self.launch_rank_dispatch(op, topk, part, at),
                },
            },
            LlOp::Combine(op) => self.launch_combine(op, part, at),
        }
    }

    /// The bank into which rows of `part` of a dispatch go directly; `None` if they are copied.
    fn bank_to_fill(&self, op: &LlDispatch, part: LaunchPart) -> Option<ViewBank> {
        let stays = |views: &Arc<ViewBanks>| part.is_whole() && views.keep_in_place(op);
        op.view.filter(|_| self.views.as_ref().is_some_and(stays))
    }

    fn launch_dispatch(&self, op: &LlDispatch, part: LaunchPart, at: &StreamScope) -> Result<()> {
        let (grid, kernel) = match self.few_dispatch(op, part) {
            Some(few) => (few, kernels::ll_dispatch_few()),
            None => (self.plan.dispatch, kernels::ll_dispatch()),
        };
        let grid = &grid.adjusted(op.launch, kernel.most_threads());
        let params = self.dispatch_params((op, op.tokens), grid, part);
        self.launch_following(kernel, op.launch, grid.launch, &params, at)
    }

    // Not inlined, so that a dispatch without scales does not carry these parameters.
    #[inline(never)]
    fn launch_scaled_dispatch(
        &self,
        (op, scaled): (&LlDispatch, &Scaled),
        part: LaunchPart,
        at: &StreamScope,
    ) -> Result<()> {
        let (grid, kernel) = match (scaled.cast(), self.few_dispatch(op, part)) {
            (Some(cast), Some(few)) => (few, kernels::ll_dispatch_few_cast(cast.from)?),
            (None, Some(few)) => (few, kernels::ll_dispatch_few_scaled()),
            (Some(cast), None) => (self.plan.cast_dispatch, kernels::ll_dispatch_cast(cast.from)?),
            (None, None) => (self.plan.scaled_dispatch, kernels::ll_dispatch_scaled()),
        };
        let grid = &grid.adjusted(op.launch, kernel.most_threads());
        let params = LlScaledDispatchParams {
            dispatch: self.dispatch_params((op, op.tokens), grid, part),
            rows: rows_with_scales(op, scaled, grid.chunk_size)?,
        };
        self.launch_following(kernel, op.launch, grid.launch, &params, at)
    }

    fn launch_combine(&self, op: &LlCombine, part: LaunchPart, at: &StreamScope) -> Result<()> {
        if op.layout.is_rank_major() {
            return self.launch_rank_combine(op, part, at);
        }
        if let Some(grid) = self.few_grids(op.launch, part).and_then(|few| few.combine)
            && !op.is_exact()
        {
            let kernel = kernels::ll_combine_few(op.row.dtype)?;
            let params = self.combine_params(op, &grid, part);
            return self.launch_following(kernel, op.launch, grid.launch_shape(0), &params, at);
        }
        let kernel = match self.plan.combine_kernel {
            _ if op.is_exact() => kernels::ll_combine_exact(op.row.dtype)?,
            CombineKernel::FewTokens => kernels::ll_combine(op.row.dtype)?,
            CombineKernel::ManyTokens => kernels::ll_combine_many(op.row.dtype)?,
            CombineKernel::OverNodes => {
                return Err(Error::internal("a combine over nodes on one node"));
            }
        };
        let grid = self.plan.adjusted_combine(op.launch, kernel.most_threads());
        let params = self.combine_params(op, &grid, part);
        self.launch_following(kernel, op.launch, grid.launch_shape(0), &params, at)
    }

    /// The grids of the kernels for few tokens, if `part` of an operation launched as `launch` may use them.
    fn few_grids(&self, launch: Launch, part: LaunchPart) -> Option<&FewGrids> {
        self.plan.few.as_ref().filter(|_| part.is_whole() && launch.is_own())
    }

    /// The grid of a dispatch with the kernels for few tokens, if it may use them.
    pub(super) fn few_dispatch(&self, op: &LlDispatch, part: LaunchPart) -> Option<DispatchGrid> {
        let row = op.wire();
        let few = self.few_grids(op.launch, part)?;
        let suits = few.rows.has(op.layout, row.scales.is_some()) && Chunks::of(row, ChunkSize::Small).accesses == 1;
        suits.then(|| few.of_rows(row.payload.bytes(), op.layout.is_rank_major()))
    }

    /// As [`GroupContext::launch_following`], in order if `launch` asks for it.
    pub(super) fn launch_following<P>(
        &self,
        kernel: Kernel<P>,
        launch: Launch,
        shape: LaunchShape,
        params: &P,
        at: &StreamScope,
    ) -> Result<()> {
        self.context.launch_following(kernel, shape, params, launch.in_order, at)
    }

    /// The parameters of `part` of a dispatch that reads rows at `rows`: in the caller's tensor, or in a message.
    // Inlined, so that the parameters, nearly a kilobyte, are written in place.
    #[inline]
    pub fn dispatch_params(
        &self,
        (op, rows): (&LlDispatch, DevPtr),
        grid: &DispatchGrid,
        part: LaunchPart,
    ) -> LlDispatchParams {
        LlDispatchParams {
            common: self.common(
                LlFingerprint { view: self.bank_to_fill(op, part), ..self.fingerprint_of_dispatch(op) },
                (op.wire(), grid.chunk_size),
                &grid.grid,
                part,
            ),
            tokens: rows.0 as *const u8,
            topk_idx: self.ids(),
            out: output_or_null(part, op.out) as *mut u8,
            counter: output_or_null(part, op.counter.unwrap_or_default()) as *mut i32,
            waits: output_or_null(part, op.waits.unwrap_or_default()) as *mut u64,
            notify_blocks: grid.notify_blocks,
            serve_blocks: grid.serve_blocks,
        }
    }

    /// The parameters of `part` of a combine.
    // Inlined for the same reason.
    #[inline]
    pub fn combine_params(&self, op: &LlCombine, grid: &Grid, part: LaunchPart) -> LlCombineParams {
        let fingerprint =
            LlFingerprint { exact: op.is_exact(), ..self.fingerprint(KernelOp::LlCombine, op.row.into(), op.layout) };
        LlCombineParams {
            common: self.common(fingerprint, (op.row.into(), ChunkSize::Large), grid, part),
            rows: op.expert_rows.0 as *const u8,
            topk_idx: self.ids(),
            weights: output_or_null(part, op.weights.unwrap_or_default()) as *const f32,
            out: output_or_null(part, op.out) as *mut u8,
            waits: output_or_null(part, op.waits.unwrap_or_default()) as *mut u64,
        }
    }

    // Inlined for the same reason. All calls come before the literal, so that the table of peers is copied only once.
    #[inline(always)]
    fn common(
        &self,
        fingerprint: LlFingerprint,
        (row, chunk_size): (WireRow, ChunkSize),
        grid: &Grid,
        part: LaunchPart,
    ) -> LlCommon {
        let shape = self.plan.shape(row, chunk_size);
        LlCommon {
            peers: *self.context.peers(),
            wait: self.context.wait(fingerprint.op),
            layout: self.layout,
            shape,
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

    /// The fingerprint of a dispatch.
    pub fn fingerprint_of_dispatch(&self, op: &LlDispatch) -> LlFingerprint {
        self.fingerprint(KernelOp::LlDispatch, op.wire(), op.layout)
    }

    /// The fingerprint of operation `op` on rows that travel as `row`.
    // The group has checked that both sizes fit.
    fn fingerprint(&self, op: KernelOp, row: WireRow, layout: Layout) -> LlFingerprint {
        LlFingerprint {
            by_rank: layout.is_rank_major(),
            view: None,
            exact: false,
            op,
            scaled: row.scales.is_some(),
            dtype: row.payload.dtype as u32,
            top_k: self.routing.top_k as u32,
            row_bytes: row.payload.bytes() as u32,
        }
    }
}

/// The kernel parameters of a dispatch's rows with scales, in chunks of this size.
pub fn rows_with_scales(op: &LlDispatch, scaled: &Scaled, chunk_size: ChunkSize) -> Result<ScaledRows> {
    let scale_chunk_bytes = Chunks::of(op.wire(), chunk_size).scales as u32;
    Ok(ScaledRows { scale_chunk_bytes, ..scaled_rows(op.row, scaled)? })
}

/// The caller's memory for an output, or NULL if `part` does not want outputs: the memory may no longer exist then.
#[inline]
pub fn output_or_null(part: LaunchPart, data: DevPtr) -> usize {
    if part.wants_outputs { data.0 } else { 0 }
}
