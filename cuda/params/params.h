// Kernel parameters. Generated from src/backend/cuda/params.rs by
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

/// `SelftestResult::outcome` of a block that did not end.
constexpr static const uint32_t SELFTEST_MISSING = 0;

/// `SelftestResult::outcome`: everything arrived as it was sent.
constexpr static const uint32_t SELFTEST_PASSED = 1;

/// `SelftestResult::outcome`: the flag arrived, but not the data that it announced.
constexpr static const uint32_t SELFTEST_MISMATCH = 2;

/// `SelftestResult::outcome`: no flag within the deadline.
constexpr static const uint32_t SELFTEST_TIMEOUT = 3;

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

/// `FaultReport::state`: a rank has staged an operation that is whole here, or the other way round.
constexpr static const uint32_t FAULT_STAGED_DIFFERS = 9;

/// `FaultReport::state`: an operation on an HT handle with the number of rows `got`, which has
/// `HT_DISAGREED`; `expected` are this rank's ids per token.
constexpr static const uint32_t FAULT_DISAGREED = 8;

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

/// Most experts that a token can name.
constexpr static const uint32_t LL_MAX_TOP_K = 32;

/// Packets by which a rank notifies each other, besides the one for each local expert.
constexpr static const uint32_t LL_COUNTS_BESIDE_EXPERTS = 2;

/// Channels of operations, each with its own epochs: one for whole operations, two for staged ones.
constexpr static const uint32_t LL_CHANNELS = 3;

/// The channel of whole operations; staged ones have the others.
constexpr static const uint32_t LL_WHOLE_CHANNEL = 0;

/// Banks: the channel of whole operations alternates between 0 and 1; staged channel c owns bank c + 1.
constexpr static const uint32_t LL_BANKS = 4;

/// Bit of `LlCommon::phases`.
constexpr static const uint32_t LL_PHASE_SEND = 1;

/// Bit of `LlCommon::phases`.
constexpr static const uint32_t LL_PHASE_RECEIVE = 2;

/// Bits of an entry packet for the entry's index among the rows that its source sends to the expert; those
/// above hold the local expert.
constexpr static const uint32_t LL_INDEX_BITS = 20;

/// Most threads of a dispatch block, in whole warps. A block that sends and notifies needs more warps
/// than it has routers (4).
constexpr static const uint32_t LL_DISPATCH_THREADS = 512;

/// Most threads of a combine block, in whole warps.
constexpr static const uint32_t LL_COMBINE_THREADS = 384;

/// Most 16-byte accesses per lane in a chunk of a row, so a chunk has at most 32 times as many.
constexpr static const uint32_t LL_CHUNK_VECS = 4;

/// A word of a bank's row that has not arrived; all are so at first.
constexpr static const uint32_t LL_MARK = 4293394323;

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

/// Offsets in every rank's window; equal on all ranks.
struct LlLayout {
    /// u64 packets `[LL_CHANNELS][ranks]`.
    uint64_t acks;
    /// `LL_BANKS` times `bank_bytes`.
    uint64_t banks;
    /// Size of a bank; its rows are at its start.
    uint64_t bank_bytes;
    /// Offset in a bank: u64 packets `[rows][chunks]`.
    uint64_t flags;
    /// Offset in a bank: u64 packets `[ranks][local_experts + LL_COUNTS_BESIDE_EXPERTS]`.
    uint64_t counts;
    /// Offset in a bank: u64 packets `[ranks][max_tokens][LL_MAX_TOP_K]`.
    uint64_t entries;
};

/// The sizes of an LL operation.
struct LlShape {
    /// Experts per rank.
    uint32_t local_experts;
    /// Bound of tokens per rank.
    uint32_t max_tokens;
    /// This rank's tokens.
    uint32_t tokens;
    /// Ids per token.
    uint32_t top_k;
    /// Bytes per row.
    uint32_t row_bytes;
    /// A row travels in `chunks` chunks of `chunk_bytes` (the last may be shorter), one warp each.
    uint32_t chunk_bytes;
    /// Chunks per row.
    uint32_t chunks;
};

/// Device memory of an LL handle: what dispatch leaves for combine.
struct LlHandleMemory {
    /// `[max_tokens][top_k]`: the expert of each of this rank's entries, negative if it names none.
    int32_t *expert_of;
    /// `[ranks][max_tokens][top_k]`: output row of each entry that came here, negative if none.
    int32_t *row_of;
    /// `[ranks]`: tokens of each rank.
    uint32_t *tokens_of;
};

/// Device memory of a group, one per channel, zero at first.
struct LlChannelState {
    /// The last operation that was sent.
    uint32_t epoch;
    /// Blocks that have read `epoch`.
    uint32_t blocks_started;
    /// Blocks that have received everything.
    uint32_t blocks_finished;
    /// The last operation that a receive phase has ended; staged channels only.
    uint32_t received;
};

/// Parameters of both LL kernels.
struct LlCommon {
    /// Where the ranks' windows are.
    PeerTable peers;
    /// Deadline and report.
    WaitParams wait;
    /// Where things lie in them.
    LlLayout layout;
    /// Sizes.
    LlShape shape;
    /// The handle's memory.
    LlHandleMemory handle;
    /// The channel's state.
    LlChannelState *channel_state;
    /// Which channel.
    uint32_t channel;
    /// `LL_PHASE_...`.
    uint32_t phases;
    /// What all ranks must agree on in an operation; opaque to the kernels.
    uint32_t signature;
    /// The first `send_blocks` of the grid send rows ...
    uint32_t send_blocks;
    /// ... and the last `receive_blocks` do all else; they may overlap and leave none out.
    uint32_t receive_blocks;
};

/// Parameters of `ll_dispatch`.
struct LlDispatchParams {
    /// Common to both kernels.
    LlCommon common;
    /// `[tokens]` rows.
    const uint8_t *tokens;
    /// `[tokens][top_k]`.
    const int64_t *topk_idx;
    /// `[local_experts][ranks * max_tokens]` rows; NULL to receive and throw away.
    uint8_t *out;
    /// `[local_experts]`, or NULL.
    int32_t *counter;
    /// The first `notify_blocks` of the receiving blocks notify the peers of what comes.
    uint32_t notify_blocks;
};

/// Parameters of `ll_combine_bf16` and its siblings.
struct LlCombineParams {
    /// Common to both kernels.
    LlCommon common;
    /// `[local_experts][ranks * max_tokens]` rows.
    const uint8_t *rows;
    /// `[tokens][top_k]`: ids that name no expert any more are masked.
    const int64_t *topk_idx;
    /// `[tokens][top_k]`; NULL, as `out`, to receive and throw away.
    const float *weights;
    /// `[tokens]` rows.
    uint8_t *out;
    /// Not zero: every entry's row comes home, summed in the order of k.
    uint32_t exact;
};

}  // namespace nccl_ep

static_assert(sizeof(nccl_ep::FaultReport) == 28, "FaultReport as in Rust");
static_assert(sizeof(nccl_ep::WaitParams) == 40, "WaitParams as in Rust");
static_assert(sizeof(nccl_ep::PeerTable) == 584, "PeerTable as in Rust");
static_assert(sizeof(nccl_ep::SelftestResult) == 8, "SelftestResult as in Rust");
static_assert(sizeof(nccl_ep::PeerSelftestParams) == 656, "PeerSelftestParams as in Rust");
static_assert(sizeof(nccl_ep::LlLayout) == 48, "LlLayout as in Rust");
static_assert(sizeof(nccl_ep::LlShape) == 28, "LlShape as in Rust");
static_assert(sizeof(nccl_ep::LlHandleMemory) == 24, "LlHandleMemory as in Rust");
static_assert(sizeof(nccl_ep::LlChannelState) == 16, "LlChannelState as in Rust");
static_assert(sizeof(nccl_ep::LlCommon) == 760, "LlCommon as in Rust");
static_assert(sizeof(nccl_ep::LlDispatchParams) == 800, "LlDispatchParams as in Rust");
static_assert(sizeof(nccl_ep::LlCombineParams) == 800, "LlCombineParams as in Rust");
