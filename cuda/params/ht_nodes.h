// Kernel parameters. Generated from src/backend/cuda/params/ht_nodes.rs by
// NCCL_EP_UPDATE_HEADER=1 cargo test --test kernel_params; do not edit.
// clang-format off

#pragma once

#include <cstddef>
#include <cstdint>
#include "ht.h"

namespace nccl_ep {

/// Most chunks of a source's tokens.
constexpr static const uint32_t HT_MOST_CHUNKS = 16;

/// Packets by which a rank notifies each other of its node about one of its sources, besides the one for each
/// local expert and the rows of each chunk: the source's verdict and its number of tokens.
constexpr static const uint32_t HT_COUNTS_OF_SOURCE = 2;

/// Threads of a block of `ht_place`.
constexpr static const uint32_t HT_PLACE_THREADS = 256;

/// Threads of a block of `ht_pack`.
constexpr static const uint32_t HT_PACK_THREADS = 512;

/// Bit of `HtNodes::places`: the rank is on another node, which the other bits number: 0 is the node before this
/// one, around the ring of nodes. Sums add the nodes in this order.
constexpr static const uint32_t HT_ELSEWHERE = 2147483648;

/// A token without a row, a place without a rank.
constexpr static const uint32_t HT_NONE = 4294967295;

/// Bits of `HtNodesMemory::homes` for the place of an expert among the token's experts on its node. Above
/// them is 0 for this node, else one more than the other node's number.
constexpr static const uint32_t HT_HOME_BITS = 8;

/// A source's tokens all travel, so that nothing is packed, if at least so many of 32 do.
constexpr static const uint32_t HT_WHOLE_OF_32 = 31;

/// The group's ranks on their nodes, as this rank sees them.
struct HtNodes {
    /// `[ranks]`: a rank's local index, or `HT_ELSEWHERE` and its node.
    const uint32_t *places;
    /// `[local ranks][1 + width]`: the sources of each, itself first, as the group numbers them, then `HT_NONE`.
    const uint32_t *carried;
    /// `[ranks]`: the local index of the rank that carries it here.
    const uint32_t *carriers;
    /// Ranks of the group.
    uint32_t ranks;
    /// Other nodes.
    uint32_t others;
    /// Most remote sources of a local rank.
    uint32_t width;
    /// Sources of this rank.
    uint32_t sources;
    /// Chunks of a source's tokens.
    uint32_t chunks;
};

/// A source of this rank, in host memory that the device maps.
struct HtSource {
    /// `[tokens][top_k]`.
    const int64_t *topk_idx;
    /// Its tokens.
    uint32_t tokens;
    /// Tokens of the remote sources before it.
    uint32_t first;
    /// As the group numbers it.
    uint32_t rank;
    /// Its verdict, as in `HtRouteParams::verdict`.
    uint32_t verdict;
};

/// A number for the host, or from another rank's host, in host memory that the device maps.
struct HtTold {
    /// A number.
    uint32_t value;
    /// The handle's epoch, once `value` is valid.
    uint32_t epoch;
};

/// Device memory of an HT handle of such a group. Arrays with `chunks + 1` entries count what comes before each
/// chunk, then all.
struct HtNodesMemory {
    /// `[tokens][top_k]`: the experts of the own tokens on this node, numbered by local rank and local expert,
    /// ascending, without repetition.
    HtEntry *own_entries;
    /// `[tokens of remote sources][top_k]`: the same of those tokens of each that come here; indices are
    /// within a source.
    HtEntry *raw_entries;
    /// The same by chunk, then source; indices count the rows from all remote sources.
    HtEntry *entries;
    /// `[tokens][top_k]`: for the own tokens' experts on all nodes, ascending: the node, and the place there.
    uint32_t *homes;
    /// `[others][tokens]`: the own tokens that go to each other node, ascending.
    uint32_t *list;
    /// `[others][tokens]`: where a token is in that list, or `HT_NONE`.
    uint32_t *spots;
    /// `[others][chunks + 1]`: tokens that go to each other node.
    uint32_t *departing;
    /// `[sources][chunks + 1]`: tokens that come here from each source.
    uint32_t *starts;
    /// `[sources]`: tokens of the remote sources before each.
    uint32_t *firsts;
    /// `[sources][chunks + 1][local ranks]`: rows of each source for each local rank.
    uint32_t *source_rows;
    /// `[chunks + 1][local ranks]`: rows from all remote sources together.
    uint32_t *departures;
    /// `[ranks][chunks + 1]`: rows that this rank receives from each rank of the group.
    uint32_t *received_rows;
    /// `[ranks]`: their first rows in the output.
    uint32_t *source_begins;
    /// `[chunks + 1][local ranks]`: rows that this rank receives of the own tokens of each local rank.
    uint32_t *own_arrivals;
    /// `[chunks + 1][local ranks]`: the same of the remote tokens that each carries.
    uint32_t *arrivals;
    /// `[local ranks]`: the first row of the own tokens of each.
    uint32_t *own_begins;
    /// `[local ranks]`: the first row of the remote tokens of each, where they are of one source.
    uint32_t *begins;
    /// `[local ranks][chunks * width + 1]`: rows before each piece, a source's chunk, by chunk, then source.
    uint32_t *piece_starts;
    /// `[local ranks][chunks * width]`: the first row of each piece in the output.
    uint32_t *piece_rows;
    /// The number of rows that this rank receives, or `HT_DISAGREED` and why.
    uint32_t *total;
    /// `[local_experts]`: received rows per expert.
    int32_t *counts;
    /// The own tokens.
    uint32_t tokens;
    /// Ids per token.
    uint32_t top_k;
};

/// Parameters of `ht_route_nodes`.
struct HtRouteNodesParams {
    /// The windows of this node.
    PeerTable peers;
    /// Deadline and report.
    WaitParams wait;
    /// Where things lie in them; here the counts are u64 packets
    /// `[2][ranks][local_experts + chunks + HT_COUNTS_OF_SOURCE]`, by `bank`.
    HtLayout layout;
    /// The ranks on their nodes.
    HtNodes nodes;
    /// What is to be filled.
    HtNodesMemory handle;
    /// `[sources]`.
    const HtSource *sources;
    /// `[others][chunks + 1]`, then `[sources][chunks + 1]`, then the most tokens of a rank.
    HtTold *told;
    /// `[local_experts]`, or NULL.
    int32_t *counter;
    /// For the host.
    HtReceived *received;
    /// `[sources][local ranks * local_experts]`, zero except while the kernel runs: rows for each expert.
    uint32_t *tally;
    /// From this rank to itself, like the counts. Not in the window, where peers could change it.
    uint64_t *own_counts;
    /// Most tokens of a rank.
    uint32_t max_tokens;
    /// Handles of the group so far, this one included.
    uint32_t epoch;
    /// Which of the two banks of counts: they alternate from kernel to kernel.
    uint32_t bank;
    /// This rank's verdict.
    uint32_t verdict;
};

/// Parameters of `ht_place`.
struct HtPlaceParams {
    /// The ranks on their nodes.
    HtNodes nodes;
    /// The handle that `ht_route_nodes` has filled.
    HtNodesMemory handle;
    /// `[tokens][top_k]`: the own ids.
    const int64_t *topk_idx;
    /// Experts per rank.
    uint32_t local_experts;
    /// Ranks of this node.
    uint32_t local_ranks;
};

/// Parameters of `ht_pack`.
struct HtPackParams {
    /// The handle.
    HtNodesMemory handle;
    /// `[tokens]` rows.
    const uint8_t *tokens;
    /// `[tokens][top_k]`, or NULL: tokens only.
    const int64_t *topk_idx;
    /// `[tokens][top_k]`, or NULL.
    const float *weights;
    /// `[others][room]` rows.
    uint8_t *out;
    /// `[others][room][top_k]`.
    int64_t *out_idx;
    /// `[others][room][top_k]`.
    float *out_weights;
    /// Bytes per row.
    uint32_t row_bytes;
    /// Most rows of a pass for each other node.
    uint32_t room;
    /// Other nodes.
    uint32_t others;
    /// Chunks of a source's tokens.
    uint32_t chunks;
    /// The chunks of the pass.
    uint32_t first_chunk;
    /// The chunk after them.
    uint32_t end_chunk;
};

/// A pass of an operation: which part of each pair's rows it has.
struct HtPass {
    /// `[local ranks]`: rows that go from this rank to each in dispatch, before this pass.
    const uint32_t *departures;
    /// The same, up to its end.
    const uint32_t *departures_end;
    /// `[local ranks]`: rows that come from each in dispatch, before this pass.
    const uint32_t *arrivals;
    /// The same, up to its end.
    const uint32_t *arrivals_end;
    /// `[local ranks]`: the output's first row from each; NULL: by pieces.
    const uint32_t *begins;
    /// `HtNodesMemory::piece_starts`.
    const uint32_t *piece_starts;
    /// `HtNodesMemory::piece_rows`.
    const uint32_t *piece_rows;
    /// Pieces of each local rank.
    uint32_t pieces;
    /// Whether the tokens are this rank's own.
    uint32_t is_own;
    /// `HtNodesMemory::total`.
    const uint32_t *total;
    /// `[local ranks]`: as the group numbers them, every `locals_step`-th word.
    const uint32_t *locals;
    /// See `locals`.
    uint32_t locals_step;
};

/// Parameters of `ht_dispatch_nodes`.
struct HtDispatchNodesParams {
    /// As on one node, for the tokens of the pass; begins and departures are not used.
    HtDispatchParams of_node;
    /// Which rows they have.
    HtPass pass;
};

/// Sums from other nodes, for the own tokens of a pass.
struct HtPartials {
    /// `[others][room]` rows.
    const uint8_t *rows;
    /// `[others][room][columns]`.
    const float *gradients;
    /// `HtNodesMemory::spots`, of the first token of the pass.
    const uint32_t *spots;
    /// `HtNodesMemory::departing`, of the first chunk of the pass.
    const uint32_t *departing;
    /// `HtNodesMemory::homes`, of the first token of the pass.
    const uint32_t *homes;
    /// All tokens of this rank: the distance between nodes in `spots`.
    uint32_t tokens;
    /// `chunks + 1`: the distance between nodes in `departing`.
    uint32_t chunk_ends;
    /// Most rows of a pass for each other node.
    uint32_t room;
    /// Other nodes.
    uint32_t others;
};

/// Parameters of `ht_combine_nodes_bf16` and its siblings.
struct HtCombineNodesParams {
    /// As on one node, for the tokens of the pass; begins and departures are not used.
    HtCombineParams of_node;
    /// Which rows they have.
    HtPass pass;
    /// For the own tokens, what is added to the sums of this node; without nodes for remote tokens.
    HtPartials partials;
};

}  // namespace nccl_ep

static_assert(sizeof(nccl_ep::HtNodes) == 48, "HtNodes as in Rust");
static_assert(sizeof(nccl_ep::HtSource) == 24, "HtSource as in Rust");
static_assert(sizeof(nccl_ep::HtTold) == 8, "HtTold as in Rust");
static_assert(sizeof(nccl_ep::HtNodesMemory) == 176, "HtNodesMemory as in Rust");
static_assert(sizeof(nccl_ep::HtRouteNodesParams) == 960, "HtRouteNodesParams as in Rust");
static_assert(sizeof(nccl_ep::HtPlaceParams) == 240, "HtPlaceParams as in Rust");
static_assert(sizeof(nccl_ep::HtPackParams) == 248, "HtPackParams as in Rust");
static_assert(sizeof(nccl_ep::HtPass) == 88, "HtPass as in Rust");
static_assert(sizeof(nccl_ep::HtDispatchNodesParams) == 904, "HtDispatchNodesParams as in Rust");
static_assert(sizeof(nccl_ep::HtPartials) == 56, "HtPartials as in Rust");
static_assert(sizeof(nccl_ep::HtCombineNodesParams) == 936, "HtCombineNodesParams as in Rust");
