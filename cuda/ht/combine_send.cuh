// The sending half of a combine: a warp takes a row for any home whose ring has a free slot, and copies it there.
#pragma once

#include "combine_block.cuh"

namespace nccl_ep::ht_combine_impl {

// Row `index` of those that this rank returns to `home`.
struct Returning {
    uint32_t home;
    uint32_t index;

    template <typename Block>
    __device__ uint32_t sequence(const Block& block) const {
        return unit_of_row(WholeSlots{}, block.shared.pairs.sent[home], index);
    }
    // Its row in the input.
    template <typename Block>
    __device__ uint32_t row(const Block& block) const {
        return block.row_from(home, index);
    }
};

// Starts to load a chunk of a row. Not with zones, where the row is a sum that send_row computes.
template <typename Block>
__device__ __forceinline__ void load_chunk(const Block& block, const Returning& returning,
                                           uint32_t offset, Staging& staging) {
    if constexpr (Block::kZones) {
        return;
    }
    const RowFormat format = row_format(block.common);
    const uint8_t* row = block.params.rows + format.offset(returning.row(block));
    staging.wait_reusable();
    staging.load_to(staging.chunk(), row + offset, format.chunk_at(offset));
}

// Writes the row's gradients, which travel in its tail, to shared memory. Earlier stores must have read the tails.
template <typename Block>
__device__ void write_tail(const Block& block, const Returning& returning, Staging& staging) {
    const uint32_t columns = block.params.columns;
    float* tail = reinterpret_cast<float*>(staging.tails());
    if constexpr (Block::kZones) {
        staging.wait_reusable();
        const float gradient = block.input.gradient(block, returning.row(block), lane_idx());
        if (lane_idx() < columns) {
            tail[lane_idx()] = gradient;
        }
    } else if (lane_idx() < columns) {
        const uint64_t first = uint64_t{returning.row(block)} * columns;
        tail[lane_idx()] = block.params.gradients[first + lane_idx()];
    }
    staging.settle();
}

// Stores the row, whose first chunk is being loaded. With zones it is enqueued for notification here, otherwise by the
// caller once the next row is being loaded.
template <typename Block>
__device__ void store_row(const Block& block, const Returning& returning, typename Block::Buffers& staging,
                          NotifyQueue& queue) {
    const HtCommon& common = block.common;
    const RowFormat format = row_format(common);
    const Remote<uint8_t> slot =
        rings_at(common, returning.home).row(block.rank(), returning.sequence(block));
    if (common.shape.tail_bytes != 0) {
        write_tail(block, returning, staging);
    }
    if constexpr (Block::kZones) {
        block.input.send_row(block, returning.row(block), slot, staging,
                             [&] { queue.enqueue(lane_idx() == 0, returning.home, returning.sequence(block)); });
    }
    for (uint32_t offset = 0; !Block::kZones && offset < format.bytes; offset += format.chunk_bytes) {
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

template <typename Block>
__device__ void send_rows(const Block& block, typename Block::Buffers& staging, NotifyQueue& queue) {
    HtPairs& pairs = block.shared.pairs;
    const Sequences sequences = {block.shared.scheduler, pairs.to_send, block.senders, block.ranks()};
    const auto is_ready = [&](uint32_t home, uint32_t index, uint32_t) {
        const uint32_t sequence = unit_of_row(WholeSlots{}, pairs.sent[home], index);
        return block.senders_fill_rings() ? is_credited(block.common, home, sequence)
                                          : has_credit(pairs, home, sequence);
    };
    const auto wait_for_row = [&] {
        return next_row(block.common, {WAIT_CREDIT, kNoPeer, pairs.operation}, sequences, is_ready, [&] {
            if (!block.senders_fill_rings()) {
                poll_credits_at_pace<Staging>(block.common, pairs);
            }
            return false;
        });
    };
    TakenRow work = wait_for_row();
    if (work.peer != kNoPeer) {
        load_chunk(block, {work.peer, work.index}, 0, staging);
    }
    while (work.peer != kNoPeer) {
        const Returning returning = {work.peer, work.index};
        store_row(block, returning, staging, queue);
        // The next row is loaded while this one is in flight. But if no next row has a credit, this one must be
        // notified at once.
        work = try_next_row(sequences, is_ready);
        const bool is_loading = work.peer != kNoPeer;
        if (is_loading) {
            load_chunk(block, {work.peer, work.index}, 0, staging);
        }
        if (!Block::kZones) {
            queue.enqueue(lane_idx() == 0, returning.home, returning.sequence(block));
        }
        if (!is_loading && work.left != kNoPeer) {
            queue.flush();
            work = wait_for_row();
            if (work.peer != kNoPeer) {
                load_chunk(block, {work.peer, work.index}, 0, staging);
            }
        }
    }
    queue.flush();
    queue.close();
}

}  // namespace nccl_ep::ht_combine_impl
