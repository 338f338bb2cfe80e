// Making and releasing a handle with its buffers; see run.h.
#include "reference/run.h"

// A library of the first release alone, which has no such functions, links this file as well.
#pragma weak ncclEpHandleOpen
#pragma weak ncclEpHandleOpenBounded
#pragma weak ncclEpHandleUpdate

enum { kSpareRows = 5 };

static unsigned rank_of(const RefRun* run) { return (unsigned)run->env->rank; }

RefLayout ref_run_layout(const RefRun* run, bool by_rank) {
    if (run->ht) return ref_flat(run->num_rows);
    return by_rank ? ref_rank_major((unsigned)run->env->size, run->shape.max_tokens) : run->layout;
}

static void upload_routing(RefRun* run) {
    if (!run->ht) ref_routing_fit(run->now, run->layout.rows);
    ref_buffer_upload(&run->ids, run->now->topk_idx[rank_of(run)]);
    ref_buffer_upload(&run->weights, run->now->weights[rank_of(run)]);
}

void ref_run_give(RefRun* run, RefRouting* routing) {
    if (routing != run->now) ref_routing_free(run->now);
    run->now = routing;
    upload_routing(run);
}

void ref_run_draw(RefRun* run, RefStyle style, uint64_t seed) {
    const RefRouting* now = run->now;
    ref_run_give(run, ref_routing_new(now->num_ranks, now->num_experts, now->top_k, now->num_tokens, style, seed));
}

void ref_run_mask(RefRun* run, unsigned every) {
    ref_routing_mask(run->now, every, ++run->seed);
    upload_routing(run);
}

void ref_run_change(RefRun* run, RefChange change) {
    ref_routing_change(run->now, change, ++run->seed);
    upload_routing(run);
}

void ref_run_set_format(RefRun* run, const RefFormat* format) {
    RefBuffer* buffers[] = {&run->tokens_in, &run->scales_in, &run->tokens_out, &run->scales_out};
    for (size_t i = 0; i < COUNT(buffers); ++i) ref_buffer_free(buffers[i]);
    run->format = *format;
    const unsigned tokens = run->now->num_tokens[rank_of(run)];
    run->tokens_in = ref_buffer_new_input(tokens * ref_format_in_bytes(format));
    run->scales_in = ref_buffer_new_input(ref_scale_memory(format, format->in_order, ref_flat(tokens)));
    run->tokens_out = ref_buffer_new(ref_layout_rows(ref_run_layout(run, false)) * ref_format_out_bytes(format));
    const size_t by_expert = ref_scale_memory(format, format->out_order, ref_run_layout(run, false));
    const size_t by_rank = ref_scale_memory(format, format->out_order, ref_run_layout(run, true));
    run->scales_out = ref_buffer_new(by_rank > by_expert ? by_rank : by_expert);
}

static void allocate_buffers(RefRun* run) {
    const RefFormat opaque = ref_format_opaque(run->shape.datatype, run->shape.hidden);
    ref_run_set_format(run, &opaque);
    const size_t row_bytes = run->shape.hidden * ep_datatype_size(run->shape.datatype);
    const size_t entries = ref_entries_of(run->now, rank_of(run));
    const unsigned ranks = (unsigned)run->env->size;
    const size_t tokens = run->now->num_tokens[rank_of(run)];
    const size_t rows = ref_layout_rows(ref_run_layout(run, false));
    const size_t entries_out = ref_layout_rows(ref_run_layout(run, true)) * run->shape.top_k;
    run->ids = ref_buffer_new_input(entries * sizeof(int64_t));
    run->weights = ref_buffer_new_input(entries * sizeof(float));
    const unsigned counts = run->ht || run->local_experts > ranks ? run->local_experts : ranks;
    run->counter = ref_buffer_new(counts * sizeof(int32_t));
    run->ids_out = ref_buffer_new(entries_out * sizeof(int64_t));
    run->weights_out = ref_buffer_new(entries_out * sizeof(float));
    run->results_in = ref_buffer_new_input(rows * row_bytes);
    run->combined = ref_buffer_new(tokens * row_bytes);
    if (run->ht) run->gradients_in = ref_buffer_new_input(rows * run->columns * sizeof(float));
    if (run->ht) run->gradients_out = ref_buffer_new(tokens * run->columns * sizeof(float));
    upload_routing(run);
}

// A counter in device memory, or in host memory that the device can write.
typedef struct {
    HtCounter kind;
    RefBuffer device;
    int32_t* host;
} Counter;

static Counter counter_new(HtCounter kind, unsigned local_experts) {
    Counter counter = {.kind = kind};
    const size_t bytes = local_experts * sizeof(int32_t);
    counter.device = ref_buffer_new(bytes);
    EP_REQUIRE_CUDA(cudaHostAlloc((void**)&counter.host, bytes, cudaHostAllocMapped));
    memset(counter.host, kRefPoison, bytes);
    return counter;
}

static void add_counter(RefList* list, const Counter* counter, unsigned local_experts) {
    if (counter->kind == kHtNoCounter) return;
    const bool host = counter->kind == kHtHostCounter;
    ref_list_add(list, host ? (void*)counter->host : ref_buffer_data(&counter->device), ncclInt32,
                 host ? NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_HOST : NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, 1,
                 &local_experts);
}

static void check_and_free_counter(RefRun* run, Counter* counter) {
    const size_t bytes = run->local_experts * sizeof(int32_t);
    EP_SCOPED int32_t* counts = ref_host_poison(bytes);
    EP_SCOPED int32_t* poison = ref_host_poison(bytes);
    ref_ht_counts(run->sent, rank_of(run), counts);
    EP_CHECK_EQ_BYTES(counter->host, counter->kind == kHtHostCounter ? counts : poison, bytes);
    REF_CHECK_BUFFER(&counter->device, counter->kind == kHtDeviceCounter ? counts : poison);
    ref_buffer_free(&counter->device);
    EP_REQUIRE_CUDA(cudaFreeHost(counter->host));
}

// The descriptors may go as soon as the handle is there.
static void create_handle(RefRun* run, ncclEpGroup_t group, uint64_t seed, const RefBuffer* ids,
                          const Counter* counter) {
    RefList list;
    RefList locals;
    ref_list_init(&list);
    ref_list_init(&locals);
    const unsigned sizes[] = {run->now->num_tokens[rank_of(run)], run->shape.top_k};
    ref_list_add(&list, ref_buffer_data(ids), ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, 2, sizes);
    ref_list_dress(&list, (unsigned)seed & 3u);
    if (counter != NULL) {
        add_counter(&locals, counter, run->local_experts);
        ref_list_dress(&locals, (unsigned)seed & 15u);
    }
    const bool use_fp8 = (seed & 4u) != 0;  // documented to have no effect
    EP_CHECK_NCCL(ncclEpCreateHandle(&run->handle, group, list.items[0], counter ? ref_list_outputs(&locals) : NULL,
                                     locals.count, NULL, run->env->stream, use_fp8));
    ref_list_scrap(&list);
    ref_list_scrap(&locals);
}

static void find_num_rows(RefRun* run, HtRows rows) {
    unsigned told = 0;
    EP_CHECK_NCCL(ncclEpHandleGetNumRecvTokens(run->handle, &told));
    const unsigned bound = (unsigned)run->env->size * run->shape.max_tokens;
    EP_CHECK_EQ_U64(told, run->shape.max_tokens == NCCL_EP_AUTO ? run->received : bound);
    run->num_rows = rows == kHtRowsExact ? run->received : rows == kHtRowsSpare ? told + kSpareRows : told;
    // A library that tells too few has failed the check above; what is expected must fit all the same.
    if (run->num_rows < run->received) run->num_rows = run->received;
}

static void open_by_expert(RefRun* run, ncclEpGroup_t group) {
    run->columns = run->shape.top_k;
    if (run->most == kRefUnbounded) {
        run->num_rows = run->local_experts * ((unsigned)run->env->size * run->shape.max_tokens + run->alignment);
        EP_CHECK_NCCL(ncclEpHandleOpen(&run->handle, group, run->alignment));
    } else {
        run->num_rows = run->most;
        EP_CHECK_NCCL(ncclEpHandleOpenBounded(&run->handle, group, run->alignment, run->most));
    }
    allocate_buffers(run);
}

void ref_note_update(RefRun* run) {
    if (run->zones != NULL) ref_zones_free(run->zones);
    ref_routing_free(run->sent);
    run->sent = ref_routing_copy(run->now);
    run->zones = ref_zones_new(run->sent, run->alignment, run->most);
    run->received = (unsigned)ref_zones_begin(&run->zones[rank_of(run)], run->local_experts);
}

void ref_launch_update(RefRun* run, cudaStream_t stream) {
    RefLists lists;
    memset(&lists, 0, sizeof(lists));
    const unsigned sizes[] = {run->now->num_tokens[rank_of(run)], run->shape.top_k};
    ref_note_update(run);
    ref_list_add(&lists.inputs, ref_buffer_data(&run->ids), ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, 2, sizes);
    ref_list_add(&lists.locals, ref_buffer_data(&run->counter), ncclInt32,
                 NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, 1, &run->local_experts);
    ref_list_dress(&lists.inputs, run->variation & 3u);
    ref_list_dress(&lists.locals, run->variation++ & 15u);
    EP_CHECK_NCCL(ncclEpHandleUpdate(run->handle, lists.inputs.items[0], ref_list_outputs(&lists.locals),
                                     lists.locals.count, stream));
    ref_list_scrap(&lists.inputs);
    ref_list_scrap(&lists.locals);
}

// The ids' memory is overwritten and freed as soon as the handle is there.
static void open_ht(RefRun* run, ncclEpGroup_t group, RefOpening opening) {
    run->received = ref_ht_received(run->sent, rank_of(run));
    run->columns = run->shape.top_k;
    RefBuffer ids = ref_buffer_new_input(ref_entries_of(run->now, rank_of(run)) * sizeof(int64_t));
    ref_buffer_upload(&ids, run->now->topk_idx[rank_of(run)]);
    Counter counter = counter_new(opening.counter, run->local_experts);
    create_handle(run, group, opening.seed, &ids, &counter);
    ep_sync(run->env);
    ref_buffer_poison(&ids);
    ref_buffer_free(&ids);
    check_and_free_counter(run, &counter);
    find_num_rows(run, opening.rows);
    allocate_buffers(run);
}

RefRun ref_run_open(const EpEnv* env, ncclEpGroup_t group, const RefShape* shape, RefRouting* routing,
                    RefOpening opening) {
    RefRun run = {.env = env, .shape = *shape, .ht = opening.ht, .seed = opening.seed, .now = routing,
                  .alignment = opening.alignment, .most = opening.most};
    run.local_experts = shape->num_experts / (unsigned)env->size;
    run.layout = ref_expert_major(run.local_experts, (unsigned)env->size * shape->max_tokens);
    run.sums = ref_ll_sum();
    run.sent = ref_routing_copy(routing);
    if (group == NULL) {
        run.own_group = group =
            ref_group_new(env, run.ht ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY, shape);
    }
    run.group = group;
    if (run.alignment > 0) {
        open_by_expert(&run, group);
    } else if (run.ht) {
        open_ht(&run, group, opening);
    } else {
        allocate_buffers(&run);
        create_handle(&run, group, opening.seed, &run.ids, NULL);  // whose ids are read by each operation
    }
    return run;
}

RefRun ref_run_open_with(const EpEnv* env, ncclEpGroup_t group, const RefShape* shape, RefStyle style, bool uneven,
                         RefOpening opening) {
    RefRouting* routing = ref_routing_drawn((unsigned)env->size, shape, style, uneven, opening.seed);
    return ref_run_open(env, group, shape, routing, opening);
}

ncclResult_t ref_run_end_group(RefRun* run) {
    EP_CHECK_NCCL(ep_handle_destroy(&run->handle));
    const ncclResult_t result = ncclEpGroupDestroy(run->own_group, run->env->stream);
    run->own_group = NULL;
    return result;
}

void ref_run_close(RefRun* run) {
    if (run->handle != NULL) EP_CHECK_NCCL(ncclEpHandleDestroy(run->handle));
    RefBuffer* buffers[] = {&run->ids,        &run->weights,  &run->tokens_in,    &run->scales_in,   &run->tokens_out,
                            &run->scales_out, &run->counter,  &run->ids_out,      &run->weights_out, &run->results_in,
                            &run->combined,   &run->gradients_in, &run->gradients_out};
    for (size_t i = 0; i < COUNT(buffers); ++i) ref_buffer_free(buffers[i]);
    if (run->zones != NULL) ref_zones_free(run->zones);
    ref_routing_free(run->now);
    ref_routing_free(run->sent);
    if (run->own_group != NULL) EP_CHECK_NCCL(ncclEpGroupDestroy(run->own_group, run->env->stream));
    memset(run, 0, sizeof(*run));
}

void ref_runs_open(RefRun* runs, unsigned count, const EpEnv* env, const RefShape* shape, RefStyle style, bool uneven,
                   RefOpening first) {
    enum { kSeedsOfRun = 1000 };
    for (unsigned i = 0; i < count; ++i) {
        runs[i] = ref_run_open_with(env, i == 0 ? NULL : runs[0].group, shape, style, uneven, first);
        first.seed += kSeedsOfRun;
    }
}

void ref_runs_close(RefRun* runs, unsigned count) {
    for (unsigned i = count; i-- > 0;) ref_run_close(&runs[i]);
}
