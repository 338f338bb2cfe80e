// The creation of a handle over several nodes (route_nodes.cu): the context of its blocks, and the block that receives.
#pragma once

#include "../base/expert.cuh"
#include "../layout/flat.cuh"
#include "numbering.cuh"
#include "verdict.cuh"

namespace nccl_ep::ht_route_nodes_impl {

struct SharedStorage {
    Numbering numbering;
    // How many tokens travel to the other node.
    uint32_t travelling;
    // The result of known_failure.
    uint32_t failure;
    // As in route.cu.
    uint32_t conclusion;
    uint32_t most_tokens;
};

struct Block {
    const HtRouteNodesParams& params;
    SharedStorage& shared;

    __device__ const HtNodes& nodes() const { return params.nodes; }
    __device__ uint32_t local_ranks() const { return params.peers.ranks; }
    __device__ uint32_t local_experts() const { return params.layout.local_experts; }
    __device__ uint32_t experts_of_node() const { return local_ranks() * local_experts(); }
    __device__ uint32_t chunk_ends() const { return nodes().chunks + 1; }
    __device__ uint32_t top_k() const { return params.handle.top_k; }
    __device__ uint32_t rank() const {
        return nodes().forwarded_by[params.peers.rank * (1 + nodes().width)];
    }
    __device__ uint32_t forwarder_of(uint32_t rank) const {
        return nodes().of_rank[rank].forwarder;
    }
    __device__ uint32_t packets() const {
        return local_experts() + nodes().chunks + HT_COUNTS_OF_SOURCE;
    }
    // The expert that an id names; kNowhere if none.
    __device__ int32_t expert(const HtForwarded& source, uint32_t token, uint32_t k) const {
        return expert_of_id(source.topk_idx[uint64_t{token} * top_k() + k],
                            int64_t{nodes().ranks} * local_experts());
    }
    __device__ const RankOnNode& host_of(int32_t expert) const {
        return nodes().of_rank[expert / local_experts()];
    }
    // The number of entry k's expert among those of this node; kNowhere if it is on another one.
    __device__ int32_t expert_here(const HtForwarded& source, uint32_t token, uint32_t k) const {
        const int32_t number = expert(source, token, k);
        const int32_t peer = number == kNowhere ? kNowhere : host_of(number).peer;
        const uint32_t local = static_cast<uint32_t>(peer);
        if (peer < 0 || !is_active(params.peers, local)) {
            return kNowhere;
        }
        return static_cast<int32_t>(local * local_experts() + number % local_experts());
    }
    // The packets about rank `source` of the group, where this rank reads them and where it writes them. This rank's
    // packets for itself are not in its window, where peers could change them.
    __device__ uint64_t offset(uint32_t source) const {
        return (uint64_t{params.bank} * nodes().ranks + source) * packets();
    }
    __device__ Own<uint64_t> counts_of(uint32_t source) const {
        const bool is_own = forwarder_of(source) == params.peers.rank;
        return (is_own ? params.own_counts
                       : as<uint64_t>(own_window(params.peers) + params.layout.counts)) +
               offset(source);
    }
    __device__ Remote<uint64_t> counts_for(uint32_t peer, uint32_t source) const {
        return (peer == params.peers.rank
                    ? Remote<uint64_t>(params.own_counts)
                    : as<uint64_t>(window_of(params.peers, peer) + params.layout.counts)) +
               offset(source);
    }
    __device__ void announce(uint32_t index, uint32_t value) const {
        st_release_sys(reinterpret_cast<uint64_t*>(params.announced + index),
                       make_packet(params.epoch, value));
    }
};

// Waits for packet `i` about `source`.
__device__ inline Arrival wait_for_count(const Block& block, uint32_t source, uint32_t i) {
    const HtRouteNodesParams& params = block.params;
    return wait_for_packet(params, block.counts_of(source) + i,
                           {WAIT_COUNTS, block.forwarder_of(source), params.epoch});
}

// Receives how many rows come from each rank of the group, by chunk, and its verdict. Rows are bounded by the tokens
// that a rank may have.
__device__ inline void receive_rows(const Block& block) {
    const HtNodes& nodes = block.nodes();
    const uint32_t local_experts = block.local_experts();
    for (uint32_t source = threadIdx.x; source < nodes.ranks; source += HT_ROUTE_THREADS) {
        if (!is_active(block.params.peers, block.forwarder_of(source))) {
            continue;
        }
        uint32_t* before = block.params.handle.received_rows + source * block.chunk_ends();
        uint32_t rows = 0;
        bool ok = true;
        for (uint32_t chunk = 0; chunk < nodes.chunks; ++chunk) {
            before[chunk] = rows;
            const Arrival arrival = wait_for_count(block, source, local_experts + chunk);
            ok = ok && arrival.ok;
            rows += min(arrival.data, block.params.max_tokens - rows);
        }
        before[nodes.chunks] = rows;
        const Arrival verdict = wait_for_count(block, source, local_experts + nodes.chunks);
        const Arrival tokens = wait_for_count(block, source, local_experts + nodes.chunks + 1);
        ok = ok && verdict.ok && tokens.ok;
        atomicMin(&block.shared.conclusion, conclude(block.params.verdict, source, {ok, verdict.data}));
        atomicMax(&block.shared.most_tokens, min(tokens.data, block.params.max_tokens));
    }
    __syncthreads();
}

// One thread stores where each source's rows begin, and the number of all rows.
template <typename Layout>
__device__ inline void store_begins(const Block& block) {
    const HtNodesMemory& handle = block.params.handle;
    const uint32_t chunks = block.nodes().chunks;
    const auto rows_from = [&](uint32_t source) {
        return handle.received_rows[source * block.chunk_ends() + chunks];
    };
    const uint32_t total = Layout::find_begins(block.nodes().ranks, rows_from, handle.source_begins);
    const uint32_t conclusion = block.shared.conclusion;
    *handle.total = conclusion == kAgreed ? total : conclusion;
}

// One thread stores how many rows come from a local rank, in the order in which it sends them.
template <typename Layout>
__device__ inline void store_arrivals(const Block& block, uint32_t local) {
    const HtNodesMemory& handle = block.params.handle;
    const HtNodes& nodes = block.nodes();
    const uint32_t locals = block.local_ranks();
    const uint32_t* forwarded = nodes.forwarded_by + local * (1 + nodes.width);
    const uint32_t pieces = nodes.chunks * nodes.width;
    uint32_t* piece_starts = handle.piece_starts + local * (pieces + 1);
    uint32_t* piece_rows = handle.piece_rows + local * pieces;
    const uint32_t* of_itself = handle.received_rows + forwarded[0] * block.chunk_ends();
    uint32_t rows = 0;
    for (uint32_t chunk = 0; chunk < nodes.chunks; ++chunk) {
        handle.own_arrivals[chunk * locals + local] = of_itself[chunk];
        handle.arrivals[chunk * locals + local] = rows;
        for (uint32_t i = 0; i < nodes.width; ++i) {
            const uint32_t source = forwarded[1 + i];
            const uint32_t piece = chunk * nodes.width + i;
            piece_starts[piece] = rows;
            piece_rows[piece] = 0;
            if (source != HT_NONE) {
                const uint32_t* before =
                    handle.received_rows + source * block.chunk_ends() + chunk;
                piece_rows[piece] = Layout::row(handle.source_begins[source], before[0]);
                rows += before[1] - before[0];
            }
        }
    }
    piece_starts[pieces] = rows;
    handle.arrivals[nodes.chunks * locals + local] = rows;
    handle.own_arrivals[nodes.chunks * locals + local] = of_itself[nodes.chunks];
    handle.own_begins[local] = handle.source_begins[forwarded[0]];
    const uint32_t first = nodes.width != 0 ? forwarded[1] : HT_NONE;
    handle.begins[local] = first != HT_NONE ? handle.source_begins[first] : 0;
}

// Receives and stores how many rows come for each of this rank's experts.
__device__ inline void store_counts(const Block& block) {
    const HtRouteNodesParams& params = block.params;
    const uint32_t sources = block.shared.conclusion == kAgreed ? block.nodes().ranks : 0;
    for (uint32_t i = threadIdx.x; i < block.local_experts(); i += HT_ROUTE_THREADS) {
        uint32_t total = 0;
        for (uint32_t source = 0; source < sources; ++source) {
            if (is_active(params.peers, block.forwarder_of(source))) {
                total += min(wait_for_count(block, source, i).data, params.max_tokens);
            }
        }
        params.handle.counts[i] = static_cast<int32_t>(total);
        if (params.counter != nullptr) {
            params.counter[i] = static_cast<int32_t>(total);
        }
    }
}

// The last block: receives what the ranks of this node forward to this one.
template <typename Layout>
__device__ inline void receive(const Block& block) {
    receive_rows(block);
    if (threadIdx.x == 0) {
        store_begins<Layout>(block);
    }
    __syncthreads();
    for (uint32_t local = threadIdx.x; local < block.local_ranks(); local += HT_ROUTE_THREADS) {
        store_arrivals<Layout>(block, local);
    }
    store_counts(block);
    __syncthreads();
    if (threadIdx.x == 0 && block.shared.conclusion != HT_VERDICT_MISSING) {
        const uint32_t last =
            (block.nodes().others + block.nodes().forwarded) * block.chunk_ends();
        block.announce(last, block.shared.most_tokens);
        block.announce(last + 1, *block.params.handle.total);
    }
}

}  // namespace nccl_ep::ht_route_nodes_impl
