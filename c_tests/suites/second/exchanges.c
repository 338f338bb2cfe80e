// Every byte of dispatches and combines of all layouts and both passes, against the reference.
#include "suites/second/run.h"

static void exchange(const EpEnv* env, const Case* test, uint64_t seed) {
    const ncclEpPassDir_t back = is_ll(test) ? NCCL_EP_FWD_PASS : NCCL_EP_BWD_PASS;
    Run run;
    run_open(&run, env, NULL, test, seed);
    run_route(&run);
    run_exchange(&run, NCCL_EP_FWD_PASS);
    run_exchange(&run, back);
    if (!is_ll(test)) {
        if (test->in_memory) run_move(&run);
        run_exchange(&run, back);
        run_exchange(&run, NCCL_EP_FWD_PASS);
    }
    run_close(&run);
}

// What differs from case to case besides its shape.
static Case varied(const Case* given, unsigned i) {
    Case test = *given;
    // Earlier ones ask for no such group.
    const bool is_new = test.kind == kHtZones || test.drops;
    test.generation = (Generation)(i % (is_new ? kGeneration3 : kNumGenerations));
    test.updated = i % 2 == 1;
    test.send_only = i % 3 == 1;
    test.narrow_ids = i % 4 < 2;
    test.global_ids = i / 4 % 2 == 1 && (test.kind == kLlRanks || test.kind == kHtFlat);
    test.scaled = i / 4 % 5 < 3;
    test.in_memory = i % 3 == 0;
    return test;
}

static const Case kCases[] = {
    {2, 8, 2, ncclBfloat16, 64, kRefDistinct, false, .kind = kLlExperts},
    {4, 16, 4, ncclBfloat16, 16, kRefMessy, true, .kind = kLlExperts},
    {4, 9, 3, ncclFloat16, 40, kRefSkewed, true, .kind = kLlExperts},
    {2, 9, 2, ncclFloat32, 12, kRefOneRank, true, .kind = kLlExperts},
    {1, 5, 1, ncclBfloat16, 7168, kRefDistinct, true, .kind = kLlExperts},
    {2, 7, 2, ncclBfloat16, 64, kRefNowhere, false, .kind = kLlExperts},

    {2, 8, 2, ncclBfloat16, 64, kRefDistinct, false, .kind = kLlRanks},
    {4, 16, 4, ncclBfloat16, 16, kRefMessy, true, .kind = kLlRanks},
    {4, 9, 3, ncclFloat16, 40, kRefSkewed, true, .kind = kLlRanks},
    {2, 7, 2, ncclBfloat16, 64, kRefNowhere, false, .kind = kLlRanks},

    {2, 16, 4, ncclBfloat16, 64, kRefDistinct, false, .kind = kHtFlat, .recv_rows = 16},
    {3, 16, 6, ncclBfloat16, 16, kRefMessy, true, .kind = kHtFlat, .recv_rows = 16},
    {4, 20, 4, ncclFloat16, 40, kRefRepeating, true, .kind = kHtFlat},
    {2, 9, 2, ncclFloat32, 12, kRefOneRank, true, .kind = kHtFlat},
    {2, 9, 2, ncclBfloat16, 64, kRefNowhere, true, .kind = kHtFlat},
    {1, 5, 1, ncclBfloat16, 7168, kRefDistinct, true, .kind = kHtFlat, .recv_rows = 5},

    {2, 16, 4, ncclBfloat16, 64, kRefDistinct, false, .kind = kHtZones, .recv_rows = 128, .alignment = 4},
    {3, 16, 6, ncclBfloat16, 16, kRefMessy, true, .kind = kHtZones, .recv_rows = 128, .alignment = 8},
    {4, 20, 4, ncclFloat16, 2600, kRefRepeating, true, .kind = kHtZones, .recv_rows = 80, .alignment = 1},
    {2, 600, 2, ncclFloat32, 12, kRefSkewed, true, .kind = kHtZones, .alignment = 16},
    {2, 9, 2, ncclBfloat16, 64, kRefNowhere, true, .kind = kHtZones, .alignment = 32},
    {40, 6, 5, ncclBfloat16, 64, kRefMessy, true, .kind = kHtZones, .recv_rows = 240, .alignment = 2},
    {1, 5, 1, ncclBfloat16, 7168, kRefDistinct, true, .kind = kHtZones, .recv_rows = 160, .alignment = 64},
};

static void exchange_all(const EpEnv* env, Kind kind) {
    for (unsigned i = 0; i < COUNT(kCases); ++i) {
        Case test = varied(&kCases[i], i);
        test.recv_rows *= (unsigned)env->size;
        if (test.kind == kind) exchange(env, &test, 100 + 5 * i);
    }
}

EP_TEST(low_latency_delivers_rows_by_expert) { exchange_all(env, kLlExperts); }
EP_TEST(low_latency_delivers_rows_by_rank) { exchange_all(env, kLlRanks); }
EP_TEST(high_throughput_delivers_flat_rows) { exchange_all(env, kHtFlat); }
EP_TEST(high_throughput_delivers_rows_by_expert) { exchange_all(env, kHtZones); }

// As Megatron does with a fixed capacity.
EP_TEST(what_is_beyond_a_bound_is_dropped) {
    static const Case kCases[] = {
        {3, 8, 4, ncclBfloat16, 32, kRefSkewed, .kind = kHtZones, .recv_rows = 10, .alignment = 4},
        {3, 8, 4, ncclBfloat16, 32, kRefSkewed, .kind = kHtZones, .recv_rows = 8, .alignment = 4},
        {3, 8, 4, ncclBfloat16, 32, kRefSkewed, .kind = kHtZones, .recv_rows = 10, .alignment = 1},
        {3, 8, 4, ncclBfloat16, 32, kRefOneRank, .kind = kHtZones, .recv_rows = 10, .alignment = 4},
        {3, 8, 4, ncclBfloat16, 32, kRefSkewed, .kind = kHtFlat, .recv_rows = 9},
        {2, 8, 2, ncclFloat16, 40, kRefOneRank, .kind = kHtFlat, .recv_rows = 13},
        {3, 9, 6, ncclFloat32, 12, kRefMessy, true, .kind = kHtFlat, .recv_rows = 9},
        {30, 4, 3, ncclBfloat16, 16, kRefRepeating, .kind = kHtFlat, .recv_rows = 4},
    };
    for (unsigned i = 0; i < COUNT(kCases); ++i) {
        Case test = kCases[i];
        test.drops = true;
        test = varied(&test, i);
        exchange(env, &test, 820 + i);
    }
}

EP_TEST(tensors_lie_in_windows) {
    if (!views_into_windows(env)) return;
    exchange(env, &kSmallLl, 270);
    Case test = kSmallHt;
    test.recv_rows = (unsigned)env->size * test.max_tokens;
    test.scaled = true;
    exchange(env, &test, 550);
    views_end_windows(env);
}

// Several handles, in turn: of a layout, then of both, which drop rows.
static void take_turns(const EpEnv* env, bool drops) {
    enum { kHandles = 3 };
    Run runs[kHandles];
    Case tests[kHandles];
    for (unsigned i = 0; i < kHandles; ++i) {
        tests[i] = kSmallHt;
        tests[i].kind = drops && i != 1 ? kHtFlat : kHtZones;
        tests[i].alignment = 4;
        tests[i].uneven = true;
        tests[i].drops = drops;
        tests[i].in_memory = i > 0;
        tests[i].recv_rows = drops ? 4 : (unsigned)env->size * tests[i].max_tokens * 8;
    }
    ncclEpGroup_t group = group_of(env, &tests[0]);
    for (unsigned i = 0; i < kHandles; ++i) {
        run_open(&runs[i], env, group, &tests[i], 840 + i);
        run_route(&runs[i]);
    }
    for (unsigned turn = 0; turn < 2; ++turn) {
        for (unsigned i = 0; i < kHandles; ++i) run_exchange(&runs[i], NCCL_EP_FWD_PASS);
        for (unsigned i = kHandles; i-- > 0;) run_exchange(&runs[i], NCCL_EP_BWD_PASS);
    }
    for (unsigned i = 0; i < kHandles; ++i) run_close(&runs[i]);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
}

EP_TEST(handles_take_turns) {
    take_turns(env, false);
    take_turns(env, true);
}

// A failure is told once: by a call, or by the group's end.
static void destroy_failed(Run* run, bool is_told) {
    run_end_handle(run);
    forget_lines();
    const ncclResult_t result = ncclEpGroupDestroy(run->own_group);
    if (is_told) EP_CHECK(!has_new_lines());
    CHECK_REFUSED(result, ncclSuccess, is_told ? "" : "the group has failed: ncclEpDispatch");
    run->own_group = NULL;
}

// What lies beyond the bound is still poison, with zones everything is, and the next call reports it, if there is one.
static void overflow(const EpEnv* env, const Case* test, bool calls_again, uint64_t seed) {
    const bool is_full = env->rank == env->size - 1;
    Run run;
    run_open(&run, env, NULL, test, seed);
    if (!EP_CHECK_EQ_I64(run.received > test->recv_rows, is_full)) return;
    run_route(&run);
    // The others may have heard of it by then.
    const ncclResult_t result = run_dispatch(&run, NCCL_EP_FWD_PASS);
    EP_CHECK(result == ncclSuccess || (!is_full && result == ncclRemoteError));
    ep_sync(env);
    if (is_full && calls_again) {
        CHECK_REFUSED(run_dispatch(&run, NCCL_EP_FWD_PASS), ncclInvalidUsage,
                      "config.max_recv_tokens_per_rank: must hold all rows that this rank receives");
        const RefBuffer* rows = &run.buffers[kReceived];
        EP_SCOPED unsigned char* got = ref_host_new(rows->bytes);
        EP_SCOPED void* poison = ref_host_poison(rows->bytes);
        ep_download(got, ref_buffer_data(rows), rows->bytes);
        const size_t used = test->kind == kHtFlat ? rows->bytes / run.rows * run.used : 0;
        EP_CHECK_EQ_BYTES(got + used, poison, rows->bytes - used);
    }
    if (is_full) destroy_failed(&run, calls_again);
    run_close(&run);
}

EP_TEST(more_than_the_bound_fails_the_group) {
    Case test = kSmallHt;
    test.style = kRefOneRank;
    test.recv_rows = test.max_tokens;
    if (env->size > 1) overflow(env, &test, true, 600);
    test.kind = kHtZones;
    test.alignment = 16;
    test.recv_rows = 16;
    overflow(env, &test, true, 860);
    overflow(env, &test, false, 870);
}

// In a group without a bound, rows that nothing comes into are left alone wherever there are some.
static void dispatch_with_more(const EpEnv* env, const Case* test, unsigned tensor, ncclEpPassDir_t pass) {
    Run run;
    Call call;
    run_open(&run, env, NULL, test, 720);
    run_route(&run);
    EP_REQUIRE(run.rows > 0);
    RefBuffer* longer = &run.buffers[tensor];
    const size_t bytes = longer->bytes / run.rows * (run.rows + kSpare);
    ref_buffer_free(longer);
    *longer = ref_buffer_new(bytes);
    call_set(&call, &run, pass);
    call.views[tensor].sizes[0] += kSpare;
    EP_CHECK_NCCL(ncclEpDispatch(run.handle, &call.inputs, &call.outputs, &call.info, &call.config, env->stream));
    run_check_dispatch(&run, pass);
    run_close(&run);
}

EP_TEST(rows_and_scales_may_be_longer_than_each_other) {
    const unsigned tensors[] = {kReceived, kScalesOut};
    Case test = {2, 16, 2, ncclBfloat16, 64, kRefDistinct, .alignment = 4, .scaled = true};
    for (unsigned i = 0; i < COUNT(tensors); ++i) {
        for (test.kind = kHtFlat; test.kind <= kHtZones; ++test.kind) {
            dispatch_with_more(env, &test, tensors[i], NCCL_EP_FWD_PASS);
            dispatch_with_more(env, &test, tensors[i], NCCL_EP_BWD_PASS);
        }
    }
}

// In a group without a bound operations on too few rows are refused before they write or send anything.
EP_TEST(rows_that_come_are_counted_before_a_dispatch) {
    const ncclEpPassDir_t pass = NCCL_EP_FWD_PASS;
    Case test = kSmallHt;
    Run run;
    run_open(&run, env, NULL, &test, 700);
    run_route(&run);
    if (run.received > 0) {
        run.rows = run.received - 1;
        CHECK_REFUSED(run_dispatch(&run, pass), ncclInvalidArgument,
                      "outputs.tokens.sizes[0]: must have room for all rows that this rank receives");
        run.rows = run.received;
    }
    EP_CHECK_NCCL(run_dispatch(&run, pass));
    run_check_dispatch(&run, pass);
    if (run.received > 0) {
        run.rows = run.received - 1;
        CHECK_REFUSED(run_combine(&run, pass), ncclInvalidUsage,
                      "inputs.tokens.sizes[0]: must hold all tokens that this rank receives");
        run.rows = run.received;
        Call call;
        call_set(&call, &run, NCCL_EP_BWD_PASS);
        call.views[kGradientsIn].sizes[0] = run.received - 1;
        CHECK_REFUSED(ncclEpCombine(run.handle, &call.combine_inputs, &call.combine_outputs, &call.combine_config,
                                    env->stream), ncclInvalidUsage,
                      "inputs.topk_weights.sizes[0]: must hold all tokens that this rank receives");
    }
    EP_CHECK_NCCL(run_combine(&run, pass));
    run_check_combine(&run, pass);
    run_close(&run);
}
