// Stores the counts that the caller of a dispatch, or of a routing over several nodes, wants. If the ranks do not agree
// on the handle, all counts are 0.
//
// Grid: one block, behind the kernel that routes.

#include "../base/entry.cuh"
#include "zones.cuh"

namespace nccl_ep::ht_counters_impl {

ENTRY(ht_counters) {
    const HtZones& zones = params.zones;
    const bool has_zones = zones.begins != nullptr;
    const bool is_valid = (*params.rows & HT_DISAGREED) == 0;
    if (threadIdx.x == 0) {
        report_slots(params.report, !is_valid ? 0 : has_zones ? zones.begins[zones.experts] : *params.rows);
    }
    for (uint32_t i = threadIdx.x; i < params.local_experts; i += blockDim.x) {
        if (has_zones) {
            report_zone(params.report, zones, i, is_valid ? zones.begins[i] : 0, is_valid ? zones.begins[i + 1] : 0);
        } else {
            report_number(params.report.experts, i, is_valid ? params.counts[i] : 0);
        }
    }
}

}  // namespace nccl_ep::ht_counters_impl
