// Converts ids to the form that kernels read: 64 bits each, with `offset` added to those that are not negative.
//
// Grid: any; one thread per id at a time. The ids may be converted in place if they have 64 bits.

#include "base/entry.cuh"
#include "base/expert.cuh"

namespace nccl_ep::handle_ids_impl {

ENTRY(handle_ids) {
    const uint64_t threads = uint64_t{gridDim.x} * blockDim.x;
    for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < params.count; i += threads) {
        const int64_t id = id_at(params.from, params.is_narrow, i);
        params.to[i] = id < 0 ? id : id + params.offset;
    }
}

}  // namespace nccl_ep::handle_ids_impl
