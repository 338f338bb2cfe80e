// What operations refuse, and in which order; their outputs stay as they are.
#include <stdlib.h>
#include <string.h>

#include "suites/second/second.h"

// A call of each operation that is right, for tests to change.
typedef struct {
    const EpEnv* env;
    const Case* test;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    RefBuffer memory, outputs;
    View ids, tokens, weights, received, received_ids, received_weights, counters;
    ncclEpDispatchInputs_t inputs;
    ncclEpDispatchOutputs_t out;
    ncclEpLayoutInfo_t info;
    ncclEpDispatchConfig_t config;
    View expert_rows, combined;
    ncclEpCombineInputs_t combine_inputs;
    ncclEpCombineOutputs_t combine_out;
    ncclEpCombineConfig_t combine_config;
} Call;

enum { kTokens = 4, kTopK = 2, kHidden = 32, kBytes = 1 << 16 };

static void set_views(Call* it) {
    const bool is_ll = it->test->algorithm == NCCL_EP_ALGO_LOW_LATENCY;
    const size_t rows = (size_t)it->env->size * kTokens;
    unsigned char* in = ref_buffer_data(&it->memory);
    unsigned char* out = ref_buffer_data(&it->outputs);
    view_of(&it->tokens, in, ncclBfloat16, kTokens, kHidden, 0);
    view_of(&it->weights, in, ncclFloat32, kTokens, kTopK, 0);
    if (is_ll) {
        view_of(&it->received, out, ncclBfloat16, 2, rows, kHidden);
        view_of(&it->expert_rows, in, ncclBfloat16, 2, rows, kHidden);
    } else {
        view_of(&it->received, out, ncclBfloat16, rows, kHidden, 0);
        view_of(&it->expert_rows, in, ncclBfloat16, rows, kHidden, 0);
    }
    view_of(&it->received_ids, out, ncclInt64, rows, kTopK, 0);
    view_of(&it->received_weights, out, ncclFloat32, rows, kTopK, 0);
    if (it->test->by_rank) {
        const size_t ranks = (size_t)it->env->size;
        view_of(&it->received, out, ncclBfloat16, ranks, kTokens, kHidden);
        view_of(&it->expert_rows, in, ncclBfloat16, ranks, kTokens, kHidden);
        view_of(&it->received_ids, out, ncclInt32, ranks, kTokens, kTopK);
        view_of(&it->received_weights, out, ncclFloat32, ranks, kTokens, kTopK);
    }
    view_of(&it->counters, out, ncclInt32, 2, 0, 0);
    view_of(&it->combined, out, ncclBfloat16, kTokens, kHidden, 0);
}

// Makes all arguments right again.
static void reset(Call* it) {
    const bool is_ll = it->test->algorithm == NCCL_EP_ALGO_LOW_LATENCY;
    set_views(it);
    it->inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    it->inputs.tokens = &it->tokens.tensor;
    it->out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    it->out.tokens = &it->received.tensor;
    it->info = NCCL_EP_LAYOUT_INFO_INIT;
    it->config = NCCL_EP_DISPATCH_CONFIG_INIT;
    it->combine_inputs = NCCL_EP_COMBINE_INPUTS_INIT;
    it->combine_inputs.tokens = &it->expert_rows.tensor;
    it->combine_out = NCCL_EP_COMBINE_OUTPUTS_INIT;
    it->combine_out.tokens = &it->combined.tensor;
    it->combine_config = NCCL_EP_COMBINE_CONFIG_INIT;
    if (is_ll && !it->test->by_rank) {
        it->info.expert_counters = &it->counters.tensor;
        it->combine_out.topk_weights = &it->weights.tensor;
    } else {
        it->inputs.topk_weights = &it->weights.tensor;
        it->out.topk_weights = &it->received_weights.tensor;
        it->out.topk_idx = &it->received_ids.tensor;
    }
}

static ncclResult_t dispatch(Call* it) {
    return ncclEpDispatch(it->handle, &it->inputs, &it->out, &it->info, &it->config,
                          it->env->stream);
}

static ncclResult_t combine(Call* it) {
    return ncclEpCombine(it->handle, &it->combine_inputs, &it->combine_out, &it->combine_config,
                         it->env->stream);
}

static void open_call(Call* it, const EpEnv* env, const Case* test) {
    memset(it, 0, sizeof(*it));
    it->env = env;
    it->test = test;
    it->group = group_of(env, test);
    it->memory = ref_buffer_new(kBytes);
    it->outputs = ref_buffer_new(kBytes);
    int64_t ids[kTokens * kTopK];
    for (unsigned i = 0; i < kTokens * kTopK; ++i) ids[i] = -1;
    ep_upload(ref_buffer_data(&it->memory), ids, sizeof(ids));
    view_of(&it->ids, ref_buffer_data(&it->memory), ncclInt64, kTokens, kTopK, 0);
    it->handle = handle_of(it->group, test, &it->ids, NULL, env->stream);
    reset(it);
}

// Nothing was written: the poison is still there.
static void close_call(Call* it) {
    ep_sync(it->env);
    void* poison = ref_host_poison(kBytes);
    REF_CHECK_BUFFER(&it->outputs, poison);
    free(poison);
    EP_CHECK_NCCL(ncclEpHandleDestroy(it->handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(it->group));
    ref_buffer_free(&it->memory);
    ref_buffer_free(&it->outputs);
}

#define REFUSED(operation, change, expected, words)                            \
    do {                                                                       \
        reset(&it);                                                            \
        change;                                                                \
        check_refused(EP_HERE(#change), operation(&it), expected, words);      \
    } while (false)

EP_TEST(structs_of_operations_are_checked) {
    const ncclResult_t no = ncclInvalidArgument;
    Call it;
    open_call(&it, env, &kSmallLl);
    REFUSED(dispatch, it.inputs.size = 31, no, "inputs.size: must be the size");
    REFUSED(dispatch, it.inputs.magic = 1, no, "inputs.magic: must be that of its struct");
    REFUSED(dispatch, it.out.size = 39, no, "outputs.size");
    REFUSED(dispatch, it.out.magic = 1, no, "outputs.magic");
    REFUSED(dispatch, it.info.size = 39, no, "layout_info.size");
    REFUSED(dispatch, it.info.magic = 1, no, "layout_info.magic");
    REFUSED(dispatch, it.config.size = 19, no, "config.size");
    REFUSED(dispatch, it.config.magic = 1, no, "config.magic");
    REFUSED(combine, it.combine_inputs.size = 23, no, "inputs.size");
    REFUSED(combine, it.combine_inputs.magic = 1, no, "inputs.magic");
    REFUSED(combine, it.combine_out.size = 23, no, "outputs.size");
    REFUSED(combine, it.combine_out.magic = 1, no, "outputs.magic");
    REFUSED(combine, it.combine_config.size = 15, no, "config.size");
    REFUSED(combine, it.combine_config.magic = 1, no, "config.magic");
    CHECK_REFUSED(ncclEpDispatch(it.handle, NULL, &it.out, &it.info, NULL, env->stream), no,
                  "inputs: must not be NULL");
    CHECK_REFUSED(ncclEpDispatch(it.handle, &it.inputs, NULL, &it.info, NULL, env->stream), no,
                  "outputs: must not be NULL");
    CHECK_REFUSED(ncclEpDispatch(NULL, &it.inputs, &it.out, &it.info, NULL, env->stream), no,
                  "handle: must not be NULL");
    CHECK_REFUSED(ncclEpCombine(it.handle, NULL, &it.combine_out, NULL, env->stream), no,
                  "inputs: must not be NULL");
    CHECK_REFUSED(ncclEpCombine(it.handle, &it.combine_inputs, NULL, NULL, env->stream), no,
                  "outputs: must not be NULL");
    ncclEpCompleteConfig_t complete = {.size = 7, .magic = NCCL_EP_MAGIC};
    CHECK_REFUSED(ncclEpComplete(it.handle, &complete, env->stream), no, "config.size");
    close_call(&it);
}

EP_TEST(what_low_latency_has_not_is_refused) {
    const ncclResult_t no = ncclInvalidArgument, usage = ncclInvalidUsage;
    Call it;
    open_call(&it, env, &kSmallLl);
    REFUSED(dispatch, it.inputs.tokens = NULL, no, "inputs.tokens: is required");
    REFUSED(dispatch, it.out.tokens = NULL, no, "outputs.tokens: is required");
    REFUSED(dispatch, it.info.expert_counters = NULL, no, "expert_counters: is required");
    REFUSED(dispatch, it.info.src_rank_counters = &it.counters.tensor, no, "src_rank_counters: must");
    REFUSED(dispatch, it.inputs.topk_weights = &it.weights.tensor, no, "inputs.topk_weights: must");
    REFUSED(dispatch, it.out.topk_weights = &it.received_weights.tensor, no, "outputs.topk_weights");
    REFUSED(dispatch, it.out.topk_idx = &it.received_ids.tensor, no, "outputs.topk_idx: must be NULL");
    REFUSED(dispatch, it.inputs.scales = &it.weights.tensor, no, "inputs.scales: must be NULL");
    REFUSED(dispatch, it.out.scales = &it.received_weights.tensor, no, "outputs.scales: must be");
    REFUSED(dispatch, it.config.quant_recipe = (ncclEpDispQuant_t)3, no, "config.quant_recipe: must");
    REFUSED(dispatch, it.info.recv_topk_idx_kind = (ncclEpExpertIdKind_t)99, no, "recv_topk_idx_kind");
    REFUSED(dispatch, it.config.pass_direction = NCCL_EP_BWD_PASS, usage, "config.pass_direction");
    REFUSED(dispatch, it.config.pass_direction = (ncclEpPassDir_t)2, no, "config.pass_direction");
    REFUSED(dispatch, it.received.sizes[0] = 1, no, "outputs.tokens.sizes[0]");
    REFUSED(dispatch, it.received.sizes[1] = 1, no, "max_dispatch_tokens_per_rank");
    REFUSED(dispatch, it.received.tensor.datatype = ncclFloat16, no, "outputs.tokens.datatype");
    REFUSED(dispatch, it.tokens.sizes[0] = 3, no, "inputs.tokens.sizes[0]: must be the handle's");
    REFUSED(dispatch, it.tokens.sizes[1] = 2 * kHidden, no, "max_token_bytes");
    REFUSED(combine, (void)0, usage, "needs a dispatch before its first combine");
    REFUSED(combine, it.combine_out.topk_weights = NULL, no, "outputs.topk_weights: is required");
    REFUSED(combine, it.combine_config.pass_direction = NCCL_EP_BWD_PASS, usage, "pass_direction");
    CHECK_REFUSED(ncclEpDispatch(it.handle, &it.inputs, &it.out, NULL, NULL, env->stream), no,
                  "layout_info: is required");
    EP_CHECK_NCCL(ncclEpComplete(it.handle, NULL, env->stream));
    close_call(&it);
}

EP_TEST(what_rank_major_has_not_is_refused) {
    const ncclResult_t no = ncclInvalidArgument, usage = ncclInvalidUsage;
    Case test = kSmallLl;
    test.by_rank = true;
    Call it;
    open_call(&it, env, &test);
    REFUSED(dispatch, it.inputs.topk_weights = NULL, no, "inputs.topk_weights: is required");
    REFUSED(dispatch, it.out.topk_weights = NULL, no, "outputs.topk_weights: is required");
    REFUSED(dispatch, it.out.topk_idx = NULL, no, "outputs.topk_idx: is required");
    REFUSED(dispatch, it.info.expert_counters = &it.counters.tensor, no, "expert_counters: must be NULL");
    REFUSED(dispatch, it.received_ids.tensor.datatype = ncclUint32, no, "outputs.topk_idx.datatype");
    REFUSED(dispatch, it.received.sizes[1] -= 1, no, "outputs.tokens.sizes[1]");
    REFUSED(dispatch, it.received_ids.sizes[2] -= 1, no, "outputs.topk_idx.sizes[2]");
    REFUSED(dispatch, it.config.pass_direction = NCCL_EP_BWD_PASS, usage, "config.pass_direction");
    REFUSED(combine, (void)0, usage, "needs a dispatch before its first combine");
    REFUSED(combine, it.combine_out.topk_weights = &it.weights.tensor, no, "outputs.topk_weights: must be");
    close_call(&it);
}

EP_TEST(what_high_throughput_has_not_is_refused) {
    const ncclResult_t no = ncclInvalidArgument, usage = ncclInvalidUsage;
    Case test = kSmallHt;
    test.recv_rows = (unsigned)env->size * kTokens;
    Call it;
    open_call(&it, env, &test);
    REFUSED(dispatch, it.inputs.topk_weights = NULL, no, "inputs.topk_weights: is required");
    REFUSED(dispatch, it.out.topk_weights = NULL, no, "outputs.topk_weights: is required");
    REFUSED(dispatch, it.out.topk_idx = NULL, no, "outputs.topk_idx: is required");
    REFUSED(dispatch, it.out.tokens = NULL, no, "outputs.tokens: is required");
    REFUSED(dispatch, it.received.sizes[0] -= 1, no, "outputs.tokens.sizes[0]: must have room");
    REFUSED(dispatch, it.received_ids.sizes[0] -= 1, no, "outputs.topk_idx.sizes[0]");
    REFUSED(dispatch, it.received_weights.sizes[0] = 0, no, "outputs.topk_weights.sizes[0]");
    REFUSED(dispatch, it.received_ids.tensor.datatype = ncclInt32, no, "outputs.topk_idx.datatype");
    REFUSED(dispatch, it.info.recv_topk_idx_kind = (ncclEpExpertIdKind_t)3, no, "recv_topk_idx_kind");
#define BACKWARD it.config.pass_direction = it.combine_config.pass_direction = NCCL_EP_BWD_PASS
    REFUSED(dispatch, BACKWARD, no, "inputs.topk_weights: must be NULL in a backward pass");
    REFUSED(dispatch, (BACKWARD, it.inputs.topk_weights = NULL), no, "outputs.topk_weights: must be NULL");
    REFUSED(dispatch, (BACKWARD, it.inputs.topk_weights = it.out.topk_weights = NULL), no,
            "outputs.topk_idx: must be NULL");
    REFUSED(dispatch, (BACKWARD, it.inputs.topk_weights = it.out.topk_weights = it.out.topk_idx = NULL,
                       it.received.sizes[0] -= 1), no, "outputs.tokens.sizes[0]: must have room");
    REFUSED(combine, BACKWARD, no, "inputs.topk_weights: is required");
    REFUSED(combine, (BACKWARD, it.combine_inputs.topk_weights = &it.received_weights.tensor), no,
            "outputs.topk_weights: is required");
    REFUSED(combine, (BACKWARD, it.combine_inputs.topk_weights = &it.received_weights.tensor,
                      it.combine_out.topk_weights = &it.weights.tensor, it.received_weights.sizes[0] = 0), no,
            "inputs.topk_weights.sizes[0]: must be 0 with inputs.tokens");
    REFUSED(combine, (BACKWARD, it.combine_inputs.topk_weights = &it.received_weights.tensor,
                      it.combine_out.topk_weights = &it.weights.tensor, it.received_weights.sizes[1] = 1), no,
            "inputs.topk_weights.sizes[1]");
    REFUSED(dispatch, it.config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4, no, "must be a recipe");
    REFUSED(dispatch, (it.config.quant_recipe = NCCL_EP_DISP_QUANT_FWD, it.inputs.scales = &it.tokens.tensor,
                       it.out.scales = &it.expert_rows.tensor, it.expert_rows.tensor.win_hdl = (ncclWindow_t)16), no,
            "outputs.scales.win_hdl: must be a window with outputs.tokens");
    // Prefixes come before recipes, recipes before directions, and these before shapes.
    REFUSED(dispatch, (it.out.size = 0, it.config.quant_recipe = NCCL_EP_DISP_QUANT_FWD), no, "size");
    REFUSED(dispatch, (it.config.quant_recipe = (ncclEpDispQuant_t)9, BACKWARD), no, "config.quant_recipe");
    REFUSED(dispatch, (it.received.sizes[0] = 1, it.config.pass_direction = (ncclEpPassDir_t)2), no,
            "config.pass_direction");
#undef BACKWARD
    REFUSED(combine, it.combine_inputs.topk_weights = &it.weights.tensor, no, "must be NULL in a");
    REFUSED(combine, it.combine_inputs.scales = &it.weights.tensor, no, "inputs.scales: must be NULL");
    REFUSED(combine, it.expert_rows.tensor.datatype = ncclFloat8e4m3, no, "a combine sums bfloat16");
    REFUSED(combine, (it.expert_rows.tensor.datatype = ncclFloat8e4m3, it.combine_out.tokens = NULL),
            no, "inputs.tokens.datatype");
    REFUSED(combine, it.combine_out.tokens = NULL, no, "outputs.tokens: is required");
    REFUSED(combine, it.combine_config.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8, no, "must be a recipe of the layout");
    REFUSED(combine, it.combine_config.quant_recipe = (ncclEpCombQuant_t)3, no, "quant_recipe: must");
    REFUSED(combine, (it.combine_inputs.size = 0,
                      it.combine_config.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4), usage, "NVFP4");
    EP_CHECK_NCCL(ncclEpComplete(it.handle, NULL, env->stream));
    close_call(&it);
}

EP_TEST(what_rows_by_expert_have_not_is_refused) {
    const ncclResult_t no = ncclInvalidArgument;
    Case test = kSmallHt;
    test.alignment = 4;
    test.recv_rows = (unsigned)env->size * kTokens;
    Call it;
    open_call(&it, env, &test);
    REFUSED(dispatch, (void)0, no, "outputs.topk_idx: must be NULL, as each slot is of one expert");
    REFUSED(dispatch, it.out.topk_idx = NULL, no, "outputs.topk_weights.ndim");
    REFUSED(dispatch, it.out.topk_idx = it.out.topk_weights = NULL, no, "outputs.topk_weights: is required");
    REFUSED(dispatch, (it.out.topk_idx = NULL, it.received.sizes[0] -= 1), no, "outputs.tokens.sizes[0]: must have");
    REFUSED(combine, it.combine_config.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8, ncclInvalidUsage, "MXFP8 is not");
    close_call(&it);
}

// Without a bound, rows must be those that come.
EP_TEST(rows_of_an_unbounded_group_are_counted_first) {
    Call it;
    open_call(&it, env, &kSmallHt);
    // All ids are -1, so no row comes, and tensors without rows have room.
    reset(&it);
    const char* mismatch = "outputs.topk_weights.sizes[0]: must be 0 with outputs.tokens";
    REFUSED(dispatch, it.received.sizes[0] = 0, ncclInvalidArgument, mismatch);
    REFUSED(dispatch, it.received_ids.sizes[0] = 0, ncclInvalidArgument, mismatch);
    REFUSED(dispatch, it.received_weights.sizes[0] = 0, ncclInvalidArgument, mismatch);
    reset(&it);
    it.received.sizes[0] = it.received_ids.sizes[0] = it.received_weights.sizes[0] = 0;
    EP_CHECK_NCCL(dispatch(&it));
    ep_sync(env);
    close_call(&it);
}

EP_TEST(a_handle_without_a_routing_does_nothing) {
    Call it;
    open_call(&it, env, &kSmallLl);
    ncclEpHandle_t routed = it.handle;
    EP_CHECK_NCCL(ncclEpInitHandle(&it.handle, it.group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, kTopK,
                                   NULL));
    REFUSED(dispatch, (void)0, ncclInvalidUsage, "handle: has no routing yet");
    REFUSED(combine, (void)0, ncclInvalidUsage, "handle: has no routing yet");
    EP_CHECK_NCCL(ncclEpHandleDestroy(it.handle));
    it.handle = routed;
    close_call(&it);
}
