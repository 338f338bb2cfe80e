// Which rows a launch has: all of the operation on one node, or those of one pass (pipeline stage) over several.
//
// The kernels are templates over the two, which differ in where sequences begin, and in whose rows lie together in the
// output: those of a rank, or of a part of its tokens. Over several nodes a token's experts are numbered by local rank
// and local expert.
#pragma once

#include "entries.cuh"
#include "messages.cuh"
#include "tail.cuh"

namespace nccl_ep {

// A group on one node.
struct AllRows {
    // Where a token of the launch is, if the token does not say so itself.
    struct Place {};

    __device__ bool is_own() const { return true; }
    __device__ Place place(const HtCommon&, uint32_t) const { return {}; }
    // The row of `token` among `rows`.
    template <typename Byte>
    __device__ __forceinline__ Byte* row_of_token(Byte* rows, const RowFormat& format, Place,
                                                  uint32_t token) const {
        return rows + format.offset(token);
    }
    // Its ids and weights, if any token of the launch has some.
    __device__ bool has_routing(const HtDispatchParams& params) const {
        return params.topk_idx != nullptr;
    }
    __device__ __forceinline__ RoutingAt routing(const HtDispatchParams& params, Place,
                                                 uint32_t token) const {
        const uint64_t first = uint64_t{token} * params.common.handle.top_k;
        return {params.topk_idx + first, params.weights + first};
    }
    // Where its gradients go.
    __device__ float* gradients(const HtCombineParams& params, Place, uint32_t token) const {
        return params.out_gradients + uint64_t{token} * params.columns;
    }
    __device__ uint32_t total(const HtCommon& common) const {
        return common.handle.begins[common.peers.ranks];
    }
    // The rows of `peer` that this launch has, if there is a ring, and the first row of the output from it.
    __device__ PairRows rows(const HtCommon& common, uint32_t peer, bool has_ring) const {
        const uint32_t begin = common.handle.begins[peer];
        return {begin, has_ring ? common.handle.begins[peer + 1] - begin : 0,
                has_ring ? common.handle.departures[peer] : 0};
    }
    __device__ void settle(const HtCommon&, bool, HtPairs&) const {}
    // Whether the messages from other nodes have arrived. All threads call it.
    __device__ bool messages_arrived(const HtCommon&, const HtPairs&) const { return true; }
    // The row of the output, or of combine's input, of row `index` from `peer`.
    template <typename Layout>
    __device__ uint32_t row(const HtPairs& pairs, uint32_t peer, uint32_t index) const {
        return Layout::row(pairs.begins[peer], index);
    }
    // The id by which callers name the expert of this lane.
    __device__ int32_t id_of(const HtCommon&, const TokenEntries& entries) const {
        return entries.entry.expert;
    }
};

// A pass of an operation over several nodes. Entry indices are handle-global: they count the rows of earlier
// passes, too. Scheduler indices are pass-local.
template <typename Net>
struct RowsOfPass {
    const HtPass& pass;

    // A message, and the token's index in it; own tokens form a message of their own.
    struct Place {
        uint32_t message;
        uint32_t index;
    };

    __device__ bool is_own() const { return pass.is_own != 0; }
    __device__ Place place(const HtCommon& common, uint32_t token) const {
        if (pass.origins == nullptr || token >= common.handle.tokens) {
            return {0, token};
        }
        const HtOrigin origin = pass.origins[token];
        return {origin.source, origin.index - pass.starts[origin.source * pass.chunk_ends]};
    }
    template <typename Byte>
    __device__ __forceinline__ Byte* row_of_token(Byte* rows, const RowFormat& format, Place place,
                                                  uint32_t) const {
        return rows + place.message * pass.messages.stride + format.offset(place.index);
    }
    __device__ bool has_routing(const HtDispatchParams& params) const {
        return is_own() ? params.topk_idx != nullptr : pass.messages.tail_bytes != 0;
    }
    __device__ __forceinline__ RoutingAt routing(const HtDispatchParams& params, Place place,
                                                 uint32_t token) const {
        if (is_own()) {
            return AllRows{}.routing(params, {}, token);
        }
        const auto* ids =
            reinterpret_cast<const int64_t*>(tail_of(pass.messages, place.message, place.index));
        return {ids, reinterpret_cast<const float*>(ids + params.common.handle.top_k)};
    }
    __device__ float* gradients(const HtCombineParams& params, Place place, uint32_t token) const {
        return is_own() ? AllRows{}.gradients(params, {}, token)
                        : reinterpret_cast<float*>(
                              tail_of(pass.messages, place.message, place.index));
    }
    __device__ uint32_t total(const HtCommon&) const { return *pass.total; }
    __device__ PairRows rows(const HtCommon& common, uint32_t peer, bool has_ring) const {
        // Self: handle-global index, of entries. Peers: pass-local index, of the scheduler.
        const uint32_t before = peer != common.peers.rank ? pass.arrivals[peer] : 0;
        const uint32_t begin = pass.begins != nullptr ? pass.begins[peer] + before : before;
        return {begin, has_ring ? pass.arrivals_end[peer] - pass.arrivals[peer] : 0,
                has_ring ? pass.departures_end[peer] - pass.departures[peer] : 0};
    }
    // Rebases the sequences that entries index to this pass. All threads call it, each for the peers that it has
    // filled in.
    __device__ void settle(const HtCommon& common, bool is_combine, HtPairs& pairs) const {
        for (uint32_t peer = threadIdx.x; peer < common.peers.ranks; peer += blockDim.x) {
            uint32_t* base = is_combine ? pairs.received : pairs.sent;
            base[peer] -= pass.departures[peer] * common.shape.row_units;
        }
        __syncthreads();
    }
    __device__ bool messages_arrived(const HtCommon& common, const HtPairs& pairs) const {
        return all_arrived(pass.header_count, [&](uint32_t i) {
            MessageHeader ours = pass.expected;
            ours.epoch = ld_relaxed_gpu(&common.sequences->epoch);
            const uint32_t rank = pass.header_ranks[i];
            const Awaited awaited = {WAIT_STREAMED_ROW, HT_RANK_OF_GROUP | rank, pairs.operation};
            return Net::arrived(common, *header_of(pass.headers, i), ours, awaited, rank);
        });
    }
    template <typename Layout>
    __device__ uint32_t row(const HtPairs& pairs, uint32_t peer, uint32_t index) const {
        const uint32_t begin = pairs.begins[peer];
        return pass.begins != nullptr ? Layout::row(begin, index) : row_of_piece<Layout>(peer, begin + index);
    }
    __device__ int32_t id_of(const HtCommon& common, const TokenEntries& entries) const {
        const int32_t local_experts = static_cast<int32_t>(common.layout.local_experts);
        if (entries.rank < 0) {
            return entries.entry.expert;
        }
        const uint32_t rank = pass.locals[entries.rank];
        return static_cast<int32_t>(rank) * local_experts + entries.entry.expert % local_experts;
    }

   private:
    // Row `at` of all that `peer` forwards for others lies in the last piece (segment) that begins at or before it.
    template <typename Layout>
    __device__ uint32_t row_of_piece(uint32_t peer, uint32_t at) const {
        const uint32_t* starts = pass.piece_starts + peer * (pass.pieces + 1);
        uint32_t low = 0;
        for (uint32_t high = pass.pieces; high - low > 1;) {
            const uint32_t middle = (low + high) / 2;
            (starts[middle] <= at ? low : high) = middle;
        }
        return Layout::row(pass.piece_rows[peer * pass.pieces + low], at - starts[low]);
    }
};

}  // namespace nccl_ep
