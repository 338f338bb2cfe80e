#include "suites/staged/staged.h"

RefRun open_run(const EpEnv* env, ncclEpGroup_t group) {
    static unsigned opened;
    const RefShape shape = {2 * (unsigned)env->size, 12, 3, ncclBfloat16, 40};
    const unsigned n = opened++;
    RefRun run = ref_run_open_with(env, group, &shape, n % 2 == 0 ? kRefMessy : kRefDistinct, n % 3 != 0,
                                   ref_ll(1000 + 1000 * (uint64_t)n));
    run.variation = n;
    return run;
}

Setup set_up(EpEnv* env) {
    Setup setup;
    for (unsigned r = 0; r < kMaxRuns; ++r) setup.runs[r] = open_run(env, r == 0 ? NULL : setup.runs[0].group);
    EP_REQUIRE_CUDA(cudaStreamCreateWithFlags(&setup.other, cudaStreamNonBlocking));
    return setup;
}

void tear_down(Setup* setup) {
    ref_runs_close(setup->runs, kMaxRuns);
    EP_CHECK_CUDA(cudaStreamDestroy(setup->other));
}

void send_dispatch(RefRun* run) {
    ref_prepare_dispatch(run);
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefStaged, run->env->stream));
}

void send_combine(RefRun* run) {
    ref_prepare_combine(run);
    EP_CHECK_NCCL(ref_launch_combine(run, kRefStaged, run->env->stream));
}

void complete(RefRun* run, cudaStream_t stream) {
    static unsigned calls;
    ncclEpCompleteConfig_t config = {0};
    EP_CHECK_NCCL(ncclEpComplete(run->handle, ++calls % 2 == 0 ? NULL : &config, stream));
    EP_CHECK_CUDA(cudaStreamSynchronize(stream));
}

void complete_dispatch(RefRun* run, cudaStream_t stream) {
    complete(run, stream);
    ref_check_dispatch(run);
}

void complete_combine(RefRun* run, cudaStream_t stream) {
    complete(run, stream);
    ref_check_combine(run);
}
