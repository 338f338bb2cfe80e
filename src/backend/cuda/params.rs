//! Kernel parameters: one `#[repr(C)]` struct per kernel, defined here (those of high throughput in
//! `params_ht`) and nowhere else.
//!
//! `cuda/params/params.h` and `cuda/params/params_ht.h` are generated from these files (`tests/kernel_params.rs`), so
//! they must stay free of other modules. Addresses are the device's; the host never follows them through these structs.
#![forbid(unsafe_code)]

/// Most ranks of a group: the GPUs of the largest NVLink domain.
pub const MAX_PEERS: usize = 72;

/// Bytes that a rank sends to each peer in the self test.
pub const SELFTEST_SLOT_BYTES: usize = 4096;

/// Threads per block of `peer_selftest`; its grid has one block per rank.
pub const SELFTEST_THREADS: u32 = 128;

/// `SelftestResult::outcome` of a block that did not end.
pub const SELFTEST_MISSING: u32 = 0;
/// `SelftestResult::outcome`: everything arrived as it was sent.
pub const SELFTEST_PASSED: u32 = 1;
/// `SelftestResult::outcome`: the flag arrived, but not the data that it announced.
pub const SELFTEST_MISMATCH: u32 = 2;
/// `SelftestResult::outcome`: no flag within the deadline.
pub const SELFTEST_TIMEOUT: u32 = 3;

/// `FaultReport::state` while nothing has failed.
pub const FAULT_NONE: u32 = 0;
/// `FaultReport::state`: a wait reached its deadline. All other fields are valid.
pub const FAULT_TIMEOUT: u32 = 1;
/// `FaultReport::state`: a rank runs another operation than this one. All other fields are valid.
pub const FAULT_DIFFERS: u32 = 2;
/// `FaultReport::state`: as `FAULT_DIFFERS`, but in HT, with `HtCommon::shape_word` as signatures.
pub const FAULT_SHAPE_DIFFERS: u32 = 3;
/// `FaultReport::state`: a wait ended because a rank, named by `got`, reported its own failure.
pub const FAULT_PEER_FAILED: u32 = 4;
/// `FaultReport::state`: fewer output rows for tokens, `got`, than rows received, `expected`.
pub const FAULT_TOKEN_ROWS: u32 = 5;
/// `FaultReport::state`: fewer output rows for ids and weights, `got`, than rows received, `expected`.
pub const FAULT_ROUTING_ROWS: u32 = 6;
/// `FaultReport::state`: fewer input rows, `got`, than rows to return, `expected`.
pub const FAULT_INPUT_ROWS: u32 = 7;

/// `FaultReport::state`: a rank has staged an operation that is whole here, or the other way round.
pub const FAULT_STAGED_DIFFERS: u32 = 9;
/// `FaultReport::state`: an operation on an HT handle with the number of rows `got`, which has
/// `HT_DISAGREED`; `expected` are this rank's ids per token.
pub const FAULT_DISAGREED: u32 = 8;

/// `FaultReport::op` of the self test.
pub const OP_PEER_SELFTEST: u32 = 1;
/// `FaultReport::op` of an LL dispatch.
pub const OP_LL_DISPATCH: u32 = 2;
/// `FaultReport::op` of an LL combine.
pub const OP_LL_COMBINE: u32 = 3;

/// `FaultReport::op` of the creation of an HT handle.
pub const OP_HT_ROUTE: u32 = 4;
/// `FaultReport::op` of an HT dispatch.
pub const OP_HT_DISPATCH: u32 = 5;
/// `FaultReport::op` of an HT combine.
pub const OP_HT_COMBINE: u32 = 6;

/// `FaultReport::what`: data of the self test.
pub const WAIT_PATTERN: u32 = 0;
/// `FaultReport::what`: how many rows a rank sends for each expert.
pub const WAIT_COUNTS: u32 = 1;
/// `FaultReport::what`: where a token's rows go.
pub const WAIT_ENTRY: u32 = 2;
/// `FaultReport::what`: a row.
pub const WAIT_ROW: u32 = 3;
/// `FaultReport::what`: the weights of a token.
pub const WAIT_WEIGHT: u32 = 4;
/// `FaultReport::what`: that a rank has begun the operation, and which.
pub const WAIT_BEGIN: u32 = 5;
/// `FaultReport::what`: that a rank has let go of the last staged operation.
pub const WAIT_ACK: u32 = 6;

/// `FaultReport::what`: a credit: a free slot for a row of a pair's sequence.
pub const WAIT_CREDIT: u32 = 7;
/// `FaultReport::what`: a row of a pair's sequence.
pub const WAIT_STREAMED_ROW: u32 = 8;

/// Most experts that a token can name.
pub const LL_MAX_TOP_K: u32 = 32;
/// Packets by which a rank notifies each other, besides the one for each local expert.
pub const LL_COUNTS_BESIDE_EXPERTS: u32 = 2;
/// Channels of operations, each with its own epochs: one for whole operations, two for staged ones.
pub const LL_CHANNELS: u32 = 3;
/// The channel of whole operations; staged ones have the others.
pub const LL_WHOLE_CHANNEL: u32 = 0;
/// Banks: the channel of whole operations alternates between 0 and 1; staged channel c owns bank c + 1.
pub const LL_BANKS: u32 = 4;
/// Bit of `LlCommon::phases`.
pub const LL_PHASE_SEND: u32 = 1;
/// Bit of `LlCommon::phases`.
pub const LL_PHASE_RECEIVE: u32 = 2;
/// Bits of an entry packet for the entry's index among the rows that its source sends to the expert; those
/// above hold the local expert.
pub const LL_INDEX_BITS: u32 = 20;
/// Most threads of a dispatch block, in whole warps. A block that sends and notifies needs more warps
/// than it has routers (4).
pub const LL_DISPATCH_THREADS: u32 = 512;
/// Most threads of a combine block, in whole warps.
pub const LL_COMBINE_THREADS: u32 = 384;
/// Most 16-byte accesses per lane in a chunk of a row, so a chunk has at most 32 times as many.
pub const LL_CHUNK_VECS: u32 = 4;
/// A word of a bank's row that has not arrived; all are so at first.
pub const LL_MARK: u32 = 0xffe7_ff93;

/// The first failure of a group. Lives in host memory that the device maps; the kernel writes `state`
/// last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct FaultReport {
    /// `FAULT_...`.
    pub state: u32,
    /// Which kernel waited, `OP_...`.
    pub op: u32,
    /// What was waited for, `WAIT_...`.
    pub what: u32,
    /// The rank that was waited for.
    pub peer: u32,
    /// The epoch that should have arrived; `FAULT_DIFFERS`: our signature.
    pub expected: u32,
    /// The epoch that had arrived; `FAULT_DIFFERS`: the peer's signature.
    pub got: u32,
    /// How long the wait had lasted then.
    pub waited_ms: u32,
}

/// What every wait on the device needs.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WaitParams {
    /// How long one wait may last.
    pub timeout_ns: u64,
    /// Where the first failure of the group is described.
    pub report: *mut FaultReport,
    /// Not zero once some wait of the group has failed here, so that others give up. Beside what kernels
    /// load first, as they want to know this first, too.
    pub failed: *mut u32,
    /// In this rank's window: 1 + a peer that has reported its own failure, or zero.
    pub peer_failed: *mut u32,
    /// Who waits, `OP_...`.
    pub op: u32,
}

/// The windows of all ranks, as this rank maps them.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PeerTable {
    /// First byte of each rank's window; this rank's own included.
    pub window: [*mut u8; MAX_PEERS],
    /// Number of ranks.
    pub ranks: u32,
    /// This rank.
    pub rank: u32,
}

/// What one rank found out about one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct SelftestResult {
    /// `SELFTEST_...`.
    pub outcome: u32,
    /// Threads that saw a wrong value.
    pub wrong_threads: u32,
}

/// Parameters of `peer_selftest`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PeerSelftestParams {
    /// Where the ranks' windows are.
    pub peers: PeerTable,
    /// Deadline and report.
    pub wait: WaitParams,
    /// Offset in a window: one u32 arrival flag per source rank.
    pub flags_offset: u64,
    /// Offset in a window: one slot of `SELFTEST_SLOT_BYTES` per source rank.
    pub slots_offset: u64,
    /// One result per rank, in host memory that the device maps.
    pub results: *mut SelftestResult,
    /// The value of a flag that announces this run's data.
    pub epoch: u32,
}

/// Offsets in every rank's window; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct LlLayout {
    /// u64 packets `[LL_CHANNELS][ranks]`.
    pub acks: u64,
    /// `LL_BANKS` times `bank_bytes`.
    pub banks: u64,
    /// Size of a bank; its rows are at its start.
    pub bank_bytes: u64,
    /// Offset in a bank: u64 packets `[rows][chunks]`.
    pub flags: u64,
    /// Offset in a bank: u64 packets `[ranks][local_experts + LL_COUNTS_BESIDE_EXPERTS]`.
    pub counts: u64,
    /// Offset in a bank: u64 packets `[ranks][max_tokens][LL_MAX_TOP_K]`.
    pub entries: u64,
}

/// The sizes of an LL operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct LlShape {
    /// Experts per rank.
    pub local_experts: u32,
    /// Bound of tokens per rank.
    pub max_tokens: u32,
    /// This rank's tokens.
    pub tokens: u32,
    /// Ids per token.
    pub top_k: u32,
    /// Bytes per row.
    pub row_bytes: u32,
    /// A row travels in `chunks` chunks of `chunk_bytes` (the last may be shorter), one warp each.
    pub chunk_bytes: u32,
    /// Chunks per row.
    pub chunks: u32,
}

/// Device memory of an LL handle: what dispatch leaves for combine.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlHandleMemory {
    /// `[max_tokens][top_k]`: the expert of each of this rank's entries, negative if it names none.
    pub expert_of: *mut i32,
    /// `[ranks][max_tokens][top_k]`: output row of each entry that came here, negative if none.
    pub row_of: *mut i32,
    /// `[ranks]`: tokens of each rank.
    pub tokens_of: *mut u32,
}

/// Device memory of a group, one per channel, zero at first.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlChannelState {
    /// The last operation that was sent.
    pub epoch: u32,
    /// Blocks that have read `epoch`.
    pub blocks_started: u32,
    /// Blocks that have received everything.
    pub blocks_finished: u32,
    /// The last operation that a receive phase has ended; staged channels only.
    pub received: u32,
}

/// Parameters of both LL kernels.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlCommon {
    /// Where the ranks' windows are.
    pub peers: PeerTable,
    /// Deadline and report.
    pub wait: WaitParams,
    /// Where things lie in them.
    pub layout: LlLayout,
    /// Sizes.
    pub shape: LlShape,
    /// The handle's memory.
    pub handle: LlHandleMemory,
    /// The channel's state.
    pub channel_state: *mut LlChannelState,
    /// Which channel.
    pub channel: u32,
    /// `LL_PHASE_...`.
    pub phases: u32,
    /// What all ranks must agree on in an operation; opaque to the kernels.
    pub signature: u32,
    /// The first `send_blocks` of the grid send rows ...
    pub send_blocks: u32,
    /// ... and the last `receive_blocks` do all else; they may overlap and leave none out.
    pub receive_blocks: u32,
}

/// Parameters of `ll_dispatch`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlDispatchParams {
    /// Common to both kernels.
    pub common: LlCommon,
    /// `[tokens]` rows.
    pub tokens: *const u8,
    /// `[tokens][top_k]`.
    pub topk_idx: *const i64,
    /// `[local_experts][ranks * max_tokens]` rows; NULL to receive and throw away.
    pub out: *mut u8,
    /// `[local_experts]`, or NULL.
    pub counter: *mut i32,
    /// The first `notify_blocks` of the receiving blocks notify the peers of what comes.
    pub notify_blocks: u32,
}

/// Parameters of `ll_combine_bf16` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlCombineParams {
    /// Common to both kernels.
    pub common: LlCommon,
    /// `[local_experts][ranks * max_tokens]` rows.
    pub rows: *const u8,
    /// `[tokens][top_k]`: ids that name no expert any more are masked.
    pub topk_idx: *const i64,
    /// `[tokens][top_k]`; NULL, as `out`, to receive and throw away.
    pub weights: *const f32,
    /// `[tokens]` rows.
    pub out: *mut u8,
    /// Not zero: every entry's row comes home, summed in the order of k.
    pub exact: u32,
}
