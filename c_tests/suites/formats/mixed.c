// Ranks that cast and ranks that forward what a cast would give, in one dispatch: the receivers cannot tell them apart.
#include "reference/cast.h"
#include "reference/ht_run.h"
#include "reference/ll_run.h"

enum { kMaxTokens = 7, kTopK = 3, kHidden = 272, kLocalExperts = 3 };

static bool casts(const EpEnv* env) { return env->rank % 2 != 0; }

// The rows of this rank as a cast makes them, and their scales; with guard zones like all buffers.
typedef struct {
    RefBuffer rows, scales;
} Cast;

static Cast cast_all(const RefFormat* format, const EpEnv* env, unsigned tokens, uint64_t seed) {
    const size_t row_bytes = ref_format_out_bytes(format);
    const size_t scale_bytes = ref_format_scale_bytes(format);
    EP_SCOPED unsigned char* rows = ref_host_new(tokens * row_bytes);
    EP_SCOPED unsigned char* scales = ref_host_new(tokens * scale_bytes);
    EP_SCOPED void* row = ref_host_new(ref_format_in_bytes(format));
    for (size_t token = 0; token < tokens; ++token) {
        ref_cast_input(format, seed, ref_row_of((unsigned)env->rank, token), row);
        ref_cast_row(format, row, rows + token * row_bytes, scales + token * scale_bytes);
    }
    const Cast cast = {ref_buffer_new(tokens * row_bytes), ref_buffer_new(tokens * scale_bytes)};
    ref_buffer_upload(&cast.rows, rows);
    ref_buffer_upload(&cast.scales, scales);
    return cast;
}

// Where rows and scales arrive.
typedef struct {
    const RefBuffer *rows, *scales;
    RefLayout layout;
} Outputs;

static void forward(const EpEnv* env, ncclEpHandle_t handle, const RefFormat* format,
                    const Cast* cast, const Outputs* to) {
    const unsigned tokens = (unsigned)(cast->rows.bytes / kHidden);
    RefLists lists;
    memset(&lists, 0, sizeof(lists));
    ref_list_add_rows(&lists.inputs, &cast->rows, format->to, kHidden, ref_flat(tokens));
    ref_list_add_scales(&lists.inputs, &cast->scales, format, kRefDense, ref_flat(tokens));
    ref_list_add_rows(&lists.outputs, to->rows, format->to, kHidden, to->layout);
    ref_list_add_scales(&lists.outputs, to->scales, format, format->out_order, to->layout);
    EP_CHECK_NCCL(ref_lists_dispatch(&lists, handle, 0, NULL, env->stream));
}

static RefFormat format_of(const EpEnv* env) {
    RefFormat format = ref_format_cast(ncclBfloat16, kHidden, ncclFloat32, 128);
    format.out_order = (RefOrder)(env->rank % kRefNumOrders);
    format.spare = 2;
    return format;
}

EP_TEST(casts_on_some_ranks) {
    const unsigned experts = kLocalExperts * (unsigned)env->size;
    const RefFormat format = format_of(env);
    const RefShape shape = {experts, kMaxTokens, kTopK, ncclBfloat16, 16};
    ncclEpGroup_t group = ep_group_create(env, NCCL_EP_ALGO_LOW_LATENCY, experts, kMaxTokens,
                                          (unsigned)ref_format_slot_bytes(&format));
    LlRun run = ll_run_open_with(env, group, &shape, kRefDistinct, true, 3);
    run.without_counter = true;
    ll_run_set_format(&run, &format);
    ll_prepare_dispatch(&run);
    Cast cast = cast_all(&format, env, run.now->num_tokens[env->rank], run.tokens_seed);
    const Outputs outputs = {&run.packed, &run.scales_out, run.layout};
    if (casts(env)) {
        EP_CHECK_NCCL(ll_launch_dispatch(&run, env->stream, false));
    } else {
        forward(env, run.handle, &format, &cast, &outputs);
    }
    ep_sync(env);
    ll_check_dispatch(&run);
    ref_buffer_free(&cast.rows);
    ref_buffer_free(&cast.scales);
    ll_run_close(&run);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}

EP_TEST_HT(casts_on_some_ranks_ht) {
    const unsigned experts = kLocalExperts * (unsigned)env->size;
    const RefFormat format = format_of(env);
    const RefShape shape = {experts, kMaxTokens, kTopK, ncclBfloat16, 16};
    const HtOpening opening = {kHtRowsSpare, kHtNoCounter, 5};
    ncclEpGroup_t group = ep_group_create(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, experts, kMaxTokens,
                                          (unsigned)ref_format_slot_bytes(&format));
    HtRun run = ht_run_open_with(env, group, &shape, kRefDistinct, true, opening);
    ht_run_set_format(&run, &format);
    ht_prepare_dispatch(&run);
    Cast cast = cast_all(&format, env, run.routing->num_tokens[env->rank], run.tokens_seed);
    const Outputs outputs = {&run.tokens_out, &run.scales_out, ref_flat(run.num_rows)};
    const HtPass cached = {.forward = false};
    if (casts(env)) {
        EP_CHECK_NCCL(ht_launch_dispatch(&run, cached, env->stream));
    } else {
        forward(env, run.handle, &format, &cast, &outputs);
        run.pass = cached;
    }
    ep_sync(env);
    ht_check_dispatch(&run);
    ref_buffer_free(&cast.rows);
    ref_buffer_free(&cast.scales);
    ht_run_close(&run);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}
