// The buffers of a run, and its calls; see run.h. What must come of them is in expected.c.
#include "suites/second/run.h"

#include "reference/ht.h"
#include "reference/ll.h"
#include "reference/rank_major.h"

enum { kScalesOfRow = 8, kGarbage = 0xee };

typedef struct {
    ncclDataType_t datatype;
    size_t sizes[3];
} Shape;

// Rows that come, with so many elements each.
static Shape received(const Run* run, ncclDataType_t datatype, size_t elements) {
    if (!is_ll(run->test)) return (Shape){datatype, {run->rows, elements, 0}};
    // A spare zone; planes there are none.
    const size_t parts = run->layout.parts + (run->test->kind == kLlExperts ? 1 : 0);
    return (Shape){datatype, {parts, run->layout.rows, elements}};
}

static ncclDataType_t counter_type(const Run* run) {
    return is_ll(run->test) || run->seed % 2 != 0 ? ncclInt32 : ncclInt64;
}

static Shape shape_of(const Run* run, unsigned tensor) {
    const Case* test = run->test;
    const size_t tokens = run->num_tokens, top_k = test->top_k;
    const size_t counted = test->kind == kLlRanks ? (size_t)run->env->size : test->local_experts;
    switch (tensor) {
        case kIds: return (Shape){test->narrow_ids ? ncclInt32 : ncclInt64, {tokens, top_k, 0}};
        case kWeights:
        case kGradients: return (Shape){ncclFloat32, {tokens, top_k, 0}};
        case kTokens:
        case kCombined: return (Shape){test->datatype, {tokens, test->hidden, 0}};
        case kScales: return (Shape){ncclBfloat16, {tokens, kScalesOfRow, 0}};
        case kReceived:
        case kResults: return received(run, test->datatype, test->hidden);
        case kScalesOut: return received(run, ncclBfloat16, kScalesOfRow);
        case kIdsOut: return received(run, test->kind == kLlRanks && test->narrow_ids ? ncclInt32 : ncclInt64, top_k);
        case kTotal: return (Shape){counter_type(run), {1, 0, 0}};
        case kCounters:
        case kOffsets: return (Shape){counter_type(run), {counted + kSpare, 0, 0}};
        default: return received(run, ncclFloat32, test->kind == kHtZones ? 0 : top_k);
    }
}

static size_t bytes_of(const Shape* shape) {
    size_t bytes = ep_datatype_size(shape->datatype) * shape->sizes[0];
    for (unsigned i = 1; i < 3 && shape->sizes[i] > 0; ++i) bytes *= shape->sizes[i];
    return bytes;
}

static void upload_rows(const Run* run, unsigned tensor, const RefRows* rows) {
    EP_SCOPED void* host = ref_host_new(run->buffers[tensor].bytes);
    ref_rows_fill(rows, run->rank, 0, run->num_tokens, host);
    ref_buffer_upload(&run->buffers[tensor], host);
}

// Ids of 32 bits name the same experts; those far away are no less far.
static void upload_routing(const Run* run) {
    const int64_t* ids = run->given->topk_idx[run->rank];
    const size_t entries = ref_entries_of(run->given, run->rank);
    EP_SCOPED int32_t* narrow = ref_host_new(entries * sizeof(int32_t));
    for (size_t i = 0; i < entries; ++i) {
        narrow[i] = ids[i] < -1 ? INT32_MIN : ids[i] > INT32_MAX ? INT32_MAX : (int32_t)ids[i];
    }
    ref_buffer_upload(&run->buffers[kIds], run->test->narrow_ids ? (const void*)narrow : ids);
    ref_buffer_upload(&run->buffers[kWeights], run->given->weights[run->rank]);
}

// Rows of unused places stay poison: they must not show in any sum.
static void upload_results(const Run* run) {
    EP_SCOPED unsigned char* rows = ref_host_poison(run->buffers[kResults].bytes);
    const size_t there = run->received < run->rows ? run->received : run->rows;
    switch (run->test->kind) {
        case kLlExperts: ref_ll_results(run->routing, run->rank, run->layout, &run->results, rows); break;
        case kLlRanks: ref_rank_results(run->routing, run->rank, run->layout, &run->results, rows); break;
        default: ref_rows_fill(&run->results, run->rank, 0, there, rows);
    }
    ref_buffer_upload(&run->buffers[kResults], rows);
}

static void find_rows(Run* run) {
    const Case* test = run->test;
    const bool is_flat = test->kind == kHtFlat;
    run->received = is_flat ? ref_ht_received(run->given, run->rank) : 0;
    run->routing = is_flat && test->drops ? ref_ht_cut(run->given, test->recv_rows) : run->given;
    if (test->kind != kHtZones) return;
    run->zones = ref_zones_new(run->routing, test->alignment, test->drops ? test->recv_rows : ~0u);
    run->received = run->zones[run->rank].begins[test->local_experts];
}

static void forget_rows(const Run* run) {
    if (run->zones != NULL) ref_zones_free(run->zones);
    if (run->routing != run->given) ref_routing_free(run->routing);
}

void run_open(Run* run, const EpEnv* env, ncclEpGroup_t group, const Case* test, uint64_t seed) {
    const unsigned ranks = (unsigned)env->size, capacity = ranks * test->max_tokens;
    const RefShape shape = {test->local_experts * ranks, test->max_tokens, test->top_k, test->datatype, test->hidden};
    memset(run, 0, sizeof(*run));
    run->env = env;
    run->test = test;
    run->group = group != NULL ? group : (run->own_group = group_of(env, test));
    run->rank = (unsigned)env->rank;
    run->seed = seed;
    run->given = ref_routing_drawn(ranks, &shape, test->style, test->uneven, seed);
    if (is_ll(test)) ref_routing_fit(run->given, capacity);
    run->num_tokens = run->given->num_tokens[run->rank];
    run->layout = test->kind == kLlRanks ? ref_rank_major(ranks, test->max_tokens)
                                         : ref_expert_major(test->local_experts, capacity);
    find_rows(run);
    run->used = test->recv_rows > 0 ? test->recv_rows : run->received;
    run->rows = run->used + (test->recv_rows > 0 ? kSpare : 0);
    run->tokens = (RefRows){test->datatype, test->hidden, seed + 1, false};
    run->results = (RefRows){test->datatype, test->hidden, seed + 2, false};
    run->scales = (RefRows){ncclBfloat16, kScalesOfRow, seed + 3, false};
    for (unsigned i = 0; i < kNumTensors; ++i) {
        const Shape tensor = shape_of(run, i);
        run->buffers[i] = (i < kFirstOutput ? ref_buffer_new_input : ref_buffer_new)(bytes_of(&tensor));
    }
    upload_routing(run);
    upload_rows(run, kTokens, &run->tokens);
    upload_rows(run, kScales, &run->scales);
    upload_results(run);
    const RefBuffer* gradients_in = &run->buffers[kGradientsIn];
    EP_SCOPED float* gradients = ref_host_new(gradients_in->bytes);
    for (size_t i = 0; i < gradients_in->bytes / sizeof(float); ++i) gradients[i] = ref_weight(seed, run->rank, i);
    ref_buffer_upload(gradients_in, gradients);
}

void run_close(Run* run) {
    if (run->handle != NULL) run_end_handle(run);
    if (run->own_group != NULL) EP_CHECK_NCCL(ncclEpGroupDestroy(run->own_group));
    for (unsigned i = 0; i < kNumTensors; ++i) ref_buffer_free(&run->buffers[i]);
    forget_rows(run);
    ref_routing_free(run->given);
}

void run_renew(Run* run, uint64_t seed) {
    forget_rows(run);
    ref_routing_change(run->given, kRefReplace, seed);
    ref_routing_new_weights(run->given, seed);
    find_rows(run);
    upload_routing(run);
    upload_results(run);
}

void run_poison(const Run* run) {
    for (unsigned i = kFirstOutput; i < kNumTensors; ++i) ref_buffer_poison(&run->buffers[i]);
}

void run_check_untouched(const Run* run) {
    for (unsigned i = kFirstOutput; i < kNumTensors; ++i) {
        EP_SCOPED void* poison = ref_host_poison(run->buffers[i].bytes);
        REF_CHECK_BUFFER(&run->buffers[i], poison);
    }
}

// ---- Calls

// What a routing tells.
static void set_update(Call* call, const Case* test) {
    View* views = call->views;
    call->update = NCCL_EP_LAYOUT_INFO_INIT;
    call->update.expert_counters = &views[kCounters].tensor;
    call->update.recv_total_counter = &views[kTotal].tensor;
    // Flat rows have none, so it is not read.
    call->update.expert_offsets = test->kind == kHtZones ? &views[kOffsets].tensor : (ncclEpTensor_t*)16;
    if (test->no_offsets) call->update.expert_offsets = NULL;
}

static void set_info(Call* call, const Case* test, bool is_forward) {
    View* views = call->views;
    call->info = NCCL_EP_LAYOUT_INFO_INIT;
    if (test->kind == kHtZones && is_forward) call->info = call->update;
    if (test->kind == kLlRanks) call->info.src_rank_counters = &views[kCounters].tensor;
    if (test->kind == kLlExperts) {
        call->info.expert_counters = &views[kCounters].tensor;
        // Not read: some clients pass them.
        call->info.expert_offsets = call->info.recv_total_counter = (ncclEpTensor_t*)16;
    }
    if (test->global_ids) call->info.recv_topk_idx_kind = NCCL_EP_EXPERT_ID_GLOBAL;
}

void call_set(Call* call, const Run* run, ncclEpPassDir_t pass) {
    const Case* test = run->test;
    View* views = call->views;
    for (unsigned i = 0; i < kNumTensors; ++i) {
        const Shape shape = shape_of(run, i);
        const size_t* sizes = shape.sizes;
        view_of(&views[i], ref_buffer_data(&run->buffers[i]), shape.datatype, sizes[0], sizes[1], sizes[2]);
    }
    const bool is_forward = pass == NCCL_EP_FWD_PASS;
    set_update(call, test);
    set_info(call, test, is_forward);
    call->inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    call->inputs.tokens = &views[kTokens].tensor;
    call->outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    call->outputs.tokens = &views[kReceived].tensor;
    call->config = NCCL_EP_DISPATCH_CONFIG_INIT;
    call->combine_inputs = NCCL_EP_COMBINE_INPUTS_INIT;
    call->combine_inputs.tokens = &views[kResults].tensor;
    call->combine_outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
    call->combine_outputs.tokens = &views[kCombined].tensor;
    // Not read, but where it is set below.
    call->combine_outputs.topk_weights = (ncclEpTensor_t*)16;
    call->combine_config = NCCL_EP_COMBINE_CONFIG_INIT;
    call->config.send_only = call->combine_config.send_only = test->send_only;
    call->config.pass_direction = call->combine_config.pass_direction = pass;
    if (test->kind == kLlExperts) {
        call->combine_outputs.topk_weights = &views[kWeights].tensor;
    } else if (is_forward) {
        call->inputs.topk_weights = &views[kWeights].tensor;
        call->outputs.topk_weights = &views[kWeightsOut].tensor;
        if (test->kind != kHtZones) call->outputs.topk_idx = &views[kIdsOut].tensor;
    } else {
        call->combine_inputs.topk_weights = &views[kGradientsIn].tensor;
        call->combine_outputs.topk_weights = &views[kGradients].tensor;
    }
    if (!test->scaled) return;
    call->inputs.scales = &views[kScales].tensor;
    call->outputs.scales = &views[kScalesOut].tensor;
    call->config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
}

// ---- Handles

// One in memory that has `bytes`, or is new; or in the library's, as the case says.
static void init_handle(Run* run, const void* bytes) {
    const Case* test = run->test;
    const int top_k = (int)test->top_k;
    const ncclEpHandleConfig_t config = handle_config_of(test);
    View memory;
    if (test->in_memory) {
        size_t size = 0;
        EP_CHECK_NCCL(ncclEpHandleMemSize(run->group, layout_of(test), &config, &size, top_k));
        run->memory = ref_buffer_new(size);
        if (bytes != NULL) ref_buffer_upload(&run->memory, bytes);
        view_of(&memory, ref_buffer_data(&run->memory), ncclUint8, size, 0, 0);
    }
    EP_CHECK_NCCL(ncclEpInitHandle(&run->handle, run->group, layout_of(test), &config, top_k,
                                   test->in_memory ? &memory.tensor : NULL));
    memset(&memory, kGarbage, sizeof(memory));
}

void run_init(Run* run) { init_handle(run, NULL); }

void run_route(Run* run) {
    const Case* test = run->test;
    const cudaStream_t stream = run->env->stream;
    Call call;
    call_set(&call, run, NCCL_EP_FWD_PASS);
    const ncclEpTensor_t* ids = &call.views[kIds].tensor;
    EP_SCOPED void* info = is_ll(test) ? NULL : old_struct(kLayoutInfo, &call.update, test->generation);
    if (test->in_memory || test->updated) {
        run_init(run);
        EP_CHECK_NCCL(ncclEpUpdateHandle(run->handle, ids, info, stream));
    } else {
        const ncclEpHandleConfig_t config = handle_config_of(test);
        EP_CHECK_NCCL(ncclEpCreateHandle(&run->handle, run->group, layout_of(test), ids, info, &config, stream));
    }
    memset(&call, kGarbage, sizeof(call));
    if (is_ll(test)) return;
    ep_sync(run->env);
    ref_buffer_poison(&run->buffers[kIds]);
    run_check_counters(run);
}

void run_end_handle(Run* run) {
    EP_CHECK_NCCL(ncclEpHandleDestroy(run->handle));
    run->handle = NULL;
    ref_buffer_free(&run->memory);
}

void run_copy(Run* run) {
    const RefBuffer before = run->memory;
    EP_SCOPED void* bytes = ref_host_new(before.bytes);
    ep_download(bytes, ref_buffer_data(&before), before.bytes);
    init_handle(run, bytes);
}

void run_move(Run* run) {
    RefBuffer before = run->memory;
    EP_CHECK_NCCL(ncclEpHandleDestroy(run->handle));
    run_copy(run);
    ref_buffer_free(&before);
}

// ---- Operations

ncclResult_t run_update(const Run* run) {
    Call call;
    call_set(&call, run, NCCL_EP_FWD_PASS);
    EP_SCOPED void* info = is_ll(run->test) ? NULL : old_struct(kLayoutInfo, &call.update, run->test->generation);
    const ncclResult_t result = ncclEpUpdateHandle(run->handle, &call.views[kIds].tensor, info, run->env->stream);
    memset(&call, kGarbage, sizeof(call));
    return result;
}

ncclResult_t run_dispatch(const Run* run, ncclEpPassDir_t pass) {
    const Case* test = run->test;
    Call call;
    call_set(&call, run, pass);
    // What the structs of generation 3 lack.
    const Generation of_info = test->global_ids ? kGeneration5 : test->generation;
    EP_SCOPED void* info = old_struct(kLayoutInfo, &call.info, of_info);
    EP_SCOPED void* config = old_struct(kDispatchConfig, &call.config, test->scaled ? kGeneration5 : test->generation);
    const bool needs_info = is_ll(test) || test->updated || test->global_ids || call.info.expert_counters != NULL;
    const ncclResult_t result = ncclEpDispatch(run->handle, &call.inputs, &call.outputs, needs_info ? info : NULL,
                                               config, run->env->stream);
    memset(&call, kGarbage, sizeof(call));
    return result;
}

ncclResult_t run_combine(const Run* run, ncclEpPassDir_t pass) {
    const Case* test = run->test;
    Call call;
    call_set(&call, run, pass);
    EP_SCOPED void* inputs = old_struct(kCombineInputs, &call.combine_inputs, test->generation);
    EP_SCOPED void* config = old_struct(kCombineConfig, &call.combine_config, test->generation);
    const bool needs_config = is_ll(test) || pass == NCCL_EP_BWD_PASS;
    const ncclResult_t result = ncclEpCombine(run->handle, inputs, &call.combine_outputs, needs_config ? config : NULL,
                                              run->env->stream);
    memset(&call, kGarbage, sizeof(call));
    return result;
}

void run_exchange(const Run* run, ncclEpPassDir_t pass) {
    run_poison(run);
    const ncclEpCompleteConfig_t config = NCCL_EP_COMPLETE_CONFIG_INIT;
    EP_CHECK_NCCL(run_dispatch(run, pass));
    EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, run->env->stream));
    EP_CHECK_NCCL(run_combine(run, pass));
    EP_CHECK_NCCL(ncclEpComplete(run->handle, &config, run->env->stream));
    run_check_dispatch(run, pass);
    run_check_combine(run, pass);
}
