// Runs of shapes; see shapes.h.
#include "suites/ll/shapes.h"

LlRun open_shape(const EpEnv* env, const Shape* shape, uint64_t seed) {
    const RefShape of_group = {shape->local_experts * (unsigned)env->size, shape->max_tokens,
                               shape->top_k, shape->datatype, shape->hidden};
    return ll_run_open_alone(env, &of_group, shape->style, shape->uneven, seed);
}

LlRun open_without_tokens(const EpEnv* env) {
    const RefShape shape = {2 * (unsigned)env->size, 8, 2, ncclBfloat16, 32};
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &shape);
    EP_SCOPED unsigned* none = ref_host_new((size_t)env->size * sizeof(*none));
    RefRouting* routing = ref_routing_new((unsigned)env->size, shape.num_experts, shape.top_k, none, kRefDistinct, 1);
    LlRun run = ll_run_open(env, group, &shape, routing, 1);
    run.own_group = group;
    return run;
}
