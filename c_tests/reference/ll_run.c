// Driving one low-latency handle and comparing every byte of its outputs; see ll_run.h.
#include "reference/ll_run.h"

#include <stdlib.h>
#include <string.h>

static unsigned my_tokens(const LlRun* run) { return run->now->num_tokens[run->env->rank]; }

ncclEpGroup_t ll_group_new(const EpEnv* env, const LlShape* shape) {
    const size_t row_bytes = shape->hidden * ep_datatype_size(shape->datatype);
    return ep_group_create(env, NCCL_EP_ALGO_LOW_LATENCY, shape->num_experts, shape->max_tokens,
                           (unsigned)row_bytes);
}

static void upload_routing(LlRun* run) {
    ref_buffer_upload(&run->ids, run->now->topk_idx[run->env->rank]);
    ref_buffer_upload(&run->weights, run->now->weights[run->env->rank]);
}

static void allocate_buffers(LlRun* run) {
    const size_t row_bytes = run->shape.hidden * ep_datatype_size(run->shape.datatype);
    const size_t entries = ref_entries_of(run->now, (unsigned)run->env->rank);
    const size_t slots = (size_t)run->local_experts * run->capacity;
    run->ids = ref_buffer_new(entries * sizeof(int64_t));
    run->weights = ref_buffer_new(entries * sizeof(float));
    run->tokens_in = ref_buffer_new(my_tokens(run) * row_bytes);
    run->packed = ref_buffer_new(slots * row_bytes);
    run->counter = ref_buffer_new(run->local_experts * sizeof(int32_t));
    run->results_in = ref_buffer_new(slots * row_bytes);
    run->combined = ref_buffer_new(my_tokens(run) * row_bytes);
}

void ll_run_open(LlRun* run, const EpEnv* env, ncclEpGroup_t group, const LlShape* shape,
                 RefRouting* routing, uint64_t seed) {
    memset(run, 0, sizeof(*run));
    run->env = env;
    run->shape = *shape;
    run->local_experts = shape->num_experts / (unsigned)env->size;
    run->capacity = (unsigned)env->size * shape->max_tokens;
    run->seed = seed;
    run->now = routing;
    run->sent = ref_routing_copy(routing);
    allocate_buffers(run);
    upload_routing(run);

    // The descriptor may go as soon as the handle is there; the ids are read by each operation.
    RefList list;
    ref_list_init(&list);
    const unsigned sizes[] = {my_tokens(run), shape->top_k};
    ref_list_add(&list, ref_buffer_data(&run->ids), ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, 2,
                 sizes);
    ref_list_dress(&list, (unsigned)seed & 3u);
    const bool use_fp8 = (seed & 4u) != 0;  // documented to have no effect
    EP_CHECK_NCCL(ncclEpCreateHandle(&run->handle, group, list.items[0], NULL, 0, NULL, env->stream,
                                     use_fp8));
    ref_list_scrap(&list);
}

void ll_run_open_with(LlRun* run, const EpEnv* env, ncclEpGroup_t group, const LlShape* shape,
                      RefStyle style, bool uneven, uint64_t seed) {
    const unsigned num_ranks = (unsigned)env->size;
    unsigned* num_tokens = ref_host_new(num_ranks * sizeof(*num_tokens));
    if (uneven) {
        ref_tokens_uneven(num_tokens, num_ranks, shape->max_tokens, seed);
    } else {
        ref_tokens_full(num_tokens, num_ranks, shape->max_tokens);
    }
    RefRouting* routing =
        ref_routing_new(num_ranks, shape->num_experts, shape->top_k, num_tokens, style, seed);
    free(num_tokens);
    ll_run_open(run, env, group, shape, routing, seed);
}

void ll_run_close(LlRun* run) {
    if (run->handle != NULL) EP_CHECK_NCCL(ncclEpHandleDestroy(run->handle));
    RefBuffer* buffers[] = {&run->ids,     &run->weights,    &run->tokens_in, &run->packed,
                            &run->counter, &run->results_in, &run->combined};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); ++i) ref_buffer_free(buffers[i]);
    ref_routing_free(run->now);
    ref_routing_free(run->sent);
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

static RefRows next_rows(LlRun* run, bool any_bits) {
    const RefRows rows = {run->shape.datatype, run->shape.hidden, ++run->seed, any_bits};
    return rows;
}

void ll_prepare_dispatch(LlRun* run) {
    run->tokens = next_rows(run, true);  // dispatch only moves them
    const unsigned rank = (unsigned)run->env->rank;
    void* host = ref_host_new(run->tokens_in.bytes);
    ref_rows_fill(&run->tokens, rank, 0, my_tokens(run), host);
    ref_buffer_upload(&run->tokens_in, host);
    free(host);
    ref_buffer_poison(&run->packed);
    ref_buffer_poison(&run->counter);
}

static void add_rows(RefList* list, const LlRun* run, const RefBuffer* buffer, bool packed) {
    const unsigned hidden = run->shape.hidden;
    const unsigned by_slot[] = {run->local_experts, run->capacity, hidden};
    const unsigned by_token[] = {my_tokens(run), hidden};
    ref_list_add(list, ref_buffer_data(buffer), run->shape.datatype, NCCL_EP_TENSOR_TAG_TOKENS,
                 packed ? 3 : 2, packed ? by_slot : by_token);
}

// The three lists of a call, in the next of the ways to say the same.
typedef struct {
    RefList inputs, outputs, locals;
} Lists;

static void dress(LlRun* run, Lists* lists) {
    const unsigned variation = run->variation++;
    ref_list_dress(&lists->inputs, variation);
    ref_list_dress(&lists->outputs, variation);
    ref_list_dress(&lists->locals, variation);
}

ncclResult_t ll_launch_dispatch(LlRun* run, cudaStream_t stream, bool send_only) {
    Lists lists;
    memset(&lists, 0, sizeof(lists));
    add_rows(&lists.inputs, run, &run->tokens_in, false);
    add_rows(&lists.outputs, run, &run->packed, true);
    if (!run->without_counter) {
        ref_list_add(&lists.locals, ref_buffer_data(&run->counter), ncclInt32,
                     NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, 1, &run->local_experts);
    }
    dress(run, &lists);
    ncclEpDispatchConfig_t config = {run->variation % 3};
    const ncclResult_t result = ncclEpDispatch(
        run->handle, ref_list_inputs(&lists.inputs), lists.inputs.count,
        ref_list_outputs(&lists.outputs), lists.outputs.count, ref_list_outputs(&lists.locals),
        lists.locals.count, send_only, run->variation % 2 == 0 ? NULL : &config, stream);
    memset(&lists, kRefPoison, sizeof(lists));
    memset(&config, kRefPoison, sizeof(config));
    if (result == ncclSuccess) {
        ref_routing_free(run->sent);
        run->sent = ref_routing_copy(run->now);
    }
    return result;
}

bool ll_check_dispatch(LlRun* run) {
    void* packed = ref_host_poison(run->packed.bytes);
    int32_t* counts = ref_host_poison(run->counter.bytes);
    ref_ll_dispatch(run->sent, (unsigned)run->env->rank, run->capacity, &run->tokens, packed,
                    run->without_counter ? NULL : counts);
    const bool rows_match = REF_CHECK_BUFFER(&run->packed, packed);
    const bool counts_match = REF_CHECK_BUFFER(&run->counter, counts);
    free(packed);
    free(counts);
    return rows_match && counts_match;
}

void ll_prepare_combine(LlRun* run) {
    run->results = next_rows(run, false);
    ref_routing_new_weights(run->now, run->seed);
    upload_routing(run);
    const unsigned rank = (unsigned)run->env->rank;
    // Rows of unused slots stay poison: they must not show in any sum.
    void* host = ref_host_poison(run->results_in.bytes);
    ref_ll_results(run->sent, rank, run->capacity, &run->results, host);
    ref_buffer_upload(&run->results_in, host);
    free(host);
    ref_buffer_poison(&run->combined);
}

ncclResult_t ll_launch_combine(LlRun* run, cudaStream_t stream, bool send_only) {
    Lists lists;
    memset(&lists, 0, sizeof(lists));
    add_rows(&lists.inputs, run, &run->results_in, true);
    add_rows(&lists.outputs, run, &run->combined, false);
    const unsigned sizes[] = {my_tokens(run), run->shape.top_k};
    ref_list_add(&lists.locals, ref_buffer_data(&run->weights), ncclFloat32,
                 NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, 2, sizes);
    dress(run, &lists);
    const ncclResult_t result =
        ncclEpCombine(run->handle, ref_list_inputs(&lists.inputs), lists.inputs.count,
                      ref_list_outputs(&lists.outputs), lists.outputs.count,
                      ref_list_outputs(&lists.locals), lists.locals.count, send_only, NULL, stream);
    memset(&lists, kRefPoison, sizeof(lists));
    return result;
}

bool ll_check_combine(LlRun* run) {
    void* combined = ref_host_poison(run->combined.bytes);
    ref_ll_combine(run->sent, run->now, (unsigned)run->env->rank, run->capacity, &run->results,
                   combined);
    const bool match = REF_CHECK_BUFFER(&run->combined, combined);
    free(combined);
    return match;
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
    ref_buffer_poison(&run->results_in);
}
