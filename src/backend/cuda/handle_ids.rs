//! Ids that the library copies for its kernels, and those that it moves to where a caller counts from.

use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::kernels;
use crate::backend::cuda::params::common::{HANDLE_IDS_THREADS, HandleIdsParams};
use crate::backend::cuda::regions::to_u32;
use crate::error::Result;
use crate::model::ops::{IntWidth, Numbers};
use crate::model::tensor::DevPtr;

/// Blocks that have enough loads under way.
const MOST_BLOCKS: usize = 64;

#[derive(Clone, Copy)]
pub(super) struct IdCopy {
    pub from: Numbers,
    pub to: DevPtr,
    pub count: usize,
    /// Added to those that are not negative.
    pub offset: usize,
}

impl IdCopy {
    pub(super) fn enqueue(self, context: &GroupContext, at: &StreamScope) -> Result<()> {
        if self.count == 0 {
            return Ok(());
        }
        let params = HandleIdsParams {
            from: self.from.data.0 as *const _,
            to: self.to.0 as *mut i64,
            count: self.count as u64,
            offset: to_u32(self.offset)?,
            is_narrow: u32::from(self.from.width == IntWidth::Bits32),
        };
        let blocks = self.count.div_ceil(HANDLE_IDS_THREADS as usize);
        let shape = LaunchShape::new(to_u32(blocks.min(MOST_BLOCKS))?, HANDLE_IDS_THREADS);
        context.module.launch(kernels::handle_ids(), shape, &params, at)
    }
}
