//! Small kernels that both modes launch before or after an operation's own: they copy ids or rebase them to the
//! caller's numbering, add up expert counts, and in LL write and check the header of a handle's block in a caller's
//! memory.

use crate::backend::check_header;
use crate::backend::cuda::driver;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::kernels::{self, LaunchShape, to_u32};
use crate::backend::cuda::params::common::{
    ADD_COUNTS_THREADS, AddCountsParams, CallerBlock, HANDLE_HEADER_COMPARED, HANDLE_HEADER_HASH, HANDLE_HEADER_ROWS,
    HANDLE_HEADER_THREADS, HANDLE_HEADER_WORDS, HANDLE_IDS_THREADS, HandleHeaderParams, HandleIdsParams, KernelOp,
};
use crate::error::Result;
use crate::model::handle_state::{COMPARED_WORDS, HASH_WORD, HEADER_WORDS, ROWS_WORD, with_layout};
use crate::model::layout::Layout;
use crate::model::ops::{IntWidth, Numbers, Stream};
use crate::model::tensor::DevPtr;
use std::ptr::null_mut;

const _: () = assert!(HANDLE_HEADER_WORDS == HEADER_WORDS && HANDLE_HEADER_ROWS == ROWS_WORD);
const _: () = assert!(HANDLE_HEADER_COMPARED == COMPARED_WORDS && HANDLE_HEADER_HASH == HASH_WORD);

/// The header of a handle's block in a caller's memory.
pub(super) struct CallerHeader {
    block: DevPtr,
    words: [u32; HEADER_WORDS],
}

impl CallerHeader {
    /// A header of `words` at the start of `block`.
    pub(super) fn new(block: DevPtr, words: [u32; HEADER_WORDS]) -> Self {
        Self { block, words }
    }

    /// This header, with `layout` in place of its own.
    pub(super) fn of_layout(&self, layout: Layout) -> Self {
        Self::new(self.block, with_layout(self.words, layout))
    }

    /// What kernels need to know of the block.
    pub(super) fn block(&self) -> CallerBlock {
        CallerBlock { header: self.block.0 as *mut u32, words: self.words }
    }

    /// LL: enqueues a check before a combine: if the block begins with anything else, the group fails.
    pub(super) fn compare(&self, context: &GroupContext, at: &StreamScope) -> Result<()> {
        self.launch(context, KernelOp::LlCombine, false, at)
    }

    /// LL: enqueues writing the header after a dispatch, which has filled the block.
    pub(super) fn write(&self, context: &GroupContext, at: &StreamScope) -> Result<()> {
        self.launch(context, KernelOp::LlDispatch, true, at)
    }

    /// HT: the number of rows in the block, if it begins with this header. Waits for `stream`.
    pub(super) fn rows(&self, stream: Stream) -> Result<Option<u32>> {
        let words = driver::download_words(HEADER_WORDS, self.block, stream)?;
        Ok(check_header(&words, &self.words).ok().and_then(|()| words.get(ROWS_WORD).copied()))
    }

    fn launch(&self, context: &GroupContext, op: KernelOp, writes: bool, at: &StreamScope) -> Result<()> {
        let (peers, wait) = (*context.peers(), context.wait(op));
        let params = HandleHeaderParams { peers, wait, block: self.block(), writes: writes.into() };
        let shape = LaunchShape::new(1, HANDLE_HEADER_THREADS);
        context.module.launch(kernels::handle_header(), shape, &params, at)
    }
}

/// A block in the library's memory, which has no header.
pub(super) const LIBRARY_BLOCK: CallerBlock = CallerBlock { header: null_mut(), words: [0; HANDLE_HEADER_WORDS] };

/// Enough blocks to saturate memory with loads.
const MOST_BLOCKS: usize = 64;

#[derive(Clone, Copy)]
pub(super) struct IdCopy {
    pub from: Numbers,
    pub to: DevPtr,
    pub count: usize,
    /// Added to non-negative ids.
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

/// Enqueues adding `counts`, one per expert, to `totals` after the dispatch `op`.
pub(super) fn add_counts(
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
