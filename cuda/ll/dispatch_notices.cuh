// The notifications of a dispatch, beside its rows: how many rows each expert of a peer gets from this rank, and which
// index each (token, k) has among these. From the counts of all ranks a receiver finds where the rows of each begin.
#pragma once

#include "dispatch_block.cuh"

namespace nccl_ep::ll_dispatch_impl {

// A block's share of the notifications of one source, which `blocks` blocks divide: it is number `index` of them.
struct SourceShare {
    uint32_t index;
    uint32_t blocks;
};

// Counts the entries per expert: those before `first` into the block's histogram and, in blocks that notify a peer of
// its counts, all of them into `all`.
template <typename Op>
__device__ void count_entries(const Block<Op>& block, const typename Op::Source& source, uint32_t first,
                              uint32_t* all) {
    const uint32_t entries = source.tokens() * block.shape.top_k;
    const uint32_t last = all != nullptr ? entries : first;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < last; i += blockDim.x) {
        const int32_t expert = expert_of_entry(block, source, i);
        if (expert == kNowhere) {
            continue;
        }
        if (i < first) {
            atomicAdd(&block.per_expert[expert], 1u);
        }
        if (all != nullptr) {
            atomicAdd(&all[expert], 1u);
        }
    }
}

// Notifies every peer of an entry: the rank of its expert gets the index, the others get "elsewhere".
template <typename Op>
__device__ void notify_entry(const Block<Op>& block, const typename Op::Source& source, uint32_t entry,
                             int32_t expert, uint32_t index) {
    const Op& op = block.op;
    const DivMod at = divide(entry, block.shape.top_k, block.shape.top_k_reciprocal);
    const uint32_t token = at.quotient;
    const uint32_t k = at.remainder;
    const int32_t rank = rank_of_expert(block.shape, expert);
    const int32_t host = op.nodes.peer_of(rank);
#pragma unroll 1
    for (uint32_t peer = 0; peer < op.peers(); ++peer) {
        EntryWord word = EntryWord::elsewhere();
        if (host == static_cast<int32_t>(peer)) {
            word = EntryWord::here(expert - rank * block.shape.local_experts, index);
        }
        if (is_active(op.common.peers, peer)) {
            put_value(op.at(peer).entries(source.rank(), token) + k, op.packet(word.data));
        }
    }
    op.experts_of(source.number(), token)[k] = expert;
}

// One warp notifies the peers of entries [first, last), in order. The histogram counts all entries before them, and
// afterwards these as well.
template <typename Op>
__device__ void notify_entries(const Block<Op>& block, const typename Op::Source& source, uint32_t first,
                               uint32_t last) {
#pragma unroll 1
    for (uint32_t base = first; base < last; base += kWarpSize) {
        const uint32_t entry = base + lane_idx();
        const int32_t expert = entry < last ? expert_of_entry(block, source, entry) : kNowhere;
        const LaneMask same = match(expert);
        const uint32_t before = same.count_before();
        uint32_t index = 0;
        if (expert != kNowhere) {
            index = block.per_expert[expert] + before;
        }
        sync_warp();
        if (expert != kNowhere && before == 0) {
            block.per_expert[expert] += same.count();
        }
        sync_warp();
        if (entry < last) {
            notify_entry(block, source, entry, expert, index);
        }
    }
}

// The number of words in a source's counts: one for each of the peer's experts, then its number of tokens, its
// fingerprint and, where rows have scales, its scales word.
template <typename Op>
__device__ __forceinline__ uint32_t words_of_counts(const Block<Op>& block) {
    return block.shape.local_experts + (Op::Rows::kScaled ? 3 : 2);
}

// Sends this block's share of the peers the source's counts (words_of_counts).
template <typename Op>
__device__ void notify_counts(const Block<Op>& block, const typename Op::Source& source, const SourceShare& part,
                              const uint32_t* all) {
    const Op& op = block.op;
    const uint32_t local = block.shape.local_experts;
#pragma unroll 1
    for (uint32_t peer = part.index; peer < op.peers(); peer += part.blocks) {
        if (!is_active(op.common.peers, peer)) {
            continue;
        }
        const Remote<uint64_t> words = op.at(peer).counts(source.rank());
        const uint32_t first = op.nodes.rank_of_peer(peer) * local;
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < words_of_counts(block); i += blockDim.x) {
            uint32_t word = op.common.scales_word;
            word = i == local + 1 ? op.common.fingerprint : word;
            word = i == local ? source.tokens() : word;
            word = i < local ? all[first + i] : word;
            put_value(words + i, op.packet(word));
        }
    }
}

// Repeated ids give a local expert `total` rows, more than it has room for. The group fails, before a combine adds up
// fewer rows than there should be.
template <typename Layout>
__device__ inline void report_overflow(const LlCommon& common, const Layout& output, const uint32_t* begins,
                                       uint32_t rank, uint32_t expert, uint32_t total) {
    const auto surplus = output.find_overflow(begins, expert, total);
    const uint32_t named = rank * common.shape.local_experts + expert;
    fail(common, FAULT_EXPERT_ROWS, {named, surplus.source, 0}, common.shape.max_tokens, surplus.rows);
}

// Waits for the counts of all sources. The first block also checks their fingerprints and scales words.
template <typename Op>
__device__ __forceinline__ void receive_counts(const Block<Op>& block, bool is_first) {
    const Op& op = block.op;
    const uint32_t local = block.shape.local_experts;
    const uint32_t words = local + LL_COUNTS_BESIDE_EXPERTS;
    const uint32_t words_awaited = is_first ? words_of_counts(block) : local + 1;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < op.ranks() * words; i += blockDim.x) {
        const DivMod at = divide(i, words, block.shape.counts_reciprocal);
        const uint32_t source = at.quotient;
        const uint32_t word = at.remainder;
        if (word >= words_awaited) {
            continue;
        }
        uint32_t data = 0;
        if (is_active(op.common.peers, op.nodes.forwarder_of(source))) {
            const uint32_t what = word > local ? WAIT_BEGIN : WAIT_COUNTS;
            data = wait_for_packet_in(op, op.here().counts(0) + i, op.from(source, what)).data;
        } else if (word > local) {
            continue;
        }
        if (word < local) {
            block.per_expert[block.output.cell(source, word)] = data;
        } else if (word == local) {
            // Bounded, as it becomes an address and comes from a peer.
            const uint32_t tokens = min(data, block.shape.max_tokens);
            block.tokens_of[source] = tokens;
            atomicMax(&block.shared.most_tokens, tokens);
            if (is_first) {
                block.params.common.handle.tokens_of[source] = tokens;
            }
        } else if (data != (word == local + 1 ? op.common.fingerprint : op.common.scales_word)) {
            report_difference(op, source, word == local + 1 ? data : op.common.fingerprint);
        }
    }
}

// Measures how long the sources take to notify this rank, if the caller wants that.
template <typename Op>
__device__ __forceinline__ void time_sources(const Block<Op>& block) {
    if (block.params.waits != nullptr && block.warp == num_warps() - 1) {
        const Op& op = block.op;
        const uint64_t* tokens = op.here().counts(0) + block.shape.local_experts;
        time_ranks(op.common, op.nodes, op.epoch, tokens, block.params.waits);
    }
}

// Finds, from the sources' counts, where the rows of each begin, and stores how many each expert gets.
template <typename Op>
__device__ void find_begins(const Block<Op>& block) {
    const Op& op = block.op;
    const uint32_t local = block.shape.local_experts;
    const bool is_first = block.receivers.index() == 0;
    if (block.notifies()) {
        __syncthreads();  // the counts overwrite the histograms
    }
    if (is_first) {
        time_sources(block);
    }
    receive_counts(block, is_first);
    __syncthreads();
#pragma unroll 1
    for (uint32_t expert = threadIdx.x; expert < local; expert += blockDim.x) {
        const uint32_t total = block.output.find_begins(block.per_expert, expert);
        if (!is_first) {
            continue;
        }
        if (block.params.counter != nullptr) {
            block.params.counter[expert] = block.output.kept(total);
        }
        if (total > block.output.rows_of_expert()) {
            report_overflow(op.common, block.output, block.per_expert, op.rank(), expert, total);
        }
    }
    __syncthreads();
}

// Notifies the peers of this block's share of a source's entries; the first blocks also send the counts.
template <typename Op>
__device__ void notify(const Block<Op>& block, const typename Op::Source& source, const SourceShare& part) {
    const uint32_t entries = source.tokens() * block.shape.top_k;
    uint32_t per_block = kWarpSize;
#pragma unroll 1
    while (per_block * part.blocks < entries) {
        per_block += kWarpSize;
    }
    const uint32_t first = min(per_block * part.index, entries);
    uint32_t* all = part.index < block.op.peers() ? block.per_expert + num_experts(block) : nullptr;
    count_entries(block, source, first, all);
    __syncthreads();
    if (all != nullptr) {
        notify_counts(block, source, part, all);
    }
    if (block.warp == 0) {
        notify_entries(block, source, first, min(first + per_block, entries));
    }
}

// The notifiers' work: they are dealt to the sources in turn. Calls `notify` with a source and the block's share of it.
template <typename Op, typename Notify>
__device__ void notify_all(const Block<Op>& block, Notify notify) {
    const uint32_t index = block.notifiers.index();
    const uint32_t blocks = block.notifiers.blocks;
    if constexpr (!Op::kSeveral) {
        notify(block, block.source(0), {index, blocks});
        return;
    }
    const uint32_t sources = block.sources();
    const uint32_t turn = index % sources;
    const SourceShare part = {index / sources, (blocks - turn + sources - 1) / sources};
#pragma unroll 1
    for (uint32_t next = turn; next < sources; next += blocks) {
        const typename Op::Source source = block.source(block.first_source() + next);
        if (next != turn) {
            __syncthreads();  // all threads have read the histograms
            clear_histograms(block);
            __syncthreads();
        }
        notify(block, source, part);
    }
}

}  // namespace nccl_ep::ll_dispatch_impl
