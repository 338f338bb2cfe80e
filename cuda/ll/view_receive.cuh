// The receiving half of a dispatch into a view: waits for rows, which stay in place, and stores ids, weights and
// scales.
#pragma once

#include "rank_notices.cuh"
#include "view_rows.cuh"

namespace nccl_ep::ll_rank_dispatch_view_impl {

using ll_dispatch_impl::store_id;

// Waits for the fingerprint and scales word of `source`, and reports it if they differ from this rank's.
template <typename Rows>
__device__ __forceinline__ void check_source(const Block& block, uint32_t source) {
    const Op& op = block.op;
    const uint64_t* at = op.here().fingerprint(source);
    uint64_t theirs;
    uint64_t scales = op.packet(op.common.scales_word);
    const bool ok = await(op, block.shared.late, WAIT_BEGIN, source, [&] {
        theirs = ld_relaxed_sys(at);
        if constexpr (Rows::kScaled) {
            scales = ld_relaxed_sys(op.here().scales_word(source));
        }
        return packet_epoch(theirs) == op.epoch &&
               (packet_epoch(scales) == op.epoch || packet_data(theirs) != op.common.fingerprint);
    });
    if (ok && (packet_data(theirs) != op.common.fingerprint || packet_data(scales) != op.common.scales_word)) {
        report_difference(op, source, packet_data(theirs));
    }
}

// The last warp waits for each source's number of rows and tokens. The first block stores them; the last block, which
// has least to do, checks the sources.
template <typename Rows>
__device__ __forceinline__ void receive_counts(const Block& block) {
    const Op& op = block.op;
    const uint32_t most = block.shape.max_tokens;
    if (block.is_first() && block.dispatch.waits != nullptr) {
        const uint64_t* tokens = op.here().counts(0) + block.shape.local_experts;
        time_ranks(op.common, op.nodes, op.epoch, tokens, block.dispatch.waits);
    }
#pragma unroll 1
    for (uint32_t source = lane_idx(); source < op.ranks(); source += kWarpSize) {
        uint64_t rows = 0;
        uint64_t tokens = 0;
        if (is_active(op.common.peers, source)) {
            if (blockIdx.x == gridDim.x - 1) {
                check_source<Rows>(block, source);
            }
            const uint64_t* at = op.here().counts(source);
            const bool ok = await(op, block.shared.late, WAIT_COUNTS, source, [&] {
                rows = ld_relaxed_sys(at);
                tokens = ld_relaxed_sys(at + block.shape.local_experts);
                return packet_epoch(rows) == op.epoch && packet_epoch(tokens) == op.epoch;
            });
            rows = ok ? rows : 0;
            tokens = ok ? tokens : 0;
        }
        // Bounded, as they become addresses.
        const uint32_t num_rows = min(packet_data(rows) & ((1u << kCleanShift) - 1), most);
        const uint32_t num_tokens = min(packet_data(tokens), most);
        atomicMin(&block.shared.rows_from[source], num_rows);
        block.shared.all[source] = num_tokens;
        if (block.is_first()) {
            op.common.handle.tokens_of[source] = num_tokens;
            block.view.state->rows[block.view.bank][source] = num_rows;
            if (block.dispatch.counter != nullptr) {
                block.dispatch.counter[source] = static_cast<int32_t>(num_rows);
            }
        }
    }
    sync_warp();
}

// Row `index` from a source, which may not exist.
struct RowFrom {
    const uint32_t* rows;  // how many rows come from the source
    uint32_t source;
    uint32_t index;

    __device__ bool is_known() const { return ld_relaxed_cta_shared(rows) != kUnknownRows; }
    __device__ bool may_come() const { return index < ld_relaxed_cta_shared(rows); }
};

// A warp waits for its chunks of the rows from `source`; it starts before the number of rows is known.
__device__ __forceinline__ void await_rows(const Block& block, uint32_t source) {
#pragma unroll 1
    for (ViewUnit unit = block.first; unit.row < block.shape.max_tokens; unit.next(block.view)) {
        const RowFrom row = {&block.shared.rows_from[source], source, unit.row};
        Vec16 vec;
        if (!await_chunk(block.op, block.view, block.shared.late, row, unit.chunk(block.shape, block.view), vec)) {
            return;
        }
    }
}

// The last warp stores "no expert" as the ids of the block's share of the unused rows.
__device__ __forceinline__ void clear_ids(const Block& block, uint32_t source) {
    const uint32_t top_k = block.shape.top_k;
    const uint32_t used = block.shared.rows_from[source];
#pragma unroll 1
    for (uint32_t row = blockIdx.x; row < block.shape.max_tokens; row += gridDim.x) {
        if (row >= used && lane_idx() < top_k) {
            const uint32_t at = (source * block.shape.max_tokens + row) * top_k;
            store_id(block.params.dispatch.topk, at + lane_idx(), kNowhere);
        }
    }
}

// The last warp receives and stores the ids and weights of a token of `source`.
__device__ __forceinline__ void receive_entry(const Block& block, uint32_t source, uint32_t token) {
    const Op& op = block.op;
    const LlTopk& topk = block.params.dispatch.topk;
    const uint32_t top_k = block.shape.top_k;
    if (lane_idx() >= top_k) {
        return;
    }
    const uint64_t* entry_at = op.here().entries(source, token) + lane_idx();
    const uint64_t* weight_at = entry_at + block.weights_behind();
    uint64_t entry;
    uint64_t weight;
    // Both loads are in flight together. Weights come only with a row.
    await(op, block.shared.late, WAIT_ENTRY, source, [&] {
        entry = ld_relaxed_sys(entry_at);
        weight = ld_relaxed_sys(weight_at);
        const bool has_row = EntryWord{packet_data(entry)}.index() < block.shape.max_tokens;
        return packet_epoch(entry) == op.epoch && (!has_row || packet_epoch(weight) == op.epoch);
    });
    const EntryWord word = {packet_data(entry)};
    const int32_t row = RankMajor{block.shape, op.ranks()}.row(source, word.index());
    const uint32_t entry_of = (source * block.shape.max_tokens + token) * top_k + lane_idx();
    op.common.handle.row_of[entry_of] = lane_idx() == 0 ? row : kNowhere;
    if (row >= 0) {
        const uint32_t at = row * top_k + lane_idx();
        const bool is_here = word.expert() < block.shape.local_experts;
        store_id(topk, at, is_here ? static_cast<int32_t>(word.expert()) : kNowhere);
        topk.out_weights[at] = __uint_as_float(packet_data(weight));
    }
}

// The last warp receives the entries of those of the block's tokens of `source` whose unit is part `part`.
__device__ __forceinline__ void receive_entries(const Block& block, uint32_t source, uint32_t part) {
    clear_ids(block, source);
#pragma unroll 1
    for (ViewUnit unit = block.first; unit.row < block.shared.all[source]; unit.next(block.view)) {
        if (unit.part == part) {
            receive_entry(block, source, unit.row);
        }
    }
}

// A warp receives the scales of those of the block's rows from `source` whose unit is part `part`. It waits until the
// number of rows is known, as polls before that would delay the rows.
__device__ __forceinline__ void receive_scales(const Block& block, const ScaledRows& rows, uint32_t source,
                                               uint32_t part) {
    const RowFrom first = {&block.shared.rows_from[source], source, 0};
    while (any_lane(!first.is_known())) {
        shared_spin_hint();
    }
#pragma unroll 1
    for (ViewUnit unit = block.first; unit.row < block.shared.rows_from[source]; unit.next(block.view)) {
        if (unit.part == part) {
            receive_scales_of_row(block, rows, source, unit.row);
        }
    }
}

// The last warp receives the entries of all sources. The blocks of one token take different sources, as far as there
// are enough blocks. With blocks to spare, the first, which sends counts, the second, which sends entries, and the
// last, which checks the sources, take none.
__device__ __forceinline__ void receive_all_entries(const Block& block) {
    const uint32_t last = block.view.parts - (block.view.parts >= block.op.ranks() + 3 ? 2 : 1);
#pragma unroll 1
    for (uint32_t number = 0; number < block.op.ranks(); ++number) {
        const uint32_t part = last - divide(number, block.view.parts, block.view.parts_reciprocal).remainder;
        receive_entries(block, rank_after(block.op, number), part);
    }
}

// The other warps wait for the rows of all other ranks. Scales of different sources are received by different warps,
// and by different blocks of a token.
template <typename Rows>
__device__ __forceinline__ void receive_rows(const Block& block, const Rows& rows) {
#pragma unroll 1
    for (uint32_t number = 1; number < block.op.ranks(); ++number) {
        await_rows(block, rank_after(block.op, number));
    }
    if constexpr (Rows::kScaled) {
#pragma unroll 1
        for (uint32_t number = warp_idx(); number < block.op.ranks(); number += block.view.warps) {
            const uint32_t part = divide(number, block.view.parts, block.view.parts_reciprocal).remainder;
            receive_scales(block, rows.rows, rank_after(block.op, number), part);
        }
    }
}

template <typename Rows>
__device__ __forceinline__ void receive_all(const Block& block, const Rows& rows) {
    if (is_last_warp()) {
        receive_counts<Rows>(block);
        receive_all_entries(block);
    } else if (block.moves_rows()) {
        receive_rows(block, rows);
    }
}

}  // namespace nccl_ep::ll_rank_dispatch_view_impl
