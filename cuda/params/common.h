// Kernel parameters. Generated from src/backend/cuda/params/common.rs by
// NCCL_EP_UPDATE_HEADER=1 cargo test --test kernel_params; do not edit.
// clang-format off

#pragma once

#include <cstddef>
#include <cstdint>

namespace nccl_ep {

/// Most ranks of a group: the GPUs of the largest NVLink domain.
constexpr static const size_t MAX_PEERS = 72;

/// Bytes that a rank sends to each peer in the self test.
constexpr static const size_t SELFTEST_SLOT_BYTES = 4096;

/// Threads per block of `peer_selftest`; its grid has one block per rank.
constexpr static const uint32_t SELFTEST_THREADS = 128;

/// Threads of `replay_mark`: one warp, of which one thread works.
constexpr static const uint32_t REPLAY_MARK_THREADS = 32;

/// Threads of `handle_header`: one warp.
constexpr static const uint32_t HANDLE_HEADER_THREADS = 32;

/// Words of the header of a handle's block.
constexpr static const size_t HANDLE_HEADER_WORDS = 20;

/// The first of them, which an operation compares.
constexpr static const uint32_t HANDLE_HEADER_COMPARED = 16;

/// The word of the number of rows.
constexpr static const size_t HANDLE_HEADER_ROWS = 18;

/// `SelftestResult::outcome` of a block that did not end.
constexpr static const uint32_t SELFTEST_MISSING = 0;

/// `SelftestResult::outcome`: everything arrived as it was sent.
constexpr static const uint32_t SELFTEST_PASSED = 1;

/// `SelftestResult::outcome`: the flag arrived, but not the data that it announced.
constexpr static const uint32_t SELFTEST_MISMATCH = 2;

/// `SelftestResult::outcome`: no flag within the deadline.
constexpr static const uint32_t SELFTEST_TIMEOUT = 3;

/// Instead of the own node's place among the sums of all nodes: it comes first, not rounded, and the others follow by
/// distance. With a place, all sums are rounded and added by ascending node.
constexpr static const uint32_t OWN_NODE_FIRST = 4294967295;

/// Where the scales of rows that are sent come from.
enum Scales : uint32_t {
    /// Rows have them already.
    SCALES_FORWARDED = 0,
    /// A cast stores them as float32.
    SCALES_FLOAT = 1,
    /// A cast stores them as float32, rounded up to a power of two.
    SCALES_POWER_OF_TWO = 2,
    /// A cast stores the exponent byte of that power.
    SCALES_EXPONENT = 3,
};

/// What waits on the device, `FaultReport::op`.
enum KernelOp : uint32_t {
    /// The self test.
    KERNEL_OP_PEER_SELFTEST = 1,
    /// An LL dispatch.
    KERNEL_OP_LL_DISPATCH = 2,
    /// An LL combine.
    KERNEL_OP_LL_COMBINE = 3,
    /// The creation of an HT handle.
    KERNEL_OP_HT_ROUTE = 4,
    /// An HT dispatch.
    KERNEL_OP_HT_DISPATCH = 5,
    /// An HT combine.
    KERNEL_OP_HT_COMBINE = 6,
};

/// What a fault report says, `FaultReport::state`.
enum Fault : uint32_t {
    /// Nothing has failed.
    FAULT_NONE = 0,
    /// A wait reached its deadline. All other fields are valid.
    FAULT_TIMEOUT = 1,
    /// A rank runs another operation than this one. All other fields are valid.
    FAULT_DIFFERS = 2,
    /// As `Differs`, but in HT.
    FAULT_SHAPE_DIFFERS = 3,
    /// A wait ended because a rank, named by `got`, reported its own failure.
    FAULT_PEER_FAILED = 4,
    /// Fewer output rows for tokens, `got`, than rows received, `expected`.
    FAULT_TOKEN_ROWS = 5,
    /// Fewer output rows for ids and weights, `got`, than rows received, `expected`.
    FAULT_ROUTING_ROWS = 6,
    /// Fewer input rows, `got`, than rows to return, `expected`.
    FAULT_INPUT_ROWS = 7,
    /// An operation on an HT handle with the number of rows `got`, which has `HT_DISAGREED`; `expected` are this rank's
    /// ids per token.
    FAULT_DISAGREED = 8,
    /// A rank has staged an operation that is whole here, or the other way round.
    FAULT_STAGED_DIFFERS = 9,
    /// A rank on another node uses handle `got` where this one uses `expected`.
    FAULT_HANDLE_DIFFERS = 10,
    /// As `PeerFailed`, but `got` is on another node and nothing was waited for.
    FAULT_RAIL_PEER_FAILED = 11,
    /// Fewer output rows for scales, `got`, than rows received, `expected`.
    FAULT_SCALE_ROWS = 12,
    /// An expert of this rank, named by `what`, gets more rows than it has slots, as rank `peer` sends `got`, more than
    /// its share of `expected`.
    FAULT_EXPERT_ROWS = 13,
    /// Word `what` of the header of the handle's memory, which a caller gave, is `got` instead of `expected`.
    FAULT_FOREIGN_STATE = 14,
};

/// What is waited for, `FaultReport::what`.
enum Wait : uint32_t {
    /// Data of the self test.
    WAIT_PATTERN = 0,
    /// How many rows a rank sends for each expert.
    WAIT_COUNTS = 1,
    /// Where a token's rows go.
    WAIT_ENTRY = 2,
    /// A row.
    WAIT_ROW = 3,
    /// The weights of a token.
    WAIT_WEIGHT = 4,
    /// That a rank has begun the operation, and which.
    WAIT_BEGIN = 5,
    /// That a rank has let go of the last staged operation.
    WAIT_ACK = 6,
    /// A credit: a free slot for a row of a pair's sequence.
    WAIT_CREDIT = 7,
    /// A row of a pair's sequence.
    WAIT_STREAMED_ROW = 8,
};

/// The first failure of a group. Lives in host memory that the device maps; the kernel writes `state`
/// last.
struct FaultReport {
    /// A `Fault`.
    uint32_t state;
    /// Which kernel waited, a `KernelOp`.
    uint32_t op;
    /// What was waited for, a `Wait`.
    uint32_t what;
    /// The rank that was waited for.
    uint32_t peer;
    /// The epoch that should have arrived; `Differs` and `ShapeDiffers`: our fingerprint.
    uint32_t expected;
    /// The epoch that had arrived; `Differs` and `ShapeDiffers`: the peer's fingerprint.
    uint32_t got;
    /// How long the wait had lasted then.
    uint32_t waited_ms;
    /// `Differs` and `ShapeDiffers`: the scales of our rows, as a scales word.
    uint32_t expected_scales;
    /// `Differs` and `ShapeDiffers`: the scales of the peer's rows.
    uint32_t got_scales;
};

/// Where scales lie. Distances are in scales.
struct ScaleView {
    /// The first scale.
    uint8_t *data;
    /// From an expert to the next.
    uint64_t expert;
    /// From a row to the next.
    uint64_t row;
    /// From a scale of a row to the next.
    uint64_t column;
};

/// Rows with scales, as a dispatch sends and stores them. On the way a row's scales are dense and filled up with
/// zeros to a multiple of 16 bytes.
struct ScaledRows {
    /// Bytes of a row without its scales, a multiple of 16.
    uint32_t payload_bytes;
    /// Bytes of a row's scales, without the zeros behind them.
    uint32_t scale_bytes;
    /// Bytes of a scale: 1, 2 or 4.
    uint32_t scale_width;
    /// Where the scales of the rows that are sent come from.
    Scales form;
    /// Elements that share a scale of a cast: 128 or 32.
    uint32_t block;
    /// LL: bytes of scales in each chunk of a row but the last ones, a multiple of 16.
    uint32_t scale_chunk_bytes;
    /// If they are forwarded, the scales of the rows that are sent; they are of one expert.
    ScaleView from;
    /// Receives the scales.
    ScaleView out;
};

/// What every wait on the device needs.
struct WaitParams {
    /// How long one wait may last.
    uint64_t timeout_ns;
    /// Where the first failure of the group is described.
    FaultReport *report;
    /// Not zero once some wait of the group has failed here, so that others give up. Beside what kernels
    /// load first, as they want to know this first, too.
    uint32_t *failed;
    /// In this rank's window: 1 + a peer that has reported its own failure, or zero.
    uint32_t *peer_failed;
    /// Who waits.
    KernelOp op;
};

/// The windows of all ranks, as this rank maps them.
struct PeerTable {
    /// First byte of each rank's window; this rank's own included.
    uint8_t *window[MAX_PEERS];
    /// Number of ranks.
    uint32_t ranks;
    /// This rank.
    uint32_t rank;
};

/// Where a rank of the group is, as the ranks of one node see it.
struct RankOnNode {
    /// Its local index, or -1 on another node.
    int32_t peer;
    /// The local index of its forwarder here.
    uint32_t forwarder;
    /// Its number among the ranks that its forwarder forwards for, which is number 0 itself.
    uint32_t number;
    /// How many nodes before this one its node is, around the ring.
    uint32_t distance;
};

/// Begins every message between nodes: nothing else tells to which operation the rows behind it belong, as messages of
/// different ones may have the same sizes. A handshake is a header alone.
struct MessageHeader {
    /// The handle; a group numbers them from 1 in the order of their creation.
    uint32_t handle;
    /// Tokens of the rank that sends it: in LL, and in a handshake.
    uint32_t tokens;
    /// The operation's fingerprint; in a handshake the verdict: ids per token, or why the rank refuses.
    uint32_t fingerprint;
    /// LL: the operation's channel.
    uint32_t channel;
    /// What ranks must agree on in the scales of rows; 0 without.
    uint32_t scales_word;
    /// The operation's, which kernels fill in, never 0: an exchange that ends without a message leaves an earlier one.
    /// LL has those of the channel. In a handshake 0.
    uint32_t epoch;
    /// HT: which pass of the operation.
    uint32_t pass;
    /// HT: not zero if the rank knew of a failure of the group; then what follows is not what it should be.
    uint32_t failed;
};

/// What one rank found out about one peer.
struct SelftestResult {
    /// `SELFTEST_...`.
    uint32_t outcome;
    /// Threads that saw a wrong value.
    uint32_t wrong_threads;
};

/// Parameters of `replay_mark`.
struct ReplayMarkParams {
    /// In host memory that the device maps: when an operation in a graph began, zero while it is not under way.
    uint64_t *place;
    /// Not zero if the operation begins, zero if it ends.
    uint32_t begins;
};

/// Parameters of `handle_header`.
struct HandleHeaderParams {
    /// Where the ranks' windows are.
    PeerTable peers;
    /// The report.
    WaitParams wait;
    /// The header, in a caller's memory.
    uint32_t *header;
    /// What it says.
    uint32_t words[HANDLE_HEADER_WORDS];
    /// Not zero if it is written, zero if it is compared.
    uint32_t writes;
    /// If it is written, its number of rows, or NULL.
    const uint32_t *rows;
};

/// Parameters of `peer_selftest`.
struct PeerSelftestParams {
    /// Where the ranks' windows are.
    PeerTable peers;
    /// Deadline and report.
    WaitParams wait;
    /// Offset in a window: one u32 arrival flag per source rank.
    uint64_t flags_offset;
    /// Offset in a window: one slot of `SELFTEST_SLOT_BYTES` per source rank.
    uint64_t slots_offset;
    /// One result per rank, in host memory that the device maps.
    SelftestResult *results;
    /// The value of a flag that announces this run's data.
    uint32_t epoch;
};

}  // namespace nccl_ep

static_assert(sizeof(nccl_ep::FaultReport) == 36, "FaultReport as in Rust");
static_assert(sizeof(nccl_ep::ScaleView) == 32, "ScaleView as in Rust");
static_assert(sizeof(nccl_ep::ScaledRows) == 88, "ScaledRows as in Rust");
static_assert(sizeof(nccl_ep::WaitParams) == 40, "WaitParams as in Rust");
static_assert(sizeof(nccl_ep::PeerTable) == 584, "PeerTable as in Rust");
static_assert(sizeof(nccl_ep::RankOnNode) == 16, "RankOnNode as in Rust");
static_assert(sizeof(nccl_ep::MessageHeader) == 32, "MessageHeader as in Rust");
static_assert(sizeof(nccl_ep::SelftestResult) == 8, "SelftestResult as in Rust");
static_assert(sizeof(nccl_ep::ReplayMarkParams) == 16, "ReplayMarkParams as in Rust");
static_assert(sizeof(nccl_ep::HandleHeaderParams) == 728, "HandleHeaderParams as in Rust");
static_assert(sizeof(nccl_ep::PeerSelftestParams) == 656, "PeerSelftestParams as in Rust");
