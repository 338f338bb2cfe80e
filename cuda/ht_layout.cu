// Creation of a high-throughput handle: from the ids, where each row goes and where it lands.
//
// Grid: each block but the last counts and numbers the tokens of its part of this rank's. Whichever of
// them is the last to have counted tells every rank how many rows, and how many for each of its
// experts, it gets from here. The last block of the grid hears the same from every rank and notes
// where each source's rows begin. What is told are packets with the handle's epoch, in two banks that
// take turns: the kernel ends only when it has heard from every rank, so when the kernel after the
// next one begins, every rank has begun the next one and ended this, and nobody reads its bank any
// more.
//
// A rank that refuses its part, or cannot have the memory for it, runs this kernel as well: it says so
// and hears the others, which keeps banks and epochs as they are. Whoever hears of a refusal, or of
// other ids per token, notes that in the place of the number of rows. All ranks come to the same
// conclusion, since what a rank tells it tells to all.
//
// What is heard becomes addresses later, so it is bounded here, once: no rank sends more rows than it
// may have tokens, and all of them together fit 31 bits. A rank that told something else than it sends
// leaves others waiting, but nothing is written or read outside of what they have.
//
// No counting block waits for another: each also counts the tokens before its part itself. Ids are in
// L2 and few.

#include "primitives.cuh"

namespace nccl_ep::ht_layout_impl {

constexpr uint32_t kMaskWords = MAX_PEERS / 32 + 1;
constexpr uint32_t kWarps = HT_LAYOUT_THREADS / kWarpSize;

struct Shared {
    // Rows to each rank of the tokens before those at hand.
    uint32_t rows[kMaskWords * 32];
    // The same of each warp's 32 tokens.
    uint32_t of_warp[kWarps][kMaskWords * 32];
    // Whether this block was the last to have counted, and there is somebody to tell.
    bool is_last;
    // What the listening block has found out: kAgreed, or what goes into the place of the number of
    // rows. Of several reasons the least one counts: a refusal before a difference, then by rank.
    uint32_t verdict;
};

constexpr uint32_t kAgreed = 0xffffffffu;

struct Block {
    const HtLayoutParams& params;
    Shared& shared;

    __device__ uint32_t ranks() const { return params.peers.ranks; }
    __device__ uint32_t tokens() const { return params.handle.tokens; }
    __device__ uint32_t top_k() const { return params.handle.top_k; }
    __device__ uint32_t local_experts() const { return params.layout.local_experts; }
    __device__ uint32_t experts() const { return ranks() * local_experts(); }
    __device__ bool refuses() const { return params.told >> HT_TOLD_CODE_SHIFT != 0; }

    // The expert that entry k of `token` names; negative if none.
    __device__ int32_t expert(uint32_t token, uint32_t k) const {
        const int64_t id = params.topk_idx[uint64_t{token} * top_k() + k];
        return expert_of_id(id, experts());
    }
    // What the blocks have counted so far.
    __device__ uint32_t* rows_to(uint32_t rank) const { return params.tally + 1 + rank; }
    __device__ uint32_t* rows_for(uint32_t expert) const { return rows_to(ranks()) + expert; }
    // Where `source` tells `owner` its counts; one of them is this rank.
    __device__ uint64_t* counts(uint32_t owner, uint32_t source) const {
        const uint64_t packets = local_experts() + HT_COUNTS_BESIDE_EXPERTS;
        if (owner == source) {
            return params.own_counts + params.bank * packets;
        }
        return reinterpret_cast<uint64_t*>(params.peers.window[owner] + params.layout.counts) +
               (params.bank * ranks() + source) * packets;
    }
    // A number of tokens that a rank has told.
    __device__ uint32_t believed(uint32_t told) const { return min(told, params.max_tokens); }
};

// The ranks that a token goes to.
struct RankMask {
    uint32_t word[kMaskWords];

    __device__ RankMask(const Block& block, uint32_t token) {
#pragma unroll
        for (uint32_t w = 0; w < kMaskWords; ++w) {
            word[w] = 0;
        }
#pragma unroll 4
        for (uint32_t k = 0; token < block.tokens() && k < block.top_k(); ++k) {
            const int32_t expert = block.expert(token, k);
            const uint32_t rank = expert < 0 ? kMaskWords * 32 : expert / block.local_experts();
#pragma unroll
            for (uint32_t w = 0; w < kMaskWords; ++w) {
                word[w] |= rank / 32 == w ? 1u << (rank % 32) : 0;
            }
        }
    }
};

// One warp, one token per lane: calls `use(rank, lanes)` for every rank with the lanes whose token
// goes there.
template <typename Use>
__device__ __forceinline__ void for_each_rank(const Block& block, const RankMask& mask, Use use) {
#pragma unroll
    for (uint32_t w = 0; w < kMaskWords; ++w) {
        for (uint32_t bit = 0; bit < 32 && w * 32 + bit < block.ranks(); ++bit) {
            use(w * 32 + bit, __ballot_sync(kAllLanes, (mask.word[w] >> bit & 1) != 0));
        }
    }
}

// Adds the rows of tokens [first, last) to the block's. `first` is a multiple of 32. All threads call
// it.
__device__ void count_rows(const Block& block, uint32_t first, uint32_t last) {
    uint32_t* of_warp = block.shared.of_warp[warp_idx()];
    for (uint32_t rank = lane_idx(); rank < block.ranks(); rank += kWarpSize) {
        of_warp[rank] = 0;
    }
    __syncwarp();
    for (uint32_t base = first + warp_idx() * kWarpSize; base < last;
         base += kWarps * kWarpSize) {
        const uint32_t token = base + lane_idx();
        const RankMask mask(block, token < last ? token : block.tokens());
        for_each_rank(block, mask, [&](uint32_t rank, uint32_t lanes) {
            if (lane_idx() == rank % kWarpSize) {
                of_warp[rank] += __popc(lanes);
            }
        });
    }
    __syncwarp();
    for (uint32_t rank = lane_idx(); rank < block.ranks(); rank += kWarpSize) {
        atomicAdd(&block.shared.rows[rank], of_warp[rank]);
    }
    __syncthreads();
}

// One thread writes the experts of `token` on `rank`, ascending: the entries after number `written`.
// Returns how many entries are written then.
__device__ uint32_t write_entries(const Block& block, uint32_t token, uint32_t rank,
                                  uint32_t place, uint32_t written) {
    HtEntry* entries = block.params.handle.entries + uint64_t{token} * block.top_k();
    const int32_t end = static_cast<int32_t>((rank + 1) * block.local_experts());
    int32_t last = static_cast<int32_t>(rank * block.local_experts()) - 1;
    for (;;) {
        int32_t next = end;
        for (uint32_t k = 0; k < block.top_k(); ++k) {
            const int32_t expert = block.expert(token, k);
            next = expert > last && expert < next ? expert : next;
        }
        if (next == end) {
            return written;
        }
        entries[written++] = {next, place};
        last = next;
    }
}

// Numbers tokens [first, last), in tiles of one token per thread; the block's rows are those before.
__device__ void number_tokens(const Block& block, uint32_t first, uint32_t last) {
    Shared& shared = block.shared;
    for (uint32_t tile = first; tile < last; tile += HT_LAYOUT_THREADS) {
        const uint32_t token = tile + threadIdx.x;
        const RankMask mask(block, token < last ? token : block.tokens());
        for_each_rank(block, mask, [&](uint32_t rank, uint32_t lanes) {
            if (lane_idx() == rank % kWarpSize) {
                shared.of_warp[warp_idx()][rank] = __popc(lanes);
            }
        });
        __syncthreads();
        for (uint32_t rank = threadIdx.x; rank < block.ranks(); rank += HT_LAYOUT_THREADS) {
            uint32_t rows = shared.rows[rank];
            for (uint32_t warp = 0; warp < kWarps; ++warp) {
                const uint32_t count = shared.of_warp[warp][rank];
                shared.of_warp[warp][rank] = rows;
                rows += count;
            }
            shared.rows[rank] = rows;
        }
        __syncthreads();
        uint32_t written = 0;
        for_each_rank(block, mask, [&](uint32_t rank, uint32_t lanes) {
            if ((lanes >> lane_idx() & 1) != 0) {
                const uint32_t before = lanes_before(lanes);
                const uint32_t place = shared.of_warp[warp_idx()][rank] + before;
                written = write_entries(block, token, rank, place, written);
            }
            __syncwarp();
        });
        for (; token < last && written < block.top_k(); ++written) {
            block.params.handle.entries[uint64_t{token} * block.top_k() + written] = {-1, 0};
        }
        __syncthreads();
    }
}

// Adds tokens [first, last) to the group's tally.
__device__ void tally_tokens(const Block& block, uint32_t first, uint32_t last) {
    for (uint32_t token = first + threadIdx.x; token < last; token += HT_LAYOUT_THREADS) {
        for (uint32_t k = 0; k < block.top_k(); ++k) {
            const int32_t expert = block.expert(token, k);
            bool counts = expert >= 0;
            for (uint32_t earlier = 0; counts && earlier < k; ++earlier) {
                counts = block.expert(token, earlier) != expert;
            }
            if (counts) {
                atomicAdd(block.rows_for(expert), 1u);
            }
        }
    }
    count_rows(block, first, last);
    for (uint32_t rank = threadIdx.x; rank < block.ranks(); rank += HT_LAYOUT_THREADS) {
        atomicAdd(block.rows_to(rank), block.shared.rows[rank]);
    }
}

// Tells every rank what it gets, from the tally of all blocks, which is zero again afterwards.
__device__ void tell(const Block& block) {
    const uint32_t rank = block.params.peers.rank;
    const uint32_t epoch = block.params.epoch;
    const uint32_t local_experts = block.local_experts();
    for (uint32_t i = threadIdx.x; i < block.experts(); i += HT_LAYOUT_THREADS) {
        st_relaxed_sys(block.counts(i / local_experts, rank) + i % local_experts,
                       make_packet(epoch, ld_relaxed_gpu(block.rows_for(i))));
        st_relaxed_gpu(block.rows_for(i), 0);
    }
    for (uint32_t peer = threadIdx.x; peer < block.ranks(); peer += HT_LAYOUT_THREADS) {
        const uint32_t rows = ld_relaxed_gpu(block.rows_to(peer));
        uint64_t* counts = block.counts(peer, rank) + local_experts;
        st_relaxed_sys(counts, make_packet(epoch, rows));
        st_relaxed_sys(counts + 1, make_packet(epoch, block.params.told));
        st_relaxed_gpu(block.rows_to(peer), 0);
        if (!block.refuses()) {
            block.params.handle.departures[peer] = rows;
        }
    }
}

// Counts tokens [first, last); the last block to have done so tells what all have counted. After a
// failure nobody is told anything, and who listens gives up.
__device__ void count_and_tell(const Block& block, uint32_t first, uint32_t last) {
    tally_tokens(block, first, last);
    __syncthreads();
    if (threadIdx.x == 0) {
        const uint32_t others = gridDim.x - 2;
        const bool has_failed = known_failure(block.params.wait) != 0;
        block.shared.is_last =
            inc_acq_rel_gpu(block.params.tally, others) == others && !has_failed;
    }
    __syncthreads();
    if (block.shared.is_last) {
        tell(block);
    }
}

// What it means for this rank that `source` has `told` that.
__device__ uint32_t verdict_on(const Block& block, uint32_t source, const Arrival& told) {
    const uint32_t said = told.data & ((1u << HT_DISAGREED_RANK_SHIFT) - 1);
    const uint32_t why = HT_DISAGREED | source << HT_DISAGREED_RANK_SHIFT | said;
    if (!told.ok) {
        return HT_UNHEARD;
    }
    if (told.data >> HT_TOLD_CODE_SHIFT != 0) {
        return why;
    }
    return told.data == block.params.told ? kAgreed : why | HT_DISAGREED_TOP_K;
}

// Number `i` of the packets of `source`.
__device__ Arrival hear(const Block& block, uint32_t source, uint32_t i) {
    const HtLayoutParams& params = block.params;
    return wait_for_packet(params, block.counts(params.peers.rank, source) + i,
                           {WAIT_COUNTS, source, params.epoch});
}

// Hears how many rows each rank sends, and what it tells of itself.
__device__ void hear_rows(const Block& block) {
    Shared& shared = block.shared;
    if (threadIdx.x == 0) {
        shared.verdict = kAgreed;
    }
    __syncthreads();
    for (uint32_t source = threadIdx.x; source < block.ranks(); source += HT_LAYOUT_THREADS) {
        const Arrival rows = hear(block, source, block.local_experts());
        const Arrival told = hear(block, source, block.local_experts() + 1);
        shared.rows[source] = block.believed(rows.data);
        atomicMin(&shared.verdict,
                  verdict_on(block, source, {rows.ok && told.ok, told.data}));
    }
    __syncthreads();
}

// One thread notes where each source's rows begin, and tells the host how many there are.
__device__ void note_rows(const Block& block) {
    const HtLayoutParams& params = block.params;
    const uint32_t verdict = block.shared.verdict;
    uint32_t total = 0;
    for (uint32_t source = 0; source < block.ranks(); ++source) {
        params.handle.begins[source] = total;
        total += block.shared.rows[source];
    }
    const uint32_t rows = verdict == kAgreed ? total : verdict;
    params.handle.begins[block.ranks()] = rows;
    if (verdict != HT_UNHEARD) {
        st_release_sys(reinterpret_cast<uint64_t*>(params.received),
                       make_packet(params.epoch, rows));
    }
}

// Hears from every rank.
__device__ void listen(const Block& block) {
    const HtLayoutParams& params = block.params;
    hear_rows(block);
    if (block.refuses()) {
        return;
    }
    if (threadIdx.x == 0) {
        note_rows(block);
    }
    const uint32_t sources = block.shared.verdict == kAgreed ? block.ranks() : 0;
    for (uint32_t i = threadIdx.x; i < block.local_experts(); i += HT_LAYOUT_THREADS) {
        uint32_t total = 0;
        for (uint32_t source = 0; source < sources; ++source) {
            total += block.believed(hear(block, source, i).data);
        }
        params.handle.counts[i] = static_cast<int32_t>(total);
        if (params.counter != nullptr) {
            params.counter[i] = static_cast<int32_t>(total);
        }
    }
}

// All threads call it; a barrier must follow.
__device__ void clear_rows(const Block& block) {
    for (uint32_t rank = threadIdx.x; rank < block.ranks(); rank += HT_LAYOUT_THREADS) {
        block.shared.rows[rank] = 0;
    }
}

__device__ void run(const HtLayoutParams& params) {
    __shared__ Shared shared;
    const Block block = {params, shared};
    if (blockIdx.x == gridDim.x - 1) {
        listen(block);
        return;
    }
    const uint32_t first = min(blockIdx.x * params.block_tokens, block.tokens());
    const uint32_t last = min(first + params.block_tokens, block.tokens());
    clear_rows(block);
    __syncthreads();
    count_and_tell(block, first, last);
    __syncthreads();
    clear_rows(block);
    __syncthreads();
    if (first < last) {
        count_rows(block, 0, first);
        number_tokens(block, first, last);
    }
}

}  // namespace nccl_ep::ht_layout_impl

extern "C" __global__ void __launch_bounds__(nccl_ep::HT_LAYOUT_THREADS)
    ht_layout(const __grid_constant__ nccl_ep::HtLayoutParams params) {
    nccl_ep::ht_layout_impl::run(params);
}
