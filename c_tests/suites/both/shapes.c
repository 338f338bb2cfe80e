// Runs of shapes; see both.h.
#include "suites/both/both.h"

RefRun open_shape(const EpEnv* env, const Shape* shape, bool ht, uint64_t seed) {
    const RefShape of_group = {shape->local_experts * (unsigned)env->size, shape->max_tokens, shape->top_k,
                               shape->datatype, shape->hidden};
    const RefOpening opening = ht ? ref_ht_as(shape->rows, shape->counter, seed) : ref_ll(seed);
    return ref_run_open_with(env, NULL, &of_group, shape->style, shape->uneven, opening);
}

void play_shapes(const EpEnv* env, const Shape* shapes, size_t num_shapes, bool ht, void (*play)(RefRun* run)) {
    for (size_t i = 0; i < num_shapes; ++i) {
        REF_SCOPED RefRun run = open_shape(env, &shapes[i], ht, (ht ? 200 : 100) + i);
        run.variation = (unsigned)i;
        play(&run);
    }
}

void play_every_top_k(const EpEnv* env, RefShape shape, RefOpening opening, void (*play)(RefRun* run)) {
    ncclEpGroup_t group =
        ref_group_new(env, opening.ht ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY, &shape);
    const unsigned most = shape.top_k;
    for (shape.top_k = 1; shape.top_k <= most; ++shape.top_k) {
        REF_SCOPED RefRun run = ref_run_open_with(env, group, &shape, kRefMessy, true, opening);
        play(&run);
    }
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}
