// Kernel parameters. Generated from src/backend/cuda/params/ht.rs by
// NCCL_EP_UPDATE_HEADER=1 cargo test --test kernel_params; do not edit.
// clang-format off

#pragma once

#include <cstddef>
#include <cstdint>
#include "common.h"

namespace nccl_ep {

/// Most experts that a token can name in HT: one lane of a warp for each.
constexpr static const uint32_t HT_MAX_TOP_K = 32;

/// Threads of a block of `ht_route`.
constexpr static const uint32_t HT_ROUTE_THREADS = 512;

/// Most threads of a block of `ht_dispatch`, in whole warps.
constexpr static const uint32_t HT_DISPATCH_THREADS = 768;

/// Most threads of a block of `ht_dispatch_cast`, in whole warps: as many as have room for the rows that they cast,
/// so that each may have more registers.
constexpr static const uint32_t HT_CAST_THREADS = 512;

/// Most threads of a block of `ht_combine_bf16` and its siblings, in whole warps.
constexpr static const uint32_t HT_COMBINE_THREADS = 512;

/// Most static shared memory of a block of `ht_dispatch` or `ht_combine_bf16` and their siblings; they have all else of the
/// device's for rows.
constexpr static const uint32_t HT_STATIC_SHARED_BYTES = 3584;

/// Zeros that a dispatch block keeps in shared memory, in front of the warps' parts.
constexpr static const uint32_t HT_ZERO_BYTES = 4096;

/// Bytes between a row that travels and its scales: their word, then zeros.
constexpr static const uint32_t HT_STAMP_BYTES = 16;

/// Lowest bits of a fingerprint: a row without its scales, in 16 bytes.
constexpr static const uint32_t HT_FINGERPRINT_PAYLOAD_BITS = 17;

/// Bit of a dispatch's fingerprint: rows have scales.
constexpr static const uint32_t HT_FINGERPRINT_SCALED = 67108864;

/// Bit of a fingerprint: it is a combine's.
constexpr static const uint32_t HT_FINGERPRINT_COMBINE = 2147483648;

/// Packets by which a rank notifies each other of its part of a new handle, besides the one for each local
/// expert: how many rows it sends, then `HtRouteParams::verdict`.
constexpr static const uint32_t HT_COUNTS_BESIDE_EXPERTS = 2;

/// Lowest bit, in `HtRouteParams::verdict`, of the `ncclResult_t` with which a rank refuses its part; below it
/// are its ids per token.
constexpr static const uint32_t HT_VERDICT_CODE_SHIFT = 8;

/// Bit of a handle's number of rows that marks it invalid: the ranks do not agree, and nothing runs on the
/// handle. The other bits say why: which rank, and its verdict.
constexpr static const uint32_t HT_DISAGREED = 2147483648;

/// Bit of the mark: that rank has other ids per token; else it refused.
constexpr static const uint32_t HT_DISAGREED_TOP_K = 1073741824;

/// Lowest bit of the rank in the mark.
constexpr static const uint32_t HT_DISAGREED_RANK_SHIFT = 16;

/// Instead of the mark: no verdict of some rank came in time. No rank has this number.
constexpr static const uint32_t HT_VERDICT_MISSING = 4294967294;

/// The type of rows that a dispatch casts.
enum HtCast : uint32_t {
    /// bfloat16.
    HT_CAST_BF16 = 0,
    /// float16.
    HT_CAST_F16 = 1,
    /// float32.
    HT_CAST_F32 = 2,
};

/// Offsets in every rank's window; equal on all ranks.
struct HtLayout {
    /// u64 packets `[2][ranks][local_experts + HT_COUNTS_BESIDE_EXPERTS]`, by `HtRouteParams::bank`: from
    /// each other rank.
    uint64_t counts;
    /// u64 packets `[ranks][units]`: which unit of the source's sequence is there.
    uint64_t arrivals;
    /// u32 `[ranks][units]`: credits, how far the destination has emptied what this rank fills.
    uint64_t credits;
    /// `[ranks][units]` units, by source. Two of them are a slot.
    uint64_t slots;
    /// Bytes of a unit.
    uint64_t unit_bytes;
    /// Units of each ordered pair of ranks; a power of two.
    uint32_t units;
    /// Experts per rank.
    uint32_t local_experts;
};

/// Where one of a token's experts is.
struct HtEntry {
    /// Its global id; negative past the last one.
    int32_t expert;
    /// The row's index among those that this operation sends from the token's rank to this expert's.
    uint32_t index;
};

/// Device memory of an HT handle.
struct HtHandleMemory {
    /// `[tokens][top_k]`: each token's experts, ascending, without repetition.
    HtEntry *entries;
    /// `[ranks + 1]`: this rank's first row of each source, then the number of rows, or
    /// `HT_DISAGREED` and why.
    uint32_t *begins;
    /// `[ranks]`: rows that go from this rank to each, itself included.
    uint32_t *departures;
    /// `[local_experts]`: received rows per expert.
    int32_t *counts;
    /// This rank's tokens.
    uint32_t tokens;
    /// Ids per token.
    uint32_t top_k;
};

/// A count for the host, in host memory that the device maps.
struct HtCount {
    /// The count.
    uint32_t value;
    /// The handle's epoch, once `value` is valid.
    uint32_t epoch;
};

/// Parameters of `ht_route`.
struct HtRouteParams {
    /// Where the ranks' windows are.
    PeerTable peers;
    /// Deadline and report.
    WaitParams wait;
    /// Where things lie in them.
    HtLayout layout;
    /// What is to be filled.
    HtHandleMemory handle;
    /// `[tokens][top_k]`.
    const int64_t *topk_idx;
    /// `[local_experts]`, or NULL.
    int32_t *counter;
    /// The rows that this rank receives, or `HT_DISAGREED` and why.
    HtCount *received;
    /// `[1 + ranks + ranks * local_experts]`, zero except while the kernel runs: blocks that have counted,
    /// what they have counted for each rank, and for each expert.
    uint32_t *tally;
    /// u64 packets `[2][local_experts + HT_COUNTS_BESIDE_EXPERTS]`, by `bank`: from this rank to itself. Not
    /// in the window, where peers could change it.
    uint64_t *own_counts;
    /// Most tokens of a rank: the bound for the numbers that peers send.
    uint32_t max_tokens;
    /// Handles of the group so far, this one included.
    uint32_t epoch;
    /// Which of the two banks of counts: they alternate from kernel to kernel.
    uint32_t bank;
    /// Tokens that one block numbers.
    uint32_t block_tokens;
    /// This rank's verdict for all: its ids per token, or why it refuses. A rank that refuses has no tokens,
    /// no memory and no counter.
    uint32_t verdict;
};

/// Device memory of a group, zero at first: how far the sequences of rows have come.
struct HtSequences {
    /// Units sent to each rank by all operations so far.
    uint32_t sent[MAX_PEERS];
    /// Units received from each rank.
    uint32_t received[MAX_PEERS];
    /// Operations so far.
    uint32_t operations;
    /// Blocks that have read all this.
    uint32_t blocks_started;
    /// Of the last operation that was sent to other nodes.
    uint32_t epoch;
};

/// How rows travel in an operation, and which part of the grid does what.
struct HtShape {
    /// What the ranks must agree on (`ht/fingerprint.rs`); it travels with every row.
    uint32_t fingerprint;
    /// Bytes of a row as it travels, with its scales.
    uint32_t row_bytes;
    /// Units that a row takes: 1 or 2. The last row of an operation may take the second one, too.
    uint32_t row_units;
    /// Bytes of the chunks in which a row passes through shared memory.
    uint32_t chunk_bytes;
    /// Bytes that follow a row in its slot, a multiple of 16.
    uint32_t tail_bytes;
    /// Shared memory of a warp: a chunk, then tails; at its end its notify queue.
    uint32_t warp_bytes;
    /// Warps of a block that have such memory; at least one warp has none.
    uint32_t copy_warps;
    /// The first `send_blocks` of the grid send; the others receive.
    uint32_t send_blocks;
};

/// Parameters of both `ht_dispatch` and `ht_combine`.
struct HtCommon {
    /// Where the ranks' windows are.
    PeerTable peers;
    /// Deadline and report.
    WaitParams wait;
    /// Where things lie in them.
    HtLayout layout;
    /// The handle's memory.
    HtHandleMemory handle;
    /// The group's sequences.
    HtSequences *sequences;
    /// The shape of rows and of the grid.
    HtShape shape;
};

/// Parameters of `ht_dispatch`.
struct HtDispatchParams {
    /// Common to both kernels.
    HtCommon common;
    /// `[tokens]` rows.
    const uint8_t *tokens;
    /// `[tokens][top_k]`, or NULL: tokens only.
    const int64_t *topk_idx;
    /// `[tokens][top_k]`, or NULL.
    const float *weights;
    /// `[out_rows]` rows, or NULL.
    uint8_t *out;
    /// `[routing_rows][top_k]`: local ids, or NULL.
    int64_t *out_idx;
    /// `[routing_rows][top_k]`, or NULL.
    float *out_weights;
    /// `[local_experts]`, or NULL.
    int32_t *counter;
    /// Rows of `out`; the largest number where it is not wanted, since NULL may also be no rows.
    uint32_t out_rows;
    /// Rows of `out_idx` and `out_weights`, likewise.
    uint32_t routing_rows;
};

/// Rows with scales in a dispatch.
struct HtScaledRows {
    /// Their format, and where scales lie.
    ScaledRows rows;
    /// What ranks must agree on in the scales; not zero.
    uint32_t word;
    /// Rows of `rows.out`.
    uint32_t out_rows;
    /// Bytes from one of the caller's rows to the next.
    uint32_t token_bytes;
    /// Elements that are cast at a time, a multiple of 512; 0 if rows are forwarded.
    uint32_t cast_chunk;
    /// The type that is cast.
    HtCast cast_from;
};

/// Parameters of `ht_dispatch_scaled` and `ht_dispatch_cast`.
struct HtScaledDispatchParams {
    /// As without scales.
    HtDispatchParams rows;
    /// The scales.
    HtScaledRows scaled;
};

/// Parameters of `ht_combine_bf16` and its siblings.
struct HtCombineParams {
    /// Common to both kernels.
    HtCommon common;
    /// `[in_rows]` rows, in the order of dispatch.
    const uint8_t *rows;
    /// `[in_rows][columns]`, or NULL.
    const float *gradients;
    /// `[tokens]` rows.
    uint8_t *out;
    /// `[tokens][columns]`.
    float *out_gradients;
    /// Rows of `rows`.
    uint32_t in_rows;
    /// Columns of both gradients.
    uint32_t columns;
};

}  // namespace nccl_ep

static_assert(sizeof(nccl_ep::HtLayout) == 48, "HtLayout as in Rust");
static_assert(sizeof(nccl_ep::HtEntry) == 8, "HtEntry as in Rust");
static_assert(sizeof(nccl_ep::HtHandleMemory) == 40, "HtHandleMemory as in Rust");
static_assert(sizeof(nccl_ep::HtCount) == 8, "HtCount as in Rust");
static_assert(sizeof(nccl_ep::HtRouteParams) == 776, "HtRouteParams as in Rust");
static_assert(sizeof(nccl_ep::HtSequences) == 588, "HtSequences as in Rust");
static_assert(sizeof(nccl_ep::HtCommon) == 752, "HtCommon as in Rust");
static_assert(sizeof(nccl_ep::HtShape) == 32, "HtShape as in Rust");
static_assert(sizeof(nccl_ep::HtDispatchParams) == 816, "HtDispatchParams as in Rust");
static_assert(sizeof(nccl_ep::HtScaledRows) == 112, "HtScaledRows as in Rust");
static_assert(sizeof(nccl_ep::HtScaledDispatchParams) == 928, "HtScaledDispatchParams as in Rust");
static_assert(sizeof(nccl_ep::HtCombineParams) == 792, "HtCombineParams as in Rust");
