// High throughput, flat: every byte of dispatches and combines of both passes, against the reference.
#include "suites/second/ht_run.h"

// The bytes of the handle's memory serve another handle at another address, without an update.
static void exchange_elsewhere(const HtRun* run, ncclEpGroup_t group) {
    RefBuffer before = *run->in.test->memory;
    EP_SCOPED void* bytes = ref_host_new(before.bytes);
    ep_download(bytes, ref_buffer_data(&before), before.bytes);
    ncclEpHandle_t handle = handle_in_memory(group, run->in.test, bytes);
    ref_buffer_free(&before);
    ht_exchange(run, handle);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    ref_buffer_free(run->in.test->memory);
}

static void exchange(const EpEnv* env, const Case* test, uint64_t seed) {
    HtRun run;
    ht_open(&run, env, test, seed);
    ncclEpGroup_t group = group_of(env, test);
    ncclEpHandle_t handle = ht_handle(&run, group);
    for (unsigned turn = 0; turn < 2; ++turn) ht_exchange(&run, handle);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    if (test->memory != NULL) exchange_elsewhere(&run, group);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    ht_close(&run);
}

EP_TEST(high_throughput_exchanges_tokens) {
    static const struct {
        unsigned experts, tokens, top_k;
        ncclDataType_t datatype;
        unsigned hidden;
        RefStyle style;
        bool uneven, bounded;
    } kShapes[] = {
        {2, 16, 4, ncclBfloat16, 64, kRefDistinct, false, true},
        {3, 16, 6, ncclBfloat16, 16, kRefMessy, true, true},
        {4, 20, 4, ncclFloat16, 40, kRefRepeating, true, false},
        {2, 9, 2, ncclFloat32, 12, kRefOneRank, true, false},
        {2, 9, 2, ncclBfloat16, 64, kRefNowhere, true, false},
        {1, 5, 1, ncclBfloat16, 7168, kRefDistinct, true, true},
    };
    for (unsigned i = 0; i < sizeof(kShapes) / sizeof(kShapes[0]); ++i) {
        Case test = kSmallHt;
        test.local_experts = kShapes[i].experts;
        test.max_tokens = kShapes[i].tokens;
        test.top_k = kShapes[i].top_k;
        test.datatype = kShapes[i].datatype;
        test.hidden = kShapes[i].hidden;
        test.style = kShapes[i].style;
        test.uneven = kShapes[i].uneven;
        test.recv_rows = kShapes[i].bounded ? (unsigned)env->size * kShapes[i].tokens : 0;
        test.generation = (Generation)(i % kNumGenerations);
        test.updated = i % 2 == 0;
        test.narrow_ids = i % 3 == 1;
        test.global_ids = i % 2 == 1;
        test.scaled = i % 3 == 2;
        exchange(env, &test, 300 + i);
    }
}

EP_TEST(high_throughput_serves_every_generation) {
    for (Generation it = kGeneration3; it < kNumGenerations; ++it) {
        Case test = kSmallHt;
        test.generation = it;
        test.recv_rows = (unsigned)env->size * test.max_tokens;
        test.updated = true;
        exchange(env, &test, 400 + it);
    }
}

EP_TEST(high_throughput_keeps_a_routing_in_memory_of_callers) {
    if (!ranks_share_a_node()) return;
    RefBuffer memory;
    Case test = kSmallHt;
    test.recv_rows = (unsigned)env->size * test.max_tokens;
    test.uneven = true;
    test.memory = &memory;
    exchange(env, &test, 500);
    test.narrow_ids = true;
    test.style = kRefMessy;
    exchange(env, &test, 501);
    test.recv_rows = 0;
    exchange(env, &test, 502);
}

EP_TEST(tensors_lie_in_windows) {
    if (!views_into_windows(env)) return;
    Case test = kSmallHt;
    test.recv_rows = (unsigned)env->size * test.max_tokens;
    test.scaled = true;
    exchange(env, &test, 550);
    views_end_windows(env);
}

// The rows behind the bound are still poison, and the next call tells.
EP_TEST(more_rows_than_the_bound_fail_the_group) {
    if (env->size < 2) return;
    Case test = kSmallHt;
    test.style = kRefOneRank;
    test.recv_rows = test.max_tokens;
    const bool is_full = env->rank == env->size - 1;
    HtRun run;
    ht_open(&run, env, &test, 600);
    EP_CHECK_EQ_I64(run.received > test.recv_rows, is_full);
    ncclEpGroup_t group = group_of(env, &test);
    ncclEpHandle_t handle = ht_handle(&run, group);
    EP_CHECK_NCCL(ht_launch_dispatch(&run, handle));
    ep_sync(env);
    if (is_full) {
        CHECK_REFUSED(ht_launch_dispatch(&run, handle), ncclInvalidUsage, "outputs.tokens.sizes[0]");
        const size_t used = test.recv_rows * run.in.row_bytes;
        EP_SCOPED void* poison = ref_host_poison(kHtSpare * run.in.row_bytes);
        EP_SCOPED void* got = ref_host_new(kHtSpare * run.in.row_bytes);
        const unsigned char* rows = ref_buffer_data(&run.tokens_out);
        ep_download(got, rows + used, kHtSpare * run.in.row_bytes);
        EP_CHECK_EQ_BYTES(got, poison, kHtSpare * run.in.row_bytes);
    }
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    ht_close(&run);
}

// In a group without a bound operations on too few rows are refused before they write or send anything.
EP_TEST(rows_that_come_are_counted_before_a_dispatch) {
    Case test = kSmallHt;
    HtRun run;
    ht_open(&run, env, &test, 700);
    ncclEpGroup_t group = group_of(env, &test);
    ncclEpHandle_t handle = ht_handle(&run, group);
    if (run.received > 0) {
        run.rows = run.received - 1;
        CHECK_REFUSED(ht_launch_dispatch(&run, handle), ncclInvalidArgument,
                      "outputs.tokens.sizes[0]: must have room for all rows that this rank receives");
        run.rows = run.received;
    }
    EP_CHECK_NCCL(ht_launch_dispatch(&run, handle));
    ep_sync(env);
    ht_check_dispatch(&run);
    if (run.received > 0) {
        run.rows = run.received - 1;
        CHECK_REFUSED(ht_launch_combine(&run, handle), ncclInvalidUsage,
                      "inputs.tokens.sizes[0]: must hold all tokens that this rank receives");
        run.rows = run.received;
    }
    EP_CHECK_NCCL(ht_launch_combine(&run, handle));
    ep_sync(env);
    ht_check_combine(&run);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    ht_close(&run);
}
