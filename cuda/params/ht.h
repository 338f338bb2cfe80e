// Kernel parameters, explained in src/backend/cuda/params/ht.rs, from which
// NCCL_EP_UPDATE_HEADER=1 cargo test --test kernel_params makes this; do not edit.
// clang-format off

#pragma once

#include <cstddef>
#include <cstdint>
#include "common.h"

namespace nccl_ep {

constexpr static const uint32_t HT_MAX_TOP_K = 32;
constexpr static const uint32_t HT_ROUTE_THREADS = 512;
constexpr static const uint32_t HT_DISPATCH_THREADS = 768;
constexpr static const uint32_t HT_CAST_THREADS = 512;
constexpr static const uint32_t HT_COMBINE_THREADS = 512;
constexpr static const uint32_t HT_STATIC_SHARED_BYTES = 3584;
constexpr static const uint32_t HT_ZERO_BYTES = 4096;
constexpr static const uint32_t HT_STAMP_BYTES = 16;
constexpr static const uint32_t HT_FINGERPRINT_PAYLOAD_BITS = 17;
constexpr static const uint32_t HT_FINGERPRINT_SCALED = 67108864;
constexpr static const uint32_t HT_FINGERPRINT_COMBINE = 2147483648;
constexpr static const uint32_t HT_COUNTS_BESIDE_EXPERTS = 2;
constexpr static const uint32_t HT_VERDICT_CODE_SHIFT = 8;
constexpr static const uint32_t HT_DISAGREED = 2147483648;
constexpr static const uint32_t HT_DISAGREED_TOP_K = 1073741824;
constexpr static const uint32_t HT_DISAGREED_RANK_SHIFT = 16;
constexpr static const uint32_t HT_VERDICT_MISSING = 4294967294;

enum HtCast : uint32_t {
    HT_CAST_BF16 = 0,
    HT_CAST_F16 = 1,
    HT_CAST_F32 = 2,
};

struct HtLayout {
    uint64_t counts;
    uint64_t arrivals;
    uint64_t credits;
    uint64_t slots;
    uint64_t unit_bytes;
    uint32_t units;
    uint32_t local_experts;
};

struct HtEntry {
    int32_t expert;
    uint32_t index;
};

struct HtHandleMemory {
    HtEntry *entries;
    uint32_t *begins;
    uint32_t *departures;
    int32_t *counts;
    uint32_t tokens;
    uint32_t top_k;
};

struct HtCount {
    uint32_t value;
    uint32_t epoch;
};

struct HtRouteParams {
    PeerTable peers;
    WaitParams wait;
    HtLayout layout;
    HtHandleMemory handle;
    const int64_t *topk_idx;
    int32_t *counter;
    HtCount *received;
    uint32_t *tally;
    uint64_t *own_counts;
    uint32_t max_tokens;
    uint32_t epoch;
    uint32_t bank;
    uint32_t block_tokens;
    uint32_t verdict;
};

struct HtSequences {
    uint32_t sent[MAX_PEERS];
    uint32_t received[MAX_PEERS];
    uint32_t operations;
    uint32_t blocks_started;
    uint32_t epoch;
};

struct HtShape {
    uint32_t fingerprint;
    uint32_t row_bytes;
    uint32_t row_units;
    uint32_t chunk_bytes;
    uint32_t tail_bytes;
    uint32_t warp_bytes;
    uint32_t copy_warps;
    uint32_t send_blocks;
};

struct HtCommon {
    PeerTable peers;
    WaitParams wait;
    HtLayout layout;
    HtHandleMemory handle;
    HtSequences *sequences;
    HtShape shape;
};

struct HtDispatchParams {
    HtCommon common;
    const uint8_t *tokens;
    const int64_t *topk_idx;
    const float *weights;
    uint8_t *out;
    int64_t *out_idx;
    float *out_weights;
    int32_t *counter;
    uint32_t out_rows;
    uint32_t routing_rows;
};

struct HtScaledRows {
    ScaledRows rows;
    uint32_t word;
    uint32_t out_rows;
    uint32_t token_bytes;
    uint32_t cast_chunk;
    HtCast cast_from;
};

struct HtScaledDispatchParams {
    HtDispatchParams rows;
    HtScaledRows scaled;
};

struct HtCombineParams {
    HtCommon common;
    const uint8_t *rows;
    const float *gradients;
    uint8_t *out;
    float *out_gradients;
    uint32_t in_rows;
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
