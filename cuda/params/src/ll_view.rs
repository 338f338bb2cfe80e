//! Parameters of the low-latency kernels whose rows stay where they arrive, in views.

use crate::common::{MAX_PEERS, PeerTable, ScaledRows};
use crate::ll::{LlCombineParams, LlRankDispatchParams};

/// Banks of views: rows of rank-major dispatches that stay where they arrive.
pub const LL_VIEW_BANKS: u32 = 2;
/// Threads per block of the kernels for views: the last warp does everything except moving rows.
pub const LL_VIEW_THREADS: u32 = 256;

/// The state of a rank's banks of views, in its window, initially zero.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlViewState {
    /// The epoch of the dispatch that filled each bank; 0 if the bank is clean.
    pub owner: [u32; LL_VIEW_BANKS as usize],
    /// Blocks that have cleaned a bank before filling it.
    pub blocks_cleaned: u32,
    /// By bank: bytes, without scales, of the rows that arrived there last; 0 before the first ones.
    pub row_bytes: [u32; LL_VIEW_BANKS as usize],
    /// By bank: `LlView::scale_bytes` of these rows.
    pub scale_bytes: [u32; LL_VIEW_BANKS as usize],
    /// By bank: the number of its rows from each source.
    pub rows: [[u32; MAX_PEERS]; LL_VIEW_BANKS as usize],
}

/// The view of an operation.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlView {
    /// The bank's rows `[ranks][max_tokens]` of this rank, without scales, whose packets follow.
    pub rows: *mut u8,
    /// This rank's state of views.
    pub state: *mut LlViewState,
    /// The bank that a dispatch fills and a combine cleans; `LL_VIEW_BANKS` if there is none.
    pub bank: u32,
    /// Number of parts of a row, each for one block.
    pub parts: u32,
    /// The distance from a block's part to its next one: whole rows, and `step_parts`.
    pub step: u32,
    pub step_parts: u32,
    /// For divisions by `parts`.
    pub parts_reciprocal: u32,
    /// Chunks per part, one per warp.
    pub warps: u32,
    /// Not 0 if polls should pause in between, because many blocks poll.
    pub gently: u32,
    /// Dispatch: bytes of the packets of a row's scales.
    pub scale_bytes: u32,
    /// Combine: not 0 if its rows begin where the bank's do.
    pub input_in_bank: u32,
}

/// Parameters of `ll_rank_dispatch_view`; `out` is ignored.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlRankDispatchViewParams {
    /// As into a caller's tensor.
    pub dispatch: LlRankDispatchParams,
    /// The view that rows go into.
    pub view: LlView,
    /// The bank of each rank, as this one maps it.
    pub banks: PeerTable,
}

/// Parameters of `ll_rank_dispatch_view_scaled`, `ll_rank_dispatch_view_cast_bf16` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlRankScaledDispatchViewParams {
    /// As without scales, of the rows without them.
    pub view: LlRankDispatchViewParams,
    pub rows: ScaledRows,
}

/// Parameters of `ll_rank_combine_bf16` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlRankCombineParams {
    /// As expert-major.
    pub combine: LlCombineParams,
    pub view: LlView,
    /// Groups of blocks, each with a block for each part of the rows. A single group sends and receives; of several the
    /// last one receives, and each of the others sends to some of the ranks.
    pub groups: u32,
    pub group_blocks: u32,
    /// For divisions by `group_blocks`.
    pub group_reciprocal: u32,
}
