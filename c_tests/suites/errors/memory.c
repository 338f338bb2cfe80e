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
    EP_INVALID("mem-alloc-out-null", ncclEpMemAlloc(group, NULL, 16), "ncclEpMemAlloc: ptr: must not be NULL");
    EP_INVALID("mem-alloc-bytes", ncclEpMemAlloc(group, &none, 0), "ncclEpMemAlloc: bytes: must not be 0");
    EP_CHECK(none == NULL);
    void* const foreign[] = {NULL, session->tokens, (char*)memory + 16};
    for (size_t i = 0; i < COUNT(foreign); ++i) {
        EP_INVALID("mem-free-ptr", ncclEpMemFree(group, foreign[i]),
                   "ncclEpMemFree: ptr: must be what ncclEpMemAlloc gave");
        EP_INVALID("mem-deregister-ptr", ncclEpMemDeregister(group, foreign[i]),
                   "ncclEpMemDeregister: ptr: must be what ncclEpMemRegister took");
    }
    EP_INVALID("mem-deregister-ptr", ncclEpMemDeregister(group, memory),
               "ncclEpMemDeregister: ptr: must be what ncclEpMemRegister took");
    EP_CHECK_NCCL(ncclEpMemFree(group, memory));
    EP_INVALID("mem-free-ptr", ncclEpMemFree(group, memory), "ncclEpMemFree: ptr: must be what ncclEpMemAlloc gave");
}

LL_SESSION_TEST(memory_questions) {
    void* memory = alloc(session->group);
    ncclEpMemInfo_t info = {.size = sizeof(info), .object = 77};
    EP_INVALID("mem-info-out-null", ncclEpMemInfo(session->group, memory, NULL),
               "ncclEpMemInfo: info: must not be NULL");
    EP_INVALID("mem-info-ptr", ncclEpMemInfo(session->group, session->ids, &info),
               "ncclEpMemInfo: ptr: must be in memory of ncclEpMemAlloc or ncclEpMemRegister");
    info.size = 55;
    EP_INVALID("mem-info-size", ncclEpMemInfo(session->group, memory, &info),
               "ncclEpMemInfo: info.size: must be the size of the structure (got 55, expected 56 or more)");
    EP_CHECK_EQ_U64(info.object, 77);
    EP_INVALID("pool-use-ptr", ncclEpPoolUse(session->group, session->ids, 16),
               "ncclEpPoolUse: ptr: must be in memory of ncclEpMemAlloc or ncclEpMemRegister");
    EP_INVALID("pool-use-ptr", ncclEpPoolUse(session->group, memory, kBytes + 1),
               "ncclEpPoolUse: ptr: must be in memory of ncclEpMemAlloc or ncclEpMemRegister (got 4097 bytes, expected "
               "at most 4096)");
    EP_INVALID("pool-use-align", ncclEpPoolUse(session->group, (char*)memory + 256, 512),
               "ncclEpPoolUse: ptr: must be a multiple of 512");
    EP_CHECK_NCCL(ncclEpPoolUse(session->group, memory, kBytes));
    void* piece = ncclEpPoolAlloc(64, 0, NULL);
    EP_INVALID("pool-use-bytes", ncclEpPoolUse(session->group, memory, 512),
               "ncclEpPoolUse: bytes: must be as many as when pieces in use were cut there (got 512, expected 4096)");
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
#define REGISTER "ncclEpMemRegister: "
    EP_INVALID("mem-register-ptr-null", ncclEpMemRegister(group, NULL, 16, NULL), REGISTER "ptr: must not be NULL");
    EP_INVALID("mem-register-align", ncclEpMemRegister(group, memory + 8, 16, NULL),
               REGISTER "ptr: must be aligned to 16 bytes (got %p, expected a multiple of 16)", (void*)(memory + 8));
    EP_INVALID("mem-register-bytes", ncclEpMemRegister(group, memory, 0, NULL), REGISTER "bytes: must not be 0");
    EP_INVALID("mem-register-window", ncclEpMemRegister(group, memory, 16, &window),
               REGISTER "nccl_window: must be NULL");
    EP_INVALID("mem-register-end", ncclEpMemRegister(group, memory + 16, kBytes, NULL),
               REGISTER "bytes: must end within the allocation that ptr is in (got 4096, expected at most *)");
    static char on_host[64] __attribute__((aligned(16)));
    EP_INVALID("mem-register-kind", ncclEpMemRegister(group, on_host, 64, NULL),
               REGISTER
               "ptr: must be memory of cudaMalloc, or of cuMemCreate with descriptors, which other processes can map "
               "(got *, expected memory of cudaMalloc)");
    EP_CHECK_NCCL(ncclEpMemRegister(group, memory, 64, NULL));
    EP_INVALID("mem-register-apart", ncclEpMemRegister(group, memory + 48, 32, NULL),
               REGISTER
               "ptr: must have nothing in common with memory that the group has (got 32 bytes at %p, expected none of "
               "the 64 at %p)",
               (void*)(memory + 48), (void*)memory);
    EP_INVALID("mem-free-ptr", ncclEpMemFree(group, memory), "ncclEpMemFree: ptr: must be what ncclEpMemAlloc gave");
    EP_CHECK_NCCL(ncclEpMemDeregister(group, memory));
    ep_device_free(memory);
}

LL_SESSION_TEST(too_much_memory_of_a_group) {
    enum { kMost = 64 };
    for (int i = 0; i < kMost; ++i) (void)alloc(session->group);
    void* none = NULL;
    EP_MISUSED("mem-alloc-many", ncclEpMemAlloc(session->group, &none, 16),
               "ncclEpMemAlloc: ep_group: has too many pieces of memory that peers map (got 65, expected at most 64)");
    EP_CHECK(none == NULL);
}

// One rank refuses for all, in any of the calls; the ranks then agree on the next number.
LL_SESSION_TEST(one_rank_refuses_memory) {
    if (!enough_ranks(env, 2, "mem-alloc-rank-refused")) return;
    void* memory = NULL;
    if (is_odd(env)) {
        EP_CHECK_RESULT(ncclEpMemAlloc(session->group, &memory, 0), ncclInvalidArgument);
    } else {
        EP_LOST("mem-alloc-rank-refused", ncclEpMemAlloc(session->group, &memory, kBytes),
                "ncclEpMemAlloc: rank %d refused: bytes: must not be 0", odd_rank(env));
    }
    EP_CHECK(memory == NULL);
    memory = alloc(session->group);
    if (is_odd(env)) {
        EP_CHECK_RESULT(ncclEpMemFree(session->group, NULL), ncclInvalidArgument);
    } else {
        EP_LOST("mem-alloc-rank-refused", ncclEpMemFree(session->group, memory),
                "ncclEpMemFree: rank %d refused: ptr: must be what *", odd_rank(env));
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
        EP_MISUSED("mem-alloc-operation", ncclEpMemAlloc(session->group, &none, 16),
                   "ncclEpMemAlloc: operation: must be the same on every rank, but rank %d differs (got "
                   "ncclEpMemAlloc, expected ncclEpMemFree)",
                   named);
        EP_MISUSED(
            "mem-free-object", ncclEpMemFree(session->group, memory[1]),
            "ncclEpMemFree: ptr: must be the same on every rank, but rank %d differs (got object 1, expected object 0)",
            named);
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
#define FAILED "the group has failed: rank *"
    EP_LOST("mem-alloc-group-failed", ncclEpMemAlloc(group, &none, 16), "ncclEpMemAlloc: " FAILED);
    EP_LOST("mem-free-group-failed", ncclEpMemFree(group, memory), "ncclEpMemFree: " FAILED);
    EP_LOST("mem-register-group-failed", ncclEpMemRegister(group, session->ids, 16, NULL),
            "ncclEpMemRegister: " FAILED);
    EP_LOST("mem-deregister-group-failed", ncclEpMemDeregister(group, memory), "ncclEpMemDeregister: " FAILED);
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
        EP_LOST("mem-alloc-deadline",
                frees ? ncclEpMemFree(session.group, memory) : ncclEpMemAlloc(session.group, &none, 16),
                "%s: rank %d of %d waited %d ms for the other ranks in an exchange of all ranks",
                frees ? "ncclEpMemFree" : "ncclEpMemAlloc", env->rank, env->size, kShortTimeoutMs);
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
        EP_MISUSED("mem-alloc-captured", ncclEpMemAlloc(group, &none, 16),
                   "ncclEpMemAlloc: ep_group: maps and frees memory once: not while the default stream is captured "
                   "into a graph, or waits for a stream that is");
        EP_CHECK_RESULT(ncclEpMemFree(group, memory), ncclInvalidUsage);
        EP_CHECK_NCCL(make_valid_call(session, kDispatch, 0));
        const cudaGraph_t graph = ep_end_capture(env->stream);
        EP_MISUSED(
            "mem-free-graphs", ncclEpMemFree(group, memory),
            "ncclEpMemFree: ptr: stays until the group ends, as graphs have operations of the group that may use it");
        // New memory may come.
        EP_CHECK_NCCL(ncclEpMemAlloc(group, &none, 16));
        EP_REQUIRE_CUDA(cudaGraphDestroy(graph));
    }
}
