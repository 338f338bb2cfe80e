// The messages that operations over several nodes exchange: where their parts lie, and their heads.
//
// A message has tails, a head and rows, in this order. Tails descend and rows ascend from the head, so that their
// places follow from their numbers alone.
#pragma once

#include "../params/ht_nodes.h"
#include "../peer/fault.cuh"

namespace nccl_ep {

__device__ __forceinline__ uint8_t* first_row_of(const HtMessages& messages, uint32_t number) {
    return messages.rows + number * messages.stride;
}

__device__ __forceinline__ uint8_t* row_of(const HtMessages& messages, uint32_t number,
                                           uint32_t index) {
    return first_row_of(messages, number) + uint64_t{index} * messages.row_bytes;
}

__device__ __forceinline__ HtHead* head_of(const HtMessages& messages, uint32_t number) {
    return reinterpret_cast<HtHead*>(first_row_of(messages, number)) - 1;
}

// What travels beside a row.
__device__ __forceinline__ uint8_t* tail_of(const HtMessages& messages, uint32_t number,
                                            uint32_t index) {
    return reinterpret_cast<uint8_t*>(head_of(messages, number)) -
           (uint64_t{index} + 1) * messages.tail_bytes;
}

// The threads of a block write the heads of what this rank sends. A head says which operation the rows belong to,
// since messages of different ones may have the same sizes, and whether this rank knows of a failure: then sums
// that it should have made are not what it sends.
__device__ __forceinline__ void write_heads(const HtHeadParams& params) {
    for (uint32_t i = threadIdx.x; i < params.count; i += blockDim.x) {
        *head_of(params.messages, i) = {params.fingerprint, params.handle,
                                        known_failure(params.wait), params.scales_word};
    }
}

}  // namespace nccl_ep
