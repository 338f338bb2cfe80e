// Kernel parameters, explained in src/backend/cuda/params/ll.rs, from which
// NCCL_EP_UPDATE_HEADER=1 cargo test --test kernel_params makes this; do not edit.
// clang-format off

#pragma once

#include <cstddef>
#include <cstdint>
#include "common.h"

namespace nccl_ep {

constexpr static const uint32_t LL_MAX_TOP_K = 32;
constexpr static const uint32_t LL_COUNTS_BESIDE_EXPERTS = 3;
constexpr static const uint32_t LL_CHANNELS = 3;
constexpr static const uint32_t LL_WHOLE_CHANNEL = 0;
constexpr static const uint32_t LL_BANKS = 4;
constexpr static const size_t LL_MAX_RANKS = 1024;
constexpr static const uint32_t LL_PACK_THREADS = 512;
constexpr static const uint32_t LL_GATES_THREADS = 128;
constexpr static const uint32_t LL_INDEX_BITS = 20;
constexpr static const uint32_t LL_DISPATCH_THREADS = 512;
constexpr static const uint32_t LL_PLAIN_DISPATCH_THREADS = 1024;
constexpr static const uint32_t LL_STATIC_SHARED_BYTES = 1024;
constexpr static const uint32_t LL_COMBINE_THREADS = 768;
constexpr static const uint32_t LL_COMBINE_MANY_THREADS = 384;
constexpr static const uint32_t LL_SCALED_CHUNK_VECS = 4;
constexpr static const uint32_t LL_MARK = 4293394323;

enum LlPhase : uint32_t {
    LL_PHASE_SEND = 1,
    LL_PHASE_RECEIVE = 2,
    LL_PHASE_SEND_RECEIVE = 3,
    LL_PHASE_RELAY = 4,
    LL_PHASE_SEND_RELAY = 5,
    LL_PHASE_ALL = 7,
};

struct LlLayout {
    uint64_t acks;
    uint64_t banks;
    uint64_t bank_bytes;
    uint64_t flags;
    uint64_t counts;
    uint64_t entries;
};

struct LlShape {
    uint32_t local_experts;
    uint32_t max_tokens;
    uint32_t tokens;
    uint32_t top_k;
    uint32_t row_bytes;
    uint32_t slot_bytes;
    uint32_t chunk_bytes;
    uint32_t chunks;
    uint32_t ranks_reciprocal;
    uint32_t local_experts_reciprocal;
    uint32_t top_k_reciprocal;
    uint32_t chunks_reciprocal;
};

struct LlHandleMemory {
    int32_t *expert_of;
    int32_t *row_of;
    uint32_t *tokens_of;
};

struct LlChannelState {
    uint32_t epoch;
    uint32_t blocks_started;
    uint32_t blocks_relayed;
    uint32_t blocks_finished;
    uint32_t received;
};

struct LlCommon {
    PeerTable peers;
    WaitParams wait;
    LlLayout layout;
    LlShape shape;
    LlHandleMemory handle;
    LlChannelState *channel_state;
    uint32_t channel;
    LlPhase phases;
    uint32_t fingerprint;
    uint32_t scales_word;
    uint32_t send_blocks;
    uint32_t receive_blocks;
};

struct LlDispatchParams {
    LlCommon common;
    const uint8_t *tokens;
    const int64_t *topk_idx;
    uint8_t *out;
    int32_t *counter;
    uint32_t notify_blocks;
};

struct LlCombineParams {
    LlCommon common;
    const uint8_t *rows;
    const int64_t *topk_idx;
    const float *weights;
    uint8_t *out;
};

struct LlNodes {
    const RankOnNode *of_rank;
    const uint32_t *rank_of_peer;
    const uint32_t *rank_of_source;
    const uint32_t *rail_peers;
    uint8_t *rows;
    const uint8_t *weights;
    const uint8_t *returned;
    uint64_t rows_stride;
    uint64_t weights_stride;
    uint32_t ranks;
    uint32_t rank;
    uint32_t sources;
    uint32_t most_tokens;
    uint32_t handle;
    uint32_t other_nodes;
    uint32_t own_place;
};

struct LlDispatchNodesParams {
    LlDispatchParams dispatch;
    LlNodes nodes;
};

struct LlScaledDispatchParams {
    LlDispatchParams dispatch;
    ScaledRows rows;
};

struct LlScaledDispatchNodesParams {
    LlDispatchParams dispatch;
    LlNodes nodes;
    ScaledRows rows;
};

struct LlBeside {
    const float *weights;
    int64_t *out_ids;
    float *out_weights;
};

struct LlRankDispatchParams {
    LlDispatchParams dispatch;
    LlBeside beside;
};

struct LlRankScaledDispatchParams {
    LlRankDispatchParams dispatch;
    ScaledRows rows;
};

struct LlRankDispatchNodesParams {
    LlRankDispatchParams dispatch;
    LlNodes nodes;
};

struct LlRankScaledDispatchNodesParams {
    LlRankDispatchParams dispatch;
    LlNodes nodes;
    ScaledRows rows;
};

struct LlRankPackParams {
    const float *weights;
    float *to;
    uint64_t num_weights;
};

struct LlPackParams {
    MessageHeader head;
    const LlChannelState *channel_state;
    const uint8_t *rows;
    const int64_t *ids;
    uint8_t *message;
    uint64_t row_bytes;
    uint64_t num_ids;
};

struct LlScaledPackParams {
    LlPackParams pack;
    ScaledRows rows;
    LlShape shape;
};

struct LlCombineNodesParams {
    LlCombineParams combine;
    LlNodes nodes;
};

struct LlGatesParams {
    LlCombineNodesParams combine;
    uint8_t *message;
};

}  // namespace nccl_ep

static_assert(sizeof(nccl_ep::LlLayout) == 48, "LlLayout as in Rust");
static_assert(sizeof(nccl_ep::LlShape) == 48, "LlShape as in Rust");
static_assert(sizeof(nccl_ep::LlHandleMemory) == 24, "LlHandleMemory as in Rust");
static_assert(sizeof(nccl_ep::LlChannelState) == 20, "LlChannelState as in Rust");
static_assert(sizeof(nccl_ep::LlCommon) == 776, "LlCommon as in Rust");
static_assert(sizeof(nccl_ep::LlDispatchParams) == 816, "LlDispatchParams as in Rust");
static_assert(sizeof(nccl_ep::LlCombineParams) == 808, "LlCombineParams as in Rust");
static_assert(sizeof(nccl_ep::LlNodes) == 104, "LlNodes as in Rust");
static_assert(sizeof(nccl_ep::LlDispatchNodesParams) == 920, "LlDispatchNodesParams as in Rust");
static_assert(sizeof(nccl_ep::LlScaledDispatchParams) == 904, "LlScaledDispatchParams as in Rust");
static_assert(sizeof(nccl_ep::LlScaledDispatchNodesParams) == 1008, "LlScaledDispatchNodesParams as in Rust");
static_assert(sizeof(nccl_ep::LlBeside) == 24, "LlBeside as in Rust");
static_assert(sizeof(nccl_ep::LlRankDispatchParams) == 840, "LlRankDispatchParams as in Rust");
static_assert(sizeof(nccl_ep::LlRankScaledDispatchParams) == 928, "LlRankScaledDispatchParams as in Rust");
static_assert(sizeof(nccl_ep::LlRankDispatchNodesParams) == 944, "LlRankDispatchNodesParams as in Rust");
static_assert(sizeof(nccl_ep::LlRankScaledDispatchNodesParams) == 1032, "LlRankScaledDispatchNodesParams as in Rust");
static_assert(sizeof(nccl_ep::LlRankPackParams) == 24, "LlRankPackParams as in Rust");
static_assert(sizeof(nccl_ep::LlScaledPackParams) == 216, "LlScaledPackParams as in Rust");
static_assert(sizeof(nccl_ep::LlCombineNodesParams) == 912, "LlCombineNodesParams as in Rust");
static_assert(sizeof(nccl_ep::LlGatesParams) == 920, "LlGatesParams as in Rust");
static_assert(sizeof(nccl_ep::LlPackParams) == 80, "LlPackParams as in Rust");
