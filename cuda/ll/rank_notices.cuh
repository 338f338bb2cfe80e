// The notifications of a rank-major dispatch, beside its rows: how many rows a peer gets from this rank, which index
// each token's row has among them, and the token's weights.
#pragma once

#include "../layout/rank_major.cuh"
#include "dispatch_send.cuh"

namespace nccl_ep::ll_dispatch_impl {

// How a warp handles several tokens at once, with a lane for each entry.
template <typename Op>
struct TokensAtOnce {
    // Number of tokens at once.
    uint32_t tokens;
    // This lane's token, as the quotient, and its k, as the remainder.
    DivMod at;

    __device__ explicit TokensAtOnce(const LlShape& shape)
        : tokens(kWarpSize / shape.top_k), at(divide(lane_idx(), shape.top_k, shape.top_k_reciprocal)) {}
    // The lanes of this lane's token.
    __device__ LaneMask of_token(const LlShape& shape) const {
        const LaneMask first = {~uint32_t{0} >> (kWarpSize - shape.top_k)};
        return {first.bits << (at.quotient * shape.top_k)};
    }
    // Whether this lane has an entry, if the tokens are those from `first` on, below `last`.
    __device__ bool has_entry(uint32_t first, uint32_t last) const {
        return at.quotient < tokens && first + at.quotient < last;
    }
    // The lanes whose entries have this lane's token and its peer; if that is negative, only this lane.
    __device__ LaneMask same(const Op& op, int32_t peer) const {
        const uint32_t nothing = ~lane_idx();
        return match(peer < 0 ? nothing : at.quotient * op.peers() + peer);
    }
};

// The expert of this lane's entry, if the warp handles the tokens from `first` on.
template <typename Op>
__device__ __forceinline__ int32_t expert_of_lane(const Block<Op>& block, const typename Op::Source& source,
                                                  uint32_t first, bool has_entry) {
    return has_entry ? expert_of_entry(block, source, first * block.shape.top_k + lane_idx()) : kNowhere;
}

// The weight of that entry.
template <typename Op>
__device__ __forceinline__ float weight_of_lane(const Block<Op>& block, const float* weights, uint32_t first,
                                                bool has_entry) {
    return has_entry ? weights[first * block.shape.top_k + lane_idx()] : 0.0f;
}

// Counts the tokens that go to each peer: those before `first` into `before` and, in blocks that notify a peer of its
// count, all of them into `all`. `begin` is that of send_all.
template <typename Op, typename Begin>
__device__ __forceinline__ bool count_tokens(const Block<Op>& block, const typename Op::Source& source, uint32_t first,
                                             uint32_t* before, uint32_t* all, Begin begin) {
    const TokensAtOnce<Op> lanes(block.shape);
    const uint32_t last = all != nullptr ? source.tokens() : first;
    const auto expert_from = [&](uint32_t base) {
        return expert_of_lane(block, source, base, lanes.has_entry(base, last));
    };
    const uint32_t step = num_warps() * lanes.tokens;
    int32_t next = expert_from(block.warp * lanes.tokens);
    if (!begin()) {
        return false;
    }
#pragma unroll 1
    for (uint32_t base = block.warp * lanes.tokens; base < last; base += step) {
        const int32_t expert = next;
        next = expert_from(base + step);
        const int32_t peer = block.op.nodes.peer_of(rank_of_expert(block.shape, expert));
        const bool leads = lanes.same(block.op, peer).first() == lane_idx();
        if (peer < 0 || !leads) {
            continue;
        }
        if (base + lanes.at.quotient < first) {
            atomicAdd(&before[peer], 1u);
        }
        if (all != nullptr) {
            atomicAdd(&all[peer], 1u);
        }
    }
    return true;
}

// Sends this block's share of the peers the number of rows that come from the source.
template <typename Op>
__device__ void notify_row_counts(const Block<Op>& block, const typename Op::Source& source, const SourceShare& part,
                                  const uint32_t* all) {
    const Op& op = block.op;
    const uint32_t local = block.shape.local_experts;
#pragma unroll 1
    for (uint32_t peer = part.index; peer < op.peers(); peer += part.blocks) {
        // Word 0 is the count; the words from `local` on are the same for all layouts.
        const uint32_t word = threadIdx.x == 0 ? 0 : local + threadIdx.x - 1;
        if (!is_active(op.common.peers, peer) || word >= words_of_counts(block)) {
            continue;
        }
        uint32_t data = threadIdx.x == 0 ? all[peer] : op.common.scales_word;
        data = threadIdx.x == 1 ? source.tokens() : data;
        data = threadIdx.x == 2 ? op.common.fingerprint : data;
        put_value(op.at(peer).counts(source.rank()) + word, op.packet(data));
    }
}

// Stores the id of a local expert, or of none for kNowhere, as number `at` of the received ids.
__device__ __forceinline__ void store_id(const LlTopk& topk, uint64_t at, int32_t expert) {
    const int32_t id = expert < 0 ? kNowhere : expert + static_cast<int32_t>(topk.first_id);
    if (topk.has_narrow_ids != 0) {
        static_cast<int32_t*>(topk.out_ids)[at] = id;
    } else {
        static_cast<int64_t*>(topk.out_ids)[at] = id;
    }
}

struct TokenRange {
    uint32_t first;
    uint32_t last;
};

// What a lane notifies the peers of: its entry.
struct Notice {
    uint32_t token;
    uint32_t k;
    // The peer that hosts its expert, negative if none does, and the word for that peer.
    int32_t host;
    EntryWord word;
    float weight;
};

// Sends every peer an entry and, if the token's row goes there, the entry's weight. `lanes` are those of the token. All
// lanes of the warp call it, those without an entry with no `lanes`.
template <typename Op>
__device__ __forceinline__ void notify_peers(const Op& op, uint32_t source, const Notice& notice, LaneMask lanes) {
#pragma unroll 1
    for (uint32_t peer = 0; peer < op.peers(); ++peer) {
        const bool is_here = notice.host == static_cast<int32_t>(peer);
        const LaneMask here = ballot(is_here);
        if (!lanes.any() || !is_active(op.common.peers, peer)) {
            continue;
        }
        const Bank<Remote> bank = op.at(peer);
        const EntryWord word = is_here ? notice.word : EntryWord::elsewhere();
        put_value(bank.entries(source, notice.token) + notice.k, op.packet(word.data));
        if ((here & lanes).any()) {
            put_value(bank.weights(source, notice.token, op.ranks()) + notice.k,
                      op.packet(__float_as_uint(notice.weight)));
        }
    }
}

// One warp notifies the peers of the tokens in `range`, in order. `before` counts the earlier tokens that go to each
// peer, and afterwards these as well. `weight`, loaded ahead, is that of this lane's first entry.
template <typename Op>
__device__ __forceinline__ void notify_tokens(const Block<Op>& block, const typename Op::Source& source,
                                              const TokenRange& range, const float* weights, float weight,
                                              uint32_t* before) {
    const Op& op = block.op;
    const LlShape& shape = block.shape;
    const TokensAtOnce<Op> lanes(shape);
    const uint32_t last = range.last;
#pragma unroll 1
    for (uint32_t base = range.first; base < last; base += lanes.tokens) {
        const bool has_entry = lanes.has_entry(base, last);
        const int32_t expert = expert_of_lane(block, source, base, has_entry);
        Notice notice = {base + lanes.at.quotient, lanes.at.remainder, kNowhere, EntryWord::elsewhere(), weight};
        const int32_t rank = rank_of_expert(shape, expert);
        notice.host = op.nodes.peer_of(rank);
        if (has_entry) {
            op.experts_of(source.number(), notice.token)[notice.k] = expert;
        }
        const LaneMask same = lanes.same(op, notice.host);
        const bool leads = notice.host >= 0 && same.first() == lane_idx();
        const uint32_t nothing = ~lane_idx();
        const LaneMask leaders = match(leads ? static_cast<uint32_t>(notice.host) : nothing);
        uint32_t index = leads ? before[notice.host] + leaders.count_before() : 0;
        sync_warp();
        if (leads && leaders.count_before() == 0) {
            before[notice.host] += leaders.count();
        }
        sync_warp();
        index = shuffle(index, same.first());
        if (notice.host >= 0) {
            notice.word = EntryWord::here(expert - rank * shape.local_experts, index);
        }
        notify_peers(op, source.rank(), notice, lanes.of_token(shape).only_if(has_entry));
        weight = weight_of_lane(block, weights, base + lanes.tokens, lanes.has_entry(base + lanes.tokens, last));
    }
}

// The weights of a source's tokens: the caller's, or those behind the ids in the source's message.
template <typename Op>
__device__ __forceinline__ const float* weights_of(const Block<Op>& block, const LlTopk& topk,
                                                   const typename Op::Source& source) {
    if constexpr (Op::kSeveral) {
        if (source.number() != 0) {
            return reinterpret_cast<const float*>(source.ids() + uint64_t{source.tokens()} * block.shape.top_k);
        }
    }
    return topk.weights;
}

// Notifies the peers of this block's share of a source's tokens; the first blocks also send the counts. `begin` is that
// of send_all.
template <typename Op, typename Begin>
__device__ __forceinline__ void notify_by_rank(const Block<Op>& block, const LlTopk& topk,
                                               const typename Op::Source& source, const SourceShare& part,
                                               Begin begin) {
    const uint32_t tokens = source.tokens();
    const uint32_t per_block = (tokens + part.blocks - 1) / part.blocks;
    const TokenRange range = {min(per_block * part.index, tokens), min(per_block * (part.index + 1), tokens)};
    const float* weights = weights_of(block, topk, source);
    const bool has_entry = TokensAtOnce<Op>(block.shape).has_entry(range.first, range.last);
    const float weight = weight_of_lane(block, weights, range.first, has_entry);
    uint32_t* before = block.per_expert;
    uint32_t* all = part.index < block.op.peers() ? block.per_expert + block.op.peers() : nullptr;
    if (!count_tokens(block, source, range.first, before, all, begin)) {
        return;
    }
    __syncthreads();
    if (all != nullptr) {
        notify_row_counts(block, source, part, all);
    }
    if (block.warp == 0) {
        notify_tokens(block, source, range, weights, weight, before);
    }
}

}  // namespace nccl_ep::ll_dispatch_impl
