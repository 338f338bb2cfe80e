// High-throughput combine over several nodes: the heads of a pass's messages, whose rows another kernel has summed.

#include "messages.cuh"

extern "C" __global__ void __launch_bounds__(nccl_ep::HT_HEAD_THREADS)
    ht_head(const __grid_constant__ nccl_ep::HtHeadParams params) {
    nccl_ep::write_heads(params);
}
