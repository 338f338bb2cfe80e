// Creates a high-throughput handle: finds from the ids where each row goes and where it arrives.
//
// Grid: each block but the last counts and numbers one part of this rank's tokens. The last of these blocks to finish
// counting notifies every rank of how many rows it gets from this one, and how many for each of its experts. The last
// block of the grid waits for the same from every rank and stores where each source's rows begin. Notifications are
// packets with the kernel's epoch, in two banks that alternate. A kernel ends only after it has the notifications of
// all ranks. So when kernel n + 2 starts, no rank still reads the bank of kernel n.
//
// The epoch is counted in device memory, so graphs can be replayed, and the bank follows from it. Every rank runs the
// same kernels in the same order, so all count alike. The receiving block advances the epoch once it has the
// notifications of all ranks, its own included: by then all other blocks have counted, so they have read the epoch. If
// it gives up, the group has failed, and nobody notifies any more.
//
// If output rows are ordered by expert, a counting block also notifies each rank that gets a row of which of its
// experts the row is for: zones.cu says where, and why nobody reads there any more.
//
// A rank that refuses its part, or cannot have the memory for it, runs this kernel as well: it notifies the others of
// that and waits for them, so that banks and epochs stay in step. Every rank broadcasts its verdict, so all mark the
// handle invalid if one refuses, or if ids per token differ. Kernels see the mark in the row count, the host in mapped
// memory.
//
// Numbers that peers send become addresses later, so they are bounded here, once: no rank sends more rows than it may
// have tokens, and all of them together fit 31 bits. A rank that announces other numbers than it sends leaves others
// waiting, but nothing outside of their memory is written or read.
//
// A counting block numbers its tokens after those of earlier parts: it waits until their blocks have published their
// counts in device memory. Parts are taken in the order in which blocks begin, and a block publishes before it waits
// for anything, so the wait ends even if not all blocks run at once. A block that begins after the receiving one has
// given up reads the next epoch, and leaves because the group has failed. The published words need not be cleared:
// later kernels use another epoch, and no kernel of the group begins before the previous one has ended.

#include "../base/row.cuh"
#include "../base/entry.cuh"
#include "../layout/flat.cuh"
#include "rings.cuh"
#include "route_ids.cuh"
#include "verdict.cuh"
#include "zones.cuh"

namespace nccl_ep::ht_route_impl {

constexpr uint32_t kWarps = HT_ROUTE_THREADS / kWarpSize;

struct SharedStorage {
    // The epoch of this kernel.
    uint32_t epoch;
    // The part of the tokens that this block counts.
    uint32_t part;
    // How many rows go to each rank from tokens before this block's. In the receiving block: rows from each rank.
    uint32_t rows[MAX_PEERS];
    // By warp: how many go there from the block's tokens before the current ones.
    uint32_t of_warp[kWarps][MAX_PEERS];
    // Received rows for each of some experts.
    uint32_t for_expert[HT_ROUTE_THREADS];
    // Whether this block was the last one to count; it notifies the ranks.
    bool is_last;
    // The conclusion of the receiving block: kAgreed, or the mark that takes the place of the number of rows. Of
    // several marks the least one counts: a refusal before a difference, then by rank.
    uint32_t conclusion;
};

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

    // The tally: rows to each rank, and for each expert, that blocks have counted so far.
    __device__ uint32_t* rows_to(uint32_t rank) const { return params.tally + 2 + rank; }
    __device__ uint32_t* rows_for(uint32_t expert) const { return rows_to(ranks()) + expert; }
    // The packet in which the block of part `part` publishes how many rows it has for `rank`.
    __device__ uint64_t* counted(uint32_t part, uint32_t rank) const {
        return params.counted + uint64_t{part} * ranks() + rank;
    }
    // This rank's packets for itself are not in its window, where peers could change them.
    __device__ bool is_own(uint32_t rank) const { return rank == params.peers.rank; }
    __device__ uint64_t* own_counts() const { return params.own_counts + bank() * packets(); }
    __device__ uint64_t packets() const { return local_experts() + HT_COUNTS_BESIDE_EXPERTS; }
    // The packets from `source`, in the window that begins at `window`.
    template <template <typename> class Address>
    __device__ Address<uint64_t> counts_in(Address<uint8_t> window, uint32_t source) const {
        return as<uint64_t>(window + params.layout.counts) +
               (bank() * ranks() + source) * packets();
    }
    // Where this rank reads the packets from `source`, and where it writes those for `peer`.
    __device__ Own<uint64_t> counts_of(uint32_t source) const {
        return is_own(source) ? own_counts() : counts_in<Own>(own_window(params.peers), source);
    }
    __device__ Remote<uint64_t> counts_for(uint32_t peer) const {
        return is_own(peer) ? Remote<uint64_t>(own_counts())
                            : counts_in<Remote>(window_of(params.peers, peer), params.peers.rank);
    }
    __device__ int64_t given_id(uint64_t i) const {
        return id_at(params.topk_idx, params.is_narrow, i);
    }
    // A number of rows that a rank has sent, bounded by the most tokens that it may have.
    __device__ uint32_t bounded(uint32_t tokens) const { return min(tokens, params.max_tokens); }
};

// A warp goes through its share of the block's tokens [first, last), several at once: calls `use(lanes, token, id,
// named)` with this lane's token, its id, and what that names.
template <typename Use>
__device__ __forceinline__ void for_tokens(const Block& block, uint32_t first, uint32_t last, Use use) {
    const Lanes lanes(block.top_k());
    const uint32_t tiles = (last - first + kWarps * lanes.tokens() - 1) / (kWarps * lanes.tokens());
    const uint32_t begin = first + warp_idx() * tiles * lanes.tokens() + lanes.token();
    const auto id_at = [&](uint32_t tile) {
        const uint32_t token = begin + tile * lanes.tokens();
        const bool is_there = tile < tiles && token < last && lanes.k() < lanes.top_k;
        return is_there ? block.given_id(uint64_t{token} * lanes.top_k + lanes.k()) : int64_t{kNowhere};
    };
    // Loaded one iteration ahead.
    int64_t next = id_at(0);
#pragma unroll 1
    for (uint32_t tile = 0; tile < tiles; ++tile) {
        const int64_t id = next;
        next = id_at(tile + 1);
        use(lanes, begin + tile * lanes.tokens(), id, LaneExpert(block.params.peers, block.local_experts(), lanes, id));
    }
}

// Counts the rows of the block's tokens [first, last), for each expert and, by warp, for each rank; and stores the ids
// if the handle keeps them. All threads call it, behind a barrier.
__device__ void count_tokens(const Block& block, uint32_t first, uint32_t last) {
    uint32_t* of_warp = block.shared.of_warp[warp_idx()];
    int64_t* kept = block.params.kept_ids;
    for_tokens(block, first, last, [&](const Lanes& lanes, uint32_t token, int64_t id, const LaneExpert& named) {
        if (kept != nullptr && token < last && lanes.k() < lanes.top_k) {
            kept[uint64_t{token} * lanes.top_k + lanes.k()] = id;
        }
        if (named.expert != kNowhere) {
            atomicAdd(block.rows_for(named.expert), 1u);
        }
        if (named.rows.has_this()) {
            atomicAdd(&of_warp[named.rank], 1u);
        }
    });
    __syncthreads();
}

// Publishes this block's rows to each rank for the blocks of later parts, and adds them to the tally. Replaces each
// warp's counts by those of the warps before it. All threads call it.
__device__ void publish_rows(const Block& block) {
    SharedStorage& shared = block.shared;
    for (uint32_t rank = threadIdx.x; rank < block.ranks(); rank += HT_ROUTE_THREADS) {
        uint32_t rows = 0;
#pragma unroll 4
        for (uint32_t warp = 0; warp < kWarps; ++warp) {
            const uint32_t count = shared.of_warp[warp][rank];
            shared.of_warp[warp][rank] = rows;
            rows += count;
        }
        put_value(Remote<uint64_t>(block.counted(shared.part, rank)), make_packet(block.epoch(), rows));
        atomicAdd(block.rows_to(rank), rows);
    }
    __syncthreads();
}

// Adds up what the blocks of earlier parts have published; false if the group has failed meanwhile. All threads call
// it.
__device__ bool add_earlier_rows(const Block& block) {
    SharedStorage& shared = block.shared;
    const WaitParams& wait = block.params.wait;
    bool has_all = true;
    for (uint32_t i = threadIdx.x; has_all && i < shared.part * block.ranks(); i += HT_ROUTE_THREADS) {
        uint64_t packet;
        has_all = poll_until(
            [&] { return packet_epoch(packet = ld_relaxed_sys(block.counted(0, i))) == block.epoch(); },
            [&](uint64_t start) { return known_failure(wait) != 0 ? kGivenUp : start; });
        atomicAdd(&shared.rows[i % block.ranks()], packet_data(packet));
    }
    return __syncthreads_or(!has_all) == 0;
}

// Numbers the rows of the block's tokens [first, last): stores the experts of each token, ascending, with the indices
// of their rows.
__device__ void number_tokens(const Block& block, uint32_t first, uint32_t last) {
    uint32_t* of_warp = block.shared.of_warp[warp_idx()];
    for_tokens(block, first, last, [&](const Lanes& lanes, uint32_t token, int64_t, const LaneExpert& named) {
        const bool is_named = named.expert != kNowhere;
        const LaneMask experts = ballot(is_named) & lanes.own();
        uint32_t place = is_named ? 0 : experts.count() + (~experts & lanes.before()).count();
#pragma unroll 1
        for (uint32_t k = 0; k < lanes.top_k; ++k) {
            const int32_t other = shuffle(named.expert, lanes.first() + k);
            place += is_named && other != kNowhere && other < named.expert ? 1 : 0;
        }
        uint32_t index = 0;
        if (is_named) {
            const uint32_t before = (named.same_rank & named.rows & lanes.earlier()).count();
            index = block.shared.rows[named.rank] + of_warp[named.rank] + before;
        }
        if (token < last && lanes.k() < lanes.top_k) {
            block.params.handle.entries[uint64_t{token} * lanes.top_k + place] = {named.expert, index};
        }
        sync_warp();
        if (named.rows.has_this()) {
            atomicAdd(&of_warp[named.rank], 1u);
        }
        sync_warp();
    });
}

// Notifies every rank of what it gets, by the tally of all blocks, and resets the tally.
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
    // Descending, so that other warps do this than those of the first experts.
    for (uint32_t peer = HT_ROUTE_THREADS - 1 - threadIdx.x; peer < block.ranks(); peer += HT_ROUTE_THREADS) {
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

// Counts this block as done with counting; the last one notifies the ranks. After a failure nobody is notified, and
// waits are given up.
__device__ void notify_if_last(const Block& block) {
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

// Waits for packet `i` from `source`.
__device__ Arrival wait_for_count(const Block& block, uint32_t source, uint32_t i) {
    const HtRouteParams& params = block.params;
    return wait_for_packet(params, block.counts_of(source) + i,
                           {WAIT_COUNTS, source, block.epoch()});
}

// Receives each rank's number of rows and its verdict.
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
                  conclude(block.params.verdict, source, {rows.ok && verdict.ok, verdict.data}));
    }
    __syncthreads();
}

// One thread stores where each source's rows begin, and reports to the host how many rows there are.
template <typename Layout>
__device__ void store_rows(const Block& block) {
    const HtRouteParams& params = block.params;
    const uint32_t conclusion = block.shared.conclusion;
    const auto rows_from = [&](uint32_t source) { return block.shared.rows[source]; };
    const uint32_t total = Layout::find_begins(block.ranks(), rows_from, params.handle.begins);
    const uint32_t rows = conclusion == kAgreed ? total : conclusion;
    params.handle.begins[block.ranks()] = rows;
    report_number(params.report.total, 0, conclusion == kAgreed ? total : 0);
    if (conclusion != HT_VERDICT_MISSING) {
        st_release_sys(reinterpret_cast<uint64_t*>(params.received),
                       make_packet(params.number, rows));
    }
}

// Receives and stores the numbers of rows for `count` experts from `first` on. All threads call it.
__device__ void receive_counts(const Block& block, uint32_t first, uint32_t count) {
    const HtRouteParams& params = block.params;
    uint32_t* totals = block.shared.for_expert;
    const uint32_t sources = block.shared.conclusion == kAgreed ? block.ranks() : 0;
    totals[threadIdx.x] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < sources * count; i += HT_ROUTE_THREADS) {
        const DivMod at = divide(i, count, 0xffffffffu / count);
        if (is_active(params.peers, at.quotient)) {
            const Arrival rows = wait_for_count(block, at.quotient, first + at.remainder);
            atomicAdd(&totals[at.remainder], block.bounded(rows.data));
        }
    }
    __syncthreads();
    if (threadIdx.x < count) {
        const int32_t total = static_cast<int32_t>(totals[threadIdx.x]);
        params.handle.counts[first + threadIdx.x] = total;
        report_number(params.report.experts, first + threadIdx.x, total);
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
    for (uint32_t first = 0; first < block.local_experts(); first += HT_ROUTE_THREADS) {
        receive_counts(block, first, min(block.local_experts() - first, HT_ROUTE_THREADS));
    }
}

template <typename Layout>
__device__ void run(const HtRouteParams& params) {
    follow_grid();
    __shared__ SharedStorage shared;
    const Block block = {params, shared};
    const bool counts = blockIdx.x != gridDim.x - 1;
    if (threadIdx.x == 0) {
        shared.epoch = epoch_after(ld_relaxed_gpu(params.epochs));
        shared.part = counts ? inc_relaxed_gpu(params.tally + 1, gridDim.x - 2) : 0;
    }
    for (uint32_t i = threadIdx.x; i < MAX_PEERS; i += HT_ROUTE_THREADS) {
        shared.rows[i] = 0;
    }
    for (uint32_t rank = lane_idx(); rank < MAX_PEERS; rank += kWarpSize) {
        shared.of_warp[warp_idx()][rank] = 0;
    }
    __syncthreads();
    if (!counts) {
        receive<Layout>(block);
        return;
    }
    const uint32_t first = min(shared.part * params.block_tokens, block.tokens());
    const uint32_t last = min(first + params.block_tokens, block.tokens());
    count_tokens(block, first, last);
    publish_rows(block);
    notify_if_last(block);
    if (!add_earlier_rows(block)) {
        return;
    }
    number_tokens(block, first, last);
    if (params.has_zones != 0) {
        __syncthreads();
        notify_tokens(params, block.epoch(), params.peers.rank, first, last, warp_idx(), kWarps);
    }
}

ENTRY(ht_route) {
    run<Flat>(params);
    finish_block(params.finish, params.wait, params.handle.begins + params.peers.ranks);
}

}  // namespace nccl_ep::ht_route_impl
