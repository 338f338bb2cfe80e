// Calls that no graph can hold, while a stream is captured. Each works as it does otherwise, or is refused, and in
// either case the capture goes on, in whatever mode, and the group works.
#include "suites/graph/pairs.h"

// ---- On a captured stream ----------------------------------------------------------------------

static ncclResult_t create_group(const EpEnv* env, cudaStream_t stream, ncclEpGroup_t* group) {
    const ncclEpGroupConfig_t config = ep_group_config(NCCL_EP_ALGO_LOW_LATENCY, (unsigned)env->size, 1, 16);
    return ncclEpCreateGroup(group, env->comm, &config, stream, NULL, NULL);
}

static void check_groups_are_refused(const EpEnv* env, ncclEpGroup_t group) {
    // The default one waits for that of the environment, which is a blocking stream.
    const cudaStream_t streams[] = {env->stream, NULL};
    for (int i = 0; i < 2; ++i) {
        ncclEpGroup_t made = NULL;
        EP_CHECK_RESULT(create_group(env, streams[i], &made), ncclInvalidUsage);
        EP_CHECK_STR_CONTAINS(ep_last_error(), "ncclEpCreateGroup: stream: must not be captured");
        EP_CHECK(made == NULL);
        EP_CHECK_RESULT(ncclEpGroupDestroy(group, streams[i]), ncclInvalidUsage);
        EP_CHECK_STR_CONTAINS(ep_last_error(), "ncclEpGroupDestroy: stream: must not be captured");
    }
}

static void make_a_tensor(ncclEpGroup_t group) {
    ncclNDTensor_t tensor;
    EP_CHECK_NCCL(ncclEpTensorCreate(group, &tensor, 1, ncclInt8, NCCL_EP_TENSOR_TAG_NONE, 64, 1, 1, 1, 1));
    EP_CHECK_NCCL(ncclEpTensorDestroy(group, &tensor));
}

static void replace_handle(RefRun* run, cudaStream_t stream) {
    ncclEpHandle_t made = NULL;
    EP_CHECK_NCCL(ep_handle_create(&made, run->group, ref_buffer_data(&run->ids),
                                   run->now->num_tokens[run->env->rank], run->shape.top_k, stream));
    EP_CHECK_NCCL(ncclEpHandleDestroy(run->handle));
    run->handle = made;
}

static void calls_in_a_capture_of(EpEnv* env, enum cudaStreamCaptureMode mode) {
    Pair pair = pair_open_ready(env, false);
    RefRun *run = &pair.runs[0], *other = &pair.runs[1];
    if (ep_begin_capture_in(env->stream, mode)) {
        EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, env->stream));
        check_groups_are_refused(env, run->group);
        make_a_tensor(run->group);
        replace_handle(other, env->stream);
        EP_CHECK_NCCL(ref_launch_combine(run, kRefWhole, env->stream));
        cudaGraphExec_t graph = ep_instantiate(ep_end_capture(env->stream));
        replay_pair(run, graph);
        ref_pair(other);
    }
    pair_close(&pair);
}

EP_TEST(calls_in_a_capture) {
    calls_in_a_capture_of(env, cudaStreamCaptureModeThreadLocal);
    calls_in_a_capture_of(env, cudaStreamCaptureModeGlobal);
    calls_in_a_capture_of(env, cudaStreamCaptureModeRelaxed);
}

// ---- On another stream of the thread that captures ---------------------------------------------

// Its allocation functions need not know of captures.
static cudaError_t alloc(void** data, size_t bytes) { return cudaMalloc(data, bytes); }
static cudaError_t release(void* data) { return cudaFree(data); }

static void make_a_group(const EpEnv* env, ncclEpAlgorithm_t algorithm) {
    const ncclEpGroupConfig_t config = ep_group_config(algorithm, (unsigned)env->size, 1, 16);
    ncclEpGroup_t group = NULL;
    EP_CHECK_NCCL(ncclEpCreateGroup(&group, env->comm, &config, env->stream, alloc, release));
    make_a_tensor(group);
    ncclEpHandle_t handle = NULL;
    EP_CHECK_NCCL(ep_handle_create(&handle, group, NULL, 0, 1, env->stream));
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}

// NCCL_EP_CHECK waits for what is on the device, and puts poison where nothing comes.
static void check_beside_a_capture(EpEnv* env, RefOpening opening) {
    EP_WITH_VARIABLE("NCCL_EP_CHECK", "1");
    const RefShape shape = {2 * (unsigned)env->size, 16, 2, ncclBfloat16, 256};
    RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, true, opening);
    ref_prepare_dispatch(&run);
    cudaStream_t aside;
    ep_open_streams(&aside, 1);
    if (ep_begin_capture(aside)) {
        EP_CHECK_NCCL(ref_launch_dispatch(&run, kRefWhole, env->stream));
        EP_CHECK_CUDA(cudaGraphDestroy(ep_end_capture(aside)));
    }
    ep_close_streams(&aside, 1);
    ref_run_close(&run);
}

EP_TEST(ll_checks_beside_a_capture) { check_beside_a_capture(env, ref_ll(3)); }

EP_TEST_HT(ht_checks_beside_a_capture) { check_beside_a_capture(env, ref_ht_as(kHtRowsExact, kHtNoCounter, 3)); }

EP_TEST(calls_beside_a_capture) {
    const ncclEpAlgorithm_t algorithm = ep_algorithm_for_any_case(env);
    Pair pair = pair_open_ready(env, false);
    Pair ending = pair_open_ready(env, false);
    RefRun* run = &pair.runs[0];
    for (unsigned i = 0; i < kPair; ++i) EP_CHECK_NCCL(ep_handle_destroy(&ending.runs[i].handle));
    if (ep_begin_capture(pair.aside)) {
        EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, pair.aside));
        EP_CHECK_NCCL(ncclEpGroupDestroy(ending.runs[0].own_group, env->stream));
        ending.runs[0].own_group = NULL;
        make_a_group(env, algorithm);
        EP_CHECK_NCCL(ref_launch_combine(run, kRefWhole, pair.aside));
        replay_pair(run, ep_instantiate(ep_end_capture(pair.aside)));
    }
    pair_close(&ending);
    pair_close(&pair);
}
