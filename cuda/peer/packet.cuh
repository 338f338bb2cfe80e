// A packet: 32 bits of data and the epoch that they belong to, in one indivisible word. Nothing has to be
// cleared between operations, and no second word says that the data has come.
#pragma once

#include "../base/primitive.cuh"

namespace nccl_ep {

__device__ __forceinline__ uint64_t make_packet(uint32_t epoch, uint32_t data) {
    return uint64_t{epoch} << 32 | data;
}

__device__ __forceinline__ uint32_t packet_epoch(uint64_t packet) {
    return static_cast<uint32_t>(packet >> 32);
}

__device__ __forceinline__ uint32_t packet_data(uint64_t packet) {
    return static_cast<uint32_t>(packet);
}

// Whether a running number is `expected` or a later one, also across the wrap.
__device__ __forceinline__ bool is_or_follows(uint32_t number, uint32_t expected) {
    return static_cast<int32_t>(number - expected) >= 0;
}

}  // namespace nccl_ep
