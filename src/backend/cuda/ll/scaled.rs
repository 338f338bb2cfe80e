//! A dispatch of rows with scales: what differs from one without.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::kernels;
use crate::backend::cuda::ll::handle_plan::{DispatchGrid, HandlePlan};
use crate::backend::cuda::ll::local_handle::LocalHandle;
use crate::backend::cuda::ll::part::Part;
use crate::backend::cuda::ll::signature::Signature;
use crate::backend::cuda::params::common::{OP_LL_DISPATCH, ScaledRows};
use crate::backend::cuda::params::ll::{LlDispatchParams, LlScaledDispatchParams, LlShape};
use crate::backend::cuda::scaled_rows::{ScalesWord, scaled_rows};
use crate::error::Result;
use crate::model::ops::LlDispatch;
use crate::model::scales::Scaled;

/// Enqueues `part` of a dispatch on one node.
// Apart, so that a dispatch without scales does not carry its parameters.
#[inline(never)]
pub fn launch(
    handle: &impl LocalHandle,
    (op, scaled): (&LlDispatch, &Scaled),
    part: Part,
    at: &StreamScope,
) -> Result<()> {
    let plan = handle.plan();
    let (grid, kernel) = match scaled.cast() {
        Some(cast) => (&plan.cast_dispatch, kernels::ll_dispatch_cast(cast.from)?),
        None => (&plan.dispatch, kernels::ll_dispatch_scaled()),
    };
    let (dispatch, rows) = params(handle, (op, scaled), grid, part)?;
    let params = LlScaledDispatchParams { dispatch, rows };
    let module = &handle.context().module;
    module.launch(kernel, grid.launch, &params, at)
}

/// The parameters of `part` of a dispatch.
pub fn params(
    handle: &impl LocalHandle,
    (op, scaled): (&LlDispatch, &Scaled),
    grid: &DispatchGrid,
    part: Part,
) -> Result<(LlDispatchParams, ScaledRows)> {
    let mut dispatch = handle.dispatch_params(op, grid, part);
    let (shape, rows) = shape_and_rows(handle.plan(), (op, scaled))?;
    dispatch.common.shape = shape;
    dispatch.common.signature = signature(handle, op).to_word();
    dispatch.common.scales_word = ScalesWord::of(op.scaled.as_ref()).0;
    Ok((dispatch, rows))
}

/// The sizes of a dispatch, and its rows as kernels take them.
pub fn shape_and_rows(
    plan: &HandlePlan,
    (op, scaled): (&LlDispatch, &Scaled),
) -> Result<(LlShape, ScaledRows)> {
    let (shape, scale_chunk_bytes) = plan.scaled_shape(op.wire());
    let rows = ScaledRows {
        scale_chunk_bytes,
        ..scaled_rows(op.row, scaled)?
    };
    Ok((shape, rows))
}

/// The signature of a dispatch, with or without scales.
pub fn signature(handle: &impl LocalHandle, op: &LlDispatch) -> Signature {
    Signature {
        scaled: op.scaled.is_some(),
        ..handle.signature(OP_LL_DISPATCH, op.row)
    }
}
