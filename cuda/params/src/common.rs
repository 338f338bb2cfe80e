//! Parameters that kernels of both modes and the self-test share: peers, waits, fault reports.
#![allow(unsafe_code)]

use core::ffi::c_void;

/// Most ranks of a group: the GPUs of the largest NVLink domain.
pub const MAX_PEERS: usize = 72;

/// Bytes that a rank sends to each peer in the self-test.
pub const SELFTEST_SLOT_BYTES: usize = 4096;

/// Threads per block of `peer_selftest`; its grid has one block per rank.
pub const SELFTEST_THREADS: u32 = 128;

/// Threads of `replay_mark`: one warp, of which one thread works.
pub const REPLAY_MARK_THREADS: u32 = 32;

/// Threads of `handle_header`: one warp.
pub const HANDLE_HEADER_THREADS: u32 = 32;
/// Threads of `add_counts`: one block.
pub const ADD_COUNTS_THREADS: u32 = 256;

/// Threads of a block of `handle_ids`.
pub const HANDLE_IDS_THREADS: u32 = 512;
/// Words of the header of a handle's block.
pub const HANDLE_HEADER_WORDS: usize = 20;
/// The number of leading words of the header by which a block is the handle's.
pub const HANDLE_HEADER_COMPARED: usize = 16;
/// The index of the header's word with the number of rows.
pub const HANDLE_HEADER_ROWS: usize = 18;
/// The index of the header's word that differs if a compared word does.
pub const HANDLE_HEADER_HASH: usize = 19;

/// `SelftestResult::outcome`: the block did not finish.
pub const SELFTEST_MISSING: u32 = 0;
/// `SelftestResult::outcome`: everything arrived as it was sent.
pub const SELFTEST_PASSED: u32 = 1;
/// `SelftestResult::outcome`: the flag arrived, but not the data before it.
pub const SELFTEST_MISMATCH: u32 = 2;
/// `SelftestResult::outcome`: no flag within the deadline.
pub const SELFTEST_TIMEOUT: u32 = 3;

/// Value of `own_place`: this node's sum comes first, unrounded, and the others follow by distance. Otherwise it is
/// this node's position, and all sums are rounded and added by ascending node.
pub const OWN_NODE_FIRST: u32 = 0xffff_ffff;

/// An enum with a conversion from numbers that kernels or peers have written, which may be invalid.
macro_rules! from_raw {
    ($($name:ident: $($value:ident)+;)+) => {
        $(
            impl $name {
                pub fn from_raw(number: u32) -> Option<Self> {
                    let mut all = [$(Self::$value),+].into_iter();
                    all.find(|it| *it as u32 == number)
                }
            }
            // An incomplete list does not compile.
            const _: fn($name) = |it| match it { $($name::$value => ()),+ };
        )+
    };
}

from_raw! {
    Fault: None Timeout Differs PeerFailed TokenRows RoutingRows InputRows Disagreed StagedDiffers
        HandleDiffers RailPeerFailed ScaleRows ExpertRows ForeignState WeightRows
        GradientRows;
    KernelOp: PeerSelftest LlDispatch LlCombine HtRoute HtDispatch HtCombine;
    Wait: Pattern Counts Entry Row Weight Begin Ack Credit StreamedRow;
}

/// The position of a rank of the group, seen from one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct RankOnNode {
    /// The rank's local index, or -1 on another node.
    pub peer: i32,
    /// The local index of the rank's forwarder on this node.
    pub forwarder: u32,
    /// The rank's index among those that its forwarder forwards for; the forwarder itself is 0.
    pub number: u32,
    /// By how many nodes, in ring order, the rank's node precedes this one.
    pub distance: u32,
}

/// The header of every message between nodes. It identifies the operation, as messages of different operations may have
/// equal sizes. A handshake is only a header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct MessageHeader {
    /// The handle's number in the group, from 1 in order of creation.
    pub handle: u32,
    /// LL, and handshakes: number of tokens of the sending rank.
    pub tokens: u32,
    /// The operation's fingerprint; in a handshake the verdict: ids per token, or why the rank refuses.
    pub fingerprint: u32,
    /// LL: the operation's channel.
    pub channel: u32,
    /// By which ranks compare their scales; 0 without scales.
    pub scales_word: u32,
    /// The epoch of the operation (in LL of the channel), which kernels fill in: by it a receiver recognises an earlier
    /// message, which is still there if no new one has come. Never 0, except in handshakes.
    pub epoch: u32,
    /// HT: the stage of the operation.
    pub stage: u32,
    /// HT: not zero if the sender knew that the group had failed, so that the data is invalid.
    pub failed: u32,
}

/// The kind of a fault; `FaultReport::state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Fault {
    None = 0,
    /// A wait reached its deadline. All other fields are valid.
    Timeout = 1,
    /// A rank runs a different operation. All other fields are valid.
    Differs = 2,
    /// A rank, named by `got`, reported its own failure, which ended a wait; with `expected` 0 no wait was involved.
    PeerFailed = 4,
    /// Fewer output rows for tokens, `got`, than rows received, `expected`.
    TokenRows = 5,
    /// Fewer output rows for ids and weights, `got`, than rows received, `expected`.
    RoutingRows = 6,
    /// Fewer input rows, `got`, than rows to return, `expected`.
    InputRows = 7,
    /// An operation on an HT handle with the number of rows `got`, which has `HT_DISAGREED`; `expected` are this rank's
    /// ids per token.
    Disagreed = 8,
    /// An operation is staged on one rank and whole on another.
    StagedDiffers = 9,
    /// A rank on another node uses handle `got` where this one uses `expected`.
    HandleDiffers = 10,
    /// As `PeerFailed`, but `got` is on another node, and no wait was involved.
    RailPeerFailed = 11,
    /// Fewer output rows for scales, `got`, than rows received, `expected`.
    ScaleRows = 12,
    /// An expert of this rank, `what`, gets more rows than it has slots, because rank `peer` sends `got`, more than its
    /// share `expected`.
    ExpertRows = 13,
    /// Word `what` of the header of a handle's block in a caller's memory is `got` instead of `expected`.
    ForeignState = 14,
    /// Rows by expert: fewer outputs for weights, `got`, than slots, `expected`.
    WeightRows = 15,
    /// As `InputRows`, of gradients.
    GradientRows = 16,
}

/// The operation of a kernel that waits; `FaultReport::op`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum KernelOp {
    PeerSelftest = 1,
    LlDispatch = 2,
    LlCombine = 3,
    /// The creation of an HT handle.
    HtRoute = 4,
    HtDispatch = 5,
    HtCombine = 6,
}

/// What a kernel waits for; `FaultReport::what`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Wait {
    /// Data of the self-test.
    Pattern = 0,
    /// How many rows a rank sends for each expert.
    Counts = 1,
    /// Where a token's rows go.
    Entry = 2,
    Row = 3,
    /// The weights of a token.
    Weight = 4,
    /// The announcement that a rank has begun its operation, with its fingerprint.
    Begin = 5,
    /// The acknowledgement that a rank has received the last staged operation.
    Ack = 6,
    /// A credit: a free slot for a row of a pair's sequence.
    Credit = 7,
    /// A row of a pair's sequence.
    StreamedRow = 8,
}

/// The first failure of a group, in host memory that the device maps; the kernel writes `state` last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct FaultReport {
    /// A `Fault`.
    pub state: u32,
    /// The operation that waited, a `KernelOp`.
    pub op: u32,
    /// What was waited for, a `Wait`.
    pub what: u32,
    /// The rank that was waited for.
    pub peer: u32,
    /// The epoch that should have arrived; `Differs`: this rank's fingerprint.
    pub expected: u32,
    /// The epoch that had arrived; `Differs`: the peer's fingerprint.
    pub got: u32,
    /// How long the wait had lasted.
    pub waited_ms: u32,
    /// `Differs`: this rank's scales word.
    pub expected_scales: u32,
    /// `Differs`: the peer's scales word.
    pub got_scales: u32,
}

/// The source of the scales that a dispatch sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Scales {
    /// The caller's scales, unchanged.
    Forwarded = 0,
    /// A cast makes them, as float32.
    Float = 1,
    /// A cast makes them, as float32 rounded up to a power of two.
    PowerOfTwo = 2,
    /// A cast makes them, as the exponent byte of a power of two.
    Exponent = 3,
}

/// The layout of scales. Strides in scales:
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ScaleView {
    /// The first scale.
    pub data: *mut u8,
    /// from one expert to the next.
    pub expert: u64,
    /// From one row to the next.
    pub row: u64,
    /// From one scale of a row to the next.
    pub column: u64,
}

/// Rows with scales in a dispatch. In transit a row's scales are dense, and padded with zeros to a multiple of 16
/// bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ScaledRows {
    /// Bytes of a row without its scales, a multiple of 16.
    pub payload_bytes: u32,
    /// Bytes of a row's scales, without padding.
    pub scale_bytes: u32,
    /// Bytes of a scale: 1, 2 or 4.
    pub scale_width: u32,
    /// The source of the scales that are sent.
    pub form: Scales,
    /// Elements that share a scale of a cast: 128 or 32.
    pub block: u32,
    /// LL: bytes of scales in each chunk of a row except the last ones, a multiple of 16.
    pub scale_chunk_bytes: u32,
    /// If scales are forwarded, the input scales; a tensor with one expert.
    pub from: ScaleView,
    pub out: ScaleView,
}

/// Parameters of waits on the device.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WaitParams {
    /// Timeout of a single wait.
    pub timeout_ns: u64,
    /// Gets the report of the group's first failure.
    pub report: *mut FaultReport,
    /// Not zero once a wait of the group has failed on this rank, so that other waits give up. Next to the other words
    /// that kernels load first.
    pub failed: *mut u32,
    /// In this rank's window: 1 + the number of a peer that has failed, or zero.
    pub peer_failed: *mut u32,
    pub op: KernelOp,
}

// SAFETY: addresses of the device's memory, which no thread dereferences.
unsafe impl Send for WaitParams {}
// SAFETY: as above.
unsafe impl Sync for WaitParams {}

/// The windows of all ranks, as this rank maps them.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PeerTable {
    /// First byte of each rank's window, including this rank's own.
    pub window: [*mut u8; MAX_PEERS],
    pub ranks: u32,
    pub rank: u32,
}

// SAFETY: as of `WaitParams`.
unsafe impl Send for PeerTable {}
// SAFETY: as above.
unsafe impl Sync for PeerTable {}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ReplayMarkParams {
    /// In mapped host memory: when a captured operation began; zero while it does not run.
    pub began_at: *mut u64,
    /// Not zero at the operation's begin, zero at its end.
    pub begins: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HandleHeaderParams {
    pub peers: PeerTable,
    pub wait: WaitParams,
    pub block: CallerBlock,
    /// Not zero to write the header, zero to compare it.
    pub writes: u32,
}

/// The block of a handle's state, if it is in a caller's memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CallerBlock {
    /// The first word of the block, or NULL if the library has it, where there is no header.
    pub header: *mut u32,
    /// The header, without the number of rows.
    pub words: [u32; HANDLE_HEADER_WORDS],
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AddCountsParams {
    pub wait: WaitParams,
    /// `[experts]`: rows that a dispatch has delivered to each local expert.
    pub counts: *const i32,
    /// `[experts]`: the sums over all counted dispatches.
    pub totals: *mut u64,
    pub experts: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HandleIdsParams {
    /// `[count]` ids.
    pub from: *const c_void,
    /// Gets the ids, widened to 64 bits.
    pub to: *mut i64,
    pub count: u64,
    /// Added to non-negative ids.
    pub offset: u32,
    /// Not zero if the ids at `from` have 32 bits rather than 64.
    pub is_narrow: u32,
}

/// The result of one rank's test of one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct SelftestResult {
    /// `SELFTEST_...`.
    pub outcome: u32,
    /// Threads that saw a wrong value.
    pub wrong_threads: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PeerSelftestParams {
    pub peers: PeerTable,
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
