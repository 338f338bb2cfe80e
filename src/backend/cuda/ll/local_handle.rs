//! An LL handle as the operations see it that take more than one launch, or other parameters.
#![forbid(unsafe_code)]

use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ll::grid::Grid;
use crate::backend::cuda::ll::handle_plan::{DispatchGrid, HandlePlan};
use crate::backend::cuda::ll::hello::SourceTokens;
use crate::backend::cuda::ll::network::LlNetwork;
use crate::backend::cuda::ll::part::Part;
use crate::backend::cuda::ll::signature::Signature;
use crate::backend::cuda::params::ll::{LlCombineParams, LlDispatchParams};
use crate::error::Result;
use crate::model::ops::{LlCombine, LlDispatch, Routing, RowType};

/// What operations with scales, and over several nodes, need of their handle: the part that all operations have.
pub trait LocalHandle {
    /// This rank's ids.
    fn routing(&self) -> &Routing;
    /// Grids and sizes.
    fn plan(&self) -> &HandlePlan;
    /// In the order of creation, from 1 on.
    fn number(&self) -> u32;
    /// The group.
    fn context(&self) -> &GroupContext;
    /// What the sources said about the handle; the first call may wait for it.
    fn source_tokens(&self, network: &LlNetwork) -> Result<&SourceTokens>;
    /// The signature of operation `op` on rows of type `row`, for the other ranks.
    fn signature(&self, op: u32, row: RowType) -> Signature;
    /// The parameters of `part` of a dispatch.
    fn dispatch_params(&self, op: &LlDispatch, grid: &DispatchGrid, part: Part)
    -> LlDispatchParams;
    /// The parameters of `part` of a combine.
    fn combine_params(&self, op: &LlCombine, grid: &Grid, part: Part) -> LlCombineParams;
}
