// Kernel parameters. Generated from src/backend/cuda/params/ll.rs by
// NCCL_EP_UPDATE_HEADER=1 cargo test --test kernel_params; do not edit.
// clang-format off

#pragma once

#include <cstddef>
#include <cstdint>
#include "common.h"

namespace nccl_ep {

/// Most experts that a token can name.
constexpr static const uint32_t LL_MAX_TOP_K = 32;

/// Packets by which a rank notifies each other, besides the one for each local expert.
constexpr static const uint32_t LL_COUNTS_BESIDE_EXPERTS = 3;

/// Channels of operations, each with its own epochs: one for whole operations, two for staged ones.
constexpr static const uint32_t LL_CHANNELS = 3;

/// The channel of whole operations; staged ones have the others.
constexpr static const uint32_t LL_WHOLE_CHANNEL = 0;

/// Banks: the channel of whole operations alternates between 0 and 1; staged channel c owns bank c + 1.
constexpr static const uint32_t LL_BANKS = 4;

/// Most ranks of a group over several nodes.
constexpr static const size_t LL_MAX_RANKS = 1024;

/// Threads of an `ll_pack` block.
constexpr static const uint32_t LL_PACK_THREADS = 512;

/// Threads of an `ll_gates` block, a warp per token.
constexpr static const uint32_t LL_GATES_THREADS = 128;

/// Bits of an entry packet for the entry's index among the rows that its source sends to the expert; those
/// above hold the local expert.
constexpr static const uint32_t LL_INDEX_BITS = 20;

/// Most threads of a dispatch block, in whole warps.
constexpr static const uint32_t LL_DISPATCH_THREADS = 512;

/// The same of rows without scales on one node, which needs fewer registers.
constexpr static const uint32_t LL_PLAIN_DISPATCH_THREADS = 1024;

/// Most static shared memory of a dispatch block, without the words for each of `LL_MAX_RANKS` over several nodes.
constexpr static const uint32_t LL_STATIC_SHARED_BYTES = 1024;

/// Most threads of a combine block, in whole warps.
constexpr static const uint32_t LL_COMBINE_THREADS = 768;

/// The same of a combine of many tokens, in exact mode or over several nodes, which needs more registers.
constexpr static const uint32_t LL_COMBINE_MANY_THREADS = 384;

/// Most 16-byte accesses per lane in a chunk of a row with scales, and of these. In one without a lane has one.
constexpr static const uint32_t LL_SCALED_CHUNK_VECS = 4;

/// A word of a bank's row that has not arrived; all are so at first.
constexpr static const uint32_t LL_MARK = 4293394323;

/// The phases of an operation that a launch runs. The single ones are bits of the others.
enum LlPhase : uint32_t {
    /// This rank's own rows go out.
    LL_PHASE_SEND = 1,
    /// What comes is received.
    LL_PHASE_RECEIVE = 2,
    /// A whole operation on one node.
    LL_PHASE_SEND_RECEIVE = 3,
    /// What a rank does for the others that it forwards for. A dispatch sends their rows to the peers, a combine sums what the
    /// peers return for them.
    LL_PHASE_RELAY = 4,
    /// All that comes before the exchange of a combine's sums.
    LL_PHASE_SEND_RELAY = 5,
    /// A whole dispatch over several nodes.
    LL_PHASE_ALL = 7,
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
    /// Offset in a bank: u64 packets `[ranks][max_tokens][LL_MAX_TOP_K]`, and as many for rank-major weights.
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
    /// Bytes per row, as it travels: with its scales.
    uint32_t row_bytes;
    /// Bytes from a row of a bank to the next.
    uint32_t slot_bytes;
    /// A row travels in `chunks` chunks of `chunk_bytes` (the last may be shorter), one warp each. Scales travel in addition:
    /// `ScaledRows::scale_chunk_bytes`.
    uint32_t chunk_bytes;
    /// Chunks per row.
    uint32_t chunks;
    /// For divisions by the ranks of the group; see `reciprocal`.
    uint32_t ranks_reciprocal;
    /// For divisions by `local_experts`.
    uint32_t local_experts_reciprocal;
    /// For divisions by `top_k`.
    uint32_t top_k_reciprocal;
    /// For divisions by `chunks`.
    uint32_t chunks_reciprocal;
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
    /// Blocks that have summed everything for other ranks.
    uint32_t blocks_relayed;
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
    /// Which phases.
    LlPhase phases;
    /// What all ranks must agree on in an operation; opaque to the kernels.
    uint32_t fingerprint;
    /// The scales of the rows, as opaque; 0 without.
    uint32_t scales_word;
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
};

/// What an operation over several nodes needs beside `LlCommon`; sources, the ranks that this one
/// forwards for, are numbered from 0, itself.
struct LlNodes {
    /// `[ranks]`.
    const RankOnNode *of_rank;
    /// `[peers]`: the rank with each local index.
    const uint32_t *rank_of_peer;
    /// `[sources]`.
    const uint32_t *rank_of_source;
    /// `[nodes - 1]`, by distance from 1 on.
    const uint32_t *rail_peers;
    /// `[sources - 1]` messages of rows, `rows_stride` apart. In a dispatch each came from a source: a header, its rows,
    /// its ids. In a combine each goes to a source: a header, and what this node gives for its tokens.
    uint8_t *rows;
    /// `[sources - 1]` messages of a combine, `weights_stride` apart: a header, and with which weight each entry of the
    /// source takes part.
    const uint8_t *weights;
    /// `[nodes - 1]` messages by distance from 1 on, `rows_stride` apart: a header, and what that node gives for this
    /// rank's tokens.
    const uint8_t *returned;
    /// Bytes.
    uint64_t rows_stride;
    /// Bytes.
    uint64_t weights_stride;
    /// Ranks of the group.
    uint32_t ranks;
    /// This rank.
    uint32_t rank;
    /// Ranks that this one forwards for, itself included.
    uint32_t sources;
    /// Most tokens of the sources from 1 on.
    uint32_t most_tokens;
    /// The handle, which the headers should name.
    uint32_t handle;
    /// Other nodes than this one.
    uint32_t other_nodes;
    /// In a combine, where this node comes in the sums of this rank's tokens, or `OWN_NODE_FIRST`.
    uint32_t own_place;
};

/// Parameters of `ll_dispatch_nodes`.
struct LlDispatchNodesParams {
    /// As on one node.
    LlDispatchParams dispatch;
    /// The other nodes.
    LlNodes nodes;
};

/// Parameters of `ll_dispatch_scaled` and its siblings.
struct LlScaledDispatchParams {
    /// As without scales.
    LlDispatchParams dispatch;
    /// Payloads and scales.
    ScaledRows rows;
};

/// Parameters of `ll_dispatch_nodes_scaled`.
struct LlScaledDispatchNodesParams {
    /// As without scales, but `tokens` are rows with scales as they travel.
    LlDispatchParams dispatch;
    /// The other nodes.
    LlNodes nodes;
    /// Payloads and scales.
    ScaledRows rows;
};

/// What a rank-major dispatch sends beside its rows, and where it comes.
struct LlBeside {
    /// `[tokens][top_k]`: the weights of this rank's tokens.
    const float *weights;
    /// `[ranks][max_tokens][top_k]`: local ids, -1 elsewhere and in rows that hold nothing.
    int64_t *out_ids;
    /// `[ranks][max_tokens][top_k]`.
    float *out_weights;
};

/// Parameters of `ll_rank_dispatch`.
struct LlRankDispatchParams {
    /// As expert-major, but `out` is `[ranks][max_tokens]` rows and `counter` `[ranks]`.
    LlDispatchParams dispatch;
    /// Ids and weights.
    LlBeside beside;
};

/// Parameters of `ll_rank_dispatch_scaled` and its siblings.
struct LlRankScaledDispatchParams {
    /// As without scales.
    LlRankDispatchParams dispatch;
    /// Payloads and scales.
    ScaledRows rows;
};

/// Parameters of `ll_rank_dispatch_nodes`.
struct LlRankDispatchNodesParams {
    /// As on one node.
    LlRankDispatchParams dispatch;
    /// The other nodes, whose messages have weights behind the ids.
    LlNodes nodes;
};

/// Parameters of `ll_rank_dispatch_nodes_scaled`.
struct LlRankScaledDispatchNodesParams {
    /// As without scales, but `tokens` are rows with scales as they travel.
    LlRankDispatchParams dispatch;
    /// The other nodes.
    LlNodes nodes;
    /// Payloads and scales.
    ScaledRows rows;
};

/// Parameters of `ll_rank_pack`.
struct LlRankPackParams {
    /// The caller's weights.
    const float *weights;
    /// Where they go.
    float *to;
    /// How many.
    uint64_t num_weights;
};

/// Parameters of `ll_pack`.
struct LlPackParams {
    /// The message's header, without the epoch.
    MessageHeader head;
    /// The operation's channel, before the operation.
    const LlChannelState *channel_state;
    /// `[tokens]` rows.
    const uint8_t *rows;
    /// `[tokens][top_k]`.
    const int64_t *ids;
    /// Receives the message: the header, the rows, the ids.
    uint8_t *message;
    /// Bytes of all rows, a multiple of 16.
    uint64_t row_bytes;
    /// Number of all ids.
    uint64_t num_ids;
};

/// Parameters of `ll_pack_scaled` and its siblings.
struct LlScaledPackParams {
    /// As without scales.
    LlPackParams pack;
    /// Payloads and scales.
    ScaledRows rows;
    /// How rows are cut into chunks; this rank's tokens.
    LlShape shape;
};

/// Parameters of `ll_combine_nodes_bf16` and its siblings.
struct LlCombineNodesParams {
    /// As on one node.
    LlCombineParams combine;
    /// The other nodes.
    LlNodes nodes;
};

/// Parameters of `ll_gates`.
struct LlGatesParams {
    /// Of the combine that follows.
    LlCombineNodesParams combine;
    /// Receives the message: a header, and the weights `[tokens][top_k]`.
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
