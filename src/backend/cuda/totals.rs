//! Running totals of the rows that dispatches deliver to each local expert.

use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::kernels;
use crate::backend::cuda::params::common::{ADD_COUNTS_THREADS, AddCountsParams, KernelOp};
use crate::backend::cuda::regions::to_u32;
use crate::error::Result;
use crate::model::tensor::DevPtr;

/// Enqueues that `counts` of so many `experts` are added to `totals`, behind the dispatch `op`.
pub(super) fn add(
    context: &GroupContext,
    op: KernelOp,
    (counts, totals): (*const i32, DevPtr),
    experts: usize,
    at: &StreamScope,
) -> Result<()> {
    let params =
        AddCountsParams { wait: context.wait(op), counts, totals: totals.0 as *mut u64, experts: to_u32(experts)? };
    let shape = LaunchShape::new(1, ADD_COUNTS_THREADS);
    context.module.launch(kernels::add_counts(), shape, &params, at)
}
