//! Parameters of the high-throughput kernels that use tensors which peers map.

use crate::ht::{HtCombineParams, HtCommon, HtDispatchParams, HtScaledDispatchParams};

/// Most objects of a group.
pub const HT_MAX_OBJECTS: u32 = 64;
/// Packets of an offer, a multiple of two; described in `ht/offers.cuh`.
pub const HT_OFFER_PACKETS: u32 = 6;
/// Unit of the 32-bit offsets in offers, in bytes.
pub const HT_OFFER_UNIT: u32 = 16;
/// Bit of an offer's object word: the tensor lies in an object; the bits below are its number.
pub const HT_OFFER_MAPPED: u32 = 0x8000_0000;
/// Threads of `ht_offer`: one per rank.
pub const HT_OFFER_THREADS: u32 = 96;
/// Dynamic shared memory of a block in front of its warps' parts, if it uses such tensors.
pub const HT_MAPPED_SHARED_BYTES: u32 = 2048;
/// Most warps of a block that then pass rows through their shared memory.
pub const HT_MAPPED_WARPS: u32 = 16;
/// Most stages of such a warp.
pub const HT_MAPPED_STAGES: u32 = 4;

/// Offsets in every rank's window; equal on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct HtMappedLayout {
    /// u64 packets `[2][ranks][HT_OFFER_PACKETS]`, by the epoch's lowest bit: the offers of each other rank.
    pub offers: u64,
    /// u64 packets `[ranks]`: the last operation with this rank's offers for which each other rank has done its part.
    pub done: u64,
    /// `[ranks - 1][side_bytes]`, by source without this rank: what accompanies rows.
    pub side: u64,
    /// Bytes per source.
    pub side_bytes: u64,
}

/// Device memory of a group, initially zero.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtOfferState {
    /// Operations with offers so far.
    pub epoch: u32,
    /// Blocks that have read `epoch`.
    pub blocks_started: u32,
    /// Blocks that have done their part of an operation whose tensors are all mapped.
    pub blocks_done: u32,
    /// Tokens that warps have taken; 0 between operations.
    pub tokens_taken: u32,
}

/// Additional parameters of an operation that makes offers.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtMapped {
    /// Offsets in windows.
    pub layout: HtMappedLayout,
    pub state: *mut HtOfferState,
    /// `[HT_MAX_OBJECTS][ranks]`: this rank's addresses of each rank's objects.
    pub objects: *const u64,
    /// In host memory: number of operations that offered this rank's tensor, but whose rows used rings.
    pub fallbacks: *mut u64,
    /// Offset of this rank's tensor in its object.
    pub offset: u64,
    /// The object, and `HT_OFFER_MAPPED`; 0 if this rank offers nothing.
    pub object: u32,
    /// Compares the ranks' scales of rows; 0 without.
    pub scales_word: u32,
    /// Bytes of a row in the tensor.
    pub row_bytes: u32,
    /// Bytes that accompany a row; a multiple of 16.
    pub side_row_bytes: u32,
    /// Bytes of the parts in which rows pass through shared memory.
    pub part_bytes: u32,
    /// Blocks with warps that pass rows through shared memory.
    pub blocks: u32,
    /// Number of these warps per block.
    pub warps: u32,
    pub stages: u32,
    pub stage_bytes: u32,
    /// Dispatch: not zero if these warps also store rows that stay on this rank.
    pub stores_local_rows: u32,
    /// Dispatch: not zero if these warps take tokens dynamically, as in a combine; otherwise each has a fixed share.
    pub takes_tokens: u32,
}

/// Parameters of `ht_dispatch_direct`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtDirectParams {
    /// As with rings.
    pub rows: HtDispatchParams,
    pub mapped: HtMapped,
}

/// Parameters of `ht_dispatch_direct_scaled`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtScaledDirectParams {
    /// As with rings.
    pub rows: HtScaledDispatchParams,
    pub mapped: HtMapped,
}

/// Parameters of `ht_combine_pull_bf16` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtPullParams {
    /// As with rings.
    pub rows: HtCombineParams,
    pub mapped: HtMapped,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtOfferParams {
    /// As in the operation that follows.
    pub common: HtCommon,
    pub mapped: HtMapped,
}
