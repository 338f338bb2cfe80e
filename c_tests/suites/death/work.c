// See work.h.
#define _GNU_SOURCE  // usleep
#include "suites/death/work.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

LlShape shape_for(const EpEnv* env) {
    const LlShape shape = {2 * (unsigned)env->size, 12, 3, ncclBfloat16, 64};
    return shape;
}

void open_work(Work* work, const EpEnv* env, uint64_t seed) {
    const LlShape shape = shape_for(env);
    work->group = ll_group_new(env, &shape);
    ll_run_open_with(&work->run, env, work->group, &shape, kRefDistinct, true, seed);
    ll_dispatch(&work->run);
    ll_combine(&work->run);
}

int survivors(const DeathRank* self) { return self->env.size - 1; }

static bool in_time(const DeathRank* self, double since) {
    return seconds_now() - since <= 0.001 * (self->timeout_ms + kSlackMs);
}

// A failure says by how much it was too late.
void check_in_time(const DeathRank* self, double since) {
    const double late_ms = 1000 * (seconds_now() - since) - self->timeout_ms - kSlackMs;
    EP_CHECK_EQ_I64(late_ms > 0 ? (int64_t)late_ms : 0, 0);
}

// ---- What a survivor checks --------------------------------------------------------------------

bool names(const char* text, int rank) {
    char name[16];
    snprintf(name, sizeof(name), "rank %d", rank);
    const char* at = strstr(text, name);
    return at != NULL && (at[strlen(name)] < '0' || at[strlen(name)] > '9');
}

// Waits for the failure of the group; `since` is when it could first be known.
void expect_fault(DeathRank* self, ncclEpGroup_t group, double since) {
    ncclResult_t result = ncclSuccess;
    ncclResult_t asked = ncclEpGetAsyncError(group, &result);
    while (asked == ncclSuccess && result == ncclSuccess && in_time(self, since)) {
        usleep(kPollUs);
        asked = ncclEpGetAsyncError(group, &result);
    }
    EP_CHECK_EQ_I64(asked, ncclSuccess);
    EP_CHECK_EQ_I64(result, ncclRemoteError);
    check_in_time(self, since);
    EP_CHECK_STR_CONTAINS(ep_last_error(), " waited ");
    EP_CHECK_STR_CONTAINS(ep_last_error(), "rank ");
    if (names(ep_last_error(), self->victim)) atomic_fetch_add(&self->shared->named, 1);
}

void expect_context_usable(const DeathRank* self) {
    enum { kBytes = 4096 };
    unsigned char sent[kBytes];
    unsigned char back[kBytes];
    for (int i = 0; i < kBytes; ++i) sent[i] = (unsigned char)(i * 7);
    EP_CHECK_CUDA(cudaStreamSynchronize(self->env.stream));
    EP_CHECK_CUDA(cudaGetLastError());
    void* device = ep_device_upload(sent, kBytes);
    EP_CHECK_CUDA(cudaMemsetAsync(device, 0x5a, kBytes / 2, self->env.stream));
    EP_CHECK_CUDA(cudaStreamSynchronize(self->env.stream));
    ep_download(back, device, kBytes);
    memset(sent, 0x5a, kBytes / 2);
    EP_CHECK_EQ_BYTES(back, sent, kBytes);
    ep_device_free(device);
    EP_CHECK_CUDA(cudaDeviceSynchronize());
}

void expect_refusals(Work* work) {
    const cudaStream_t stream = work->run.env->stream;
    EP_CHECK(ll_launch_dispatch(&work->run, stream, false) != ncclSuccess);
    EP_CHECK_STR_CONTAINS(ep_last_error(), "the group has failed");
    EP_CHECK(ll_launch_combine(&work->run, stream, true) != ncclSuccess);
}

void close_work(DeathRank* self, Work* work) {
    const double start = seconds_now();
    EP_CHECK_NCCL(ncclEpHandleDestroy(work->run.handle));
    work->run.handle = NULL;
    EP_CHECK_NCCL(ncclEpGroupDestroy(work->group, self->env.stream));
    check_in_time(self, start);
    ll_run_close(&work->run);
}

// A new communicator and a new group without the victim: nothing of the failure is left.
void go_on_without_victim(DeathRank* self) {
    EpEnv env = self->env;
    env.size = survivors(self);
    env.comm = open_comm(self, kSecondId, env.size);
    Work work;
    open_work(&work, &env, 2);
    ll_run_close(&work.run);
    EP_CHECK_NCCL(ncclEpGroupDestroy(work.group, env.stream));
    EP_CHECK_NCCL(ncclCommDestroy(env.comm));
}

// Ends what is left of the first communicator, and goes on.
void abort_and_go_on(DeathRank* self) {
    EP_CHECK_NCCL(ncclCommAbort(self->env.comm));
    // An exchange that was given up may have left its error on the stream.
    (void)cudaStreamSynchronize(self->env.stream);
    (void)cudaGetLastError();
    expect_context_usable(self);
    go_on_without_victim(self);
    EP_CHECK_CUDA(cudaStreamDestroy(self->env.stream));
}

void finish_survivor(DeathRank* self, Work* work) {
    expect_refusals(work);
    expect_context_usable(self);
    meet(self, kNoticed, survivors(self));
    EP_CHECK(atomic_load(&self->shared->named) > 0);
    close_work(self, work);
    EP_CHECK_NCCL(ncclCommAbort(self->env.comm));
    expect_context_usable(self);
    go_on_without_victim(self);
    EP_CHECK_CUDA(cudaStreamDestroy(self->env.stream));
}

ncclResult_t create_ht_handle(const EpEnv* env, ncclEpGroup_t group, void* ids,
                                     ncclEpHandle_t* handle) {
    EpView view;
    ep_view_2d(&view, ids, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, 1, 1);
    return ncclEpCreateHandle(handle, group, &view.tensor, NULL, 0, NULL, env->stream, false);
}
