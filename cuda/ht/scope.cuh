// Which rows a launch has: all rows of the operation, on one node, or those of one pipeline stage over several nodes.
//
// Kernels are templates over the two, which differ in where sequences begin, and in whose rows are contiguous in the
// output: those of a rank, or of a chunk of its tokens. Over several nodes a token's experts are numbered by local rank
// and local expert.
#pragma once

#include "entries.cuh"
#include "messages.cuh"
#include "tail.cuh"

namespace nccl_ep {

// A group on one node.
struct AllRows {
    // Where a token of the launch is, if its number does not say that.
    struct TokenLocation {};

    __device__ bool is_own() const { return true; }
    // Whether the group has failed when the operation begins.
    __device__ __forceinline__ uint32_t known_failure(const HtCommon& common) const {
        return nccl_ep::known_failure(common);
    }
    // The group ranks of the peers; NULL if these are the local indices.
    __device__ const uint32_t* ranks() const { return nullptr; }
    __device__ TokenLocation location(const HtCommon&, uint32_t) const { return {}; }
    // The row of a token, if `rows` is the first one.
    template <typename Byte>
    __device__ __forceinline__ Byte* row_of_token(Byte* rows, const RowFormat& format, TokenLocation,
                                                  uint32_t token) const {
        return rows + format.offset(token);
    }
    // Whether the tokens of the launch have ids and weights, and where those of a token are.
    __device__ bool has_routing(const HtDispatchParams& params) const {
        return params.topk_idx != nullptr;
    }
    __device__ __forceinline__ RoutingPointers routing(const HtDispatchParams& params, TokenLocation,
                                                       uint32_t token) const {
        const uint64_t first = uint64_t{token} * params.common.handle.top_k;
        return {params.topk_idx + first, params.weights + first};
    }
    // Where the gradients of a token go.
    __device__ float* gradients(const HtCombineParams& params, TokenLocation, uint32_t token) const {
        return params.out_gradients + uint64_t{token} * params.columns;
    }
    __device__ uint32_t total(const HtCommon& common) const {
        return common.handle.begins[common.peers.ranks];
    }
    // The rows of this launch to and from `peer`, if there is a ring.
    __device__ PairRows rows(const HtCommon& common, uint32_t peer, bool has_ring) const {
        const uint32_t begin = common.handle.begins[peer];
        return {begin, has_ring ? common.handle.begins[peer + 1] - begin : 0,
                has_ring ? common.handle.departures[peer] : 0};
    }
    __device__ void rebase(const HtCommon&, bool, HtPairs&) const {}
    // Whether the messages from other nodes have arrived. All threads call it.
    __device__ bool messages_arrived(const HtCommon&, const HtPairs&) const { return true; }
    // The row of the output, or of a combine's input, for row `index` from `peer`.
    template <typename Layout>
    __device__ uint32_t row(const HtPairs& pairs, uint32_t peer, uint32_t index) const {
        return Layout::row(pairs.begins[peer], index);
    }
    // The id by which callers name this lane's expert.
    __device__ int32_t id_of(const HtCommon&, const TokenEntries& entries) const {
        return entries.entry.expert;
    }
};

// A stage of an operation over several nodes. Indices in entries are handle-global: they count the rows of earlier
// stages, too. Indices of the scheduler are stage-local.
template <typename Net>
struct RowsOfStage {
    const HtStage& stage;

    // A message, and the token's index in it; own tokens count as message 0.
    struct TokenLocation {
        uint32_t message;
        uint32_t index;
    };

    __device__ bool is_own() const { return stage.is_own != 0; }
    __device__ __forceinline__ uint32_t known_failure(const HtCommon& common) const {
        return nccl_ep::known_failure(common.wait);
    }
    __device__ const uint32_t* ranks() const { return stage.locals; }
    __device__ TokenLocation location(const HtCommon& common, uint32_t token) const {
        if (stage.origins == nullptr || token >= common.handle.tokens) {
            return {0, token};
        }
        const HtOrigin origin = stage.origins[token];
        return {origin.source, origin.index - stage.starts[origin.source * stage.chunk_ends]};
    }
    template <typename Byte>
    __device__ __forceinline__ Byte* row_of_token(Byte* rows, const RowFormat& format, TokenLocation location,
                                                  uint32_t) const {
        return rows + location.message * stage.messages.stride + format.offset(location.index);
    }
    __device__ bool has_routing(const HtDispatchParams& params) const {
        return is_own() ? params.topk_idx != nullptr : stage.messages.tail_bytes != 0;
    }
    __device__ __forceinline__ RoutingPointers routing(const HtDispatchParams& params, TokenLocation location,
                                                       uint32_t token) const {
        if (is_own()) {
            return AllRows{}.routing(params, {}, token);
        }
        const auto* ids =
            reinterpret_cast<const int64_t*>(tail_of(stage.messages, location.message, location.index));
        return {ids, reinterpret_cast<const float*>(ids + params.common.handle.top_k)};
    }
    __device__ float* gradients(const HtCombineParams& params, TokenLocation location, uint32_t token) const {
        return is_own() ? AllRows{}.gradients(params, {}, token)
                        : reinterpret_cast<float*>(
                              tail_of(stage.messages, location.message, location.index));
    }
    __device__ uint32_t total(const HtCommon&) const { return *stage.total; }
    __device__ PairRows rows(const HtCommon& common, uint32_t peer, bool has_ring) const {
        // This rank's own rows are found by the indices of entries, those of peers by the indices of the scheduler.
        const uint32_t before = peer != common.peers.rank ? stage.arrivals[peer] : 0;
        const uint32_t begin = stage.begins != nullptr ? stage.begins[peer] + before : before;
        return {begin, has_ring ? stage.arrivals_end[peer] - stage.arrivals[peer] : 0,
                has_ring ? stage.departures_end[peer] - stage.departures[peer] : 0};
    }
    // Moves the beginnings of sequences so that indices of entries can be added to them. All threads call it, each for
    // the peers that it has filled in.
    __device__ void rebase(const HtCommon& common, bool is_combine, HtPairs& pairs) const {
        for (uint32_t peer = threadIdx.x; peer < common.peers.ranks; peer += blockDim.x) {
            uint32_t* base = is_combine ? pairs.received : pairs.sent;
            base[peer] -= stage.departures[peer] * common.shape.row_units;
        }
        __syncthreads();
    }
    __device__ bool messages_arrived(const HtCommon& common, const HtPairs& pairs) const {
        return all_arrived(stage.header_count, [&](uint32_t i) {
            MessageHeader ours = stage.expected;
            ours.epoch = ld_relaxed_gpu(&common.sequences->epoch);
            const uint32_t rank = stage.header_ranks[i];
            const Awaited awaited = {WAIT_STREAMED_ROW, HT_RANK_OF_GROUP | rank, pairs.operation};
            return Net::arrived(common, *header_of(stage.headers, i), ours, awaited, rank);
        });
    }
    template <typename Layout>
    __device__ uint32_t row(const HtPairs& pairs, uint32_t peer, uint32_t index) const {
        const uint32_t begin = pairs.begins[peer];
        return stage.begins != nullptr ? Layout::row(begin, index) : row_of_piece<Layout>(peer, begin + index);
    }
    __device__ int32_t id_of(const HtCommon& common, const TokenEntries& entries) const {
        const int32_t local_experts = static_cast<int32_t>(common.layout.local_experts);
        if (entries.rank < 0) {
            return entries.entry.expert;
        }
        const uint32_t rank = stage.locals[entries.rank];
        return static_cast<int32_t>(rank) * local_experts + entries.entry.expert % local_experts;
    }

   private:
    // The output row for row `at` of those that `peer` forwards for other ranks: it is in the last piece that begins at
    // or before it.
    template <typename Layout>
    __device__ uint32_t row_of_piece(uint32_t peer, uint32_t at) const {
        const uint32_t* starts = stage.piece_starts + peer * (stage.pieces + 1);
        uint32_t low = 0;
        for (uint32_t high = stage.pieces; high - low > 1;) {
            const uint32_t middle = (low + high) / 2;
            (starts[middle] <= at ? low : high) = middle;
        }
        return Layout::row(stage.piece_rows[peer * stage.pieces + low], at - starts[low]);
    }
};

}  // namespace nccl_ep
