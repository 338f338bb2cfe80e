// Rows of a dispatch whose output is ordered by expert: a row is stored to each of its slots. They travel like other
// rows, as `Base` says.
#pragma once

#include "dispatch_block.cuh"
#include "zones.cuh"

namespace nccl_ep::ht_dispatch_impl {

// How many zeros a warp writes at a time: padding slots of a zone, or weights behind all zones.
constexpr uint32_t kPadsAtOnce = 8;
constexpr uint32_t kWeightsAtOnce = 4096;

template <typename Base>
struct ZonedRows : Base {
    static constexpr bool kZones = true;

    HtZones zones;

    __device__ ZonedRows(const Base& base, const HtZones& of_handle) : Base(base), zones(of_handle) {}

    // Stores `bytes` of the image from `offset` on to the slots of `row`; the caller commits.
    template <typename Block>
    __device__ __forceinline__ void deliver(const Block& block, uint32_t row, uint32_t offset, uint32_t bytes,
                                            const uint8_t* chunk, Staging& staging) const {
        const uint32_t slot = slot_of_lane(zones, row);
        const uint32_t rows = min(block.params.out_rows, this->scale_rows());
        for (LaneMask left = ballot(is_slot(slot, rows)); left.any(); left.drop_first()) {
            Base::deliver(block, shuffle(slot, left.first()), offset, bytes, chunk, staging);
        }
    }
    // Stores the weight of this lane's slot, which is that of the lane's expert.
    template <typename Block>
    __device__ __forceinline__ void write_weight(const Block& block, uint32_t row, float weight) const {
        const uint32_t slot = slot_of_lane(zones, row);
        if (block.params.out_weights != nullptr && is_slot(slot, block.params.routing_rows)) {
            block.params.out_weights[slot] = weight;
        }
    }
    __device__ uint32_t needed() const { return slots_needed(zones); }

    // One warp writes zeros to unit `number` of what no row fills; false past the last one.
    template <typename Block>
    __device__ bool fill(const Block& block, uint64_t number, Staging& staging) const {
        const uint32_t parts = (zones.alignment + kPadsAtOnce - 2) / kPadsAtOnce;
        const uint64_t pads = uint64_t{zones.experts} * parts;
        if (number < pads) {
            fill_pads(block, static_cast<uint32_t>(number / parts), static_cast<uint32_t>(number % parts), staging);
            return true;
        }
        if (block.params.out_weights == nullptr) {
            return false;
        }
        const uint64_t first = zones.begins[zones.experts] + (number - pads) * kWeightsAtOnce;
        const uint64_t end = block.params.routing_rows;
        for (uint64_t i = first + lane_idx(); i < min(first + kWeightsAtOnce, end); i += kWarpSize) {
            block.params.out_weights[i] = 0.0f;
        }
        return first < end;
    }

   private:
    // Part `part` of the slots of a zone that no row has.
    template <typename Block>
    __device__ void fill_pads(const Block& block, uint32_t expert, uint32_t part, Staging& staging) const {
        const HtDispatchParams& params = block.params;
        const uint32_t count = block.common.handle.counts[expert];
        const uint32_t first = zones.begins[expert] + count + part * kPadsAtOnce;
        const uint32_t end = min(first + kPadsAtOnce, zones.begins[expert + 1]);
        const uint32_t row_bytes = this->payload_bytes(block.common);
        for (uint32_t slot = first; slot < end && is_slot(slot, params.out_rows); ++slot) {
            for (uint32_t offset = 0; block.wants_rows && offset < row_bytes; offset += HT_ZERO_BYTES) {
                staging.store_shared(block.zeros, block.out_row(slot) + offset, min(row_bytes - offset, HT_ZERO_BYTES));
            }
            if (lane_idx() == 0 && params.out_weights != nullptr && is_slot(slot, params.routing_rows)) {
                params.out_weights[slot] = 0.0f;
            }
            this->clear_scales(slot);
        }
        staging.commit();
    }
};

}  // namespace nccl_ep::ht_dispatch_impl
