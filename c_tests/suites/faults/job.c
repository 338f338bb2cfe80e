// Rounds of work. Each ends with an idle stream, so no rank is more than one round ahead of another.
#include "suites/faults/faults.h"

enum { kMaxTokens = 12, kTopK = 3, kHidden = 64, kLocalExperts = 2 };

static bool is_ll(const Job* job) { return job->kind == kLl || job->kind == kStaged; }

void job_open(Job* job, const EpEnv* env, Kind kind, uint64_t seed) {
    memset(job, 0, sizeof(*job));
    job->env = env;
    job->kind = kind;
    const unsigned experts = kLocalExperts * (unsigned)env->size;
    const RefStyle style = (RefStyle)(seed % (kRefSkewed + 1));
    if (is_ll(job)) {
        const RefShape shape = {experts, kMaxTokens, kTopK, ncclBfloat16, kHidden};
        job->group = ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &shape);
        job->ll = ll_run_open_with(env, job->group, &shape, style, true, seed);
    } else if (kind == kHt) {
        const RefShape shape = {experts, kMaxTokens, kTopK, ncclBfloat16, kHidden};
        const HtOpening opening = {kHtRowsAsTold, kHtNoCounter, seed};
        job->group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
        job->ht = ht_run_open_with(env, job->group, &shape, style, true, opening);
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
    const bool staged = job->kind == kStaged;
    return !staged || works(job, ncclEpComplete(job->ll.handle, NULL, job->env->stream));
}

static bool ll_round(Job* job) {
    const bool staged = job->kind == kStaged;
    LlRun* run = &job->ll;
    ll_prepare_dispatch(run);
    if (!works(job, ll_launch_dispatch(run, job->env->stream, staged))) return false;
    if (!complete(job) || !went_well(job)) return false;
    ll_check_dispatch(run);
    ll_prepare_combine(run);
    if (!works(job, ll_launch_combine(run, job->env->stream, staged))) return false;
    if (!complete(job) || !went_well(job)) return false;
    return ll_check_combine(run);
}

static bool ht_round(Job* job) {
    const HtPass forward = {true, false, false, true, false};
    HtRun* run = &job->ht;
    ht_prepare_dispatch(run);
    if (!works(job, ht_launch_dispatch(run, forward, job->env->stream))) return false;
    if (!went_well(job)) return false;
    ht_check_dispatch(run);
    ht_prepare_combine(run);
    if (!works(job, ht_launch_combine(run, true, job->env->stream))) return false;
    return went_well(job) && ht_check_combine(run);
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
    if (is_ll(job)) return ll_round(job);
    if (job->kind == kHt) return ht_round(job);
    return job->kind == kHandles ? handle_round(job) : group_round(job);
}

void job_expect_refusals(Job* job) {
    if (is_ll(job)) {
        EP_CHECK(ll_launch_combine(&job->ll, job->env->stream, false) != ncclSuccess);
    } else if (job->kind == kHt) {
        EP_CHECK(ht_launch_combine(&job->ht, false, job->env->stream) != ncclSuccess);
    } else {
        return;
    }
    EP_CHECK_STR_CONTAINS(ep_last_error(), "the group has failed");
}

void job_end(Job* job) {
    if (is_ll(job)) EP_CHECK_NCCL(ncclEpHandleDestroy(job->ll.handle));
    if (job->kind == kHt) EP_CHECK_NCCL(ncclEpHandleDestroy(job->ht.handle));
    if (job->kind != kGroups) EP_CHECK_NCCL(ncclEpGroupDestroy(job->group, job->env->stream));
    job->ll.handle = NULL;
    job->ht.handle = NULL;
}

void job_free(Job* job) {
    if (is_ll(job)) ll_run_close(&job->ll);
    if (job->kind == kHt) ht_run_close(&job->ht);
    if (job->kind == kHandles) ep_device_free(job->ids);
}
