// Rank-major operations: a dispatch with ids and weights among its outputs, and a combine of rows that the caller has
// summed. Byte by byte against the reference, alone and staged; test_random has them in turns with expert-major ones.
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
