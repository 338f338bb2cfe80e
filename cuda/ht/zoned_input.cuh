// The rows of a combine that lie by expert in its input: what a rank returns for a token is the sum of its slots, by
// ascending expert in fp32, rounded. A slot that was dropped adds nothing.
//
// A warp sums a row part by part. The parts of all rows that it adds come through a few stages of shared memory, one
// behind the other, so the same number of them is under way all the time, however many rows a sum has.
#pragma once

#include "combine_block.cuh"
#include "pipeline.cuh"
#include "sum.cuh"
#include "zones.cuh"

namespace nccl_ep::ht_combine_impl {

static_assert(HT_ZONE_PART_BYTES == kVecs * kWarpSize * sizeof(Vec16), "a sum in registers");

// The shared memory of a warp: two sums on their way to a peer, and stages of what is summed.
class ZonedBuffers : public Staging {
   public:
    __device__ ZonedBuffers(uint8_t* memory, uint32_t bytes, uint64_t* barrier)
        : Staging(memory, bytes, barrier),
          stages(memory + 2 * HT_ZONE_PART_BYTES, HT_ZONE_PART_BYTES, HT_ZONE_STAGES,
                 reinterpret_cast<uint64_t*>(memory + (2 + HT_ZONE_STAGES) * HT_ZONE_PART_BYTES)) {}

    // Where the next sum goes; what went out from there before has been read.
    __device__ __forceinline__ uint8_t* next_out() {
        is_second_ = !is_second_;
        return chunk() + (is_second_ ? HT_ZONE_PART_BYTES : 0);
    }

    Pipeline stages;

   private:
    bool is_second_ = false;
};

// What a warp adds, rows in lanes: the slots of this rank's row; at home behind them the rows of other ranks.
struct Addends {
    const uint8_t* slot;
    LaneMask slots;
    const uint8_t* part = nullptr;
    LaneMask parts = {};
    // How many of those come before this rank's sum.
    uint32_t before = 0;
};

// Loads the parts of addends, in the order in which they are added.
class AddendsAhead {
   public:
    __device__ AddendsAhead(const Addends& from, uint32_t row_bytes)
        : from_(from), slots_(from.slots), parts_(from.parts), row_bytes_(row_bytes) {}

    __device__ __forceinline__ void load(Pipeline& stages) {
        if (offset_ >= row_bytes_) {
            return;
        }
        const bool is_slot = slots_.any();
        const uint32_t lane = is_slot ? slots_.first() : parts_.first();
        const uint8_t* row = shuffle(is_slot ? from_.slot : from_.part, lane);
        if (is_slot) {
            slots_.drop_first();
        } else {
            parts_.drop_first();
        }
        const uint32_t bytes = min(row_bytes_ - offset_, HT_ZONE_PART_BYTES);
        uint8_t* to = stages.begin_filling(bytes);
        stages.fill(to, Remote<uint8_t>(const_cast<uint8_t*>(row) + offset_), bytes);
        stages.end_filling();
        if (!slots_.any() && !parts_.any()) {
            slots_ = from_.slots;
            parts_ = from_.parts;
            offset_ += HT_ZONE_PART_BYTES;
        }
    }

   private:
    // The lanes' addresses are registers: what is chosen by a condition is a value, never an object.
    const Addends from_;
    LaneMask slots_;
    LaneMask parts_;
    uint32_t row_bytes_;
    uint32_t offset_ = 0;
};

// A part of a row that is summed.
template <typename Type>
struct PartSum {
    float sum[kVecs][Type::kPerVec];

    __device__ __forceinline__ void add(uint32_t v, const Vec16& data) {
        float addend[Type::kPerVec];
        Type::unpack(data, addend);
#pragma unroll
        for (uint32_t j = 0; j < Type::kPerVec; ++j) {
            sum[v][j] += addend[j];
        }
    }
    // Its accesses are the lanes', as far as the part has them.
    __device__ __forceinline__ void add(const uint8_t* part, uint32_t bytes) {
#pragma unroll
        for (uint32_t v = 0; v < kVecs; ++v) {
            const uint32_t at = v * kWarpSize + lane_idx();
            if (at < bytes / sizeof(Vec16)) {
                add(v, reinterpret_cast<const Vec16*>(part)[at]);
            }
        }
    }
    // Rounds it, and adds it again to nothing or to what comes before.
    __device__ __forceinline__ void round(Vec16 (&row)[kVecs]) {
#pragma unroll
        for (uint32_t v = 0; v < kVecs; ++v) {
            row[v] = Type::pack(sum[v]);
        }
        clear_sum<Type>(sum);
    }
};

// Calls `store(offset, bytes, sum)` for all parts of a row. Where rows of other ranks are added, this rank's sum is
// rounded, and added at its place among them.
template <typename Type, bool kIsHome, typename Store>
__device__ __forceinline__ void sum_row(const Addends& addends, uint32_t row_bytes, Pipeline& stages, Store store) {
    const uint32_t slots = addends.slots.count();
    const uint32_t count = slots + addends.parts.count();
    AddendsAhead ahead(addends, count != 0 ? row_bytes : 0);
#pragma unroll 1
    for (uint32_t i = 0; i < HT_ZONE_STAGES; ++i) {
        ahead.load(stages);
    }
#pragma unroll 1
    for (uint32_t offset = 0; offset < row_bytes; offset += HT_ZONE_PART_BYTES) {
        const uint32_t bytes = min(row_bytes - offset, HT_ZONE_PART_BYTES);
        PartSum<Type> part;
        clear_sum<Type>(part.sum);
        Vec16 own[kVecs];
#pragma unroll 1
        for (uint32_t added = 1; added <= count; ++added) {
            part.add(stages.wait_full(), bytes);
            stages.settle();
            stages.end_using();
            ahead.load(stages);
            if (kIsHome && added == slots) {
                part.round(own);
            }
            if (kIsHome && slots != 0 && added == slots + addends.before) {
#pragma unroll
                for (uint32_t v = 0; v < kVecs; ++v) {
                    part.add(v, own[v]);
                }
            }
        }
        store(offset, bytes, part.sum);
    }
}

template <typename Type>
struct ZonedInput {
    static constexpr bool kZones = true;
    using Buffers = ZonedBuffers;

    HtZones zones;

    __device__ uint32_t needed() const { return slots_needed(zones); }

    // Sums a row and stores it to the slot `to` of its home. `depart` is called when nothing but its first part has been
    // committed behind the rows before.
    template <typename Block, typename Depart>
    __device__ __forceinline__ void send_row(const Block& block, uint32_t row, Remote<uint8_t> to,
                                             ZonedBuffers& buffers, Depart depart) const {
        Pipeline& stages = buffers.stages;
        const auto store = [&](uint32_t offset, uint32_t bytes, const float (&sum)[kVecs][Type::kPerVec]) {
            uint8_t* out = buffers.next_out();
#pragma unroll
            for (uint32_t v = 0; v < kVecs; ++v) {
                reinterpret_cast<Vec16*>(out)[v * kWarpSize + lane_idx()] = Type::pack(sum[v]);
            }
            stages.settle();
            stages.store(out, to + offset, bytes);
            stages.commit_and_wait_read_but_last();
            if (offset == 0) {
                depart();
            }
        };
        sum_row<Type, false>(slots_of(block, row), block.common.shape.row_bytes, stages, store);
    }

    // The gradient of weight `number` of the row.
    template <typename Block>
    __device__ float gradient(const Block& block, uint32_t row, uint32_t number) const {
        const uint32_t slot = number < zones.most_slots
                                  ? zones.slots[uint64_t{row} * zones.most_slots + number]
                                  : HT_NO_SLOT;
        return is_slot(slot, block.params.in_rows) ? block.params.gradients[slot] : 0.0f;
    }

    // What is added for a token, one of whose ranks are in the lanes `firsts`; `part` is that of each.
    template <typename Block, typename Part>
    __device__ __forceinline__ Addends addends_of(const Block& block, LaneMask firsts, const Part& part) const {
        const LaneMask parts = ballot(part.is_remote);
        const LaneMask own = firsts & ~parts;
        Addends all = {nullptr, {}};
        if (own.any()) {
            all = slots_of(block, shuffle(part.sequence, own.first()));
            all.before = parts.count() - parts.behind(own.first()).count();
        }
        all.part = part.row;
        all.parts = parts;
        return all;
    }

    // Sums a token's, which are all there, to the row `out`.
    __device__ __forceinline__ static void sum_to(Vec16* out, const Addends& addends, uint32_t row_bytes,
                                                  ZonedBuffers& buffers) {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            // What the lanes have acquired comes before the engine's reads.
            fence_global_before_bulk();
        }
#endif
        const auto store = [&](uint32_t offset, uint32_t bytes, const float (&sum)[kVecs][Type::kPerVec]) {
            store_sum<Type>(sum, 0, bytes / sizeof(Vec16), out + offset / sizeof(Vec16));
        };
        sum_row<Type, true>(addends, row_bytes, buffers.stages, store);
    }

   private:
    template <typename Block>
    __device__ __forceinline__ Addends slots_of(const Block& block, uint32_t row) const {
        const uint32_t slot = slot_of_lane(zones, row);
        const LaneMask kept = ballot(is_slot(slot, block.params.in_rows));
        return {block.params.rows + row_format(block.common).offset(kept.has_this() ? slot : 0), kept};
    }
};

}  // namespace nccl_ep::ht_combine_impl
