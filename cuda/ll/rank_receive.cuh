// The receiving half of a rank-major dispatch: the sources' counts, and the rows with their ids and weights.
#pragma once

#include "dispatch_receive.cuh"
#include "rank_notices.cuh"

namespace nccl_ep::ll_dispatch_impl {

// Stores "no expert" as the ids of unused rows. The first `blocks` receiving blocks share the work.
template <typename Op>
__device__ void clear_ids(const Block<Op>& block, const LlTopk& topk, uint32_t blocks) {
    const uint32_t top_k = block.shape.top_k;
    const uint32_t entries = block.shape.max_tokens * top_k;
#pragma unroll 1
    for (uint32_t source = 0; source < block.op.ranks(); ++source) {
        const uint64_t ids = uint64_t{source} * entries;
        const uint32_t first = block.per_expert[source] * top_k;
#pragma unroll 1
        for (uint32_t i = first + block.receivers.index() * blockDim.x + threadIdx.x; i < entries;
             i += blocks * blockDim.x) {
            store_id(topk, ids + i, kNowhere);
        }
    }
}

// The words of a source's counts. Four, so that threads divide them among each other with shifts.
enum SourceWord : uint32_t { kRowCount, kTokenCount, kFingerprint, kScalesWord, kNumSourceWords };

// Waits for the counts of all sources. The first block also checks their fingerprints and scales words, and measures
// how long they take.
template <typename Op>
__device__ __forceinline__ void receive_counts_by_rank(const Block<Op>& block) {
    const Op& op = block.op;
    const bool is_first = block.receivers.index() == 0;
    if (is_first) {
        time_sources(block);
        // The rows of this dispatch are in no view (view.cuh).
        if (threadIdx.x == 0) {
            *filled_by(op.common, op.ranks()) = 0;
        }
    }
    const uint32_t local = block.shape.local_experts;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < op.ranks() * kNumSourceWords; i += blockDim.x) {
        const uint32_t source = i / kNumSourceWords;
        const uint32_t word = i % kNumSourceWords;
        const bool is_checked = word >= kFingerprint;
        const bool has_source = is_active(op.common.peers, op.nodes.forwarder_of(source));
        if (is_checked && (!is_first || !has_source || (word == kScalesWord && !Op::Rows::kScaled))) {
            continue;
        }
        uint32_t data = 0;
        if (has_source) {
            const uint64_t* at = op.here().counts(source) + (word == kRowCount ? 0 : local + word - kTokenCount);
            data = wait_for_packet_in(op, at, op.from(source, is_checked ? WAIT_BEGIN : WAIT_COUNTS)).data;
        }
        // Bounded, as counts become addresses and come from a peer.
        const uint32_t bounded = min(data, block.shape.max_tokens);
        if (word == kRowCount) {
            block.per_expert[source] = bounded;
            if (is_first && block.params.counter != nullptr) {
                block.params.counter[source] = bounded;
            }
        } else if (word == kTokenCount) {
            block.tokens_of[source] = bounded;
            atomicMax(&block.shared.most_tokens, bounded);
            if (is_first) {
                block.params.common.handle.tokens_of[source] = bounded;
            }
        } else if (data != (word == kFingerprint ? op.common.fingerprint : op.common.scales_word)) {
            report_difference(op, source, word == kFingerprint ? data : op.common.fingerprint);
        }
    }
    __syncthreads();
}

template <typename Op>
__device__ void receive_counts_and_clear(const Block<Op>& block, const LlTopk& topk) {
    __syncthreads();  // the counts overwrite the histograms
    receive_counts_by_rank(block);
    const uint32_t blocks = max(1u, min(block.receivers.blocks, arriving_units(block)));
    if (block.receivers.index() < blocks && block.params.out != nullptr) {
        clear_ids(block, topk, blocks);
    }
}

// The weights of a row, for which a warp waits with a lane for each entry of the token.
template <typename Op>
struct ArrivingWeights {
    const Op& op;
    // The address of this lane's packet; NULL if it has none.
    const uint64_t* at;
    uint64_t packet = op.packet(0);

    // Polls once; returns whether all weights have arrived.
    __device__ __forceinline__ bool poll() {
        if (at != nullptr) {
            packet = ld_relaxed_sys(at);
        }
        return all_lanes(packet_epoch(packet) == op.epoch);
    }
};

// Stores the ids and weights of a row.
template <typename Op>
__device__ __forceinline__ void store_beside(const Block<Op>& block, const LlTopk& topk,
                                             const ArrivingWeights<Op>& weights, EntryWord entry, int32_t row) {
    if (lane_idx() < block.shape.top_k) {
        const uint64_t at = uint64_t(row) * block.shape.top_k + lane_idx();
        store_id(topk, at, entry.is_here() ? static_cast<int32_t>(entry.expert()) : kNowhere);
        topk.out_weights[at] = __uint_as_float(packet_data(weights.packet));
    }
}

// One warp waits for a chunk of a token with `receive`, and copies it to the token's output row here, if there is one;
// false if it gives up.
template <typename Op, typename Receive>
__device__ __forceinline__ bool receive_chunk(const Block<Op>& block, const LlTopk& topk, const WorkUnit& unit,
                                              LateWait& late, Receive receive) {
    const Op& op = block.op;
    const uint32_t source = unit.rank;
    const BankRow<Own> from = op.here().row(block.bank_slots.of_token(source, unit.token));
    const auto chunk = block.rows.chunk(block.shape, unit.number);
    // Entries and weights are received together with the first chunk.
    const bool has_topk = unit.number == 0 && lane_idx() < block.shape.top_k;
    ArrivingWeights<Op> weights = {
        op, has_topk ? op.here().weights(source, unit.token, op.ranks()) + lane_idx() : nullptr};
    Received<Op> received;
    if (!receive(from, chunk, received, late, [&] { return weights.poll(); })) {
        return false;
    }
    if (received.is_beyond) {
        return true;
    }
    const EntryWord entry = received.entry;
    const LaneMask here = ballot(entry.is_here());
    int32_t row = kNowhere;
    if (here.any()) {
        reset_chunk<typename Op::Rows::Data>(from, chunk);
        row = block.output.row(source, shuffle(entry.index(), here.first()));
    }
    const bool is_kept = row >= 0 && block.params.out != nullptr;
    if (unit.number == 0) {
        if (lane_idx() < block.shape.top_k) {
            op.rows_of(source, unit.token)[lane_idx()] = lane_idx() == 0 ? row : kNowhere;
        }
        if (is_kept) {
            store_beside(block, topk, weights, entry, row);
        }
    }
    if (is_kept) {
        // `target` expects an expert, whose place the source takes in this layout.
        const auto to = block.rows.target(block.params, block.output, EntryWord::here(source, 0), row);
        block.rows.store(block.params, block.shape, to, chunk, received.row.data);
    }
    return true;
}

}  // namespace nccl_ep::ll_dispatch_impl
