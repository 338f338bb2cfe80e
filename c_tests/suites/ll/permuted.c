// Low-latency combines whose ids differ from the dispatch's: the caller has permuted (id, weight)
// pairs in place, masked some, or replaced them.
#include <math.h>

#include "reference/run.h"

enum { kHidden = 16 };

// Gives every token these two ids and weights, the latter as bits.
static void give(RefRun* run, const int64_t ids[2], const uint32_t weights[2]) {
    const unsigned entries = 2 * run->shape.max_tokens;
    EP_SCOPED int64_t* all_ids = ref_host_new(entries * sizeof(*all_ids));
    EP_SCOPED uint32_t* all_weights = ref_host_new(entries * sizeof(*all_weights));
    for (unsigned i = 0; i < entries; ++i) {
        all_ids[i] = ids[i % 2];
        all_weights[i] = weights[i % 2];
    }
    ref_buffer_upload(&run->ids, all_ids);
    ref_buffer_upload(&run->weights, all_weights);
}

static void combine(RefRun* run) {
    EP_CHECK_NCCL(ref_launch_combine(run, kRefWhole, run->env->stream));
    ep_sync(run->env);
}

// Checks each token's sum for these ids and weights; two experts have answered with 1 and 2.
static void check_sum(RefRun* run, const int64_t ids[2], const float weights[2], float expected) {
    const unsigned elements = run->shape.max_tokens * kHidden;
    EP_SCOPED float* sums = ref_host_new(elements * sizeof(*sums));
    for (unsigned i = 0; i < elements; ++i) sums[i] = expected;
    uint32_t bits[2];
    memcpy(bits, weights, sizeof(bits));
    give(run, ids, bits);
    ref_buffer_poison(&run->combined);
    combine(run);
    REF_CHECK_BUFFER(&run->combined, sums);
}

// A NaN is a weight as any other, also the one that the kernels write instead of a masked entry's.
static void check_nan(RefRun* run, const int64_t ids[2], uint32_t bits) {
    const unsigned elements = run->shape.max_tokens * kHidden;
    EP_SCOPED float* sums = ref_host_new(elements * sizeof(*sums));
    const uint32_t nan_and_one[2] = {bits, 0x3f800000u};
    give(run, ids, nan_and_one);
    combine(run);
    ep_download(sums, ref_buffer_data(&run->combined), elements * sizeof(*sums));
    bool all_nan = true;
    for (unsigned i = 0; i < elements; ++i) all_nan = all_nan && isnan(sums[i]);
    EP_CHECK(all_nan);
}

// Expert 0 answers with 1, the last one with 2. Small integers, so any order of summation gives these sums.
EP_TEST(ll_weights_follow_their_ids) {
    const RefShape shape = {2 * (unsigned)env->size, 3, 2, ncclFloat32, kHidden};
    const int64_t last = (int64_t)shape.num_experts - 1;
    REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, false, ref_ll(21));
    RefRouting* routing = ref_routing_copy(run.now);
    for (unsigned rank = 0; rank < (unsigned)env->size; ++rank) {
        for (unsigned i = 0; i < 2 * shape.max_tokens; ++i) routing->topk_idx[rank][i] = i % 2 == 0 ? 0 : last;
    }
    ref_run_give(&run, routing);
    ref_dispatch(&run);
    ref_prepare_combine(&run);
    EP_SCOPED float* rows = ref_host_new(run.results_in.bytes);
    for (size_t i = 0; i < run.results_in.bytes / sizeof(float); ++i) {
        rows[i] = i < run.results_in.bytes / sizeof(float) / 2 ? 1.0f : 2.0f;
    }
    ref_buffer_upload(&run.results_in, rows);
    static const float kWeights[] = {1.0f, 16.0f};
    static const float kSwapped[] = {16.0f, 1.0f};
    check_sum(&run, (int64_t[]){0, last}, kWeights, 33.0f);
    check_sum(&run, (int64_t[]){last, 0}, kSwapped, 33.0f);
    check_sum(&run, (int64_t[]){last, 0}, kWeights, 18.0f);
    check_sum(&run, (int64_t[]){-1, 0}, kWeights, 16.0f);     // one masked
    check_sum(&run, (int64_t[]){last, last}, kWeights, 34.0f);  // both mean one row
    // Never dispatched, except with one rank, where both experts were.
    const int64_t other = env->size > 1 ? 1 : (int64_t)shape.num_experts;
    check_sum(&run, (int64_t[]){other, last}, kWeights, 32.0f);
    check_nan(&run, (int64_t[]){0, last}, 0x7fedcba9u);
    check_nan(&run, (int64_t[]){last, 0}, 0x7fedcba9u);
}

EP_TEST(ll_ids_permuted_before_combine) {
    static const RefStyle kStyles[] = {kRefDistinct, kRefRepeating, kRefMessy, kRefOneRank, kRefOneExpert};
    for (size_t i = 0; i < COUNT(kStyles); ++i) {
        const RefShape shape = {2 * (unsigned)env->size, 9, 4, ncclBfloat16, 40};
        REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, kStyles[i], i % 2 == 0, ref_ll(30 + i));
        for (unsigned change = 0; change < kRefNumChanges; ++change) {
            ref_dispatch(&run);
            ref_run_change(&run, (RefChange)change);
            ref_combine(&run);
            ref_run_mask(&run, 3);
            ref_combine(&run);
        }
    }
}
