// Kernel parameters. Generated from src/backend/cuda/params/ht_nodes.rs by
// NCCL_EP_UPDATE_HEADER=1 cargo test --test kernel_params; do not edit.
// clang-format off

#pragma once

#include <cstddef>
#include <cstdint>
#include "ht.h"

namespace nccl_ep {

/// Most chunks of a rank's tokens.
constexpr static const uint32_t HT_MOST_CHUNKS = 16;

/// Packets by which a rank notifies each other of its node about a forwarded rank, besides the one for each
/// local expert and the rows of each chunk: its verdict and its number of tokens.
constexpr static const uint32_t HT_COUNTS_OF_SOURCE = 2;

/// Threads of a block of `ht_place`.
constexpr static const uint32_t HT_PLACE_THREADS = 256;

/// Threads of a block of `ht_pack`.
constexpr static const uint32_t HT_PACK_THREADS = 512;

/// A token without a row, a place without a rank.
constexpr static const uint32_t HT_NONE = 4294967295;

/// Bits of `HtNodesMemory::homes` for the place of an expert among the token's experts on its node. Above
/// them is 0 for this node, else one more than the other node's number.
constexpr static const uint32_t HT_HOME_BITS = 8;

/// Bit of `FaultReport::peer` in HT: the other bits are a rank as the group numbers it, not a local index.
constexpr static const uint32_t HT_RANK_OF_GROUP = 2147483648;

/// Threads of the block of `ht_header`.
constexpr static const uint32_t HT_HEADER_THREADS = 32;

/// A rank's tokens all travel, so that they can be sent from where they lie, if at least so many of 32 do.
constexpr static const uint32_t HT_WHOLE_OF_32 = 31;

/// The group's ranks on their nodes, as this rank sees them.
struct HtNodes {
    /// `[ranks]`.
    const RankOnNode *of_rank;
    /// `[local ranks][1 + width]`: whom each forwards for, itself first, as the group numbers them, then `HT_NONE`.
    const uint32_t *forwarded_by;
    /// Ranks of the group.
    uint32_t ranks;
    /// Other nodes.
    uint32_t others;
    /// Most remote ranks that a local rank forwards for.
    uint32_t width;
    /// Ranks that this one forwards for, itself included.
    uint32_t forwarded;
    /// Chunks of a rank's tokens.
    uint32_t chunks;
};

/// A rank that this one forwards for, in host memory that the device maps.
struct HtForwarded {
    /// `[tokens][top_k]`.
    const int64_t *topk_idx;
    /// Its tokens.
    uint32_t tokens;
    /// Tokens of the remote ranks before it.
    uint32_t first;
    /// As the group numbers it.
    uint32_t rank;
    /// Its verdict, as in `HtRouteParams::verdict`.
    uint32_t verdict;
};

/// Whose a token is that came from another node.
struct HtOrigin {
    /// The remote rank among those, from 0 on.
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
    /// `[tokens of remote ranks][top_k]`: the same of those tokens of each that come here; indices are
    /// within a rank.
    HtEntry *raw_entries;
    /// The same by chunk, then rank; indices count the rows from all remote ranks.
    HtEntry *entries;
    /// `[tokens of remote ranks]`: whose each is, in the order of `entries`.
    HtOrigin *origins;
    /// `[tokens][top_k]`: for the own tokens' experts on all nodes, ascending: the node, and the place there.
    uint32_t *homes;
    /// `[others][tokens]`: the own tokens that go to each other node, ascending.
    uint32_t *list;
    /// `[others][tokens]`: where a token is in that list, or `HT_NONE`.
    uint32_t *spots;
    /// `[others][chunks + 1]`: tokens that go to each other node.
    uint32_t *departing;
    /// `[forwarded][chunks + 1]`: tokens that come here from each forwarded rank.
    uint32_t *starts;
    /// `[forwarded]`: tokens of the remote ranks before each.
    uint32_t *firsts;
    /// `[forwarded][chunks + 1][local ranks]`: rows of each forwarded rank for each local rank.
    uint32_t *source_rows;
    /// `[chunks + 1][local ranks]`: rows from all remote ranks together.
    uint32_t *departures;
    /// `[ranks][chunks + 1]`: rows that this rank receives from each rank of the group.
    uint32_t *received_rows;
    /// `[ranks]`: their first rows in the output.
    uint32_t *source_begins;
    /// `[chunks + 1][local ranks]`: rows that this rank receives of the own tokens of each local rank.
    uint32_t *own_arrivals;
    /// `[chunks + 1][local ranks]`: the same of the remote tokens that each forwards.
    uint32_t *arrivals;
    /// `[local ranks]`: the first row of the own tokens of each.
    uint32_t *own_begins;
    /// `[local ranks]`: the first row of the remote tokens of each, where they are of one rank.
    uint32_t *begins;
    /// `[local ranks][chunks * width + 1]`: rows before each piece, a rank's chunk, by chunk, then rank.
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
    /// `[forwarded]`.
    const HtForwarded *forwarded;
    /// `[others][chunks + 1]`, then `[forwarded][chunks + 1]`, then the most tokens of a rank, and
    /// the rows that this rank receives, or `HT_DISAGREED` and why.
    HtCount *announced;
    /// `[local_experts]`, or NULL.
    int32_t *counter;
    /// `[forwarded][local ranks * local_experts]`, zero except while the kernel runs: rows for each expert.
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

/// The messages of a pass, one with each rank that takes part, at equal distances.
///
/// A message is one run of bytes: its tails, from the last one to the first, its header, its rows. Everything is
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

/// Parameters of `ht_header`, which writes the headers of messages.
struct HtHeaderParams {
    /// For the marks of failures.
    WaitParams wait;
    /// What is sent.
    HtMessages messages;
    /// How many messages.
    uint32_t count;
    /// The header, without what is known on the device alone.
    MessageHeader header;
    /// For the epoch, which begins with the first pass.
    HtSequences *sequences;
};

/// Parameters of `ht_pack`.
struct HtPackParams {
    /// The headers, and what they are written to: one message for each other node.
    HtHeaderParams headers;
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
    /// Chunks of a rank's tokens.
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
    /// `[local ranks]`: group rank of each local rank.
    const uint32_t *locals;
    /// Where the rows of remote tokens are, or sums go; for the own tokens without rows and tails.
    HtMessages messages;
    /// `HtNodesMemory::origins`, of the first token of the pass. NULL: there is one message, with all in order.
    const HtOrigin *origins;
    /// `HtNodesMemory::starts`, of the first remote rank and the first chunk of the pass.
    const uint32_t *starts;
    /// `chunks + 1`: the distance between ranks in `starts`.
    uint32_t chunk_ends;
    /// How many messages have come whose headers are to be read.
    uint32_t header_count;
    /// These messages.
    HtMessages headers;
    /// `[header_count]`: the ranks that they are from, as the group numbers them.
    const uint32_t *header_ranks;
    /// The headers as they must be, but for the epoch.
    MessageHeader expected;
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
