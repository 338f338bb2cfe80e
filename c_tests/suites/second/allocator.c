// The memory of handles comes from a caller's allocator, with its context, and goes back when the group ends.
#include "suites/second/run.h"

typedef struct {
    unsigned calls, live, fails_at;  // from 1 on; 0: none fails
    bool frees_badly;                // reports a failure
    size_t shift;                    // of what is given
} Counting;

static cudaError_t count_alloc(void** memory, size_t bytes, void* context) {
    Counting* counting = context;
    if (++counting->calls == counting->fails_at) return cudaErrorMemoryAllocation;
    EP_REQUIRE_CUDA(cudaMalloc(memory, bytes + counting->shift));
    *memory = (char*)*memory + counting->shift;
    ++counting->live;
    return cudaSuccess;
}

static cudaError_t count_free(void* memory, void* context) {
    Counting* counting = context;
    EP_REQUIRE_CUDA(cudaFree((char*)memory - counting->shift));
    --counting->live;
    return counting->frees_badly ? cudaErrorInvalidValue : cudaSuccess;
}

static ncclEpGroup_t group_with(const EpEnv* env, const Case* test, Counting* counting) {
    ncclEpGroupConfig_t config = config_of(env, test);
    config.alloc = (ncclEpAllocConfig_t){count_alloc, count_free, counting};
    ncclEpGroup_t group = NULL;
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group, env->comm, &config));
    return group;
}

static const Kind kKinds[] = {kLlExperts, kLlRanks, kHtFlat, kHtZones};

static Case case_of(const EpEnv* env, Kind kind) {
    Case test = kind == kLlExperts || kind == kLlRanks ? kSmallLl : kSmallHt;
    test.kind = kind;
    test.alignment = 4;
    test.recv_rows = kind == kHtFlat || kind == kHtZones ? 40 * (unsigned)env->size : 0;
    return test;
}

EP_TEST(handles_have_memory_of_an_allocator) {
    // The backend of the CPU has no such memory.
    const unsigned needed = ep_on_host_backend() ? 0 : 2;
    for (size_t i = 0; i < COUNT(kKinds); ++i) {
        Counting counting = {0};
        Case test = case_of(env, kKinds[i]);
        Run run, stays;
        ncclEpGroup_t group = group_with(env, &test, &counting);
        run_open(&run, env, group, &test, 900 + i);
        run_open(&stays, env, group, &test, 910 + i);
        EP_CHECK_EQ_U64(counting.calls, 0);
        run_route(&stays);
        for (unsigned round = 0; round < 3; ++round) {
            // An ended handle's memory serves the next one.
            run_route(&run);
            run_exchange(&run, NCCL_EP_FWD_PASS);
            if (!is_ll(&test)) run_exchange(&run, NCCL_EP_BWD_PASS);
            run_end_handle(&run);
            run_renew(&run, 930 + 10 * round + i);
        }
        run_exchange(&stays, NCCL_EP_FWD_PASS);
        test.in_memory = true;
        run_route(&run);
        run_exchange(&run, NCCL_EP_FWD_PASS);
        run_end_handle(&run);
        // Over several nodes LL has it in the library's all the same, so from here.
        EP_CHECK_EQ_U64(counting.live, needed);
        EP_CHECK_EQ_U64(counting.calls, needed);
        EP_CHECK_NCCL(ncclEpGroupDestroy(group));
        EP_CHECK_EQ_U64(counting.live, 0);
        run_close(&stays);
        run_close(&run);
    }
}

// A handle that gets no memory; what the other ranks make of that is theirs to say.
static void refuse_handle(const Run* run, ncclResult_t expected, const char* words) {
    Call call;
    call_set(&call, run, NCCL_EP_FWD_PASS);
    const ncclEpHandleConfig_t config = handle_config_of(run->test);
    ncclEpHandle_t handle = NULL;
    const ncclResult_t result = ncclEpCreateHandle(&handle, run->group, layout_of(run->test), &call.views[kIds].tensor,
                                                   NULL, &config, run->env->stream);
    if (words != NULL) CHECK_REFUSED(result, expected, words);
    else EP_CHECK(result == ncclSuccess || result == ncclRemoteError);
    EP_CHECK((handle != NULL) == (result == ncclSuccess));
    ep_sync(run->env);
    ep_barrier();
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    forget_lines();
}

EP_TEST(handles_without_memory_are_not_made) {
    if (ep_on_host_backend()) {
        ep_skip("the backend of the CPU has no such memory");
        return;
    }
    for (size_t i = 0; i < COUNT(kKinds); ++i) {
        const Case test = case_of(env, kKinds[i]);
        // All ranks, then one of them; over several nodes LL wants the same handles on all ranks.
        const bool fails = env->rank == 0 || (is_ll(&test) && !ranks_share_a_node());
        Counting counting = {.fails_at = 1};
        Run run;
        ncclEpGroup_t group = group_with(env, &test, &counting);
        run_open(&run, env, group, &test, 920 + i);
        const ncclResult_t failed = ncclSystemError;
        refuse_handle(&run, failed, "config.alloc.alloc_fn: failed with CUDA error 2");
        counting.fails_at = fails ? 2 : 0;
        refuse_handle(&run, failed, fails ? "config.alloc.alloc_fn: failed" : NULL);
        counting.shift = fails ? 4 : 0;
        refuse_handle(&run, failed, fails ? "alloc_fn: gave memory at no multiple of 16" : NULL);
        counting.shift = 0;
        run_route(&run);
        run_exchange(&run, NCCL_EP_FWD_PASS);
        run_end_handle(&run);
        counting.frees_badly = true;
        CHECK_REFUSED(ncclEpGroupDestroy(group), failed, "config.alloc.free_fn: failed with CUDA error 1");
        EP_CHECK_EQ_U64(counting.live, 0);
        run_close(&run);
    }
}
