// Choices that are refused, that ranks do not agree on, and that are passed over with a warning.
#include <stdio.h>
#include <string.h>

#include "harness/nodes.h"
#include "suites/errors/errors.h"

EP_TEST(choices_that_are_refused) {
    Session session;
    open_session(&session, env, NCCL_EP_ALGO_LOW_LATENCY);
    ncclEpChoice_t choice = {sizeof(choice), NCCL_EP_VARIANT_AUTO, 0, 0, 0};
    static const unsigned kUnknown[] = {0, 5, ~0u};
    for (size_t i = 0; i < COUNT(kUnknown); ++i) {
        EP_REFUSED("set-choice-operation", ncclEpSetChoice(session.group, kUnknown[i], &choice),
                   ncclInvalidArgument,
                   "ncclEpSetChoice: operation: must be a known operation (got %u, expected 1 to 4)",
                   kUnknown[i]);
    }
    choice.size = 16;
    EP_REFUSED("set-choice-size",
               ncclEpSetChoice(session.group, NCCL_EP_OPERATION_LL_DISPATCH, &choice),
               ncclInvalidArgument,
               "ncclEpSetChoice: choice.size: must be the size of the structure (got 16, expected 20)");
    check_works(&session);
    close_session(&session);
}

// One rank's combine is exact where those of the others are not.
EP_TEST(other_variant_on_one_rank) {
    if (!enough_ranks(env, 2, "running-ll-variant") || ep_num_nodes() > 1) return;
    Session session;
    open_session(&session, env, NCCL_EP_ALGO_LOW_LATENCY);
    check_works(&session);
    const unsigned variant = is_odd(env) ? NCCL_EP_VARIANT_LL_EXACT : NCCL_EP_VARIANT_LL_REDUCE;
    const ncclEpChoice_t choice = {sizeof(choice), variant, 0, 0, 0};
    EP_CHECK_NCCL(ncclEpSetChoice(session.group, NCCL_EP_OPERATION_LL_COMBINE, &choice));
    ep_barrier();
    EP_CHECK_NCCL(make_valid_call(&session, kCombine, 0));
    check_all_notice(&session, kCombine, "running-ll-variant", "variant: must be the same",
                     is_odd(env) ? " (got ll.exact, expected ll.reduce)"
                                 : " (got ll.reduce, expected ll.exact)");
}
