// Refusals of ncclEpCreateHandle. In low latency each rank decides alone. In high throughput the
// call is collective, so the others learn of a rank that refuses (disagreement.c).
#include "suites/errors/calls.h"

#define ARGUMENT ncclInvalidArgument
#define HOST_COUNTER NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_HOST
#define AT_COUNTER "local_tensors[RECV_EXPERT_COUNTER_DEVICE]"

static const BrokenCall kIdsCalls[] = {
    {"handle-topk-null", ARGUMENT, kInputs, IDS, kNullItem, 0, "topk_idx: must not be NULL"},
    {"handle-topk-dims", ARGUMENT, kInputs, IDS, kNdim, 0,
     "topk_idx.ndim: must be a supported number of dimensions (got 0, expected 1 to 5)"},
    {"handle-topk-dims", ARGUMENT, kInputs, IDS, kNdim, 6,
     "topk_idx.ndim: must be a supported number of dimensions (got 6, expected 1 to 5)"},
    {"handle-topk-sizes", ARGUMENT, kInputs, IDS, kNullSizes, 0, "topk_idx.sizes: must not be NULL"},
    {"handle-topk-strides", ARGUMENT, kInputs, IDS, kStride0, 3,
     "topk_idx.strides: must say that the tensor is dense (got [3, 1], expected all ones, NULL, or row-major strides)"},
    {"handle-topk-tag", ARGUMENT, kInputs, IDS, kTag, 7,
     "topk_idx.tag: must be NCCL_EP_TENSOR_TAG_TOPK_IDX (got 7, expected 2)"},
    {"handle-topk-ndim", ARGUMENT, kInputs, IDS, kNdim, 3,
     "topk_idx.ndim: must be the number of dimensions that this tensor has in this call (got 3, expected 2)"},
    {"handle-topk-datatype", ARGUMENT, kInputs, IDS, kDatatype, ncclInt32,
     "topk_idx.datatype: must be an element type that this tensor may have (got int32, expected int64)"},
    {"handle-topk-datatype", ARGUMENT, kInputs, IDS, kDatatype, 77,
     "topk_idx.datatype: must be an element type that this tensor may have (got an unknown number, expected int64)"},
    {"handle-topk-columns", ARGUMENT, kInputs, IDS, kSize1, 33,
     "topk_idx.sizes[1]: must be at most the largest top-k (got 33, expected 32 or less)"},
    {"handle-topk-rows", ARGUMENT, kInputs, IDS, kSize0, kMaxTokens + 1,
     "topk_idx.sizes[0]: must be at most the group's max_tokens_per_rank (got 7, expected 6 or less)"},
    {"handle-topk-data", ARGUMENT, kInputs, IDS, kNullData, 0,
     "topk_idx.data: must not be NULL unless the tensor is empty"},
    {"handle-topk-align", ARGUMENT, kInputs, IDS, kShiftData, 4,
     "topk_idx.data: must be aligned for its elements (got 0x*, expected a multiple of 8)"},
};

static const BrokenCall kLlCalls[] = {
    {"handle-ll-topk-columns", ARGUMENT, kInputs, IDS, kSize1, 0,
     "topk_idx.sizes[1]: must be at least one id per token in low latency (got 0, expected 1 or more)"},
    {"handle-ll-counter", ARGUMENT, kLocals, COUNTER, kAdd, 0,
     AT_COUNTER ": a low-latency handle has no counter; pass it to ncclEpDispatch"},
    {"handle-ll-counter", ARGUMENT, kLocals, HOST_COUNTER, kAdd, 0,
     "local_tensors[RECV_EXPERT_COUNTER_HOST]: a low-latency handle has no counter; pass it to ncclEpDispatch"},
};

static const BrokenCall kHtLocalCalls[] = {
    {"handle-locals-null", ARGUMENT, kLocals, COUNTER, kNullList, 0,
     "local_tensors: must not be NULL when its count is not 0"},
    {"handle-locals-item", ARGUMENT, kLocals, COUNTER, kNullItem, 0, "local_tensors[0]: must not be NULL"},
    {"handle-locals-count", ARGUMENT, kLocals, COUNTER, kCount, 17,
     "num_local_tensors: is more than any call takes (got 17, expected at most 16)"},
    {"handle-locals-again", ARGUMENT, kLocals, COUNTER, kAdd, 0,
     "local_tensors[1].tag: RECV_EXPERT_COUNTER_DEVICE is in the list already"},
    {"handle-locals-dims", ARGUMENT, kLocals, COUNTER, kNdim, 6,
     AT_COUNTER ".ndim: must be a supported number of dimensions (got 6, expected 1 to 5)"},
    {"handle-locals-sizes", ARGUMENT, kLocals, COUNTER, kNullSizes, 0, AT_COUNTER ".sizes: must not be NULL"},
    {"handle-locals-strides", ARGUMENT, kLocals, COUNTER, kStride0, 2,
     AT_COUNTER ".strides: must say that the tensor is dense (got [2], expected all ones, NULL, or row-major strides)"},
    NDIM("handle-ht-counter-ndim", kLocals, COUNTER, 2, 1),
    DATATYPE("handle-ht-counter-datatype", kLocals, COUNTER, ncclInt64, "int64", "int32"),
    {"handle-ht-counter-size", ARGUMENT, kLocals, COUNTER, kSize0, kLocalExperts - 1,
     AT_COUNTER ".sizes[0]: must be at least the number of local experts (got 1, expected 2 or more)"},
    DATA("handle-ht-counter-data", "handle-ht-counter-align", kLocals, COUNTER, 4),
    {"handle-ht-counter-host", ARGUMENT, kLocals, COUNTER, kTag, HOST_COUNTER,
     "local_tensors[RECV_EXPERT_COUNTER_HOST].data: must be mapped pinned host memory (got *, expected an address that "
     "the device can reach)"},
};

// The result pointer and the configuration: not tensors, and the same in both modes.
static void other_arguments(const Session* session) {
    EpView ids;
    ep_view_2d(&ids, session->ids, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens, kTopK);
    cudaStream_t stream = session->env->stream;
    EP_REFUSED("handle-out-null", ncclEpCreateHandle(NULL, session->group, &ids.tensor, NULL, 0, NULL, stream, false),
               ARGUMENT, "ncclEpCreateHandle: handle: must not be NULL");
    ncclEpHandle_t handle = NULL;
    const ncclEpHandleConfig_t config = NULL;
    EP_REFUSED("handle-config",
               ncclEpCreateHandle(&handle, session->group, &ids.tensor, NULL, 0, &config, stream, false), ARGUMENT,
               "ncclEpCreateHandle: config: must be NULL");
    EP_CHECK(handle == NULL);
}

LL_SESSION_TEST(ll_handle_arguments) {
    other_arguments(session);
    check_broken_calls(session, kCreateHandle, kIdsCalls, COUNT(kIdsCalls));
    check_broken_calls(session, kCreateHandle, kLlCalls, COUNT(kLlCalls));
}

// Without max_tokens_per_rank the limit is on the sum over all ranks.
static void too_many_tokens(const EpEnv* env) {
    const unsigned most = INT32_MAX / (unsigned)env->size;
    Session session = {.env = env, .algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT};
    EP_REQUIRE_NCCL(open_auto_group(&session));
    EP_REFUSED("handle-topk-rows-auto",
               ep_handle_create(&session.handle, session.group, NULL, most + 1, kTopK, env->stream), ARGUMENT,
               "ncclEpCreateHandle: topk_idx.sizes[0]: must be at most what all ranks can send to one (got %u, "
               "expected %u or less)",
               most + 1, most);
    ep_sync(env);
    EP_CHECK_NCCL(ncclEpGroupDestroy(session.group, env->stream));
}

EP_TEST_HT(ht_handle_arguments) {
    Session session = open_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    other_arguments(&session);
    check_broken_calls(&session, kCreateHandle, kIdsCalls, COUNT(kIdsCalls));
    check_broken_calls(&session, kCreateHandle, kHtLocalCalls, COUNT(kHtLocalCalls));
    finish_session(&session);
    too_many_tokens(env);
}

// ---- One rank against the others ---------------------------------------------------------------

// The odd rank's arguments are broken in this way; the others learn of it.
static void one_refuses(Session* session, const BrokenCall* broken) {
    if (is_odd(session->env)) {
        check_broken_calls(session, kCreateHandle, broken, 1);
    } else {
        check_refused_elsewhere(session, odd_rank(session->env), broken->text);
    }
    // The next creation succeeds and its handle works.
    EP_REQUIRE_NCCL(replace_handle(session, kTopK));
    check_works(session);
}

EP_TEST_HT(ht_handle_refused_by_one_rank) {
    if (!enough_ranks(env, 2, "handle-ht-rank-refused, *-ht-handle-refused")) return;
    Session session = open_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    for (size_t i = 0; i < COUNT(kIdsCalls); ++i) one_refuses(&session, &kIdsCalls[i]);
    one_refuses(&session, &kHtLocalCalls[0]);
    close_session(&session);
}
