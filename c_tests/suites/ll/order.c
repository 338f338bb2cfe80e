// Low-latency operations beside each other: on unordered streams, and handles that come and go beside an operation.
#define _GNU_SOURCE  // usleep
#include <unistd.h>

#include "suites/both/both.h"

enum { kHidden = 40 };

static RefShape small_shape(const EpEnv* env, unsigned max_tokens, unsigned top_k) {
    return (RefShape){2 * (unsigned)env->size, max_tokens, top_k, ncclBfloat16, kHidden};
}

EP_TEST(ll_unordered_streams) { unordered_streams(env, false); }
EP_TEST(ll_bits_from_any_home) { bits_from_any_home(env, false); }

// Creating a handle must wait for no other rank. Filling memory on a stream ordered with the
// default one would wait: for a dispatch that waits for ranks that wait for their handles.
EP_TEST(ll_handle_while_a_dispatch_waits) {
    enum { kHandles = 3 };
    const RefShape shape = small_shape(env, 12, 3);
    REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, kRefMessy, false, ref_ll(71));
    ref_prepare_dispatch(&run);
    EP_CHECK_CUDA(cudaDeviceSynchronize());
    void* ids = ref_buffer_data(&run.ids);
    ncclEpHandle_t handles[kHandles];
    // The others dispatch once rank 0 has its handles.
    if (env->rank != 0) ep_barrier();
    EP_CHECK_NCCL(ref_launch_dispatch(&run, kRefWhole, NULL));
    for (unsigned i = 0; i < kHandles; ++i) {
        EP_CHECK_NCCL(ep_handle_create(&handles[i], run.group, ids, shape.max_tokens, shape.top_k, NULL));
    }
    if (env->rank == 0) ep_barrier();
    EP_CHECK_CUDA(cudaDeviceSynchronize());
    ref_check_dispatch(&run);
    for (unsigned i = 0; i < kHandles; ++i) EP_CHECK_NCCL(ncclEpHandleDestroy(handles[i]));
}

// A handle ends while its operation is still on the stream. The next one, with fewer tokens, which ranks of other nodes
// hear of at once, must not change that operation.
EP_TEST(ll_handle_ends_before_its_operation) {
    const RefShape shape = small_shape(env, 12, 3);
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &shape);
    for (unsigned round = 0; round < 3; ++round) {
        REF_SCOPED RefRun run = ref_run_open_with(env, group, &shape, kRefMessy, true, ref_ll(72 + round));
        ref_dispatch(&run);
        ref_prepare_dispatch(&run);
        EP_CHECK_CUDA(cudaDeviceSynchronize());
        EpGate gate;
        ep_gate_close(&gate, env->stream);
        EP_CHECK_NCCL(ref_launch_dispatch(&run, kRefWhole, env->stream));
        EP_CHECK_NCCL(ncclEpHandleDestroy(run.handle));
        ncclEpHandle_t next = NULL;
        EP_CHECK_NCCL(ep_handle_create(&next, group, ref_buffer_data(&run.ids), 1, shape.top_k, NULL));
        usleep(50000);
        ep_gate_open(&gate);
        ref_check_dispatch(&run);
        EP_CHECK_NCCL(ncclEpHandleDestroy(next));
        run.handle = NULL;
    }
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}
