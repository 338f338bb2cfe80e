// The times that ranks wait for one that is late.
#define _GNU_SOURCE  // usleep
#include <unistd.h>

#include "harness/nodes.h"
#include "suites/both/both.h"

// An operation that the last rank enqueues after the others.
static void play_late(RefRun* run, bool combine, RefPass pass) {
    const bool is_late = run->env->rank == run->env->size - 1;
    if (combine) {
        ref_dispatch(run);
        ref_prepare_combine(run);
    } else {
        ref_prepare_dispatch(run);
    }
    if (is_late) {
        ep_barrier();
        usleep(50000);
    }
    EP_CHECK_NCCL((combine ? ref_launch_combine : ref_launch_dispatch)(run, pass, run->env->stream));
    EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, run->env->stream));
    if (!is_late) ep_barrier();
    if (combine) {
        ref_check_combine(run);
    } else {
        ref_check_dispatch(run);
        ref_combine(run);
    }
}

void waits_are_timed(RefRun* run, bool combine) {
    const EpEnv* const env = run->env;
    const size_t bytes = (size_t)env->size * sizeof(int64_t);
    EP_SCOPED int64_t* got = calloc(1, bytes);
    EP_SCOPED int64_t* before = calloc(1, bytes);
    int64_t* const waits = ep_device_upload(before, bytes);
    ref_pair(run);  // all ranks make a first view together
    EP_CHECK_NCCL((combine ? ncclEpGroupTimeCombineWaits : ncclEpGroupTimeWaits)(run->own_group, waits));
    // On a busy machine some do not begin before the last one.
    play_late(run, combine, kRefWhole);
    play_late(run, combine, kRefStaged);
    EP_CHECK_NCCL((combine ? ncclEpGroupTimeCombineWaits : ncclEpGroupTimeWaits)(run->own_group, NULL));
    ep_download(before, waits, bytes);
    // Messages of other nodes are waited for before.
    if (env->rank != env->size - 1 && ep_num_nodes() == 1) {
        EP_CHECK(before[env->size - 1] > 1000000 && before[env->rank] < before[env->size - 1]);
    }
    ref_pair(run);
    ep_download(got, waits, bytes);
    EP_CHECK_EQ_BYTES(got, before, bytes);
    ep_device_free(waits);
}
