// Low latency, rank-major: every byte of a dispatch and of its combine, against the reference.
#include "reference/rank_major.h"
#include "suites/second/second.h"

// Entries that the counter has beyond what the library needs.
enum { kSpare = 1 };

typedef struct {
    Inputs in;
    RefLayout layout;
    size_t rows;
    RefBuffer tokens_out, ids_out, weights_out, counters, results_in, scales_out;
} Run;

static size_t id_bytes(const Case* test) { return test->narrow_ids ? sizeof(int32_t) : sizeof(int64_t); }

static void open_run(Run* run, const EpEnv* env, const Case* test, uint64_t seed) {
    inputs_open(&run->in, env, test, seed);
    run->layout = ref_rank_major((unsigned)env->size, test->max_tokens);
    run->rows = ref_layout_rows(run->layout);
    const size_t entries = run->rows * test->top_k;
    run->tokens_out = ref_buffer_new(run->rows * run->in.row_bytes);
    run->ids_out = ref_buffer_new(entries * id_bytes(test));
    run->weights_out = ref_buffer_new(entries * sizeof(float));
    run->counters = ref_buffer_new((size_t)(env->size + kSpare) * sizeof(int32_t));
    run->scales_out = ref_buffer_new(scale_bytes(test, run->rows));
    run->results_in = ref_buffer_new_input(run->rows * run->in.row_bytes);
    EP_SCOPED void* rows = ref_host_poison(run->results_in.bytes);
    ref_rank_results(run->in.routing, run->in.rank, run->layout, &run->in.results, rows);
    ref_buffer_upload(&run->results_in, rows);
}

static void close_run(Run* run) {
    RefBuffer* buffers[] = {&run->tokens_out, &run->ids_out, &run->weights_out, &run->counters, &run->results_in,
                            &run->scales_out};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); ++i) ref_buffer_free(buffers[i]);
    inputs_close(&run->in);
}

static void dispatch(const Run* run, ncclEpHandle_t handle) {
    const Case* test = run->in.test;
    const size_t ranks = (size_t)run->in.env->size;
    View tokens, weights, tokens_out, ids_out, weights_out, counters;
    view_of(&tokens, ref_buffer_data(&run->in.tokens_in), test->datatype, run->in.num_tokens, test->hidden, 0);
    view_of(&weights, ref_buffer_data(&run->in.weights), ncclFloat32, run->in.num_tokens, test->top_k, 0);
    view_of(&tokens_out, ref_buffer_data(&run->tokens_out), test->datatype, ranks, test->max_tokens, test->hidden);
    view_of(&ids_out, ref_buffer_data(&run->ids_out), test->narrow_ids ? ncclInt32 : ncclInt64, ranks,
            test->max_tokens, test->top_k);
    view_of(&weights_out, ref_buffer_data(&run->weights_out), ncclFloat32, ranks, test->max_tokens, test->top_k);
    view_of(&counters, ref_buffer_data(&run->counters), ncclInt32, ranks + kSpare, 0, 0);
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    inputs.tokens = &tokens.tensor;
    inputs.topk_weights = &weights.tensor;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    outputs.tokens = &tokens_out.tensor;
    outputs.topk_idx = &ids_out.tensor;
    outputs.topk_weights = &weights_out.tensor;
    ncclEpLayoutInfo_t now = NCCL_EP_LAYOUT_INFO_INIT;
    now.src_rank_counters = &counters.tensor;
    now.recv_topk_idx_kind = test->global_ids ? NCCL_EP_EXPERT_ID_GLOBAL : NCCL_EP_EXPERT_ID_AUTO;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    config.send_only = test->send_only;
    ScaleViews scales;
    set_scales(&scales, &run->in, &run->scales_out, &tokens_out, &inputs, &outputs, &config);
    // The struct of generation 3 cannot ask for global ids.
    void* info = old_layout_info(&now, test->global_ids ? kGeneration5 : test->generation);
    EP_CHECK_NCCL(ncclEpDispatch(handle, &inputs, &outputs, info, &config, run->in.env->stream));
    old_free(info);
    View* views[] = {&tokens, &weights, &tokens_out, &ids_out, &weights_out, &counters};
    for (size_t i = 0; i < sizeof(views) / sizeof(views[0]); ++i) view_scrap(views[i]);
    EP_CHECK_NCCL(ncclEpComplete(handle, NULL, run->in.env->stream));
    ep_sync(run->in.env);
}

typedef struct {
    const RefRows* tokens;
    unsigned char* out;
} Rows;

static void write_row(unsigned source, size_t token, size_t row, void* context) {
    const Rows* rows = context;
    ref_row_fill(rows->tokens, ref_row_of(source, token), rows->out + row * ref_row_bytes(rows->tokens));
}

// All ids are written, rows and weights where something has come.
static void check_dispatch(const Run* run) {
    const Case* test = run->in.test;
    const RefRouting* routing = run->in.routing;
    const size_t entries = run->rows * test->top_k;
    Rows rows = {&run->in.tokens, ref_host_poison(run->tokens_out.bytes)};
    ref_rank_each(routing, run->in.rank, run->layout, write_row, &rows);
    Rows scales = {&run->in.scales, ref_host_poison(run->scales_out.bytes)};
    if (test->scaled) ref_rank_each(routing, run->in.rank, run->layout, write_row, &scales);
    REF_CHECK_BUFFER(&run->scales_out, scales.out);
    free(scales.out);
    EP_SCOPED int64_t* ids = ref_host_new(entries * sizeof(int64_t));
    EP_SCOPED float* weights = ref_host_poison(run->weights_out.bytes);
    ref_rank_beside(routing, run->in.rank, run->layout, ids, weights);
    EP_SCOPED int32_t* narrow = ref_host_new(entries * sizeof(int32_t));
    for (size_t i = 0; i < entries; ++i) {
        if (test->global_ids && ids[i] >= 0) ids[i] += run->in.rank * test->local_experts;
        narrow[i] = (int32_t)ids[i];
    }
    EP_SCOPED int32_t* counts = ref_host_poison(run->counters.bytes);
    ref_rank_counts(routing, run->in.rank, counts);
    REF_CHECK_BUFFER(&run->tokens_out, rows.out);
    REF_CHECK_BUFFER(&run->ids_out, test->narrow_ids ? (void*)narrow : (void*)ids);
    REF_CHECK_BUFFER(&run->weights_out, weights);
    REF_CHECK_BUFFER(&run->counters, counts);
    free(rows.out);
}

static void combine(const Run* run, ncclEpHandle_t handle) {
    const Case* test = run->in.test;
    View results, combined;
    view_of(&results, ref_buffer_data(&run->results_in), test->datatype, (size_t)run->in.env->size,
            test->max_tokens, test->hidden);
    view_of(&combined, ref_buffer_data(&run->in.combined), test->datatype, run->in.num_tokens, test->hidden, 0);
    ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
    inputs.tokens = &results.tensor;
    ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
    outputs.tokens = &combined.tensor;
    ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
    config.send_only = test->send_only;
    EP_CHECK_NCCL(ncclEpCombine(handle, &inputs, &outputs, &config, run->in.env->stream));
    view_scrap(&results);
    view_scrap(&combined);
    EP_CHECK_NCCL(ncclEpComplete(handle, NULL, run->in.env->stream));
    ep_sync(run->in.env);
    EP_SCOPED void* expected = ref_host_new(run->in.combined.bytes);
    ref_rank_combine(run->in.routing, run->in.rank, run->layout, &run->in.results, expected);
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
        ref_buffer_poison(&run.tokens_out);
        ref_buffer_poison(&run.ids_out);
        ref_buffer_poison(&run.weights_out);
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

EP_TEST(low_latency_exchanges_tokens_by_rank) {
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
        {2, 7, 2, ncclBfloat16, 64, kRefNowhere, false},
    };
    RefBuffer memory;
    for (unsigned i = 0; i < sizeof(kShapes) / sizeof(kShapes[0]); ++i) {
        Case test = kSmallLl;
        test.by_rank = true;
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
        test.narrow_ids = i != 0;
        test.global_ids = i % 2 == 1;
        test.scaled = i % 2 == 1;
        test.memory = i == 2 && ranks_share_a_node() ? &memory : NULL;
        exchange(env, &test, 250 + i);
    }
}
