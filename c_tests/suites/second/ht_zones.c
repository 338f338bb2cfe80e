// High throughput, expert-major: every byte of dispatches and combines of both passes, against the reference.
#include <stdlib.h>
#include <string.h>

#include "harness/graphs.h"
#include "reference/zones.h"
#include "suites/second/second.h"

// Slots that the tensors have beyond those that are used.
enum { kSpare = 3 };

typedef struct {
    Inputs in;
    RefZones* zones;  // of each rank
    const RefZones* own;
    size_t used;  // slots that operations may use
    size_t slots;
    uint64_t seed;
    ncclDataType_t counter;
    RefBuffer tokens_out, weights_out, counters, offsets, total, results_in, gradients_in, gradients,
        scales_out;
} Run;

static size_t counter_bytes(const Run* run) { return ep_datatype_size(run->counter); }

static void fill_inputs(Run* run) {
    unsigned char* rows = ref_host_poison(run->results_in.bytes);
    float* gradients = ref_host_new(run->gradients_in.bytes);
    for (size_t slot = 0; slot < run->slots; ++slot) {
        ref_row_fill(&run->in.results, ref_row_of(run->in.rank, slot), rows + slot * run->in.row_bytes);
        gradients[slot] = ref_weight(run->seed, run->in.rank, slot);
    }
    ref_buffer_upload(&run->results_in, rows);
    ref_buffer_upload(&run->gradients_in, gradients);
    free(rows);
    free(gradients);
}

static void find_zones(Run* run) {
    const Case* test = run->in.test;
    const unsigned most = test->drops ? test->recv_rows : ~0u;
    for (int rank = 0; rank < run->in.env->size; ++rank) {
        run->zones[rank] = ref_zones_new(run->in.routing, (unsigned)rank, test->alignment, most);
    }
}

static void free_zones(Run* run) {
    for (int rank = 0; rank < run->in.env->size; ++rank) ref_zones_free(&run->zones[rank]);
}

static void open_run(Run* run, const EpEnv* env, const Case* test, uint64_t seed) {
    inputs_open(&run->in, env, test, seed);
    run->seed = seed;
    run->counter = seed % 2 == 0 ? ncclInt64 : ncclInt32;
    run->zones = malloc((size_t)env->size * sizeof(*run->zones));
    EP_REQUIRE(run->zones != NULL);
    find_zones(run);
    run->own = &run->zones[run->in.rank];
    run->used = test->recv_rows > 0 ? test->recv_rows : run->own->begins[test->local_experts];
    run->slots = test->recv_rows > 0 ? run->used + kSpare : run->used;
    const size_t experts = test->local_experts + 1;
    run->tokens_out = ref_buffer_new(run->slots * run->in.row_bytes);
    run->weights_out = ref_buffer_new(run->slots * sizeof(float));
    run->counters = ref_buffer_new(experts * counter_bytes(run));
    run->offsets = ref_buffer_new(experts * counter_bytes(run));
    run->total = ref_buffer_new(counter_bytes(run));
    run->scales_out = ref_buffer_new(scale_bytes(test, run->slots));
    run->results_in = ref_buffer_new_input(run->slots * run->in.row_bytes);
    run->gradients_in = ref_buffer_new_input(run->slots * sizeof(float));
    run->gradients = ref_buffer_new(ref_entries_of(run->in.routing, run->in.rank) * sizeof(float));
    fill_inputs(run);
}

static void close_run(Run* run) {
    RefBuffer* buffers[] = {&run->tokens_out, &run->weights_out,  &run->counters,     &run->offsets,
                            &run->total,      &run->results_in,   &run->gradients_in, &run->gradients,
                            &run->scales_out};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); ++i) ref_buffer_free(buffers[i]);
    free_zones(run);
    free(run->zones);
    inputs_close(&run->in);
}

// ---- Counters

typedef struct {
    View counters, offsets, total;
    ncclEpLayoutInfo_t info;
} Counters;

static void set_counters(const Run* run, Counters* it) {
    const size_t experts = run->in.test->local_experts + 1;
    view_of(&it->counters, ref_buffer_data(&run->counters), run->counter, experts, 0, 0);
    view_of(&it->offsets, ref_buffer_data(&run->offsets), run->counter, experts, 0, 0);
    view_of(&it->total, ref_buffer_data(&run->total), run->counter, 1, 0, 0);
    it->info = NCCL_EP_LAYOUT_INFO_INIT;
    it->info.expert_counters = &it->counters.tensor;
    it->info.expert_offsets = &it->offsets.tensor;
    it->info.recv_total_counter = &it->total.tensor;
}

static void put_number(const Run* run, void* numbers, size_t index, size_t number) {
    if (run->counter == ncclInt64) ((int64_t*)numbers)[index] = (int64_t)number;
    else ((int32_t*)numbers)[index] = (int32_t)number;
}

static void check_counters(const Run* run) {
    const unsigned experts = run->in.test->local_experts;
    void* counters = ref_host_poison(run->counters.bytes);
    void* offsets = ref_host_poison(run->offsets.bytes);
    int64_t total = 0;
    for (unsigned i = 0; i < experts; ++i) {
        put_number(run, counters, i, ref_zones_length(run->own, i));
        put_number(run, offsets, i, ref_zones_begin(run->own, i));
    }
    put_number(run, &total, 0, run->own->begins[experts]);
    REF_CHECK_BUFFER(&run->counters, counters);
    REF_CHECK_BUFFER(&run->offsets, offsets);
    REF_CHECK_BUFFER(&run->total, &total);
    ref_buffer_poison(&run->counters);
    ref_buffer_poison(&run->offsets);
    ref_buffer_poison(&run->total);
    free(counters);
    free(offsets);
}

// ---- Operations

static ncclResult_t launch_dispatch(const Run* run, ncclEpHandle_t handle, ncclEpPassDir_t pass) {
    const Case* test = run->in.test;
    const bool is_forward = pass == NCCL_EP_FWD_PASS;
    View tokens, weights, tokens_out, weights_out;
    view_of(&tokens, ref_buffer_data(&run->in.tokens_in), test->datatype, run->in.num_tokens, test->hidden, 0);
    view_of(&weights, ref_buffer_data(&run->in.weights), ncclFloat32, run->in.num_tokens, test->top_k, 0);
    view_of(&tokens_out, ref_buffer_data(&run->tokens_out), test->datatype, run->slots, test->hidden, 0);
    view_of(&weights_out, ref_buffer_data(&run->weights_out), ncclFloat32, run->slots, 0, 0);
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    inputs.tokens = &tokens.tensor;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    outputs.tokens = &tokens_out.tensor;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    config.pass_direction = pass;
    ScaleViews scales;
    set_scales(&scales, &run->in, &run->scales_out, &tokens_out, &inputs, &outputs, &config);
    Counters counters;
    set_counters(run, &counters);
    if (is_forward) {
        inputs.topk_weights = &weights.tensor;
        outputs.topk_weights = &weights_out.tensor;
    }
    const ncclResult_t result = ncclEpDispatch(handle, &inputs, &outputs, is_forward ? &counters.info : NULL,
                                               &config, run->in.env->stream);
    View* views[] = {&tokens, &weights, &tokens_out, &weights_out};
    for (size_t i = 0; i < sizeof(views) / sizeof(views[0]); ++i) view_scrap(views[i]);
    return result;
}

static void check_dispatch(const Run* run, ncclEpPassDir_t pass) {
    void* tokens = ref_host_poison(run->tokens_out.bytes);
    float* weights = ref_host_poison(run->weights_out.bytes);
    ref_zones_dispatch(run->own, &run->in.tokens, tokens);
    if (pass == NCCL_EP_FWD_PASS) ref_zones_weights(run->own, run->used, weights);
    REF_CHECK_BUFFER(&run->tokens_out, tokens);
    REF_CHECK_BUFFER(&run->weights_out, weights);
    void* scales = ref_host_poison(run->scales_out.bytes);
    if (run->in.test->scaled) ref_zones_dispatch(run->own, &run->in.scales, scales);
    REF_CHECK_BUFFER(&run->scales_out, scales);
    free(scales);
    free(tokens);
    free(weights);
}

static ncclResult_t launch_combine(const Run* run, ncclEpHandle_t handle, ncclEpPassDir_t pass) {
    const Case* test = run->in.test;
    View results, gradients_in, combined, gradients;
    view_of(&results, ref_buffer_data(&run->results_in), test->datatype, run->slots, test->hidden, 0);
    view_of(&gradients_in, ref_buffer_data(&run->gradients_in), ncclFloat32, run->slots, 0, 0);
    view_of(&combined, ref_buffer_data(&run->in.combined), test->datatype, run->in.num_tokens, test->hidden, 0);
    view_of(&gradients, ref_buffer_data(&run->gradients), ncclFloat32, run->in.num_tokens, test->top_k, 0);
    ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
    inputs.tokens = &results.tensor;
    ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
    outputs.tokens = &combined.tensor;
    ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
    config.pass_direction = pass;
    if (pass == NCCL_EP_BWD_PASS) {
        inputs.topk_weights = &gradients_in.tensor;
        outputs.topk_weights = &gradients.tensor;
    }
    const ncclResult_t result = ncclEpCombine(handle, &inputs, &outputs, &config, run->in.env->stream);
    View* views[] = {&results, &gradients_in, &combined, &gradients};
    for (size_t i = 0; i < sizeof(views) / sizeof(views[0]); ++i) view_scrap(views[i]);
    return result;
}

static void check_combine(const Run* run, ncclEpPassDir_t pass) {
    void* expected = ref_host_new(run->in.combined.bytes);
    ref_zones_combine(run->zones, run->in.rank, &run->in.results, expected);
    REF_CHECK_BUFFER(&run->in.combined, expected);
    float* gradients = ref_host_poison(run->gradients.bytes);
    if (pass == NCCL_EP_BWD_PASS) ref_zones_gradients(run->zones, run->in.rank, run->seed, gradients);
    REF_CHECK_BUFFER(&run->gradients, gradients);
    free(expected);
    free(gradients);
}

static void exchange_pass(const Run* run, ncclEpHandle_t handle, ncclEpPassDir_t pass) {
    const RefBuffer* outputs[] = {&run->tokens_out, &run->weights_out, &run->in.combined, &run->gradients,
                                  &run->scales_out};
    for (size_t i = 0; i < sizeof(outputs) / sizeof(outputs[0]); ++i) ref_buffer_poison(outputs[i]);
    EP_CHECK_NCCL(launch_dispatch(run, handle, pass));
    EP_CHECK_NCCL(launch_combine(run, handle, pass));
    ep_sync(run->in.env);
    check_dispatch(run, pass);
    check_combine(run, pass);
    if (pass == NCCL_EP_FWD_PASS) check_counters(run);
}

typedef struct {
    const Run* run;
    ncclEpHandle_t handle;
} Work;

static void play(void* context) {
    const Work* work = context;
    View ids;
    view_of_ids(&ids, &work->run->in);
    Counters counters;
    set_counters(work->run, &counters);
    EP_CHECK_NCCL(ncclEpUpdateHandle(work->handle, &ids.tensor, &counters.info, work->run->in.env->stream));
    EP_CHECK_NCCL(launch_dispatch(work->run, work->handle, NCCL_EP_FWD_PASS));
    EP_CHECK_NCCL(launch_combine(work->run, work->handle, NCCL_EP_BWD_PASS));
}

static ncclEpHandle_t route(const Run* run, ncclEpGroup_t group) {
    View ids;
    view_of_ids(&ids, &run->in);
    Counters counters;
    set_counters(run, &counters);
    ncclEpHandle_t handle = handle_of(group, run->in.test, &ids, &counters.info, run->in.env->stream);
    view_scrap(&ids);
    ep_sync(run->in.env);
    scrap_ids(&run->in);
    check_counters(run);
    return handle;
}

// The bytes of the handle's memory at another address, without an update.
static ncclEpHandle_t move(const Run* run, ncclEpGroup_t group) {
    RefBuffer before = *run->in.test->memory;
    void* bytes = ref_host_new(before.bytes);
    ep_download(bytes, ref_buffer_data(&before), before.bytes);
    ncclEpHandle_t handle = handle_in_memory(group, run->in.test, bytes);
    free(bytes);
    ref_buffer_free(&before);
    return handle;
}

static void exchange(const EpEnv* env, const Case* test, uint64_t seed) {
    Run run;
    open_run(&run, env, test, seed);
    ncclEpGroup_t group = group_of(env, test);
    ncclEpHandle_t handle = route(&run, group);
    exchange_pass(&run, handle, NCCL_EP_FWD_PASS);
    exchange_pass(&run, handle, NCCL_EP_BWD_PASS);
    if (test->memory != NULL) {
        EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
        handle = move(&run, group);
    }
    exchange_pass(&run, handle, NCCL_EP_BWD_PASS);
    exchange_pass(&run, handle, NCCL_EP_FWD_PASS);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    if (test->memory != NULL) ref_buffer_free(test->memory);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    close_run(&run);
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
        {4, 20, 4, 1, ncclFloat16, 40, kRefRepeating, true, 4},
        {2, 9, 2, 16, ncclFloat32, 12, kRefSkewed, true, 0},
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
        test.memory = i % 3 == 0 ? &memory : NULL;
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
        test.memory = i == 0 ? &memory : NULL;
        exchange(env, &test, 820 + i);
    }
}

// Several handles of both layouts, in turn.
EP_TEST(handles_by_expert_take_turns) {
    enum { kHandles = 3 };
    Run runs[kHandles];
    Case test = kSmallHt;
    test.alignment = 4;
    test.uneven = true;
    test.recv_rows = (unsigned)env->size * test.max_tokens * 8;
    ncclEpGroup_t group = group_of(env, &test);
    ncclEpHandle_t handles[kHandles];
    for (unsigned i = 0; i < kHandles; ++i) {
        open_run(&runs[i], env, &test, 840 + i);
        handles[i] = route(&runs[i], group);
    }
    for (unsigned turn = 0; turn < 2; ++turn) {
        for (unsigned i = 0; i < kHandles; ++i) exchange_pass(&runs[i], handles[i], NCCL_EP_FWD_PASS);
        for (unsigned i = kHandles; i-- > 0;) exchange_pass(&runs[i], handles[i], NCCL_EP_BWD_PASS);
    }
    for (unsigned i = 0; i < kHandles; ++i) {
        EP_CHECK_NCCL(ncclEpHandleDestroy(handles[i]));
        close_run(&runs[i]);
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
    Run run;
    open_run(&run, env, &test, 860);
    if (!EP_CHECK_EQ_I64(run.own->begins[test.local_experts] > test.recv_rows, is_full)) return;
    ncclEpGroup_t group = group_of(env, &test);
    ncclEpHandle_t handle = route(&run, group);
    EP_CHECK_NCCL(launch_dispatch(&run, handle, NCCL_EP_FWD_PASS));
    ep_sync(env);
    if (is_full) {
        CHECK_REFUSED(launch_dispatch(&run, handle, NCCL_EP_FWD_PASS), ncclInvalidUsage, "outputs.tokens.sizes[0]");
        void* poison = ref_host_poison(run.tokens_out.bytes);
        REF_CHECK_BUFFER(&run.tokens_out, poison);
        free(poison);
    }
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    close_run(&run);
}

EP_TEST(updates_by_expert_are_captured) {
    Case test = kSmallHt;
    test.max_tokens = 12;
    test.top_k = 3;
    test.local_experts = 3;
    test.uneven = true;
    test.alignment = 4;
    test.recv_rows = 24;
    test.drops = true;
    Run run;
    open_run(&run, env, &test, 880);
    ncclEpGroup_t group = group_of(env, &test);
    const Work work = {&run, handle_without_routing(group, &test)};
    const EpCaptured captured = ep_capture(env->stream, play, (void*)&work);
    for (unsigned i = 0; i < 4; ++i) {
        free_zones(&run);
        inputs_renew(&run.in, 890 + i);
        find_zones(&run);
        ref_buffer_poison(&run.tokens_out);
        ref_buffer_poison(&run.weights_out);
        ref_buffer_poison(&run.in.combined);
        ep_replay(&captured);
        ep_sync(env);
        check_counters(&run);
        check_dispatch(&run, NCCL_EP_FWD_PASS);
        check_combine(&run, NCCL_EP_BWD_PASS);
    }
    ep_release_captured(&captured);
    EP_CHECK_NCCL(ncclEpHandleDestroy(work.handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    close_run(&run);
}
