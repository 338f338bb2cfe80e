#include "suites/second/zones_run.h"

// Slots that the tensors have beyond those that are used.
enum { kSpare = 3 };

static size_t counter_bytes(const ZonesRun* run) { return ep_datatype_size(run->counter); }

static void fill_inputs(ZonesRun* run) {
    EP_SCOPED unsigned char* rows = ref_host_poison(run->results_in.bytes);
    EP_SCOPED float* gradients = ref_host_new(run->gradients_in.bytes);
    for (size_t slot = 0; slot < run->slots; ++slot) {
        ref_row_fill(&run->in.results, ref_row_of(run->in.rank, slot), rows + slot * run->in.row_bytes);
        gradients[slot] = ref_weight(run->seed, run->in.rank, slot);
    }
    ref_buffer_upload(&run->results_in, rows);
    ref_buffer_upload(&run->gradients_in, gradients);
}

static void find_zones(ZonesRun* run) {
    const Case* test = run->in.test;
    run->zones = ref_zones_new(run->in.routing, test->alignment, test->drops ? test->recv_rows : ~0u);
    run->own = &run->zones[run->in.rank];
}

void zones_open(ZonesRun* run, const EpEnv* env, const Case* test, uint64_t seed) {
    inputs_open(&run->in, env, test, seed);
    run->seed = seed;
    run->counter = seed % 2 == 0 ? ncclInt64 : ncclInt32;
    find_zones(run);
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

void zones_close(ZonesRun* run) {
    RefBuffer* buffers[] = {&run->tokens_out, &run->weights_out,  &run->counters,     &run->offsets,
                            &run->total,      &run->results_in,   &run->gradients_in, &run->gradients,
                            &run->scales_out};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); ++i) ref_buffer_free(buffers[i]);
    ref_zones_free(run->zones);
    inputs_close(&run->in);
}

void zones_renew(ZonesRun* run, uint64_t seed) {
    ref_zones_free(run->zones);
    inputs_renew(&run->in, seed);
    find_zones(run);
}

// ---- ZonesCounters

void zones_set_counters(const ZonesRun* run, ZonesCounters* it) {
    const size_t experts = run->in.test->local_experts + 1;
    view_of(&it->counters, ref_buffer_data(&run->counters), run->counter, experts, 0, 0);
    view_of(&it->offsets, ref_buffer_data(&run->offsets), run->counter, experts, 0, 0);
    view_of(&it->total, ref_buffer_data(&run->total), run->counter, 1, 0, 0);
    it->info = NCCL_EP_LAYOUT_INFO_INIT;
    it->info.expert_counters = &it->counters.tensor;
    it->info.expert_offsets = &it->offsets.tensor;
    it->info.recv_total_counter = &it->total.tensor;
}

static void put_number(const ZonesRun* run, void* numbers, size_t index, size_t number) {
    if (run->counter == ncclInt64) ((int64_t*)numbers)[index] = (int64_t)number;
    else ((int32_t*)numbers)[index] = (int32_t)number;
}

void zones_check_counters(const ZonesRun* run) {
    const unsigned experts = run->in.test->local_experts;
    EP_SCOPED void* counters = ref_host_poison(run->counters.bytes);
    EP_SCOPED void* offsets = ref_host_poison(run->offsets.bytes);
    int64_t total = 0;
    for (unsigned i = 0; i < experts; ++i) {
        put_number(run, counters, i, ref_zones_length(run->own, i));
        put_number(run, offsets, i, ref_zones_begin(run->own, i));
    }
    put_number(run, &total, 0, run->own->begins[experts]);
    REF_CHECK_BUFFER(&run->counters, counters);
    REF_CHECK_BUFFER(&run->offsets, offsets);
    REF_CHECK_BUFFER(&run->total, &total);
    const RefBuffer* all[] = {&run->counters, &run->offsets, &run->total};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); ++i) ref_buffer_poison(all[i]);
}

// ---- Operations

ncclResult_t zones_launch_dispatch(const ZonesRun* run, ncclEpHandle_t handle, ncclEpPassDir_t pass) {
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
    ZonesCounters counters;
    zones_set_counters(run, &counters);
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

void zones_check_dispatch(const ZonesRun* run, ncclEpPassDir_t pass) {
    EP_SCOPED void* tokens = ref_host_poison(run->tokens_out.bytes);
    EP_SCOPED float* weights = ref_host_poison(run->weights_out.bytes);
    ref_zones_dispatch(run->own, &run->in.tokens, tokens);
    if (pass == NCCL_EP_FWD_PASS) ref_zones_weights(run->own, run->used, weights);
    REF_CHECK_BUFFER(&run->tokens_out, tokens);
    REF_CHECK_BUFFER(&run->weights_out, weights);
    EP_SCOPED void* scales = ref_host_poison(run->scales_out.bytes);
    if (run->in.test->scaled) ref_zones_dispatch(run->own, &run->in.scales, scales);
    REF_CHECK_BUFFER(&run->scales_out, scales);
}

ncclResult_t zones_launch_combine(const ZonesRun* run, ncclEpHandle_t handle, ncclEpPassDir_t pass) {
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

void zones_check_combine(const ZonesRun* run, ncclEpPassDir_t pass) {
    EP_SCOPED void* expected = ref_host_new(run->in.combined.bytes);
    ref_zones_combine(run->zones, run->in.rank, &run->in.results, expected);
    REF_CHECK_BUFFER(&run->in.combined, expected);
    EP_SCOPED float* gradients = ref_host_poison(run->gradients.bytes);
    if (pass == NCCL_EP_BWD_PASS) ref_zones_gradients(run->zones, run->in.rank, run->seed, gradients);
    REF_CHECK_BUFFER(&run->gradients, gradients);
}

void zones_exchange(const ZonesRun* run, ncclEpHandle_t handle, ncclEpPassDir_t pass) {
    const RefBuffer* outputs[] = {&run->tokens_out, &run->weights_out, &run->in.combined, &run->gradients,
                                  &run->scales_out};
    for (size_t i = 0; i < sizeof(outputs) / sizeof(outputs[0]); ++i) ref_buffer_poison(outputs[i]);
    EP_CHECK_NCCL(zones_launch_dispatch(run, handle, pass));
    EP_CHECK_NCCL(zones_launch_combine(run, handle, pass));
    ep_sync(run->in.env);
    zones_check_dispatch(run, pass);
    zones_check_combine(run, pass);
    if (pass == NCCL_EP_FWD_PASS) zones_check_counters(run);
}
