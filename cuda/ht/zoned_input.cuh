// The input of a combine that is ordered by expert: a rank returns, for a token, the sum of its slots, by ascending
// expert in fp32, rounded. A slot that was dropped adds nothing.
//
// A warp sums a row part by part. The parts of all its addends pass through a few stages of shared memory in turn, so
// the same number of parts is always in flight, however many addends a row has. Each lane loads what it adds itself, so
// stages need no barrier.
#pragma once

#include "combine_block.cuh"
#include "sum.cuh"
#include "zones.cuh"

namespace nccl_ep::ht_combine_impl {

static_assert(HT_ZONE_PART_BYTES == kVecs * kWarpSize * sizeof(Vec16), "a sum in registers");

// The shared memory of a warp: a sum on its way to a peer, and stages, each with a part that is being loaded or has
// arrived.
class ZonedBuffers : public Staging {
   public:
    using Staging::Staging;

    // Waits for the next part; returns this lane's first access of it.
    __device__ __forceinline__ const Vec16* wait_part() {
        async_load_wait<HT_ZONE_STAGES - 1>();
        return stage(added_);
    }
    __device__ __forceinline__ void end_part() { added_ = next(added_); }
    // Starts loading a part of `vecs` accesses, or none, to the next stage, whose old part has been added.
    __device__ __forceinline__ void load_part(const uint8_t* from, uint32_t vecs) {
#pragma unroll
        for (uint32_t v = 0; v < kVecs; ++v) {
            const uint32_t at = v * kWarpSize + lane_idx();
            if (at < vecs) {
                async_load(stage(loaded_) + v * kWarpSize, reinterpret_cast<const Vec16*>(from) + at);
            }
        }
        async_load_commit();
        loaded_ = next(loaded_);
    }

   private:
    __device__ static uint32_t next(uint32_t number) { return number + 1 == HT_ZONE_STAGES ? 0 : number + 1; }
    __device__ Vec16* stage(uint32_t number) const {
        return reinterpret_cast<Vec16*>(chunk() + (1 + number) * HT_ZONE_PART_BYTES) + lane_idx();
    }

    uint32_t added_ = 0;
    uint32_t loaded_ = 0;
};

// The rows that a warp adds; lanes have their addresses. First come the slots of this rank's row. At home their sum is
// rounded, and added after the rows of lower ranks and before those of higher ones. Over several nodes the sums of the
// others follow; where sums go by ascending node, this node's is rounded and takes its place among them.
template <bool kNodes>
struct Addends {
    static constexpr uint32_t kPhases = kNodes ? 5 : 3;

    const uint8_t* slot = nullptr;
    LaneMask slots = {};
    const uint8_t* part = nullptr;
    LaneMask before = {};
    LaneMask behind = {};
    const uint8_t* node = nullptr;
    LaneMask nodes_before = {};
    LaneMask nodes_behind = {};
    bool rounds_own_node = false;

    __device__ LaneMask of_phase(uint32_t phase) const {
        if (kNodes && phase > 2) {
            return phase == 3 ? nodes_before : nodes_behind;
        }
        return phase == 0 ? slots : phase == 1 ? before : behind;
    }
    // What has the rows of a phase.
    __device__ const uint8_t* row(uint32_t phase) const {
        return phase == 0 ? slot : kNodes && phase > 2 ? node : part;
    }
    // Whether the sum after a phase is rounded, and added again after the next one.
    __device__ bool rounds(uint32_t phase) const {
        return phase == 0 || (kNodes && phase == 2 && rounds_own_node);
    }
    __device__ bool any() const {
        const bool has_nodes = kNodes && (nodes_before.any() || nodes_behind.any());
        return slots.any() || before.any() || behind.any() || has_nodes;
    }
};

// Loads the parts of addends ahead, in the order in which they are added.
template <bool kNodes>
class AddendsAhead {
   public:
    __device__ AddendsAhead(const Addends<kNodes>& from, uint32_t row_bytes)
        : from_(from), left_(from.slots), row_bytes_(row_bytes) {}

    __device__ __forceinline__ void load(ZonedBuffers& buffers) {
#pragma unroll 1
        while (!left_.any() && offset_ < row_bytes_) {
            const bool is_last = phase_ + 1 == Addends<kNodes>::kPhases;
            phase_ = is_last ? 0 : phase_ + 1;
            offset_ += is_last ? HT_ZONE_PART_BYTES : 0;
            left_ = from_.of_phase(phase_);
        }
        const uint32_t bytes = offset_ < row_bytes_ ? min(row_bytes_ - offset_, HT_ZONE_PART_BYTES) : 0;
        const uint8_t* row = shuffle(from_.row(phase_), left_.any() ? left_.first() : 0);
        buffers.load_part(row + offset_, bytes / sizeof(Vec16));
        left_.drop_first();
    }

   private:
    const Addends<kNodes> from_;
    LaneMask left_;
    uint32_t phase_ = 0;
    uint32_t row_bytes_;
    uint32_t offset_ = 0;
};

// The sum of a part of a row.
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
    // Adds this lane's accesses; what it adds past the end of a shorter part is not used.
    __device__ __forceinline__ void add(const Vec16* part) {
#pragma unroll
        for (uint32_t v = 0; v < kVecs; ++v) {
            add(v, ld_shared(part + v * kWarpSize));
        }
    }
    // Moves the sum to `row`, rounded.
    __device__ __forceinline__ void round(Vec16 (&row)[kVecs]) {
#pragma unroll
        for (uint32_t v = 0; v < kVecs; ++v) {
            row[v] = Type::pack(sum[v]);
        }
        clear_sum<Type>(sum);
    }
};

// Calls `store(offset, bytes, sum)` for all parts of a row.
template <typename Type, bool kIsHome, bool kNodes, typename Store>
__device__ __forceinline__ void sum_row(const Addends<kNodes>& addends, uint32_t row_bytes, ZonedBuffers& buffers,
                                        Store store) {
    AddendsAhead<kNodes> ahead(addends, addends.any() ? row_bytes : 0);
#pragma unroll 1
    for (uint32_t i = 0; i < HT_ZONE_STAGES; ++i) {
        ahead.load(buffers);
    }
#pragma unroll 1
    for (uint32_t offset = 0; offset < row_bytes; offset += HT_ZONE_PART_BYTES) {
        PartSum<Type> part;
        clear_sum<Type>(part.sum);
        Vec16 own[kVecs];
#pragma unroll 1
        for (uint32_t phase = 0; phase < (kIsHome ? addends.kPhases : 1); ++phase) {
#pragma unroll 1
            for (LaneMask left = addends.of_phase(phase); left.any(); left.drop_first()) {
                part.add(buffers.wait_part());
                buffers.end_part();
                ahead.load(buffers);
            }
            if (kIsHome && addends.rounds(phase)) {
                part.round(own);
            }
            if (kIsHome && phase > 0 && addends.rounds(phase - 1)) {
#pragma unroll
                for (uint32_t v = 0; v < kVecs; ++v) {
                    part.add(v, own[v]);
                }
            }
        }
        store(offset, min(row_bytes - offset, HT_ZONE_PART_BYTES), part.sum);
    }
}

template <typename Type>
struct ZonedInput {
    static constexpr bool kZones = true;
    using Buffers = ZonedBuffers;

    HtZones zones;

    __device__ uint32_t needed() const { return slots_needed(zones); }

    // Sums a row and stores it to the slot `to` of its home. `depart` is called once its first part, and nothing more,
    // has been committed after the rows before.
    template <typename Block, typename Depart>
    __device__ __forceinline__ void send_row(const Block& block, uint32_t row, Remote<uint8_t> to,
                                             ZonedBuffers& buffers, Depart depart) const {
        const auto store = [&](uint32_t offset, uint32_t bytes, const float (&sum)[kVecs][Type::kPerVec]) {
            uint8_t* out = buffers.chunk();
            buffers.wait_reusable();
#pragma unroll
            for (uint32_t v = 0; v < kVecs; ++v) {
                reinterpret_cast<Vec16*>(out)[v * kWarpSize + lane_idx()] = Type::pack(sum[v]);
            }
            buffers.settle();
            buffers.store(to + offset, bytes);
            buffers.commit();
            if (offset == 0) {
                depart();
            }
        };
        sum_row<Type, false>(slots_of(block, row), block.common.shape.row_bytes, buffers, store);
    }

    // The gradient of weight `number` of the row.
    template <typename Block>
    __device__ float gradient(const Block& block, uint32_t row, uint32_t number) const {
        const uint32_t slot = number < zones.most_slots
                                  ? zones.slots[uint64_t{row} * zones.most_slots + number]
                                  : HT_NO_SLOT;
        return is_slot(slot, block.params.in_rows) ? block.params.gradients[slot] : 0.0f;
    }

    // What is added for a token, whose ranks' first lanes are `firsts`; `part` is that of each lane.
    template <typename Block, typename Part>
    __device__ __forceinline__ Addends<Block::kNodes> addends_of(const Block& block, uint32_t token, LaneMask firsts,
                                                                 const Part& part) const {
        const LaneMask parts = ballot(part.is_remote);
        const LaneMask own = firsts & ~parts;
        Addends<Block::kNodes> all;
        if (own.any()) {
            all = slots_of(block, shuffle(part.sequence, own.first()));
            all.behind = parts.behind(own.first());
        }
        all.before = parts & ~all.behind;
        all.part = part.row;
        if constexpr (Block::kNodes) {
            add_nodes(block, token, all);
        }
        return all;
    }

    // Sums a token's addends, which have all arrived, to the row `out`.
    template <bool kNodes>
    __device__ __forceinline__ static void sum_to(Vec16* out, const Addends<kNodes>& addends, uint32_t row_bytes,
                                                  ZonedBuffers& buffers) {
        const auto store = [&](uint32_t offset, uint32_t bytes, const float (&sum)[kVecs][Type::kPerVec]) {
            store_sum<Type>(sum, 0, bytes / sizeof(Vec16), out + offset / sizeof(Vec16));
        };
        sum_row<Type, true>(addends, row_bytes, buffers, store);
    }

   private:
    template <typename Block>
    __device__ __forceinline__ Addends<Block::kNodes> slots_of(const Block& block, uint32_t row) const {
        const uint32_t slot = slot_of_lane(zones, row);
        const LaneMask kept = ballot(is_slot(slot, block.params.in_rows));
        return {block.params.rows + row_format(block.common).offset(kept.has_this() ? slot : 0), kept};
    }

    // Adds the sums of the other nodes, which move to the first lanes: a token has no more than lanes.
    template <typename Block>
    __device__ __forceinline__ static void add_nodes(const Block& block, uint32_t token, Addends<true>& all) {
        const auto& partials = block.partials;
        uint32_t before = 0;
        uint32_t count = 0;
#pragma unroll 1
        for (uint32_t base = 0; base < partials.nodes(); base += kWarpSize) {
            const uint32_t place = base + lane_idx();
            const uint8_t* row = partials.row(row_format(block.common), token, place);
            before += ballot(row != nullptr && partials.is_before_own(place)).count();
#pragma unroll 1
            for (LaneMask left = ballot(row != nullptr); left.any(); left.drop_first(), ++count) {
                const uint8_t* next = shuffle(row, left.first());
                all.node = lane_idx() == count ? next : all.node;
            }
        }
        const LaneMask nodes = ballot(all.node != nullptr);
        all.nodes_before = nodes & ballot(lane_idx() < before);
        all.nodes_behind = nodes & ~all.nodes_before;
        all.rounds_own_node = partials.rounds_own_node();
    }
};

}  // namespace nccl_ep::ht_combine_impl
