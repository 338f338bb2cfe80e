// Driving one handle and comparing every byte of its outputs; see run.h.
#include "reference/run.h"

static unsigned rank_of(const RefRun* run) { return (unsigned)run->env->rank; }
static unsigned my_tokens(const RefRun* run) { return run->now->num_tokens[rank_of(run)]; }

void ref_prepare_dispatch(RefRun* run) {
    run->tokens_seed = ++run->seed;
    ref_format_fill(&run->format, run->tokens_seed, rank_of(run), my_tokens(run), &run->tokens_in, &run->scales_in);
    const RefBuffer* outputs[] = {&run->tokens_out, &run->scales_out, &run->counter, &run->ids_out, &run->weights_out};
    for (size_t i = 0; i < COUNT(outputs); ++i) ref_buffer_poison(outputs[i]);
}

// Without an extent of columns if there are 0.
static void add(RefList* list, void* data, ncclDataType_t datatype, ncclEpTensorTag_t tag, RefLayout layout,
                unsigned columns) {
    unsigned sizes[3];
    const unsigned dims = ref_layout_sizes(layout, columns, sizes);
    ref_list_add(list, data, datatype, tag, columns > 0 ? dims : dims - 1, sizes);
}

static void add_ids(RefList* list, const RefRun* run, const RefBuffer* ids, RefLayout layout) {
    add(list, ref_buffer_data(ids), ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, layout, run->shape.top_k);
}

static void add_weights(RefList* list, const RefBuffer* weights, RefLayout layout, unsigned columns) {
    add(list, ref_buffer_data(weights), ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, layout, columns);
}

static void add_dispatched(RefRun* run, RefPass pass, RefLists* lists) {
    const RefFormat* format = &run->format;
    const RefLayout in = ref_flat(my_tokens(run));
    const RefLayout out = ref_run_layout(run, run->by_rank);
    ref_list_add_rows(&lists->inputs, &run->tokens_in, format->from, format->hidden, in);
    if (format->meaning == kRefForward) {
        ref_list_add_scales(&lists->inputs, &run->scales_in, format, format->in_order, in);
    }
    if (run->by_rank && run->as_view) {
        add(&lists->outputs, NULL, format->to, NCCL_EP_TENSOR_TAG_TOKENS, out, format->hidden);
    } else if (!pass.no_tokens) {
        ref_list_add_rows(&lists->outputs, &run->tokens_out, format->to, format->hidden, out);
    }
    if (format->meaning != kRefOpaque) {
        ref_list_add_scales(&lists->outputs, &run->scales_out, format, format->out_order, out);
    }
    const bool by_expert = run->alignment > 0;
    if (run->ht && !pass.cached && !by_expert) add_ids(&lists->inputs, run, &run->ids, in);
    if (run->ht ? !pass.cached : run->by_rank) {
        add_weights(&lists->inputs, &run->weights, in, run->shape.top_k);
        if (!pass.no_routing && !by_expert) add_ids(&lists->outputs, run, &run->ids_out, out);
        if (!pass.no_routing) add_weights(&lists->outputs, &run->weights_out, out, by_expert ? 0 : run->shape.top_k);
    }
    if (run->ht ? pass.counter : !run->without_counter) {
        ref_list_add(&lists->locals, ref_buffer_data(&run->counter), ncclInt32,
                     NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, 1, run->ht ? &run->local_experts : &out.parts);
    }
}

static size_t view_bytes(const RefRun* run) {
    return ref_layout_rows(ref_run_layout(run, true)) * ref_format_out_bytes(&run->format);
}

void ref_keep_view(RefRun* run, cudaStream_t stream) {
    if (!run->keeps_view) return;
    run->keeps_view = false;
    EP_CHECK_CUDA(cudaMemcpyAsync(ref_buffer_data(&run->tokens_out), run->view, view_bytes(run),
                                  cudaMemcpyDeviceToDevice, stream));
}

static void note_sent(RefRun* run, void* view) {
    ref_routing_free(run->sent);
    run->sent = ref_routing_copy(run->now);
    run->sent_by_rank = run->by_rank;
    run->sent_as_view = run->keeps_view = run->by_rank && run->as_view;
    run->view = run->sent_as_view ? view : NULL;
    EP_CHECK(!run->sent_as_view || view != NULL);
}

ncclResult_t ref_launch_dispatch(RefRun* run, RefPass pass, cudaStream_t stream) {
    RefLists lists;
    memset(&lists, 0, sizeof(lists));
    void* view = NULL;
    lists.view = run->ht ? NULL : &view;
    add_dispatched(run, pass, &lists);
    ref_lists_dress(&lists, run->variation++);
    ncclEpDispatchConfig_t config = {ref_format_rounds(&run->format, run->variation)};
    const bool without_config = config.round_scales == 0 || run->format.meaning == kRefOpaque;
    const bool passes_none = without_config && run->variation % 2 == 0;
    const ncclResult_t result =
        ref_lists_dispatch(&lists, run->handle, pass.send_only, passes_none ? NULL : &config, stream);
    memset(&config, kRefPoison, sizeof(config));
    run->pass = pass;
    if (result != ncclSuccess || run->ht) return result;
    note_sent(run, view);
    if (!pass.send_only) ref_keep_view(run, stream);
    return result;
}

// What a dispatch must write.
typedef struct {
    const RefRun* run;
    void *tokens, *scales;
    int32_t* counts;
    int64_t* ids;
    float* weights;
} Expected;

static void place_row(unsigned source, size_t token, size_t row, void* context) {
    const Expected* expected = context;
    const RefRun* run = expected->run;
    ref_format_place(&run->format, run->tokens_seed, ref_row_of(source, token), ref_run_layout(run, true), row,
                     expected->tokens, expected->scales);
}

static void expect_by_rank(const Expected* expected) {
    const RefRun* run = expected->run;
    const RefLayout layout = ref_run_layout(run, true);
    ref_rank_each(run->sent, rank_of(run), layout, place_row, (void*)expected);
    ref_rank_beside(run->sent, rank_of(run), layout, expected->ids, expected->weights);
    if (!run->without_counter) ref_rank_counts(run->sent, rank_of(run), expected->counts);
}

static void expect_by_expert(const Expected* expected) {
    const RefRun* run = expected->run;
    EP_SCOPED int32_t* used = ref_host_new(run->local_experts * sizeof(*used));
    EP_SCOPED uint64_t* numbers = ref_ll_slots(run->sent, rank_of(run), run->layout, used);
    const uint64_t* number = numbers;
    for (unsigned expert = 0; expert < run->local_experts; ++expert) {
        for (int32_t slot = 0; slot < used[expert]; ++slot) {
            const size_t row = ref_layout_row(run->layout, expert, (size_t)slot);
            ref_format_place(&run->format, run->tokens_seed, *number++, run->layout, row, expected->tokens,
                             expected->scales);
        }
    }
    if (!run->without_counter) memcpy(expected->counts, used, run->local_experts * sizeof(*used));
}

static void expect_ht(const Expected* expected) {
    const RefRun* run = expected->run;
    EP_SCOPED uint64_t* numbers = ref_ht_rows(run->sent, rank_of(run));
    const RefLayout layout = ref_run_layout(run, false);
    void* tokens = run->pass.no_tokens ? NULL : expected->tokens;
    for (size_t row = 0; row < run->num_rows; ++row) {
        if (row < run->received) {
            ref_format_place(&run->format, run->tokens_seed, numbers[row], layout, row, tokens, expected->scales);
        } else {
            ref_format_clear(&run->format, layout, row, tokens, expected->scales);
        }
    }
    if (!run->pass.cached && !run->pass.no_routing) {
        ref_ht_dispatch_routing(run->sent, run->now, rank_of(run), run->num_rows, expected->ids, expected->weights);
    }
    if (run->pass.counter) ref_ht_counts(run->sent, rank_of(run), expected->counts);
}

// A zone's slots without a row have zeros, slots of no zone are as before.
static void expect_zones(const Expected* expected) {
    const RefRun* run = expected->run;
    const RefZones* zones = &run->zones[rank_of(run)];
    const RefLayout layout = ref_run_layout(run, false);
    for (size_t slot = 0; slot < run->received; ++slot) {
        ref_format_clear(&run->format, layout, slot, expected->tokens, expected->scales);
    }
    for (unsigned source = 0; source < run->sent->num_ranks; ++source) {
        for (size_t entry = 0; entry < (size_t)run->sent->num_tokens[source] * run->local_experts; ++entry) {
            const size_t slot = zones->slots[zones->first_of[source] * run->local_experts + entry];
            if (slot >= zones->most) continue;
            ref_format_place(&run->format, run->tokens_seed, ref_row_of(source, entry / run->local_experts), layout,
                             slot, expected->tokens, expected->scales);
        }
    }
    if (!run->pass.cached) ref_zones_weights(zones, run->num_rows, expected->weights);
    ref_ht_counts(run->sent, rank_of(run), expected->counts);
}

// What nothing is said of: the rows of a view that hold nothing have any content.
static void* unchanged_rows(RefRun* run) {
    void* rows = ref_host_poison(run->tokens_out.bytes);
    if (!run->sent_as_view) return rows;
    ref_keep_view(run, run->env->stream);
    EP_CHECK_CUDA(cudaStreamSynchronize(run->env->stream));
    EP_CHECK_CUDA(cudaMemcpy(rows, ref_buffer_data(&run->tokens_out), view_bytes(run), cudaMemcpyDeviceToHost));
    return rows;
}

bool ref_check_dispatch(RefRun* run) {
    ep_sync(run->env);
    EP_SCOPED void* tokens = unchanged_rows(run);
    EP_SCOPED void* scales = ref_host_poison(run->scales_out.bytes);
    EP_SCOPED int32_t* counts = ref_host_poison(run->counter.bytes);
    EP_SCOPED int64_t* ids = ref_host_poison(run->ids_out.bytes);
    EP_SCOPED float* weights = ref_host_poison(run->weights_out.bytes);
    const Expected expected = {run, tokens, run->format.meaning == kRefOpaque ? NULL : scales, counts, ids, weights};
    (run->zones != NULL  ? expect_zones
     : run->ht           ? expect_ht
     : run->sent_by_rank ? expect_by_rank
                         : expect_by_expert)(&expected);
    bool match = REF_CHECK_BUFFER(&run->tokens_out, tokens);
    match = REF_CHECK_BUFFER(&run->scales_out, scales) && match;
    match = REF_CHECK_BUFFER(&run->counter, counts) && match;
    match = REF_CHECK_BUFFER(&run->ids_out, ids) && match;
    return REF_CHECK_BUFFER(&run->weights_out, weights) && match;
}

static void prepare_gradients(const RefRun* run) {
    EP_SCOPED float* gradients = ref_host_poison(run->gradients_in.bytes);
    const size_t columns = run->alignment > 0 ? 1 : run->columns;
    for (size_t i = 0; i < run->received * columns; ++i) {
        gradients[i] = ref_weight(run->seed, rank_of(run), i);
    }
    ref_buffer_upload(&run->gradients_in, gradients);
    ref_buffer_poison(&run->gradients_out);
}

void ref_prepare_combine(RefRun* run) {
    run->results = (RefRows){run->shape.datatype, run->shape.hidden, ++run->seed, false};
    const unsigned rank = rank_of(run);
    // What is in unused rows, and in columns without an expert, stays poison: it must not show in any sum.
    EP_SCOPED void* host = ref_host_poison(run->results_in.bytes);
    if (run->ht) {
        ref_rows_fill(&run->results, rank, 0, run->received, host);
        prepare_gradients(run);
    } else {
        ref_routing_new_weights(run->now, run->seed);
        ref_run_give(run, run->now);
        if (run->sent_by_rank) {
            ref_rank_results(run->sent, rank, ref_run_layout(run, true), &run->results, host);
        } else {
            ref_ll_results(run->sent, rank, run->layout, &run->results, host);
        }
    }
    ref_buffer_upload(&run->results_in, host);
    ref_buffer_poison(&run->combined);
}

// The experts' rows take the places of those of the dispatch, the others stay as they are.
static void overwrite_view(const RefRun* run, cudaStream_t stream) {
    const RefLayout layout = ref_run_layout(run, true);
    const size_t row_bytes = run->shape.hidden * ep_datatype_size(run->shape.datatype);
    EP_SCOPED int32_t* counts = ref_host_new(layout.parts * sizeof(*counts));
    ref_rank_counts(run->sent, rank_of(run), counts);
    for (unsigned source = 0; source < layout.parts; ++source) {
        const size_t begin = ref_layout_row(layout, source, 0) * row_bytes;
        EP_CHECK_CUDA(cudaMemcpyAsync((char*)run->view + begin, (char*)ref_buffer_data(&run->results_in) + begin,
                                      (size_t)counts[source] * row_bytes, cudaMemcpyDeviceToDevice, stream));
    }
}

ncclResult_t ref_launch_combine(RefRun* run, RefPass pass, cudaStream_t stream) {
    RefLists lists;
    memset(&lists, 0, sizeof(lists));
    const RefShape* shape = &run->shape;
    const RefLayout rows = ref_run_layout(run, run->sent_by_rank);
    const RefLayout tokens = ref_flat(my_tokens(run));
    if (run->in_place && run->view != NULL) {
        overwrite_view(run, stream);
        add(&lists.inputs, run->view, shape->datatype, NCCL_EP_TENSOR_TAG_TOKENS, rows, shape->hidden);
        run->view = NULL;
    } else {
        ref_list_add_rows(&lists.inputs, &run->results_in, shape->datatype, shape->hidden, rows);
    }
    ref_list_add_rows(&lists.outputs, &run->combined, shape->datatype, shape->hidden, tokens);
    if (!run->ht && !run->sent_by_rank) add_weights(&lists.locals, &run->weights, tokens, shape->top_k);
    run->backward = run->ht && pass.backward;
    if (run->backward) {
        add_weights(&lists.inputs, &run->gradients_in, rows, run->alignment > 0 ? 0 : run->columns);
        add_weights(&lists.outputs, &run->gradients_out, tokens, run->columns);
    }
    ref_lists_dress(&lists, run->variation++);
    const bool send_only = run->ht ? run->variation % 2 != 0 : pass.send_only;
    return ref_lists_combine(&lists, run->handle, send_only, stream);
}

bool ref_check_combine(RefRun* run) {
    ep_sync(run->env);
    EP_SCOPED void* combined = ref_host_poison(run->combined.bytes);
    const unsigned rank = rank_of(run);
    if (run->zones != NULL) {
        ref_zones_combine(run->zones, rank, &run->results, combined);
    } else if (run->ht) {
        ref_ht_combine(run->sent, rank, &run->results, combined);
    } else if (run->sent_by_rank) {
        ref_rank_combine(run->sent, rank, ref_run_layout(run, true), &run->results, combined);
    } else {
        ref_ll_combine_as(run->sums, run->sent, run->now, rank, run->layout, &run->results, combined);
    }
    const bool match = REF_CHECK_BUFFER(&run->combined, combined);
    if (!run->ht) return match;
    EP_SCOPED float* gradients = ref_host_poison(run->gradients_out.bytes);
    const uint64_t seed = run->results.seed;
    if (run->backward && run->zones != NULL) ref_zones_gradients(run->zones, rank, seed, gradients);
    else if (run->backward) ref_ht_gradients(run->sent, rank, run->columns, seed, gradients);
    return REF_CHECK_BUFFER(&run->gradients_out, gradients) && match;
}

void ref_prepare(RefRun* run) {
    ref_prepare_dispatch(run);
    ref_prepare_combine(run);
}

bool ref_check(RefRun* run) {
    const bool dispatched = ref_check_dispatch(run);
    return ref_check_combine(run) && dispatched;
}

// Whole operations leave nothing to complete.
static void complete(const RefRun* run) { EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, run->env->stream)); }

void ref_dispatch_as(RefRun* run, RefPass pass) {
    ref_prepare_dispatch(run);
    EP_CHECK_NCCL(ref_launch_dispatch(run, pass, run->env->stream));
    complete(run);
    ref_check_dispatch(run);
}

void ref_combine_as(RefRun* run, RefPass pass) {
    ref_prepare_combine(run);
    EP_CHECK_NCCL(ref_launch_combine(run, pass, run->env->stream));
    complete(run);
    ref_check_combine(run);
}

void ref_dispatch(RefRun* run) { ref_dispatch_as(run, kRefWhole); }
void ref_combine(RefRun* run) { ref_combine_as(run, kRefWhole); }

void ref_pair(RefRun* run) {
    ref_dispatch(run);
    ref_combine(run);
}

void ref_play_dispatch(void* context) {
    RefRun* run = context;
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, run->env->stream));
}

void ref_play_combine(void* context) {
    RefRun* run = context;
    EP_CHECK_NCCL(ref_launch_combine(run, kRefBackward, run->env->stream));
}

void ref_play_pair(void* run) {
    ref_play_dispatch(run);
    ref_play_combine(run);
}

void ref_overwrite_inputs(RefRun* run) {
    ref_buffer_poison(&run->tokens_in);
    ref_buffer_poison(&run->scales_in);
    ref_buffer_poison(&run->results_in);
}
