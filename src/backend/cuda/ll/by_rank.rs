//! Rank-major operations: the parameters of their kernels, and what they launch.

use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::kernels;
use crate::backend::cuda::ll::handle::{Handle, kept, rows_with_scales};
use crate::backend::cuda::ll::launch::{DispatchGrid, Part};
use crate::backend::cuda::ll::messages::HEADER_BYTES;
use crate::backend::cuda::ll::over_nodes::{OverNodes, blocks};
use crate::backend::cuda::params::ll::{
    LlBeside, LlNodes, LlRankDispatchNodesParams, LlRankDispatchParams, LlRankScaledDispatchNodesParams,
    LlRankScaledDispatchParams,
};
use crate::backend::cuda::params::ll_pack::{LL_PACK_THREADS, LlRankPackParams};
use crate::error::Result;
use crate::model::ops::{self, IntWidth, LlDispatch, Routing};
use crate::model::tensor::DevPtr;

/// A dispatch with what it has beside its rows, and where it reads these.
#[derive(Clone, Copy)]
pub struct ByRank<'a> {
    pub op: &'a LlDispatch,
    pub beside: &'a ops::LlBeside,
    pub rows: DevPtr,
}

impl Handle {
    /// Enqueues `part` of a rank-major dispatch on one node.
    // Apart, as are rows with scales.
    #[inline(never)]
    pub fn launch_rank_dispatch(
        &self,
        op: &LlDispatch,
        beside: &ops::LlBeside,
        part: Part,
        at: &StreamScope,
    ) -> Result<()> {
        let rows = op.tokens;
        let by_rank = ByRank { op, beside, rows };
        let Some(scaled) = &op.scaled else {
            let kernel = kernels::ll_rank_dispatch();
            let grid = &self.plan.dispatch.asked(op.launch, kernel.most_threads());
            let params = self.rank_dispatch_params(by_rank, grid, part);
            return self.launch_following(kernel, op.launch, grid.launch, &params, at);
        };
        let (grid, kernel) = match scaled.cast() {
            Some(cast) => (&self.plan.cast_dispatch, kernels::ll_rank_dispatch_cast(cast.from)?),
            None => (&self.plan.scaled_dispatch, kernels::ll_rank_dispatch_scaled()),
        };
        let grid = &grid.asked(op.launch, kernel.most_threads());
        let params = LlRankScaledDispatchParams {
            dispatch: self.rank_dispatch_params(by_rank, grid, part),
            rows: rows_with_scales(op, scaled)?,
        };
        self.launch_following(kernel, op.launch, grid.launch, &params, at)
    }

    /// The parameters of `part` of a rank-major dispatch.
    pub(super) fn rank_dispatch_params(
        &self,
        ByRank { op, beside, rows }: ByRank<'_>,
        grid: &DispatchGrid,
        part: Part,
    ) -> LlRankDispatchParams {
        LlRankDispatchParams {
            dispatch: self.dispatch_params((op, rows), grid, part),
            beside: LlBeside {
                weights: beside.weights.0 as *const f32,
                out_ids: kept(part, beside.out_ids.data) as *mut _,
                out_weights: kept(part, beside.out_weights) as *mut f32,
                first_id: beside.first_id as u32,
                has_narrow_ids: u32::from(beside.out_ids.width == IntWidth::Bits32),
            },
        }
    }
}

impl OverNodes<'_> {
    /// Enqueues `part` of a rank-major dispatch.
    pub(super) fn launch_rank_dispatch(
        &self,
        (op, beside): (&LlDispatch, &ops::LlBeside),
        (part, nodes): (Part, LlNodes),
        grid: &DispatchGrid,
        at: &StreamScope,
    ) -> Result<()> {
        let module = &self.handle.context.module;
        let params = |rows| {
            let by_rank = ByRank { op, beside, rows };
            self.handle.rank_dispatch_params(by_rank, grid, part)
        };
        let Some(scaled) = &op.scaled else {
            let dispatch = params(op.tokens);
            let params = LlRankDispatchNodesParams { dispatch, nodes };
            return module.launch(kernels::ll_rank_dispatch_nodes(), grid.launch, &params, at);
        };
        let params = LlRankScaledDispatchNodesParams {
            dispatch: params(self.packed_rows()),
            nodes,
            rows: rows_with_scales(op, scaled)?,
        };
        let kernel = kernels::ll_rank_dispatch_nodes_scaled();
        module.launch(kernel, grid.launch, &params, at)
    }

    /// Adds the weights to the message of rows and ids.
    pub(super) fn pack_weights(&self, op: &LlDispatch, beside: &ops::LlBeside, at: &StreamScope) -> Result<()> {
        let Routing { tokens, top_k, .. } = self.handle.routing;
        let before = tokens * (op.wire().slot_bytes() + top_k * size_of::<i64>());
        let params = LlRankPackParams {
            weights: beside.weights.0 as *const f32,
            to: (self.memory.rows.sends.0 + HEADER_BYTES + before) as *mut f32,
            num_weights: (tokens * top_k) as u64,
        };
        let shape = LaunchShape::new(blocks(tokens * top_k, LL_PACK_THREADS)?, LL_PACK_THREADS);
        let module = &self.handle.context.module;
        module.launch(kernels::ll_rank_pack(), shape, &params, at)
    }
}
