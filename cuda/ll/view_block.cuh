// The context of a dispatch into a view, and what its blocks must find out first: how many of this rank's tokens go to
// each peer, and whether the peers' banks are clean (view.cuh).
#pragma once

#include "view.cuh"

namespace nccl_ep::ll_rank_dispatch_view_impl {

using Op = Operation<OneNode>;

// Ranks per word of a bit set.
constexpr uint32_t kRanksOfWord = 8 * sizeof(uint32_t);
// Ids of a token whose loads are in flight together.
constexpr uint32_t kIdsAtOnce = 8;

// In place of the number of rows from a source: not known yet.
constexpr uint32_t kUnknownRows = ~uint32_t{0};

struct SharedStorage {
    StartState start;
    uint32_t owner[LL_VIEW_BANKS];
    // Whether the bank of some peer may not be clean.
    uint32_t is_unknown;
    LateWaitOfBlock late;
    // The set of ranks to which the block's token goes.
    uint32_t goes_to[(MAX_PEERS + kRanksOfWord - 1) / kRanksOfWord];
    // By rank: how many of this rank's tokens go there; those before the block's token and, in the first block, all.
    uint32_t before[MAX_PEERS];
    uint32_t all[MAX_PEERS];
    // By source: how many rows come from it.
    uint32_t rows_from[MAX_PEERS];
};

struct Block {
    const LlRankDispatchViewParams& params;
    const Op& op;
    SharedStorage& shared;

    const LlDispatchParams& dispatch = params.dispatch.dispatch;
    const LlShape& shape = dispatch.common.shape;
    const LlView& view = params.view;
    ViewUnit first = ViewUnit(view, blockIdx.x);

    __device__ bool is_first() const { return blockIdx.x == 0; }
    __device__ bool moves_rows() const { return warp_idx() < view.warps; }
    // The distance, in packets, from an entry to its weight.
    __device__ uint64_t weights_behind() const { return uint64_t{op.ranks() * shape.max_tokens} * LL_MAX_TOP_K; }
    __device__ bool goes_to(uint32_t rank) const {
        return (shared.goes_to[rank / kRanksOfWord] >> rank % kRanksOfWord & 1) != 0;
    }
};

// The rank `number` places after this one, wrapping around.
__device__ __forceinline__ uint32_t rank_after(const Op& op, uint32_t number) {
    const uint32_t rank = op.rank() + number;
    return rank - (rank < op.peers() ? 0 : op.peers());
}

// The set of ranks from `base` on that host experts of a token of this rank.
__device__ __forceinline__ uint32_t hosts_of(const Block& block, uint32_t token, uint32_t base) {
    const LlShape& shape = block.shape;
    const uint32_t first = base * shape.local_experts;
    const uint32_t experts = min(block.op.ranks() - base, kRanksOfWord) * shape.local_experts;
    // 2^31 / local experts, rounded up: the high word of `twice` times that is the exact quotient, as a rank has fewer
    // than 2^13 experts and there are fewer than 2^18.
    const uint32_t reciprocal = (shape.local_experts_reciprocal >> 1) + 1;
    const auto* ids = reinterpret_cast<const long long*>(block.dispatch.topk_idx) + uint64_t{token} * shape.top_k;
    uint32_t hosts = 0;
#pragma unroll 1
    for (uint32_t left = shape.top_k; left != 0; left -= min(left, kIdsAtOnce), ids += kIdsAtOnce) {
        long long id[kIdsAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kIdsAtOnce; ++i) {
            id[i] = i < left ? __ldg(ids + i) : kNowhere;
        }
#pragma unroll
        for (uint32_t i = 0; i < kIdsAtOnce; ++i) {
            const uint32_t expert = static_cast<uint32_t>(id[i]) - first;
            const uint32_t twice = expert + expert;
            const uint32_t host = static_cast<uint32_t>(uint64_t{twice} * reciprocal >> 32);
            hosts |= id[i] >> 32 == 0 && expert < experts ? 1u << host : 0;
        }
    }
    return hosts;
}

// All warps but the last count this rank's tokens by rank, and find the ranks of `token`. Counts must be 0 before. Only
// the first block also counts the tokens after `token`.
__device__ __forceinline__ void count_tokens(const Block& block, uint32_t token) {
    const uint32_t ranks = block.op.ranks();
    const uint32_t tokens = block.is_first() ? block.shape.tokens : min(token + 1, block.shape.tokens);
#pragma unroll 1
    for (uint32_t base = 0; base < ranks; base += kRanksOfWord) {
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i - lane_idx() < tokens; i += blockDim.x - kWarpSize) {
            const uint32_t hosts = i < tokens ? hosts_of(block, i, base) : 0;
            if (i == token) {
                block.shared.goes_to[base / kRanksOfWord] = hosts;
            }
            // Each lane gets the tokens of one rank.
            LaneMask going;
#pragma unroll 1
            for (uint32_t rank = 0; rank < min(ranks - base, kRanksOfWord); ++rank) {
                const LaneMask there = ballot(static_cast<int>(hosts >> rank & 1));
                going.bits = rank == lane_idx() ? there.bits : going.bits;
            }
            const LaneMask earlier = ballot(i < token);
            if (going.any()) {
                atomicAdd(&block.shared.all[base + lane_idx()], going.count());
                atomicAdd(&block.shared.before[base + lane_idx()], (going & earlier).count());
            }
        }
    }
}

// ---- Whether peers' banks are clean -------------------------------------------------------------

// The packets with a peer's clean_word in the banks of both parities; loaded before it is known which of them is the
// last operation's.
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
    // Whether the peer's notification in the previous operation says that its bank `bank` is clean.
    __device__ __forceinline__ bool says_clean(const Op& op, uint32_t bank) const {
        const uint64_t before = (op.epoch_before & 1) != 0 ? packet[1] : packet[0];
        return packet_epoch(before) == op.epoch_before && (packet_data(before) >> (kCleanShift + bank) & 1) != 0;
    }
};

// Cleans this rank's bank of an earlier dispatch's rows, whose lengths may differ; the last block then sends the
// fingerprint to the peers. All threads call it.
__device__ __forceinline__ void clean_bank(const LlCommon& common, const LlView& view, uint32_t epoch) {
    Op op(common, OneNode{common.peers});
    op.resume(epoch);
    const uint32_t row_bytes = ld_relaxed_gpu(&view.state->row_bytes[view.bank]);
    const uint32_t scale_bytes = ld_relaxed_gpu(&view.state->scale_bytes[view.bank]);
    // If lengths differ, own rows have to be cleaned as well, and earlier dispatches may have left rows anywhere.
    const bool lengths_differ = row_bytes != common.shape.row_bytes || scale_bytes != view.scale_bytes;
    const uint64_t bytes = row_bytes + (lengths_differ ? scale_bytes : 0);
#pragma unroll 1
    for (uint32_t source = 0; source < op.ranks(); ++source) {
        const uint32_t others = source == op.rank() ? 0 : view.state->rows[view.bank][source];
        const uint64_t used = (lengths_differ ? common.shape.max_tokens : others) * bytes / sizeof(Vec16);
        Vec16* at = as<Vec16>(view.rows + source * common.shape.max_tokens * bytes);
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

// In place of the bank's owner: its last rows had other lengths.
constexpr uint32_t kOtherLengths = ~uint32_t{0};

// Waits until the banks of all ranks are clean, after cleaning this rank's if necessary; false if it gives up. All
// threads call it.
__device__ __forceinline__ bool wait_until_clean(const LlCommon& common, const LlView& view, LateWaitOfBlock& late,
                                                 uint32_t epoch, bool is_clean) {
    if (!is_clean) {
        clean_bank(common, view, epoch);
    }
    Op op(common, OneNode{common.peers});
    op.resume(epoch);
    bool gave_up = false;
    if (threadIdx.x < op.peers() && is_active(common.peers, threadIdx.x)) {
        const uint64_t* at = op.here().fingerprint(threadIdx.x);
        gave_up = !await(op, late, WAIT_BEGIN, threadIdx.x, [&] { return packet_epoch(ld_acquire_sys(at)) == epoch; });
    }
    return __syncthreads_or(gave_up) == 0;
}

}  // namespace nccl_ep::ll_rank_dispatch_view_impl
