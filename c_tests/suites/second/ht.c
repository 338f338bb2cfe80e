// High throughput, flat: every byte of a dispatch and of its combine, against the reference.
#include <stdlib.h>

#include "reference/ht.h"
#include "suites/second/second.h"

// Rows that the tensors have beyond the group's bound.
enum { kSpare = 3 };

typedef struct {
    Inputs in;
    unsigned received;
    unsigned used;  // rows that a dispatch writes
    unsigned rows;  // of the tensors
    RefBuffer tokens_out, ids_out, weights_out, counters, total, results_in;
} Run;

static void open_run(Run* run, const EpEnv* env, const Case* test, uint64_t seed) {
    inputs_open(&run->in, env, test, seed);
    run->received = ref_ht_received(run->in.routing, run->in.rank);
    run->used = test->recv_rows > 0 ? test->recv_rows : run->received;
    run->rows = test->recv_rows > 0 ? test->recv_rows + kSpare : run->received;
    const size_t entries_out = (size_t)run->rows * test->top_k;
    run->tokens_out = ref_buffer_new(run->rows * run->in.row_bytes);
    run->ids_out = ref_buffer_new(entries_out * sizeof(int64_t));
    run->weights_out = ref_buffer_new(entries_out * sizeof(float));
    run->counters = ref_buffer_new((test->local_experts + kSpare) * sizeof(int32_t));
    run->total = ref_buffer_new(sizeof(int64_t));
    run->results_in = ref_buffer_new_input(run->rows * run->in.row_bytes);
    void* rows = ref_host_poison(run->results_in.bytes);
    const unsigned most = run->received < run->rows ? run->received : run->rows;
    ref_rows_fill(&run->in.results, run->in.rank, 0, most, rows);
    ref_buffer_upload(&run->results_in, rows);
    free(rows);
}

static void close_run(Run* run) {
    RefBuffer* buffers[] = {&run->tokens_out, &run->ids_out, &run->weights_out,
                            &run->counters,   &run->total,   &run->results_in};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); ++i) ref_buffer_free(buffers[i]);
    inputs_close(&run->in);
}

// With counters in the middle and last of the structs, and a total of either width.
static ncclEpHandle_t open_handle(const Run* run, ncclEpGroup_t group) {
    const Case* test = run->in.test;
    const bool is_wide = test->generation % 2 == 0;
    View ids, counters, total;
    view_of(&ids, ref_buffer_data(&run->in.ids), ncclInt64, run->in.num_tokens, test->top_k, 0);
    view_of(&counters, ref_buffer_data(&run->counters), ncclInt32, test->local_experts + kSpare, 0,
            0);
    view_of(&total, ref_buffer_data(&run->total), is_wide ? ncclInt64 : ncclInt32, 1, 0, 0);
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    info.expert_counters = &counters.tensor;
    info.recv_total_counter = &total.tensor;
    info.expert_offsets = (ncclEpTensor_t*)16;  // flat rows have none, so it is not read
    ncclEpHandle_t handle = handle_of(group, test, &ids, &info, run->in.env->stream);
    view_scrap(&ids);
    view_scrap(&counters);
    view_scrap(&total);
    ep_sync(run->in.env);
    int32_t* counts = ref_host_poison(run->counters.bytes);
    ref_ht_counts(run->in.routing, run->in.rank, counts);
    REF_CHECK_BUFFER(&run->counters, counts);
    free(counts);
    union {
        int64_t wide;
        int32_t narrow;
    } expected;
    expected.wide = is_wide ? 0 : (int64_t)0xa5a5a5a5a5a5a5a5ull;
    if (is_wide) expected.wide = run->received;
    else expected.narrow = (int32_t)run->received;
    REF_CHECK_BUFFER(&run->total, &expected);
    return handle;
}

static ncclResult_t launch_dispatch(const Run* run, ncclEpHandle_t handle) {
    const Case* test = run->in.test;
    View tokens, weights, tokens_out, ids_out, weights_out;
    view_of(&tokens, ref_buffer_data(&run->in.tokens_in), test->datatype, run->in.num_tokens, test->hidden,
            0);
    view_of(&weights, ref_buffer_data(&run->in.weights), ncclFloat32, run->in.num_tokens, test->top_k, 0);
    view_of(&tokens_out, ref_buffer_data(&run->tokens_out), test->datatype, run->rows, test->hidden,
            0);
    view_of(&ids_out, ref_buffer_data(&run->ids_out), ncclInt64, run->rows, test->top_k, 0);
    view_of(&weights_out, ref_buffer_data(&run->weights_out), ncclFloat32, run->rows, test->top_k,
            0);
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    inputs.tokens = &tokens.tensor;
    inputs.topk_weights = &weights.tensor;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    outputs.tokens = &tokens_out.tensor;
    outputs.topk_weights = &weights_out.tensor;
    outputs.topk_idx = &ids_out.tensor;
    ncclEpLayoutInfo_t local = NCCL_EP_LAYOUT_INFO_INIT;
    local.recv_topk_idx_kind = NCCL_EP_EXPERT_ID_LOCAL;
    ncclEpDispatchConfig_t options = NCCL_EP_DISPATCH_CONFIG_INIT;
    options.send_only = 1;  // without effect
    void* info = old_layout_info(&local, test->generation);
    void* config = old_dispatch_config(&options, test->generation);
    const ncclResult_t result = ncclEpDispatch(handle, &inputs, &outputs,
                                               test->updated ? info : NULL, config, run->in.env->stream);
    old_free(info);
    old_free(config);
    view_scrap(&tokens);
    view_scrap(&weights);
    view_scrap(&tokens_out);
    view_scrap(&ids_out);
    view_scrap(&weights_out);
    return result;
}

static void dispatch(const Run* run, ncclEpHandle_t handle) {
    EP_CHECK_NCCL(launch_dispatch(run, handle));
    EP_CHECK_NCCL(ncclEpComplete(handle, NULL, run->in.env->stream));
    ep_sync(run->in.env);
}

static void check_dispatch(const Run* run) {
    void* tokens = ref_host_poison(run->tokens_out.bytes);
    int64_t* ids = ref_host_poison(run->ids_out.bytes);
    float* weights = ref_host_poison(run->weights_out.bytes);
    ref_ht_dispatch_tokens(run->in.routing, run->in.rank, &run->in.tokens, run->used, tokens);
    ref_ht_dispatch_routing(run->in.routing, run->in.routing, run->in.rank, run->used, ids, weights);
    REF_CHECK_BUFFER(&run->tokens_out, tokens);
    REF_CHECK_BUFFER(&run->ids_out, ids);
    REF_CHECK_BUFFER(&run->weights_out, weights);
    free(tokens);
    free(ids);
    free(weights);
}

static ncclResult_t launch_combine(const Run* run, ncclEpHandle_t handle) {
    const Case* test = run->in.test;
    View results, combined;
    view_of(&results, ref_buffer_data(&run->results_in), test->datatype, run->rows, test->hidden, 0);
    view_of(&combined, ref_buffer_data(&run->in.combined), test->datatype, run->in.num_tokens,
            test->hidden, 0);
    ncclEpCombineInputs_t now = NCCL_EP_COMBINE_INPUTS_INIT;
    now.tokens = &results.tensor;
    ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
    outputs.tokens = &combined.tensor;
    void* inputs = old_combine_inputs(&now, test->generation);
    const ncclResult_t result = ncclEpCombine(handle, inputs, &outputs, NULL, run->in.env->stream);
    old_free(inputs);
    view_scrap(&results);
    view_scrap(&combined);
    return result;
}

static void combine(const Run* run, ncclEpHandle_t handle) {
    EP_CHECK_NCCL(launch_combine(run, handle));
    ep_sync(run->in.env);
    void* expected = ref_host_new(run->in.combined.bytes);
    ref_ht_combine(run->in.routing, run->in.rank, &run->in.results, expected);
    REF_CHECK_BUFFER(&run->in.combined, expected);
    free(expected);
}

// The bytes of the handle's memory serve another handle at another address.
static void combine_elsewhere(const Run* run, ncclEpGroup_t group) {
    RefBuffer before = *run->in.test->memory;
    void* bytes = ref_host_new(before.bytes);
    ep_download(bytes, ref_buffer_data(&before), before.bytes);
    ncclEpHandle_t handle = handle_in_memory(group, run->in.test, bytes);
    free(bytes);
    ref_buffer_free(&before);
    ref_buffer_poison(&run->in.combined);
    combine(run, handle);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    ref_buffer_free(run->in.test->memory);
}

static void exchange(const EpEnv* env, const Case* test, uint64_t seed) {
    Run run;
    open_run(&run, env, test, seed);
    ncclEpGroup_t group = group_of(env, test);
    ncclEpHandle_t handle = open_handle(&run, group);
    for (unsigned turn = 0; turn < 2; ++turn) {
        ref_buffer_poison(&run.tokens_out);
        ref_buffer_poison(&run.ids_out);
        ref_buffer_poison(&run.weights_out);
        dispatch(&run, handle);
        check_dispatch(&run);
        combine(&run, handle);
    }
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    if (test->memory != NULL) combine_elsewhere(&run, group);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    close_run(&run);
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
    RefBuffer memory;
    Case test = kSmallHt;
    test.recv_rows = (unsigned)env->size * test.max_tokens;
    test.uneven = true;
    test.memory = &memory;
    exchange(env, &test, 500);
}

// The rows behind the bound are still poison, and the next call tells.
EP_TEST(more_rows_than_the_bound_fail_the_group) {
    if (env->size < 2) return;
    Case test = kSmallHt;
    test.style = kRefOneRank;
    test.recv_rows = test.max_tokens;
    const bool is_full = env->rank == env->size - 1;
    Run run;
    open_run(&run, env, &test, 600);
    EP_CHECK_EQ_I64(run.received > test.recv_rows, is_full);
    ncclEpGroup_t group = group_of(env, &test);
    ncclEpHandle_t handle = open_handle(&run, group);
    EP_CHECK_NCCL(launch_dispatch(&run, handle));
    ep_sync(env);
    if (is_full) {
        CHECK_REFUSED(launch_dispatch(&run, handle), ncclInvalidUsage, "outputs.tokens.sizes[0]");
        const size_t used = test.recv_rows * run.in.row_bytes;
        void* poison = ref_host_poison(kSpare * run.in.row_bytes);
        void* got = ref_host_new(kSpare * run.in.row_bytes);
        const unsigned char* rows = ref_buffer_data(&run.tokens_out);
        ep_download(got, rows + used, kSpare * run.in.row_bytes);
        EP_CHECK_EQ_BYTES(got, poison, kSpare * run.in.row_bytes);
        free(poison);
        free(got);
    }
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    close_run(&run);
}

// In a group without a bound operations on too few rows are refused before they write or send anything.
EP_TEST(rows_that_come_are_counted_before_a_dispatch) {
    Case test = kSmallHt;
    Run run;
    open_run(&run, env, &test, 700);
    ncclEpGroup_t group = group_of(env, &test);
    ncclEpHandle_t handle = open_handle(&run, group);
    if (run.received > 0) {
        run.rows = run.received - 1;
        CHECK_REFUSED(launch_dispatch(&run, handle), ncclInvalidArgument,
                      "outputs.tokens.sizes[0]: must have room for all rows that this rank receives");
        run.rows = run.received;
    }
    dispatch(&run, handle);
    check_dispatch(&run);
    if (run.received > 0) {
        run.rows = run.received - 1;
        CHECK_REFUSED(launch_combine(&run, handle), ncclInvalidUsage,
                      "inputs.tokens.sizes[0]: must hold all tokens that this rank receives");
        run.rows = run.received;
    }
    combine(&run, handle);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    close_run(&run);
}
