// Calls that are refused while their stream is captured. The capture goes on (test_graph has more of that), and so
// does the group. The CPU backend captures nothing.
#include "harness/graphs.h"
#include "suites/errors/errors.h"

#define RULE "stream: must not be captured into a graph, or wait for a stream that is: groups begin and end once"

LL_SESSION_TEST(groups_in_a_capture) {
    if (ep_begin_capture(env->stream)) {
        const ncclEpGroupConfig_t config = session_config(session);
        ncclEpGroup_t group = NULL;
        EP_REFUSED("group-captured", ncclEpCreateGroup(&group, env->comm, &config, env->stream, NULL, NULL),
                   ncclInvalidUsage, "ncclEpCreateGroup: " RULE);
        EP_CHECK(group == NULL);
        EP_REFUSED("group-destroy-captured", ncclEpGroupDestroy(session->group, env->stream), ncclInvalidUsage,
                   "ncclEpGroupDestroy: " RULE);
        EP_REQUIRE_CUDA(cudaGraphDestroy(ep_end_capture(env->stream)));
    }
}
