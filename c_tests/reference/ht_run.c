// Driving one high-throughput handle and comparing every byte of its outputs; see ht_run.h.
#include "reference/ht_run.h"

static unsigned rank_of(const HtRun* run) { return (unsigned)run->env->rank; }
static unsigned my_tokens(const HtRun* run) { return run->routing->num_tokens[rank_of(run)]; }

static void upload_given(HtRun* run) {
    ref_buffer_upload(&run->ids, run->given->topk_idx[rank_of(run)]);
    ref_buffer_upload(&run->weights, run->given->weights[rank_of(run)]);
}

void ht_run_give(HtRun* run, RefRouting* given) {
    ref_routing_free(run->given);
    run->given = given;
}

void ht_prepare_dispatch(HtRun* run) {
    run->tokens_seed = ++run->seed;
    ref_format_fill(&run->format, run->tokens_seed, rank_of(run), my_tokens(run), &run->tokens_in, &run->scales_in);
    upload_given(run);
    ref_buffer_poison(&run->tokens_out);
    ref_buffer_poison(&run->scales_out);
    ref_buffer_poison(&run->ids_out);
    ref_buffer_poison(&run->weights_out);
    ref_buffer_poison(&run->counter);
}

static void add_2d(RefList* list, const RefBuffer* buffer, ncclDataType_t datatype,
                   ncclEpTensorTag_t tag, unsigned rows, unsigned columns) {
    const unsigned sizes[] = {rows, columns};
    ref_list_add(list, ref_buffer_data(buffer), datatype, tag, 2, sizes);
}

static void add_tokens(RefList* list, const HtRun* run, const RefBuffer* buffer, unsigned rows) {
    ref_list_add_rows(list, buffer, run->shape.datatype, run->shape.hidden, ref_flat(rows));
}

static void add_routing(RefList* list, const HtRun* run, const RefBuffer* ids,
                        const RefBuffer* weights, unsigned rows) {
    add_2d(list, ids, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, rows, run->shape.top_k);
    add_2d(list, weights, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, rows, run->shape.top_k);
}

static void add_dispatched(HtRun* run, HtPass pass, RefList* inputs, RefList* outputs) {
    const RefFormat* format = &run->format;
    const RefLayout in = ref_flat(my_tokens(run));
    const RefLayout out = ref_flat(run->num_rows);
    ref_list_add_rows(inputs, &run->tokens_in, format->from, format->hidden, in);
    if (format->meaning == kRefForward) {
        ref_list_add_scales(inputs, &run->scales_in, format, format->in_order, in);
    }
    if (!pass.no_tokens) ref_list_add_rows(outputs, &run->tokens_out, format->to, format->hidden, out);
    if (format->meaning != kRefOpaque) {
        ref_list_add_scales(outputs, &run->scales_out, format, format->out_order, out);
    }
}

ncclResult_t ht_launch_dispatch(HtRun* run, HtPass pass, cudaStream_t stream) {
    RefLists lists;
    memset(&lists, 0, sizeof(lists));
    add_dispatched(run, pass, &lists.inputs, &lists.outputs);
    if (pass.forward) add_routing(&lists.inputs, run, &run->ids, &run->weights, my_tokens(run));
    if (pass.forward && !pass.no_routing) {
        add_routing(&lists.outputs, run, &run->ids_out, &run->weights_out, run->num_rows);
    }
    if (pass.counter) {
        ref_list_add(&lists.locals, ref_buffer_data(&run->counter), ncclInt32,
                     NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, 1, &run->local_experts);
    }
    ref_lists_dress(&lists, run->variation++);
    ncclEpDispatchConfig_t config = {ref_format_rounds(&run->format, run->variation)};
    const ncclResult_t result = ref_lists_dispatch(
        &lists, run->handle, pass.send_only, config.round_scales == 0 ? NULL : &config, stream);
    memset(&config, kRefPoison, sizeof(config));
    run->pass = pass;
    return result;
}

// The rows and scales that must arrive; either output may be NULL.
static void expect_rows(const HtRun* run, void* tokens, void* scales) {
    EP_SCOPED uint64_t* numbers = ref_ht_rows(run->routing, rank_of(run));
    const RefLayout layout = ref_flat(run->num_rows);
    for (size_t row = 0; row < run->num_rows; ++row) {
        if (row < run->received) {
            ref_format_place(&run->format, run->tokens_seed, numbers[row], layout, row, tokens, scales);
        } else {
            ref_format_clear(&run->format, layout, row, tokens, scales);
        }
    }
}

bool ht_check_dispatch(HtRun* run) {
    const bool has_routing = run->pass.forward && !run->pass.no_routing;
    EP_SCOPED void* tokens = ref_host_poison(run->tokens_out.bytes);
    EP_SCOPED int64_t* ids = ref_host_poison(run->ids_out.bytes);
    EP_SCOPED float* weights = ref_host_poison(run->weights_out.bytes);
    EP_SCOPED int32_t* counts = ref_host_poison(run->counter.bytes);
    EP_SCOPED void* scales = ref_host_poison(run->scales_out.bytes);
    expect_rows(run, run->pass.no_tokens ? NULL : tokens, run->format.meaning == kRefOpaque ? NULL : scales);
    if (has_routing) {
        ref_ht_dispatch_routing(run->routing, run->given, rank_of(run), run->num_rows, ids, weights);
    }
    if (run->pass.counter) ref_ht_counts(run->routing, rank_of(run), counts);
    bool match = REF_CHECK_BUFFER(&run->tokens_out, tokens);
    match = REF_CHECK_BUFFER(&run->scales_out, scales) && match;
    match = REF_CHECK_BUFFER(&run->ids_out, ids) && match;
    match = REF_CHECK_BUFFER(&run->weights_out, weights) && match;
    match = REF_CHECK_BUFFER(&run->counter, counts) && match;
    return match;
}

void ht_prepare_combine(HtRun* run) {
    const RefRows results = {run->shape.datatype, run->shape.hidden, ++run->seed, false};
    run->results = results;
    // What is in unused rows, and in columns without an expert, must not show in any sum.
    EP_SCOPED void* host = ref_host_poison(run->results_in.bytes);
    EP_SCOPED float* gradients = ref_host_poison(run->gradients_in.bytes);
    ref_rows_fill(&run->results, rank_of(run), 0, run->received, host);
    for (size_t i = 0; i < (size_t)run->received * run->columns; ++i) {
        gradients[i] = ref_weight(run->seed, rank_of(run), i);
    }
    ref_buffer_upload(&run->results_in, host);
    ref_buffer_upload(&run->gradients_in, gradients);
    ref_buffer_poison(&run->combined);
    ref_buffer_poison(&run->gradients_out);
}

ncclResult_t ht_launch_combine(HtRun* run, bool backward, cudaStream_t stream) {
    RefLists lists;
    memset(&lists, 0, sizeof(lists));
    add_tokens(&lists.inputs, run, &run->results_in, run->num_rows);
    add_tokens(&lists.outputs, run, &run->combined, my_tokens(run));
    if (backward) {
        add_2d(&lists.inputs, &run->gradients_in, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS,
               run->num_rows, run->columns);
        add_2d(&lists.outputs, &run->gradients_out, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS,
               my_tokens(run), run->columns);
    }
    ref_lists_dress(&lists, run->variation++);
    const unsigned send_only = run->variation % 2;  // documented to have no effect
    run->backward = backward;
    return ref_lists_combine(&lists, run->handle, send_only, stream);
}

bool ht_check_combine(HtRun* run) {
    EP_SCOPED void* combined = ref_host_poison(run->combined.bytes);
    EP_SCOPED float* gradients = ref_host_poison(run->gradients_out.bytes);
    ref_ht_combine(run->routing, rank_of(run), &run->results, combined);
    if (run->backward) ref_ht_gradients(run->routing, rank_of(run), run->columns, run->results.seed, gradients);
    bool match = REF_CHECK_BUFFER(&run->combined, combined);
    match = REF_CHECK_BUFFER(&run->gradients_out, gradients) && match;
    return match;
}

void ht_prepare(HtRun* run) {
    ht_prepare_dispatch(run);
    ht_prepare_combine(run);
}

bool ht_check(HtRun* run) {
    const bool dispatched = ht_check_dispatch(run);
    return ht_check_combine(run) && dispatched;
}

void ht_dispatch(HtRun* run, HtPass pass) {
    ht_prepare_dispatch(run);
    EP_CHECK_NCCL(ht_launch_dispatch(run, pass, run->env->stream));
    EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, run->env->stream));  // nothing to complete
    ep_sync(run->env);
    ht_check_dispatch(run);
}

void ht_forward(HtRun* run) {
    const HtPass pass = {.forward = true};
    ht_dispatch(run, pass);
}

void ht_cached(HtRun* run) {
    const HtPass pass = {.forward = false};
    ht_dispatch(run, pass);
}

void ht_combine(HtRun* run, bool backward) {
    ht_prepare_combine(run);
    EP_CHECK_NCCL(ht_launch_combine(run, backward, run->env->stream));
    EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, run->env->stream));
    ep_sync(run->env);
    ht_check_combine(run);
}
