// Choices of high-throughput operations: an impossible one falls to the next, and results stay.
#include "harness/nodes.h"
#include "reference/ht_run.h"
#include "reference/mapped.h"

enum { kTokens = 12, kHidden = 48 };

typedef struct {
    unsigned asked;
    ncclEpQuery_t query;
    ncclEpChoice_t choice;
} Selector;

static int select_choice(void* user, const ncclEpQuery_t* query, ncclEpChoice_t* choice) {
    Selector* selector = user;
    ++selector->asked;
    selector->query = *query;
    *choice = selector->choice;
    return 1;
}

static void set(ncclEpGroup_t group, unsigned operation, const ncclEpChoice_t* choice) {
    EP_CHECK_NCCL(ncclEpSetChoice(group, operation, choice));
}

static void check_query(const Selector* selector, const HtRun* run, unsigned operation) {
    const ncclEpQuery_t* query = &selector->query;
    EP_CHECK_EQ_U64(query->size, sizeof(*query));
    EP_CHECK_EQ_U64(query->operation, operation);
    EP_CHECK_EQ_U64(query->tokens, run->routing->num_tokens[run->env->rank]);
    EP_CHECK_EQ_U64(query->top_k, run->shape.top_k);
    EP_CHECK_EQ_U64(query->row_bytes, 2 * kHidden);
    EP_CHECK_EQ_U64(query->ranks, (unsigned)run->env->size);
}

EP_TEST_HT(ht_order_of_choices) {
    const unsigned ranks = (unsigned)env->size;
    const RefShape shape = {2 * ranks, kTokens, 2, ncclBfloat16, kHidden};
    ncclEpGroup_t group = ep_group_create(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, shape.num_experts, kTokens, 2 * kHidden);
    const HtOpening opening = {kHtRowsAsTold, kHtNoCounter, 5};
    HtRun run = ht_run_open_with(env, group, &shape, kRefDistinct, true, opening);
    Selector selector = {.choice = {sizeof(ncclEpChoice_t), NCCL_EP_VARIANT_HT_RING, 2, 1, 96, 0}};
    EP_CHECK_NCCL(ncclEpSetSelector(group, select_choice, &selector));
    const unsigned dispatch = NCCL_EP_OPERATION_HT_DISPATCH, combine = NCCL_EP_OPERATION_HT_COMBINE;
    ht_forward(&run);
    check_query(&selector, &run, dispatch);
    ht_combine(&run, true);
    check_query(&selector, &run, combine);
    EP_CHECK_EQ_U64(selector.asked, 2);
    const bool mapped = ref_mapped_is_wanted();  // then direct and pull are possible, on some ranks or all
    const ncclEpChoice_t direct = {sizeof(direct), NCCL_EP_VARIANT_HT_DIRECT, 0, 0, 0, 0};
    const ncclEpChoice_t pull = {sizeof(pull), NCCL_EP_VARIANT_HT_PULL, 0, 0, 0, 0};
    set(group, dispatch, &direct);  // impossible: memory that no peer maps
    set(group, combine, &pull);
    ht_forward(&run);
    ht_combine(&run, false);
    EP_CHECK(mapped || selector.asked == 4);
    set(group, dispatch, &pull);  // impossible: of another operation
    set(group, combine, &direct);
    ht_cached(&run);
    ht_combine(&run, false);
    EP_CHECK(mapped || selector.asked == 6);
    // Over several nodes the CPU build may have one block.
    const ncclEpChoice_t few = {sizeof(few), NCCL_EP_VARIANT_AUTO, ep_num_nodes() == 1 ? 2 : 0, 0, 64, 0};
    set(group, dispatch, &few);
    set(group, combine, &few);
    ht_forward(&run);
    ht_combine(&run, true);
    EP_CHECK(mapped || selector.asked == 6);  // what is set comes first
    const ncclEpChoice_t ring = {sizeof(ring), NCCL_EP_VARIANT_HT_RING, 0, 0, 0, 0};
    set(group, dispatch, &ring);
    set(group, combine, &ring);
    ht_forward(&run);
    ht_combine(&run, false);
    ht_run_close(&run);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}
