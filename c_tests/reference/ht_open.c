// Making and releasing a high-throughput handle with its buffers; see ht_run.h.
#include "reference/ht_run.h"

enum { kSpareRows = 5 };

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

static void check_and_free_counter(HtRun* run, Counter* counter) {
    const size_t bytes = run->local_experts * sizeof(int32_t);
    EP_SCOPED int32_t* counts = ref_host_poison(bytes);
    EP_SCOPED int32_t* poison = ref_host_poison(bytes);
    ref_ht_counts(run->routing, (unsigned)run->env->rank, counts);
    const bool on_host = counter->kind == kHtHostCounter;
    const bool on_device = counter->kind == kHtDeviceCounter;
    EP_CHECK_EQ_BYTES(counter->host, on_host ? counts : poison, bytes);
    REF_CHECK_BUFFER(&counter->device, on_device ? counts : poison);
    ref_buffer_free(&counter->device);
    EP_REQUIRE_CUDA(cudaFreeHost(counter->host));
}

// The ids' memory is overwritten and freed as soon as the handle is there.
static void create_handle(HtRun* run, ncclEpGroup_t group, HtOpening opening) {
    const unsigned rank = (unsigned)run->env->rank;
    RefBuffer ids = ref_buffer_new_input(ref_entries_of(run->routing, rank) * sizeof(int64_t));
    ref_buffer_upload(&ids, run->routing->topk_idx[rank]);
    Counter counter = counter_new(opening.counter, run->local_experts);
    RefList list;
    RefList locals;
    ref_list_init(&list);
    ref_list_init(&locals);
    const unsigned sizes[] = {run->routing->num_tokens[rank], run->shape.top_k};
    ref_list_add(&list, ref_buffer_data(&ids), ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, 2, sizes);
    add_counter(&locals, &counter, run->local_experts);
    ref_list_dress(&list, (unsigned)opening.seed & 3u);
    ref_list_dress(&locals, (unsigned)opening.seed & 15u);
    EP_CHECK_NCCL(ncclEpCreateHandle(&run->handle, group, list.items[0], ref_list_outputs(&locals), locals.count, NULL,
                                     run->env->stream, (opening.seed & 4) != 0));
    ref_list_scrap(&list);
    ref_list_scrap(&locals);
    ep_sync(run->env);
    ref_buffer_poison(&ids);
    ref_buffer_free(&ids);
    check_and_free_counter(run, &counter);
}

static void find_num_rows(HtRun* run, HtRows rows) {
    unsigned told = 0;
    EP_CHECK_NCCL(ncclEpHandleGetNumRecvTokens(run->handle, &told));
    const unsigned bound = (unsigned)run->env->size * run->shape.max_tokens;
    EP_CHECK_EQ_U64(told, run->shape.max_tokens == NCCL_EP_AUTO ? run->received : bound);
    run->num_rows = rows == kHtRowsExact ? run->received : rows == kHtRowsSpare ? told + kSpareRows : told;
    // A library that tells too few has failed the check above; what is expected must fit all the same.
    if (run->num_rows < run->received) run->num_rows = run->received;
}

void ht_run_set_format(HtRun* run, const RefFormat* format) {
    RefBuffer* buffers[] = {&run->tokens_in, &run->scales_in, &run->tokens_out, &run->scales_out};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); ++i) ref_buffer_free(buffers[i]);
    run->format = *format;
    const unsigned tokens = run->routing->num_tokens[run->env->rank];
    run->tokens_in = ref_buffer_new_input(tokens * ref_format_in_bytes(format));
    run->scales_in = ref_buffer_new_input(ref_scale_memory(format, format->in_order, ref_flat(tokens)));
    run->tokens_out = ref_buffer_new(run->num_rows * ref_format_out_bytes(format));
    run->scales_out = ref_buffer_new(ref_scale_memory(format, format->out_order, ref_flat(run->num_rows)));
}

static void allocate_buffers(HtRun* run) {
    const RefFormat opaque = ref_format_opaque(run->shape.datatype, run->shape.hidden);
    ht_run_set_format(run, &opaque);
    const size_t row_bytes = run->shape.hidden * ep_datatype_size(run->shape.datatype);
    const size_t tokens = run->routing->num_tokens[run->env->rank];
    const size_t top_k = run->shape.top_k;
    const size_t rows = run->num_rows;
    run->ids = ref_buffer_new_input(tokens * top_k * sizeof(int64_t));
    run->weights = ref_buffer_new_input(tokens * top_k * sizeof(float));
    run->ids_out = ref_buffer_new(rows * top_k * sizeof(int64_t));
    run->weights_out = ref_buffer_new(rows * top_k * sizeof(float));
    run->counter = ref_buffer_new(run->local_experts * sizeof(int32_t));
    run->results_in = ref_buffer_new_input(rows * row_bytes);
    run->gradients_in = ref_buffer_new_input(rows * run->columns * sizeof(float));
    run->combined = ref_buffer_new(tokens * row_bytes);
    run->gradients_out = ref_buffer_new(tokens * run->columns * sizeof(float));
}

HtRun ht_run_open(const EpEnv* env, ncclEpGroup_t group, const RefShape* shape, RefRouting* routing,
                  HtOpening opening) {
    HtRun made = {.env = env, .shape = *shape};
    HtRun* run = &made;
    run->local_experts = shape->num_experts / (unsigned)env->size;
    run->seed = opening.seed;
    run->routing = routing;
    run->given = ref_routing_copy(routing);
    run->received = ref_ht_received(routing, (unsigned)env->rank);
    run->columns = shape->top_k;
    create_handle(run, group, opening);
    find_num_rows(run, opening.rows);
    allocate_buffers(run);
    return made;
}

HtRun ht_run_open_with(const EpEnv* env, ncclEpGroup_t group, const RefShape* shape, RefStyle style, bool uneven,
                       HtOpening opening) {
    RefRouting* routing = ref_routing_drawn((unsigned)env->size, shape, style, uneven, opening.seed);
    return ht_run_open(env, group, shape, routing, opening);
}

HtRun ht_run_open_alone(const EpEnv* env, const RefShape* shape, RefStyle style, bool uneven, HtOpening opening) {
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, shape);
    HtRun run = ht_run_open_with(env, group, shape, style, uneven, opening);
    run.own_group = group;
    return run;
}

void ht_run_close(HtRun* run) {
    if (run->handle != NULL) EP_CHECK_NCCL(ncclEpHandleDestroy(run->handle));
    RefBuffer* buffers[] = {&run->ids,           &run->weights,   &run->tokens_in,  &run->tokens_out,   &run->ids_out,
                            &run->weights_out,   &run->counter,   &run->results_in, &run->gradients_in, &run->combined,
                            &run->gradients_out, &run->scales_in, &run->scales_out};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); ++i) ref_buffer_free(buffers[i]);
    ref_routing_free(run->routing);
    ref_routing_free(run->given);
    if (run->own_group != NULL) EP_CHECK_NCCL(ncclEpGroupDestroy(run->own_group, run->env->stream));
    memset(run, 0, sizeof(*run));
}
