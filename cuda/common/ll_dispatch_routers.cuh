// The routers of a dispatch block: what they tell the peers, and what they make of what the peers tell.
#pragma once

#include "ll_dispatch_block.cuh"

namespace nccl_ep::ll_dispatch_impl {

// Counts the rows per expert: those of entries before `first` in the block's histogram and, in
// blocks that tell a peer its counts, those of all entries in `all`. `early` is the expert of this
// thread's first entry.
__device__ void count_entries(const Block& block, uint32_t first, uint32_t* all, int32_t early) {
    const uint32_t entries = block.shape.tokens * block.shape.top_k;
    const uint32_t last = all != nullptr ? entries : first;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < last; i += blockDim.x) {
        const int32_t expert = i == threadIdx.x ? early : expert_of_entry(block, i);
        if (expert != kNowhere && i < first) {
            atomicAdd(&block.per_expert[expert], 1u);
        }
        if (expert != kNowhere && all != nullptr) {
            atomicAdd(&all[expert], 1u);
        }
    }
}

// Tells every rank about entry `index`: its own rank the place, the others that it is not theirs.
__device__ void announce_entry(const Block& block, uint32_t index, int32_t expert, uint32_t place) {
    const Op& op = block.op;
    const uint32_t token = index / block.shape.top_k;
    const uint32_t k = index % block.shape.top_k;
    const uint32_t local = block.shape.local_experts;
    for (uint32_t peer = 0; peer < op.ranks(); ++peer) {
        uint32_t data = kElsewhere;
        if (expert != kNowhere && expert / local == peer) {
            data = (expert % local) << kPlaceBits | (place < kMaxPlace ? place : kMaxPlace);
        }
        st_relaxed_sys(op.entries(peer, op.rank(), token) + k, op.packet(data));
    }
    block.params.common.handle.expert_of[index] = expert;
}

// One warp walks entries [first, last) in order; the histogram holds all entries before them, and
// them as well afterwards.
__device__ void announce_entries(const Block& block, uint32_t first, uint32_t last) {
    for (uint32_t base = first; base < last; base += kWarpSize) {
        const uint32_t index = base + lane_idx();
        const int32_t expert = index < last ? expert_of_entry(block, index) : kNowhere;
        const uint32_t same = __match_any_sync(kAllLanes, expert);
        const uint32_t before = lanes_before(same);
        uint32_t place = 0;
        if (expert != kNowhere) {
            place = block.per_expert[expert] + before;
        }
        __syncwarp();
        if (expert != kNowhere && before == 0) {
            block.per_expert[expert] += __popc(same);
        }
        __syncwarp();
        if (index < last) {
            announce_entry(block, index, expert, place);
        }
    }
}

// Tells the peers that are this block's to tell how many rows their experts get from here.
__device__ void announce_counts(const Block& block, const uint32_t* all) {
    const Op& op = block.op;
    const uint32_t local = block.shape.local_experts;
    for (uint32_t peer = block.announcers.index(); peer < op.ranks();
         peer += block.announcers.blocks) {
        uint64_t* counts = op.counts(peer, op.rank());
        for (uint32_t i = threadIdx.x; i <= local; i += kRouterThreads) {
            const uint32_t count = i < local ? all[peer * local + i] : block.shape.tokens;
            st_relaxed_sys(counts + i, op.packet(count));
        }
        if (threadIdx.x == 0) {
            st_relaxed_sys(op.signature(peer, op.rank()), op.packet(op.common.signature));
        }
    }
}

// From the sources' counts: where the rows of each begin, and how many an expert gets in all.
__device__ void find_begins(const Block& block) {
    const Op& op = block.op;
    const uint32_t local = block.shape.local_experts;
    const uint32_t most_rows = op.ranks() * block.shape.max_tokens;
    for (uint32_t source = threadIdx.x; source < op.ranks(); source += kRouterThreads) {
        if (block.receivers.index() == 0) {
            check_signature(op, source);
        }
        const uint32_t told = wait_for_packet(op.common, op.counts(op.rank(), source) + local,
                                              op.from(source, WAIT_COUNTS))
                                  .data;
        // What a peer tells becomes an address: no number that cannot be is taken at its word.
        const uint32_t tokens = min(told, block.shape.max_tokens);
        block.shared.tokens_of[source] = tokens;
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
    for (uint32_t i = threadIdx.x; i < num_experts(block); i += kRouterThreads) {
        const uint32_t source = i / local;
        block.per_expert[i] = wait_for_packet(op.common, op.counts(op.rank(), source) + i % local,
                                              op.from(source, WAIT_COUNTS))
                                  .data;
    }
    meet_routers();
    for (uint32_t expert = threadIdx.x; expert < local; expert += kRouterThreads) {
        uint32_t total = 0;
        for (uint32_t source = 0; source < op.ranks(); ++source) {
            const uint32_t count = block.per_expert[source * local + expert];
            block.per_expert[source * local + expert] = total;
            total += count;
        }
        if (block.receivers.index() == 0 && block.params.counter != nullptr) {
            block.params.counter[expert] = total < most_rows ? total : most_rows;
        }
    }
    mbarrier_arrive(&block.shared.begins_known);
}

// What the announcers tell the peers: each the entries of its share of the tokens, the first ones
// also the counts. All threads of the block call it; the routers tell.
__device__ void announce(const Block& block, int32_t early) {
    const uint32_t tokens = block.shape.tokens;
    const uint32_t index = block.announcers.index();
    const uint32_t blocks = block.announcers.blocks;
    const uint32_t first = uint64_t{tokens} * index / blocks * block.shape.top_k;
    const uint32_t last = uint64_t{tokens} * (index + 1) / blocks * block.shape.top_k;
    uint32_t* all = index < block.op.ranks() ? block.per_expert + num_experts(block) : nullptr;
    count_entries(block, first, all, early);
    __syncthreads();
    if (warp_idx() >= kRouterWarps) {
        return;
    }
    if (all != nullptr) {
        announce_counts(block, all);
    }
    if (warp_idx() == 0) {
        announce_entries(block, first, last);
    }
}

}  // namespace nccl_ep::ll_dispatch_impl
