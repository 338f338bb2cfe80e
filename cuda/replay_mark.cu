// Tells the host, in each replay of a graph, that an operation of the network has begun or ended: the host cannot query
// events of a replay. Runs right before or behind the operation on its stream.
//
// Grid: one warp, of which one thread works.

#include "base/entry.cuh"
#include "base/primitive.cuh"

namespace nccl_ep {

ENTRY(replay_mark) {
    if (threadIdx.x == 0) {
        st_relaxed_sys(params.began_at, params.begins != 0 ? globaltimer_ns() : 0);
    }
}

}  // namespace nccl_ep
