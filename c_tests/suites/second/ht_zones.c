// High throughput, expert-major: every byte of dispatches and combines of both passes, against the reference.
#include <stdlib.h>

#include "harness/graphs.h"
#include "suites/second/zones_run.h"

typedef struct {
    const ZonesRun* run;
    ncclEpHandle_t handle;
} Work;

static void play(void* context) {
    const Work* work = context;
    View ids;
    view_of_ids(&ids, &work->run->in);
    ZonesCounters counters;
    zones_set_counters(work->run, &counters);
    EP_CHECK_NCCL(ncclEpUpdateHandle(work->handle, &ids.tensor, &counters.info, work->run->in.env->stream));
    EP_CHECK_NCCL(zones_launch_dispatch(work->run, work->handle, NCCL_EP_FWD_PASS));
    EP_CHECK_NCCL(zones_launch_combine(work->run, work->handle, NCCL_EP_BWD_PASS));
}

static ncclEpHandle_t route(const ZonesRun* run, ncclEpGroup_t group) {
    View ids;
    view_of_ids(&ids, &run->in);
    ZonesCounters counters;
    zones_set_counters(run, &counters);
    ncclEpHandle_t handle = handle_of(group, run->in.test, &ids, &counters.info, run->in.env->stream);
    view_scrap(&ids);
    ep_sync(run->in.env);
    scrap_ids(&run->in);
    zones_check_counters(run);
    return handle;
}

// The bytes of the handle's memory at another address, without an update.
static ncclEpHandle_t move(const ZonesRun* run, ncclEpGroup_t group) {
    RefBuffer before = *run->in.test->memory;
    void* bytes = ref_host_new(before.bytes);
    ep_download(bytes, ref_buffer_data(&before), before.bytes);
    ncclEpHandle_t handle = handle_in_memory(group, run->in.test, bytes);
    free(bytes);
    ref_buffer_free(&before);
    return handle;
}

static void exchange(const EpEnv* env, const Case* test, uint64_t seed) {
    ZonesRun run;
    zones_open(&run, env, test, seed);
    ncclEpGroup_t group = group_of(env, test);
    ncclEpHandle_t handle = route(&run, group);
    zones_exchange(&run, handle, NCCL_EP_FWD_PASS);
    zones_exchange(&run, handle, NCCL_EP_BWD_PASS);
    if (test->memory != NULL) {
        EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
        handle = move(&run, group);
    }
    zones_exchange(&run, handle, NCCL_EP_BWD_PASS);
    zones_exchange(&run, handle, NCCL_EP_FWD_PASS);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    if (test->memory != NULL) ref_buffer_free(test->memory);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    zones_close(&run);
}

EP_TEST(high_throughput_delivers_rows_by_expert) {
    static const struct {
        unsigned experts, tokens, top_k, alignment;
        ncclDataType_t datatype;
        unsigned hidden;
        RefStyle style;
        bool uneven;
        unsigned rows;  // for each rank's token; 0: no bound
    } kShapes[] = {
        {2, 16, 4, 4, ncclBfloat16, 64, kRefDistinct, false, 8},
        {3, 16, 6, 8, ncclBfloat16, 16, kRefMessy, true, 8},
        {4, 20, 4, 1, ncclFloat16, 2600, kRefRepeating, true, 4},
        {2, 600, 2, 16, ncclFloat32, 12, kRefSkewed, true, 0},
        {2, 9, 2, 32, ncclBfloat16, 64, kRefNowhere, true, 0},
        {40, 6, 5, 2, ncclBfloat16, 64, kRefMessy, true, 40},
        {1, 5, 1, 64, ncclBfloat16, 7168, kRefDistinct, true, 32},
    };
    RefBuffer memory;
    for (unsigned i = 0; i < sizeof(kShapes) / sizeof(kShapes[0]); ++i) {
        Case test = kSmallHt;
        test.local_experts = kShapes[i].experts;
        test.max_tokens = kShapes[i].tokens;
        test.top_k = kShapes[i].top_k;
        test.alignment = kShapes[i].alignment;
        test.datatype = kShapes[i].datatype;
        test.hidden = kShapes[i].hidden;
        test.style = kShapes[i].style;
        test.uneven = kShapes[i].uneven;
        test.recv_rows = (unsigned)env->size * kShapes[i].tokens * kShapes[i].rows;
        test.narrow_ids = i % 2 == 0;
        test.updated = i % 3 == 1;
        test.scaled = i % 2 == 1;
        test.memory = i % 3 == 0 && ranks_share_a_node() ? &memory : NULL;
        exchange(env, &test, 800 + i);
    }
}

// As Megatron does with a fixed capacity.
EP_TEST(slots_beyond_a_bound_are_dropped) {
    RefBuffer memory;
    for (unsigned i = 0; i < 4; ++i) {
        Case test = kSmallHt;
        test.max_tokens = 8;
        test.top_k = 4;
        test.local_experts = 3;
        test.alignment = i == 2 ? 1 : 4;
        test.style = i == 3 ? kRefOneRank : kRefSkewed;
        test.recv_rows = i == 1 ? 8 : 10;
        test.drops = true;
        test.scaled = i == 0;
        test.memory = i == 0 && ranks_share_a_node() ? &memory : NULL;
        exchange(env, &test, 820 + i);
    }
}

// Several handles of both layouts, in turn.
EP_TEST(handles_by_expert_take_turns) {
    enum { kHandles = 3 };
    ZonesRun runs[kHandles];
    Case test = kSmallHt;
    test.alignment = 4;
    test.uneven = true;
    test.recv_rows = (unsigned)env->size * test.max_tokens * 8;
    ncclEpGroup_t group = group_of(env, &test);
    ncclEpHandle_t handles[kHandles];
    for (unsigned i = 0; i < kHandles; ++i) {
        zones_open(&runs[i], env, &test, 840 + i);
        handles[i] = route(&runs[i], group);
    }
    for (unsigned turn = 0; turn < 2; ++turn) {
        for (unsigned i = 0; i < kHandles; ++i) zones_exchange(&runs[i], handles[i], NCCL_EP_FWD_PASS);
        for (unsigned i = kHandles; i-- > 0;) zones_exchange(&runs[i], handles[i], NCCL_EP_BWD_PASS);
    }
    for (unsigned i = 0; i < kHandles; ++i) {
        EP_CHECK_NCCL(ncclEpHandleDestroy(handles[i]));
        zones_close(&runs[i]);
    }
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
}

// The slots behind the bound are still poison, and the next call tells.
EP_TEST(more_slots_than_the_bound_fail_the_group) {
    Case test = kSmallHt;
    test.style = kRefOneRank;
    test.alignment = 16;
    test.recv_rows = 16;
    const bool is_full = env->rank == env->size - 1;
    ZonesRun run;
    zones_open(&run, env, &test, 860);
    if (!EP_CHECK_EQ_I64(run.own->begins[test.local_experts] > test.recv_rows, is_full)) return;
    ncclEpGroup_t group = group_of(env, &test);
    ncclEpHandle_t handle = route(&run, group);
    EP_CHECK_NCCL(zones_launch_dispatch(&run, handle, NCCL_EP_FWD_PASS));
    ep_sync(env);
    if (is_full) {
        CHECK_REFUSED(zones_launch_dispatch(&run, handle, NCCL_EP_FWD_PASS), ncclInvalidUsage,
                      "outputs.tokens.sizes[0]");
        void* poison = ref_host_poison(run.tokens_out.bytes);
        REF_CHECK_BUFFER(&run.tokens_out, poison);
        free(poison);
    }
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    zones_close(&run);
}

EP_TEST(updates_by_expert_are_captured) {
    if (!ranks_share_a_node()) return;
    Case test = kSmallHt;
    test.max_tokens = 12;
    test.top_k = 3;
    test.local_experts = 3;
    test.uneven = true;
    test.alignment = 4;
    test.recv_rows = 24;
    test.drops = true;
    ZonesRun run;
    zones_open(&run, env, &test, 880);
    ncclEpGroup_t group = group_of(env, &test);
    const Work work = {&run, handle_without_routing(group, &test)};
    const EpCaptured captured = ep_capture(env->stream, play, (void*)&work);
    for (unsigned i = 0; i < 4; ++i) {
        zones_renew(&run, 890 + i);
        ref_buffer_poison(&run.tokens_out);
        ref_buffer_poison(&run.weights_out);
        ref_buffer_poison(&run.in.combined);
        ep_replay(&captured);
        ep_sync(env);
        zones_check_counters(&run);
        zones_check_dispatch(&run, NCCL_EP_FWD_PASS);
        zones_check_combine(&run, NCCL_EP_BWD_PASS);
    }
    ep_release_captured(&captured);
    EP_CHECK_NCCL(ncclEpHandleDestroy(work.handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    zones_close(&run);
}
