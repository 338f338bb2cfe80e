// Rows that lie by expert, over several nodes: operations move them like other rows, in the library's memory. These
// kernels copy them from there to their slots after a dispatch, and the sums of their slots to there before a combine.
//
// Grid: a warp for each row at a time, then for each zone. After a failure nothing is written.

#include "../base/entry.cuh"
#include "../base/numeric.cuh"
#include "../base/scales.cuh"
#include "../peer/fault.cuh"
#include "zones.cuh"

namespace nccl_ep::ht_zones_apart_impl {

// Whether the group has failed before. All threads of a block come to the same conclusion.
__device__ bool has_failed_before(const WaitParams& wait) { return __syncthreads_or(known_failure(wait) != 0) != 0; }

// Whether `rows` slots are enough; otherwise the group has failed.
template <typename Params>
__device__ bool has_room(const Params& params, uint32_t rows, uint32_t fault) {
    const uint32_t needed = slots_needed(params.zones);
    if (rows < needed && blockIdx.x == 0 && threadIdx.x == 0) {
        report_failure(params.wait, fault, {WAIT_STREAMED_ROW, params.peers.rank, 0}, {needed}, {rows});
        broadcast_failure(params.peers, params.wait);
    }
    return rows >= needed;
}

// Calls `use(slot)` for each slot of a row that a tensor of `rows` has; all lanes do.
template <typename Use>
__device__ __forceinline__ void each_slot(uint32_t slot_of_lane, uint32_t rows, Use use) {
    for (LaneMask left = ballot(is_slot(slot_of_lane, rows)); left.any(); left.drop_first()) {
        use(shuffle(slot_of_lane, left.first()));
    }
}

// One warp stores `part(i)` to the i-th 16 bytes of a slot.
template <typename Part>
__device__ __forceinline__ void fill_slot(const HtSpreadParams& params, uint32_t slot, Part part) {
    Vec16* to = reinterpret_cast<Vec16*>(params.out + uint64_t{slot} * params.row_bytes);
    for (uint32_t i = lane_idx(); params.out != nullptr && i < params.row_bytes / sizeof(Vec16); i += kWarpSize) {
        st_row(to + i, part(i));
    }
}

// The same for the scales of a slot: `part(first)` goes to the 16 bytes from byte `first` on.
template <typename Part>
__device__ __forceinline__ void fill_scales(const HtSpreadParams& params, uint32_t slot, Part part) {
    const ScaledRows& rows = params.scales;
    uint8_t* to = scales_of_row(rows, rows.out, 0, slot);
#pragma unroll 1
    for (uint32_t first = lane_idx() * sizeof(Vec16); first < rows.scale_bytes; first += kWarpSize * sizeof(Vec16)) {
        ScalePart{rows, rows.out, to, first}.store(part(first));
    }
}

// One warp copies a row and its scales to its slots.
__device__ void spread_row(const HtSpreadParams& params, uint32_t row, uint32_t slot_of_lane) {
    const Vec16* from = reinterpret_cast<const Vec16*>(params.rows + uint64_t{row} * params.row_bytes);
    each_slot(slot_of_lane, params.out_rows, [&](uint32_t slot) {
        fill_slot(params, slot, [&](uint32_t i) { return ld_const(from + i); });
    });
    const ScaledRows& rows = params.scales;
    uint8_t* scales = scales_of_row(rows, rows.from, 0, row);
    each_slot(slot_of_lane, params.scale_rows, [&](uint32_t slot) {
        fill_scales(params, slot, [&](uint32_t first) { return ScalePart{rows, rows.from, scales, first}.load(); });
    });
}

__device__ void clear_pads(const HtSpreadParams& params, uint32_t expert) {
    const HtZones& zones = params.zones;
    const uint32_t first = zones.begins[expert] + static_cast<uint32_t>(params.counts[expert]);
    for (uint32_t slot = first; slot < zones.begins[expert + 1]; ++slot) {
        const auto zeros = [](uint32_t) { return Vec16{{0, 0, 0, 0}}; };
        if (is_slot(slot, params.out_rows)) {
            fill_slot(params, slot, zeros);
        }
        if (is_slot(slot, params.scale_rows)) {
            fill_scales(params, slot, zeros);
        }
        if (lane_idx() == 0 && params.out_weights != nullptr && is_slot(slot, params.weight_rows)) {
            params.out_weights[slot] = 0.0f;
        }
    }
}

ENTRY(ht_spread) {
    const HtZones& zones = params.zones;
    if (has_failed_before(params.wait) || !has_room(params, params.out_rows, FAULT_TOKEN_ROWS) ||
        !has_room(params, params.scale_rows, FAULT_SCALE_ROWS) ||
        !has_room(params, params.weight_rows, FAULT_WEIGHT_ROWS)) {
        return;
    }
    const uint32_t warps = gridDim.x * num_warps();
    const uint32_t warp = blockIdx.x * num_warps() + warp_idx();
    for (uint32_t row = warp; row < params.received; row += warps) {
        const uint32_t slot = slot_of_lane(zones, row);
        spread_row(params, row, slot);
        if (params.out_weights != nullptr && is_slot(slot, params.weight_rows)) {
            params.out_weights[slot] = params.weights[uint64_t{row} * params.top_k + lane_idx()];
        }
    }
    for (uint32_t expert = warp; expert < zones.experts; expert += warps) {
        clear_pads(params, expert);
    }
    // Weights behind all zones.
    const uint64_t threads = uint64_t{gridDim.x} * blockDim.x;
    uint64_t slot = uint64_t{zones.begins[zones.experts]} + blockIdx.x * blockDim.x + threadIdx.x;
    for (; params.out_weights != nullptr && slot < params.weight_rows; slot += threads) {
        params.out_weights[slot] = 0.0f;
    }
}

// One warp sums the slots of a row, by ascending expert in fp32, and rounds the sum.
template <typename Type>
__device__ void gather_row(const HtGatherParams& params, uint32_t row, uint32_t slot_of_lane) {
    Vec16* to = reinterpret_cast<Vec16*>(params.out + uint64_t{row} * params.row_bytes);
    const uint32_t vecs = params.row_bytes / sizeof(Vec16);
    for (uint32_t first = 0; first < vecs; first += kWarpSize) {
        const uint32_t at = first + lane_idx();
        float sum[Type::kPerVec] = {};
        each_slot(slot_of_lane, params.in_rows, [&](uint32_t slot) {
            const uint8_t* from = params.rows + uint64_t{slot} * params.row_bytes;
            float addend[Type::kPerVec] = {};
            if (at < vecs) {
                Type::unpack(ld_const(reinterpret_cast<const Vec16*>(from) + at), addend);
            }
            for (uint32_t i = 0; i < Type::kPerVec; ++i) {
                sum[i] += addend[i];
            }
        });
        if (at < vecs) {
            st_row(to + at, Type::pack(sum));
        }
    }
}

template <typename Type>
__device__ void gather(const HtGatherParams& params) {
    if (has_failed_before(params.wait) || !has_room(params, params.in_rows, FAULT_INPUT_ROWS)) {
        return;
    }
    const uint32_t warps = gridDim.x * num_warps();
    for (uint32_t row = blockIdx.x * num_warps() + warp_idx(); row < params.received; row += warps) {
        const uint32_t slot = slot_of_lane(params.zones, row);
        gather_row<Type>(params, row, slot);
        if (lane_idx() < params.columns) {
            const bool is_there = is_slot(slot, params.in_rows);
            params.out_gradients[uint64_t{row} * params.columns + lane_idx()] =
                is_there ? params.gradients[slot] : 0.0f;
        }
    }
}

ENTRY_BY_TYPE(ht_gather, gather<T>(params))

}  // namespace nccl_ep::ht_zones_apart_impl
