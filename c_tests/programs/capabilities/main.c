// Prints what this process runs on, one "name value" per line; the test runner decides by it what
// can be tested here. Exit status 0 if a low-latency group can be opened.
#include <stdio.h>

#include "harness/harness.h"

int main(int argc, char** argv) {
    EpEnv env;
    ep_init(&env, &argc, &argv);
    int devices = 0;
    int nccl = 0;
    EP_CHECK_CUDA(cudaGetDeviceCount(&devices));
    EP_CHECK_NCCL(ncclGetVersion(&nccl));
    ncclEpGroup_t group = ep_group_create(&env, NCCL_EP_ALGO_LOW_LATENCY, (unsigned)env.size, 1, 64);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env.stream));
    const bool high_throughput = ep_has_high_throughput(&env);
    if (env.rank == 0) {
        printf("backend %s\n", ep_on_hostsim() ? "host" : "cuda");
        printf("devices %d\n", devices);
        printf("nccl %d\n", nccl);
        printf("high-throughput %s\n", high_throughput ? "yes" : "no");
    }
    return ep_finish(&env);
}
