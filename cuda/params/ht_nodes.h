// Kernel parameters, explained in src/backend/cuda/params/ht_nodes.rs, from which
// NCCL_EP_UPDATE_HEADER=1 cargo test --test kernel_params makes this; do not edit.
// clang-format off

#pragma once

#include <cstddef>
#include <cstdint>
#include "ht.h"

namespace nccl_ep {

constexpr static const uint32_t HT_MOST_CHUNKS = 16;
constexpr static const uint32_t HT_COUNTS_OF_SOURCE = 2;
constexpr static const uint32_t HT_PLACE_THREADS = 256;
constexpr static const uint32_t HT_PACK_THREADS = 512;
constexpr static const uint32_t HT_NONE = 4294967295;
constexpr static const uint32_t HT_HOME_BITS = 8;
constexpr static const uint32_t HT_RANK_OF_GROUP = 2147483648;
constexpr static const uint32_t HT_HEADER_THREADS = 32;
constexpr static const uint32_t HT_WHOLE_OF_32 = 31;

struct HtNodes {
    const RankOnNode *of_rank;
    const uint32_t *forwarded_by;
    uint32_t ranks;
    uint32_t others;
    uint32_t width;
    uint32_t forwarded;
    uint32_t chunks;
};

struct HtForwarded {
    const int64_t *topk_idx;
    uint32_t tokens;
    uint32_t first;
    uint32_t rank;
    uint32_t verdict;
};

struct HtOrigin {
    uint32_t source;
    uint32_t index;
};

struct HtNodesMemory {
    HtEntry *own_entries;
    HtEntry *raw_entries;
    HtEntry *entries;
    HtOrigin *origins;
    uint32_t *homes;
    uint32_t *list;
    uint32_t *spots;
    uint32_t *departing;
    uint32_t *starts;
    uint32_t *firsts;
    uint32_t *source_rows;
    uint32_t *departures;
    uint32_t *received_rows;
    uint32_t *source_begins;
    uint32_t *own_arrivals;
    uint32_t *arrivals;
    uint32_t *own_begins;
    uint32_t *begins;
    uint32_t *piece_starts;
    uint32_t *piece_rows;
    uint32_t *total;
    int32_t *counts;
    uint32_t tokens;
    uint32_t top_k;
};

struct HtRouteNodesParams {
    PeerTable peers;
    WaitParams wait;
    HtLayout layout;
    HtNodes nodes;
    HtNodesMemory handle;
    const HtForwarded *forwarded;
    HtCount *announced;
    int32_t *counter;
    uint32_t *tally;
    uint64_t *own_counts;
    uint32_t max_tokens;
    uint32_t epoch;
    uint32_t bank;
    uint32_t verdict;
};

struct HtPlaceParams {
    HtNodes nodes;
    HtNodesMemory handle;
    const int64_t *topk_idx;
    uint32_t local_experts;
    uint32_t local_ranks;
    uint32_t piece_blocks;
};

struct HtMessages {
    uint8_t *rows;
    uint64_t stride;
    uint32_t row_bytes;
    uint32_t tail_bytes;
};

struct HtHeaderParams {
    WaitParams wait;
    HtMessages messages;
    uint32_t count;
    MessageHeader header;
    HtSequences *sequences;
};

struct HtPackParams {
    HtHeaderParams headers;
    HtNodesMemory handle;
    const uint8_t *tokens;
    const int64_t *topk_idx;
    const float *weights;
    uint64_t packed_bytes;
    uint32_t chunks;
    uint32_t first_chunk;
    uint32_t end_chunk;
};

struct HtScaledPackParams {
    HtPackParams pack;
    ScaledRows rows;
};

struct HtPass {
    const uint32_t *departures;
    const uint32_t *departures_end;
    const uint32_t *arrivals;
    const uint32_t *arrivals_end;
    const uint32_t *begins;
    const uint32_t *piece_starts;
    const uint32_t *piece_rows;
    uint32_t pieces;
    uint32_t is_own;
    const uint32_t *total;
    const uint32_t *locals;
    HtMessages messages;
    const HtOrigin *origins;
    const uint32_t *starts;
    uint32_t chunk_ends;
    uint32_t header_count;
    HtMessages headers;
    const uint32_t *header_ranks;
    MessageHeader expected;
};

struct HtDispatchNodesParams {
    HtDispatchParams of_node;
    HtPass pass;
};

struct HtScaledDispatchNodesParams {
    HtScaledDispatchParams of_node;
    HtPass pass;
};

struct HtPartials {
    HtMessages messages;
    const uint32_t *spots;
    const uint32_t *departing;
    const uint32_t *homes;
    uint32_t tokens;
    uint32_t chunk_ends;
    uint32_t others;
    uint32_t own_place;
};

struct HtCombineNodesParams {
    HtCombineParams of_node;
    HtPass pass;
    HtPartials partials;
};

}  // namespace nccl_ep

static_assert(sizeof(nccl_ep::HtNodes) == 40, "HtNodes as in Rust");
static_assert(sizeof(nccl_ep::HtForwarded) == 24, "HtForwarded as in Rust");
static_assert(sizeof(nccl_ep::HtOrigin) == 8, "HtOrigin as in Rust");
static_assert(sizeof(nccl_ep::HtNodesMemory) == 184, "HtNodesMemory as in Rust");
static_assert(sizeof(nccl_ep::HtRouteNodesParams) == 952, "HtRouteNodesParams as in Rust");
static_assert(sizeof(nccl_ep::HtPlaceParams) == 248, "HtPlaceParams as in Rust");
static_assert(sizeof(nccl_ep::HtMessages) == 24, "HtMessages as in Rust");
static_assert(sizeof(nccl_ep::HtHeaderParams) == 112, "HtHeaderParams as in Rust");
static_assert(sizeof(nccl_ep::HtPackParams) == 344, "HtPackParams as in Rust");
static_assert(sizeof(nccl_ep::HtScaledPackParams) == 432, "HtScaledPackParams as in Rust");
static_assert(sizeof(nccl_ep::HtPass) == 192, "HtPass as in Rust");
static_assert(sizeof(nccl_ep::HtDispatchNodesParams) == 1008, "HtDispatchNodesParams as in Rust");
static_assert(sizeof(nccl_ep::HtScaledDispatchNodesParams) == 1120, "HtScaledDispatchNodesParams as in Rust");
static_assert(sizeof(nccl_ep::HtPartials) == 64, "HtPartials as in Rust");
static_assert(sizeof(nccl_ep::HtCombineNodesParams) == 1048, "HtCombineNodesParams as in Rust");
