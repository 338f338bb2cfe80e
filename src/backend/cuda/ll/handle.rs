//! An LL handle: the parameters of the kernels that run its operations.

use crate::backend::cuda::agreement::{refusal_of, verdict_with};
use crate::backend::cuda::auxiliary::{GivenHeader, IdCopy};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::kernels::{self, Kernel, LaunchShape, to_u32};
use crate::backend::cuda::ll::chunks::{Chunks, Cut};
use crate::backend::cuda::ll::fingerprint::LlFingerprint;
use crate::backend::cuda::ll::launch::{CombineKernel, DispatchGrid, FewGrids, Grid, HandlePlan, Part};
use crate::backend::cuda::ll::memory::{HandleMemory, ViewBanks};
use crate::backend::cuda::ll::network::LlNetwork;
use crate::backend::cuda::network::two_sided::handshake::Announced;
use crate::backend::cuda::params::common::{KernelOp, ScaledRows};
use crate::backend::cuda::params::ll::{
    LlCombineParams, LlCommon, LlDispatchParams, LlLayout, LlPhase, LlScaledDispatchParams,
};
use crate::backend::cuda::pool::Taken;
use crate::backend::cuda::scaled_rows::{ScalesWord, scaled_rows};
use crate::error::refusal::{AmongRanks, Role, Subject};
use crate::error::{Error, Result};
use crate::model::ids::GroupRank;
use crate::model::layout::Layout;
use crate::model::ops::{IntWidth, Launch, LlCombine, LlDispatch, LlOp, Numbers, Routing, ViewBank};
use crate::model::scales::{Scaled, WireRow};
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::ptr::null;
use std::sync::Arc;

/// One routing of a group's LL operations. The data that a dispatch stores for its combine stays on the device.
pub struct Handle {
    pub context: Arc<GroupContext>,
    /// The offsets in the windows.
    pub layout: LlLayout,
    /// The memory of views, on one node.
    pub views: Option<Arc<ViewBanks>>,
    pub plan: HandlePlan,
    pub routing: Routing,
    pub memory: Taken<HandleMemory>,
    /// For a block in a caller's memory.
    pub header: Option<GivenHeader>,
    /// By order of creation, from 1 on.
    pub number: u32,
    /// What the forwarded ranks have announced, once an operation has asked for it.
    pub source_tokens: OnceCell<SourceTokens>,
}

/// The number of tokens of the other ranks that this one forwards for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTokens {
    /// By rank.
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

    /// What the forwarded ranks have announced about the handle; the first call may wait for it. If one of them has
    /// refused, the operation is refused, and the group goes on.
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

    /// Enqueues `part` of an operation on one node. In a caller's memory a dispatch writes the header once its block is
    /// complete, and a combine compares it first.
    pub fn launch(&self, op: &LlOp, part: Part, at: &StreamScope) -> Result<()> {
        if part.phases != LlPhase::Receive {
            self.widen_ids(at)?;
        }
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

    /// Enqueues widening 32-bit ids, which kernels do not read; every operation reads the caller's ids again.
    pub fn widen_ids(&self, at: &StreamScope) -> Result<()> {
        let Routing { ids, width, tokens, top_k, .. } = self.routing;
        if width == IntWidth::Bits64 {
            return Ok(());
        }
        let copy =
            IdCopy { from: Numbers { data: ids, width }, to: self.memory.ids(), count: tokens * top_k, offset: 0 };
        copy.enqueue(&self.context, at)
    }

    /// The ids as kernels read them.
    pub fn ids(&self) -> *const i64 {
        let ids = match self.routing.width {
            IntWidth::Bits64 => self.routing.ids,
            IntWidth::Bits32 => self.memory.ids(),
        };
        ids.0 as *const i64
    }

    fn launch_kernel(&self, op: &LlOp, part: Part, at: &StreamScope) -> Result<()> {
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

    /// The bank that `part` of a dispatch fills directly, if it does.
    fn bank_to_fill(&self, op: &LlDispatch, part: Part) -> Option<ViewBank> {
        let stays = |views: &Arc<ViewBanks>| part.is_whole() && views.hold(op);
        op.view.filter(|_| self.views.as_ref().is_some_and(stays))
    }

    fn launch_dispatch(&self, op: &LlDispatch, part: Part, at: &StreamScope) -> Result<()> {
        let (grid, kernel) = match self.few_dispatch(op, part) {
            Some(few) => (few, kernels::ll_dispatch_few()),
            None => (self.plan.dispatch, kernels::ll_dispatch()),
        };
        let grid = &grid.asked(op.launch, kernel.most_threads());
        let params = self.dispatch_params((op, op.tokens), grid, part);
        self.launch_following(kernel, op.launch, grid.launch, &params, at)
    }

    // Out of line, so that a dispatch without scales does not carry its parameters.
    #[inline(never)]
    fn launch_scaled_dispatch(&self, (op, scaled): (&LlDispatch, &Scaled), part: Part, at: &StreamScope) -> Result<()> {
        let (grid, kernel) = match (scaled.cast(), self.few_dispatch(op, part)) {
            (Some(cast), Some(few)) => (few, kernels::ll_dispatch_few_cast(cast.from)?),
            (None, Some(few)) => (few, kernels::ll_dispatch_few_scaled()),
            (Some(cast), None) => (self.plan.cast_dispatch, kernels::ll_dispatch_cast(cast.from)?),
            (None, None) => (self.plan.scaled_dispatch, kernels::ll_dispatch_scaled()),
        };
        let grid = &grid.asked(op.launch, kernel.most_threads());
        let params = LlScaledDispatchParams {
            dispatch: self.dispatch_params((op, op.tokens), grid, part),
            rows: rows_with_scales(op, scaled, grid.cut)?,
        };
        self.launch_following(kernel, op.launch, grid.launch, &params, at)
    }

    fn launch_combine(&self, op: &LlCombine, part: Part, at: &StreamScope) -> Result<()> {
        if op.layout.is_rank_major() {
            return self.launch_rank_combine(op, part, at);
        }
        if let Some(grid) = self.few(op.launch, part).and_then(|few| few.combine)
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
        let grid = self.plan.combine_asked(op.launch, kernel.most_threads());
        let params = self.combine_params(op, &grid, part);
        self.launch_following(kernel, op.launch, grid.launch_shape(0), &params, at)
    }

    /// The grids of the kernels for few tokens, if `part` of an operation may use them.
    fn few(&self, asked: Launch, part: Part) -> Option<&FewGrids> {
        self.plan.few.as_ref().filter(|_| part.is_whole() && asked.is_own())
    }

    /// The grid of such a dispatch, with chunks of one access per lane.
    pub(super) fn few_dispatch(&self, op: &LlDispatch, part: Part) -> Option<DispatchGrid> {
        let row = op.wire();
        let few = self.few(op.launch, part)?;
        let suits = few.rows.has(op.layout, row.scales.is_some()) && Chunks::of(row, Cut::Small).accesses == 1;
        suits.then(|| few.of_rows(row.payload.bytes(), op.layout.is_rank_major()))
    }

    /// As [`GroupContext::launch_following`]; `shape` is for the launch `asked`.
    pub(super) fn launch_following<P>(
        &self,
        kernel: Kernel<P>,
        asked: Launch,
        shape: LaunchShape,
        params: &P,
        at: &StreamScope,
    ) -> Result<()> {
        self.context.launch_following(kernel, shape, params, asked.in_order, at)
    }

    /// The parameters of `part` of a dispatch that reads rows at `rows`: in the caller's tensor, or in a message.
    // Inlined, so that nearly a kilobyte of parameters is written in place, not moved.
    #[inline]
    pub fn dispatch_params(
        &self,
        (op, rows): (&LlDispatch, DevPtr),
        grid: &DispatchGrid,
        part: Part,
    ) -> LlDispatchParams {
        LlDispatchParams {
            common: self.common(
                LlFingerprint { view: self.bank_to_fill(op, part), ..self.fingerprint_of_dispatch(op) },
                (op.wire(), grid.cut),
                &grid.grid,
                part,
            ),
            tokens: rows.0 as *const u8,
            topk_idx: self.ids(),
            out: kept(part, op.out) as *mut u8,
            counter: kept(part, op.counter.unwrap_or_default()) as *mut i32,
            waits: kept(part, op.waits.unwrap_or_default()) as *mut u64,
            notify_blocks: grid.notify_blocks,
            serve_blocks: grid.serve_blocks,
        }
    }

    /// The parameters of `part` of a combine.
    // Inlined for the same reason.
    #[inline]
    pub fn combine_params(&self, op: &LlCombine, grid: &Grid, part: Part) -> LlCombineParams {
        let fingerprint =
            LlFingerprint { exact: op.is_exact(), ..self.fingerprint(KernelOp::LlCombine, op.row.into(), op.layout) };
        LlCombineParams {
            common: self.common(fingerprint, (op.row.into(), Cut::Large), grid, part),
            rows: op.expert_rows.0 as *const u8,
            topk_idx: self.ids(),
            weights: kept(part, op.weights.unwrap_or_default()) as *const f32,
            out: kept(part, op.out) as *mut u8,
            waits: kept(part, op.waits.unwrap_or_default()) as *mut u64,
        }
    }

    // Inlined for the same reason. Everything that needs a call comes first, so that peers are copied once.
    #[inline(always)]
    fn common(&self, fingerprint: LlFingerprint, (row, cut): (WireRow, Cut), grid: &Grid, part: Part) -> LlCommon {
        let shape = self.plan.shape(row, cut);
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

/// The `scaled` rows of a dispatch as parameters of kernels with this cut.
pub fn rows_with_scales(op: &LlDispatch, scaled: &Scaled, cut: Cut) -> Result<ScaledRows> {
    let scale_chunk_bytes = Chunks::of(op.wire(), cut).scales as u32;
    Ok(ScaledRows { scale_chunk_bytes, ..scaled_rows(op.row, scaled)? })
}

/// The caller's memory; NULL if `part` does not want the outputs, whose memory may be gone then.
#[inline]
pub fn kept(part: Part, data: DevPtr) -> usize {
    if part.keep { data.0 } else { 0 }
}
