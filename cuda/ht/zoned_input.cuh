// The rows of a combine that lie by expert in its input: what a rank returns for a token is the sum of its slots, by
// ascending expert in fp32, rounded. A slot that was dropped adds nothing.
#pragma once

#include "combine_block.cuh"
#include "sum.cuh"
#include "zones.cuh"

namespace nccl_ep::ht_combine_impl {

template <typename Type>
struct ZonedInput {
    static constexpr bool kZones = true;

    HtZones zones;

    __device__ uint32_t needed() const { return slots_needed(zones); }

    // Begins to fill the staging buffer with bytes from `offset` on of what this rank returns of `row`.
    template <typename Block>
    __device__ void load(const Block& block, uint32_t row, uint32_t offset, Staging& staging) const {
        const RowFormat format = row_format(block.common);
        const uint32_t bytes = format.chunk_at(offset);
        const Slots slots(*this, block, row);
        staging.wait_reusable();
        if (slots.kept.count() == 1) {
            staging.load_to(staging.chunk(), shuffle(slots.row, slots.kept.first()) + offset, bytes);
            return;
        }
        sum_to(staging.chunk(), slots, offset, bytes);
        settle_shared();
        staging.load_to(staging.chunk(), nullptr, 0);
    }

    // The gradient of weight `number` of the row.
    template <typename Block>
    __device__ float gradient(const Block& block, uint32_t row, uint32_t number) const {
        const uint32_t slot = number < zones.most_slots
                                  ? zones.slots[uint64_t{row} * zones.most_slots + number]
                                  : HT_NO_SLOT;
        return is_slot(slot, block.params.in_rows) ? block.params.gradients[slot] : 0.0f;
    }

    // Adds what all ranks return of a token, accesses from number `first` on. This rank's part is rounded to the
    // output row first, from which it is added at its place among the others: each lane reads what it has stored.
    template <typename Block, typename Part>
    __device__ __forceinline__ void add_parts(const Block& block, float (&sum)[kVecs][Type::kPerVec],
                                              LaneMask firsts, const Part& part, uint32_t first,
                                              Vec16* out) const {
        const uint32_t vecs = row_format(block.common).vecs();
        const LaneMask own = firsts & ~ballot(part.is_remote);
        const uint8_t* row = part.row;
        if (own.any()) {
            const Slots slots(*this, block, shuffle(part.sequence, own.first()));
            add_rows<Type>(sum, slots.kept, slots.row, first, vecs);
            store_sum<Type>(sum, first, vecs, out);
            clear_sum<Type>(sum);
            row = own.has_this() ? reinterpret_cast<const uint8_t*>(out) : row;
        }
        add_rows<Type>(sum, firsts, row, first, vecs);
    }

   private:
    // The slots of a row, one in each lane, and those that are there.
    struct Slots {
        const uint8_t* row;
        LaneMask kept;

        template <typename Block>
        __device__ Slots(const ZonedInput& input, const Block& block, uint32_t of_row) {
            const uint32_t slot = slot_of_lane(input.zones, of_row);
            kept = ballot(is_slot(slot, block.params.in_rows));
            row = block.params.rows + row_format(block.common).offset(kept.has_this() ? slot : 0);
        }
    };

    // The lanes sum a chunk of a row into shared memory.
    __device__ void sum_to(uint8_t* chunk, const Slots& slots, uint32_t offset, uint32_t bytes) const {
        const uint32_t vecs = bytes / sizeof(Vec16);
        for (uint32_t first = 0; first < vecs; first += kVecs * kWarpSize) {
            float sum[kVecs][Type::kPerVec] = {};
            add_rows<Type>(sum, slots.kept, slots.row + offset, first, vecs);
#pragma unroll
            for (uint32_t v = 0; v < kVecs; ++v) {
                const uint32_t at = first + v * kWarpSize + lane_idx();
                if (at < vecs) {
                    reinterpret_cast<Vec16*>(chunk)[at] = Type::pack(sum[v]);
                }
            }
        }
    }
};

}  // namespace nccl_ep::ht_combine_impl
