//! Rank-major LL operations on one node: kernel parameters and launches. A combine, and a dispatch into a view, use
//! rows where they arrive, without a copy.

use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::kernels;
use crate::backend::cuda::kernels::LaunchShape;
use crate::backend::cuda::ll::chunks::ChunkSize;
use crate::backend::cuda::ll::handle::{Handle, output_or_null, rows_with_scales};
use crate::backend::cuda::ll::launch::{DispatchGrid, Grid, LaunchPart};
use crate::backend::cuda::ll::memory::{Overlap, ViewBanks, scale_bytes};
use crate::backend::cuda::params::ll::{LlRankDispatchParams, LlRankScaledDispatchParams, LlShape, LlTopk, reciprocal};
use crate::backend::cuda::params::ll_view::{
    LL_VIEW_BANKS, LL_VIEW_THREADS, LlRankCombineParams, LlRankDispatchViewParams, LlRankScaledDispatchViewParams,
    LlView, LlViewState,
};
use crate::error::{Error, Result};
use crate::model::ops::{IntWidth, Launch, LlCombine, LlDispatch, RankMajorTopk, ViewBank};
use crate::model::tensor::DevPtr;

impl Handle {
    /// Enqueues `part` of a rank-major dispatch on one node.
    // Not inlined, so that expert-major dispatches do not carry these parameters.
    #[inline(never)]
    pub fn launch_rank_dispatch(
        &self,
        op: &LlDispatch,
        topk: &RankMajorTopk,
        part: LaunchPart,
        at: &StreamScope,
    ) -> Result<()> {
        let few = self.few_dispatch(op, part);
        let Some(scaled) = &op.scaled else {
            let (grid, kernel) = match few {
                Some(few) => (few, kernels::ll_rank_dispatch_few()),
                None => (self.plan.dispatch, kernels::ll_rank_dispatch()),
            };
            let grid = &grid.adjusted(op.launch, kernel.most_threads());
            let params = self.rank_dispatch_params((op, topk), op.tokens, grid, part);
            return self.launch_following(kernel, op.launch, grid.launch, &params, at);
        };
        let (grid, kernel) = match (scaled.cast(), few) {
            (Some(cast), Some(few)) => (few, kernels::ll_rank_dispatch_few_cast(cast.from)?),
            (None, Some(few)) => (few, kernels::ll_rank_dispatch_few_scaled()),
            (Some(cast), None) => (self.plan.cast_dispatch, kernels::ll_rank_dispatch_cast(cast.from)?),
            (None, None) => (self.plan.scaled_dispatch, kernels::ll_rank_dispatch_scaled()),
        };
        let grid = &grid.adjusted(op.launch, kernel.most_threads());
        let params = LlRankScaledDispatchParams {
            dispatch: self.rank_dispatch_params((op, topk), op.tokens, grid, part),
            rows: rows_with_scales(op, scaled, grid.chunk_size)?,
        };
        self.launch_following(kernel, op.launch, grid.launch, &params, at)
    }

    /// The parameters of `part` of a rank-major dispatch that reads its rows at `rows`.
    pub(super) fn rank_dispatch_params(
        &self,
        (op, topk): (&LlDispatch, &RankMajorTopk),
        rows: DevPtr,
        grid: &DispatchGrid,
        part: LaunchPart,
    ) -> LlRankDispatchParams {
        LlRankDispatchParams {
            dispatch: self.dispatch_params((op, rows), grid, part),
            topk: LlTopk {
                weights: topk.weights.0 as *const f32,
                out_ids: output_or_null(part, topk.out_ids.data) as *mut _,
                out_weights: output_or_null(part, topk.out_weights) as *mut f32,
                first_id: topk.first_id as u32,
                has_narrow_ids: u32::from(topk.out_ids.width == IntWidth::Bits32),
            },
        }
    }

    /// Enqueues a rank-major dispatch whose rows go directly into `bank`.
    pub fn launch_dispatch_view(
        &self,
        (op, topk, bank): (&LlDispatch, &RankMajorTopk, ViewBank),
        at: &StreamScope,
    ) -> Result<()> {
        let mut dispatch = self.rank_dispatch_params((op, topk), op.tokens, &self.plan.dispatch, LaunchPart::WHOLE);
        // Scales travel separately from the rows.
        dispatch.dispatch.common.shape = self.plan.shape(op.row.into(), ChunkSize::Large);
        let mut view = self.view(Some(bank), &dispatch.dispatch.common.shape, false)?;
        view.scale_bytes = scale_bytes(op.wire()) as u32;
        let banks = self.views()?.of_ranks(bank).ok_or_else(|| Error::internal("a view without memory"))?;
        let own = self.plan.view.blocks(view.parts as usize);
        let shape = launch_shape(op.launch, &mut view, own);
        let params = LlRankDispatchViewParams { dispatch, view, banks };
        let Some(scaled) = &op.scaled else {
            return self.launch_following(kernels::ll_rank_dispatch_view(), op.launch, shape, &params, at);
        };
        let kernel = match scaled.cast() {
            Some(cast) => kernels::ll_rank_dispatch_view_cast(cast.from)?,
            None => kernels::ll_rank_dispatch_view_scaled(),
        };
        let params =
            LlRankScaledDispatchViewParams { view: params, rows: rows_with_scales(op, scaled, ChunkSize::Large)? };
        self.launch_following(kernel, op.launch, shape, &params, at)
    }

    /// Enqueues `part` of a rank-major combine on one node.
    pub fn launch_rank_combine(&self, op: &LlCombine, part: LaunchPart, at: &StreamScope) -> Result<()> {
        let grid = Grid::shared(0, LL_VIEW_THREADS);
        let combine = self.combine_params(op, &grid, part);
        // A combine refills the view that it reads with the sentinel. But it leaves that to the next dispatch there if
        // it is staged, thus not ordered with whole operations, or if its rows only partly overlap the received ones.
        let shape = &combine.common.shape;
        let overlap =
            |bank| Some(self.views.as_ref()?.overlap(bank, op.expert_rows, op.row.bytes() * shape.max_tokens as usize));
        let bank = op.view.filter(|_| part.is_whole());
        let overlap = bank.and_then(overlap).unwrap_or(Overlap::None);
        let in_view = bank.filter(|_| overlap != Overlap::Partial);
        let mut view = self.view(in_view, shape, self.plan.view.combines_with_all_warps())?;
        view.input_in_bank = u32::from(overlap == Overlap::Exact);
        let is_own = part.is_whole() && op.launch.is_own();
        let (grid, parts) = (self.plan.view, view.parts as usize);
        let groups = if is_own { grid.groups(parts) } else { 1 };
        let group = launch_shape(op.launch, &mut view, grid.blocks(parts));
        // The last group receives the rank's own tokens, and needs no more blocks than there are of these.
        let last = if groups > 1 { grid.own_blocks(parts).min(group.blocks) } else { group.blocks };
        let shape = LaunchShape { blocks: (groups - 1) * group.blocks + last, ..group };
        let params = LlRankCombineParams {
            combine,
            view,
            groups,
            group_blocks: group.blocks,
            group_reciprocal: reciprocal(group.blocks),
        };
        let kernel = kernels::ll_rank_combine(op.row.dtype)?;
        self.launch_following(kernel, op.launch, shape, &params, at)
    }

    fn views(&self) -> Result<&ViewBanks> {
        self.views.as_deref().ok_or_else(|| Error::internal("views over several nodes"))
    }

    /// The view's parameters; `bank` is the one to use, if any.
    fn view(&self, bank: Option<ViewBank>, shape: &LlShape, with_all_warps: bool) -> Result<LlView> {
        let views = self.views()?;
        let (parts, warps) = self.plan.view.divide(shape.chunks as usize, with_all_warps);
        Ok(LlView {
            rows: bank.and_then(|bank| views.own(bank)).unwrap_or_default().0 as *mut u8,
            state: views.state.0 as *mut LlViewState,
            bank: bank.map_or(LL_VIEW_BANKS, |bank| bank.index() as u32),
            parts: parts as u32,
            parts_reciprocal: reciprocal(parts as u32),
            warps: warps as u32,
            gently: self.plan.view.polls_gently(parts).into(),
            scale_bytes: 0,
            step: 0,
            step_parts: 0,
            input_in_bank: 0,
        })
    }
}

/// The launch of a view's kernel, with the caller's number of blocks, or else `own`; `view` gets the number, too. The
/// number of threads is fixed, as each warp has its task.
fn launch_shape(requested: Launch, view: &mut LlView, own: u32) -> LaunchShape {
    let blocks = if requested.blocks == 0 { own } else { requested.blocks };
    (view.step, view.step_parts) = (blocks / view.parts, blocks % view.parts);
    LaunchShape::new(blocks, LL_VIEW_THREADS)
}
