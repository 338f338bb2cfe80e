// Rounds of work. Each ends with an idle stream, so no rank is more than one round ahead of another.
#include "suites/faults/faults.h"

enum { kMaxTokens = 12, kTopK = 3, kHidden = 64, kLocalExperts = 2 };

static bool has_run(const Job* job) { return job->kind <= kHt; }

void job_open(Job* job, const EpEnv* env, Kind kind, uint64_t seed) {
    memset(job, 0, sizeof(*job));
    job->env = env;
    job->kind = kind;
    const unsigned experts = kLocalExperts * (unsigned)env->size;
    if (has_run(job)) {
        const RefShape shape = {experts, kMaxTokens, kTopK, ncclBfloat16, kHidden};
        const RefStyle style = (RefStyle)(seed % (kRefSkewed + 1));
        job->run = ref_run_open_with(env, NULL, &shape, style, true, kind == kHt ? ref_ht(seed) : ref_ll(seed));
        job->group = job->run.own_group;
        job->run.own_group = NULL;
    } else if (kind == kHandles) {
        const int64_t id = 0;
        job->group = ep_group_create(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, experts, 1, 128);
        job->ids = ep_device_upload(&id, sizeof(id));
    }
}

// Keeps the code and the text of a failure.
static bool works(Job* job, ncclResult_t result) {
    if (result == ncclSuccess) return true;
    job->fault = result;
    snprintf(job->text, sizeof(job->text), "%s", ep_last_error());
    return false;
}

// Waits for the enqueued work and returns whether it succeeded.
static bool went_well(Job* job) {
    EP_CHECK_CUDA(cudaStreamSynchronize(job->env->stream));
    return works(job, ep_group_state(job->group));
}

static bool complete(Job* job) {
    return job->kind != kStaged || works(job, ncclEpComplete(job->run.handle, NULL, job->env->stream));
}

static bool run_round(Job* job) {
    const RefPass pass = job->kind == kStaged ? kRefStaged : kRefCounted;
    RefRun* run = &job->run;
    ref_prepare_dispatch(run);
    if (!works(job, ref_launch_dispatch(run, pass, job->env->stream))) return false;
    if (!complete(job) || !went_well(job)) return false;
    ref_check_dispatch(run);
    ref_prepare_combine(run);
    if (!works(job, ref_launch_combine(run, run->ht ? kRefBackward : pass, job->env->stream))) return false;
    return complete(job) && went_well(job) && ref_check_combine(run);
}

static bool handle_round(Job* job) {
    ncclEpHandle_t handle = NULL;
    if (!works(job, ep_handle_create(&handle, job->group, job->ids, 1, 1, job->env->stream))) return false;
    const bool well = went_well(job);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    return well;
}

static bool group_round(Job* job) {
    const ncclEpGroupConfig_t config = ep_group_config(NCCL_EP_ALGO_LOW_LATENCY, (unsigned)job->env->size, 4, 128);
    ncclEpGroup_t group = NULL;
    return works(job, ncclEpCreateGroup(&group, job->env->comm, &config, job->env->stream, NULL, NULL)) &&
           works(job, ncclEpGroupDestroy(group, job->env->stream));
}

bool job_round(Job* job) {
    job->began = seconds_now();
    if (has_run(job)) return run_round(job);
    return job->kind == kHandles ? handle_round(job) : group_round(job);
}

void job_expect_refusals(Job* job) {
    if (!has_run(job)) return;
    EP_CHECK(ref_launch_combine(&job->run, kRefWhole, job->env->stream) != ncclSuccess);
    EP_CHECK_STR_CONTAINS(ep_last_error(), "the group has failed");
}

void job_end(Job* job) {
    if (has_run(job)) EP_CHECK_NCCL(ep_handle_destroy(&job->run.handle));
    if (job->kind != kGroups) EP_CHECK_NCCL(ncclEpGroupDestroy(job->group, job->env->stream));
}

void job_free(Job* job) {
    if (has_run(job)) ref_run_close(&job->run);
    if (job->kind == kHandles) ep_device_free(job->ids);
}
