//! What the kernels of both modes and the self-test share: peers, waits, fault reports.
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
/// The leading words, which an operation compares.
pub const HANDLE_HEADER_COMPARED: u32 = 16;
/// The word of the number of rows.
pub const HANDLE_HEADER_ROWS: usize = 18;

/// `SelftestResult::outcome` of a block that did not finish.
pub const SELFTEST_MISSING: u32 = 0;
/// `SelftestResult::outcome`: everything arrived as it was sent.
pub const SELFTEST_PASSED: u32 = 1;
/// `SelftestResult::outcome`: the flag arrived, but not the data that it announced.
pub const SELFTEST_MISMATCH: u32 = 2;
/// `SelftestResult::outcome`: no flag within the deadline.
pub const SELFTEST_TIMEOUT: u32 = 3;

/// In place of this node's position in the sums over nodes: it comes first, unrounded, and the others follow by
/// distance. With a position, all sums are rounded and added by ascending node.
pub const OWN_NODE_FIRST: u32 = 0xffff_ffff;

/// The enum value for a number that a kernel or a peer has written, if there is one.
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

/// Where a rank of the group is, as the ranks of one node see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct RankOnNode {
    /// Its local index, or -1 on another node.
    pub peer: i32,
    /// The local index of its forwarder here.
    pub forwarder: u32,
    /// Its index among the ranks that its forwarder forwards for; the forwarder itself is 0.
    pub number: u32,
    /// How many nodes before this one its node is, in ring order.
    pub distance: u32,
}

/// Begins every message between nodes: only it tells which operation the rows behind it belong to, as messages of
/// different operations may have equal sizes. A handshake is only a header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct MessageHeader {
    /// The handle's number; a group counts from 1 in order of creation.
    pub handle: u32,
    /// In LL, and in a handshake: tokens of the sending rank.
    pub tokens: u32,
    /// The operation's fingerprint; in a handshake the verdict: ids per token, or why the rank refuses.
    pub fingerprint: u32,
    /// LL: the operation's channel.
    pub channel: u32,
    /// What ranks must agree on in the scales of rows; 0 without.
    pub scales_word: u32,
    /// The operation's epoch (in LL the channel's), filled in by kernels, never 0: after an exchange that ended without
    /// a message, an earlier one is still there. 0 in a handshake.
    pub epoch: u32,
    /// HT: the stage of the operation.
    pub stage: u32,
    /// HT: not zero if the rank knew that the group had failed; then the data that follows is invalid.
    pub failed: u32,
}

/// What a fault report says; `FaultReport::state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Fault {
    None = 0,
    /// A wait reached its deadline. All other fields are valid.
    Timeout = 1,
    /// A rank runs another operation than this one. All other fields are valid.
    Differs = 2,
    /// A wait ended because a rank, named by `got`, reported its own failure.
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
    /// A rank has staged an operation that is whole here, or vice versa.
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

/// What waits on the device; `FaultReport::op`.
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

/// What is waited for; `FaultReport::what`.
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
    /// That a rank has begun its operation, and which it is.
    Begin = 5,
    /// That a rank has released the last staged operation.
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
    /// Which kernel waited, a `KernelOp`.
    pub op: u32,
    /// What was waited for, a `Wait`.
    pub what: u32,
    /// The rank that was waited for.
    pub peer: u32,
    /// The epoch that should have arrived; `Differs`: our fingerprint.
    pub expected: u32,
    /// The epoch that had arrived; `Differs`: the peer's fingerprint.
    pub got: u32,
    /// How long the wait had lasted.
    pub waited_ms: u32,
    /// `Differs`: the scales of our rows, as a scales word.
    pub expected_scales: u32,
    /// `Differs`: the scales of the peer's rows.
    pub got_scales: u32,
}

/// Where the scales of rows that are sent come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Scales {
    /// They are sent along with the rows.
    Forwarded = 0,
    /// A cast stores them as float32.
    Float = 1,
    /// A cast stores them as float32, rounded up to a power of two.
    PowerOfTwo = 2,
    /// A cast stores the exponent byte of that power.
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

/// Rows with scales, as a dispatch sends and stores them. In transit a row's scales are dense and padded with zeros to
/// a multiple of 16 bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ScaledRows {
    /// Bytes of a row without its scales, a multiple of 16.
    pub payload_bytes: u32,
    /// Bytes of a row's scales, without padding.
    pub scale_bytes: u32,
    /// Bytes of a scale: 1, 2 or 4.
    pub scale_width: u32,
    /// Where the scales of the rows that are sent come from.
    pub form: Scales,
    /// Elements that share a scale of a cast: 128 or 32.
    pub block: u32,
    /// LL: bytes of scales in each chunk of a row but the last ones, a multiple of 16.
    pub scale_chunk_bytes: u32,
    /// If they are forwarded, the input scales; a tensor of one expert.
    pub from: ScaleView,
    pub out: ScaleView,
}

/// What every wait on the device needs.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WaitParams {
    /// Deadline of a single wait.
    pub timeout_ns: u64,
    /// Gets the description of the group's first failure.
    pub report: *mut FaultReport,
    /// Not zero once a wait of the group has failed here, so that others give up. Next to what kernels load first, as
    /// they need this first, too.
    pub failed: *mut u32,
    /// In this rank's window: 1 + a peer that has reported its own failure, or zero.
    pub peer_failed: *mut u32,
    pub op: KernelOp,
}

// SAFETY: addresses of the device's memory, which no thread follows.
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
    /// In host memory that the device maps: when a captured operation began; zero while it is not under way.
    pub began_at: *mut u64,
    /// Not zero if the operation begins, zero if it ends.
    pub begins: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HandleHeaderParams {
    pub peers: PeerTable,
    pub wait: WaitParams,
    /// The header, in a caller's memory.
    pub header: *mut u32,
    pub words: [u32; HANDLE_HEADER_WORDS],
    /// Not zero to write it, zero to compare it.
    pub writes: u32,
    /// When writing, its number of rows, or NULL.
    pub rows: *const u32,
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
    /// Gets them, widened to 64 bits.
    pub to: *mut i64,
    pub count: u64,
    /// Added to non-negative ids.
    pub offset: u32,
    /// Not zero if those at `from` have 32 bits, not 64.
    pub is_narrow: u32,
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
