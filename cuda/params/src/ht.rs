//! Parameters of the high-throughput kernels.

use core::ffi::c_void;

use crate::common::{CallerBlock, Fault, MAX_PEERS, PeerTable, ScaledRows, WaitParams};

/// Most experts that a token can name in HT: one per lane of a warp.
pub const HT_MAX_TOP_K: u32 = 32;
/// Threads of a block of `ht_route`.
pub const HT_ROUTE_THREADS: u32 = 512;
/// Most threads of a block of `ht_dispatch`, in whole warps.
pub const HT_DISPATCH_THREADS: u32 = 768;
/// Most threads of a block of `ht_dispatch_cast`, in whole warps. More would not have shared memory for the rows that
/// they cast; and fewer threads have more registers.
pub const HT_CAST_THREADS: u32 = 512;
/// Most threads of a block of `ht_combine_bf16` and its siblings, in whole warps.
pub const HT_COMBINE_THREADS: u32 = 512;
/// Most static shared memory of a block of `ht_dispatch`, `ht_combine_bf16` and their siblings; the rest is for rows.
pub const HT_STATIC_SHARED_BYTES: u32 = 3584;
/// Bytes of zeros that a dispatch block has in shared memory before the warps' parts.
pub const HT_ZERO_BYTES: u32 = 4096;
/// Bytes between a row in transit and its scales: the scales word, then zeros.
pub const HT_STAMP_BYTES: u32 = 16;
/// Slots of a ring that a lane polls at once for credits where rows are short; a ring has as many or a multiple.
pub const HT_POLLED_SLOTS: u32 = 4;
/// Number of a fingerprint's lowest bits, which have the size of a row without scales in units of 16 bytes.
pub const HT_FINGERPRINT_PAYLOAD_BITS: u32 = 17;
/// Bit of a dispatch's fingerprint: rows have scales.
pub const HT_FINGERPRINT_SCALED: u32 = 0x0400_0000;
/// Bit of a fingerprint: the operation is a combine.
pub const HT_FINGERPRINT_COMBINE: u32 = 0x8000_0000;

/// Packets about a new handle that a rank sends to each other rank, besides one per local expert: the number of rows
/// that it sends, then `HtRouteParams::verdict`.
pub const HT_COUNTS_BESIDE_EXPERTS: u32 = 2;
/// Lowest bit, in `HtRouteParams::verdict`, of the `ncclResult_t` with which a rank refuses a handle; the bits below
/// have its ids per token.
pub const HT_VERDICT_CODE_SHIFT: u32 = 8;
/// Bit in place of a handle's number of rows: the ranks do not agree, and nothing runs on the handle. The other
/// bits say why: a rank, and its verdict.
pub const HT_DISAGREED: u32 = 0x8000_0000;
/// Bit with `HT_DISAGREED`: the rank has a different number of ids per token; otherwise it has refused.
pub const HT_DISAGREED_TOP_K: u32 = 0x4000_0000;
/// Lowest bit of the rank, with `HT_DISAGREED`.
pub const HT_DISAGREED_RANK_SHIFT: u32 = 16;
/// In place of the number of rows: some rank's verdict did not come in time. No rank has this number.
pub const HT_VERDICT_MISSING: u32 = 0xffff_fffe;

/// Offsets in every rank's window; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtLayout {
    /// u64 packets `[2][ranks][local_experts + HT_COUNTS_BESIDE_EXPERTS]`, by epoch: counts from each other rank.
    pub counts: u64,
    /// u64 packets `[ranks][units]`: the number, in the source's sequence, of the unit that has arrived.
    pub arrivals: u64,
    /// u32 `[ranks][units]`: credits, up to which unit the destination has emptied the ring that this rank fills.
    pub credits: u64,
    /// `[ranks][units]` units, by source. Two units are a slot.
    pub slots: u64,
    /// Bytes of a unit.
    pub unit_bytes: u64,
    /// Units of the ring of each ordered pair of ranks; a power of two.
    pub units: u32,
    pub local_experts: u32,
    /// 2^32 / local_experts, rounded down.
    pub expert_reciprocal: u32,
}

/// One of a token's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtEntry {
    /// The expert's global id; negative past the last one.
    pub expert: i32,
    /// The row's index among those that an operation sends from the token's rank to the expert's rank.
    pub index: u32,
}

/// Device memory of an HT handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtHandleMemory {
    /// `[tokens][top_k]`: each token's experts, ascending, without repetition.
    pub entries: *mut HtEntry,
    /// `[ranks + 1]`: the first row from each source, then the number of received rows, or `HT_DISAGREED` and why.
    pub begins: *mut u32,
    /// `[ranks]`: numbers of rows that this rank sends to each, including itself.
    pub departures: *mut u32,
    /// `[local_experts]`: received rows per expert.
    pub counts: *mut i32,
    pub tokens: u32,
    pub top_k: u32,
}

/// A count for the host, in mapped host memory.
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
    /// The first integer, or NULL.
    pub data: *mut c_void,
    /// Not zero if integers have 64 bits rather than 32.
    pub is_wide: u32,
}

/// What a routing reports to its caller; NULL for what the caller does not want.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtReport {
    /// Gets the number of rows of each local expert; with zones of slots.
    pub experts: HtNumbers,
    /// Gets the number of all rows, with zones of slots; 0 if ranks disagree.
    pub total: HtNumbers,
    /// With zones, gets the first slot of each expert.
    pub offsets: HtNumbers,
    /// With zones, gets the number of all slots, for the host.
    pub page: *mut HtCount,
    /// The handle's number, for `page`.
    pub epoch: u32,
}

/// The packets by which a handle's ranks notify each other of rows by expert: two banks, by the epoch of `ht_route`;
/// over several nodes one bank.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtPackets {
    /// Offset in a window: u64 packets `[ranks][experts / HT_ZONE_WORD_EXPERTS, rounded up][max_tokens]`, by source; of
    /// `ht_cut` `[ranks][1 + local_experts]`.
    pub offset: u64,
    /// Bytes to the other bank; 0 over several nodes.
    pub bank_bytes: u64,
}

/// What the last kernel that fills a handle's block does at its end.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtFinish {
    /// The block whose header is written, if that is in a caller's memory.
    pub block: CallerBlock,
    /// Number of blocks that have ended; zero except while the kernel runs.
    pub ended: *mut u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtRouteParams {
    pub peers: PeerTable,
    pub wait: WaitParams,
    pub layout: HtLayout,
    /// Gets filled.
    pub handle: HtHandleMemory,
    /// `[tokens][top_k]`: ids of 64 bits, or if `is_narrow` of 32.
    pub topk_idx: *const c_void,
    /// `[tokens][top_k]`: gets the ids, or NULL.
    pub kept_ids: *mut i64,
    pub is_narrow: u32,
    /// Not zero if rows are ordered by expert.
    pub has_zones: u32,
    /// If rows are ordered by expert: the packets that notify other ranks of them.
    pub packets: HtPackets,
    /// If rows are not ordered by expert: what is reported to the caller.
    pub report: HtReport,
    pub finish: HtFinish,
    /// The rows that this rank receives, or `HT_DISAGREED` and why.
    pub received: *mut HtCount,
    /// `[2 + ranks + ranks * local_experts]`, zero except while the kernel runs: the number of blocks that have
    /// counted, and that have begun to count; their counts for each rank, and for each expert.
    pub tally: *mut u32,
    /// u64 packets `[counting blocks][ranks]`: rows that each block has counted for each rank.
    pub counted: *mut u64,
    /// u64 packets `[2][local_experts + HT_COUNTS_BESIDE_EXPERTS]`, by epoch: counts from this rank to itself. Not in
    /// the window, where peers could change them.
    pub own_counts: *mut u64,
    /// Most tokens of a rank: the bound on numbers that peers send.
    pub max_tokens: u32,
    /// The number of these kernels that have run, which this one increments.
    pub epochs: *mut u32,
    /// The handle's number, by which the host recognises `received`.
    pub number: u32,
    /// Tokens per block.
    pub block_tokens: u32,
    /// The verdict of this rank: its ids per token, or why it refuses. A rank that refuses has no tokens, memory or
    /// counter.
    pub verdict: u32,
}

/// Device memory of a group, initially zero: the progress of the rings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtSequences {
    /// Units sent to each rank by all operations so far.
    pub sent: [u32; MAX_PEERS],
    /// Units received from each rank.
    pub received: [u32; MAX_PEERS],
    /// Operations so far.
    pub operations: u32,
    /// Blocks that have read this struct.
    pub blocks_started: u32,
    /// Epoch of the last operation that was sent to other nodes.
    pub epoch: u32,
}

/// The sizes of rows in an operation, and the roles of blocks and warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtShape {
    /// What ranks must agree on (`ht/fingerprint.rs`); travels with every row.
    pub fingerprint: u32,
    /// Bytes of a row in transit, with its scales.
    pub row_bytes: u32,
    /// Units that a row takes: 1 or 2. The last row of an operation may take 2 in either case.
    pub row_units: u32,
    /// Bytes of the chunks in which a row passes through shared memory.
    pub chunk_bytes: u32,
    /// Bytes that follow a row in its slot, a multiple of 16.
    pub tail_bytes: u32,
    /// Shared memory of a warp: a chunk, tails, and at the end its notify queue.
    pub warp_bytes: u32,
    /// Warps of a block that have this memory; at least one warp does not.
    pub copy_warps: u32,
    /// The first `send_blocks` of the grid send, the rest receives. If all blocks of a combine send, all also receive,
    /// with the warps from `copy_warps` on and one more.
    pub send_blocks: u32,
    /// Not zero if a lane polls for the credits of `HT_POLLED_SLOTS` slots at once, not of one.
    pub polls_several: u32,
    /// Clock cycles that a sending warp pauses before each poll for credit; the notifier makes no pause.
    pub sender_pause: u32,
}

/// Parameters that `ht_dispatch` and `ht_combine` have in common.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtCommon {
    pub peers: PeerTable,
    pub wait: WaitParams,
    pub layout: HtLayout,
    pub handle: HtHandleMemory,
    pub caller_block: CallerBlock,
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
    /// Number of rows of `out`; the largest number if `out` is not wanted, as NULL may also mean no rows.
    pub out_rows: u32,
    /// Number of rows of `out_idx` and `out_weights`, likewise.
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
    /// The format of rows, and the layout of scales.
    pub rows: ScaledRows,
    /// The scales word, by which ranks compare their scales; not zero.
    pub word: u32,
    /// Number of rows of `rows.out`.
    pub out_rows: u32,
    /// Distance between the caller's rows, in bytes.
    pub token_bytes: u32,
    /// Elements that a warp casts at a time, a multiple of 512; 0 without a cast.
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
    /// `[ranks]`, or NULL: the nanoseconds of waiting for each rank are added.
    pub waits: *mut u64,
    /// Number of rows of `rows` and `gradients` that are there.
    pub in_rows: u32,
    /// What to report if they are too few.
    pub rows_fault: Fault,
    /// Columns of both gradients.
    pub columns: u32,
}
