// See shapes.h.
#include "suites/ll/shapes.h"

RefRun open_by_turns(const EpEnv* env, const RefShape* shape, const unsigned* tokens, unsigned turns) {
    const unsigned ranks = (unsigned)env->size;
    EP_SCOPED unsigned* num_tokens = ref_host_new(ranks * sizeof(*num_tokens));
    for (unsigned rank = 0; rank < ranks; ++rank) num_tokens[rank] = tokens[rank % turns];
    RefRouting* routing = ref_routing_new(ranks, shape->num_experts, shape->top_k, num_tokens, kRefMessy, 1);
    return ref_run_open(env, NULL, shape, routing, ref_ll(1));
}

RefRun open_without_tokens(const EpEnv* env) {
    const RefShape shape = {2 * (unsigned)env->size, 8, 2, ncclBfloat16, 32};
    const unsigned none = 0;
    return open_by_turns(env, &shape, &none, 1);
}
