// Low latency, expert-major: every byte of a dispatch and of its combine, against the reference.
#include "reference/ll.h"
#include "suites/second/second.h"

// Entries that the tensors have beyond what the library needs.
enum { kSpare = 1 };

typedef struct {
    Inputs in;
    RefLayout layout;
    unsigned capacity;
    RefBuffer packed, counters, results_in, scales_out;
} Run;

static void open_run(Run* run, const EpEnv* env, const Case* test, uint64_t seed) {
    inputs_open(&run->in, env, test, seed);
    run->capacity = capacity_of(env, test);
    run->layout = ref_expert_major(test->local_experts, run->capacity);
    const size_t all_slots = (size_t)(test->local_experts + kSpare) * run->capacity;
    run->packed = ref_buffer_new(all_slots * run->in.row_bytes);
    run->counters = ref_buffer_new((test->local_experts + kSpare) * sizeof(int32_t));
    run->scales_out = ref_buffer_new(scale_bytes(test, all_slots));
    run->results_in = ref_buffer_new_input(all_slots * run->in.row_bytes);
    EP_SCOPED void* rows = ref_host_poison(run->results_in.bytes);
    ref_ll_results(run->in.routing, run->in.rank, run->layout, &run->in.results, rows);
    ref_buffer_upload(&run->results_in, rows);
}

static void close_run(Run* run) {
    RefBuffer* buffers[] = {&run->packed, &run->counters, &run->results_in, &run->scales_out};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); ++i) ref_buffer_free(buffers[i]);
    inputs_close(&run->in);
}

static void dispatch(const Run* run, ncclEpHandle_t handle) {
    const Case* test = run->in.test;
    View tokens, packed, counters;
    view_of(&tokens, ref_buffer_data(&run->in.tokens_in), test->datatype, run->in.num_tokens, test->hidden,
            0);
    view_of(&packed, ref_buffer_data(&run->packed), test->datatype, test->local_experts + kSpare,
            run->capacity, test->hidden);
    view_of(&counters, ref_buffer_data(&run->counters), ncclInt32, test->local_experts + kSpare, 0,
            0);
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    inputs.tokens = &tokens.tensor;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    outputs.tokens = &packed.tensor;
    ncclEpLayoutInfo_t now = NCCL_EP_LAYOUT_INFO_INIT;
    now.expert_counters = &counters.tensor;
    // Not read: some clients pass them.
    now.expert_offsets = now.recv_total_counter = (ncclEpTensor_t*)16;
    ncclEpDispatchConfig_t options = NCCL_EP_DISPATCH_CONFIG_INIT;
    options.send_only = test->send_only;
    ScaleViews scales;
    set_scales(&scales, &run->in, &run->scales_out, &packed, &inputs, &outputs, &options);
    void* info = old_layout_info(&now, test->generation);
    void* config = old_dispatch_config(&options, test->scaled ? kGeneration5 : test->generation);
    EP_CHECK_NCCL(ncclEpDispatch(handle, &inputs, &outputs, info, config, run->in.env->stream));
    old_free(info);
    old_free(config);
    view_scrap(&tokens);
    view_scrap(&packed);
    view_scrap(&counters);
    EP_CHECK_NCCL(ncclEpComplete(handle, NULL, run->in.env->stream));
    ep_sync(run->in.env);
}

static void check_dispatch(const Run* run) {
    EP_SCOPED unsigned char* packed = ref_host_poison(run->packed.bytes);
    EP_SCOPED int32_t* counts = ref_host_poison(run->counters.bytes);
    ref_ll_dispatch(run->in.routing, run->in.rank, run->layout, &run->in.tokens, packed, counts);
    REF_CHECK_BUFFER(&run->packed, packed);
    REF_CHECK_BUFFER(&run->counters, counts);
    EP_SCOPED unsigned char* scales = ref_host_poison(run->scales_out.bytes);
    if (run->in.test->scaled) {
        ref_ll_dispatch(run->in.routing, run->in.rank, run->layout, &run->in.scales, scales, NULL);
    }
    REF_CHECK_BUFFER(&run->scales_out, scales);
}

static void combine(const Run* run, ncclEpHandle_t handle) {
    const Case* test = run->in.test;
    View results, weights, combined;
    view_of(&results, ref_buffer_data(&run->results_in), test->datatype,
            test->local_experts + kSpare, run->capacity, test->hidden);
    view_of(&weights, ref_buffer_data(&run->in.weights), ncclFloat32, run->in.num_tokens, test->top_k, 0);
    view_of(&combined, ref_buffer_data(&run->in.combined), test->datatype, run->in.num_tokens,
            test->hidden, 0);
    ncclEpCombineInputs_t now = NCCL_EP_COMBINE_INPUTS_INIT;
    now.tokens = &results.tensor;
    ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
    outputs.tokens = &combined.tensor;
    outputs.topk_weights = &weights.tensor;
    ncclEpCombineConfig_t options = NCCL_EP_COMBINE_CONFIG_INIT;
    options.send_only = test->send_only;
    void* inputs = old_combine_inputs(&now, test->generation);
    void* config = old_combine_config(&options, test->generation);
    EP_CHECK_NCCL(ncclEpCombine(handle, inputs, &outputs, config, run->in.env->stream));
    old_free(inputs);
    old_free(config);
    view_scrap(&results);
    view_scrap(&weights);
    view_scrap(&combined);
    const ncclEpCompleteConfig_t complete = NCCL_EP_COMPLETE_CONFIG_INIT;
    EP_CHECK_NCCL(ncclEpComplete(handle, &complete, run->in.env->stream));
    ep_sync(run->in.env);
    EP_SCOPED void* expected = ref_host_new(run->in.combined.bytes);
    ref_ll_combine(run->in.routing, run->in.routing, run->in.rank, run->layout, &run->in.results, expected);
    REF_CHECK_BUFFER(&run->in.combined, expected);
}

static void exchange(const EpEnv* env, const Case* test, uint64_t seed) {
    Run run;
    open_run(&run, env, test, seed);
    ncclEpGroup_t group = group_of(env, test);
    View ids;
    view_of_ids(&ids, &run.in);
    ncclEpHandle_t handle = handle_of(group, test, &ids, NULL, env->stream);
    view_scrap(&ids);
    for (unsigned turn = 0; turn < 2; ++turn) {
        ref_buffer_poison(&run.packed);
        ref_buffer_poison(&run.counters);
        dispatch(&run, handle);
        check_dispatch(&run);
        combine(&run, handle);
    }
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    if (test->memory != NULL) ref_buffer_free(test->memory);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    close_run(&run);
}

EP_TEST(low_latency_exchanges_tokens) {
    static const struct {
        unsigned experts, tokens, top_k;
        ncclDataType_t datatype;
        unsigned hidden;
        RefStyle style;
        bool uneven;
    } kShapes[] = {
        {2, 8, 2, ncclBfloat16, 64, kRefDistinct, false},
        {4, 16, 4, ncclBfloat16, 16, kRefMessy, true},
        {4, 9, 3, ncclFloat16, 40, kRefSkewed, true},
        {2, 9, 2, ncclFloat32, 12, kRefOneRank, true},
        {1, 5, 1, ncclBfloat16, 7168, kRefDistinct, true},
        {2, 7, 2, ncclBfloat16, 64, kRefNowhere, false},
    };
    for (unsigned i = 0; i < sizeof(kShapes) / sizeof(kShapes[0]); ++i) {
        Case test = kSmallLl;
        test.local_experts = kShapes[i].experts;
        test.max_tokens = kShapes[i].tokens;
        test.top_k = kShapes[i].top_k;
        test.datatype = kShapes[i].datatype;
        test.hidden = kShapes[i].hidden;
        test.style = kShapes[i].style;
        test.uneven = kShapes[i].uneven;
        test.generation = (Generation)(i % kNumGenerations);
        test.updated = i % 2 == 1;
        test.send_only = i % 3 == 1;
        test.narrow_ids = i % 4 == 1;
        test.scaled = i % 2 == 0;
        exchange(env, &test, 100 + i);
    }
}

EP_TEST(low_latency_serves_every_generation) {
    for (Generation it = kGeneration3; it < kNumGenerations; ++it) {
        Case test = kSmallLl;
        test.generation = it;
        test.send_only = true;
        exchange(env, &test, 200 + it);
    }
}

EP_TEST(low_latency_takes_tensors_in_windows) {
    if (!views_into_windows(env)) return;
    exchange(env, &kSmallLl, 270);
    views_end_windows(env);
}

EP_TEST(low_latency_keeps_a_routing_in_memory_of_callers) {
    if (!ranks_share_a_node()) return;
    RefBuffer memory;
    Case test = kSmallLl;
    test.uneven = true;
    test.memory = &memory;
    exchange(env, &test, 210);
    test.narrow_ids = true;
    exchange(env, &test, 211);
}
