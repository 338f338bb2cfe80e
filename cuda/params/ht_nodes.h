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

/// Bit of `FaultReport::peer` in HT: the other bits are a rank as the group numbers it, not a local index.
constexpr static const uint32_t HT_RANK_OF_GROUP = 2147483648;

/// Threads of the block of `ht_head`.
constexpr static const uint32_t HT_HEAD_THREADS = 32;

/// A source's tokens all travel, so that they can be sent from where they lie, if at least so many of 32 do.
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

/// Whose a token is that came from another node.
struct HtOrigin {
    /// The remote source, from 0 on.
    uint32_t source;
    /// Its number among those that come here from it.
    uint32_t index;
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
    /// `[tokens of remote sources]`: whose each is, in the order of `entries`.
    HtOrigin *origins;
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
    /// Blocks for pieces; the others note homes.
    uint32_t piece_blocks;
};

/// In front of a message's rows: to which operation they belong.
struct HtHead {
    /// `HtShape::fingerprint`.
    uint32_t fingerprint;
    /// The handle's number.
    uint32_t handle;
    /// Not zero if the rank knew of a failure of the group: then what follows is not what it should be.
    uint32_t failed;
    /// What ranks must agree on in the scales of rows; 0 without.
    uint32_t scales_word;
};

/// The messages of a pass, one with each rank that takes part, at equal distances.
///
/// A message is one run of bytes: its tails, from the last one to the first, its head, its rows. Everything is
/// counted from the first row, so nothing's place depends on how many rows there are.
struct HtMessages {
    /// The first row of the first message, a multiple of 256.
    uint8_t *rows;
    /// From a message's first row to that of the next one.
    uint64_t stride;
    /// Bytes of a row as it travels, a multiple of 16.
    uint32_t row_bytes;
    /// Bytes that travel beside each row, a multiple of 16: in dispatch `[top_k]` ids of 8 bytes, then as many weights,
    /// in combine gradients.
    uint32_t tail_bytes;
};

/// Parameters of `ht_head`, which writes the heads of messages.
struct HtHeadParams {
    /// For the marks of failures.
    WaitParams wait;
    /// What is sent.
    HtMessages messages;
    /// How many messages.
    uint32_t count;
    /// `HtShape::fingerprint`.
    uint32_t fingerprint;
    /// `HtHead::scales_word`.
    uint32_t scales_word;
    /// The handle's number.
    uint32_t handle;
};

/// Parameters of `ht_pack`.
struct HtPackParams {
    /// The heads, and what they are written to: one message for each other node.
    HtHeadParams heads;
    /// The handle.
    HtNodesMemory handle;
    /// `[tokens]` rows.
    const uint8_t *tokens;
    /// `[tokens][top_k]`; not read if rows have no tails.
    const int64_t *topk_idx;
    /// `[tokens][top_k]`; likewise.
    const float *weights;
    /// Where all tokens travel, and their rows take more bytes than this, these are sent from where they lie.
    uint64_t packed_bytes;
    /// Chunks of a source's tokens.
    uint32_t chunks;
    /// The chunks of the pass.
    uint32_t first_chunk;
    /// The chunk after them.
    uint32_t end_chunk;
};

/// Parameters of `ht_pack_scaled`, and of `ht_pack_cast_bf16` and its siblings.
struct HtScaledPackParams {
    /// As without scales; all rows are packed.
    HtPackParams pack;
    /// The rows.
    ScaledRows rows;
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
    /// `[local ranks]`: group rank of each local rank, `locals_step` words apart.
    const uint32_t *locals;
    /// See `locals`.
    uint32_t locals_step;
    /// Where the rows of remote tokens are, or sums go; for the own tokens without rows and tails.
    HtMessages messages;
    /// `HtNodesMemory::origins`, of the first token of the pass. NULL: there is one message, with all in order.
    const HtOrigin *origins;
    /// `HtNodesMemory::starts`, of the first remote source and the first chunk of the pass.
    const uint32_t *starts;
    /// `chunks + 1`: the distance between sources in `starts`.
    uint32_t chunk_ends;
    /// How many messages have come whose heads are to be read.
    uint32_t head_count;
    /// These messages.
    HtMessages heads;
    /// `[head_count]`: the ranks that they are from, as the group numbers them.
    const uint32_t *head_ranks;
    /// `HtHead::scales_word`, as it must be.
    uint32_t scales_word;
    /// The handle's number.
    uint32_t handle;
};

/// Parameters of `ht_dispatch_nodes`.
struct HtDispatchNodesParams {
    /// As on one node, for the tokens of the pass; begins and departures are not used.
    HtDispatchParams of_node;
    /// Which rows they have.
    HtPass pass;
};

/// Parameters of `ht_dispatch_nodes_scaled` and `ht_dispatch_nodes_cast`. Rows that came from other nodes have their scales behind them; then `scaled.rows.from` is nowhere.
struct HtScaledDispatchNodesParams {
    /// As on one node, for the tokens of the pass; begins and departures are not used.
    HtScaledDispatchParams of_node;
    /// Which rows they have.
    HtPass pass;
};

/// Sums from other nodes, for the own tokens of a pass.
struct HtPartials {
    /// One for each other node: rows, with gradients as tails.
    HtMessages messages;
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
    /// Other nodes.
    uint32_t others;
    /// Where this node comes in the sums, or `OWN_NODE_FIRST`.
    uint32_t own_place;
};

/// Parameters of `ht_combine_nodes_bf16` and its siblings.
struct HtCombineNodesParams {
    /// As on one node, for the tokens of the pass; begins and departures are not used.
    HtCombineParams of_node;
    /// Which rows they have.
    HtPass pass;
    /// Partial sums from other nodes, for the own tokens; `others == 0` for remote tokens.
    HtPartials partials;
};

}  // namespace nccl_ep

static_assert(sizeof(nccl_ep::HtNodes) == 48, "HtNodes as in Rust");
static_assert(sizeof(nccl_ep::HtSource) == 24, "HtSource as in Rust");
static_assert(sizeof(nccl_ep::HtTold) == 8, "HtTold as in Rust");
static_assert(sizeof(nccl_ep::HtOrigin) == 8, "HtOrigin as in Rust");
static_assert(sizeof(nccl_ep::HtNodesMemory) == 184, "HtNodesMemory as in Rust");
static_assert(sizeof(nccl_ep::HtRouteNodesParams) == 968, "HtRouteNodesParams as in Rust");
static_assert(sizeof(nccl_ep::HtPlaceParams) == 256, "HtPlaceParams as in Rust");
static_assert(sizeof(nccl_ep::HtHead) == 16, "HtHead as in Rust");
static_assert(sizeof(nccl_ep::HtMessages) == 24, "HtMessages as in Rust");
static_assert(sizeof(nccl_ep::HtHeadParams) == 80, "HtHeadParams as in Rust");
static_assert(sizeof(nccl_ep::HtPackParams) == 312, "HtPackParams as in Rust");
static_assert(sizeof(nccl_ep::HtScaledPackParams) == 400, "HtScaledPackParams as in Rust");
static_assert(sizeof(nccl_ep::HtPass) == 176, "HtPass as in Rust");
static_assert(sizeof(nccl_ep::HtDispatchNodesParams) == 992, "HtDispatchNodesParams as in Rust");
static_assert(sizeof(nccl_ep::HtScaledDispatchNodesParams) == 1104, "HtScaledDispatchNodesParams as in Rust");
static_assert(sizeof(nccl_ep::HtPartials) == 64, "HtPartials as in Rust");
static_assert(sizeof(nccl_ep::HtCombineNodesParams) == 1032, "HtCombineNodesParams as in Rust");
