// Drops, after ht_route, the rows of a handle that its ranks have no room for: each rank keeps the first of the rows
// that come to it, in their order. The ids of dropped rows become -1, so no operation sees them.
//
// Grid: one block. A rank notifies each source of how many of its rows it keeps. The source removes the others from its
// entries and ids. If only some of its rows are kept, it sends the rank their number for each of the rank's experts, as
// only the source knows that. If all are kept, the counts of ht_route still hold.
//
// Packets have the epoch of ht_route and are in its bank, like those that ht_zones reads; zones.cu says why nobody
// still reads there. If the ranks disagree nobody sends or waits; after a failure nobody sends.

#include "../base/entry.cuh"
#include "../base/expert.cuh"
#include "zones.cuh"

namespace nccl_ep::ht_cut_impl {

struct SharedStorage {
    // How many of this rank's rows each rank keeps, and how many of each rank's rows this rank keeps.
    uint32_t to[MAX_PEERS];
    uint32_t from[MAX_PEERS];
};

struct Block {
    const HtCutParams& params;
    SharedStorage& shared;
    uint32_t epoch;

    __device__ uint32_t ranks() const { return params.peers.ranks; }
    __device__ uint32_t local_experts() const { return params.layout.local_experts; }
    // How many of `rows` rows there is room for.
    __device__ uint32_t cut(uint32_t rows) const { return min(rows, params.limit); }
    // The packets from `source`: how many of the receiver's rows it keeps, then how many of its own rows are for each
    // of the receiver's experts.
    template <template <typename> class Address>
    __device__ Address<uint64_t> packets(Address<uint8_t> window, uint32_t source) const {
        return packets_of<Address>(params.packets, epoch, window) + uint64_t{source} * (1 + local_experts());
    }
    __device__ void send_to_rank(uint32_t rank, uint32_t number, uint32_t value) const {
        if (is_active(params.peers, rank) && known_failure(params.wait) == 0) {
            put_value(packets(window_of(params.peers, rank), params.peers.rank) + number, make_packet(epoch, value));
        }
    }
    __device__ uint32_t receive(uint32_t rank, uint32_t number, uint32_t most) const {
        if (!is_active(params.peers, rank)) {
            return 0;
        }
        const uint64_t* at = packets<Own>(own_window(params.peers), rank) + number;
        const Arrival arrival = wait_for_packet(params, at, {WAIT_COUNTS, rank, epoch});
        return arrival.ok ? min(arrival.data, most) : 0;
    }
    __device__ bool stays(const HtEntry& entry) const {
        return entry.index < shared.to[entry.expert / local_experts()];
    }
    // Whether `rank` keeps some of this rank's rows but not all.
    __device__ bool keeps_some(uint32_t rank) const {
        return shared.to[rank] > 0 && shared.to[rank] < params.handle.departures[rank];
    }
};

// One thread removes dropped rows from a token's entries and ids, and counts those that are kept.
__device__ void cut_token(const Block& block, uint32_t token) {
    const HtCutParams& params = block.params;
    const uint32_t top_k = params.handle.top_k;
    const uint32_t experts = block.ranks() * block.local_experts();
    HtEntry* entries = params.handle.entries + uint64_t{token} * top_k;
    int64_t* ids = params.ids + uint64_t{token} * top_k;
    uint32_t kept = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < top_k; ++i) {
        const HtEntry entry = entries[i];
        if (static_cast<uint32_t>(entry.expert) >= experts) {
            break;
        }
        if (block.stays(entry)) {
            entries[kept++] = entry;
            atomicAdd(&params.tally[entry.expert], 1u);
            continue;
        }
#pragma unroll 1
        for (uint32_t k = 0; k < top_k; ++k) {
            ids[k] = ids[k] == entry.expert ? kNowhere : ids[k];
        }
    }
#pragma unroll 1
    for (; kept < top_k; ++kept) {
        entries[kept] = {kNowhere, 0};
    }
}

// One thread finds how many of the rows that this rank keeps are for a local expert.
__device__ uint32_t rows_for(const Block& block, uint32_t expert) {
    const HtCutParams& params = block.params;
    uint32_t rows = 0;
#pragma unroll 1
    for (uint32_t source = 0; source < block.ranks(); ++source) {
        const uint32_t all = params.handle.begins[source + 1] - params.handle.begins[source];
        const uint32_t stay = block.shared.from[source];
        if (stay > 0 && stay < all) {
            rows += block.receive(source, 1 + expert, stay);
        } else if (stay > 0) {
            rows += row_count(params, block.epoch, source, expert);
        }
    }
    return rows;
}

__device__ void run(const HtCutParams& params) {
    __shared__ SharedStorage shared;
    const Block block = {params, shared, ld_relaxed_gpu(params.epochs)};
    const HtHandleMemory& handle = params.handle;
    const uint32_t ranks = block.ranks();
    const uint32_t total = handle.begins[ranks];
    if ((total & HT_DISAGREED) != 0) {
        if (threadIdx.x == 0) {
            report_number(params.report.total, 0, 0);
        }
        for (uint32_t i = threadIdx.x; i < block.local_experts(); i += HT_CUT_THREADS) {
            report_number(params.report.experts, i, 0);
        }
        return;
    }
    for (uint32_t rank = threadIdx.x; rank < ranks; rank += HT_CUT_THREADS) {
        shared.from[rank] = block.cut(handle.begins[rank + 1]) - block.cut(handle.begins[rank]);
        block.send_to_rank(rank, 0, shared.from[rank]);
    }
    for (uint32_t rank = threadIdx.x; rank < ranks; rank += HT_CUT_THREADS) {
        shared.to[rank] = block.receive(rank, 0, handle.departures[rank]);
    }
    __syncthreads();
    for (uint32_t token = threadIdx.x; token < handle.tokens; token += HT_CUT_THREADS) {
        cut_token(block, token);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < ranks * block.local_experts(); i += HT_CUT_THREADS) {
        const uint32_t rank = i / block.local_experts();
        if (block.keeps_some(rank)) {
            block.send_to_rank(rank, 1 + i % block.local_experts(), ld_relaxed_gpu(params.tally + i));
        }
        st_relaxed_gpu(params.tally + i, 0);
    }
    for (uint32_t i = threadIdx.x; i < block.local_experts(); i += HT_CUT_THREADS) {
        const uint32_t rows = rows_for(block, i);
        handle.counts[i] = static_cast<int32_t>(rows);
        report_number(params.report.experts, i, rows);
    }
    __syncthreads();
    for (uint32_t rank = threadIdx.x; rank < ranks; rank += HT_CUT_THREADS) {
        handle.departures[rank] = shared.to[rank];
        handle.begins[rank + 1] = block.cut(handle.begins[rank + 1]);
    }
    if (threadIdx.x == 0) {
        report_number(params.report.total, 0, total);
    }
}

ENTRY(ht_cut) {
    run(params);
    finish_block(params.finish, params.wait, params.handle.begins + params.peers.ranks);
}

}  // namespace nccl_ep::ht_cut_impl
