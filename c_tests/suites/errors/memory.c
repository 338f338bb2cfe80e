// Refusals of memory that peers map: a rank's own arguments, one rank that refuses for all, ranks
// that make different calls, a rank that never calls, captures and graphs.
#include "harness/graphs.h"
#include "suites/errors/errors.h"

enum { kBytes = 4096 };

static void* alloc(ncclEpGroup_t group) {
    void* memory = NULL;
    EP_REQUIRE_NCCL(ncclEpMemAlloc(group, &memory, kBytes));
    return memory;
}

// Every rank has the same wrong argument.
LL_SESSION_TEST(memory_arguments) {
    const ncclEpGroup_t group = session->group;
    void* memory = alloc(group);
    void* none = NULL;
    EP_REFUSED("mem-alloc-out-null", ncclEpMemAlloc(group, NULL, 16));
    EP_REFUSED("mem-alloc-bytes", ncclEpMemAlloc(group, &none, 0));
    EP_CHECK(none == NULL);
    void* const foreign[] = {NULL, session->tokens, (char*)memory + 16};
    for (size_t i = 0; i < COUNT(foreign); ++i) {
        EP_REFUSED("mem-free-ptr", ncclEpMemFree(group, foreign[i]));
        EP_REFUSED("mem-deregister-ptr", ncclEpMemDeregister(group, foreign[i]));
    }
    EP_REFUSED("mem-deregister-ptr", ncclEpMemDeregister(group, memory));
    EP_CHECK_NCCL(ncclEpMemFree(group, memory));
    EP_REFUSED("mem-free-ptr", ncclEpMemFree(group, memory));
}

LL_SESSION_TEST(memory_questions) {
    void* memory = alloc(session->group);
    ncclEpMemInfo_t info = {.size = sizeof(info), .object = 77};
    EP_REFUSED("mem-info-out-null", ncclEpMemInfo(session->group, memory, NULL));
    EP_REFUSED("mem-info-ptr", ncclEpMemInfo(session->group, session->ids, &info));
    info.size = 55;
    EP_REFUSED_AS("mem-info-size", ncclEpMemInfo(session->group, memory, &info), "got 55, expected 56 or more");
    EP_CHECK_EQ_U64(info.object, 77);
    EP_TEXT("pool-use-ptr", ncclEpPoolUse(session->group, session->ids, 16),
            "ncclEpPoolUse: ptr: must be in memory of ncclEpMemAlloc or ncclEpMemRegister");
    EP_REFUSED("pool-use-ptr", ncclEpPoolUse(session->group, memory, kBytes + 1));
    EP_REFUSED("pool-use-align", ncclEpPoolUse(session->group, (char*)memory + 256, 512));
    EP_CHECK_NCCL(ncclEpPoolUse(session->group, memory, kBytes));
    void* piece = ncclEpPoolAlloc(64, 0, NULL);
    EP_REFUSED_AS("pool-use-bytes", ncclEpPoolUse(session->group, memory, 512), "got 512, expected 4096");
    ncclEpPoolFree(piece, 64, 0, NULL);
    EP_CHECK_NCCL(ncclEpPoolUse(session->group, memory, 512));
    EP_CHECK(ncclEpPoolAlloc(513, 0, NULL) == NULL);
    EP_CHECK_NCCL(ncclEpPoolUse(session->group, NULL, 0));
    EP_CHECK_NCCL(ncclEpMemFree(session->group, memory));
}

LL_SESSION_TEST(memory_of_callers) {
    const ncclEpGroup_t group = session->group;
    char* memory = ep_device_alloc(kBytes);
    int window = 0;
    EP_REFUSED("mem-register-ptr-null", ncclEpMemRegister(group, NULL, 16, NULL));
    EP_REFUSED_AS("mem-register-align", ncclEpMemRegister(group, memory + 8, 16, NULL),
                  "got %p, expected a multiple of 16", (void*)(memory + 8));
    EP_REFUSED("mem-register-bytes", ncclEpMemRegister(group, memory, 0, NULL));
    EP_REFUSED("mem-register-window", ncclEpMemRegister(group, memory, 16, &window));
    EP_REFUSED_AS("mem-register-end", ncclEpMemRegister(group, memory + 16, kBytes, NULL),
                  "got 4096, expected at most *");
    static char on_host[64] __attribute__((aligned(16)));
    EP_REFUSED_AS("mem-register-kind", ncclEpMemRegister(group, on_host, 64, NULL),
                  "got *, expected memory of cudaMalloc");
    EP_CHECK_NCCL(ncclEpMemRegister(group, memory, 64, NULL));
    EP_REFUSED_AS("mem-register-apart", ncclEpMemRegister(group, memory + 48, 32, NULL),
                  "got 32 bytes at %p, expected none of the 64 at %p", (void*)(memory + 48), (void*)memory);
    EP_REFUSED("mem-free-ptr", ncclEpMemFree(group, memory));
    EP_CHECK_NCCL(ncclEpMemDeregister(group, memory));
    ep_device_free(memory);
}

LL_SESSION_TEST(too_much_memory_of_a_group) {
    enum { kMost = 64 };
    for (int i = 0; i < kMost; ++i) (void)alloc(session->group);
    void* none = NULL;
    EP_REFUSED("mem-alloc-many", ncclEpMemAlloc(session->group, &none, 16));
    EP_CHECK(none == NULL);
}

// One rank refuses for all, in any of the calls; the ranks then agree on the next number.
LL_SESSION_TEST(one_rank_refuses_memory) {
    if (!enough_ranks(env, 2, "mem-alloc-rank-refused")) return;
    void* memory = NULL;
    if (is_odd(env)) {
        EP_CHECK_RESULT(ncclEpMemAlloc(session->group, &memory, 0), ncclInvalidArgument);
    } else {
        EP_REFUSED_AS("mem-alloc-rank-refused", ncclEpMemAlloc(session->group, &memory, kBytes),
                      "{%d}{bytes: must not be 0}", odd_rank(env));
    }
    EP_CHECK(memory == NULL);
    memory = alloc(session->group);
    if (is_odd(env)) {
        EP_CHECK_RESULT(ncclEpMemFree(session->group, NULL), ncclInvalidArgument);
    } else {
        EP_REFUSED_AS("mem-alloc-rank-refused", ncclEpMemFree(session->group, memory),
                      "ncclEpMemFree: {%d}{ptr: must be what *}", odd_rank(env));
    }
    EP_CHECK_NCCL(ncclEpMemFree(session->group, memory));
}

LL_SESSION_TEST(ranks_make_different_memory_calls) {
    if (!enough_ranks(env, 2, "mem-alloc-operation, mem-free-object")) return;
    void* memory[2] = {alloc(session->group), alloc(session->group)};
    void* none = NULL;
    // Each names the first rank that differs from itself.
    const int named = env->rank == odd_rank(env) ? 0 : odd_rank(env);
    if (is_odd(env)) {
        EP_CHECK_RESULT(ncclEpMemFree(session->group, memory[0]), ncclInvalidUsage);
        EP_CHECK_RESULT(ncclEpMemFree(session->group, memory[0]), ncclInvalidUsage);
    } else {
        EP_REFUSED_AS("mem-alloc-operation", ncclEpMemAlloc(session->group, &none, 16), "{%d}", named);
        EP_REFUSED_AS("mem-free-object", ncclEpMemFree(session->group, memory[1]), "{%d}", named);
    }
    EP_CHECK(none == NULL);
    for (int i = 0; i < 2; ++i) EP_CHECK_NCCL(ncclEpMemFree(session->group, memory[i]));
}

static void check_session_works(const EpEnv* env) {
    Session session = open_session(env, NCCL_EP_ALGO_LOW_LATENCY);
    check_works(&session);
    EP_CHECK_NCCL(ncclEpMemFree(session.group, alloc(session.group)));
    close_session(&session);
}

static void check_refuses_memory(const Session* session, void* memory) {
    const ncclEpGroup_t group = session->group;
    void* none = NULL;
    EP_FAILED("mem-alloc-group-failed", ncclEpMemAlloc(group, &none, 16), ncclRemoteError, "{rank *}");
    EP_FAILED("mem-free-group-failed", ncclEpMemFree(group, memory), ncclRemoteError, "{rank *}");
    EP_FAILED("mem-register-group-failed", ncclEpMemRegister(group, session->ids, 16, NULL), ncclRemoteError,
              "{rank *}");
    EP_FAILED("mem-deregister-group-failed", ncclEpMemDeregister(group, memory), ncclRemoteError, "{rank *}");
    EP_CHECK_RESULT(make_valid_call(session, kDispatch, 0), ncclRemoteError);
    ncclEpMemInfo_t info = {.size = sizeof(info)};
    EP_CHECK_NCCL(ncclEpMemInfo(group, memory, &info));
}

// One rank never calls: the group has failed on the others, whose memory stays as it is.
static void miss(const EpEnv* env, bool frees) {
    EpEnv own = open_own(env);
    Session session = open_timed_session(&own, NCCL_EP_ALGO_LOW_LATENCY, kShortTimeoutMs);
    void* memory = alloc(session.group);
    void* none = NULL;
    ep_barrier();
    if (!is_odd(env)) {
        const double start = ep_seconds();
        EP_REFUSED_AS("mem-alloc-deadline",
                      frees ? ncclEpMemFree(session.group, memory) : ncclEpMemAlloc(session.group, &none, 16),
                      "%s: {%d}{%d}{%d}", frees ? "ncclEpMemFree" : "ncclEpMemAlloc", env->rank, env->size,
                      kShortTimeoutMs);
        EP_CHECK(ep_seconds() - start < 0.001 * kShortTimeoutMs + 1.0);
        EP_CHECK(none == NULL);
        check_refuses_memory(&session, memory);
    }
    ep_barrier();
    // Freeing memory waits for the device, and so for the exchange.
    EP_CHECK_NCCL(ncclCommAbort(own.comm));
    close_session(&session);
    close_own(&own);
    check_session_works(env);
}

EP_TEST(a_rank_misses_a_memory_call) {
    if (!enough_ranks(env, 2, "mem-alloc-deadline, mem-*-group-failed")) return;
    miss(env, false);
    miss(env, true);
}

// Without any effect on the capture, which goes on. The CPU backend captures nothing.
LL_SESSION_TEST(memory_in_a_capture) {
    const ncclEpGroup_t group = session->group;
    void* memory = alloc(group);
    void* none = NULL;
    if (ep_begin_capture(env->stream)) {
        EP_REFUSED("mem-alloc-captured", ncclEpMemAlloc(group, &none, 16));
        EP_CHECK_RESULT(ncclEpMemFree(group, memory), ncclInvalidUsage);
        EP_CHECK_NCCL(make_valid_call(session, kDispatch, 0));
        const cudaGraph_t graph = ep_end_capture(env->stream);
        EP_REFUSED("mem-free-graphs", ncclEpMemFree(group, memory));
        // New memory may come.
        EP_CHECK_NCCL(ncclEpMemAlloc(group, &none, 16));
        EP_REQUIRE_CUDA(cudaGraphDestroy(graph));
    }
}
