//! Parameters of the high-throughput kernels.

use core::ffi::c_void;

use crate::common::{Fault, MAX_PEERS, PeerTable, ScaledRows, WaitParams};

/// Most experts that a token can name in HT: one lane of a warp for each.
pub const HT_MAX_TOP_K: u32 = 32;
/// Threads of a block of `ht_route`.
pub const HT_ROUTE_THREADS: u32 = 512;
/// Most threads of a block of `ht_dispatch`, in whole warps.
pub const HT_DISPATCH_THREADS: u32 = 768;
/// Most threads of a block of `ht_dispatch_cast`, in whole warps: as many as have room for the rows that they cast,
/// which leaves each more registers.
pub const HT_CAST_THREADS: u32 = 512;
/// Most threads of a block of `ht_combine_bf16` and its siblings, in whole warps.
pub const HT_COMBINE_THREADS: u32 = 512;
/// Most static shared memory of a block of `ht_dispatch` or `ht_combine_bf16` and their siblings; the rest of the
/// device's is for rows.
pub const HT_STATIC_SHARED_BYTES: u32 = 3584;
/// Zeros that a dispatch block keeps in shared memory in front of the warps' parts.
pub const HT_ZERO_BYTES: u32 = 4096;
/// Bytes between a row in transit and its scales: the scales' word, then zeros.
pub const HT_STAMP_BYTES: u32 = 16;
/// Lowest bits of a fingerprint: a row without its scales, in 16 bytes.
pub const HT_FINGERPRINT_PAYLOAD_BITS: u32 = 17;
/// Bit of a dispatch's fingerprint: rows have scales.
pub const HT_FINGERPRINT_SCALED: u32 = 0x0400_0000;
/// Bit of a fingerprint: it is a combine's.
pub const HT_FINGERPRINT_COMBINE: u32 = 0x8000_0000;

/// Packets with which a rank notifies each other rank of its part of a new handle, besides one per local expert: how
/// many rows it sends, then `HtRouteParams::verdict`.
pub const HT_COUNTS_BESIDE_EXPERTS: u32 = 2;
/// Lowest bit, in `HtRouteParams::verdict`, of the `ncclResult_t` with which a rank refuses its part; below it
/// are its ids per token.
pub const HT_VERDICT_CODE_SHIFT: u32 = 8;
/// Bit of a handle's number of rows that marks it invalid: the ranks do not agree, and nothing runs on the
/// handle. The other bits say why: which rank, and its verdict.
pub const HT_DISAGREED: u32 = 0x8000_0000;
/// Bit of the mark: that rank has another number of ids per token; otherwise it refused.
pub const HT_DISAGREED_TOP_K: u32 = 0x4000_0000;
/// Lowest bit of the rank in the mark.
pub const HT_DISAGREED_RANK_SHIFT: u32 = 16;
/// In place of the mark: some rank's verdict did not come in time. No rank has this number.
pub const HT_VERDICT_MISSING: u32 = 0xffff_fffe;

/// Offsets in every rank's window; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtLayout {
    /// u64 packets `[2][ranks][local_experts + HT_COUNTS_BESIDE_EXPERTS]`, by epoch: from each other rank.
    pub counts: u64,
    /// u64 packets `[ranks][units]`: which unit of the source's sequence has arrived.
    pub arrivals: u64,
    /// u32 `[ranks][units]`: credits, how far the destination has emptied what this rank fills.
    pub credits: u64,
    /// `[ranks][units]` units, by source. Two of them are a slot.
    pub slots: u64,
    /// Bytes of a unit.
    pub unit_bytes: u64,
    /// Units of each ordered pair of ranks; a power of two.
    pub units: u32,
    pub local_experts: u32,
    /// 2^32 / local_experts, rounded down.
    pub expert_reciprocal: u32,
}

/// Where one of a token's experts is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtEntry {
    /// Its global id; negative past the last one.
    pub expert: i32,
    /// The row's index among those that this operation sends from the token's rank to this expert's.
    pub index: u32,
}

/// Device memory of an HT handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtHandleMemory {
    /// `[tokens][top_k]`: each token's experts, ascending, without repetition.
    pub entries: *mut HtEntry,
    /// `[ranks + 1]`: this rank's first row from each source, then the number of rows, or `HT_DISAGREED` and why.
    pub begins: *mut u32,
    /// `[ranks]`: rows that go from this rank to each, itself included.
    pub departures: *mut u32,
    /// `[local_experts]`: received rows per expert.
    pub counts: *mut i32,
    pub tokens: u32,
    pub top_k: u32,
}

/// A count for the host, in host memory that the device maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtCount {
    pub value: u32,
    /// The handle's number, once `value` is valid.
    pub epoch: u32,
}

/// An array of a caller's integers.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtNumbers {
    /// The first, or NULL.
    pub data: *mut c_void,
    /// Not zero if they have 64 bits, not 32.
    pub is_wide: u32,
}

/// What a routing reports to its caller; NULL for what the caller does not want.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtTold {
    /// Gets the rows of each local expert; with zones its slots.
    pub experts: HtNumbers,
    /// Gets the number of rows, with zones of all slots; 0 if ranks disagree.
    pub total: HtNumbers,
    /// With zones, gets the first slot of each expert.
    pub offsets: HtNumbers,
    /// With zones, gets the number of all slots, for the host.
    pub page: *mut HtCount,
    /// The handle's number, for `page`.
    pub epoch: u32,
}

/// Where a handle's ranks tell each other about rows by expert: in two banks, by the epoch of `ht_route`; over several
/// nodes in one.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtPackets {
    /// Offset in a window: u64 packets `[ranks][experts / HT_ZONE_WORD_EXPERTS, rounded up][max_tokens]`, by source; of
    /// `ht_cut` `[ranks][1 + local_experts]`.
    pub offset: u64,
    /// Bytes to the other bank; 0 over several nodes.
    pub bank_bytes: u64,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtRouteParams {
    pub peers: PeerTable,
    pub wait: WaitParams,
    pub layout: HtLayout,
    /// Gets filled.
    pub handle: HtHandleMemory,
    /// `[tokens][top_k]`, of 64 bits each or `is_narrow` of 32.
    pub topk_idx: *const c_void,
    /// `[tokens][top_k]`: gets the ids, or NULL.
    pub kept_ids: *mut i64,
    pub is_narrow: u32,
    /// Not zero if rows lie by expert.
    pub has_zones: u32,
    /// Where other ranks are told about such rows.
    pub packets: HtPackets,
    /// What is reported about rows that do not.
    pub told: HtTold,
    /// The rows that this rank receives, or `HT_DISAGREED` and why.
    pub received: *mut HtCount,
    /// `[2 + ranks + ranks * local_experts]`, zero except while the kernel runs: blocks that have counted, blocks that
    /// have begun to, their counts for each rank, and for each expert.
    pub tally: *mut u32,
    /// u64 packets `[blocks that count][ranks]`: rows that each block has counted for each rank.
    pub counted: *mut u64,
    /// u64 packets `[2][local_experts + HT_COUNTS_BESIDE_EXPERTS]`, by epoch: from this rank to itself. Not
    /// in the window, where peers could change it.
    pub own_counts: *mut u64,
    /// Most tokens of a rank: the bound for the numbers that peers send.
    pub max_tokens: u32,
    /// How many such kernels have run, incremented by this one.
    pub epochs: *mut u32,
    /// Handles of the group so far, this one included: tells the host what `received` is about.
    pub number: u32,
    /// Tokens that one block numbers.
    pub block_tokens: u32,
    /// This rank's verdict for all: its ids per token, or why it refuses. A rank that refuses has no tokens, memory or
    /// counter.
    pub verdict: u32,
}

/// Device memory of a group, initially zero: the progress of the sequences of rows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtSequences {
    /// Units sent to each rank by all operations so far.
    pub sent: [u32; MAX_PEERS],
    /// Units received from each rank.
    pub received: [u32; MAX_PEERS],
    /// Operations so far.
    pub operations: u32,
    /// Blocks that have read all of this.
    pub blocks_started: u32,
    /// Epoch of the last operation that was sent to other nodes.
    pub epoch: u32,
}

/// How rows travel in an operation, and which part of the grid does what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtShape {
    /// What the ranks must agree on (`ht/fingerprint.rs`); it travels with every row.
    pub fingerprint: u32,
    /// Bytes of a row in transit, with its scales.
    pub row_bytes: u32,
    /// Units that a row takes: 1 or 2. The last row of an operation may take the second one, too.
    pub row_units: u32,
    /// Bytes of the chunks in which a row passes through shared memory.
    pub chunk_bytes: u32,
    /// Bytes that follow a row in its slot, a multiple of 16.
    pub tail_bytes: u32,
    /// Shared memory of a warp: a chunk, then tails; at its end its notify queue.
    pub warp_bytes: u32,
    /// Warps of a block that have such memory; at least one warp has none.
    pub copy_warps: u32,
    /// The first `send_blocks` of the grid send; the others receive. In a combine in which all blocks send, all receive
    /// as well, with the warps from `copy_warps` on and one more.
    pub send_blocks: u32,
}

/// Parameters of both `ht_dispatch` and `ht_combine`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtCommon {
    pub peers: PeerTable,
    pub wait: WaitParams,
    pub layout: HtLayout,
    pub handle: HtHandleMemory,
    pub sequences: *mut HtSequences,
    /// The shape of rows and of the grid.
    pub shape: HtShape,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtDispatchParams {
    pub common: HtCommon,
    /// `[tokens]` rows.
    pub tokens: *const u8,
    /// `[tokens][top_k]`, or NULL: tokens only.
    pub topk_idx: *const i64,
    /// `[tokens][top_k]`, or NULL.
    pub weights: *const f32,
    /// `[out_rows]` rows, or NULL.
    pub out: *mut u8,
    /// `[routing_rows][top_k]`: local ids, or NULL.
    pub out_idx: *mut i64,
    /// `[routing_rows][top_k]`, or NULL.
    pub out_weights: *mut f32,
    /// `[local_experts]`, or NULL.
    pub counter: *mut i32,
    /// Rows of `out`; the largest number if it is not wanted, since NULL may also mean no rows.
    pub out_rows: u32,
    /// Rows of `out_idx` and `out_weights`, likewise.
    pub routing_rows: u32,
    /// Not zero if rows and scales that no token fills are zeroed; ids and weights always are.
    pub fills_rest: u32,
}

/// The type of rows that a dispatch casts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum HtCast {
    Bf16 = 0,
    F16 = 1,
    F32 = 2,
}

/// Rows with scales in a dispatch.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtScaledRows {
    /// Their format, and the layout of scales.
    pub rows: ScaledRows,
    /// Compares the ranks' scales; not zero.
    pub word: u32,
    /// Rows of `rows.out`.
    pub out_rows: u32,
    /// Bytes from one of the caller's rows to the next.
    pub token_bytes: u32,
    /// Elements that are cast at a time, a multiple of 512; 0 if rows are forwarded.
    pub cast_chunk: u32,
    /// The type that is cast.
    pub cast_from: HtCast,
}

/// Parameters of `ht_dispatch_scaled` and `ht_dispatch_cast`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtScaledDispatchParams {
    /// As without scales.
    pub rows: HtDispatchParams,
    pub scaled: HtScaledRows,
}

/// Parameters of `ht_combine_bf16` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtCombineParams {
    pub common: HtCommon,
    /// `[in_rows]` rows, in the order of dispatch.
    pub rows: *const u8,
    /// `[in_rows][columns]`, or NULL.
    pub gradients: *const f32,
    /// `[tokens]` rows.
    pub out: *mut u8,
    /// `[tokens][columns]`.
    pub out_gradients: *mut f32,
    /// `[ranks]`, or NULL: gets the nanoseconds of waiting for each rank added.
    pub waits: *mut u64,
    /// Rows of `rows` and `gradients` that are there.
    pub in_rows: u32,
    /// What to report if they are too few.
    pub rows_fault: Fault,
    /// Columns of both gradients.
    pub columns: u32,
}
