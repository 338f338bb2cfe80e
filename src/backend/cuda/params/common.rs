//! What the kernels of both modes and the self test have in common: peers, waits, the report of a fault.
#![forbid(unsafe_code)]

/// Most ranks of a group: the GPUs of the largest NVLink domain.
pub const MAX_PEERS: usize = 72;

/// Bytes that a rank sends to each peer in the self test.
pub const SELFTEST_SLOT_BYTES: usize = 4096;

/// Threads per block of `peer_selftest`; its grid has one block per rank.
pub const SELFTEST_THREADS: u32 = 128;

/// Threads of `replay_mark`: one warp, of which one thread works.
pub const REPLAY_MARK_THREADS: u32 = 32;

/// `SelftestResult::outcome` of a block that did not end.
pub const SELFTEST_MISSING: u32 = 0;
/// `SelftestResult::outcome`: everything arrived as it was sent.
pub const SELFTEST_PASSED: u32 = 1;
/// `SelftestResult::outcome`: the flag arrived, but not the data that it announced.
pub const SELFTEST_MISMATCH: u32 = 2;
/// `SelftestResult::outcome`: no flag within the deadline.
pub const SELFTEST_TIMEOUT: u32 = 3;

/// Instead of the own node's place among the sums of all nodes: it comes first, not rounded, and the others follow by
/// distance. With a place, all sums are rounded and added by ascending node.
pub const OWN_NODE_FIRST: u32 = 0xffff_ffff;

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
/// `FaultReport::state`: an operation on an HT handle with the number of rows `got`, which has
/// `HT_DISAGREED`; `expected` are this rank's ids per token.
pub const FAULT_DISAGREED: u32 = 8;
/// `FaultReport::state`: a rank has staged an operation that is whole here, or the other way round.
pub const FAULT_STAGED_DIFFERS: u32 = 9;
/// `FaultReport::state`: a rank on another node uses handle `got` where this one uses `expected`.
pub const FAULT_HANDLE_DIFFERS: u32 = 10;
/// `FaultReport::state`: as `FAULT_PEER_FAILED`, but `got` is on another node and nothing was waited for.
pub const FAULT_GATEWAY_FAILED: u32 = 11;
/// `FaultReport::state`: fewer output rows for scales, `got`, than rows received, `expected`.
pub const FAULT_SCALE_ROWS: u32 = 12;
/// `FaultReport::state`: an expert of this rank, named by `what`, gets more rows than it has slots, as rank `peer` sends
/// `got`, more than its share of `expected`.
pub const FAULT_EXPERT_ROWS: u32 = 13;

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
    /// `FAULT_DIFFERS` and `FAULT_SHAPE_DIFFERS`: the scales of our rows, as a scales word.
    pub expected_scales: u32,
    /// `FAULT_DIFFERS` and `FAULT_SHAPE_DIFFERS`: the scales of the peer's rows.
    pub got_scales: u32,
}

/// `ScaledRows::form`: rows have their scales already.
pub const SCALES_FORWARDED: u32 = 0;
/// `ScaledRows::form`: a cast stores scales as float32.
pub const SCALES_FLOAT: u32 = 1;
/// `ScaledRows::form`: a cast stores scales as float32, rounded up to a power of two.
pub const SCALES_POWER_OF_TWO: u32 = 2;
/// `ScaledRows::form`: a cast stores the exponent byte of that power.
pub const SCALES_EXPONENT: u32 = 3;

/// Where scales lie. Distances are in scales.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ScaleView {
    /// The first scale.
    pub data: *mut u8,
    /// From an expert to the next.
    pub expert: u64,
    /// From a row to the next.
    pub row: u64,
    /// From a scale of a row to the next.
    pub column: u64,
}

/// Rows with scales, as a dispatch sends and stores them. On the way a row's scales are dense and filled up with
/// zeros to a multiple of 16 bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ScaledRows {
    /// Bytes of a row without its scales, a multiple of 16.
    pub payload_bytes: u32,
    /// Bytes of a row's scales, without the zeros behind them.
    pub scale_bytes: u32,
    /// Bytes of a scale: 1, 2 or 4.
    pub scale_width: u32,
    /// `SCALES_...`: where the scales of the rows that are sent come from.
    pub form: u32,
    /// Elements that share a scale of a cast: 128 or 32.
    pub block: u32,
    /// LL: bytes of scales in each chunk of a row but the last ones, a multiple of 16.
    pub scale_chunk_bytes: u32,
    /// `SCALES_FORWARDED`: the scales of the rows that are sent; they are of one expert.
    pub from: ScaleView,
    /// Receives the scales.
    pub out: ScaleView,
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

/// Parameters of `replay_mark`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ReplayMarkParams {
    /// In host memory that the device maps: when an operation in a graph began, zero while it is not under way.
    pub place: *mut u64,
    /// Not zero if the operation begins, zero if it ends.
    pub begins: u32,
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
