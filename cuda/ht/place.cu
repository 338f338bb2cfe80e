// Second part of the creation of a high-throughput handle over several nodes: puts the rows that this rank forwards
// into the order in which it sends them.
//
// That is by chunk, then by rank, so that a chunk's rows follow each other in the sequences between ranks.
// route_nodes.cu has numbered each source separately. Here a block takes pieces, each a chunk of a source: it moves the
// piece's entries to their place, adds the number of rows before the piece to their indices, and stores the origin of
// each token. Other blocks store, for each expert of this rank's tokens, its node and its place among the token's
// experts there, by which gradients that return from other nodes find their columns.

#include "../base/entry.cuh"
#include "../base/expert.cuh"
#include "numbering.cuh"

namespace nccl_ep::ht_place_impl {

struct SharedStorage {
    // For each local rank, the rows before the piece, less those before the chunk in its source.
    uint32_t shift[kColumns];
    uint32_t first_token;
};

struct Block {
    const HtPlaceParams& params;
    SharedStorage& shared;

    __device__ uint32_t chunks() const { return params.nodes.chunks; }
    __device__ uint32_t sources() const { return params.nodes.forwarded; }
    __device__ uint32_t pieces() const { return chunks() * (sources() - 1); }
    // How many tokens of a source come before a chunk, and how many of its rows for a local rank.
    __device__ uint32_t tokens_before(uint32_t source, uint32_t chunk) const {
        return params.handle.starts[source * (chunks() + 1) + chunk];
    }
    __device__ uint32_t rows_before(uint32_t source, uint32_t chunk, uint32_t local) const {
        const uint64_t at = uint64_t{source} * (chunks() + 1) + chunk;
        return params.handle.source_rows[at * params.local_ranks + local];
    }
    // The sum over all sources of `before(source, chunk)`, their numbers before a piece in the order of sending.
    template <typename Before>
    __device__ uint32_t before_piece(uint32_t source, uint32_t chunk, Before before) const {
        uint32_t all = 0;
        for (uint32_t other = 1; other < sources(); ++other) {
            all += before(other, other < source ? chunk + 1 : chunk);
        }
        return all;
    }
};

// Stores how many rows go to each local rank before a chunk.
__device__ void store_departures(const Block& block, uint32_t chunk) {
    const HtPlaceParams& params = block.params;
    for (uint32_t local = threadIdx.x; local < params.local_ranks; local += HT_PLACE_THREADS) {
        params.handle.departures[chunk * params.local_ranks + local] =
            block.before_piece(0, chunk, [&](uint32_t source, uint32_t at) {
                return block.rows_before(source, at, local);
            });
    }
}

__device__ void place_piece(const Block& block, uint32_t source, uint32_t chunk) {
    const HtPlaceParams& params = block.params;
    const HtNodesMemory& handle = params.handle;
    for (uint32_t local = threadIdx.x; local < params.local_ranks; local += HT_PLACE_THREADS) {
        const auto before = [&](uint32_t other, uint32_t at) {
            return block.rows_before(other, at, local);
        };
        block.shared.shift[local] =
            block.before_piece(source, chunk, before) - before(source, chunk);
    }
    if (threadIdx.x == 0) {
        block.shared.first_token =
            block.before_piece(source, chunk, [&](uint32_t other, uint32_t at) {
                return block.tokens_before(other, at);
            });
    }
    __syncthreads();
    const uint32_t first = block.tokens_before(source, chunk);
    const uint32_t tokens = block.tokens_before(source, chunk + 1) - first;
    for (uint32_t i = threadIdx.x; i < tokens; i += HT_PLACE_THREADS) {
        handle.origins[block.shared.first_token + i] = {source - 1, first + i};
    }
    const uint64_t count = uint64_t{tokens} * handle.top_k;
    const uint64_t from = uint64_t{handle.firsts[source] + first} * handle.top_k;
    const uint64_t to = uint64_t{block.shared.first_token} * handle.top_k;
    for (uint64_t i = threadIdx.x; i < count; i += HT_PLACE_THREADS) {
        HtEntry entry = handle.raw_entries[from + i];
        if (entry.expert >= 0) {
            entry.index += block.shared.shift[entry.expert / params.local_experts];
        }
        handle.entries[to + i] = entry;
    }
}

// The node of an expert: 0 for this one, else one more than the other's number.
__device__ uint32_t node_of(const Block& block, int32_t expert) {
    return block.params.nodes.of_rank[expert / block.params.local_experts].distance;
}

// One thread stores the places of the experts of one of this rank's tokens.
__device__ void store_expert_places(const Block& block, uint32_t token) {
    const HtPlaceParams& params = block.params;
    const uint32_t top_k = params.handle.top_k;
    const int64_t experts = int64_t{params.nodes.ranks} * params.local_experts;
    const int64_t* ids = params.topk_idx + uint64_t{token} * top_k;
    uint32_t* expert_places = params.handle.expert_places + uint64_t{token} * top_k;
    int32_t last = kNowhere;
    for (uint32_t written = 0; written < top_k; ++written) {
        int32_t next = INT32_MAX;
        for (uint32_t k = 0; k < top_k; ++k) {
            const int32_t expert = expert_of_id(ids[k], experts);
            next = expert > last && expert < next ? expert : next;
        }
        if (next == INT32_MAX) {
            expert_places[written] = HT_NONE;
            continue;
        }
        const uint32_t node = node_of(block, next);
        uint32_t place = 0;
        for (uint32_t i = 0; i < written; ++i) {
            place += expert_places[i] >> HT_PLACE_BITS == node ? 1 : 0;
        }
        expert_places[written] = node << HT_PLACE_BITS | place;
        last = next;
    }
}

ENTRY(ht_place) {
    __shared__ SharedStorage shared;
    const Block block = {params, shared};
    const uint32_t remote = params.nodes.forwarded - 1;
    if (blockIdx.x < params.piece_blocks) {
        for (uint32_t piece = blockIdx.x; piece < block.pieces(); piece += params.piece_blocks) {
            place_piece(block, 1 + piece % remote, piece / remote);
            __syncthreads();
        }
        return;
    }
    const uint32_t number = blockIdx.x - params.piece_blocks;
    const uint32_t blocks = gridDim.x - params.piece_blocks;
    for (uint32_t chunk = number; chunk <= block.chunks(); chunk += blocks) {
        store_departures(block, chunk);
    }
    for (uint32_t token = number * HT_PLACE_THREADS + threadIdx.x; token < params.handle.tokens;
         token += blocks * HT_PLACE_THREADS) {
        store_expert_places(block, token);
    }
}

}  // namespace nccl_ep::ht_place_impl
