//! Parameters of the high-throughput kernels with offers, which access peers' mapped tensors directly.

use crate::ht::{HtCombineParams, HtCommon, HtDispatchParams, HtScaledDispatchParams};

/// Most objects of a group.
pub const HT_MAX_OBJECTS: u32 = 64;
/// Packets of an offer, a multiple of two; see `ht/offers.cuh`.
pub const HT_OFFER_PACKETS: u32 = 6;
/// Bytes of the unit of 32-bit offsets in offers.
pub const HT_OFFER_UNIT: u32 = 16;
/// Bit of an offer's object word: the tensor is in an object, whose number is in the bits below.
pub const HT_OFFER_MAPPED: u32 = 0x8000_0000;
/// Threads of `ht_offer`: one per rank.
pub const HT_OFFER_THREADS: u32 = 96;
/// Dynamic shared memory of a block before its warps' parts, in operations with offers.
pub const HT_MAPPED_SHARED_BYTES: u32 = 2048;
/// Most warps of a block that pass rows through shared memory, in operations with offers.
pub const HT_MAPPED_WARPS: u32 = 16;
/// Most stages of these warps.
pub const HT_MAPPED_STAGES: u32 = 4;

/// Offsets in every rank's window; equal on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct HtMappedLayout {
    /// u64 packets `[2][ranks][HT_OFFER_PACKETS]`, by the epoch's lowest bit: the offers of each other rank.
    pub offers: u64,
    /// u64 packets `[ranks]`: up to which operation each other rank is done with this rank's tensor.
    pub done: u64,
    /// `[ranks - 1][side_bytes]`, by source without this rank: ids, weights and scales of rows.
    pub side: u64,
    /// Bytes of `side` per source.
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
    /// Blocks that have ended their part of an operation whose tensors are all mapped.
    pub blocks_done: u32,
    /// Number of tokens that warps have taken; 0 between operations.
    pub tokens_taken: u32,
}

/// Additional parameters of an operation that makes offers.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtMapped {
    /// Offsets in windows.
    pub layout: HtMappedLayout,
    pub state: *mut HtOfferState,
    /// `[HT_MAX_OBJECTS][ranks]`: where this rank maps each rank's memory of each object.
    pub objects: *const u64,
    /// In host memory: the number of operations in which this rank offered a tensor, but rows used rings.
    pub fallbacks: *mut u64,
    /// Offset of this rank's tensor in its object.
    pub offset: u64,
    /// The object's number with `HT_OFFER_MAPPED`; 0 if this rank offers no tensor.
    pub object: u32,
    /// By which ranks compare their scales; 0 without scales.
    pub scales_word: u32,
    /// Bytes of a row in the tensor.
    pub row_bytes: u32,
    /// Bytes of `side` per row; a multiple of 16.
    pub side_row_bytes: u32,
    /// Bytes of a row that pass through shared memory at a time.
    pub part_bytes: u32,
    /// Blocks with warps that pass rows through shared memory.
    pub blocks: u32,
    /// Warps per block that pass rows through shared memory.
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
