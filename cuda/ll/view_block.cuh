// What a block of a dispatch into a view sees: how many of this rank's tokens go to each peer, and whether the peers' banks
// are clean (view.cuh).
#pragma once

#include "view.cuh"

namespace nccl_ep::ll_rank_dispatch_view_impl {

using Op = Operation<OneNode>;

// Ranks whose bits are together in a word.
constexpr uint32_t kRanksOfWord = 8 * sizeof(uint32_t);
// Ids of a token that are loaded together.
constexpr uint32_t kIdsAtOnce = 8;

struct SharedStorage {
    Start start;
    uint32_t owner[LL_VIEW_BANKS];
    // Ranks to which the block's token goes.
    uint32_t goes_to[(MAX_PEERS + kRanksOfWord - 1) / kRanksOfWord];
    // By rank: this rank's tokens that go there, those before the block's token and all. Then by source: rows that come
    // from there, and its tokens.
    uint32_t before[MAX_PEERS];
    uint32_t all[MAX_PEERS];
};

struct Block {
    const LlRankDispatchViewParams& params;
    const Op& op;
    SharedStorage& shared;

    const LlDispatchParams& dispatch = params.dispatch.dispatch;
    const LlShape& shape = dispatch.common.shape;
    const LlView& view = params.view;

    __device__ bool is_first() const { return blockIdx.x == 0; }
    __device__ bool moves_rows() const { return warp_idx() < view.warps; }
    __device__ bool goes_to(uint32_t rank) const {
        return (shared.goes_to[rank / kRanksOfWord] >> rank % kRanksOfWord & 1) != 0;
    }
};

// The ranks from `base` on that host experts of a token of this rank.
__device__ __forceinline__ uint32_t hosts_of(const Block& block, uint32_t token, uint32_t base) {
    const LlShape& shape = block.shape;
    const uint32_t experts = block.op.ranks() * shape.local_experts;
    const auto* ids = reinterpret_cast<const long long*>(block.dispatch.topk_idx) + uint64_t{token} * shape.top_k;
    uint32_t hosts = 0;
#pragma unroll 1
    for (uint32_t left = shape.top_k; left != 0; left -= min(left, kIdsAtOnce), ids += kIdsAtOnce) {
        // Under way together, then one after the other through the first: code for each of them would be long.
        long long id[kIdsAtOnce];
        uint32_t expert[kIdsAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kIdsAtOnce; ++i) {
            id[i] = i < left ? __ldg(ids + i) : kNowhere;
        }
#pragma unroll
        for (uint32_t i = 0; i < kIdsAtOnce; ++i) {
            expert[i] = id[i] >> 32 == 0 ? static_cast<uint32_t>(id[i]) : ~uint32_t{0};
        }
#pragma unroll 1
        for (uint32_t number = min(left, kIdsAtOnce); number != 0; --number) {
            const uint32_t all = divide(expert[0], shape.local_experts, shape.local_experts_reciprocal).quotient;
            const uint32_t host = all - base;
            if (expert[0] < experts && host < kRanksOfWord) {
                hosts |= 1u << host;
            }
#pragma unroll
            for (uint32_t i = 1; i < kIdsAtOnce; ++i) {
                expert[i - 1] = expert[i];
            }
        }
    }
    return hosts;
}

// Counts this rank's tokens by the ranks that they go to, and finds those of `token`. Counts are 0 before.
__device__ __forceinline__ void count_tokens(const Block& block, uint32_t token) {
    const uint32_t ranks = block.op.ranks();
#pragma unroll 1
    for (uint32_t base = 0; base < ranks; base += kRanksOfWord) {
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i - lane_idx() < block.shape.tokens; i += blockDim.x) {
            const uint32_t hosts = i < block.shape.tokens ? hosts_of(block, i, base) : 0;
            if (i == token) {
                block.shared.goes_to[base / kRanksOfWord] = hosts;
            }
            const LaneMask earlier = ballot(i < token);
#pragma unroll 1
            for (uint32_t rank = base; rank < min(ranks, base + kRanksOfWord); ++rank) {
                const LaneMask going = ballot(static_cast<int>(hosts >> (rank - base) & 1));
                if (lane_idx() == 0 && going.any()) {
                    atomicAdd(&block.shared.all[rank], going.count());
                    atomicAdd(&block.shared.before[rank], (going & earlier).count());
                }
            }
        }
    }
}

// ---- Whether peers' banks are clean -------------------------------------------------------------

// What `peer` has told in the banks of both parities, as loaded before it is known which is that of the operation
// before.
struct CleanWords {
    uint64_t packet[2];

    __device__ __forceinline__ void load(const Op& op, uint32_t peer) {
#pragma unroll
        for (uint32_t parity = 0; parity < 2; ++parity) {
            const Bank<Own> bank = {op.common,
                                    own_window(op.common.peers) + op.bank_of_channel(LL_WHOLE_CHANNEL, parity)};
            packet[parity] = ld_relaxed_sys(bank.counts(peer));
        }
    }
    // Whether the operation before told that the bank is clean.
    __device__ __forceinline__ bool told(const Op& op, uint32_t bank) const {
        const uint64_t before = packet[op.epoch_before & 1];
        return packet_epoch(before) == op.epoch_before && (packet_data(before) >> (kCleanShift + bank) & 1) != 0;
    }
};

// Cleans the bank, which rows of an earlier dispatch are in, of a length of their own; the last block tells the peers.
// All threads call it.
__device__ __noinline__ static void clean_bank(const LlCommon& common, const LlView& view, uint32_t epoch) {
    Op op(common, OneNode{common.peers});
    op.resume(epoch);
    const uint32_t row_bytes = ld_relaxed_gpu(&view.state->row_bytes[view.bank]);
    const uint32_t vecs = row_bytes / sizeof(Vec16);
#pragma unroll 1
    for (uint32_t source = 0; source < op.ranks(); ++source) {
        const bool stays = source == op.rank() && row_bytes == common.shape.row_bytes;
        const uint64_t used = stays ? 0 : uint64_t{view.state->rows[view.bank][source]} * vecs;
        Vec16* at = as<Vec16>(view.rows + uint64_t{source} * common.shape.max_tokens * row_bytes);
#pragma unroll 1
        for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < used; i += gridDim.x * blockDim.x) {
            st_row(at + i, all_sentinels());
        }
    }
    __syncthreads();
    const bool cleaned_last =
        threadIdx.x == 0 && inc_acq_rel_gpu(&view.state->blocks_cleaned, gridDim.x - 1) == gridDim.x - 1;
    if (__syncthreads_or(cleaned_last) != 0 && threadIdx.x < op.peers() && is_active(common.peers, threadIdx.x)) {
        signal(op.at(threadIdx.x).fingerprint(op.rank()), op.packet(common.fingerprint));
    }
}

// Waits until the peers' banks, and this rank's, are clean; cleans this one's if its bank is not. False if that was
// given up. All threads call it.
__device__ __noinline__ static bool wait_until_clean(const LlCommon& common, const LlView& view, uint32_t epoch,
                                                     bool is_clean) {
    if (!is_clean) {
        clean_bank(common, view, epoch);
    }
    Op op(common, OneNode{common.peers});
    op.resume(epoch);
    bool held = false;
    if (threadIdx.x < op.peers() && is_active(common.peers, threadIdx.x)) {
        const uint64_t* at = op.here().fingerprint(threadIdx.x);
        uint32_t got;
        held = !wait_in(
            op, op.from(threadIdx.x, WAIT_BEGIN), [&] { return (got = packet_epoch(ld_acquire_sys(at))) == epoch; },
            [&] { return got; });
    }
    return __syncthreads_or(held) == 0;
}

}  // namespace nccl_ep::ll_rank_dispatch_view_impl
