// Recipes: what they refuse, and a cast. Rows with scales that are forwarded are in the tests of each layout.
#include <math.h>

#include "suites/second/second.h"

enum { kHidden = 512, kBlock = 128, kBlocks = kHidden / kBlock, kTokens = 4 };

// The number of a byte of e4m3, not NaN.
static float e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float magnitude = exponent == 0 ? ldexpf((float)mantissa, -9) : ldexpf((float)(8 + mantissa), exponent - 10);
    return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// A token of `rank` as it arrives: any bytes, the largest number of each block at its begin, and a scale for each
// block.
static uint8_t code_of(unsigned rank, unsigned token, unsigned i) {
    if (i % kBlock == 0) return 0x7e;  // 448
    const unsigned mixed = (rank * 131 + token * 31 + i) * 2654435761u >> 13;
    return (mixed & 0x7f) == 0x7f ? 0 : (uint8_t)mixed;
}

static float scale_of(unsigned rank, unsigned token, unsigned block) {
    return ldexpf(1.0f, (int)((rank + token + block) % 5) - 2);
}

typedef struct {
    const EpEnv* env;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    RefBuffer ids, tokens, packed, scales, counters;
} Cast;

// Every token goes to the first expert of each rank.
static void open_cast(Cast* cast, const EpEnv* env) {
    const unsigned ranks = (unsigned)env->size;
    Case test = kSmallLl;
    test.hidden = kHidden;
    test.top_k = ranks;
    cast->env = env;
    cast->group = group_of(env, &test);
    cast->ids = ref_buffer_new_input(kTokens * ranks * sizeof(int64_t));
    cast->tokens = ref_buffer_new_input(kTokens * kHidden * 2);
    cast->packed = ref_buffer_new(2 * ranks * kTokens * kHidden);
    cast->scales = ref_buffer_new(2 * ranks * kTokens * kBlocks * sizeof(float));
    cast->counters = ref_buffer_new(2 * sizeof(int32_t));
    EP_SCOPED int64_t* ids = ref_host_new(cast->ids.bytes);
    EP_SCOPED void* tokens = ref_host_new(cast->tokens.bytes);
    for (unsigned token = 0; token < kTokens; ++token) {
        for (unsigned rank = 0; rank < ranks; ++rank) ids[token * ranks + rank] = 2 * rank;
        for (unsigned i = 0; i < kHidden; ++i) {
            const unsigned own = (unsigned)env->rank;
            ep_store(ncclBfloat16, tokens, token * kHidden + i,
                     e4m3(code_of(own, token, i)) * scale_of(own, token, i / kBlock));
        }
    }
    ref_buffer_upload(&cast->ids, ids);
    ref_buffer_upload(&cast->tokens, tokens);
    View view;
    view_of(&view, ref_buffer_data(&cast->ids), ncclInt64, kTokens, ranks, 0);
    EP_CHECK_NCCL(ncclEpCreateHandle(&cast->handle, cast->group, layout_of(&test), &view.tensor, NULL, NULL,
                                     env->stream));
}

static void close_cast(Cast* cast) {
    EP_CHECK_NCCL(ncclEpHandleDestroy(cast->handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(cast->group));
    RefBuffer* buffers[] = {&cast->ids, &cast->tokens, &cast->packed, &cast->scales, &cast->counters};
    for (size_t i = 0; i < COUNT(buffers); ++i) ref_buffer_free(buffers[i]);
}

static void check_cast(const Cast* cast) {
    const unsigned ranks = (unsigned)cast->env->size;
    EP_SCOPED uint8_t* packed = ref_host_poison(cast->packed.bytes);
    EP_SCOPED float* scales = ref_host_poison(cast->scales.bytes);
    for (unsigned slot = 0; slot < ranks * kTokens; ++slot) {
        const unsigned source = slot / kTokens, token = slot % kTokens;
        for (unsigned i = 0; i < kHidden; ++i) packed[slot * kHidden + i] = code_of(source, token, i);
        for (unsigned i = 0; i < kBlocks; ++i) scales[slot * kBlocks + i] = scale_of(source, token, i);
    }
    REF_CHECK_BUFFER(&cast->packed, packed);
    REF_CHECK_BUFFER(&cast->scales, scales);
}

typedef struct {
    View tokens, packed, scales, counters;
    ncclEpDispatchInputs_t inputs;
    ncclEpDispatchOutputs_t outputs;
    ncclEpLayoutInfo_t info;
    ncclEpDispatchConfig_t config;
} Call;

static void set_call(Call* it, const Cast* cast) {
    const size_t slots = (size_t)cast->env->size * kTokens;
    view_of(&it->tokens, ref_buffer_data(&cast->tokens), ncclBfloat16, kTokens, kHidden, 0);
    view_of(&it->packed, ref_buffer_data(&cast->packed), ncclFloat8e4m3, 2, slots, kHidden);
    view_of(&it->scales, ref_buffer_data(&cast->scales), ncclFloat32, 2, slots, kBlocks);
    view_of(&it->counters, ref_buffer_data(&cast->counters), ncclInt32, 2, 0, 0);
    it->inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    it->inputs.tokens = &it->tokens.tensor;
    it->outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    it->outputs.tokens = &it->packed.tensor;
    it->outputs.scales = &it->scales.tensor;
    it->info = NCCL_EP_LAYOUT_INFO_INIT;
    it->info.expert_counters = &it->counters.tensor;
    it->config = NCCL_EP_DISPATCH_CONFIG_INIT;
    it->config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
}

static ncclResult_t dispatch(Call* it, const Cast* cast) {
    return ncclEpDispatch(cast->handle, &it->inputs, &it->outputs, &it->info, &it->config, cast->env->stream);
}

#define REFUSED(change, words)                                                            \
    do {                                                                                  \
        set_call(&it, &cast);                                                             \
        change;                                                                           \
        check_refused(EP_HERE(#change), dispatch(&it, &cast), ncclInvalidArgument, words); \
    } while (false)

EP_TEST(low_latency_casts_rows) {
    Cast cast;
    Call it;
    open_cast(&cast, env);
    for (unsigned round = 0; round < 2; ++round) {
        ref_buffer_poison(&cast.packed);
        ref_buffer_poison(&cast.scales);
        set_call(&it, &cast);
        it.config.round_scales = round;  // they are powers of two anyway
        EP_CHECK_NCCL(dispatch(&it, &cast));
        ep_sync(env);
        check_cast(&cast);
    }
    REFUSED(it.inputs.scales = &it.scales.tensor, "inputs.scales: must be NULL, as the recipe");
    REFUSED(it.outputs.scales = NULL, "outputs.scales: is required");
    REFUSED(it.tokens.tensor.datatype = ncclFloat16, "inputs.tokens.datatype: must be bfloat16");
    REFUSED(it.packed.tensor.datatype = ncclUint8, "outputs.tokens.datatype: must be float8e4m3");
    REFUSED(it.scales.tensor.datatype = ncclUint8, "outputs.scales.datatype: must be float32");
    REFUSED(it.tokens.sizes[1] = 256, "inputs.tokens.sizes[1]: must be a positive multiple of 512");
    REFUSED(it.scales.sizes[2] = 16, "outputs.scales.sizes: must be a scale for each 128");
#define FORWARD it.config.quant_recipe = NCCL_EP_DISP_QUANT_FWD, it.inputs.scales = it.outputs.scales
    REFUSED((FORWARD, it.config.round_scales = 1), "config.round_scales: must be 0");
    REFUSED((FORWARD, it.inputs.scales = NULL), "inputs.scales: is required");
    REFUSED((FORWARD, it.outputs.scales = NULL), "outputs.scales: is required");
    REFUSED((FORWARD, it.tokens.tensor.datatype = ncclUint8), "inputs.tokens.datatype: must be a float type");
    REFUSED((FORWARD, it.scales.tensor.datatype = ncclFloat4x2), "inputs.scales.datatype: must be a float type");
    REFUSED((FORWARD, it.scales.sizes[2] = 3), "inputs.scales: must be rows of a positive multiple of 16");
    REFUSED((FORWARD, it.scales.tensor.data = (char*)it.scales.tensor.data + 4), "inputs.scales.data: must be a mul");
#undef FORWARD
    check_cast(&cast);
    close_cast(&cast);
}
