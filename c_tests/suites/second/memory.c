// Handles in memory of callers: what a handle keeps is one block of bytes, which works wherever it lies. Also in
// exchanges.c, where high throughput goes on with a copy.
#include "harness/graphs.h"
#include "suites/second/run.h"

// Combined where the bytes of the dispatch are by then.
EP_TEST(a_combine_works_where_its_memory_is) {
    if (!ranks_share_a_node()) return;
    RefBuffer memory;
    Run run;
    Case test = kSmallLl;
    test.uneven = true;
    test.memory = &memory;
    for (test.kind = kLlExperts; test.kind <= kLlRanks; ++test.kind) {
        run_open(&run, env, &test, 710 + test.kind);
        ncclEpGroup_t group = group_of(env, &test);
        ncclEpHandle_t handle = run_route(&run, group);
        EP_CHECK_NCCL(run_dispatch(&run, handle, NCCL_EP_FWD_PASS));
        ep_sync(env);
        run_check_dispatch(&run, NCCL_EP_FWD_PASS);
        handle = run_move(&run, group, handle);
        EP_CHECK_NCCL(run_update(&run, handle));  // which low latency keeps on the host
        EP_CHECK_NCCL(run_combine(&run, handle, NCCL_EP_FWD_PASS));
        ep_sync(env);
        run_check_combine(&run, NCCL_EP_FWD_PASS);
        EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
        ref_buffer_free(&memory);
        EP_CHECK_NCCL(ncclEpGroupDestroy(group));
        run_close(&run);
    }
}

typedef struct {
    const Run* run;
    ncclEpHandle_t handle;
} Captured;

static void play(void* context) {
    const Captured* it = context;
    EP_CHECK_NCCL(run_dispatch(it->run, it->handle, NCCL_EP_FWD_PASS));
    EP_CHECK_NCCL(run_combine(it->run, it->handle, NCCL_EP_BWD_PASS));
}

// A replay goes by what lies in the memory then: nothing of a routing is in the graph. Over several nodes the host
// reads it.
EP_TEST(a_graph_follows_the_memory) {
    if (!ranks_share_a_node()) return;
    RefBuffer home, block;
    Run run;
    Case test = kSmallHt;
    test.recv_rows = (unsigned)env->size * test.max_tokens;
    test.memory = &home;
    Case other = test;
    other.memory = &block;
    run_open(&run, env, &test, 720);
    ncclEpGroup_t group = group_of(env, &test);
    ncclEpHandle_t routed = handle_without_routing(group, &other);
    const Captured it = {&run, handle_without_routing(group, &test)};
    const EpCaptured captured = ep_capture(env->stream, play, (void*)&it);
    for (unsigned i = 0; i < 3; ++i) {
        run_renew(&run, 730 + i);
        EP_CHECK_NCCL(run_update(&run, routed));
        EP_CHECK_CUDA(cudaMemcpyAsync(ref_buffer_data(&home), ref_buffer_data(&block), home.bytes, cudaMemcpyDefault,
                                      env->stream));
        ep_sync(env);
        run_poison(&run);
        ep_replay(&captured);
        ep_sync(env);
        run_check_dispatch(&run, NCCL_EP_FWD_PASS);
        run_check_combine(&run, NCCL_EP_BWD_PASS);
    }
    ep_release_captured(&captured);
    EP_CHECK_NCCL(ncclEpHandleDestroy(it.handle));
    EP_CHECK_NCCL(ncclEpHandleDestroy(routed));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    ref_buffer_free(&home);
    ref_buffer_free(&block);
    run_close(&run);
}

// What is no routing of such a handle is not followed: the group fails. `fewer` tokens than it was routed for, if it was.
static void expect_foreign(const EpEnv* env, Case test, bool is_routed, unsigned fewer) {
    RefBuffer memory;
    Run run;
    test.memory = &memory;
    run_open(&run, env, &test, 740);
    ncclEpGroup_t group = group_of(env, &test);
    ncclEpHandle_t handle = is_routed ? run_route(&run, group) : handle_without_routing(group, &test);
    if (is_routed) handle = run_move(&run, group, handle);
    run.num_tokens -= fewer;
    if (is_ll(&test)) EP_CHECK_NCCL(run_update(&run, handle));
    // Another rank may have failed before.
    (void)run_combine(&run, handle, NCCL_EP_FWD_PASS);
    EP_CHECK_CUDA(cudaStreamSynchronize(env->stream));
    ep_barrier();
    forget_lines();
    CHECK_REFUSED(run_combine(&run, handle, NCCL_EP_FWD_PASS), ncclInvalidUsage,
                  "holds no routing of a handle like this one");
    run.num_tokens += fewer;
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    ref_buffer_free(&memory);
    ncclEpGroupDestroy(group);
    run_close(&run);
}

EP_TEST(memory_without_a_routing_is_not_followed) { expect_foreign(env, kSmallHt, false, 0); }
EP_TEST(memory_with_other_tokens_is_not_followed) { expect_foreign(env, kSmallHt, true, 1); }
EP_TEST(memory_without_a_dispatch_is_not_followed) {
    if (ranks_share_a_node()) expect_foreign(env, kSmallLl, false, 0);
}
