//! The header of a handle's block in a caller's memory: written and compared on the device, in the order of the work
//! that fills and uses the block.

use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::kernels;
use crate::backend::cuda::params::common::{
    HANDLE_HEADER_COMPARED, HANDLE_HEADER_ROWS, HANDLE_HEADER_THREADS, HANDLE_HEADER_WORDS, HandleHeaderParams,
    KernelOp,
};
use crate::error::Result;
use crate::model::handle_state::{COMPARED_WORDS, HEADER_WORDS, ROWS_WORD, with_layout};
use crate::model::layout::Layout;
use crate::model::tensor::DevPtr;
use std::ptr::null;

const _: () = assert!(HANDLE_HEADER_WORDS == HEADER_WORDS && HANDLE_HEADER_ROWS == ROWS_WORD);
const _: () = assert!(HANDLE_HEADER_COMPARED as usize == COMPARED_WORDS);

/// The header of one block.
pub(super) struct GivenHeader {
    block: DevPtr,
    words: [u32; HEADER_WORDS],
}

impl GivenHeader {
    /// `words` at the start of `block`.
    pub(super) fn new(block: DevPtr, words: [u32; HEADER_WORDS]) -> Self {
        Self { block, words }
    }

    /// The same for rows that lie so.
    pub(super) fn of_layout(&self, layout: Layout) -> Self {
        Self::new(self.block, with_layout(self.words, layout))
    }

    /// Enqueues its comparison, before operation `op`: if something else is there, the group fails.
    pub(super) fn compare(&self, context: &GroupContext, op: KernelOp, at: &StreamScope) -> Result<()> {
        self.launch(context, self.params(context, op), at)
    }

    /// Enqueues that it is written, behind `op`, which has filled the block; `rows` is its number of rows, or NULL.
    pub(super) fn write(&self, context: &GroupContext, op: KernelOp, rows: *const u32, at: &StreamScope) -> Result<()> {
        self.launch(context, HandleHeaderParams { writes: 1, rows, ..self.params(context, op) }, at)
    }

    fn params(&self, context: &GroupContext, op: KernelOp) -> HandleHeaderParams {
        HandleHeaderParams {
            peers: context.peers(),
            wait: context.wait(op),
            header: self.block.0 as *mut u32,
            words: self.words,
            writes: 0,
            rows: null(),
        }
    }

    fn launch(&self, context: &GroupContext, params: HandleHeaderParams, at: &StreamScope) -> Result<()> {
        let shape = LaunchShape::new(1, HANDLE_HEADER_THREADS);
        context.module.launch(kernels::handle_header(), shape, &params, at)
    }
}
