// A high-throughput handle cannot be created while its stream is captured: its routing is exchanged once, not at every
// replay. Every rank that calls is refused, so none waits and the group goes on. The CPU backend captures nothing.
#include "harness/graphs.h"
#include "reference/run.h"

enum { kHidden = 32 };

static void create_in_capture(const EpEnv* env, ncclEpGroup_t group, void* ids) {
    ncclEpHandle_t handle = NULL;
    EP_CHECK_RESULT(ep_handle_create(&handle, group, ids, 1, 1, env->stream), ncclInvalidUsage);
    EP_CHECK_STR_CONTAINS(ep_last_error(), "stream: must not be captured into a graph");
    EP_CHECK(handle == NULL);
    // The graph is empty: replaying it has no effect on anything.
    cudaGraphExec_t replayed = ep_instantiate(ep_end_capture(env->stream));
    EP_REQUIRE_CUDA(cudaGraphLaunch(replayed, env->stream));
    EP_REQUIRE_CUDA(cudaGraphExecDestroy(replayed));
}

EP_TEST_HT(ht_handle_in_a_capture) {
    const RefShape shape = {2 * (unsigned)env->size, 12, 2, ncclBfloat16, kHidden};
    const RefOpening opening = ref_ht_as(kHtRowsExact, kHtNoCounter, 3);
    const int64_t id = 0;
    void* ids = ep_device_upload(&id, sizeof(id));
    // No wait between the creations: a refused one, of one rank or all, must not shift the others' exchanges.
    REF_SCOPED RefRun before = ref_run_open_with(env, NULL, &shape, kRefDistinct, true, opening);
    if (env->rank == 0 && ep_begin_capture(env->stream)) create_in_capture(env, before.group, ids);
    if (ep_begin_capture(env->stream)) create_in_capture(env, before.group, ids);
    REF_SCOPED RefRun run = ref_run_open_with(env, before.group, &shape, kRefMessy, true, opening);
    ref_pair(&run);
    ref_pair(&before);
    ep_device_free(ids);
}
