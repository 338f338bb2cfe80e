// Rank-major operations: a dispatch with ids and weights among its outputs, and a combine of rows that the caller has
// summed. Byte by byte against the reference; alone, staged, and in turns with expert-major ones.
#include "suites/ll/shapes.h"

enum { kPairs = 2 };

void pair_in_stages(RefRun* run) {
    ref_dispatch_as(run, kRefStaged);
    ref_combine_as(run, kRefStaged);
}

void open_by_rank(RefRun* run, const EpEnv* env, const Shape* shape, uint64_t seed) {
    *run = open_shape(env, shape, false, seed);
    run->variation = (unsigned)seed;
    run->by_rank = true;
}

EP_TEST(rank_major_shapes) {
    static const Shape kShapes[] = {
        {2, 16, 4, ncclBfloat16, 64, kRefDistinct, false}, {2, 16, 4, ncclBfloat16, 64, kRefRepeating, false},
        {2, 16, 4, ncclBfloat16, 64, kRefMessy, true},     {4, 16, 3, ncclFloat16, 1000, kRefSkewed, false},
        {2, 16, 2, ncclBfloat16, 64, kRefOneRank, true},   {2, 16, 4, ncclBfloat16, 64, kRefNowhere, false},
        {1, 1, 1, ncclBfloat16, 32, kRefDistinct, true},   {1, 33, 4, ncclFloat32, 32, kRefDistinct, true},
        {3, 17, 5, ncclBfloat16, 8, kRefMessy, true},      {2, 8, 32, ncclFloat32, 32, kRefOneExpert, true},
        {4, 9, 32, ncclBfloat16, 24, kRefMessy, true},     {2, 9, 8, ncclBfloat16, 7168, kRefDistinct, true},
        {8, 70, 8, ncclBfloat16, 16, kRefMessy, true},
    };
    for (size_t i = 0; i < COUNT(kShapes); ++i) {
        REF_SCOPED RefRun run;
        open_by_rank(&run, env, &kShapes[i], 200 + i);
        for (unsigned n = 0; n < kPairs; ++n) ref_pair(&run);
        pair_in_stages(&run);
        run.without_counter = true;
        ref_pair(&run);
    }
}

EP_TEST(rank_major_without_tokens) {
    REF_SCOPED RefRun run = open_without_tokens(env);
    run.by_rank = true;
    for (unsigned i = 0; i < kPairs; ++i) ref_pair(&run);
}

// All formats, to which orders of scales belong.
EP_TEST(rank_major_formats) {
    enum { kFormats = 24, kMostBytes = 8192 };
    const Shape shape = {2, 12, 4, ncclBfloat16, kMostBytes / 2, kRefMessy, true};
    REF_SCOPED RefRun run;
    open_by_rank(&run, env, &shape, 300);
    run.shape.hidden = 64;  // of combines
    for (unsigned i = 0; i < kFormats; ++i) {
        const RefFormat format = ref_format_draw(400 + i, kMostBytes);
        ref_run_set_format(&run, &format);
        run.by_rank = i % 4 != 3;
        if (i % 3 == 0) {
            pair_in_stages(&run);
        } else {
            ref_pair(&run);
        }
    }
}

// Two handles of a group, whose operations take either layout in turn, with staged ones in between.
EP_TEST(rank_major_beside_expert_major) {
    enum { kRounds = 10 };
    const RefShape shape = {3 * (unsigned)env->size, 14, 4, ncclBfloat16, 96};
    RefRun runs[2];
    ref_runs_open(runs, 2, env, &shape, kRefMessy, true, ref_ll(500));
    for (unsigned round = 0; round < kRounds; ++round) {
        RefRun* first = &runs[round % 2];
        RefRun* second = &runs[1 - round % 2];
        first->by_rank = round % 3 != 0;
        second->by_rank = round % 3 == 0 || round % 4 == 0;
        ref_dispatch(first);
        ref_prepare_dispatch(second);
        EP_CHECK_NCCL(ref_launch_dispatch(second, kRefStaged, env->stream));
        ref_combine(first);
        EP_CHECK_NCCL(ncclEpComplete(second->handle, NULL, env->stream));
        ref_check_dispatch(second);
        ref_combine(second);
        // A combine may come again.
        ref_combine(first);
    }
    ref_runs_close(runs, 2);
}

// The caller's rows hold what the dispatch had found: ids that change before the combine do not matter.
EP_TEST(rank_major_ids_of_the_dispatch) {
    const Shape shape = {2, 16, 4, ncclBfloat16, 64, kRefMessy, true};
    REF_SCOPED RefRun run;
    open_by_rank(&run, env, &shape, 600);
    for (unsigned change = 0; change < kRefNumChanges; ++change) {
        ref_dispatch(&run);
        ref_run_change(&run, (RefChange)change);
        ref_combine(&run);
        ref_run_mask(&run, 2);
        ref_combine(&run);
        ref_pair(&run);
    }
}
