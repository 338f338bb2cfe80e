// The routers of a dispatch: the first warps of the receiving blocks. They notify the peers of what comes, and
// compute where rows begin.
#pragma once

#include "dispatch_block.cuh"

namespace nccl_ep::ll_dispatch_impl {

// A block's part of the work for one source: number `index` of so many blocks.
struct BlockOf {
    uint32_t index;
    uint32_t blocks;
};

// Counts the rows per expert: those of entries before `first` in the block's histogram and, in
// blocks that notify a peer of its counts, those of all entries in `all`. `early` is the expert of this
// thread's first entry.
template <typename Op>
__device__ void count_entries(const Block<Op>& block, const typename Op::Source& source, uint32_t first,
                              uint32_t* all, int32_t early) {
    const uint32_t entries = source.tokens() * block.shape.top_k;
    const uint32_t last = all != nullptr ? entries : first;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < last; i += blockDim.x) {
        const int32_t expert = i == threadIdx.x ? early : expert_of_entry(block, source, i);
        if (expert != kNowhere && i < first) {
            atomicAdd(&block.per_expert[expert], 1u);
        }
        if (expert != kNowhere && all != nullptr) {
            atomicAdd(&all[expert], 1u);
        }
    }
}

// Notifies every peer of an entry: its expert's rank gets the index, the others that it is elsewhere.
template <typename Op>
__device__ void notify_entry(const Block<Op>& block, const typename Op::Source& source, uint32_t entry,
                             int32_t expert, uint32_t index) {
    const Op& op = block.op;
    const uint32_t token = entry / block.shape.top_k;
    const uint32_t k = entry % block.shape.top_k;
    const uint32_t local = block.shape.local_experts;
    const int32_t host = op.nodes.peer_of(rank_of_expert(block.shape, expert));
    for (uint32_t peer = 0; peer < op.peers(); ++peer) {
        EntryWord word = EntryWord::elsewhere();
        if (host == static_cast<int32_t>(peer)) {
            word = EntryWord::here(expert % local, index);
        }
        if (is_active(op.common.peers, peer)) {
            put_value(op.at(peer).entries(source.rank(), token) + k, op.packet(word.data));
        }
    }
    op.experts_of(source.number(), token)[k] = expert;
}

// One warp walks entries [first, last) in order; the histogram holds all entries before them, and
// them as well afterwards.
template <typename Op>
__device__ void notify_entries(const Block<Op>& block, const typename Op::Source& source, uint32_t first,
                               uint32_t last) {
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

// Notifies the peers that are this block's of how many rows their experts get from the source.
template <typename Op>
__device__ void notify_counts(const Block<Op>& block, const typename Op::Source& source, const BlockOf& part,
                              const uint32_t* all) {
    const Op& op = block.op;
    const uint32_t local = block.shape.local_experts;
    for (uint32_t peer = part.index; peer < op.peers(); peer += part.blocks) {
        if (!is_active(op.common.peers, peer)) {
            continue;
        }
        const Bank<Remote> bank = op.at(peer);
        const uint32_t first = op.nodes.rank_of_peer(peer) * local;
        for (uint32_t i = threadIdx.x; i <= local; i += kRouterThreads) {
            const uint32_t count = i < local ? all[first + i] : source.tokens();
            put_value(bank.counts(source.rank()) + i, op.packet(count));
        }
        if (threadIdx.x == 0) {
            if constexpr (Op::Rows::kScaled) {
                put_value(bank.scales_word(source.rank()), op.packet(op.common.scales_word));
            }
            put_value(bank.fingerprint(source.rank()), op.packet(op.common.fingerprint));
        }
    }
}

// How many tokens `source` has, once it has said so: zero if it is not active.
template <typename Op>
__device__ uint32_t wait_for_tokens(const Block<Op>& block, uint32_t source) {
    const Op& op = block.op;
    if (!is_active(op.common.peers, op.nodes.carrier_of(source))) {
        return 0;
    }
    if (block.receivers.index() == 0) {
        check_fingerprint(op, source);
    }
    const uint32_t claimed =
        wait_for_packet(op.common, op.here().counts(source) + block.shape.local_experts,
                        op.from(source, WAIT_COUNTS))
            .data;
    // It becomes an address: a peer cannot have more tokens than a rank may have.
    return min(claimed, block.shape.max_tokens);
}

// How many rows `source` sends to a local expert, once it has said so.
template <typename Op>
__device__ uint32_t wait_for_count(const Block<Op>& block, uint32_t source, uint32_t expert) {
    const Op& op = block.op;
    if (!is_active(op.common.peers, op.nodes.carrier_of(source))) {
        return 0;
    }
    return wait_for_packet(op.common, op.here().counts(source) + expert,
                           op.from(source, WAIT_COUNTS))
        .data;
}

// Repeated ids give a local expert `total` rows, more than it has slots: the group fails, before anybody sums without
// those that find none.
template <typename Op>
__device__ void report_surplus(const Block<Op>& block, uint32_t expert, uint32_t total) {
    const auto surplus = block.output.find_surplus(block.per_expert, expert, total);
    const uint32_t named = block.op.rank() * block.shape.local_experts + expert;
    report_difference(block.op, FAULT_EXPERT_ROWS, block.op.from(surplus.source, named),
                      block.shape.max_tokens, surplus.rows);
}

// From the sources' counts: where the rows of each begin, and how many an expert gets in all.
template <typename Op>
__device__ void find_begins(const Block<Op>& block) {
    const Op& op = block.op;
    const uint32_t local = block.shape.local_experts;
    for (uint32_t source = threadIdx.x; source < op.ranks(); source += kRouterThreads) {
        const uint32_t tokens = wait_for_tokens(block, source);
        block.tokens_of[source] = tokens;
        atomicMax(&block.shared.most_tokens, tokens);
        if (block.receivers.index() == 0) {
            block.params.common.handle.tokens_of[source] = tokens;
        }
    }
    mbarrier_arrive(&block.shared.tokens_known);
    meet_routers();  // the histograms are done with, too
    if (block.receivers.index() != 0 && block.receivers.index() >= arriving_units(block)) {
        return;
    }
    uint32_t overfull = 0;
    uint32_t rows_of_overfull = 0;
    for (uint32_t i = threadIdx.x; i < num_experts(block); i += kRouterThreads) {
        block.per_expert[i] = wait_for_count(block, i / local, i % local);
    }
    meet_routers();
    for (uint32_t expert = threadIdx.x; expert < local; expert += kRouterThreads) {
        const uint32_t total = block.output.find_begins(block.per_expert, expert);
        if (block.receivers.index() == 0 && block.params.counter != nullptr) {
            block.params.counter[expert] = block.output.kept(total);
        }
        if (total > block.output.rows_of_expert()) {
            overfull = expert;
            rows_of_overfull = total;
        }
    }
    mbarrier_arrive(&block.shared.begins_known);
    if (rows_of_overfull != 0 && block.receivers.index() == 0) {
        report_surplus(block, overfull, rows_of_overfull);
    }
    if constexpr (Op::Rows::kScaled) {
        // Last, as rows need not wait for it: their number does not depend on their scales.
        if (block.receivers.index() == 0) {
            for (uint32_t source = threadIdx.x; source < op.ranks(); source += kRouterThreads) {
                if (is_active(op.common.peers, op.nodes.carrier_of(source))) {
                    check_scales(op, source);
                }
            }
        }
    }
}

// A part of a source's tokens: notifies the peers of their entries, in the first blocks also of the counts. All
// threads of the block call it; the routers notify.
template <typename Op>
__device__ void notify(const Block<Op>& block, const typename Op::Source& source, const BlockOf& part,
                       int32_t early) {
    const Op& op = block.op;
    const uint32_t tokens = source.tokens();
    const uint32_t first = uint64_t{tokens} * part.index / part.blocks * block.shape.top_k;
    const uint32_t last = uint64_t{tokens} * (part.index + 1) / part.blocks * block.shape.top_k;
    uint32_t* all = part.index < op.peers() ? block.per_expert + num_experts(block) : nullptr;
    count_entries(block, source, first, all, early);
    __syncthreads();
    if (warp_idx() >= kRouterWarps) {
        return;
    }
    if (all != nullptr) {
        notify_counts(block, source, part, all);
    }
    if (warp_idx() == 0) {
        notify_entries(block, source, first, last);
    }
}

// The first source of which this block notifies. Blocks take turns at the sources.
template <typename Op>
__device__ __forceinline__ uint32_t first_notified(const Block<Op>& block) {
    return block.first_source() + block.notifiers.index() % block.sources();
}

// The notifiers' work; `early` is of the block's first source.
template <typename Op>
__device__ void notify_all(const Block<Op>& block, int32_t early) {
    const uint32_t index = block.notifiers.index();
    const uint32_t blocks = block.notifiers.blocks;
    if constexpr (!Op::kSeveral) {
        notify(block, block.source(0), {index, blocks}, early);
        return;
    }
    const uint32_t sources = block.sources();
    const uint32_t turn = index % sources;
    const BlockOf part = {index / sources, (blocks - turn + sources - 1) / sources};
    for (uint32_t next = turn; next < sources; next += blocks) {
        const typename Op::Source source = block.source(block.first_source() + next);
        if (next != turn) {
            __syncthreads();  // the routers are done with the histograms
            clear_histograms(block);
            __syncthreads();
            const bool has_entry = threadIdx.x < source.tokens() * block.shape.top_k;
            early = has_entry ? expert_of_entry(block, source, threadIdx.x) : kNowhere;
        }
        notify(block, source, part, early);
    }
}

}  // namespace nccl_ep::ll_dispatch_impl
