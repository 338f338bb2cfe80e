//! Views: rank-major rows that stay where they arrive (`cuda/ll/view.cuh`), and where others are copied for a caller.

use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::kernels;
use crate::backend::cuda::ll::by_rank::ByRank;
use crate::backend::cuda::ll::handle::Handle;
use crate::backend::cuda::ll::launch::{Grid, Part};
use crate::backend::cuda::params::ll::{
    LL_VIEW_BANKS, LL_VIEW_THREADS, LlRankCombineParams, LlRankDispatchViewParams, LlShape, LlView,
    LlViewState, reciprocal,
};
use crate::error::{Error, Result};
use crate::model::ops::{LlBeside, LlCombine, LlDispatch, ViewBank};
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::sync::Arc;

/// Warps of a block that move rows; one does all else.
const ROW_WARPS: usize = LL_VIEW_THREADS as usize / 32 - 1;
/// Blocks that a multiprocessor has room for, as the list of kernels says.
const BLOCKS_PER_MULTIPROCESSOR: usize = 4;

const _: () = assert!(LL_VIEW_BANKS as usize == ViewBank::COUNT);

/// Where rows of views come, in every window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewBanks {
    /// Offset of this rank's [`LlViewState`].
    pub state: usize,
    /// Offset of the first bank.
    pub banks: usize,
    /// Bytes of each.
    pub bank_bytes: usize,
}

impl ViewBanks {
    /// Offset and length of all rows.
    pub fn rows(self) -> (usize, usize) {
        (self.banks, ViewBank::COUNT * self.bank_bytes)
    }

    /// These, `start` further on.
    pub fn moved(self, start: usize) -> Self {
        Self {
            state: start + self.state,
            banks: start + self.banks,
            ..self
        }
    }

    /// Offset of the rows of `bank`.
    pub fn bank(self, bank: ViewBank) -> usize {
        self.banks + bank.index() * self.bank_bytes
    }
}

/// What decides about the launches of a handle's operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewGrid {
    pub tokens: usize,
    pub most_tokens: usize,
    pub multiprocessors: u32,
}

impl ViewGrid {
    /// A block for each part of the rank's tokens, as many as run at the same time. Where others may have more tokens,
    /// one on each multiprocessor.
    pub fn blocks(self, parts: usize) -> u32 {
        let all = self.multiprocessors as usize;
        let serving = all.min(self.most_tokens * parts);
        let wanted = (self.tokens * parts).max(serving).max(1);
        wanted.min(BLOCKS_PER_MULTIPROCESSOR * all) as u32
    }
}

/// In how many parts of how many chunks a row of so many is taken.
fn cut(chunks: usize) -> (usize, usize) {
    let parts = chunks.div_ceil(ROW_WARPS).max(1);
    (parts, chunks.div_ceil(parts))
}

/// Memory of the library's that rows of views are copied to where they do not stay: of rows with scales, of staged
/// operations, over several nodes. Made when the first one asks.
#[derive(Default)]
pub struct CopiedViews(OnceCell<Buffer>);

impl CopiedViews {
    /// The address of `bank`, of `bank_bytes`.
    pub fn at(
        &self,
        memory: &Arc<CudaMemory>,
        bank: ViewBank,
        bank_bytes: usize,
    ) -> Result<DevPtr> {
        let make = || Buffer::new(memory, ViewBank::COUNT * bank_bytes);
        let buffer = self.0.get_or_try_init(make)?;
        Ok(DevPtr(buffer.data().0 + bank.index() * bank_bytes))
    }
}

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
        let (view, blocks) = self.view(Some(bank), &dispatch.dispatch.common.shape)?;
        let params = LlRankDispatchViewParams { dispatch, view };
        let shape = LaunchShape::new(blocks, LL_VIEW_THREADS);
        let module = &self.context.module;
        module.launch(kernels::ll_rank_dispatch_view(), shape, &params, at)
    }

    /// Enqueues `part` of a rank-major combine on one node.
    pub fn launch_rank_combine(&self, op: &LlCombine, part: Part, at: &StreamScope) -> Result<()> {
        let grid = Grid::shared(0, LL_VIEW_THREADS);
        let combine = self.combine_params(op, &grid, part);
        // A staged one, which is in no order with whole ones, leaves its view to the next dispatch there.
        let bank = op.view.filter(|_| part.is_whole());
        let (view, blocks) = self.view(bank, &combine.common.shape)?;
        let params = LlRankCombineParams { combine, view };
        let shape = LaunchShape::new(blocks, LL_VIEW_THREADS);
        let module = &self.context.module;
        module.launch(kernels::ll_rank_combine(op.row.dtype)?, shape, &params, at)
    }

    /// What kernels need of `bank`, and their blocks.
    fn view(&self, bank: Option<ViewBank>, shape: &LlShape) -> Result<(LlView, u32)> {
        let views = self
            .views
            .ok_or_else(|| Error::internal("views over several nodes"))?;
        let (parts, warps) = cut(shape.chunks as usize);
        let view = LlView {
            rows: bank.map_or(0, |bank| views.bank(bank) as u64),
            state: (self.context.own_window().0 + views.state) as *mut LlViewState,
            bank: bank.map_or(LL_VIEW_BANKS, |bank| bank.index() as u32),
            handle: self.number,
            parts: parts as u32,
            parts_reciprocal: reciprocal(parts as u32),
            warps: warps as u32,
        };
        Ok((view, self.plan.view.blocks(parts)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_all_chunks_of_a_row() {
        for chunks in 1..200 {
            let (parts, warps) = cut(chunks);
            assert!(warps <= ROW_WARPS && parts * warps >= chunks);
            assert!((parts - 1) * warps < chunks);
        }
        assert_eq!((cut(28), cut(29)), ((4, 7), (5, 6)));
    }

    #[test]
    fn blocks_run_at_the_same_time() {
        let blocks = |tokens, most_tokens, multiprocessors| {
            ViewGrid {
                tokens,
                most_tokens,
                multiprocessors,
            }
            .blocks(4)
        };
        assert_eq!(blocks(128, 128, 132), 512);
        assert_eq!(blocks(1024, 1024, 132), 528);
        assert_eq!((blocks(1, 128, 132), blocks(1, 1, 132)), (132, 4));
        assert_eq!((blocks(0, 1, 1), blocks(0, 0, 132)), (1, 1));
    }
}
