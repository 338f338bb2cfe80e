// The course of a combine through rings: what its blocks send, receive and sum.
#pragma once

#include "../layout/flat.cuh"
#include "credits.cuh"
#include "entries.cuh"
#include "notify.cuh"
#include "partials.cuh"
#include "scheduler.cuh"
#include "scope.cuh"
#include "sum.cuh"

namespace nccl_ep::ht_combine_impl {

// With fewer rows in all rings for each sending warp, warps poll for credits themselves.
constexpr uint32_t kRowsPerSender = 4;

struct SharedStorage {
    HtPairs pairs;
    Scheduler scheduler;
    NotifyState notify_state;
    uint32_t next_token;
    uint64_t barriers[HT_COMBINE_THREADS / kWarpSize];
};
static_assert(sizeof(SharedStorage) <= HT_STATIC_SHARED_BYTES, "launches leave no more room");

template <typename Scope, typename Partials, typename LayoutOfRows = Flat>
struct Block {
    using Layout = LayoutOfRows;
    const HtCombineParams& params;
    Scope scope;
    Partials partials;
    SharedStorage& shared;

    const HtCommon& common = params.common;
    Share senders = {0, common.shape.send_blocks};
    Share receivers = {senders.blocks, gridDim.x - senders.blocks};

    __device__ uint32_t rank() const { return common.peers.rank; }
    __device__ uint32_t ranks() const { return common.peers.ranks; }
    // The row of the input of row `index` from `home`.
    __device__ uint32_t row_from(uint32_t home, uint32_t index) const {
        return scope.template row<Layout>(shared.pairs, home, index);
    }
    // Whether there are so many senders that most wait for a slot anyway: then each polls for itself. The
    // threshold was measured.
    __device__ bool senders_fill_rings() const {
        const uint32_t rows = (ranks() - 1) * (common.layout.units / WholeSlots::of_row());
        return senders.blocks * common.shape.copy_warps > rows / kRowsPerSender;
    }
};

// ---- Sending -----------------------------------------------------------------------------------

// Row `index` of those that return to `home`.
struct Returning {
    uint32_t home;
    uint32_t index;

    template <typename Block>
    __device__ uint32_t sequence(const Block& block) const {
        return unit_of_row(WholeSlots{}, block.shared.pairs.sent[home], index);
    }
    // Its number among all rows that this rank received.
    template <typename Block>
    __device__ uint32_t row(const Block& block) const {
        return block.row_from(home, index);
    }
};

template <typename Block>
__device__ __forceinline__ void load_chunk(const Block& block, const Returning& returning,
                                           uint32_t offset, Staging& staging) {
    const RowFormat format = row_format(block.common);
    const uint8_t* row = block.params.rows + format.offset(returning.row(block));
    staging.wait_reusable();
    staging.load_to(staging.chunk(), row + offset, format.chunk_at(offset));
}

// The row's gradients go behind it. What was stored from the tails before must have been read.
template <typename Block>
__device__ void write_tail(const Block& block, const Returning& returning, Staging& staging) {
    const uint32_t columns = block.params.columns;
    float* tail = reinterpret_cast<float*>(staging.tails());
    if (lane_idx() < columns) {
        const uint64_t first = uint64_t{returning.row(block)} * columns;
        tail[lane_idx()] = block.params.gradients[first + lane_idx()];
    }
    staging.settle();
}

// Stores the row, whose first chunk was loaded.
template <typename Block>
__device__ void store_row(const Block& block, const Returning& returning, Staging& staging) {
    const HtCommon& common = block.common;
    const RowFormat format = row_format(common);
    const Remote<uint8_t> slot =
        rings_at(common, returning.home).row(block.rank(), returning.sequence(block));
    if (common.shape.tail_bytes != 0) {
        write_tail(block, returning, staging);
    }
    for (uint32_t offset = 0; offset < format.bytes; offset += format.chunk_bytes) {
        if (offset != 0) {
            staging.commit();
            load_chunk(block, returning, offset, staging);
        }
        staging.wait_loaded();
        staging.store(slot + offset, format.chunk_at(offset));
    }
    if (common.shape.tail_bytes != 0) {
        staging.store_shared(staging.tails(), slot + format.bytes, common.shape.tail_bytes);
    }
    staging.commit();
}

// One warp polls for the block's credits.
template <typename Block>
__device__ __forceinline__ void poll_credits(const Block& block) {
    if (!block.senders_fill_rings()) {
        poll_credits(block.common, block.shared.pairs);
    }
}

template <typename Block>
__device__ void send_rows(const Block& block, Staging& staging, NotifyQueue& queue) {
    HtPairs& pairs = block.shared.pairs;
    Scheduler& scheduler = block.shared.scheduler;
    const auto is_ready = [&](uint32_t home, uint32_t index, uint32_t) {
        const uint32_t sequence = unit_of_row(WholeSlots{}, pairs.sent[home], index);
        return block.senders_fill_rings() ? is_credited(block.common, home, sequence)
                                          : has_credit(pairs, home, sequence);
    };
    const auto wait_for_row = [&] {
        return next_row(block.common, {WAIT_CREDIT, kNoPeer, pairs.operation}, scheduler,
                        pairs.to_send, block.senders, block.ranks(), is_ready, [&] {
                            poll_credits(block);
                            return false;
                        });
    };
    Work work = wait_for_row();
    if (work.peer != kNoPeer) {
        load_chunk(block, {work.peer, work.index}, 0, staging);
    }
    while (work.peer != kNoPeer) {
        const Returning returning = {work.peer, work.index};
        store_row(block, returning, staging);
        // The next row is loaded while this one is under way; but if no next one has a credit, nobody must
        // wait for the notification of this one.
        work = try_next_row(scheduler, pairs.to_send, block.senders, block.ranks(), is_ready);
        const bool is_loading = work.peer != kNoPeer;
        if (is_loading) {
            load_chunk(block, {work.peer, work.index}, 0, staging);
        }
        queue.depart(lane_idx() == 0, returning.home, returning.sequence(block));
        if (!is_loading && work.left != kNoPeer) {
            queue.flush();
            work = wait_for_row();
            if (work.peer != kNoPeer) {
                load_chunk(block, {work.peer, work.index}, 0, staging);
            }
        }
    }
    queue.close();
}

// ---- Receiving ---------------------------------------------------------------------------------

// This lane's rank's row of a token: where it lies, NULL in lanes that are no rank's first.
struct Part {
    const uint8_t* row;
    uint32_t sequence;
    bool is_remote;
};

template <typename Block>
__device__ __forceinline__ Part part_of(const Block& block, const TokenEntries& entries) {
    if (!entries.is_first()) {
        return {nullptr, 0, false};
    }
    const HtPairs& pairs = block.shared.pairs;
    const uint32_t rank = entries.rank;
    if (rank == block.rank()) {
        const uint64_t row = block.row_from(rank, entries.entry.index);
        return {block.params.rows + row_format(block.common).offset(row), 0, false};
    }
    const uint32_t sequence = unit_of_row(WholeSlots{}, pairs.received[rank], entries.entry.index);
    return {own_rings(block.common).row(rank, sequence), sequence, true};
}

// Each lane waits for its part.
template <typename Block>
__device__ __forceinline__ bool wait_for_parts(const Block& block, const TokenEntries& entries,
                                               const Part& part) {
    bool ok = true;
    if (part.is_remote) {
        const uint32_t rank = entries.rank;
        const uint64_t* at = own_rings(block.common).arrival(rank, part.sequence);
        const Arrival arrival = wait_for_row(
            block.common, at, part.sequence,
            {WAIT_STREAMED_ROW, rank, block.shared.pairs.operation});
        ok = arrival.ok && arrival.data == block.common.shape.fingerprint;
        if (arrival.ok && !ok) {
            fail_for_scales(block.common, rank, arrival.data, {0, 0});
        }
    }
    // All lanes read what one has waited for.
    sync_warp();
    return ballot(ok).all();
}

// One warp sums kVecs accesses per lane, from number `first` on, of all parts of a token, then of the sums of
// other nodes; `partial` is that of this lane's node.
template <typename Type, typename Block>
__device__ __forceinline__ void sum_chunk(const Block& block, uint32_t token, LaneMask firsts,
                                          const Part& part, const uint8_t* partial, uint32_t first,
                                          Vec16* out) {
    const RowFormat format = row_format(block.common);
    const uint32_t vecs = format.vecs();
    float sum[kVecs][Type::kPerVec] = {};
    add_rows<Type>(sum, firsts, part.row, first, vecs);
    if (block.partials.rounds_own_node()) {
        // Each lane reads what it has stored.
        store_sum<Type>(sum, first, vecs, out);
        clear_sum<Type>(sum);
    }
    for (uint32_t base = 0; base < block.partials.nodes(); base += kWarpSize) {
        const uint8_t* row =
            base == 0 ? partial : block.partials.row(format, token, base + lane_idx());
        row = block.partials.is_own(base + lane_idx()) ? reinterpret_cast<const uint8_t*>(out) : row;
        add_rows<Type>(sum, ballot(row != nullptr), row, first, vecs);
    }
    store_sum<Type>(sum, first, vecs, out);
}

// One warp gathers the gradients of a token, one column per lane: those of its experts, ascending,
// then zeros.
template <typename Block>
__device__ void gather_gradients(const Block& block, uint32_t token, const TokenEntries& entries,
                                 const Part& part) {
    const uint32_t columns = block.params.columns;
    const uint8_t* gradients = nullptr;
    if (part.is_remote) {
        gradients = part.row + block.common.shape.row_bytes;
    } else if (entries.is_first()) {
        const uint64_t row = block.row_from(block.rank(), entries.entry.index);
        gradients = reinterpret_cast<const uint8_t*>(block.params.gradients + row * columns);
    }
    uint32_t word = 0;
    uint32_t begin = 0;
    for (LaneMask left = entries.firsts; left.any(); left.drop_first()) {
        const uint32_t lane = left.first();
        const uint32_t count = min(entries.experts_from(lane), columns);
        const uint32_t* from = reinterpret_cast<const uint32_t*>(shuffle(gradients, lane));
        if (lane_idx() >= begin && lane_idx() < begin + count) {
            word = ld_relaxed_sys(from + lane_idx() - begin);
        }
        begin += count;
    }
    word = block.partials.gradient(token, block.common.handle.top_k, word, columns);
    if (lane_idx() < columns) {
        // The place is found again: kept during the sum, it would cost registers.
        const auto place = block.scope.place(block.common, token);
        block.scope.gradients(block.params, place, token)[lane_idx()] = __uint_as_float(word);
    }
}

template <typename Type, typename Block>
__device__ void sum_tokens(const Block& block) {
    const HtCommon& common = block.common;
    const uint32_t vecs = row_format(common).vecs();
    for (;;) {
        const uint32_t token = block.receivers.next_unit(&block.shared.next_token);
        if (token >= common.handle.tokens) {
            break;
        }
        const TokenEntries entries(common, token);
        const Part part = part_of(block, entries);
        if (!wait_for_parts(block, entries, part)) {
            break;
        }
        Vec16* out = reinterpret_cast<Vec16*>(block.scope.row_of_token(
            block.params.out, row_format(common), block.scope.place(common, token), token));
        const uint8_t* partial = block.partials.row(row_format(common), token, lane_idx());
        for (uint32_t first = 0; first < vecs; first += kVecs * kWarpSize) {
            sum_chunk<Type>(block, token, entries.firsts, part, partial, first, out);
        }
        if (block.params.columns != 0) {
            gather_gradients(block, token, entries, part);
        }
        sync_warp();
        if (part.is_remote) {
            give_credit(common, WholeSlots{}, block.shared.pairs, entries.rank, part.sequence);
        }
    }
}

// ---- The kernel --------------------------------------------------------------------------------

template <typename Type, typename Scope, typename Partials>
__device__ void run(const HtCombineParams& params, const Scope& scope, const Partials& partials) {
    __shared__ SharedStorage shared;
    DYNAMIC_SHARED(uint8_t, buffers);
    const HtCommon& common = params.common;
    const Block<Scope, Partials> block = {params, scope, partials, shared};
    for (uint32_t peer = threadIdx.x; peer < MAX_PEERS; peer += blockDim.x) {
        shared.scheduler.next[peer] = 0;
    }
    if (threadIdx.x == 0) {
        shared.next_token = 0;
    }
    clear_queues(shared.notify_state);
    if (!begin_operation(common, scope, true, shared.pairs) ||
        !scope.messages_arrived(common, shared.pairs)) {
        return;
    }
    if (params.in_rows < shared.pairs.total) {
        // There is nothing to return, and the peers cannot be given anything else.
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            fail(common, FAULT_INPUT_ROWS, block.rank(), shared.pairs.total, params.in_rows);
        }
        return;
    }
    if (!block.senders.has_this_block()) {
        sum_tokens<Type>(block);
    } else if (warp_idx() < common.shape.copy_warps) {
        Staging staging(buffers + warp_idx() * common.shape.warp_bytes, common.shape.chunk_bytes,
                        &shared.barriers[warp_idx()]);
        NotifyQueue queue(shared.notify_state, queue_of_warp(common, buffers, warp_idx()), staging);
        send_rows(block, staging, queue);
    } else if (warp_idx() == common.shape.copy_warps) {
        notify_peers(common, WholeSlots{}, shared.pairs, shared.notify_state, buffers,
                     [&] { poll_credits(block); });
    }
}

}  // namespace nccl_ep::ht_combine_impl
