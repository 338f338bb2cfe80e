// Driving one low-latency handle and comparing every byte of its outputs; see ll_run.h.
#include "reference/ll_run.h"

static unsigned my_tokens(const LlRun* run) { return run->now->num_tokens[run->env->rank]; }

static RefLayout layout_of(const LlRun* run, bool by_rank) {
    return by_rank ? ref_rank_major((unsigned)run->env->size, run->shape.max_tokens) : run->layout;
}

static void upload_routing(LlRun* run) {
    ref_routing_fit(run->now, run->layout.rows);
    ref_buffer_upload(&run->ids, run->now->topk_idx[run->env->rank]);
    ref_buffer_upload(&run->weights, run->now->weights[run->env->rank]);
}

void ll_run_set_format(LlRun* run, const RefFormat* format) {
    RefBuffer* buffers[] = {&run->tokens_in, &run->scales_in, &run->packed, &run->scales_out};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); ++i) ref_buffer_free(buffers[i]);
    run->format = *format;
    const unsigned tokens = my_tokens(run);
    run->tokens_in = ref_buffer_new_input(tokens * ref_format_in_bytes(format));
    run->scales_in = ref_buffer_new_input(ref_scale_memory(format, format->in_order, ref_flat(tokens)));
    run->packed = ref_buffer_new(ref_layout_rows(run->layout) * ref_format_out_bytes(format));
    size_t scale_bytes[2];
    for (int by_rank = 0; by_rank < 2; ++by_rank) {
        const RefLayout layout = layout_of(run, by_rank != 0);
        scale_bytes[by_rank] = ref_scale_memory(format, format->out_order, layout);
    }
    run->scales_out = ref_buffer_new(scale_bytes[scale_bytes[1] > scale_bytes[0] ? 1 : 0]);
}

static void allocate_buffers(LlRun* run) {
    const RefFormat opaque = ref_format_opaque(run->shape.datatype, run->shape.hidden);
    ll_run_set_format(run, &opaque);
    const size_t row_bytes = run->shape.hidden * ep_datatype_size(run->shape.datatype);
    const size_t entries = ref_entries_of(run->now, (unsigned)run->env->rank);
    run->ids = ref_buffer_new_input(entries * sizeof(int64_t));
    run->weights = ref_buffer_new_input(entries * sizeof(float));
    const unsigned ranks = (unsigned)run->env->size;
    const unsigned counts = run->local_experts > ranks ? run->local_experts : ranks;
    run->counter = ref_buffer_new(counts * sizeof(int32_t));
    const size_t entries_out = ref_layout_rows(layout_of(run, true)) * run->shape.top_k;
    run->ids_out = ref_buffer_new(entries_out * sizeof(int64_t));
    run->weights_out = ref_buffer_new(entries_out * sizeof(float));
    run->results_in = ref_buffer_new_input(ref_layout_rows(run->layout) * row_bytes);
    run->combined = ref_buffer_new(my_tokens(run) * row_bytes);
}

LlRun ll_run_open(const EpEnv* env, ncclEpGroup_t group, const RefShape* shape, RefRouting* routing, uint64_t seed) {
    LlRun made = {.env = env, .shape = *shape};
    LlRun* run = &made;
    run->local_experts = shape->num_experts / (unsigned)env->size;
    run->layout = ref_expert_major(run->local_experts, (unsigned)env->size * shape->max_tokens);
    run->seed = seed;
    run->sums = ref_ll_sum();
    run->now = routing;
    run->sent = ref_routing_copy(routing);
    allocate_buffers(run);
    upload_routing(run);

    // The descriptor may go as soon as the handle is there; the ids are read by each operation.
    RefList list;
    ref_list_init(&list);
    const unsigned sizes[] = {my_tokens(run), shape->top_k};
    ref_list_add(&list, ref_buffer_data(&run->ids), ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, 2, sizes);
    ref_list_dress(&list, (unsigned)seed & 3u);
    const bool use_fp8 = (seed & 4u) != 0;  // documented to have no effect
    EP_CHECK_NCCL(ncclEpCreateHandle(&run->handle, group, list.items[0], NULL, 0, NULL, env->stream, use_fp8));
    ref_list_scrap(&list);
    return made;
}

LlRun ll_run_open_with(const EpEnv* env, ncclEpGroup_t group, const RefShape* shape, RefStyle style, bool uneven,
                       uint64_t seed) {
    RefRouting* routing = ref_routing_drawn((unsigned)env->size, shape, style, uneven, seed);
    return ll_run_open(env, group, shape, routing, seed);
}

LlRun ll_run_open_alone(const EpEnv* env, const RefShape* shape, RefStyle style, bool uneven, uint64_t seed) {
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, shape);
    LlRun run = ll_run_open_with(env, group, shape, style, uneven, seed);
    run.own_group = group;
    return run;
}

void ll_run_close(LlRun* run) {
    if (run->handle != NULL) EP_CHECK_NCCL(ncclEpHandleDestroy(run->handle));
    RefBuffer* buffers[] = {&run->ids,       &run->weights,    &run->tokens_in,  &run->packed,
                            &run->scales_in, &run->scales_out, &run->counter,    &run->results_in,
                            &run->combined,  &run->ids_out,    &run->weights_out};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); ++i) ref_buffer_free(buffers[i]);
    ref_routing_free(run->now);
    ref_routing_free(run->sent);
    if (run->own_group != NULL) EP_CHECK_NCCL(ncclEpGroupDestroy(run->own_group, run->env->stream));
    memset(run, 0, sizeof(*run));
}

void ll_run_reroute(LlRun* run, RefRouting* routing) {
    ref_routing_free(run->now);
    run->now = routing;
    upload_routing(run);
}

void ll_run_mask(LlRun* run, unsigned every) {
    ref_routing_mask(run->now, every, ++run->seed);
    upload_routing(run);
}

void ll_run_change(LlRun* run, RefChange change) {
    ref_routing_change(run->now, change, ++run->seed);
    upload_routing(run);
}

void ll_prepare_dispatch(LlRun* run) {
    run->tokens_seed = ++run->seed;
    ref_format_fill(&run->format, run->tokens_seed, (unsigned)run->env->rank, my_tokens(run), &run->tokens_in,
                    &run->scales_in);
    ref_buffer_poison(&run->packed);
    ref_buffer_poison(&run->scales_out);
    ref_buffer_poison(&run->counter);
    ref_buffer_poison(&run->ids_out);
    ref_buffer_poison(&run->weights_out);
}

static void add_weights(RefList* list, const LlRun* run) {
    const unsigned sizes[] = {my_tokens(run), run->shape.top_k};
    ref_list_add(list, ref_buffer_data(&run->weights), ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, 2, sizes);
}

static void add_beside(LlRun* run, RefList* inputs, RefList* outputs) {
    unsigned sizes[3];
    const unsigned dims = ref_layout_sizes(layout_of(run, true), run->shape.top_k, sizes);
    add_weights(inputs, run);
    ref_list_add(outputs, ref_buffer_data(&run->ids_out), ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, dims, sizes);
    ref_list_add(outputs, ref_buffer_data(&run->weights_out), ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, dims,
                 sizes);
}

static void add_dispatched(LlRun* run, RefList* inputs, RefList* outputs) {
    const RefFormat* format = &run->format;
    const RefLayout in = ref_flat(my_tokens(run));
    const RefLayout out = layout_of(run, run->by_rank);
    ref_list_add_rows(inputs, &run->tokens_in, format->from, format->hidden, in);
    if (run->by_rank && run->as_view) {
        unsigned sizes[3];
        const unsigned dims = ref_layout_sizes(out, format->hidden, sizes);
        ref_list_add(outputs, NULL, format->to, NCCL_EP_TENSOR_TAG_TOKENS, dims, sizes);
    } else {
        ref_list_add_rows(outputs, &run->packed, format->to, format->hidden, out);
    }
    if (run->by_rank) add_beside(run, inputs, outputs);
    if (format->meaning == kRefForward) {
        ref_list_add_scales(inputs, &run->scales_in, format, format->in_order, in);
    }
    if (format->meaning != kRefOpaque) {
        ref_list_add_scales(outputs, &run->scales_out, format, format->out_order, out);
    }
}

static size_t view_bytes(const LlRun* run) {
    return ref_layout_rows(layout_of(run, true)) * ref_format_out_bytes(&run->format);
}

void ll_keep_view(LlRun* run, cudaStream_t stream) {
    if (!run->keeps_view) return;
    run->keeps_view = false;
    EP_CHECK_CUDA(
        cudaMemcpyAsync(ref_buffer_data(&run->packed), run->view, view_bytes(run), cudaMemcpyDeviceToDevice, stream));
}

ncclResult_t ll_launch_dispatch(LlRun* run, cudaStream_t stream, bool send_only) {
    RefLists lists;
    memset(&lists, 0, sizeof(lists));
    void* rows = NULL;
    lists.view = &rows;
    add_dispatched(run, &lists.inputs, &lists.outputs);
    if (!run->without_counter) {
        const RefLayout layout = layout_of(run, run->by_rank);
        ref_list_add(&lists.locals, ref_buffer_data(&run->counter), ncclInt32,
                     NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, 1, &layout.parts);
    }
    ref_lists_dress(&lists, run->variation++);
    ncclEpDispatchConfig_t config = {ref_format_rounds(&run->format, run->variation)};
    const bool without_config = config.round_scales == 0 || run->format.meaning == kRefOpaque;
    const bool passes_none = without_config && run->variation % 2 == 0;
    const ncclResult_t result =
        ref_lists_dispatch(&lists, run->handle, send_only, passes_none ? NULL : &config, stream);
    memset(&config, kRefPoison, sizeof(config));
    if (result == ncclSuccess) {
        ref_routing_free(run->sent);
        run->sent = ref_routing_copy(run->now);
        run->sent_by_rank = run->by_rank;
        run->sent_as_view = run->keeps_view = run->by_rank && run->as_view;
        run->view = run->sent_as_view ? rows : NULL;
        EP_CHECK(!run->sent_as_view || rows != NULL);
        if (!send_only) ll_keep_view(run, stream);
    }
    return result;
}

// What a dispatch must write.
typedef struct {
    const LlRun* run;
    void *packed, *scales;
    int32_t* counts;
    int64_t* ids;
    float* weights;
} Expected;

static void place_row(unsigned source, size_t token, size_t row, void* context) {
    const Expected* expected = context;
    const LlRun* run = expected->run;
    ref_format_place(&run->format, run->tokens_seed, ref_row_of(source, token), layout_of(run, true), row,
                     expected->packed, expected->scales);
}

static void expect_by_rank(Expected* expected) {
    const LlRun* run = expected->run;
    const unsigned rank = (unsigned)run->env->rank;
    ref_rank_each(run->sent, rank, layout_of(run, true), place_row, expected);
    ref_rank_beside(run->sent, rank, layout_of(run, true), expected->ids, expected->weights);
    if (!run->without_counter) ref_rank_counts(run->sent, rank, expected->counts);
}

static void expect_by_expert(Expected* expected) {
    const LlRun* run = expected->run;
    EP_SCOPED int32_t* used = ref_host_new(run->local_experts * sizeof(*used));
    EP_SCOPED uint64_t* numbers = ref_ll_slots(run->sent, (unsigned)run->env->rank, run->layout, used);
    const uint64_t* number = numbers;
    for (unsigned expert = 0; expert < run->local_experts; ++expert) {
        for (int32_t slot = 0; slot < used[expert]; ++slot) {
            const size_t row = ref_layout_row(run->layout, expert, (size_t)slot);
            ref_format_place(&run->format, run->tokens_seed, *number++, run->layout, row, expected->packed,
                             expected->scales);
        }
    }
    if (!run->without_counter) memcpy(expected->counts, used, run->local_experts * sizeof(*used));
}

// What nothing is said of: the rows of a view that hold nothing have any content.
static void* unchanged_rows(LlRun* run) {
    void* rows = ref_host_poison(run->packed.bytes);
    if (!run->sent_as_view) return rows;
    ll_keep_view(run, run->env->stream);
    EP_CHECK_CUDA(cudaStreamSynchronize(run->env->stream));
    EP_CHECK_CUDA(cudaMemcpy(rows, ref_buffer_data(&run->packed), view_bytes(run), cudaMemcpyDeviceToHost));
    return rows;
}

bool ll_check_dispatch(LlRun* run) {
    EP_SCOPED void* scales = ref_host_poison(run->scales_out.bytes);
    Expected expected = {run,
                         unchanged_rows(run),
                         run->format.meaning == kRefOpaque ? NULL : scales,
                         ref_host_poison(run->counter.bytes),
                         ref_host_poison(run->ids_out.bytes),
                         ref_host_poison(run->weights_out.bytes)};
    (run->sent_by_rank ? expect_by_rank : expect_by_expert)(&expected);
    bool match = REF_CHECK_BUFFER(&run->packed, expected.packed);
    match = REF_CHECK_BUFFER(&run->scales_out, scales) && match;
    match = REF_CHECK_BUFFER(&run->counter, expected.counts) && match;
    match = REF_CHECK_BUFFER(&run->ids_out, expected.ids) && match;
    match = REF_CHECK_BUFFER(&run->weights_out, expected.weights) && match;
    free(expected.packed);
    free(expected.counts);
    free(expected.ids);
    free(expected.weights);
    return match;
}

void ll_prepare_combine(LlRun* run) {
    const RefRows results = {run->shape.datatype, run->shape.hidden, ++run->seed, false};
    run->results = results;
    ref_routing_new_weights(run->now, run->seed);
    upload_routing(run);
    const unsigned rank = (unsigned)run->env->rank;
    // Rows of unused slots stay poison: they must not show in any sum.
    EP_SCOPED void* host = ref_host_poison(run->results_in.bytes);
    if (run->sent_by_rank) {
        ref_rank_results(run->sent, rank, layout_of(run, true), &run->results, host);
    } else {
        ref_ll_results(run->sent, rank, run->layout, &run->results, host);
    }
    ref_buffer_upload(&run->results_in, host);
    ref_buffer_poison(&run->combined);
}

// The experts' rows take the places of those of the dispatch, the others stay as they are.
static void overwrite_view(const LlRun* run, cudaStream_t stream) {
    const RefLayout layout = layout_of(run, true);
    const size_t row_bytes = run->shape.hidden * ep_datatype_size(run->shape.datatype);
    EP_SCOPED int32_t* counts = ref_host_new(layout.parts * sizeof(*counts));
    ref_rank_counts(run->sent, (unsigned)run->env->rank, counts);
    for (unsigned source = 0; source < layout.parts; ++source) {
        const size_t begin = ref_layout_row(layout, source, 0) * row_bytes;
        EP_CHECK_CUDA(cudaMemcpyAsync((char*)run->view + begin, (char*)ref_buffer_data(&run->results_in) + begin,
                                      (size_t)counts[source] * row_bytes, cudaMemcpyDeviceToDevice, stream));
    }
}

ncclResult_t ll_launch_combine(LlRun* run, cudaStream_t stream, bool send_only) {
    RefLists lists;
    memset(&lists, 0, sizeof(lists));
    const RefShape* shape = &run->shape;
    if (run->in_place && run->view != NULL) {
        overwrite_view(run, stream);
        unsigned sizes[3];
        const unsigned dims = ref_layout_sizes(layout_of(run, true), shape->hidden, sizes);
        ref_list_add(&lists.inputs, run->view, shape->datatype, NCCL_EP_TENSOR_TAG_TOKENS, dims, sizes);
        run->view = NULL;
    } else {
        ref_list_add_rows(&lists.inputs, &run->results_in, shape->datatype, shape->hidden,
                          layout_of(run, run->sent_by_rank));
    }
    ref_list_add_rows(&lists.outputs, &run->combined, shape->datatype, shape->hidden, ref_flat(my_tokens(run)));
    if (!run->sent_by_rank) add_weights(&lists.locals, run);
    ref_lists_dress(&lists, run->variation++);
    return ref_lists_combine(&lists, run->handle, send_only, stream);
}

bool ll_check_combine(LlRun* run) {
    EP_SCOPED void* combined = ref_host_poison(run->combined.bytes);
    const unsigned rank = (unsigned)run->env->rank;
    if (run->sent_by_rank) {
        ref_rank_combine(run->sent, rank, layout_of(run, true), &run->results, combined);
    } else {
        ref_ll_combine_as(run->sums, run->sent, run->now, rank, run->layout, &run->results, combined);
    }
    return REF_CHECK_BUFFER(&run->combined, combined);
}

void ll_prepare(LlRun* run) {
    ll_prepare_dispatch(run);
    ll_prepare_combine(run);
}

bool ll_check(LlRun* run) {
    const bool dispatched = ll_check_dispatch(run);
    return ll_check_combine(run) && dispatched;
}

void ll_dispatch(LlRun* run) {
    ll_prepare_dispatch(run);
    EP_CHECK_NCCL(ll_launch_dispatch(run, run->env->stream, false));
    EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, run->env->stream));  // nothing to complete
    ep_sync(run->env);
    ll_check_dispatch(run);
}

void ll_combine(LlRun* run) {
    ll_prepare_combine(run);
    EP_CHECK_NCCL(ll_launch_combine(run, run->env->stream, false));
    EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, run->env->stream));
    ep_sync(run->env);
    ll_check_combine(run);
}

void ll_overwrite_inputs(LlRun* run) {
    ref_buffer_poison(&run->tokens_in);
    ref_buffer_poison(&run->scales_in);
    ref_buffer_poison(&run->results_in);
}
