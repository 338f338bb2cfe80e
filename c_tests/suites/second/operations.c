// What operations refuse, and in which order; their outputs stay as they are.
#include "suites/second/run.h"

// A group with a handle that routes nothing, and calls of each operation that are right, for tests to change.
static Run g_run;
static Call it;

static ncclResult_t dispatch(void) {
    return ncclEpDispatch(g_run.handle, &it.inputs, &it.outputs, &it.info, &it.config, g_run.env->stream);
}

static ncclResult_t combine(void) {
    return ncclEpCombine(g_run.handle, &it.combine_inputs, &it.combine_outputs, &it.combine_config, g_run.env->stream);
}

static ncclResult_t update(void) {
    return ncclEpUpdateHandle(g_run.handle, &it.views[kIds].tensor, &it.update, g_run.env->stream);
}

static void reset(void) { call_set(&it, &g_run, NCCL_EP_FWD_PASS); }

static void open_call(const EpEnv* env, Case* test) {
    test->style = kRefNowhere;
    run_open(&g_run, env, NULL, test, 1);
    run_route(&g_run);
    reset();
}

// Nothing was written: the poison is still there.
static void close_call(void) {
    ep_sync(g_run.env);
    run_check_untouched(&g_run);
    run_close(&g_run);
}

#define REFUSED(operation, change, expected, words)                  \
    do {                                                             \
        reset();                                                     \
        change;                                                      \
        check_refused(EP_HERE(#change), operation(), expected, words); \
    } while (false)

EP_TEST(structs_of_operations_are_checked) {
    const ncclResult_t no = ncclInvalidArgument;
    Case test = kSmallLl;
    open_call(env, &test);
    REFUSED(dispatch, it.inputs.size = 31, no, "inputs.size: must be the size");
    REFUSED(dispatch, it.inputs.magic = 1, no, "inputs.magic: must be that of its struct");
    REFUSED(dispatch, it.outputs.size = 39, no, "outputs.size");
    REFUSED(dispatch, it.outputs.magic = 1, no, "outputs.magic");
    REFUSED(dispatch, it.info.size = 39, no, "layout_info.size");
    REFUSED(dispatch, it.info.magic = 1, no, "layout_info.magic");
    REFUSED(dispatch, it.config.size = 19, no, "config.size");
    REFUSED(dispatch, it.config.magic = 1, no, "config.magic");
    REFUSED(combine, it.combine_inputs.size = 23, no, "inputs.size");
    REFUSED(combine, it.combine_inputs.magic = 1, no, "inputs.magic");
    REFUSED(combine, it.combine_outputs.size = 23, no, "outputs.size");
    REFUSED(combine, it.combine_outputs.magic = 1, no, "outputs.magic");
    REFUSED(combine, it.combine_config.size = 15, no, "config.size");
    REFUSED(combine, it.combine_config.magic = 1, no, "config.magic");
    CHECK_REFUSED(ncclEpDispatch(g_run.handle, NULL, &it.outputs, &it.info, NULL, env->stream), no,
                  "inputs: must not be NULL");
    CHECK_REFUSED(ncclEpDispatch(g_run.handle, &it.inputs, NULL, &it.info, NULL, env->stream), no,
                  "outputs: must not be NULL");
    CHECK_REFUSED(ncclEpDispatch(NULL, &it.inputs, &it.outputs, &it.info, NULL, env->stream), no,
                  "handle: must not be NULL");
    CHECK_REFUSED(ncclEpCombine(g_run.handle, NULL, &it.combine_outputs, NULL, env->stream), no,
                  "inputs: must not be NULL");
    CHECK_REFUSED(ncclEpCombine(g_run.handle, &it.combine_inputs, NULL, NULL, env->stream), no,
                  "outputs: must not be NULL");
    ncclEpCompleteConfig_t complete = {.size = 7, .magic = NCCL_EP_MAGIC};
    CHECK_REFUSED(ncclEpComplete(g_run.handle, &complete, env->stream), no, "config.size");
    close_call();
}

EP_TEST(what_low_latency_has_not_is_refused) {
    const ncclResult_t no = ncclInvalidArgument, usage = ncclInvalidUsage;
    Case test = kSmallLl;
    open_call(env, &test);
    REFUSED(dispatch, it.inputs.tokens = NULL, no, "inputs.tokens: is required");
    REFUSED(dispatch, it.outputs.tokens = NULL, no, "outputs.tokens: is required");
    REFUSED(dispatch, it.info.expert_counters = NULL, no, "expert_counters: is required");
    REFUSED(dispatch, it.info.src_rank_counters = &it.views[kCounters].tensor, no, "src_rank_counters: must");
    REFUSED(dispatch, it.inputs.topk_weights = &it.views[kWeights].tensor, no, "inputs.topk_weights: must");
    REFUSED(dispatch, it.outputs.topk_weights = &it.views[kWeightsOut].tensor, no, "outputs.topk_weights");
    REFUSED(dispatch, it.outputs.topk_idx = &it.views[kIdsOut].tensor, no, "outputs.topk_idx: must be NULL");
    REFUSED(dispatch, it.inputs.scales = &it.views[kWeights].tensor, no, "inputs.scales: must be NULL");
    REFUSED(dispatch, it.outputs.scales = &it.views[kWeightsOut].tensor, no, "outputs.scales: must be");
    REFUSED(dispatch, it.config.quant_recipe = (ncclEpDispQuant_t)3, no, "config.quant_recipe: must");
    REFUSED(dispatch, it.info.recv_topk_idx_kind = (ncclEpExpertIdKind_t)99, no, "recv_topk_idx_kind");
    REFUSED(dispatch, it.config.pass_direction = NCCL_EP_BWD_PASS, usage, "config.pass_direction");
    REFUSED(dispatch, it.config.pass_direction = (ncclEpPassDir_t)2, no, "config.pass_direction");
    REFUSED(dispatch, it.views[kReceived].sizes[0] = 1, no,
            "outputs.tokens.sizes[0]: must be at least the number of local experts (got 1, expected 2 or more)");
    REFUSED(dispatch, it.views[kReceived].sizes[1] = 1, no, "max_dispatch_tokens_per_rank");
    REFUSED(dispatch, it.views[kReceived].tensor.datatype = ncclFloat16, no,
            "outputs.tokens.datatype: must be the type of inputs.tokens (got float16");
    REFUSED(dispatch, it.views[kTokens].sizes[0] = 3, no, "inputs.tokens.sizes[0]: must be the handle's");
    REFUSED(dispatch, it.views[kTokens].tensor.ndim = 1, no, "inputs.tokens.ndim");
    REFUSED(dispatch, it.views[kCounters].sizes[0] = 1, no, "layout_info.expert_counters");
    REFUSED(dispatch, it.views[kTokens].sizes[1] = 2 * test.hidden, no, "max_token_bytes");
    REFUSED(combine, (void)0, usage, "needs a dispatch before its first combine");
    REFUSED(combine, it.combine_outputs.topk_weights = NULL, no, "outputs.topk_weights: is required");
    REFUSED(combine, it.combine_config.pass_direction = NCCL_EP_BWD_PASS, usage, "pass_direction");
    CHECK_REFUSED(ncclEpDispatch(g_run.handle, &it.inputs, &it.outputs, NULL, NULL, env->stream), no,
                  "layout_info: is required");
    EP_CHECK_NCCL(ncclEpComplete(g_run.handle, NULL, env->stream));
    close_call();
}

EP_TEST(what_rank_major_has_not_is_refused) {
    const ncclResult_t no = ncclInvalidArgument, usage = ncclInvalidUsage;
    Case test = kSmallLl;
    test.kind = kLlRanks;
    open_call(env, &test);
    REFUSED(dispatch, it.inputs.topk_weights = NULL, no, "inputs.topk_weights: is required");
    REFUSED(dispatch, it.outputs.topk_weights = NULL, no, "outputs.topk_weights: is required");
    REFUSED(dispatch, it.outputs.topk_idx = NULL, no, "outputs.topk_idx: is required");
    REFUSED(dispatch, it.info.expert_counters = &it.views[kCounters].tensor, no, "expert_counters: must be NULL");
    REFUSED(dispatch, it.views[kIdsOut].tensor.datatype = ncclUint32, no, "expected int32 or int64");
    REFUSED(dispatch, it.views[kReceived].sizes[1] -= 1, no, "outputs.tokens.sizes[1]");
    REFUSED(dispatch, it.views[kIdsOut].sizes[2] -= 1, no, "outputs.topk_idx.sizes[2]");
    REFUSED(dispatch, it.config.pass_direction = NCCL_EP_BWD_PASS, usage, "config.pass_direction");
    REFUSED(combine, (void)0, usage, "needs a dispatch before its first combine");
    close_call();
}

EP_TEST(what_high_throughput_has_not_is_refused) {
    const ncclResult_t no = ncclInvalidArgument, usage = ncclInvalidUsage;
    Case test = kSmallHt;
    test.recv_rows = (unsigned)env->size * test.max_tokens;
    open_call(env, &test);
    REFUSED(dispatch, it.inputs.topk_weights = NULL, no, "inputs.topk_weights: is required");
    REFUSED(dispatch, it.outputs.topk_weights = NULL, no, "outputs.topk_weights: is required");
    REFUSED(dispatch, it.outputs.topk_idx = NULL, no, "outputs.topk_idx: is required");
    REFUSED(dispatch, it.outputs.tokens = NULL, no, "outputs.tokens: is required");
    REFUSED(dispatch, it.views[kReceived].sizes[0] -= kSpare + 1, no, "outputs.tokens.sizes[0]: must have room");
    REFUSED(dispatch, it.views[kIdsOut].sizes[0] -= kSpare + 1, no, "outputs.topk_idx.sizes[0]");
    REFUSED(dispatch, it.views[kWeightsOut].sizes[0] = 0, no, "outputs.topk_weights.sizes[0]");
    REFUSED(dispatch, it.views[kIdsOut].tensor.datatype = ncclInt32, no, "outputs.topk_idx.datatype");
    REFUSED(dispatch, it.views[kReceived].tensor.datatype = ncclFloat16, no, "outputs.tokens.datatype");
    REFUSED(dispatch, it.views[kTokens].tensor.ndim = 1, no, "inputs.tokens.ndim");
    REFUSED(dispatch, it.info.recv_topk_idx_kind = (ncclEpExpertIdKind_t)3, no, "recv_topk_idx_kind");
#define BACKWARD it.config.pass_direction = it.combine_config.pass_direction = NCCL_EP_BWD_PASS
    REFUSED(dispatch, BACKWARD, no, "inputs.topk_weights: must be NULL in a backward pass");
    REFUSED(dispatch, (BACKWARD, it.inputs.topk_weights = NULL), no, "outputs.topk_weights: must be NULL");
    REFUSED(dispatch, (BACKWARD, it.inputs.topk_weights = it.outputs.topk_weights = NULL), no,
            "outputs.topk_idx: must be NULL");
    REFUSED(dispatch, (BACKWARD, it.inputs.topk_weights = it.outputs.topk_weights = it.outputs.topk_idx = NULL,
                       it.views[kReceived].sizes[0] -= kSpare + 1), no, "outputs.tokens.sizes[0]: must have room");
    REFUSED(combine, BACKWARD, no, "inputs.topk_weights: is required");
#define GRADIENTS                                                                \
    BACKWARD, it.combine_inputs.topk_weights = &it.views[kGradientsIn].tensor, \
              it.combine_outputs.topk_weights = &it.views[kGradients].tensor
    REFUSED(combine, (GRADIENTS, it.combine_outputs.topk_weights = NULL), no, "outputs.topk_weights: is required");
    REFUSED(combine, (GRADIENTS, it.views[kGradientsIn].sizes[0] = 0), no,
            "inputs.topk_weights.sizes[0]: must be 0 with inputs.tokens");
    REFUSED(combine, (GRADIENTS, it.views[kGradientsIn].sizes[1] = 1), no, "inputs.topk_weights.sizes[1]");
#undef GRADIENTS
    REFUSED(dispatch, it.config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4, no, "must be a recipe");
    // Prefixes come before recipes, recipes before directions, and these before shapes.
    REFUSED(dispatch, (it.outputs.size = 0, it.config.quant_recipe = NCCL_EP_DISP_QUANT_FWD), no, "size");
    REFUSED(dispatch, (it.config.quant_recipe = (ncclEpDispQuant_t)9, BACKWARD), no, "config.quant_recipe");
    REFUSED(dispatch, (it.views[kReceived].sizes[0] = 1, it.config.pass_direction = (ncclEpPassDir_t)2), no,
            "config.pass_direction");
#undef BACKWARD
    REFUSED(combine, it.combine_inputs.topk_weights = &it.views[kWeights].tensor, no, "must be NULL in a");
    REFUSED(combine, it.combine_inputs.scales = &it.views[kWeights].tensor, no, "inputs.scales: must be NULL");
    REFUSED(combine, it.views[kResults].tensor.datatype = ncclFloat8e4m3, no, "a combine sums bfloat16");
    REFUSED(combine, (it.views[kResults].tensor.datatype = ncclFloat8e4m3, it.combine_outputs.tokens = NULL),
            no, "inputs.tokens.datatype");
    REFUSED(combine, it.combine_outputs.tokens = NULL, no, "outputs.tokens: is required");
    REFUSED(combine, it.combine_config.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8, no, "must be a recipe of the layout");
    REFUSED(combine, it.combine_config.quant_recipe = (ncclEpCombQuant_t)3, no, "quant_recipe: must");
    REFUSED(combine, (it.combine_inputs.size = 0,
                      it.combine_config.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4), usage, "NVFP4");
    EP_CHECK_NCCL(ncclEpComplete(g_run.handle, NULL, env->stream));
    close_call();
}

EP_TEST(forwarded_scales_are_checked) {
    const ncclResult_t no = ncclInvalidArgument;
    Case test = kSmallHt;
    test.recv_rows = (unsigned)env->size * test.max_tokens;
    open_call(env, &test);
#define SCALED                                                                                     \
    it.config.quant_recipe = NCCL_EP_DISP_QUANT_FWD, it.inputs.scales = &it.views[kScales].tensor, \
    it.outputs.scales = &it.views[kScalesOut].tensor
    REFUSED(dispatch, (SCALED, it.views[kScalesOut].tensor.data = NULL,
                       it.views[kScalesOut].tensor.win_hdl = (ncclWindow_t)16), no,
            "outputs.scales.win_hdl: must be a window with outputs.tokens");
    REFUSED(dispatch, (SCALED, it.views[kScalesOut].sizes[0] += 1), no,
            "outputs.scales.sizes[0]: must be that of outputs.tokens");
    REFUSED(dispatch, (SCALED, it.views[kReceived].sizes[0] += 1), no,
            "outputs.scales.sizes[0]: must be that of outputs.tokens");
    // With an address the window does not count.
    REFUSED(dispatch, (SCALED, it.views[kScalesOut].tensor.win_hdl = (ncclWindow_t)16), no, "max_token_bytes");
    REFUSED(dispatch, (SCALED, it.views[kTokens].tensor.datatype = ncclFloat4x2,
                       it.views[kReceived].tensor.datatype = ncclFloat8e4m3), no,
            "outputs.tokens.datatype: must be the type of inputs.tokens (got float8e4m3, expected float4x2)");
    REFUSED(dispatch, (SCALED, it.views[kScales].sizes[0] += 1), no, "inputs.scales.sizes[0]");
    REFUSED(dispatch, (SCALED, it.views[kScalesOut].sizes[0] = 0), no, "outputs.scales.sizes[0]");
    REFUSED(dispatch, (SCALED, it.views[kScalesOut].tensor.datatype = ncclFloat16), no, "outputs.scales.datatype");
#undef SCALED
    close_call();
}

EP_TEST(what_rows_by_expert_have_not_is_refused) {
    const ncclResult_t no = ncclInvalidArgument;
    Case test = kSmallHt;
    test.kind = kHtZones;
    test.alignment = 4;
    test.recv_rows = (unsigned)env->size * test.max_tokens;
    open_call(env, &test);
    REFUSED(dispatch, it.outputs.topk_idx = &it.views[kIdsOut].tensor, no,
            "outputs.topk_idx: must be NULL, as each slot is of one expert");
    REFUSED(dispatch, (it.views[kWeightsOut].tensor.ndim = 2, it.views[kWeightsOut].sizes[1] = 1), no,
            "outputs.topk_weights.ndim");
    REFUSED(dispatch, it.outputs.topk_weights = NULL, no, "outputs.topk_weights: is required");
    REFUSED(dispatch, it.views[kReceived].sizes[0] -= kSpare + 1, no, "outputs.tokens.sizes[0]: must have");
    REFUSED(dispatch, (it.info = it.update, it.views[kTotal].tensor.datatype = ncclInt64,
                       it.views[kCounters].tensor.datatype = it.views[kOffsets].tensor.datatype = ncclInt32), no,
            "layout_info: must have counters of one type");
    REFUSED(dispatch, (it.info = it.update, it.views[kOffsets].sizes[0] = 1), no,
            "layout_info.expert_offsets.sizes[0]");
    REFUSED(update, it.views[kTotal].tensor.datatype =
                        it.views[kCounters].tensor.datatype == ncclInt32 ? ncclInt64 : ncclInt32, no,
            "layout_info: must have counters of one type");
    REFUSED(combine, it.combine_config.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8, ncclInvalidUsage, "MXFP8 is not");
    close_call();
}

// Without a bound, rows must be those that come.
EP_TEST(rows_of_an_unbounded_group_are_counted_first) {
    Case test = kSmallHt;
    open_call(env, &test);
    // All ids are -1, so no row comes, and tensors without rows have room.
    g_run.rows = 4;
    const char* mismatch = "outputs.topk_weights.sizes[0]: must be 0 with outputs.tokens";
    REFUSED(dispatch, it.views[kReceived].sizes[0] = 0, ncclInvalidArgument, mismatch);
    REFUSED(dispatch, it.views[kIdsOut].sizes[0] = 0, ncclInvalidArgument, mismatch);
    REFUSED(dispatch, it.views[kWeightsOut].sizes[0] = 0, ncclInvalidArgument, mismatch);
    g_run.rows = 0;
    reset();
    EP_CHECK_NCCL(dispatch());
    ep_sync(env);
    close_call();
}

EP_TEST(a_handle_without_a_routing_does_nothing) {
    Case test = kSmallLl;
    open_call(env, &test);
    ncclEpHandle_t routed = g_run.handle;
    EP_CHECK_NCCL(ncclEpInitHandle(&g_run.handle, g_run.group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 2, NULL));
    REFUSED(dispatch, (void)0, ncclInvalidUsage, "handle: has no routing yet");
    REFUSED(combine, (void)0, ncclInvalidUsage, "handle: has no routing yet");
    EP_CHECK_NCCL(ncclEpHandleDestroy(g_run.handle));
    g_run.handle = routed;
    close_call();
}
