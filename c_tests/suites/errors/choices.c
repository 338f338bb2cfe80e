// Choices that are refused, that ranks do not agree on, and that are passed over with a warning.
#define _GNU_SOURCE  // unsetenv

#include "harness/nodes.h"
#include "suites/errors/errors.h"

enum { kAloneTokens = 3, kAloneTopK = 2, kAloneExperts = 2, kAloneHidden = 16 };

// Pairs of operations of a group of one rank, two with each of the impossible choices. Its memory is zero: all ids
// name expert 0.
static bool make_pairs(ncclEpGroup_t group, void* memory, const ncclEpChoice_t* choices, int count) {
    char* const at = memory;
    EpView ids, weights, tokens, home, packed;
    ep_view_2d(&ids, at, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, kAloneTokens, kAloneTopK);
    ep_view_2d(&weights, at, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, kAloneTokens, kAloneTopK);
    ep_view_2d(&tokens, at, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kAloneTokens, kAloneHidden);
    ep_view_2d(&home, at + 4096, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kAloneTokens, kAloneHidden);
    ep_view_3d(&packed, at + 8192, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kAloneExperts, 2 * kAloneTokens,
               kAloneHidden);
    const ncclNDTensor_t *in = &tokens.tensor, *results = &packed.tensor;
    ncclNDTensor_t *outs = &packed.tensor, *homes = &home.tensor, *locals = &weights.tensor;
    ncclEpHandle_t handle = NULL;
    bool good = ncclEpCreateHandle(&handle, group, &ids.tensor, NULL, 0, NULL, NULL, false) == ncclSuccess;
    for (int i = 0; good && i < 2 * count; ++i) {
        good = ncclEpSetChoice(group, NCCL_EP_OPERATION_LL_COMBINE, &choices[i / 2]) == ncclSuccess &&
               ncclEpDispatch(handle, &in, 1, &outs, 1, NULL, 0, 0, NULL, NULL) == ncclSuccess &&
               ncclEpCombine(handle, &results, 1, &homes, 1, &locals, 1, 0, NULL, NULL) == ncclSuccess;
    }
    return cudaDeviceSynchronize() == cudaSuccess && ncclEpHandleDestroy(handle) == ncclSuccess && good;
}

// The new process is alone and follows no choice.
int pass_over_choices(void) {
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    ncclEpGroup_t group = NULL;
    void* memory = NULL;
    const ncclEpGroupConfig_t config =
        ep_group_config(NCCL_EP_ALGO_LOW_LATENCY, kAloneExperts, 2 * kAloneTokens, 2 * kAloneHidden);
    const ncclEpChoice_t odd_threads = {sizeof(odd_threads), NCCL_EP_VARIANT_AUTO, 0, 0, 48, 0};
    const ncclEpChoice_t choices[] = {{sizeof(*choices), NCCL_EP_VARIANT_LL_EXACT, 0, 0, 0, 0},
                                      {sizeof(*choices), NCCL_EP_VARIANT_HT_PULL, 0, 0, 0, 0}};
    const bool good = unsetenv("NCCL_EP_LL_COMBINE") == 0 && cudaSetDevice(0) == cudaSuccess &&
                      cudaMalloc(&memory, 16384) == cudaSuccess && cudaMemset(memory, 0, 16384) == cudaSuccess &&
                      ncclGetUniqueId(&id) == ncclSuccess && ncclCommInitRank(&comm, 1, id, 0) == ncclSuccess &&
                      ncclEpCreateGroup(&group, comm, &config, NULL, NULL, NULL) == ncclSuccess &&
                      ncclEpSetChoice(group, NCCL_EP_OPERATION_LL_DISPATCH, &odd_threads) == ncclSuccess &&
                      make_pairs(group, memory, choices, COUNT(choices)) &&
                      ncclEpGroupDestroy(group, NULL) == ncclSuccess && cudaFree(memory) == cudaSuccess;
    return good && ncclCommDestroy(comm) == ncclSuccess ? 0 : 1;
}

LL_SESSION_TEST(choices_that_are_refused) {
    ncclEpChoice_t choice = {sizeof(choice), NCCL_EP_VARIANT_AUTO, 0, 0, 0, 0};
    static const unsigned kUnknown[] = {0, 5, ~0u};
    for (size_t i = 0; i < COUNT(kUnknown); ++i) {
        EP_REFUSED_AS("set-choice-operation", ncclEpSetChoice(session->group, kUnknown[i], &choice),
                      "got %u, expected 1 to 4", kUnknown[i]);
    }
    choice.size = 16;
    EP_REFUSED("set-choice-size", ncclEpSetChoice(session->group, NCCL_EP_OPERATION_LL_DISPATCH, &choice));
}

// One rank's combine is exact where those of the others are not.
EP_TEST(other_variant_on_one_rank) {
    if (!enough_ranks(env, 2, "running-ll-variant") || ep_num_nodes() > 1) return;
    Session session = open_session(env, NCCL_EP_ALGO_LOW_LATENCY);
    check_works(&session);
    const unsigned variant = is_odd(env) ? NCCL_EP_VARIANT_LL_EXACT : NCCL_EP_VARIANT_LL_REDUCE;
    const ncclEpChoice_t choice = {sizeof(choice), variant, 0, 0, 0, 0};
    EP_CHECK_NCCL(ncclEpSetChoice(session.group, NCCL_EP_OPERATION_LL_COMBINE, &choice));
    ep_barrier();
    EP_CHECK_NCCL(make_valid_call(&session, kCombine, 0));
    check_all_notice(&session, kCombine, "running-ll-variant",
                     is_odd(env) ? "got ll.exact, expected ll.reduce" : "got ll.reduce, expected ll.exact");
}
