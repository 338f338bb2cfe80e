// Which expert an id names.
#pragma once

#include "primitive.cuh"

namespace nccl_ep {

// Instead of an expert, where an id names none: the entry is skipped.
constexpr int32_t kNowhere = -1;

// The expert that an id names among `experts`, or kNowhere.
__device__ __forceinline__ int32_t expert_of_id(int64_t id, int64_t experts) {
    return id >= 0 && id < experts ? static_cast<int32_t>(id) : kNowhere;
}

// The caller's id number `i`: ids have 64 bits, or 32 if narrow.
__device__ __forceinline__ int64_t id_at(const void* ids, uint32_t is_narrow, uint64_t i) {
    return is_narrow != 0 ? static_cast<const int32_t*>(ids)[i] : static_cast<const int64_t*>(ids)[i];
}

}  // namespace nccl_ep
