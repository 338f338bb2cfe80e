// Which expert an id names.
#pragma once

#include "primitive.cuh"

namespace nccl_ep {

// An entry that takes part in nothing: its id names no expert.
constexpr int32_t kNowhere = -1;

// The expert that an id names among `experts`, or kNowhere.
__device__ __forceinline__ int32_t expert_of_id(int64_t id, int64_t experts) {
    return id >= 0 && id < experts ? static_cast<int32_t>(id) : kNowhere;
}

}  // namespace nccl_ep
