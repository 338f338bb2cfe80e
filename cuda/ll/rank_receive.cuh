// What comes of a rank-major dispatch: what the sources tell beside rows, and a row's chunks with its ids and weights.
#pragma once

#include "dispatch_receive.cuh"
#include "rank_notices.cuh"

namespace nccl_ep::ll_dispatch_impl {

// Marks the ids of rows that hold nothing. The blocks that have anything to receive share the work.
template <typename Op>
__device__ void clear_ids(const Block<Op>& block, const LlBeside& beside, uint32_t blocks) {
    const uint32_t top_k = block.shape.top_k;
    const uint32_t entries = block.shape.max_tokens * top_k;
#pragma unroll 1
    for (uint32_t source = 0; source < block.op.ranks(); ++source) {
        const uint64_t ids = uint64_t{source} * entries;
        const uint32_t first = block.per_expert[source] * top_k;
#pragma unroll 1
        for (uint32_t i = first + block.receivers.index() * blockDim.x + threadIdx.x; i < entries;
             i += blocks * blockDim.x) {
            store_id(beside, ids + i, kNowhere);
        }
    }
}

// What a source tells beside its rows. Four, so that threads share them out without a division.
enum Told : uint32_t { kRowsThatCome, kTokens, kFingerprint, kScalesWord, kNumTold };

// Hears of the sources' tokens and rows. The first block checks what they run, too, and how long they take.
template <typename Op>
__device__ __forceinline__ void hear_sources_by_rank(const Block<Op>& block) {
    const Op& op = block.op;
    const bool is_first = block.receivers.index() == 0;
    if (is_first) {
        time_sources(block);
        // No view has the rows (view.cuh).
        if (threadIdx.x == 0) {
            *filled_by(op.common, op.ranks()) = 0;
        }
    }
    const uint32_t local = block.shape.local_experts;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < op.ranks() * kNumTold; i += blockDim.x) {
        const uint32_t source = i / kNumTold;
        const uint32_t told = i % kNumTold;
        const bool says_what_runs = told >= kFingerprint;
        const bool is_heard = is_active(op.common.peers, op.nodes.forwarder_of(source));
        if (says_what_runs && (!is_first || !is_heard || (told == kScalesWord && !Op::Rows::kScaled))) {
            continue;
        }
        uint32_t data = 0;
        if (is_heard) {
            const uint64_t* at = op.here().counts(source) + (told == kRowsThatCome ? 0 : local + told - kTokens);
            data = wait_for_packet_in(op, at, op.from(source, says_what_runs ? WAIT_BEGIN : WAIT_COUNTS)).data;
        }
        // They become addresses: a peer cannot have more tokens than a rank may have.
        const uint32_t bounded = min(data, block.shape.max_tokens);
        if (told == kRowsThatCome) {
            block.per_expert[source] = bounded;
            if (is_first && block.params.counter != nullptr) {
                block.params.counter[source] = bounded;
            }
        } else if (told == kTokens) {
            block.tokens_of[source] = bounded;
            atomicMax(&block.shared.most_tokens, bounded);
            if (is_first) {
                block.params.common.handle.tokens_of[source] = bounded;
            }
        } else if (data != (told == kFingerprint ? op.common.fingerprint : op.common.scales_word)) {
            report_difference(op, source, told == kFingerprint ? data : op.common.fingerprint);
        }
    }
    __syncthreads();
}

template <typename Op>
__device__ void hear_all(const Block<Op>& block, const LlBeside& beside) {
    __syncthreads();  // the histograms are done with
    hear_sources_by_rank(block);
    const uint32_t blocks = max(1u, min(block.receivers.blocks, arriving_units(block)));
    if (block.receivers.index() < blocks && block.params.out != nullptr) {
        clear_ids(block, beside, blocks);
    }
}

// The weights of a row: lanes have its token's entries.
template <typename Op>
struct ArrivingWeights {
    const Op& op;
    // This lane's packet; NULL for none.
    const uint64_t* at;
    uint64_t packet = op.packet(0);

    // One poll; returns whether all are there.
    __device__ __forceinline__ bool poll() {
        if (at != nullptr) {
            packet = ld_relaxed_sys(at);
        }
        return all_lanes(packet_epoch(packet) == op.epoch);
    }
};

// Stores the ids and weights of a row.
template <typename Op>
__device__ __forceinline__ void keep_beside(const Block<Op>& block, const LlBeside& beside,
                                            const ArrivingWeights<Op>& weights, EntryWord entry, int32_t row) {
    if (lane_idx() < block.shape.top_k) {
        const uint64_t at = uint64_t(row) * block.shape.top_k + lane_idx();
        store_id(beside, at, entry.is_here() ? static_cast<int32_t>(entry.expert()) : kNowhere);
        beside.out_weights[at] = __uint_as_float(packet_data(weights.packet));
    }
}

// One warp receives a chunk of a token by `receive`, and copies it to the token's output row here, if it has one. False
// if that is given up.
template <typename Op, typename Receive>
__device__ __forceinline__ bool receive_chunk(const Block<Op>& block, const LlBeside& beside, const UnitOfAll& unit,
                                              Late& late, Receive receive) {
    const Op& op = block.op;
    const uint32_t source = unit.rank;
    const BankRow<Own> from = op.here().row(block.bank_slots.of_token(source, unit.token));
    const auto chunk = block.rows.chunk(block.shape, unit.number);
    // They come with the first chunk.
    const bool has_beside = unit.number == 0 && lane_idx() < block.shape.top_k;
    ArrivingWeights<Op> weights = {
        op, has_beside ? op.here().weights(source, unit.token, op.ranks()) + lane_idx() : nullptr};
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
        let_go<typename Op::Rows::Data>(from, chunk);
        row = block.output.row(source, shuffle(entry.index(), here.first()));
    }
    const bool is_kept = row >= 0 && block.params.out != nullptr;
    if (unit.number == 0) {
        if (lane_idx() < block.shape.top_k) {
            op.rows_of(source, unit.token)[lane_idx()] = lane_idx() == 0 ? row : kNowhere;
        }
        if (is_kept) {
            keep_beside(block, beside, weights, entry, row);
        }
    }
    if (is_kept) {
        // The source takes the place of an expert.
        const auto to = block.rows.target(block.params, block.output, EntryWord::here(source, 0), row);
        block.rows.store(block.params, block.shape, to, chunk, received.row.data);
    }
    return true;
}

}  // namespace nccl_ep::ll_dispatch_impl
