// What a call does and costs in the library itself, beside a driver that does nothing: no memory is allocated or freed,
// so many calls of the driver, and so much time. Run alone: `NCCLEP_HOSTSIM_WITH_GPU=1 target/c/simt/host_path`.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/harness.h"
#include "simt/host_path/resting_driver.h"

enum { kTokens = 32, kTopK = 4, kHidden = 64, kExperts = 8, kMostTensors = 3, kCalls = 20000 };

typedef struct {
    const ncclNDTensor_t* inputs[kMostTensors];
    ncclNDTensor_t* outputs[kMostTensors];
    ncclNDTensor_t* locals[1];
    unsigned num_inputs, num_outputs, num_locals;
} Lists;

// One handle, its tensors, and what its operations are called with.
typedef struct {
    const EpEnv* env;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    ncclNDTensor_t tokens, topk_idx, weights, counter, combined;  // [kTokens, ...], [kExperts]
    ncclNDTensor_t rows, row_idx, row_weights;                    // what dispatch gives
    Lists dispatch, combine;
    unsigned send_only;
    cudaStream_t completed_on;
} Subject;

// ---- Preparation --------------------------------------------------------------------------------

static void open_subject(Subject* subject, const EpEnv* env, ncclEpAlgorithm_t algorithm) {
    memset(subject, 0, sizeof(*subject));
    subject->env = env;
    subject->group = ep_group_create(env, algorithm, kExperts, kTokens, kHidden * sizeof(uint16_t));
    const ncclEpGroup_t group = subject->group;
    subject->tokens = ep_tensor_2d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kTokens, kHidden);
    subject->combined = ep_tensor_2d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kTokens, kHidden);
    subject->topk_idx = ep_tensor_2d(group, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens, kTopK);
    subject->weights = ep_tensor_2d(group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, kTokens, kTopK);
    subject->counter = ep_tensor_1d(group, ncclInt32, NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, kExperts);
    int64_t ids[kTokens * kTopK];
    for (unsigned n = 0; n < kTokens * kTopK; ++n) ids[n] = n % kExperts;
    ep_tensor_upload(&subject->topk_idx, ids);
    EP_REQUIRE_NCCL(ncclEpCreateHandle(&subject->handle, group, &subject->topk_idx, NULL, 0, NULL, env->stream, false));
}

static void close_subject(Subject* subject) {
    ncclNDTensor_t* tensors[] = {&subject->tokens,   &subject->topk_idx, &subject->weights, &subject->counter,
                                 &subject->combined, &subject->rows,     &subject->row_idx, &subject->row_weights};
    for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); ++i) {
        if (tensors[i]->data == NULL) continue;  // not of this mode
        EP_CHECK_NCCL(ncclEpTensorDestroy(subject->group, tensors[i]));
    }
    EP_CHECK_NCCL(ncclEpHandleDestroy(subject->handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(subject->group, subject->env->stream));
}

static void open_ll(Subject* subject, const EpEnv* env) {
    open_subject(subject, env, NCCL_EP_ALGO_LOW_LATENCY);
    subject->rows = ep_tensor_3d(subject->group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kExperts, kTokens, kHidden);
    subject->dispatch = (Lists){{&subject->tokens}, {&subject->rows}, {&subject->counter}, 1, 1, 1};
    subject->combine = (Lists){{&subject->rows}, {&subject->combined}, {&subject->weights}, 1, 1, 1};
}

static void open_ht(Subject* subject, const EpEnv* env) {
    open_subject(subject, env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    const ncclEpGroup_t group = subject->group;
    subject->rows = ep_tensor_2d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kTokens, kHidden);
    subject->row_idx = ep_tensor_2d(group, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens, kTopK);
    subject->row_weights = ep_tensor_2d(group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, kTokens, kTopK);
    subject->dispatch = (Lists){{&subject->tokens, &subject->topk_idx, &subject->weights},
                                {&subject->rows, &subject->row_idx, &subject->row_weights},
                                {NULL},
                                3,
                                3,
                                0};
    subject->combine = (Lists){{&subject->rows}, {&subject->combined}, {NULL}, 1, 1, 0};
}

// ---- Calls --------------------------------------------------------------------------------------

static ncclResult_t complete(const Subject* subject) {
    return subject->send_only ? ncclEpComplete(subject->handle, NULL, subject->completed_on) : ncclSuccess;
}

static ncclResult_t start_dispatch(const Subject* subject) {
    const Lists* lists = &subject->dispatch;
    return ncclEpDispatch(subject->handle, lists->inputs, lists->num_inputs, lists->outputs, lists->num_outputs,
                          lists->locals, lists->num_locals, subject->send_only, NULL, subject->env->stream);
}

static ncclResult_t dispatch(const Subject* subject) {
    const ncclResult_t result = start_dispatch(subject);
    return result == ncclSuccess ? complete(subject) : result;
}

static ncclResult_t combine(const Subject* subject) {
    const Lists* lists = &subject->combine;
    const ncclResult_t result = ncclEpCombine(
        subject->handle, lists->inputs, lists->num_inputs, lists->outputs, lists->num_outputs,
        lists->locals, lists->num_locals, subject->send_only, NULL, subject->env->stream);
    return result == ncclSuccess ? complete(subject) : result;
}

// How many calls of the driver one call makes.
typedef struct {
    unsigned launches, records, waits;
} Expected;

static const Expected kWhole = {1, 1, 0};
// The group's order is kept by an event behind the send phase, the track by one behind each phase.
static const Expected kStaged = {2, 3, 0};
// The completion waits for its send phase, which waits for the receive phases before, that of its
// track and that which used the handle's memory.
static const Expected kStagedAcross = {2, 3, 3};

static void measure(const Subject* subject, const char* name, Expected expected, ncclResult_t (*call)(const Subject*)) {
    for (int i = 0; i < 2; ++i) EP_CHECK_NCCL(call(subject));  // both tracks have been in use
    ep_sync(subject->env);
    ncclResult_t result = ncclSuccess;
    driver_rest(0);
    const uint64_t calls_before = memory_calls();
    const double begin = ep_seconds();
    for (unsigned i = 0; i < kCalls && result == ncclSuccess; ++i) result = call(subject);
    const double end = ep_seconds();
    const uint64_t calls = memory_calls() - calls_before;
    const DriverCalls asked = driver_wake();
    EP_CHECK_NCCL(result);
    EP_CHECK_EQ_U64(calls, 0);
    EP_CHECK_EQ_U64(asked.launches, expected.launches * kCalls);
    EP_CHECK_EQ_U64(asked.records, expected.records * kCalls);
    EP_CHECK_EQ_U64(asked.waits, expected.waits * kCalls);
    printf("%-32s %5.0f ns\n", name, 1e9 * (end - begin) / kCalls);
}

// What the driver is asked for by a dispatch on `stream`.
static DriverCalls asked_by_dispatch(const Subject* subject, cudaStream_t stream, uint64_t capture) {
    EpEnv own = *subject->env;
    own.stream = stream;
    Subject there = *subject;
    there.env = &own;
    driver_rest(capture);
    const ncclResult_t result = dispatch(&there);
    const DriverCalls asked = driver_wake();
    EP_CHECK_NCCL(result);
    EP_CHECK_EQ_U64(asked.launches, 1);
    EP_CHECK_EQ_U64(asked.records, 1);
    EP_CHECK_EQ_U64(asked.broken, 0);
    return asked;
}

// An operation waits for the one before it, outside of graphs and in each graph for itself; not
// where that is known to be on the same stream, which is not asked of captured ones. Nothing is
// enqueued, so the driver may call any stream captured.
static void check_order(const Subject* subject) {
    cudaStream_t streams[2];
    ep_open_streams(streams, 2);
    const cudaStream_t a = streams[0], b = streams[1];
    asked_by_dispatch(subject, b, 0);
    const DriverCalls on_a = asked_by_dispatch(subject, a, 0);
    EP_CHECK_EQ_U64(on_a.waits, 1);
    EP_CHECK_EQ_U64(asked_by_dispatch(subject, a, 0).waits, 0);

    EP_CHECK_EQ_U64(asked_by_dispatch(subject, a, 7).waits, 0);
    const DriverCalls branch = asked_by_dispatch(subject, b, 7);
    EP_CHECK_EQ_U64(branch.waits, 1);
    EP_CHECK(branch.waited == branch.recorded && branch.waited != on_a.recorded);
    EP_CHECK_EQ_U64(asked_by_dispatch(subject, b, 7).waits, 1);
    EP_CHECK_EQ_U64(asked_by_dispatch(subject, a, 8).waits, 0);

    const DriverCalls after = asked_by_dispatch(subject, b, 0);
    EP_CHECK_EQ_U64(after.waits, 1);
    EP_CHECK(after.waited == on_a.recorded);
    ep_close_streams(streams, 2);
}

// Captures that take turns do not disturb each other, up to four; a fifth takes the place of the one
// that was used the longest time ago, and that one cannot go on.
static void check_turns(const Subject* subject) {
    enum { kFirst = 21, kCaptures = 4 };
    const void* marks[kCaptures];
    for (int turn = 0; turn < 3; ++turn) {
        for (int i = 0; i < kCaptures; ++i) {
            const DriverCalls asked = asked_by_dispatch(subject, subject->env->stream, (uint64_t)(kFirst + i));
            EP_CHECK_EQ_U64(asked.waits, turn == 0 ? 0 : 1);
            EP_CHECK(turn == 0 || asked.waited == marks[i]);
            marks[i] = asked.recorded;
        }
    }
    asked_by_dispatch(subject, subject->env->stream, kFirst);
    EP_CHECK_EQ_U64(asked_by_dispatch(subject, subject->env->stream, kFirst + kCaptures).waits, 0);
    driver_rest(kFirst + 1);
    const ncclResult_t lost = dispatch(subject);
    const DriverCalls asked = driver_wake();
    EP_CHECK_EQ_U64(lost, ncclInvalidUsage);
    EP_CHECK_STR_CONTAINS(ncclEpGetLastError(), "stream: must be in one of at most 4 captures that take turns");
    EP_CHECK_EQ_U64(asked.waits + asked.launches + asked.records, 0);
    EP_CHECK_EQ_U64(asked_by_dispatch(subject, subject->env->stream, kFirst).waits, 1);
}

static ncclResult_t complete_in(const Subject* subject, uint64_t capture, DriverCalls* asked) {
    driver_rest(capture);
    const ncclResult_t result = complete(subject);
    *asked = driver_wake();
    return result;
}

// A staged operation is completed in the graph that it was sent in, and nowhere else: a stream that
// is not captured does not join the capture.
static void check_completion(const Subject* subject) {
    driver_rest(7);
    const ncclResult_t sent = start_dispatch(subject);
    driver_wake();
    EP_CHECK_NCCL(sent);
    DriverCalls asked;
    EP_CHECK_EQ_U64(complete_in(subject, 0, &asked), ncclInvalidUsage);
    EP_CHECK_EQ_U64(asked.waits + asked.launches + asked.records, 0);
    EP_CHECK_EQ_U64(complete_in(subject, 8, &asked), ncclInvalidUsage);
    EP_CHECK_EQ_U64(asked.waits + asked.launches + asked.records, 0);
    EP_CHECK_NCCL(complete_in(subject, 7, &asked));
    EP_CHECK_EQ_U64(asked.waits, 1);
    EP_CHECK_EQ_U64(asked.launches, 1);
    EP_CHECK_EQ_U64(asked.records, 1);
}

// ---- Cases --------------------------------------------------------------------------------------

static void measure_whole(Subject* subject, const char* of_dispatch, const char* of_combine) {
    measure(subject, of_dispatch, kWhole, dispatch);
    measure(subject, of_combine, kWhole, combine);
    check_order(subject);
    check_turns(subject);
    close_subject(subject);
}

EP_TEST(ll) {
    Subject subject;
    open_ll(&subject, env);
    measure_whole(&subject, "LL dispatch", "LL combine");
}

EP_TEST(ll_staged) {
    Subject subject;
    open_ll(&subject, env);
    subject.send_only = 1;
    subject.completed_on = env->stream;
    measure(&subject, "LL staged dispatch, completion", kStaged, dispatch);
    measure(&subject, "LL staged combine, completion", kStaged, combine);
    ep_open_streams(&subject.completed_on, 1);
    measure(&subject, "LL dispatch, completed elsewhere", kStagedAcross, dispatch);
    EP_CHECK_CUDA(cudaStreamSynchronize(subject.completed_on));
    ep_close_streams(&subject.completed_on, 1);
    subject.completed_on = env->stream;
    check_completion(&subject);
    close_subject(&subject);
}

EP_TEST_HT(ht) {
    Subject subject;
    open_ht(&subject, env);
    measure_whole(&subject, "HT dispatch", "HT combine");
}

// What the library allocates is counted here: a test that cannot fail is none.
EP_TEST(memory_is_counted) {
    Subject subject;
    open_ll(&subject, env);
    ncclEpHandle_t another = NULL;
    const uint64_t before = memory_calls();
    const ncclResult_t result = ncclEpCreateHandle(&another, subject.group, &subject.topk_idx, NULL,
                                                   0, NULL, env->stream, false);
    const uint64_t after = memory_calls();
    EP_CHECK_NCCL(result);
    EP_CHECK(after > before);
    EP_CHECK_NCCL(ncclEpHandleDestroy(another));
    close_subject(&subject);
}
