// The layout of the messages that operations over several nodes exchange, and their headers.
//
// A message has tails, a header and rows, in this order. Tails descend from the header and rows ascend, so that their
// addresses do not depend on how many there are.
#pragma once

#include "params/ht_nodes.h"
#include "../net/message.cuh"

namespace nccl_ep {

__device__ __forceinline__ uint8_t* first_row_of(const HtMessages& messages, uint32_t number) {
    return messages.rows + number * messages.stride;
}

__device__ __forceinline__ uint8_t* row_of(const HtMessages& messages, uint32_t number,
                                           uint32_t index) {
    return first_row_of(messages, number) + uint64_t{index} * messages.row_bytes;
}

__device__ __forceinline__ MessageHeader* header_of(const HtMessages& messages, uint32_t number) {
    return reinterpret_cast<MessageHeader*>(first_row_of(messages, number)) - 1;
}

// What travels with a row beside its bytes: ids and weights, or gradients.
__device__ __forceinline__ uint8_t* tail_of(const HtMessages& messages, uint32_t number,
                                            uint32_t index) {
    return reinterpret_cast<uint8_t*>(header_of(messages, number)) -
           (uint64_t{index} + 1) * messages.tail_bytes;
}

// Sends the messages of a stage. The first stage of an operation advances the epoch, which no kernel reads at that
// time: those of the previous operation have ended, and this operation's follow the exchange. The header also says
// whether this rank knows of a failure, as then its sums are wrong. All threads of one block call it.
template <typename Net>
__device__ __forceinline__ void send_messages(const HtHeaderParams& params) {
    const uint32_t before = ld_relaxed_gpu(&params.sequences->epoch);
    MessageHeader header = params.header;
    header.epoch = before;
    header.failed = known_failure(params.wait);
    __syncthreads();  // all threads have read the last epoch
    if (header.stage == 0) {
        header.epoch = before == 0xffffffffu ? 1 : before + 1;
        if (threadIdx.x == 0) {
            st_relaxed_gpu(&params.sequences->epoch, header.epoch);
        }
    }
    for (uint32_t i = threadIdx.x; i < params.count; i += blockDim.x) {
        Net::send(reinterpret_cast<uint8_t*>(header_of(params.messages, i)), header);
    }
}

}  // namespace nccl_ep
