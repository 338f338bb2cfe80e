// Choices of low-latency operations: who is asked, in which order, and what stays in a graph. That results do not
// depend on launch shapes is what `test_random --choices` shows.
#include "harness/graphs.h"
#include "harness/nodes.h"
#include "suites/both/both.h"

enum { kTokens = 9, kHidden = 40 };

static void set(ncclEpGroup_t group, unsigned variant, unsigned blocks) {
    const ncclEpChoice_t choice = {sizeof(choice), variant, blocks, 0, 0, 0};
    EP_CHECK_NCCL(ncclEpSetChoice(group, NCCL_EP_OPERATION_LL_COMBINE, &choice));
}

// A combine that sums in this order, and asks the selector so often.
static void combine(RefRun* run, RefLlSum sums, Selector* selector, unsigned asked) {
    const unsigned before = selector->asked;
    run->sums = sums;
    ref_combine(run);
    EP_CHECK_EQ_U64(selector->asked - before, asked);
}

// A handle of few enough ids that exact sums are always possible on one node. Rows of float32, where the order of terms
// shows.
static RefRun open_run(EpEnv* env) {
    const unsigned ranks = (unsigned)env->size;
    const RefShape shape = {4 * ranks, kTokens, ranks < 4 ? ranks : 4, ncclFloat32, kHidden};
    RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, true, ref_ll(77));
    ref_dispatch(&run);
    return run;
}

EP_TEST(ll_order_of_choices) {
    REF_SCOPED RefRun run = open_run(env);
    ncclEpGroup_t group = run.own_group;
    const RefLlSum own = ref_ll_sum();
    const RefLlSum exact = ep_num_nodes() == 1 ? kRefExact : own;
    Selector selector = {.choice = {sizeof(ncclEpChoice_t), NCCL_EP_VARIANT_LL_EXACT, 0, 0, 0, 0}};
    EP_CHECK_NCCL(ncclEpSetSelector(group, select_choice, &selector));
    combine(&run, own, &selector, 1);  // it chooses nothing
    check_query(&selector, &run, NCCL_EP_OPERATION_LL_COMBINE);
    selector.chooses = true;
    combine(&run, exact, &selector, 1);
    set(group, NCCL_EP_VARIANT_LL_REDUCE, 1);
    combine(&run, kRefReduce, &selector, 0);  // what is set comes first
    static const unsigned kImpossible[] = {NCCL_EP_VARIANT_HT_RING, 6, ~0u};
    for (unsigned i = 0; i < 3; ++i) {
        set(group, kImpossible[i], 0);
        combine(&run, exact, &selector, 1);
    }
    ncclEpChoice_t odd_threads = {sizeof(odd_threads), NCCL_EP_VARIANT_LL_REDUCE, 0, 0, 48, 0};
    EP_CHECK_NCCL(ncclEpSetChoice(group, NCCL_EP_OPERATION_LL_COMBINE, &odd_threads));
    combine(&run, kRefReduce, &selector, 0);  // the variant stays
    odd_threads.variant = NCCL_EP_VARIANT_AUTO;
    EP_CHECK_NCCL(ncclEpSetChoice(group, NCCL_EP_OPERATION_LL_COMBINE, &odd_threads));
    combine(&run, exact, &selector, 1);
    selector.choice.variant = NCCL_EP_VARIANT_HT_PULL;
    combine(&run, own, &selector, 1);  // both are impossible
    selector.choice.variant = NCCL_EP_VARIANT_AUTO;
    ref_dispatch(&run);
    check_query(&selector, &run, NCCL_EP_OPERATION_LL_DISPATCH);
    EP_CHECK_NCCL(ncclEpSetChoice(group, NCCL_EP_OPERATION_LL_COMBINE, NULL));
    EP_CHECK_NCCL(ncclEpSetSelector(group, NULL, NULL));
    combine(&run, own, &selector, 0);
}

// More ids than ranks, whose rows have no room in windows for sums.
EP_TEST(ll_exact_sums_need_room) {
    const unsigned ranks = (unsigned)env->size;
    const RefShape shape = {4 * ranks, kTokens, ranks + 1, ncclFloat32, kHidden};
    REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, false, ref_ll(78));
    set(run.own_group, NCCL_EP_VARIANT_LL_EXACT, 0);
    ref_dispatch(&run);
    ref_combine(&run);  // as the group's own
}

// A graph keeps the choice of its capture, and what is captured later has another.
EP_TEST(ll_choices_in_graphs) {
    REF_SCOPED RefRun run = open_run(env);
    ncclEpGroup_t group = run.own_group;
    const bool captures = ep_begin_capture(env->stream);
    if (captures) EP_CHECK_CUDA(cudaGraphDestroy(ep_end_capture(env->stream)));
    const RefLlSum own = ref_ll_sum();
    const unsigned other = own == kRefExact ? NCCL_EP_VARIANT_LL_REDUCE : NCCL_EP_VARIANT_LL_EXACT;
    const RefLlSum others = own == kRefExact ? kRefReduce : kRefExact;
    if (captures && ep_num_nodes() == 1) {
        set(group, other, 2);
        ref_prepare_combine(&run);
        const EpCaptured captured = ep_capture(env->stream, ref_play_combine, &run);
        EP_CHECK_NCCL(ncclEpSetChoice(group, NCCL_EP_OPERATION_LL_COMBINE, NULL));
        for (unsigned i = 0; i < 2; ++i) {
            ref_prepare_combine(&run);
            run.sums = others;
            ep_replay(&captured);
            ref_check_combine(&run);
            run.sums = own;
            ref_combine(&run);
        }
        ep_release_captured(&captured);
    }
}

// A selector may ask for the state of its group: no lock is held.
static int call_within(void* user, const ncclEpQuery_t* query, ncclEpChoice_t* choice) {
    Selector* selector = user;
    ncclResult_t state = ncclSuccess;
    EP_CHECK_NCCL(ncclEpGetAsyncError(selector->group, &state));
    return select_choice(user, query, choice);
}

EP_TEST(ll_selector_without_a_lock) {
    REF_SCOPED RefRun run = open_run(env);
    Selector selector = {.choice = {sizeof(ncclEpChoice_t), NCCL_EP_VARIANT_AUTO, 2, 1, 64, 0}, .chooses = true};
    selector.group = run.own_group;
    EP_CHECK_NCCL(ncclEpSetSelector(selector.group, call_within, &selector));
    combine(&run, ref_ll_sum(), &selector, 1);
}
