// High-throughput operations beside each other: on unordered streams, and on ranks that run ahead or wait.
#include "harness/nodes.h"
#include "suites/both/both.h"

EP_TEST(ht_unordered_streams) { unordered_streams(env, true); }
EP_TEST(ht_bits_from_any_home) { bits_from_any_home(env, true); }

// All tokens go to rank 0, which is late: the others' dispatches have nothing to wait for but that it begins.
EP_TEST(ht_ranks_without_rows_run_ahead) {
    enum { kTimes = 6, kRounds = 4 };
    if (ep_on_host_backend()) {
        ep_skip("on the CPU backend nothing is enqueued");
        return;
    }
    const RefShape shape = {3 * (unsigned)env->size, 6, 2, ncclBfloat16, 40};
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
    for (unsigned round = 0; round < kRounds; ++round) {
        EpGate gate;
        const RefOpening opening = ref_ht_as(kHtRowsSpare, kHtNoCounter, 40 + round);
        REF_SCOPED RefRun run = ref_run_open_with(env, group, &shape, kRefOneExpert, false, opening);
        ref_prepare_dispatch(&run);
        const bool is_late = env->rank == 0;
        if (is_late) ep_gate_close(&gate, env->stream);
        for (unsigned i = 0; i < kTimes; ++i) EP_CHECK_NCCL(ref_launch_dispatch(&run, kRefCached, env->stream));
        if (is_late) ep_gate_open(&gate);
        ref_check_dispatch(&run);
    }
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}

// Where its creation does not wait for other ranks, a handle without a bound says when it knows its rows.
EP_TEST(ht_rows_are_awaited_in_parts) {
    const RefShape shape = {3 * (unsigned)env->size, NCCL_EP_AUTO, 4, ncclBfloat16, 40};
    REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, kRefMessy, true, ref_ht(3000));
    const bool is_last = env->rank == env->size - 1;
    const bool is_early = !is_last && !ep_on_host_backend() && ep_num_nodes() == 1;
    const unsigned sizes[] = {run.now->num_tokens[env->rank], shape.top_k};
    RefList list;
    ref_list_init(&list);
    ref_list_add(&list, ref_buffer_data(&run.ids), ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, 2, sizes);
    if (!is_early) ep_barrier();
    ncclEpHandle_t handle = NULL;
    EP_CHECK_NCCL(ncclEpCreateHandle(&handle, run.own_group, list.items[0], NULL, 0, NULL, env->stream, false));
    unsigned told = 7777;
    if (is_early) {
        EP_CHECK_RESULT(ncclEpHandleWaitNumRecvTokens(handle, 0, &told), ncclInProgress);
        EP_CHECK_RESULT(ncclEpHandleWaitNumRecvTokens(handle, 5, &told), ncclInProgress);
        EP_CHECK_EQ_U64(told, 7777);
        ep_barrier();
    }
    ncclResult_t result = ncclInProgress;
    while (result == ncclInProgress) result = ncclEpHandleWaitNumRecvTokens(handle, 10, &told);
    EP_CHECK_NCCL(result);
    EP_CHECK_EQ_U64(told, run.received);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    ref_list_scrap(&list);
}
