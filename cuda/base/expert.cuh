// Expert ids, as callers give them.
#pragma once

#include "primitive.cuh"

namespace nccl_ep {

// In place of an expert, rank, peer or row: there is none, so the entry is skipped.
constexpr int32_t kNowhere = -1;

// The expert that `id` names; kNowhere if it is none of 0 to `experts` - 1.
__device__ __forceinline__ int32_t expert_of_id(int64_t id, int64_t experts) {
    return id >= 0 && id < experts ? static_cast<int32_t>(id) : kNowhere;
}

// Id `i` of an array with 32-bit ids if `is_narrow`, else 64-bit ids.
__device__ __forceinline__ int64_t id_at(const void* ids, uint32_t is_narrow, uint64_t i) {
    return is_narrow != 0 ? static_cast<const int32_t*>(ids)[i] : static_cast<const int64_t*>(ids)[i];
}

}  // namespace nccl_ep
