// Choices of high-throughput operations: an impossible one falls to the next, and results stay.
#include "harness/nodes.h"
#include "reference/mapped.h"
#include "suites/both/both.h"

enum { kTokens = 12, kHidden = 48 };

static void set(ncclEpGroup_t group, unsigned operation, const ncclEpChoice_t* choice) {
    EP_CHECK_NCCL(ncclEpSetChoice(group, operation, choice));
}

EP_TEST_HT(ht_order_of_choices) {
    const unsigned ranks = (unsigned)env->size;
    const RefShape shape = {2 * ranks, kTokens, 2, ncclBfloat16, kHidden};
    ncclEpGroup_t group = ep_group_create(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, shape.num_experts, kTokens, 2 * kHidden);
    REF_SCOPED RefRun run = ref_run_open_with(env, group, &shape, kRefDistinct, true, ref_ht(5));
    run.own_group = group;
    Selector selector = {.choice = {sizeof(ncclEpChoice_t), NCCL_EP_VARIANT_HT_RING, 2, 1, 96, 0}, .chooses = true};
    EP_CHECK_NCCL(ncclEpSetSelector(group, select_choice, &selector));
    const unsigned dispatch = NCCL_EP_OPERATION_HT_DISPATCH, combine = NCCL_EP_OPERATION_HT_COMBINE;
    ref_dispatch(&run);
    check_query(&selector, &run, dispatch);
    ref_combine_as(&run, kRefBackward);
    check_query(&selector, &run, combine);
    EP_CHECK_EQ_U64(selector.asked, 2);
    const bool mapped = ref_mapped_is_wanted();  // then direct and pull are possible, on some ranks or all
    const ncclEpChoice_t direct = {sizeof(direct), NCCL_EP_VARIANT_HT_DIRECT, 0, 0, 0, 0};
    const ncclEpChoice_t pull = {sizeof(pull), NCCL_EP_VARIANT_HT_PULL, 0, 0, 0, 0};
    set(group, dispatch, &direct);  // impossible: memory that no peer maps
    set(group, combine, &pull);
    ref_dispatch(&run);
    ref_combine(&run);
    EP_CHECK(mapped || selector.asked == 4);
    set(group, dispatch, &pull);  // impossible: of another operation
    set(group, combine, &direct);
    ref_dispatch_as(&run, kRefCached);
    ref_combine(&run);
    EP_CHECK(mapped || selector.asked == 6);
    // Over several nodes the CPU build may have one block.
    const ncclEpChoice_t few = {sizeof(few), NCCL_EP_VARIANT_AUTO, ep_num_nodes() == 1 ? 2 : 0, 0, 64, 0};
    set(group, dispatch, &few);
    set(group, combine, &few);
    ref_dispatch(&run);
    ref_combine_as(&run, kRefBackward);
    EP_CHECK(mapped || selector.asked == 6);  // what is set comes first
    const ncclEpChoice_t ring = {sizeof(ring), NCCL_EP_VARIANT_HT_RING, 0, 0, 0, 0};
    set(group, dispatch, &ring);
    set(group, combine, &ring);
    ref_dispatch(&run);
    ref_combine(&run);
}
