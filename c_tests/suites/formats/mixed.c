// Ranks that cast and ranks that forward what a cast would give, in one dispatch: the receivers cannot tell them apart.
#include "reference/cast.h"
#include "reference/run.h"

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

static void forward(RefRun* run, const Cast* cast) {
    const RefFormat* format = &run->format;
    const RefLayout in = ref_flat((unsigned)(cast->rows.bytes / kHidden));
    const RefLayout out = ref_run_layout(run, false);
    RefLists lists;
    memset(&lists, 0, sizeof(lists));
    ref_list_add_rows(&lists.inputs, &cast->rows, format->to, kHidden, in);
    ref_list_add_scales(&lists.inputs, &cast->scales, format, kRefDense, in);
    ref_list_add_rows(&lists.outputs, &run->tokens_out, format->to, kHidden, out);
    ref_list_add_scales(&lists.outputs, &run->scales_out, format, format->out_order, out);
    EP_CHECK_NCCL(ref_lists_dispatch(&lists, run->handle, 0, NULL, run->env->stream));
    run->pass = kRefCached;
}

static RefFormat format_of(const EpEnv* env) {
    RefFormat format = ref_format_cast(ncclBfloat16, kHidden, ncclFloat32, 128);
    format.out_order = (RefOrder)(env->rank % kRefNumOrders);
    format.spare = 2;
    return format;
}

static void on_some_ranks(EpEnv* env, RefOpening opening) {
    const unsigned experts = kLocalExperts * (unsigned)env->size;
    const ncclEpAlgorithm_t algorithm = opening.ht ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
    const RefFormat format = format_of(env);
    const RefShape shape = {experts, kMaxTokens, kTopK, ncclBfloat16, 16};
    ncclEpGroup_t group = ep_group_create(env, algorithm, experts, kMaxTokens,
                                          (unsigned)ref_format_slot_bytes(&format));
    REF_SCOPED RefRun run = ref_run_open_with(env, group, &shape, kRefDistinct, true, opening);
    run.own_group = group;
    run.without_counter = true;
    ref_run_set_format(&run, &format);
    ref_prepare_dispatch(&run);
    Cast cast = cast_all(&format, env, run.now->num_tokens[env->rank], run.tokens_seed);
    if (casts(env)) {
        EP_CHECK_NCCL(ref_launch_dispatch(&run, kRefCached, env->stream));
    } else {
        forward(&run, &cast);
    }
    ref_check_dispatch(&run);
    ref_buffer_free(&cast.rows);
    ref_buffer_free(&cast.scales);
}

EP_TEST(casts_on_some_ranks) { on_some_ranks(env, ref_ll(3)); }
EP_TEST_HT(casts_on_some_ranks_ht) { on_some_ranks(env, ref_ht_as(kHtRowsSpare, kHtNoCounter, 5)); }
