// Recipes: what they refuse, and a cast. Rows with scales that are forwarded are in the tests of each layout.
#include <math.h>

#include "reference/ll.h"
#include "suites/second/run.h"

enum { kHidden = 512, kBlock = 128, kBlocks = kHidden / kBlock };

// The number of a byte of e4m3, not NaN.
static float e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float magnitude = exponent == 0 ? ldexpf((float)mantissa, -9) : ldexpf((float)(8 + mantissa), exponent - 10);
    return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// The row of a token, ref_row_of, as it arrives: any bytes, the largest number of each block at its begin, and a scale
// for each block.
static uint8_t code_of(uint64_t number, unsigned i) {
    if (i % kBlock == 0) return 0x7e;  // 448
    const uint8_t code = (uint8_t)ep_mix(number, i, 1);
    return (code & 0x7f) == 0x7f ? 0 : code;
}

static float scale_of(uint64_t number, unsigned block) { return ldexpf(1.0f, (int)(ep_mix(number, block, 2) % 5) - 2); }

static void open_cast(Run* run, const EpEnv* env, const Case* test) {
    run_open(run, env, NULL, test, 600);
    EP_SCOPED void* tokens = ref_host_new(run->buffers[kTokens].bytes);
    for (size_t i = 0; i < (size_t)run->num_tokens * kHidden; ++i) {
        const uint64_t number = ref_row_of(run->rank, i / kHidden);
        const unsigned at = (unsigned)(i % kHidden);
        ep_store(ncclBfloat16, tokens, i, e4m3(code_of(number, at)) * scale_of(number, at / kBlock));
    }
    ref_buffer_upload(&run->buffers[kTokens], tokens);
    run_route(run);
}

static void check_cast(const Run* run) {
    EP_SCOPED uint8_t* packed = ref_host_poison(run->buffers[kReceived].bytes);
    EP_SCOPED float* scales = ref_host_poison(run->buffers[kScalesOut].bytes);
    EP_SCOPED int32_t* counts = ref_host_new(run->test->local_experts * sizeof(*counts));
    EP_SCOPED uint64_t* numbers = ref_ll_slots(run->routing, run->rank, run->layout, counts);
    const uint64_t* number = numbers;
    for (unsigned expert = 0; expert < run->test->local_experts; ++expert) {
        for (int32_t slot = 0; slot < counts[expert]; ++slot, ++number) {
            const size_t row = ref_layout_row(run->layout, expert, (size_t)slot);
            for (unsigned i = 0; i < kHidden; ++i) packed[row * kHidden + i] = code_of(*number, i);
            for (unsigned i = 0; i < kBlocks; ++i) scales[row * kBlocks + i] = scale_of(*number, i);
        }
    }
    REF_CHECK_BUFFER(&run->buffers[kReceived], packed);
    REF_CHECK_BUFFER(&run->buffers[kScalesOut], scales);
}

// Narrower rows and other scales than those of the run, in its memory.
static void set_call(Call* it, const Run* run) {
    const size_t experts = run->layout.parts, slots = run->layout.rows;
    call_set(it, run, NCCL_EP_FWD_PASS);
    view_of(&it->views[kReceived], ref_buffer_data(&run->buffers[kReceived]), ncclFloat8e4m3, experts, slots, kHidden);
    view_of(&it->views[kScalesOut], ref_buffer_data(&run->buffers[kScalesOut]), ncclFloat32, experts, slots, kBlocks);
    it->outputs.scales = &it->views[kScalesOut].tensor;
    it->config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
}

static ncclResult_t dispatch(Call* it, const Run* run) {
    return ncclEpDispatch(run->handle, &it->inputs, &it->outputs, &it->info, &it->config, run->env->stream);
}

#define REFUSED(change, words)                                                            \
    do {                                                                                  \
        set_call(&it, &run);                                                              \
        change;                                                                           \
        check_refused(EP_HERE(#change), dispatch(&it, &run), ncclInvalidArgument, words); \
    } while (false)

EP_TEST(low_latency_casts_rows) {
    Case test = kSmallLl;
    test.hidden = kHidden;
    Run run;
    Call it;
    View *tokens = &it.views[kTokens], *packed = &it.views[kReceived], *scales = &it.views[kScalesOut];
    open_cast(&run, env, &test);
    for (unsigned round = 0; round < 2; ++round) {
        run_poison(&run);
        set_call(&it, &run);
        it.config.round_scales = round;  // they are powers of two anyway
        EP_CHECK_NCCL(dispatch(&it, &run));
        ep_sync(env);
        check_cast(&run);
        run_check_counters(&run);
    }
    REFUSED(it.inputs.scales = &scales->tensor, "inputs.scales: must be NULL, as the recipe");
    REFUSED(it.outputs.scales = NULL, "outputs.scales: is required");
    REFUSED(tokens->tensor.datatype = ncclFloat16, "inputs.tokens.datatype: must be bfloat16");
    REFUSED(packed->tensor.datatype = ncclUint8, "outputs.tokens.datatype: must be float8e4m3");
    REFUSED(scales->tensor.datatype = ncclUint8, "outputs.scales.datatype: must be float32");
    REFUSED(tokens->sizes[1] = 256, "inputs.tokens.sizes[1]: must be a positive multiple of 512");
    REFUSED(scales->sizes[2] = 16, "outputs.scales.sizes: must be a scale for each 128");
#define FORWARD it.config.quant_recipe = NCCL_EP_DISP_QUANT_FWD, it.inputs.scales = it.outputs.scales
    REFUSED((FORWARD, it.config.round_scales = 1), "config.round_scales: must be 0");
    REFUSED((FORWARD, it.inputs.scales = NULL), "inputs.scales: is required");
    REFUSED((FORWARD, it.outputs.scales = NULL), "outputs.scales: is required");
    REFUSED((FORWARD, tokens->tensor.datatype = ncclUint8), "inputs.tokens.datatype: must be a float type");
    REFUSED((FORWARD, scales->tensor.datatype = ncclFloat4x2), "inputs.scales.datatype: must be a float type");
    REFUSED((FORWARD, scales->sizes[2] = 3), "inputs.scales: must be rows of a positive multiple of 16");
    REFUSED((FORWARD, scales->tensor.data = (char*)scales->tensor.data + 4), "inputs.scales.data: must be a mul");
#undef FORWARD
    check_cast(&run);
    run_close(&run);
}
