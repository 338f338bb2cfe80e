// A process that is forked from one that has a group: every call on the parent's objects, and a new
// group, is refused at once; what destroys something succeeds and does nothing; the parent goes on.
#define _GNU_SOURCE  // alarm, fork
#include <sys/wait.h>
#include <unistd.h>

#include "suites/errors/errors.h"

enum { kMostSeconds = 20 };

// Not EP_REFUSED, which asks CUDA for its last error: that does not work in a forked process.
static void expect_refused(const char* function, ncclResult_t result) {
    char text[256];
    snprintf(text, sizeof(text),
             "%s: this process: was forked after a group had been made, and cannot use this "
             "library: start it anew, in Python by multiprocessing's spawn",
             function);
    EP_CHECK_RESULT(result, ncclInvalidUsage);
    if (!ep_check(EP_HERE("process-forked"), strcmp(ep_last_error(), text) == 0)) {
        fprintf(stderr, "got:      %s\nexpected: %s\n", ep_last_error(), text);
    }
}

static void check_child(Session* session) {
    cudaStream_t stream = session->env->stream;
    const ncclEpGroup_t group = session->group;
    const ncclEpHandle_t handle = session->handle;
    expect_refused("ncclEpDispatch", make_valid_call(session, kDispatch, 0));
    expect_refused("ncclEpCombine", make_valid_call(session, kCombine, 0));
    expect_refused("ncclEpCreateHandle", make_valid_call(session, kCreateHandle, 0));
    ncclEpHandle_t opened = NULL;
    expect_refused("ncclEpHandleOpen", ncclEpHandleOpen(&opened, group, 0));
    expect_refused("ncclEpHandleUpdate", ncclEpHandleUpdate(handle, NULL, NULL, 0, stream));
    expect_refused("ncclEpComplete", ncclEpComplete(handle, NULL, stream));
    unsigned rows = 0;
    expect_refused("ncclEpHandleGetNumRecvTokens", ncclEpHandleGetNumRecvTokens(handle, &rows));
    ncclResult_t failure = ncclSuccess;
    expect_refused("ncclEpGetAsyncError", ncclEpGetAsyncError(group, &failure));
    expect_refused("ncclEpSetChoice", ncclEpSetChoice(group, NCCL_EP_OPERATION_LL_COMBINE, NULL));
    expect_refused("ncclEpSetSelector", ncclEpSetSelector(group, NULL, NULL));
    expect_refused("ncclEpGroupCountRows", ncclEpGroupCountRows(group, NULL));
    expect_refused("ncclEpGroupTimeWaits", ncclEpGroupTimeWaits(group, NULL));
    expect_refused("ncclEpGroupTimeCombineWaits", ncclEpGroupTimeCombineWaits(group, NULL));
    ncclNDTensor_t tensor;
    memset(&tensor, 0, sizeof(tensor));
    expect_refused("ncclEpTensorCreate",
                   ncclEpTensorCreate(group, &tensor, 1, ncclFloat32, NCCL_EP_TENSOR_TAG_TOKENS, 16, 0, 0, 0, 0));
    expect_refused("ncclEpCreateGroup", open_group(session));
    void* memory = NULL;
    expect_refused("ncclEpMemAlloc", ncclEpMemAlloc(group, &memory, 64));
    expect_refused("ncclEpMemRegister", ncclEpMemRegister(group, session->ids, 64, NULL));
    ncclEpMemInfo_t info = {.size = sizeof(info)};
    expect_refused("ncclEpMemInfo", ncclEpMemInfo(group, session->ids, &info));
    expect_refused("ncclEpPoolUse", ncclEpPoolUse(group, NULL, 0));
    EP_CHECK(ncclEpPoolAlloc(64, 0, stream) == NULL);
    ncclEpPoolFree(NULL, 64, 0, stream);
    EP_CHECK_NCCL(ncclEpMemFree(group, session->ids));
    EP_CHECK_NCCL(ncclEpMemDeregister(group, session->ids));
    EP_CHECK_NCCL(ncclEpTensorDestroy(group, &tensor));
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, stream));
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
