// Refusals of dispatches with scales, forwarded or made by a cast, in both modes; what is not refused;
// and ranks whose scales differ.
#include "harness/nodes.h"
#include "suites/errors/calls.h"

#define UNPITCHED(id, list, got, expected) \
    BROKEN(id, list, SCALES, kStride0, 2,                                                      \
           TENSOR(list, SCALES) ".strides: must be dense, or row-major or column-major with a " \
                                "pitch (got " got ", expected pitches for " expected " scales)")
#define TOO_LONG(id)                                                                     \
    BROKEN(id, kInputs, TOKENS, kSize1, kTokenBytes,                                     \
           "inputs[TOKENS].sizes[1]: a row with its scales must not exceed the group's " \
           "token_size_bytes (got 80 bytes, expected at most 64 bytes)")
#define UNSENT(id)                                                                               \
    BROKEN(id, kInputs, SCALES, kRemove, 0,                                                      \
           "inputs[SCALES]: is required: tokens of this type are not cast (got uint8, expected " \
           "bfloat16, float16 or float32)")
#define NOT_RECEIVED(id) \
    BROKEN(id, kOutputs, SCALES, kRemove, 0, "outputs[SCALES]: is required: scales that are sent must be received")

// ---- Scales that are forwarded -----------------------------------------------------------------

static const BrokenCall kLlForward[] = {
    NOT_RECEIVED("dispatch-ll-out-scales"),
    UNSENT("dispatch-ll-in-scales"),
    TOO_LONG("dispatch-ll-in-row-scales"),
    NDIM("dispatch-ll-in-scales-ndim", kInputs, SCALES, 3, 2),
    UNKNOWN_TYPE("dispatch-ll-in-scales-datatype", kInputs, SCALES),
    OTHER_TYPE("dispatch-ll-in-scales-width", kInputs, SCALES, ncclInt64, "a scale has 1, 2 or 4 bytes", "int64",
               "a type of 1, 2 or 4 bytes"),
    SIZE("dispatch-ll-in-scales-rows", kInputs, SCALES, 0, 3, "must be the handle's number of tokens", "4"),
    UNPITCHED("dispatch-ll-in-scales-strides", kInputs, "[2, 1]", "4 rows of 3"),
    DATA("dispatch-ll-in-scales-data", "dispatch-ll-in-scales-align", kInputs, SCALES, 4),
    NDIM("dispatch-ll-out-scales-ndim", kOutputs, SCALES, 2, 3),
    UNKNOWN_TYPE("dispatch-ll-out-scales-datatype", kOutputs, SCALES),
    OTHER_TYPE("dispatch-ll-out-scales-type", kOutputs, SCALES, ncclInt32, "must be the type of inputs[SCALES]",
               "int32", "float32"),
    SIZE("dispatch-ll-out-scales-experts", kOutputs, SCALES, 0, 3, "must be the experts of outputs[TOKENS]", "2"),
    SIZE("dispatch-ll-out-scales-rows", kOutputs, SCALES, 1, 1, "must be the rows of outputs[TOKENS]", "*"),
    SIZE("dispatch-ll-out-scales-columns", kOutputs, SCALES, 2, 2, "must be the columns of inputs[SCALES]", "3"),
    UNPITCHED("dispatch-ll-out-scales-strides", kOutputs, "[2, 1, 1]", "* rows of 3"),
    DATA("dispatch-ll-out-scales-data", "dispatch-ll-out-scales-align", kOutputs, SCALES, 4),
};

static const BrokenCall kHtForward[] = {
    NOT_RECEIVED("dispatch-ht-out-scales"),
    UNSENT("dispatch-ht-in-scales"),
    TOO_LONG("dispatch-ht-in-row-scales"),
    NDIM("dispatch-ht-in-scales-ndim", kInputs, SCALES, 3, 2),
    UNKNOWN_TYPE("dispatch-ht-in-scales-datatype", kInputs, SCALES),
    OTHER_TYPE("dispatch-ht-in-scales-width", kInputs, SCALES, ncclInt64, "a scale has 1, 2 or 4 bytes", "int64",
               "a type of 1, 2 or 4 bytes"),
    SIZE("dispatch-ht-in-scales-rows", kInputs, SCALES, 0, 3, "must be the handle's number of tokens", "4"),
    UNPITCHED("dispatch-ht-in-scales-strides", kInputs, "[2, 1]", "4 rows of 3"),
    DATA("dispatch-ht-in-scales-data", "dispatch-ht-in-scales-align", kInputs, SCALES, 4),
    NDIM("dispatch-ht-out-scales-ndim", kOutputs, SCALES, 3, 2),
    UNKNOWN_TYPE("dispatch-ht-out-scales-datatype", kOutputs, SCALES),
    OTHER_TYPE("dispatch-ht-out-scales-type", kOutputs, SCALES, ncclInt32, "must be the type of inputs[SCALES]",
               "int32", "float32"),
    SIZE("dispatch-ht-out-scales-rows", kOutputs, SCALES, 0, 1, "must be the rows of outputs[TOKENS]", "*"),
    SIZE("dispatch-ht-out-scales-columns", kOutputs, SCALES, 1, 2, "must be the columns of inputs[SCALES]", "3"),
    UNPITCHED("dispatch-ht-out-scales-strides", kOutputs, "[2, 1]", "* rows of 3"),
    DATA("dispatch-ht-out-scales-data", "dispatch-ht-out-scales-align", kOutputs, SCALES, 4),
};

// ---- Casts -------------------------------------------------------------------------------------

static const BrokenCall kLlCast[] = {
    OTHER_TYPE("dispatch-ll-cast-datatype", kOutputs, TOKENS, 11,
               "a cast gives float8e4m3; declare that, uint8 or int8", "float8e5m2", "float8e4m3"),
    OTHER_TYPE("dispatch-ll-cast-scales-datatype", kOutputs, SCALES, ncclFloat16,
               "must be float32, uint8 or int32 for a cast", "float16", "float32, uint8, int32 or uint32"),
    SIZE("dispatch-ll-cast-scales-columns", kOutputs, SCALES, 2, 2, "must be one scale for 128 or 32 elements", "1"),
};

static const BrokenCall kHtCast[] = {
    MISSING("dispatch-ht-cast-required", kOutputs, TOKENS),
    OTHER_TYPE("dispatch-ht-cast-datatype", kOutputs, TOKENS, 11,
               "a cast gives float8e4m3; declare that, uint8 or int8", "float8e5m2", "float8e4m3"),
    OTHER_TYPE("dispatch-ht-cast-scales-datatype", kOutputs, SCALES, ncclFloat16,
               "must be float32, uint8 or int32 for a cast", "float16", "float32, uint8, int32 or uint32"),
    SIZE("dispatch-ht-cast-scales-columns", kOutputs, SCALES, 1, 2, "must be one scale for 128 or 32 elements", "1"),
};

static void check_rounding(const Session* session, const char* id) {
    CallTensors tensors;
    valid_tensors(session, kForward, &tensors);
    tensors.round_scales = 1;
    EP_REFUSED(id, make_call(session, kForward, &tensors, 0), ncclInvalidArgument,
               "ncclEpDispatch: config.round_scales: scales that are forwarded cannot be rounded (got 1, expected 0)");
}

// A call with scales, or with rows that nothing sums, passes.
static void check_moved(const Session* session, CallKind kind, bool scaled) {
    CallTensors tensors;
    valid_tensors(session, kind, &tensors);
    if (!scaled) {
        tensors.lists[kInputs].views[0].tensor.datatype = ncclInt64;
        tensors.lists[kInputs].views[0].sizes[1] = kBytesOfRow / 8;
        EpView* out = &tensors.lists[kOutputs].views[0];
        out->tensor.datatype = ncclInt64;
        out->sizes[out->tensor.ndim - 1] = kBytesOfRow / 8;
    }
    EP_CHECK_NCCL(make_call(session, kind, &tensors, 0));
    ep_sync(session->env);
}

LL_SESSION_TEST(ll_scales_arguments) {
    check_broken_calls(session, kForward, kLlForward, COUNT(kLlForward));
    check_broken_calls(session, kCast, kLlCast, COUNT(kLlCast));
    check_rounding(session, "dispatch-ll-round-scales");
    check_moved(session, kDispatch, false);
    check_moved(session, kForward, true);
    check_moved(session, kCast, true);
}

HT_SESSION_TEST(ht_scales_arguments) {
    check_broken_calls(session, kForward, kHtForward, COUNT(kHtForward));
    check_broken_calls(session, kCast, kHtCast, COUNT(kHtCast));
    check_rounding(session, "dispatch-ht-round-scales");
    check_moved(session, kTokensOnly, false);
    check_moved(session, kForward, true);
    check_moved(session, kCast, true);
}

// ---- Ranks whose scales differ -----------------------------------------------------------------

// They come last.
static void remove_scales(CallTensors* tensors) {
    --tensors->lists[kInputs].count;
    --tensors->lists[kOutputs].count;
}

// As many of another type of the same width.
static void change_scales(CallTensors* tensors) {
    for (ListName list = kInputs; list <= kOutputs; ++list) {
        tensors->lists[list].views[tensors->lists[list].count - 1].tensor.datatype = ncclInt32;
    }
}

// The odd rank sends long rows, the others short ones, which take half a slot of the receiver's ring: so the word that
// says which scales rows have lies elsewhere.
static void scales_of_long_rows(const EpEnv* env) {
    enum { kLong = 1984, kMost = 2048 };
    Session session = open_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    EP_CHECK_NCCL(ncclEpHandleDestroy(session.handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(session.group, env->stream));
    session.group =
        ep_group_create(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, (unsigned)env->size * kLocalExperts, kMaxTokens, kMost);
    EP_REQUIRE_NCCL(open_handle(&session));
    void* sent = ep_device_alloc((size_t)kTokens * kLong);
    void* received = ep_device_alloc((size_t)max_recv_rows(&session) * kLong);
    EP_REQUIRE_CUDA(cudaMemset(sent, 0, (size_t)kTokens * kLong));
    CallTensors tensors;
    valid_tensors(&session, kForward, &tensors);
    for (ListName list = kInputs; is_odd(env) && list <= kOutputs; ++list) {
        EpView* rows = &tensors.lists[list].views[0];
        rows->sizes[1] = kLong;
        rows->tensor.data = list == kInputs ? sent : received;
    }
    ep_barrier();
    EP_CHECK_NCCL(make_call(&session, kForward, &tensors, 0));
    check_all_notice(&session, kForward, "running-scale-bytes", "row bytes: must be the same",
                     is_odd(env) ? " (got 1984 + 12, expected 32 + 12)" : " (got 32 + 12, expected 1984 + 12)");
    ep_device_free(sent);
    ep_device_free(received);
}

static void scales_that_differ(const EpEnv* env, ncclEpAlgorithm_t algorithm) {
    if (!enough_ranks(env, 2, "running-scale-bytes, running-scale-type")) return;
    // Between GPUs of several nodes messages have another size then, of which NCCL promises nothing: there
    // *_different_calls_over_nodes want some error, here the text is checked.
    const OtherCall calls[] = {{algorithm, kForward, kForward, remove_scales, "running-scale-bytes",
                                "row bytes: must be the same", "32 + 12", "32 + 0"},
                               {algorithm, kForward, kForward, change_scales, "running-scale-type",
                                "data type of scales: must be the same", "float32", "int32"}};
    if (ep_on_host_backend() || ep_num_nodes() == 1) check_other_call(env, &calls[0]);
    check_other_call(env, &calls[1]);
}

EP_TEST(ll_scales_that_differ) { scales_that_differ(env, NCCL_EP_ALGO_LOW_LATENCY); }

EP_TEST_HT(ht_scales_that_differ) {
    scales_that_differ(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    const bool one_node = ep_on_host_backend() || ep_num_nodes() == 1;
    if (one_node && enough_ranks(env, 2, "running-scale-bytes")) scales_of_long_rows(env);
}
