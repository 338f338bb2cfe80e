// The caller's own collectives beside low-latency operations, on another stream.
//
// Rank 0 enqueues a combine, then an all-reduce of its own. The other ranks wait for the all-reduce before they
// enqueue their combine. No stream waits for another one, but if the combine of rank 0 takes every multiprocessor
// while it waits for its peers, the all-reduce never begins. The library's deadline ends that.
//
// num_channels bounds the blocks of an operation on one node; over several nodes the library leaves multiprocessors
// to others in any case.
#define _GNU_SOURCE  // RTLD_DEFAULT, setenv, usleep
#include <dlfcn.h>
#include <unistd.h>

#include "harness/nodes.h"
#include "reference/run.h"

enum { kTokens = 128, kTopK = 8, kWide = 7168, kLocalExperts = 16, kReduced = 1 << 20 };
// More than any GPU has multiprocessors, and few.
enum { kAllChannels = 1024, kFewChannels = 16 };
enum { kHeadStartUs = 300000 };

static const char* const kTimeoutMs = "4000";

// Not in what stands in for NCCL where ranks share a GPU.
typedef ncclResult_t AllReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
static AllReduce* g_all_reduce;

static ncclEpGroup_t open_bounded(const EpEnv* env, const RefShape* shape, unsigned channels) {
    ncclEpGroupConfig_t config = ep_group_config(NCCL_EP_ALGO_LOW_LATENCY, shape->num_experts,
                                                 shape->max_tokens, 2 * shape->hidden);
    config.num_channels = channels;
    ncclEpGroup_t group = NULL;
    EP_WITH_VARIABLE("NCCL_EP_TIMEOUT_MS", kTimeoutMs);
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group, env->comm, &config, env->stream, NULL, NULL));
    return group;
}

// Returns the state of the group after a combine beside the all-reduce. Both have ended.
static ncclResult_t combine_beside(RefRun* run, ncclEpGroup_t group, ncclComm_t own, float* sums, cudaStream_t other) {
    const EpEnv* env = run->env;
    ep_barrier();
    if (env->rank == 0) {
        EP_CHECK_NCCL(ref_launch_combine(run, kRefWhole, env->stream));
        usleep(kHeadStartUs);
    }
    EP_CHECK_NCCL(g_all_reduce(sums, sums, kReduced, ncclFloat32, ncclSum, own, other));
    if (env->rank != 0) {
        EP_CHECK_CUDA(cudaStreamSynchronize(other));
        // Refused where the failure of rank 0 is known.
        const ncclResult_t launched = ref_launch_combine(run, kRefWhole, env->stream);
        EP_CHECK(launched == ncclSuccess || launched == ncclRemoteError);
    }
    EP_CHECK_CUDA(cudaStreamSynchronize(other));
    EP_CHECK_CUDA(cudaStreamSynchronize(env->stream));
    return ep_group_state(group);
}

typedef enum { kPasses, kHangs, kEither } Outcome;

static void run_with(const EpEnv* env, unsigned channels, Outcome outcome) {
    const RefShape shape = {kLocalExperts * (unsigned)env->size, kTokens, kTopK, ncclBfloat16, kWide};
    cudaStream_t other = NULL;
    ncclComm_t own = NULL;
    RefRun run;
    float* sums = ep_device_alloc(kReduced * sizeof(float));
    EP_REQUIRE_CUDA(cudaMemset(sums, 0, kReduced * sizeof(float)));
    ep_open_streams(&other, 1);
    EP_REQUIRE_NCCL(ncclCommSplit(env->comm, 0, env->rank, &own, NULL));
    EP_CHECK_NCCL(g_all_reduce(sums, sums, kReduced, ncclFloat32, ncclSum, own, other));
    EP_CHECK_CUDA(cudaStreamSynchronize(other));
    ncclEpGroup_t group = open_bounded(env, &shape, channels);
    run = ref_run_open_with(env, group, &shape, kRefDistinct, false, ref_ll(81));
    ref_dispatch(&run);
    ref_combine(&run);
    ref_prepare_combine(&run);
    EP_CHECK_CUDA(cudaDeviceSynchronize());
    const ncclResult_t state = combine_beside(&run, group, own, sums, other);
    if (outcome != kEither) EP_CHECK_EQ_I64(state, outcome == kHangs ? ncclRemoteError : ncclSuccess);
    EP_CHECK(state == ncclSuccess || state == ncclRemoteError);
    if (state == ncclSuccess) ref_check_combine(&run);
    ep_barrier();
    EP_CHECK_NCCL(ep_handle_destroy(&run.handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
    ref_run_close(&run);
    EP_CHECK_NCCL(ncclCommDestroy(own));
    ep_close_streams(&other, 1);
    ep_device_free(sums);
}

EP_TEST(ll_beside_collectives) {
    // There are no multiprocessors to run out of, or ranks take turns on one.
    if (ep_on_hostsim() || ep_on_fake_nccl() || env->size < 2) return;
    void* found = dlsym(RTLD_DEFAULT, "ncclAllReduce");
    EP_REQUIRE(found != NULL);
    memcpy(&g_all_reduce, &found, sizeof(found));
    run_with(env, kFewChannels, kPasses);
    // A block of an exact combine leaves an all-reduce of few GPUs room beside it.
    const Outcome hangs = ref_ll_sum() == kRefExact ? kEither : kHangs;
    run_with(env, kAllChannels, ep_num_nodes() == 1 ? hangs : kPasses);
}
