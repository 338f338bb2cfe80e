// Creation of a high-throughput handle: from the ids, where each row goes and where it lands.
//
// Grid: each block but the last counts and numbers the tokens of its part of this rank's. The last of them
// to have counted notifies every rank of how many rows it gets from here, and how many for each of its
// experts. The last block of the grid waits for the same from every rank and stores where each source's
// rows begin. Notifications are packets with the kernel's epoch, in two banks that alternate. A kernel ends
// only after hearing from all ranks. So when kernel n + 2 starts, no rank still reads bank n.
//
// The epoch is counted in device memory, so a graph replays, and the bank follows from it. Every rank runs the same
// kernels in the same order, so all count alike. The receiving block counts on once it has heard from its own rank, too:
// that is when all other blocks have counted, so they have read the epoch. If it gives up, the group has failed, and
// nobody notifies any more.
//
// A rank that refuses its part, or cannot have the memory for it, runs this kernel as well: it says so and
// waits for the others, which keeps banks and epochs as they are. Every rank broadcasts its verdict, so all
// mark the handle invalid if one refuses, or if ids per token differ. Kernels see the mark in the row
// count, the host in mapped memory.
//
// What peers send becomes addresses later, so it is bounded here, once: no rank sends more rows than it may
// have tokens, and all of them together fit 31 bits. A rank that announces other numbers than it sends
// leaves others waiting, but nothing is written or read outside of what they have.
//
// No counting block waits for another: each also counts the tokens before its part itself. Ids are in L2
// and few.

#include "../base/entry.cuh"
#include "../base/expert.cuh"
#include "../layout/flat.cuh"
#include "rings.cuh"

namespace nccl_ep::ht_route_impl {

constexpr uint32_t kWordBits = 8 * sizeof(uint32_t);
constexpr uint32_t kMaskWords = MAX_PEERS / kWordBits + 1;
constexpr uint32_t kWarps = HT_ROUTE_THREADS / kWarpSize;

struct SharedStorage {
    // Of this kernel.
    uint32_t epoch;
    // Rows to each rank of the tokens before those at hand.
    uint32_t rows[kMaskWords * kWordBits];
    // The same of each warp's tokens.
    uint32_t of_warp[kWarps][kMaskWords * kWordBits];
    // Whether this block was the last to have counted, and notifies the ranks.
    bool is_last;
    // The conclusion of the receiving block: kAgreed, or the mark that replaces the number of rows. Of
    // several the least one counts: a refusal before a difference, then by rank.
    uint32_t conclusion;
};

constexpr uint32_t kAgreed = 0xffffffffu;

struct Block {
    const HtRouteParams& params;
    SharedStorage& shared;

    __device__ uint32_t ranks() const { return params.peers.ranks; }
    __device__ uint32_t tokens() const { return params.handle.tokens; }
    __device__ uint32_t top_k() const { return params.handle.top_k; }
    __device__ uint32_t local_experts() const { return params.layout.local_experts; }
    __device__ uint32_t experts() const { return ranks() * local_experts(); }
    __device__ uint32_t epoch() const { return shared.epoch; }
    __device__ uint32_t bank() const { return shared.epoch % 2; }
    __device__ bool refuses() const { return params.verdict >> HT_VERDICT_CODE_SHIFT != 0; }

    // The expert that entry k of `token` names; kNowhere if none, or if its rank is not active.
    __device__ int32_t expert(uint32_t token, uint32_t k) const {
        const int64_t id = params.topk_idx[uint64_t{token} * top_k() + k];
        const int32_t expert = expert_of_id(id, experts());
        return expert >= 0 && is_active(params.peers, expert / local_experts()) ? expert : kNowhere;
    }
    // What the blocks have counted so far.
    __device__ uint32_t* rows_to(uint32_t rank) const { return params.tally + 1 + rank; }
    __device__ uint32_t* rows_for(uint32_t expert) const { return rows_to(ranks()) + expert; }
    // A rank's packets for itself are not in its window, where peers could change them.
    __device__ bool is_own(uint32_t rank) const { return rank == params.peers.rank; }
    __device__ uint64_t* own_counts() const { return params.own_counts + bank() * packets(); }
    __device__ uint64_t packets() const { return local_experts() + HT_COUNTS_BESIDE_EXPERTS; }
    // The packets of `source` in the window that begins at `window`.
    template <template <typename> class Address>
    __device__ Address<uint64_t> counts_in(Address<uint8_t> window, uint32_t source) const {
        return as<uint64_t>(window + params.layout.counts) +
               (bank() * ranks() + source) * packets();
    }
    // Where this rank reads the packets of `source`, and where it writes those for `peer`.
    __device__ Own<uint64_t> counts_of(uint32_t source) const {
        return is_own(source) ? own_counts() : counts_in<Own>(own_window(params.peers), source);
    }
    __device__ Remote<uint64_t> counts_for(uint32_t peer) const {
        return is_own(peer) ? Remote<uint64_t>(own_counts())
                            : counts_in<Remote>(window_of(params.peers, peer), params.peers.rank);
    }
    // A number of tokens that a rank sent, or the most that it may have.
    __device__ uint32_t bounded(uint32_t tokens) const { return min(tokens, params.max_tokens); }
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
            const uint32_t rank = expert < 0 ? kMaskWords * kWordBits : expert / block.local_experts();
#pragma unroll
            for (uint32_t w = 0; w < kMaskWords; ++w) {
                word[w] |= rank / kWordBits == w ? 1u << (rank % kWordBits) : 0;
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
        for (uint32_t bit = 0; bit < kWordBits && w * kWordBits + bit < block.ranks(); ++bit) {
            use(w * kWordBits + bit, ballot((mask.word[w] >> bit & 1) != 0));
        }
    }
}

// Adds the rows of tokens [first, last) to the block's. `first` is a multiple of kWarpSize. All threads call
// it.
__device__ void count_rows(const Block& block, uint32_t first, uint32_t last) {
    uint32_t* of_warp = block.shared.of_warp[warp_idx()];
    for (uint32_t rank = lane_idx(); rank < block.ranks(); rank += kWarpSize) {
        of_warp[rank] = 0;
    }
    sync_warp();
    for (uint32_t base = first + warp_idx() * kWarpSize; base < last;
         base += kWarps * kWarpSize) {
        const uint32_t token = base + lane_idx();
        const RankMask mask(block, token < last ? token : block.tokens());
        for_each_rank(block, mask, [&](uint32_t rank, LaneMask lanes) {
            if (lane_idx() == rank % kWarpSize) {
                of_warp[rank] += lanes.count();
            }
        });
    }
    sync_warp();
    for (uint32_t rank = lane_idx(); rank < block.ranks(); rank += kWarpSize) {
        atomicAdd(&block.shared.rows[rank], of_warp[rank]);
    }
    __syncthreads();
}

// One thread writes the experts of `token` on `rank`, ascending: the entries after number `written`.
// Returns how many entries are written then.
__device__ uint32_t write_entries(const Block& block, uint32_t token, uint32_t rank,
                                  uint32_t index, uint32_t written) {
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
        entries[written++] = {next, index};
        last = next;
    }
}

// Numbers tokens [first, last), in tiles of one token per thread; the block's rows are those before.
__device__ void number_tokens(const Block& block, uint32_t first, uint32_t last) {
    SharedStorage& shared = block.shared;
    for (uint32_t tile = first; tile < last; tile += HT_ROUTE_THREADS) {
        const uint32_t token = tile + threadIdx.x;
        const RankMask mask(block, token < last ? token : block.tokens());
        for_each_rank(block, mask, [&](uint32_t rank, LaneMask lanes) {
            if (lane_idx() == rank % kWarpSize) {
                shared.of_warp[warp_idx()][rank] = lanes.count();
            }
        });
        __syncthreads();
        for (uint32_t rank = threadIdx.x; rank < block.ranks(); rank += HT_ROUTE_THREADS) {
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
        for_each_rank(block, mask, [&](uint32_t rank, LaneMask lanes) {
            if (lanes.has_this()) {
                const uint32_t before = lanes.count_before();
                const uint32_t index = shared.of_warp[warp_idx()][rank] + before;
                written = write_entries(block, token, rank, index, written);
            }
            sync_warp();
        });
        for (; token < last && written < block.top_k(); ++written) {
            block.params.handle.entries[uint64_t{token} * block.top_k() + written] = {-1, 0};
        }
        __syncthreads();
    }
}

// Adds tokens [first, last) to the group's tally.
__device__ void tally_tokens(const Block& block, uint32_t first, uint32_t last) {
    for (uint32_t token = first + threadIdx.x; token < last; token += HT_ROUTE_THREADS) {
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
    for (uint32_t rank = threadIdx.x; rank < block.ranks(); rank += HT_ROUTE_THREADS) {
        atomicAdd(block.rows_to(rank), block.shared.rows[rank]);
    }
}

// Notifies every rank of what it gets, from the tally of all blocks, which is zero again afterwards.
__device__ void notify(const Block& block) {
    const uint32_t epoch = block.epoch();
    const uint32_t local_experts = block.local_experts();
    for (uint32_t i = threadIdx.x; i < block.experts(); i += HT_ROUTE_THREADS) {
        if (is_active(block.params.peers, i / local_experts)) {
            put_value(block.counts_for(i / local_experts) + i % local_experts,
                      make_packet(epoch, ld_relaxed_gpu(block.rows_for(i))));
        }
        st_relaxed_gpu(block.rows_for(i), 0);
    }
    for (uint32_t peer = threadIdx.x; peer < block.ranks(); peer += HT_ROUTE_THREADS) {
        const uint32_t rows = ld_relaxed_gpu(block.rows_to(peer));
        const Remote<uint64_t> counts = block.counts_for(peer) + local_experts;
        if (is_active(block.params.peers, peer)) {
            put_value(counts, make_packet(epoch, rows));
            put_value(counts + 1, make_packet(epoch, block.params.verdict));
        }
        st_relaxed_gpu(block.rows_to(peer), 0);
        if (!block.refuses()) {
            block.params.handle.departures[peer] = rows;
        }
    }
}

// Counts tokens [first, last); the last block to have done so notifies the ranks of all counts. After a
// failure nobody is notified, and who waits gives up.
__device__ void count_and_notify(const Block& block, uint32_t first, uint32_t last) {
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
        notify(block);
    }
}

// What this rank concludes from the verdict of `source`.
__device__ uint32_t conclude(const Block& block, uint32_t source, const Arrival& verdict) {
    const uint32_t low = verdict.data & ((1u << HT_DISAGREED_RANK_SHIFT) - 1);
    const uint32_t why = HT_DISAGREED | source << HT_DISAGREED_RANK_SHIFT | low;
    if (!verdict.ok) {
        return HT_VERDICT_MISSING;
    }
    if (verdict.data >> HT_VERDICT_CODE_SHIFT != 0) {
        return why;
    }
    return verdict.data == block.params.verdict ? kAgreed : why | HT_DISAGREED_TOP_K;
}

// Number `i` of the packets of `source`.
__device__ Arrival wait_for_count(const Block& block, uint32_t source, uint32_t i) {
    const HtRouteParams& params = block.params;
    return wait_for_packet(params, block.counts_of(source) + i,
                           {WAIT_COUNTS, source, block.epoch()});
}

// Receives how many rows each rank sends, and its verdict.
__device__ void receive_rows(const Block& block) {
    SharedStorage& shared = block.shared;
    if (threadIdx.x == 0) {
        shared.conclusion = kAgreed;
    }
    __syncthreads();
    for (uint32_t source = threadIdx.x; source < block.ranks(); source += HT_ROUTE_THREADS) {
        if (!is_active(block.params.peers, source)) {
            shared.rows[source] = 0;
            continue;
        }
        const Arrival rows = wait_for_count(block, source, block.local_experts());
        const Arrival verdict = wait_for_count(block, source, block.local_experts() + 1);
        shared.rows[source] = block.bounded(rows.data);
        atomicMin(&shared.conclusion,
                  conclude(block, source, {rows.ok && verdict.ok, verdict.data}));
    }
    __syncthreads();
}

// One thread stores where each source's rows begin, and tells the host how many there are.
template <typename Layout>
__device__ void store_rows(const Block& block) {
    const HtRouteParams& params = block.params;
    const uint32_t conclusion = block.shared.conclusion;
    const auto rows_from = [&](uint32_t source) { return block.shared.rows[source]; };
    const uint32_t total = Layout::find_begins(block.ranks(), rows_from, params.handle.begins);
    const uint32_t rows = conclusion == kAgreed ? total : conclusion;
    params.handle.begins[block.ranks()] = rows;
    if (conclusion != HT_VERDICT_MISSING) {
        st_release_sys(reinterpret_cast<uint64_t*>(params.received),
                       make_packet(params.number, rows));
    }
}

// The last block: receives from every rank.
template <typename Layout>
__device__ void receive(const Block& block) {
    const HtRouteParams& params = block.params;
    receive_rows(block);
    if (threadIdx.x == 0) {
        st_relaxed_gpu(params.epochs, block.epoch());
    }
    if (block.refuses()) {
        return;
    }
    if (threadIdx.x == 0) {
        store_rows<Layout>(block);
    }
    const uint32_t sources = block.shared.conclusion == kAgreed ? block.ranks() : 0;
    for (uint32_t i = threadIdx.x; i < block.local_experts(); i += HT_ROUTE_THREADS) {
        uint32_t total = 0;
        for (uint32_t source = 0; source < sources; ++source) {
            if (is_active(params.peers, source)) {
                total += block.bounded(wait_for_count(block, source, i).data);
            }
        }
        params.handle.counts[i] = static_cast<int32_t>(total);
        if (params.counter != nullptr) {
            params.counter[i] = static_cast<int32_t>(total);
        }
    }
}

// All threads call it; a barrier must follow.
__device__ void clear_rows(const Block& block) {
    for (uint32_t rank = threadIdx.x; rank < block.ranks(); rank += HT_ROUTE_THREADS) {
        block.shared.rows[rank] = 0;
    }
}

template <typename Layout>
__device__ void run(const HtRouteParams& params) {
    __shared__ SharedStorage shared;
    const Block block = {params, shared};
    if (threadIdx.x == 0) {
        shared.epoch = ld_relaxed_gpu(params.epochs) + 1;
    }
    __syncthreads();
    if (blockIdx.x == gridDim.x - 1) {
        receive<Layout>(block);
        return;
    }
    const uint32_t first = min(blockIdx.x * params.block_tokens, block.tokens());
    const uint32_t last = min(first + params.block_tokens, block.tokens());
    clear_rows(block);
    __syncthreads();
    count_and_notify(block, first, last);
    __syncthreads();
    clear_rows(block);
    __syncthreads();
    if (first < last) {
        count_rows(block, 0, first);
        number_tokens(block, first, last);
    }
}

ENTRY(ht_route) { run<Flat>(params); }

}  // namespace nccl_ep::ht_route_impl
