// A run of high throughput, flat; see ht_run.h.
#include "suites/second/ht_run.h"

#include "reference/ht.h"

static bool has_wide_counters(const Case* test) { return test->generation % 2 == 0; }

static size_t counter_bytes(const Case* test) {
    return has_wide_counters(test) ? sizeof(int64_t) : sizeof(int32_t);
}

static void fill_results(const HtRun* run) {
    EP_SCOPED void* rows = ref_host_poison(run->results_in.bytes);
    const unsigned most = run->received < run->rows ? run->received : run->rows;
    ref_rows_fill(&run->in.results, run->in.rank, 0, most, rows);
    ref_buffer_upload(&run->results_in, rows);
}

void ht_renew(HtRun* run, uint64_t seed) {
    inputs_renew(&run->in, seed);
    run->received = ref_ht_received(run->in.routing, run->in.rank);
    fill_results(run);
}

void ht_open(HtRun* run, const EpEnv* env, const Case* test, uint64_t seed) {
    inputs_open(&run->in, env, test, seed);
    run->received = ref_ht_received(run->in.routing, run->in.rank);
    run->used = test->recv_rows > 0 ? test->recv_rows : run->received;
    run->rows = test->recv_rows > 0 ? test->recv_rows + kHtSpare : run->received;
    const size_t entries_out = (size_t)run->rows * test->top_k;
    run->tokens_out = ref_buffer_new(run->rows * run->in.row_bytes);
    run->ids_out = ref_buffer_new(entries_out * sizeof(int64_t));
    run->weights_out = ref_buffer_new(entries_out * sizeof(float));
    run->seed = seed;
    run->counters = ref_buffer_new((test->local_experts + kHtSpare) * counter_bytes(test));
    run->total = ref_buffer_new(sizeof(int64_t));
    run->scales_out = ref_buffer_new(scale_bytes(test, run->rows));
    run->results_in = ref_buffer_new_input(run->rows * run->in.row_bytes);
    fill_results(run);
    run->gradients_in = ref_buffer_new_input(entries_out * sizeof(float));
    run->gradients = ref_buffer_new(ref_entries_of(run->in.routing, run->in.rank) * sizeof(float));
    EP_SCOPED float* gradients = ref_host_new(entries_out * sizeof(float));
    for (size_t i = 0; i < entries_out; ++i) gradients[i] = ref_weight(seed, run->in.rank, i);
    ref_buffer_upload(&run->gradients_in, gradients);
}

void ht_close(HtRun* run) {
    RefBuffer* buffers[] = {&run->tokens_out, &run->ids_out, &run->weights_out,
                            &run->counters,   &run->total,   &run->results_in,
                            &run->gradients_in, &run->gradients, &run->scales_out};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); ++i) ref_buffer_free(buffers[i]);
    inputs_close(&run->in);
}

void ht_check_counters(const HtRun* run) {
    const Case* test = run->in.test;
    EP_SCOPED int32_t* counts = ref_host_new((test->local_experts + 1) * sizeof(int32_t));
    ref_ht_counts(run->in.routing, run->in.rank, counts);
    EP_SCOPED int32_t* narrow = ref_host_poison(run->counters.bytes);
    int64_t* wide = (int64_t*)narrow;
    union {
        int64_t wide;
        int32_t narrow;
    } total;
    memset(&total, kRefPoison, sizeof(total));
    for (unsigned i = 0; i < test->local_experts; ++i) {
        if (has_wide_counters(test)) wide[i] = counts[i];
        else narrow[i] = counts[i];
    }
    if (has_wide_counters(test)) total.wide = run->received;
    else total.narrow = (int32_t)run->received;
    REF_CHECK_BUFFER(&run->counters, narrow);
    REF_CHECK_BUFFER(&run->total, &total);
}

typedef struct {
    View ids, counters, total;
    ncclEpLayoutInfo_t info;
} Update;

static void set_update(const HtRun* run, Update* it) {
    const Case* test = run->in.test;
    const ncclDataType_t datatype = has_wide_counters(test) ? ncclInt64 : ncclInt32;
    view_of_ids(&it->ids, &run->in);
    view_of(&it->counters, ref_buffer_data(&run->counters), datatype, test->local_experts + kHtSpare, 0, 0);
    view_of(&it->total, ref_buffer_data(&run->total), datatype, 1, 0, 0);
    it->info = NCCL_EP_LAYOUT_INFO_INIT;
    it->info.expert_counters = &it->counters.tensor;
    it->info.recv_total_counter = &it->total.tensor;
    it->info.expert_offsets = (ncclEpTensor_t*)16;  // flat rows have none, so it is not read
}

ncclEpHandle_t ht_handle(const HtRun* run, ncclEpGroup_t group) {
    Update update;
    set_update(run, &update);
    ncclEpHandle_t handle = handle_of(group, run->in.test, &update.ids, &update.info, run->in.env->stream);
    memset(&update, 0xee, sizeof(update));
    ep_sync(run->in.env);
    scrap_ids(&run->in);
    ht_check_counters(run);
    return handle;
}

ncclResult_t ht_launch_update(const HtRun* run, ncclEpHandle_t handle) {
    Update update;
    set_update(run, &update);
    const ncclResult_t result = ncclEpUpdateHandle(handle, &update.ids.tensor, &update.info, run->in.env->stream);
    memset(&update, 0xee, sizeof(update));
    return result;
}

ncclResult_t ht_launch_dispatch(const HtRun* run, ncclEpHandle_t handle) {
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
    local.recv_topk_idx_kind = test->global_ids ? NCCL_EP_EXPERT_ID_GLOBAL : NCCL_EP_EXPERT_ID_LOCAL;
    ncclEpDispatchConfig_t options = NCCL_EP_DISPATCH_CONFIG_INIT;
    options.send_only = 1;  // without effect
    ScaleViews scales;
    set_scales(&scales, &run->in, &run->scales_out, &tokens_out, &inputs, &outputs, &options);
    void* info = old_layout_info(&local, test->generation);
    void* config = old_dispatch_config(&options, test->scaled ? kGeneration5 : test->generation);
    const void* given = test->updated || test->global_ids ? info : NULL;
    const ncclResult_t result = ncclEpDispatch(handle, &inputs, &outputs, given, config, run->in.env->stream);
    old_free(info);
    old_free(config);
    view_scrap(&tokens);
    view_scrap(&weights);
    view_scrap(&tokens_out);
    view_scrap(&ids_out);
    view_scrap(&weights_out);
    return result;
}

static void check_scales(const HtRun* run) {
    EP_SCOPED void* scales = ref_host_poison(run->scales_out.bytes);
    if (run->in.test->scaled) {
        ref_ht_dispatch_tokens(run->in.routing, run->in.rank, &run->in.scales, run->used, scales);
    }
    REF_CHECK_BUFFER(&run->scales_out, scales);
}

void ht_check_dispatch(const HtRun* run) {
    EP_SCOPED void* tokens = ref_host_poison(run->tokens_out.bytes);
    EP_SCOPED int64_t* ids = ref_host_poison(run->ids_out.bytes);
    EP_SCOPED float* weights = ref_host_poison(run->weights_out.bytes);
    ref_ht_dispatch_tokens(run->in.routing, run->in.rank, &run->in.tokens, run->used, tokens);
    ref_ht_dispatch_routing(run->in.routing, run->in.routing, run->in.rank, run->used, ids, weights);
    const size_t used = (size_t)run->used * run->in.test->top_k;
    const int64_t first = run->in.test->global_ids ? run->in.rank * run->in.test->local_experts : 0;
    for (size_t i = 0; i < used; ++i) ids[i] += ids[i] >= 0 ? first : 0;
    REF_CHECK_BUFFER(&run->tokens_out, tokens);
    check_scales(run);
    REF_CHECK_BUFFER(&run->ids_out, ids);
    REF_CHECK_BUFFER(&run->weights_out, weights);
}

ncclResult_t ht_launch_combine(const HtRun* run, ncclEpHandle_t handle) {
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

ncclResult_t ht_launch_dispatch_back(const HtRun* run, ncclEpHandle_t handle) {
    const Case* test = run->in.test;
    View tokens, tokens_out;
    view_of(&tokens, ref_buffer_data(&run->in.tokens_in), test->datatype, run->in.num_tokens, test->hidden, 0);
    view_of(&tokens_out, ref_buffer_data(&run->tokens_out), test->datatype, run->rows, test->hidden, 0);
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    inputs.tokens = &tokens.tensor;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    outputs.tokens = &tokens_out.tensor;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    config.pass_direction = NCCL_EP_BWD_PASS;
    ScaleViews scales;
    set_scales(&scales, &run->in, &run->scales_out, &tokens_out, &inputs, &outputs, &config);
    const ncclResult_t result = ncclEpDispatch(handle, &inputs, &outputs, NULL, &config, run->in.env->stream);
    view_scrap(&tokens);
    view_scrap(&tokens_out);
    return result;
}

ncclResult_t ht_launch_combine_back(const HtRun* run, ncclEpHandle_t handle) {
    const Case* test = run->in.test;
    View results, gradients_in, combined, gradients;
    view_of(&results, ref_buffer_data(&run->results_in), test->datatype, run->rows, test->hidden, 0);
    view_of(&gradients_in, ref_buffer_data(&run->gradients_in), ncclFloat32, run->rows, test->top_k, 0);
    view_of(&combined, ref_buffer_data(&run->in.combined), test->datatype, run->in.num_tokens, test->hidden, 0);
    view_of(&gradients, ref_buffer_data(&run->gradients), ncclFloat32, run->in.num_tokens, test->top_k, 0);
    ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
    inputs.tokens = &results.tensor;
    inputs.topk_weights = &gradients_in.tensor;
    ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
    outputs.tokens = &combined.tensor;
    outputs.topk_weights = &gradients.tensor;
    ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
    config.pass_direction = NCCL_EP_BWD_PASS;
    const ncclResult_t result = ncclEpCombine(handle, &inputs, &outputs, &config, run->in.env->stream);
    view_scrap(&results);
    view_scrap(&gradients_in);
    view_scrap(&combined);
    view_scrap(&gradients);
    return result;
}

void ht_poison(const HtRun* run) {
    const RefBuffer* outputs[] = {&run->tokens_out, &run->ids_out, &run->weights_out, &run->in.combined,
                                  &run->gradients,  &run->scales_out};
    for (size_t i = 0; i < sizeof(outputs) / sizeof(outputs[0]); ++i) ref_buffer_poison(outputs[i]);
}

void ht_check_dispatch_back(const HtRun* run) {
    EP_SCOPED void* tokens = ref_host_poison(run->tokens_out.bytes);
    ref_ht_dispatch_tokens(run->in.routing, run->in.rank, &run->in.tokens, run->used, tokens);
    REF_CHECK_BUFFER(&run->tokens_out, tokens);
    check_scales(run);
}

void ht_check_combine(const HtRun* run) {
    EP_SCOPED void* expected = ref_host_new(run->in.combined.bytes);
    ref_ht_combine(run->in.routing, run->in.rank, &run->in.results, expected);
    REF_CHECK_BUFFER(&run->in.combined, expected);
}

void ht_check_combine_back(const HtRun* run) {
    ht_check_combine(run);
    EP_SCOPED float* expected = ref_host_new(run->gradients.bytes);
    ref_ht_gradients_by_k(run->in.routing, run->in.rank, run->seed, expected);
    REF_CHECK_BUFFER(&run->gradients, expected);
}

void ht_exchange(const HtRun* run, ncclEpHandle_t handle) {
    ht_poison(run);
    EP_CHECK_NCCL(ht_launch_dispatch(run, handle));
    EP_CHECK_NCCL(ncclEpComplete(handle, NULL, run->in.env->stream));
    EP_CHECK_NCCL(ht_launch_combine(run, handle));
    ep_sync(run->in.env);
    ht_check_dispatch(run);
    ht_check_combine(run);
    ht_poison(run);
    EP_CHECK_NCCL(ht_launch_combine_back(run, handle));
    EP_CHECK_NCCL(ht_launch_dispatch_back(run, handle));
    ep_sync(run->in.env);
    ht_check_dispatch_back(run);
    ht_check_combine_back(run);
}
