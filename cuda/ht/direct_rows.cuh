// A dispatch whose rows need no ring, as the peers map all ranks' outputs (offers.cuh).
//
// Some warps, the senders, a few in each of the first blocks, move rows of tokens to the peers' outputs: a row is
// loaded once, and stored to its place in each output. The other warps store scales, ids and weights to the peers'
// windows, *beside* the rows, copy what stays on this rank, and fill output rows that no token fills. Then every block
// waits until the peers are done, and copies its share of what came beside rows to the outputs.
#pragma once

#include "../base/row.cuh"
#include "dispatch_local.cuh"
#include "offers.cuh"
#include "pipeline.cuh"
#include "scaled_rows.cuh"

namespace nccl_ep::ht_direct_impl {

using namespace ht_dispatch_impl;

template <typename RowsOfKind>
struct Block {
    using Rows = RowsOfKind;
    using TokenLocation = AllRows::TokenLocation;
    static constexpr bool kZones = false;

    const HtDispatchParams& params;
    const HtMapped& mapped;
    Rows rows;
    SharedOffers& offers;

    const HtCommon& common = params.common;
    AllRows scope = {};
    bool wants_rows = params.out != nullptr;
    bool wants_routing = params.out_idx != nullptr;

    __device__ uint32_t rank() const { return common.peers.rank; }
    __device__ uint32_t top_k() const { return common.handle.top_k; }
    __device__ bool sends() const { return blockIdx.x < mapped.blocks && warp_idx() < mapped.warps; }
    // Bytes of scales beside a row; ids and weights follow them.
    __device__ uint32_t scale_bytes() const {
        if constexpr (Rows::kHasScales) {
            return rows.scale_parts() * sizeof(Vec16);
        }
        return 0;
    }
    __device__ bool has_routing() const { return scope.has_routing(params); }
    __device__ CallerRouting caller_routing(uint32_t token) const {
        if (!has_routing() || token >= common.handle.tokens) {
            return {};
        }
        return {scope.routing(params, {}, token), top_k()};
    }
    __device__ const uint8_t* row_of_token(uint32_t token, TokenLocation) const {
        return params.tokens + uint64_t{token} * rows.token_bytes(common);
    }
    __device__ uint32_t row_from(uint32_t source, uint32_t index) const {
        return common.handle.begins[source] + index;
    }
    // Where the rows of this rank's tokens begin in the output of rank `of`.
    __device__ Remote<uint8_t> rows_at(uint32_t of) const {
        return of != rank() ? offers.first[of] : Remote<uint8_t>(out_row(row_from(of, 0)));
    }
    __device__ uint8_t* out_row(uint32_t row) const { return params.out + uint64_t{row} * mapped.row_bytes; }
    // The memory beside row `index` from `source`, in the window of `owner`, which begins at `window`.
    template <template <typename> class Address>
    __device__ Address<uint8_t> beside(Address<uint8_t> window, uint32_t owner, uint32_t source,
                                       uint32_t index) const {
        const uint32_t number = source - (source > owner ? 1 : 0);
        return window + (mapped.layout.side + number * mapped.layout.side_bytes +
                         uint64_t{index} * mapped.side_row_bytes);
    }
};

// ---- Rows for peers ----------------------------------------------------------------------------

template <typename Block>
__device__ __forceinline__ bool goes_to_peer(const Block& block, const TokenEntries& entries) {
    return entries.is_first() && static_cast<uint32_t>(entries.rank) != block.rank();
}

// With one token at a time, taking a token would take as long as sending a row.
constexpr uint32_t kTokensAtOnce = 2;

// What a sender does. With `takes_tokens` warps take tokens dynamically, for when not all SMs send equally fast.
template <typename Block>
__device__ void send_rows(const Block& block, Pipeline& pipeline) {
    const HtMapped& mapped = block.mapped;
    const HtHandleMemory& handle = block.common.handle;
    const uint32_t senders = mapped.blocks * mapped.warps;
    TokenScheduler<kTokensAtOnce> tokens(mapped, senders, mapped.takes_tokens != 0);
    PartCursor loading = {warp_idx() * mapped.blocks + blockIdx.x, mapped.part_bytes, mapped.row_bytes};
    PartCursor parts = loading;
    // Loaded well before it is needed, as loads wait behind the SM's stores.
    HtEntry entry = TokenEntries::load_entry(handle, parts.token);
    // Lane i has the token of stage i, or the stage's next token. There are at least two stages.
    uint32_t token_of_stage = 0;
    // The loop also fills the first stages, so that this code exists once.
    uint32_t filled = 1;
#pragma unroll 1
    while (parts.token < handle.tokens) {
        token_of_stage = lane_idx() == pipeline.filling() ? loading.token : token_of_stage;
        if (filled < mapped.stages) {
            ++filled;
        } else {
            const TokenEntries entries(block.common, entry);
            const PartCursor current = parts;
            parts.advance();
            parts.token = shuffle(token_of_stage, pipeline.next_in_use());
            entry = TokenEntries::load_entry(handle, parts.token);
            const bool is_wanted =
                goes_to_peer(block, entries) || (mapped.stores_local_rows != 0 && entries.is_first());
            Remote<uint8_t> to;
            if (is_wanted) {
                to = block.rows_at(entries.rank) + uint64_t{entries.entry.index} * mapped.row_bytes;
            }
            const uint8_t* part = pipeline.wait_full();
#pragma unroll 1
            for (LaneMask left = ballot(is_wanted); left.any(); left.drop_first()) {
                pipeline.store(part, remote_of_lane(to, left.first()) + current.offset, current.bytes());
            }
            pipeline.end_using();
            pipeline.commit_and_wait_read_but_last();
        }
        if (loading.token < handle.tokens) {
            const Remote<uint8_t> row(const_cast<uint8_t*>(block.row_of_token(loading.token, {})));
            pipeline.fill(pipeline.begin_filling(loading.bytes()), row + loading.offset, loading.bytes());
            pipeline.end_filling();
            loading.advance();
            if (loading.offset == 0) {
                loading.token = mapped.takes_tokens != 0 ? tokens.next(mapped) : loading.token + senders;
            }
        }
    }
    pipeline.wait_stored();
}

// ---- What the other warps do -------------------------------------------------------------------

// Stores a token's scales, ids and weights beside its rows at all peers; `weight` is that of each lane's expert.
template <typename Block>
__device__ void store_beside(const Block& block, uint32_t token, float weight, const TokenEntries& entries) {
    const HtCommon& common = block.common;
#pragma unroll 1
    for (LaneMask left = ballot(goes_to_peer(block, entries)); left.any(); left.drop_first()) {
        const uint32_t lane = left.first();
        const uint32_t peer = shuffle(entries.rank, lane);
        const uint32_t index = shuffle(entries.entry.index, lane);
        const Remote<uint8_t> to =
            block.template beside<Remote>(window_of(common.peers, peer), peer, block.rank(), index);
        if constexpr (Block::Rows::kHasScales) {
#pragma unroll 1
            for (uint32_t part = lane_idx(); part < block.rows.scale_parts(); part += kWarpSize) {
                put(as<Vec16>(to) + part, block.rows.scale_part(block, token, part));
            }
        }
        if (block.has_routing()) {
            const RoutingEntry routing(common, entries, lane, weight);
            if (lane_idx() < block.top_k()) {
                put_value(as<uint64_t>(to + block.scale_bytes()) + lane_idx(), routing.packed());
            }
        }
    }
}

__device__ __forceinline__ void copy_row(uint8_t* to, const uint8_t* from, uint32_t bytes) {
    constexpr uint32_t kAtOnce = 8;
    const uint32_t vecs = bytes / sizeof(Vec16);
#pragma unroll 1
    for (uint32_t first = lane_idx(); first < vecs; first += kAtOnce * kWarpSize) {
        Vec16 data[kAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t at = first + i * kWarpSize;
            if (at < vecs) {
                data[i] = ld_const(reinterpret_cast<const Vec16*>(from) + at);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t at = first + i * kWarpSize;
            if (at < vecs) {
                st_row(reinterpret_cast<Vec16*>(to) + at, data[i]);
            }
        }
    }
}

// Copies a token that goes to this rank itself, with scales, ids and weights.
template <typename Block>
__device__ void copy_local_token(const Block& block, uint32_t token, float weight, const TokenEntries& entries) {
    const LocalRow local(block, entries);
    if (!local.is_here) {
        return;
    }
    const uint32_t row = local.row(block);
    if (block.mapped.stores_local_rows == 0) {
        copy_row(block.out_row(row), block.row_of_token(token, {}), block.mapped.row_bytes);
    }
    if constexpr (Block::Rows::kHasScales) {
        block.rows.copy_local_scales(block, token, row);
    }
    local.write_routing(block, entries, weight);
}

// Fills row `row`, which no token fills, of each output; false if no output has that row.
template <typename Block>
__device__ bool fill_unused_row(const Block& block, uint64_t row) {
    const bool fills = block.params.fills_rest != 0;
    const bool has_row = fills && block.wants_rows && row < block.params.out_rows;
    const bool has_routing = block.wants_routing && row < block.params.routing_rows;
    if (has_row) {
        Vec16* to = reinterpret_cast<Vec16*>(block.out_row(row));
#pragma unroll 1
        for (uint32_t i = lane_idx(); i < block.mapped.row_bytes / sizeof(Vec16); i += kWarpSize) {
            st_row(to + i, {{0, 0, 0, 0}});
        }
    }
    if (has_routing) {
        write_routing(block, row, {-1, 0.0f});
    }
    const bool has_scales = fills && block.rows.clear_scales(row);
    return has_row || has_routing || has_scales;
}

template <typename Block>
__device__ void work_locally(const Block& block) {
    // `first` is this warp's number among those that do not send, `step` their number.
    const HtMapped& mapped = block.mapped;
    const uint32_t senders = mapped.blocks * mapped.warps;
    const uint32_t before = min(mapped.blocks * (warp_idx() + 1), senders);
    const uint32_t first = warp_idx() * gridDim.x + blockIdx.x - before;
    const uint32_t step = num_warps() * gridDim.x - senders;
    const HtHandleMemory& handle = block.common.handle;
    // Loaded a token ahead, as loads wait behind the SM's stores.
    HtEntry entry = TokenEntries::load_entry(handle, first);
    CallerRouting given = block.caller_routing(first);
#pragma unroll 1
    for (uint32_t token = first; token < handle.tokens; token += step) {
        const TokenEntries entries(block.common, entry);
        const float weight = block.has_routing() ? weight_of_lane(block, entries, given) : 0.0f;
        entry = TokenEntries::load_entry(handle, token + step);
        given = block.caller_routing(token + step);
        if (mapped.side_row_bytes != 0) {
            store_beside(block, token, weight, entries);
        }
        copy_local_token(block, token, weight, entries);
    }
#pragma unroll 1
    for (uint64_t i = first; fill_unused_row(block, Flat::unused_row(block.offers.total, i)); i += step) {
    }
}

// ---- What came beside rows ---------------------------------------------------------------------

// Calls `load(i)` and then `store(i, its result)` for each i < count, each thread for kAtOnce of them at a time. All
// threads of the grid call it.
template <uint32_t kAtOnce, typename Load, typename Store>
__device__ __forceinline__ void for_all(uint32_t count, Load load, Store store) {
    const uint32_t threads = gridDim.x * blockDim.x;
#pragma unroll 1
    for (uint32_t first = blockIdx.x * blockDim.x + threadIdx.x; first < count; first += kAtOnce * threads) {
        decltype(load(first)) loaded[kAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            if (first + i * threads < count) {
                loaded[i] = load(first + i * threads);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            if (first + i * threads < count) {
                store(first + i * threads, loaded[i]);
            }
        }
    }
}

constexpr uint32_t kTakenAtOnce = 4;

// Copies ids and weights of the rows from `source` to the outputs.
template <typename Block>
__device__ void take_routing(const Block& block, uint32_t source) {
    const HtDispatchParams& params = block.params;
    const uint32_t top_k = block.top_k();
    const uint32_t reciprocal = 0xffffffffu / top_k;
    const uint8_t* beside =
        block.template beside<Own>(own_window(block.common.peers), block.rank(), source, 0) + block.scale_bytes();
    const uint64_t to = uint64_t{block.row_from(source, 0)} * top_k;
    for_all<kTakenAtOnce>(
        rows_of(block.common, source) * top_k,
        [&](uint32_t i) {
            const DivMod at = divide(i, top_k, reciprocal);
            const uint8_t* row = beside + uint64_t{at.quotient} * block.mapped.side_row_bytes;
            return ld_relaxed_sys(reinterpret_cast<const uint64_t*>(row) + at.remainder);
        },
        [&](uint32_t i, uint64_t packed) {
            const RoutingEntry entry(block.common, packed);
            params.out_idx[to + i] = entry.id;
            params.out_weights[to + i] = entry.weight;
        });
}

// Copies scales of the rows from `source` to the output.
template <typename Block>
__device__ void take_scales(const Block& block, uint32_t source) {
    const uint32_t parts = block.rows.scale_parts();
    const uint32_t reciprocal = 0xffffffffu / parts;
    const uint8_t* beside = block.template beside<Own>(own_window(block.common.peers), block.rank(), source, 0);
    const uint32_t count = rows_of(block.common, source) * parts;
    const auto load = [&](uint32_t i) {
        const DivMod at = divide(i, parts, reciprocal);
        const uint8_t* row = beside + uint64_t{at.quotient} * block.mapped.side_row_bytes;
        return ld_relaxed_sys(reinterpret_cast<const Vec16*>(row) + at.remainder);
    };
    const auto place_of = [&](uint32_t i) {
        const DivMod at = divide(i, parts, reciprocal);
        return block.rows.out_part(block.row_from(source, at.quotient), at.remainder);
    };
    bool are_some_left = false;
    for_all<kTakenAtOnce>(count, load, [&](uint32_t i, const Vec16& scales) {
        const ScalePart to = place_of(i);
        if (to.is_vec_access()) {
            st_row(reinterpret_cast<Vec16*>(to.scales + to.first), scales);
        } else {
            are_some_left = true;
        }
    });
    // Parts that take several accesses are copied one at a time, so that their code exists once.
    if (are_some_left) {
        for_all<1>(count, load, [&](uint32_t i, const Vec16& scales) { place_of(i).store(scales); });
    }
}

// ---- The dispatch ------------------------------------------------------------------------------

template <typename Rows>
__device__ void run(const Block<Rows>& block, uint8_t* buffers) {
    const HtCommon& common = block.common;
    const HtMapped& mapped = block.mapped;
    if (block.params.counter != nullptr && blockIdx.x == gridDim.x - 1) {
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < common.layout.local_experts; i += blockDim.x) {
            block.params.counter[i] = common.handle.counts[i];
        }
    }
    if (block.sends()) {
        Pipeline pipeline(buffers + warp_idx() * mapped.stages * mapped.stage_bytes, mapped.stage_bytes,
                          mapped.stages, block.offers.barriers + warp_idx() * mapped.stages);
        send_rows(block, pipeline);
    } else {
        work_locally(block);
    }
    finish_direct(common, mapped, block.offers);
    if (!wait_until_done(common, mapped, block.offers) || mapped.side_row_bytes == 0) {
        return;
    }
#pragma unroll 1
    for (uint32_t source = 0; source < common.peers.ranks; ++source) {
        if (source == block.rank() || !is_active(common.peers, source)) {
            continue;
        }
        if constexpr (Rows::kHasScales) {
            take_scales(block, source);
        }
        // Not `has_routing`: a rank without tokens need not pass ids, but receives some.
        if (common.shape.tail_bytes != 0 && block.wants_routing) {
            take_routing(block, source);
        }
    }
}

}  // namespace nccl_ep::ht_direct_impl
