// Tells the host, in each replay of a graph, that an operation of the network has begun, or that it is over.
//
// Grid: one block of one warp, of which one thread works. It runs behind what came before the operation on its stream,
// or behind the operation.

#include "base/entry.cuh"
#include "base/primitive.cuh"

namespace nccl_ep {

ENTRY(replay_mark) {
    if (threadIdx.x == 0) {
        st_relaxed_sys(params.place, params.begins != 0 ? globaltimer_ns() : 0);
    }
}

}  // namespace nccl_ep
