// Operations on unordered streams, alike in both modes; those of one stream in every order are in test_stress.
#include "suites/both/both.h"

static RefPass combine_of(unsigned i) { return i % 2 == 0 ? kRefWhole : kRefBackward; }

// Two handles on two streams: only the library orders their operations. In every second round each
// combine is on the other stream than its dispatch.
void unordered_streams(EpEnv* env, bool ht) {
    enum { kRuns = 2, kRounds = 20 };
    const RefShape shape = {3 * (unsigned)env->size, 16, 3, ncclBfloat16, 40};
    cudaStream_t streams[kRuns];
    RefRun runs[kRuns];
    ep_open_streams(streams, kRuns);
    ref_runs_open(runs, kRuns, env, &shape, kRefMessy, true, ht ? ref_ht(1000) : ref_ll(1000));
    for (unsigned i = 0; i < kRounds; ++i) {
        for (unsigned r = 0; r < kRuns; ++r) ref_prepare(&runs[r]);
        EP_CHECK_CUDA(cudaDeviceSynchronize());
        for (unsigned r = 0; r < kRuns; ++r) EP_CHECK_NCCL(ref_launch_dispatch(&runs[r], kRefCounted, streams[r]));
        for (unsigned r = 0; r < kRuns; ++r) {
            EP_CHECK_NCCL(ref_launch_combine(&runs[r], combine_of(i / 2), streams[(r + i) % kRuns]));
        }
        for (unsigned r = 0; r < kRuns; ++r) EP_CHECK_CUDA(cudaStreamSynchronize(streams[r]));
        for (unsigned r = 0; r < kRuns; ++r) ref_check(&runs[r]);
    }
    ref_runs_close(runs, kRuns);
    ep_close_streams(streams, kRuns);
}
