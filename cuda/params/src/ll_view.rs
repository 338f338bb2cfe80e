//! Parameters of the low-latency kernels whose rows stay where they arrive, in views.

use crate::common::{MAX_PEERS, PeerTable, ScaledRows};
use crate::ll::{LlCombineParams, LlRankDispatchParams};

/// Banks of views: rows of rank-major dispatches that stay where they arrive.
pub const LL_VIEW_BANKS: u32 = 2;
/// Threads of a block of the kernels for views: the last warp does what the others, which move rows, do not.
pub const LL_VIEW_THREADS: u32 = 256;

/// A rank's banks of views, in its own window, zero at first.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlViewState {
    /// The epoch of the dispatch that filled each bank; 0 if the bank is clean.
    pub owner: [u32; LL_VIEW_BANKS as usize],
    /// Blocks that have cleaned a bank before they fill it.
    pub blocks_cleaned: u32,
    /// Of each bank: bytes of the rows that came there last, without scales, 0 before the first ones.
    pub row_bytes: [u32; LL_VIEW_BANKS as usize],
    /// Of these, `LlView::scale_bytes`.
    pub scale_bytes: [u32; LL_VIEW_BANKS as usize],
    /// Of each bank: its rows from each source.
    pub rows: [[u32; MAX_PEERS]; LL_VIEW_BANKS as usize],
}

/// What an operation has to do with a bank of views.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlView {
    /// The bank's rows `[ranks][max_tokens]` of this rank, without scales, whose packets follow.
    pub rows: *mut u8,
    /// Of this rank.
    pub state: *mut LlViewState,
    /// The bank that a dispatch fills and a combine cleans; `LL_VIEW_BANKS` for none.
    pub bank: u32,
    /// In how many parts a row is taken, each by a block.
    pub parts: u32,
    /// Of how many rows, and then of how many parts, there are blocks.
    pub step: u32,
    pub step_parts: u32,
    /// For divisions by `parts`.
    pub parts_reciprocal: u32,
    /// Chunks of a part, each by a warp.
    pub warps: u32,
    /// Not 0 if so many blocks poll that they should pause in between.
    pub gently: u32,
    /// Of a dispatch: bytes of the packets of a row's scales.
    pub scale_bytes: u32,
    /// Of a combine: not 0 if its rows begin where those of the bank do.
    pub lie_there: u32,
}

/// Parameters of `ll_rank_dispatch_view`; `out` is not looked at.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlRankDispatchViewParams {
    /// As into a tensor of the caller's.
    pub dispatch: LlRankDispatchParams,
    /// Where rows come.
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
    /// Groups of blocks, each with a block for each part of the rows. One sends and receives; of several the last one
    /// receives, and each of the others sends to some of the ranks.
    pub groups: u32,
    pub group_blocks: u32,
    /// For divisions by `group_blocks`.
    pub group_reciprocal: u32,
}
