//! Launches of the kernels that copy no rows on their arrival: of rank-major dispatches into views, and of rank-major
//! combines on one node, which end views.

use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::kernels;
use crate::backend::cuda::ll::by_rank::ByRank;
use crate::backend::cuda::ll::handle::Handle;
use crate::backend::cuda::ll::launch::{Grid, Part};
use crate::backend::cuda::ll::views::{ViewBanks, cut};
use crate::backend::cuda::params::ll::{LlShape, reciprocal};
use crate::backend::cuda::params::ll_view::{
    LL_VIEW_BANKS, LL_VIEW_THREADS, LlRankCombineParams, LlRankDispatchViewParams, LlView, LlViewState,
};
use crate::error::{Error, Result};
use crate::model::ops::{Launch, LlBeside, LlCombine, LlDispatch, ViewBank};

impl Handle {
    /// The bank that `part` of a dispatch fills where its rows stay.
    pub fn bank_to_fill(&self, op: &LlDispatch, part: Part) -> Option<ViewBank> {
        let stays = self.views.is_some() && op.scaled.is_none() && part.is_whole();
        op.view.filter(|_| stays)
    }

    /// Enqueues a rank-major dispatch into `bank`.
    pub fn launch_dispatch_view(
        &self,
        (op, beside, bank): (&LlDispatch, &LlBeside, ViewBank),
        at: &StreamScope,
    ) -> Result<()> {
        let rows = op.tokens;
        let by_rank = ByRank { op, beside, rows };
        let dispatch = self.rank_dispatch_params(by_rank, &self.plan.dispatch, Part::WHOLE);
        let (view, own) = self.view(Some(bank), &dispatch.dispatch.common.shape)?;
        let banks = self.views()?.of_ranks(bank).ok_or_else(|| Error::internal("a view without memory"))?;
        let params = LlRankDispatchViewParams { dispatch, view, banks };
        let shape = launch_shape(op.launch, own);
        self.launch_following(kernels::ll_rank_dispatch_view(), op.launch, shape, &params, at)
    }

    /// Enqueues `part` of a rank-major combine on one node.
    pub fn launch_rank_combine(&self, op: &LlCombine, part: Part, at: &StreamScope) -> Result<()> {
        let grid = Grid::shared(0, LL_VIEW_THREADS);
        let combine = self.combine_params(op, &grid, part);
        // A staged one, which is in no order with whole ones, leaves its view to the next dispatch there.
        let bank = op.view.filter(|_| part.is_whole());
        let (view, own) = self.view(bank, &combine.common.shape)?;
        let params = LlRankCombineParams { combine, view };
        let shape = launch_shape(op.launch, own);
        self.launch_following(kernels::ll_rank_combine(op.row.dtype)?, op.launch, shape, &params, at)
    }

    fn views(&self) -> Result<&ViewBanks> {
        self.views.as_deref().ok_or_else(|| Error::internal("views over several nodes"))
    }

    /// What kernels need of `bank`, and how many blocks they have unless a call wants another number.
    fn view(&self, bank: Option<ViewBank>, shape: &LlShape) -> Result<(LlView, u32)> {
        let views = self.views()?;
        let (parts, warps) = cut(shape.chunks as usize);
        let view = LlView {
            rows: bank.and_then(|bank| views.own(bank)).unwrap_or_default().0 as *mut u8,
            state: views.state.0 as *mut LlViewState,
            bank: bank.map_or(LL_VIEW_BANKS, |bank| bank.index() as u32),
            handle: self.number,
            parts: parts as u32,
            parts_reciprocal: reciprocal(parts as u32),
            warps: warps as u32,
            gently: self.plan.view.polls_gently(parts).into(),
        };
        Ok((view, self.plan.view.blocks(parts)))
    }
}

/// The launch of a kernel with so many blocks of its own, of which a call may want another number. Its threads are fixed,
/// and each block does everything.
fn launch_shape(asked: Launch, own: u32) -> LaunchShape {
    let blocks = match asked.blocks {
        0 => own,
        blocks => blocks,
    };
    LaunchShape::new(blocks, LL_VIEW_THREADS)
}
