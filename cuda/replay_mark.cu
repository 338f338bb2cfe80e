// Says to the host, in each replay of a graph, that an operation of the network has begun, or that it is over.
//
// Grid: one block of one warp, of which one thread works. It runs behind what came before the operation on its stream,
// or behind the operation.

#include "base/ptx.cuh"
#include "params/params.h"

extern "C" __global__ void __launch_bounds__(nccl_ep::REPLAY_MARK_THREADS)
    replay_mark(const __grid_constant__ nccl_ep::ReplayMarkParams params) {
    if (threadIdx.x == 0) {
        nccl_ep::st_relaxed_sys(params.place, params.begins != 0 ? nccl_ep::globaltimer_ns() : 0);
    }
}
