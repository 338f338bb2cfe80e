// High-throughput handles, dispatch and combine: the results of single operations, byte by byte.
// Every kind of routing, output sizes, counters, cached and backward passes, element types, and
// bounds that the library computes. test_stress has sequences of operations.
#include "suites/both/both.h"

// A training step, twice: forward dispatch and combine, backward (tokens only) dispatch and combine.
static void train(RefRun* run) {
    for (unsigned step = 0; step < 2; ++step) {
        ref_dispatch(run);
        ref_combine(run);
        ref_dispatch_as(run, kRefCached);
        ref_combine_as(run, kRefBackward);
    }
}

#define STEPS_TEST(name, ...) SHAPES_TEST(name, true, train, __VA_ARGS__)

STEPS_TEST(routing_styles, {2, 16, 4, ncclBfloat16, 64, kRefDistinct, false},
           {4, 16, 4, ncclBfloat16, 64, kRefRepeating, false}, {3, 16, 6, ncclBfloat16, 64, kRefMessy, false},
           {4, 16, 3, ncclBfloat16, 64, kRefSkewed, false}, {4, 16, 4, ncclBfloat16, 64, kRefOneRank, false},
           {2, 16, 4, ncclBfloat16, 64, kRefOneExpert, false}, {2, 16, 4, ncclBfloat16, 64, kRefNowhere, false})

STEPS_TEST(uneven_tokens, {1, 1, 1, ncclBfloat16, 32, kRefDistinct, true},
           {2, 129, 3, ncclBfloat16, 32, kRefDistinct, true, kHtRowsAsTold, kHtHostCounter},
           {8, 40, 8, ncclBfloat16, 32, kRefMessy, true, kHtRowsExact, kHtDeviceCounter},
           {2, 40, 2, ncclBfloat16, 32, kRefOneRank, true, kHtRowsExact})

STEPS_TEST(output_sizes, {2, 20, 3, ncclBfloat16, 40, kRefMessy, true, kHtRowsExact},
           {2, 20, 3, ncclBfloat16, 40, kRefMessy, true}, {2, 20, 3, ncclBfloat16, 40, kRefMessy, true, kHtRowsSpare},
           {2, 20, 3, ncclBfloat16, 40, kRefNowhere, true, kHtRowsExact})

STEPS_TEST(bound_found_by_the_library,
           {2, NCCL_EP_AUTO, 3, ncclBfloat16, 40, kRefMessy, true, kHtRowsAsTold, kHtHostCounter},
           {2, NCCL_EP_AUTO, 3, ncclBfloat16, 40, kRefDistinct, false},
           {2, NCCL_EP_AUTO, 3, ncclBfloat16, 40, kRefOneRank, true, kHtRowsSpare, kHtDeviceCounter},
           {2, NCCL_EP_AUTO, 3, ncclBfloat16, 40, kRefNowhere, true})

STEPS_TEST(counters, {1, 30, 2, ncclBfloat16, 8, kRefDistinct, true, kHtRowsExact, kHtHostCounter},
           {5, 30, 4, ncclBfloat16, 8, kRefMessy, true, kHtRowsExact, kHtHostCounter},
           {5, 30, 4, ncclBfloat16, 8, kRefOneExpert, false, kHtRowsExact, kHtDeviceCounter},
           {5, 30, 4, ncclBfloat16, 8, kRefNowhere, true, kHtRowsExact, kHtDeviceCounter})

STEPS_TEST(element_types_and_widths, {2, 9, 4, ncclFloat16, 8, kRefMessy, true},
           {2, 9, 4, ncclFloat16, 1000, kRefRepeating, true}, {2, 9, 4, ncclFloat32, 4, kRefMessy, true},
           {1, 9, 8, ncclFloat32, 500, kRefDistinct, true}, {1, 9, 8, ncclBfloat16, 24, kRefDistinct, true},
           {1, 9, 8, ncclBfloat16, 6656, kRefDistinct, true})

// Rows that do not fit into a warp's staging, and some for which the rings are short.
STEPS_TEST(huge_rows, {2, 9, 4, ncclFloat16, 20000, kRefMessy, true},
           {1, 12, 2, ncclBfloat16, 140000, kRefDistinct, false, kHtRowsExact})

EP_TEST(every_top_k) {
    const RefShape shape = {7 * (unsigned)env->size, 5, 32, ncclBfloat16, 16};
    play_every_top_k(env, shape, ref_ht_as(kHtRowsExact, kHtNoCounter, 200), train);
}

STEPS_TEST(many_tokens, {2, 4500, 2, ncclBfloat16, 8, kRefMessy, true, kHtRowsExact, kHtHostCounter})

// Every rank sends the most it may to every expert. No more rows can come, even if a rank announces
// more, as a planted bug makes one do.
EP_TEST(most_rows) {
    const unsigned experts = 2 * (unsigned)env->size;
    const RefShape shape = {experts, 12, experts, ncclBfloat16, 32};
    const RefOpening opening = ref_ht_as(kHtRowsExact, kHtDeviceCounter, 9);
    REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, false, opening);
    EP_CHECK_EQ_U64(run.received, 12 * (unsigned)env->size);
    ref_dispatch(&run);
    ref_combine_as(&run, kRefBackward);
}

// Callers index by the ids that come with rows: each must name an expert of this rank or none,
// whatever its sender sent: a planted bug sends others.
EP_TEST(ids_in_range) {
    const RefShape shape = {3 * (unsigned)env->size, 12, 4, ncclBfloat16, 32};
    REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, false, ref_ht(10));
    ref_prepare_dispatch(&run);
    EP_CHECK_NCCL(ref_launch_dispatch(&run, kRefWhole, env->stream));
    ep_sync(env);
    EP_SCOPED int64_t* ids = ref_host_new(run.ids_out.bytes);
    ep_download(ids, ref_buffer_data(&run.ids_out), run.ids_out.bytes);
    size_t strays = 0;
    for (size_t i = 0; i < run.ids_out.bytes / sizeof(int64_t); ++i) {
        strays += ids[i] < -1 || ids[i] >= (int64_t)run.local_experts;
    }
    EP_CHECK_EQ_U64(strays, 0);
}

// An expert that a token names more than once gets one row and the sum of its weights, in the order of
// k; a single weight keeps its bits. Of these weights another order or the last alone gives other sums.
EP_TEST(repeated_experts) {
    static const float kWeights[] = {-0.0f, 0x1p30f, 1.0f, -0x1p30f, 0.1f, 0.7f, 1e-8f, 3.0f};
    const RefShape shape = {2 * (unsigned)env->size, 24, 8, ncclBfloat16, 32};
    const RefOpening opening = ref_ht_as(kHtRowsAsTold, kHtDeviceCounter, 11);
    REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, kRefRepeating, true, opening);
    for (unsigned round = 0; round < 3; ++round) {
        // Other ids for the same routing: an expert is named as often as these say.
        RefRouting* given = ref_routing_copy(run.sent);
        if (round == 1) ref_routing_change(given, kRefShuffle, 12);
        for (unsigned rank = 0; rank < given->num_ranks; ++rank) {
            for (size_t i = 0; i < ref_entries_of(given, rank); ++i) {
                given->weights[rank][i] = kWeights[(i / shape.top_k + i + round) % 8];
            }
        }
        ref_run_give(&run, given);
        ref_dispatch(&run);
        ref_combine_as(&run, kRefBackward);
    }
}

// Gradients with other columns than top-k: combine returns zeros in spare ones, and leaves out what finds no column.
static void gradients_with(EpEnv* env, unsigned columns, unsigned top_k, RefStyle style) {
    const RefShape shape = {2 * (unsigned)env->size, 16, top_k, ncclBfloat16, 32};
    REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, style, true, ref_ht_as(kHtRowsExact, kHtNoCounter, 5));
    run.columns = columns;
    ref_buffer_free(&run.gradients_in);
    ref_buffer_free(&run.gradients_out);
    const size_t row_bytes = run.columns * sizeof(float);
    run.gradients_in = ref_buffer_new_input(run.num_rows * row_bytes);
    run.gradients_out = ref_buffer_new(run.sent->num_tokens[env->rank] * row_bytes);
    ref_dispatch(&run);
    ref_combine_as(&run, kRefBackward);
}

EP_TEST(gradients_with_spare_columns) { gradients_with(env, 5, 3, kRefMessy); }

// Every token goes to all experts, so each row is of one with more experts here than columns, also
// the last row of the last rank, which is its own.
EP_TEST(gradients_with_one_column) { gradients_with(env, 1, 2 * (unsigned)env->size, kRefDistinct); }
