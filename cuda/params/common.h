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

/// `FaultReport::state` while nothing has failed.
constexpr static const uint32_t FAULT_NONE = 0;

/// `FaultReport::state`: a wait reached its deadline. All other fields are valid.
constexpr static const uint32_t FAULT_TIMEOUT = 1;

/// `FaultReport::state`: a rank runs another operation than this one. All other fields are valid.
constexpr static const uint32_t FAULT_DIFFERS = 2;

/// `FaultReport::state`: as `FAULT_DIFFERS`, but in HT, with `HtCommon::shape_word` as signatures.
constexpr static const uint32_t FAULT_SHAPE_DIFFERS = 3;

/// `FaultReport::state`: a wait ended because a rank, named by `got`, reported its own failure.
constexpr static const uint32_t FAULT_PEER_FAILED = 4;

/// `FaultReport::state`: fewer output rows for tokens, `got`, than rows received, `expected`.
constexpr static const uint32_t FAULT_TOKEN_ROWS = 5;

/// `FaultReport::state`: fewer output rows for ids and weights, `got`, than rows received, `expected`.
constexpr static const uint32_t FAULT_ROUTING_ROWS = 6;

/// `FaultReport::state`: fewer input rows, `got`, than rows to return, `expected`.
constexpr static const uint32_t FAULT_INPUT_ROWS = 7;

/// `FaultReport::state`: an operation on an HT handle with the number of rows `got`, which has
/// `HT_DISAGREED`; `expected` are this rank's ids per token.
constexpr static const uint32_t FAULT_DISAGREED = 8;

/// `FaultReport::state`: a rank has staged an operation that is whole here, or the other way round.
constexpr static const uint32_t FAULT_STAGED_DIFFERS = 9;

/// `FaultReport::state`: a rank on another node uses handle `got` where this one uses `expected`.
constexpr static const uint32_t FAULT_HANDLE_DIFFERS = 10;

/// `FaultReport::state`: as `FAULT_PEER_FAILED`, but `got` is on another node and nothing was waited for.
constexpr static const uint32_t FAULT_GATEWAY_FAILED = 11;

/// `FaultReport::state`: fewer output rows for scales, `got`, than rows received, `expected`.
constexpr static const uint32_t FAULT_SCALE_ROWS = 12;

/// `FaultReport::state`: an expert of this rank, named by `what`, gets more rows than it has slots, as rank `peer` sends
/// `got`, more than its share of `expected`.
constexpr static const uint32_t FAULT_EXPERT_ROWS = 13;

/// `FaultReport::op` of the self test.
constexpr static const uint32_t OP_PEER_SELFTEST = 1;

/// `FaultReport::op` of an LL dispatch.
constexpr static const uint32_t OP_LL_DISPATCH = 2;

/// `FaultReport::op` of an LL combine.
constexpr static const uint32_t OP_LL_COMBINE = 3;

/// `FaultReport::op` of the creation of an HT handle.
constexpr static const uint32_t OP_HT_ROUTE = 4;

/// `FaultReport::op` of an HT dispatch.
constexpr static const uint32_t OP_HT_DISPATCH = 5;

/// `FaultReport::op` of an HT combine.
constexpr static const uint32_t OP_HT_COMBINE = 6;

/// `FaultReport::what`: data of the self test.
constexpr static const uint32_t WAIT_PATTERN = 0;

/// `FaultReport::what`: how many rows a rank sends for each expert.
constexpr static const uint32_t WAIT_COUNTS = 1;

/// `FaultReport::what`: where a token's rows go.
constexpr static const uint32_t WAIT_ENTRY = 2;

/// `FaultReport::what`: a row.
constexpr static const uint32_t WAIT_ROW = 3;

/// `FaultReport::what`: the weights of a token.
constexpr static const uint32_t WAIT_WEIGHT = 4;

/// `FaultReport::what`: that a rank has begun the operation, and which.
constexpr static const uint32_t WAIT_BEGIN = 5;

/// `FaultReport::what`: that a rank has let go of the last staged operation.
constexpr static const uint32_t WAIT_ACK = 6;

/// `FaultReport::what`: a credit: a free slot for a row of a pair's sequence.
constexpr static const uint32_t WAIT_CREDIT = 7;

/// `FaultReport::what`: a row of a pair's sequence.
constexpr static const uint32_t WAIT_STREAMED_ROW = 8;

/// `ScaledRows::form`: rows have their scales already.
constexpr static const uint32_t SCALES_FORWARDED = 0;

/// `ScaledRows::form`: a cast stores scales as float32.
constexpr static const uint32_t SCALES_FLOAT = 1;

/// `ScaledRows::form`: a cast stores scales as float32, rounded up to a power of two.
constexpr static const uint32_t SCALES_POWER_OF_TWO = 2;

/// `ScaledRows::form`: a cast stores the exponent byte of that power.
constexpr static const uint32_t SCALES_EXPONENT = 3;

/// The first failure of a group. Lives in host memory that the device maps; the kernel writes `state`
/// last.
struct FaultReport {
    /// `FAULT_...`.
    uint32_t state;
    /// Which kernel waited, `OP_...`.
    uint32_t op;
    /// What was waited for, `WAIT_...`.
    uint32_t what;
    /// The rank that was waited for.
    uint32_t peer;
    /// The epoch that should have arrived; `FAULT_DIFFERS`: our signature.
    uint32_t expected;
    /// The epoch that had arrived; `FAULT_DIFFERS`: the peer's signature.
    uint32_t got;
    /// How long the wait had lasted then.
    uint32_t waited_ms;
    /// `FAULT_DIFFERS` and `FAULT_SHAPE_DIFFERS`: the scales of our rows, as a scales word.
    uint32_t expected_scales;
    /// `FAULT_DIFFERS` and `FAULT_SHAPE_DIFFERS`: the scales of the peer's rows.
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
    /// `SCALES_...`: where the scales of the rows that are sent come from.
    uint32_t form;
    /// Elements that share a scale of a cast: 128 or 32.
    uint32_t block;
    /// LL: bytes of scales in each chunk of a row but the last ones, a multiple of 16.
    uint32_t scale_chunk_bytes;
    /// `SCALES_FORWARDED`: the scales of the rows that are sent; they are of one expert.
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
    /// Who waits, `OP_...`.
    uint32_t op;
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
static_assert(sizeof(nccl_ep::SelftestResult) == 8, "SelftestResult as in Rust");
static_assert(sizeof(nccl_ep::ReplayMarkParams) == 16, "ReplayMarkParams as in Rust");
static_assert(sizeof(nccl_ep::PeerSelftestParams) == 656, "PeerSelftestParams as in Rust");
