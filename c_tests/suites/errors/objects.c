// Handles and groups that are NULL, destroyed or foreign: each call recognises them without following the pointer.
// Those of a process in the one that was forked from it: there each call on them, and a new group, is refused at once.
// Also calls without a pointer for their result.
#define _GNU_SOURCE  // alarm, fork
#include <sys/wait.h>
#include <unistd.h>

#include "suites/errors/errors.h"

// ---- Every call, on an invalid object ----------------------------------------------------------

static ncclResult_t dispatch(void* handle) {
    return ncclEpDispatch((ncclEpHandle_t)handle, NULL, 0, NULL, 0, NULL, 0, 0, NULL, NULL);
}

static ncclResult_t combine(void* handle) {
    return ncclEpCombine((ncclEpHandle_t)handle, NULL, 0, NULL, 0, NULL, 0, 0, NULL, NULL);
}

static ncclResult_t complete(void* handle) { return ncclEpComplete((ncclEpHandle_t)handle, NULL, NULL); }

static ncclResult_t num_recv_tokens(void* handle) {
    unsigned count = 77;
    const ncclResult_t result = ncclEpHandleGetNumRecvTokens((ncclEpHandle_t)handle, &count);
    EP_CHECK_EQ_U64(count, 77);
    return result;
}

static ncclResult_t wait_num_recv_tokens(void* handle) {
    unsigned count = 77;
    const ncclResult_t result = ncclEpHandleWaitNumRecvTokens((ncclEpHandle_t)handle, 0, &count);
    EP_CHECK_EQ_U64(count, 77);
    return result;
}

static ncclResult_t update_handle(void* handle) {
    return ncclEpHandleUpdate((ncclEpHandle_t)handle, NULL, NULL, 0, NULL);
}

static ncclResult_t destroy_handle(void* handle) { return ncclEpHandleDestroy((ncclEpHandle_t)handle); }

static ncclResult_t destroy_group(void* group) { return ncclEpGroupDestroy((ncclEpGroup_t)group, NULL); }

static ncclResult_t create_tensor(void* group) {
    ncclNDTensor_t tensor;
    return ncclEpTensorCreate((ncclEpGroup_t)group, &tensor, 1, ncclInt8, NCCL_EP_TENSOR_TAG_NONE, 1, 1, 1, 1, 1);
}

static ncclResult_t create_handle(void* group) {
    ncclEpHandle_t handle = NULL;
    const ncclResult_t result = ncclEpCreateHandle(&handle, (ncclEpGroup_t)group, NULL, NULL, 0, NULL, NULL, false);
    EP_CHECK(handle == NULL);
    return result;
}

static ncclResult_t handle_open(void* group) {
    ncclEpHandle_t handle = NULL;
    const ncclResult_t result = ncclEpHandleOpen(&handle, (ncclEpGroup_t)group, 0);
    EP_CHECK(handle == NULL);
    return result;
}

static ncclResult_t async_error(void* group) {
    ncclResult_t state = ncclInProgress;
    const ncclResult_t result = ncclEpGetAsyncError((ncclEpGroup_t)group, &state);
    EP_CHECK_EQ_I64(state, ncclInProgress);
    return result;
}

static ncclResult_t set_choice(void* group) {
    return ncclEpSetChoice((ncclEpGroup_t)group, NCCL_EP_OPERATION_LL_DISPATCH, NULL);
}

static ncclResult_t set_selector(void* group) { return ncclEpSetSelector((ncclEpGroup_t)group, NULL, NULL); }

static ncclResult_t count_rows(void* group) { return ncclEpGroupCountRows((ncclEpGroup_t)group, NULL); }
static ncclResult_t time_waits(void* group) { return ncclEpGroupTimeWaits((ncclEpGroup_t)group, NULL); }
static ncclResult_t time_combine_waits(void* group) { return ncclEpGroupTimeCombineWaits((ncclEpGroup_t)group, NULL); }

static ncclResult_t memory_alloc(void* group) {
    void* memory = NULL;
    const ncclResult_t result = ncclEpMemAlloc((ncclEpGroup_t)group, &memory, 16);
    EP_CHECK(memory == NULL);
    return result;
}

static ncclResult_t memory_free(void* group) { return ncclEpMemFree((ncclEpGroup_t)group, group); }

static ncclResult_t memory_register(void* group) { return ncclEpMemRegister((ncclEpGroup_t)group, NULL, 16, NULL); }

static ncclResult_t memory_deregister(void* group) { return ncclEpMemDeregister((ncclEpGroup_t)group, group); }

static ncclResult_t memory_info(void* group) {
    ncclEpMemInfo_t info = {.size = sizeof(info), .object = 77};
    const ncclResult_t result = ncclEpMemInfo((ncclEpGroup_t)group, NULL, &info);
    EP_CHECK_EQ_U64(info.object, 77);
    return result;
}

static ncclResult_t pool_use(void* group) { return ncclEpPoolUse((ncclEpGroup_t)group, NULL, 0); }

typedef struct {
    ncclResult_t (*call)(void* object);
    const char* null;  // id of the row for NULL; NULL if that is a successful no-op
    const char* dead;
    const char* foreign;
} ObjectCall;

static const ObjectCall kHandleCalls[] = {
    {dispatch, "dispatch-handle-null", "dispatch-handle-dead", "dispatch-handle-foreign"},
    {combine, "combine-handle-null", "combine-handle-dead", "combine-handle-foreign"},
    {complete, "complete-handle-null", "complete-handle-dead", "complete-handle-foreign"},
    {num_recv_tokens, "num-recv-handle-null", "num-recv-handle-dead", "num-recv-handle-foreign"},
    {wait_num_recv_tokens, "wait-num-recv-handle-null", "wait-num-recv-handle-dead", "wait-num-recv-handle-foreign"},
    {update_handle, "handle-update-null", "handle-update-dead", "handle-update-foreign"},
    {destroy_handle, NULL, "handle-destroy-dead", "handle-destroy-foreign"},
};

static const ObjectCall kGroupCalls[] = {
    {create_tensor, "tensor-create-group-null", "tensor-create-group-dead", "tensor-create-group-foreign"},
    {create_handle, "handle-group-null", "handle-group-dead", "handle-group-foreign"},
    {handle_open, "handle-open-group-null", "handle-open-group-dead", "handle-open-group-foreign"},
    {async_error, "async-error-group-null", "async-error-group-dead", "async-error-group-foreign"},
    {set_choice, "set-choice-group-null", "set-choice-group-dead", "set-choice-group-foreign"},
    {set_selector, "set-selector-group-null", "set-selector-group-dead", "set-selector-group-foreign"},
    {count_rows, "count-rows-group-null", "count-rows-group-dead", "count-rows-group-foreign"},
    {time_waits, "time-waits-group-null", "time-waits-group-dead", "time-waits-group-foreign"},
    {time_combine_waits, "time-combine-waits-group-null", "time-combine-waits-group-dead",
     "time-combine-waits-group-foreign"},
    {memory_alloc, "mem-alloc-group-null", "mem-alloc-group-dead", "mem-alloc-group-foreign"},
    {memory_free, "mem-free-group-null", "mem-free-group-dead", "mem-free-group-foreign"},
    {memory_register, "mem-register-group-null", "mem-register-group-dead", "mem-register-group-foreign"},
    {memory_deregister, "mem-deregister-group-null", "mem-deregister-group-dead", "mem-deregister-group-foreign"},
    {memory_info, "mem-info-group-null", "mem-info-group-dead", "mem-info-group-foreign"},
    {pool_use, "pool-use-group-null", "pool-use-group-dead", "pool-use-group-foreign"},
    {destroy_group, NULL, "group-destroy-dead", "group-destroy-foreign"},
};

static void check_object_calls(const ObjectCall* calls, size_t num_calls, void* dead, void* of_other_kind) {
    int local = 0;
    void* const foreign[] = {&local, (void*)(uintptr_t)1, (void*)UINTPTR_MAX, of_other_kind};
    for (size_t i = 0; i < num_calls; ++i) {
        const ObjectCall* c = &calls[i];
        if (c->null != NULL) EP_REFUSED(c->null, c->call(NULL));
        else EP_CHECK_NCCL(c->call(NULL));
        EP_REFUSED(c->dead, c->call(dead));
        for (size_t f = 0; f < COUNT(foreign); ++f) EP_REFUSED(c->foreign, c->call(foreign[f]));
    }
}

LL_SESSION_TEST(dead_and_foreign_objects) {
    Session dead = open_session(env, NCCL_EP_ALGO_LOW_LATENCY);
    close_session(&dead);
    check_object_calls(kHandleCalls, COUNT(kHandleCalls), dead.handle, session->group);
    check_object_calls(kGroupCalls, COUNT(kGroupCalls), dead.group, session->handle);
    check_works(session);

    // Destroys the group while the handle is alive.
    EP_CHECK_NCCL(ncclEpGroupDestroy(session->group, env->stream));
    EP_REFUSED("dispatch-group-destroyed", dispatch(session->handle));
    EP_REFUSED("combine-group-destroyed", combine(session->handle));
    EP_REFUSED("complete-group-destroyed", complete(session->handle));
    EP_REQUIRE_NCCL(open_group(session));
    EP_CHECK_NCCL(ncclEpHandleDestroy(session->handle));
    EP_REQUIRE_NCCL(open_handle(session));
}

LL_SESSION_TEST(places_for_results) {
    EP_REFUSED("version-out-null", ncclEpGetVersion(NULL));
    EP_REFUSED("async-error-out-null", ncclEpGetAsyncError(session->group, NULL));
    EP_REFUSED("count-rows-align", ncclEpGroupCountRows(session->group, (int64_t*)0x7f61a7fc5));
    EP_REFUSED("time-waits-align", ncclEpGroupTimeWaits(session->group, (int64_t*)0x7f61a7fc5));
    EP_REFUSED("time-combine-waits-align", ncclEpGroupTimeCombineWaits(session->group, (int64_t*)0x7f61a7fc5));
    EP_REFUSED("handle-open-out-null", ncclEpHandleOpen(NULL, session->group, 0));
    unsigned count = 77;
    EP_REFUSED("num-recv-ll", ncclEpHandleGetNumRecvTokens(session->handle, &count));
    EP_REFUSED("wait-num-recv-ll", ncclEpHandleWaitNumRecvTokens(session->handle, 0, &count));
    EP_CHECK_EQ_U64(count, 77);
}

HT_SESSION_TEST(ht_place_for_a_result) {
    EP_REFUSED("num-recv-out-null", ncclEpHandleGetNumRecvTokens(session->handle, NULL));
    EP_REFUSED("wait-num-recv-out-null", ncclEpHandleWaitNumRecvTokens(session->handle, 1, NULL));
    unsigned count = 77;
    EP_CHECK_NCCL(ncclEpHandleGetNumRecvTokens(session->handle, &count));
    EP_CHECK_EQ_U64(count, max_recv_rows(session));
}

// ---- A forked process --------------------------------------------------------------------------

enum { kMostSeconds = 20 };

// Not EP_REFUSED, which asks CUDA for its last error: that does not work in a forked process.
static void expect_refused(const char* function, ncclResult_t result) {
    char given[64], text[kMostText];
    snprintf(given, sizeof(given), "%s:", function);
    write_refusal("process-forked", given, text);
    EP_CHECK_RESULT(result, ncclInvalidUsage);
    if (!ep_check(EP_HERE("process-forked"), strcmp(ep_last_error(), text) == 0)) {
        fprintf(stderr, "got:      %s\nexpected: %s\n", ep_last_error(), text);
    }
}

// What releases something succeeds and does nothing.
static void check_forked_calls(const ObjectCall* calls, size_t num_calls, void* object) {
    for (size_t i = 0; i < num_calls; ++i) {
        const ObjectCall* c = &calls[i];
        if (c->call == destroy_handle || c->call == destroy_group || c->call == memory_free ||
            c->call == memory_deregister) {
            EP_CHECK_NCCL(c->call(object));
        } else {
            char function[kMostText];
            write_refusal(c->dead, "", function);
            function[strcspn(function, ":")] = '\0';
            expect_refused(function, c->call(object));
        }
    }
}

static void check_child(Session* session) {
    expect_refused("ncclEpDispatch", make_valid_call(session, kDispatch, 0));
    expect_refused("ncclEpCombine", make_valid_call(session, kCombine, 0));
    expect_refused("ncclEpCreateHandle", make_valid_call(session, kCreateHandle, 0));
    expect_refused("ncclEpCreateGroup", open_group(session));
    EP_CHECK(ncclEpPoolAlloc(64, 0, session->env->stream) == NULL);
    ncclEpPoolFree(NULL, 64, 0, session->env->stream);
    ncclNDTensor_t tensor;
    memset(&tensor, 0, sizeof(tensor));
    EP_CHECK_NCCL(ncclEpTensorDestroy(session->group, &tensor));
    check_forked_calls(kHandleCalls, COUNT(kHandleCalls), session->handle);
    check_forked_calls(kGroupCalls, COUNT(kGroupCalls), session->group);
    int version = 0;
    EP_CHECK_NCCL(ncclEpGetVersion(&version));
}

// Its exit status is 0 if all checks passed.
static pid_t fork_child(Session* session) {
    const uint64_t failed = ep_failed();
    fflush(NULL);
    const pid_t child = fork();
    EP_REQUIRE(child >= 0);
    if (child > 0) return child;
    alarm(kMostSeconds);  // a call that waits ends the child
    check_child(session);
    fflush(NULL);
    _exit(ep_failed() == failed ? 0 : 1);  // without the parent's exit handlers
}

static void check_with(EpEnv* env, ncclEpAlgorithm_t algorithm) {
    Session session = open_session(env, algorithm);
    check_works(&session);
    int status = -1;
    const pid_t child = fork_child(&session);
    EP_REQUIRE(waitpid(child, &status, 0) == child);
    // All its checks passed, and no call waited.
    EP_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    finish_session(&session);
}

EP_TEST_EACH(forked_process) { check_with(env, algorithm); }
