// What a routing tells its caller, in numbers as wide as the caller wants.
//
// Grid: one block, behind the kernel that routes. A handle on which the ranks do not agree has no rows.

#include "../base/entry.cuh"
#include "../peer/wait.cuh"
#include "params/ht_kept.h"

namespace nccl_ep::ht_counters_impl {

__device__ void store(const HtNumbers& numbers, uint32_t i, uint32_t value) {
    if (numbers.is_wide != 0) {
        static_cast<int64_t*>(numbers.data)[i] = value;
    } else {
        static_cast<int32_t*>(numbers.data)[i] = static_cast<int32_t>(value);
    }
}

__device__ void tell_zones(const HtCountersParams& params, bool is_valid) {
    const HtZones& zones = params.zones;
    if (threadIdx.x == 0 && params.total.data != nullptr) {
        store(params.total, 0, is_valid ? zones.begins[zones.experts] : 0);
    }
    if (threadIdx.x == 0 && params.page != nullptr) {
        st_release_sys(reinterpret_cast<uint64_t*>(params.page),
                       make_packet(params.epoch, is_valid ? zones.begins[zones.experts] : 0));
    }
    for (uint32_t i = threadIdx.x; i < zones.experts; i += blockDim.x) {
        const uint32_t begin = is_valid ? min(zones.begins[i], zones.limit) : 0;
        const uint32_t end = is_valid ? min(zones.begins[i + 1], zones.limit) : 0;
        if (params.experts.data != nullptr) {
            store(params.experts, i, end - begin);
        }
        if (params.offsets.data != nullptr) {
            store(params.offsets, i, begin);
        }
    }
}

ENTRY(ht_counters) {
    const uint32_t rows = *params.rows;
    if (params.zones.begins != nullptr) {
        tell_zones(params, (rows & HT_DISAGREED) == 0);
        return;
    }
    if (threadIdx.x == 0 && params.total.data != nullptr) {
        store(params.total, 0, (rows & HT_DISAGREED) != 0 ? 0 : rows);
    }
    for (uint32_t i = threadIdx.x; params.experts.data != nullptr && i < params.local_experts; i += blockDim.x) {
        store(params.experts, i, params.counts[i]);
    }
}

}  // namespace nccl_ep::ht_counters_impl
