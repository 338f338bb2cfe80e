// Runs of shapes; see shapes.h.
#include "suites/ll/shapes.h"

RefRun open_shape(const EpEnv* env, const Shape* shape, uint64_t seed) {
    const RefShape of_group = {shape->local_experts * (unsigned)env->size, shape->max_tokens,
                               shape->top_k, shape->datatype, shape->hidden};
    return ref_run_open_with(env, NULL, &of_group, shape->style, shape->uneven, ref_ll(seed));
}

RefRun open_without_tokens(const EpEnv* env) {
    const RefShape shape = {2 * (unsigned)env->size, 8, 2, ncclBfloat16, 32};
    EP_SCOPED unsigned* none = ref_host_new((size_t)env->size * sizeof(*none));
    RefRouting* routing = ref_routing_new((unsigned)env->size, shape.num_experts, shape.top_k, none, kRefDistinct, 1);
    return ref_run_open(env, NULL, &shape, routing, ref_ll(1));
}
