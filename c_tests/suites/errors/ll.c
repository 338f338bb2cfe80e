// Refusals of low-latency dispatch and combine: the rules of each tensor, and the order of calls.
#include "suites/errors/errors.h"

// ---- Dispatch ----------------------------------------------------------------------------------
static const BrokenCall kDispatchCalls[] = {
    {"dispatch-ll-in-required"}, {"dispatch-ll-in-ndim"}, {"dispatch-ll-in-datatype"}, {"dispatch-ll-in-row"},
    {"dispatch-ll-in-row", "got 24 bytes, expected a multiple of 16 bytes"}, {"dispatch-ll-in-row-most"},
    {"dispatch-ll-in-rows"}, {"dispatch-ll-in-data"}, {"dispatch-ll-in-align"}, {"dispatch-ll-out-required"},
    {"dispatch-ll-out-ndim"}, {"dispatch-ll-out-experts"}, {"dispatch-ll-out-slots", "got 1, expected *"},
    {"dispatch-ll-out-datatype"},
    {"dispatch-ll-out-datatype", "got bfloat16, expected float16", "inputs[TOKENS].datatype: (got float16"},
    {"dispatch-ll-out-hidden"}, {"dispatch-ll-out-data"}, {"dispatch-ll-out-align"}, {"dispatch-ll-counter-ndim"},
    {"dispatch-ll-counter-datatype"}, {"dispatch-ll-counter-size"}, {"dispatch-ll-counter-data"},
    {"dispatch-ll-counter-align"},
};

// ---- Combine -----------------------------------------------------------------------------------

static const BrokenCall kCombineCalls[] = {
    {"combine-ll-in-required"}, {"combine-ll-in-ndim"}, {"combine-ll-in-experts"},
    {"combine-ll-in-slots", "got 1, expected *"}, {"combine-ll-in-datatype"},
    {"combine-ll-in-sum", "got int32, expected bfloat16, float16 or float32"}, {"combine-ll-in-sum"},
    {"combine-ll-in-row"}, {"combine-ll-in-row", "got 24 bytes, expected a multiple of 16 bytes"},
    {"combine-ll-in-row-most"}, {"combine-ll-in-data"}, {"combine-ll-in-align"}, {"combine-ll-in-scales"},
    {"combine-ll-out-scales"}, {"combine-ll-weights-required"}, {"combine-ll-weights-ndim"},
    {"combine-ll-weights-datatype"}, {"combine-ll-weights-rows"}, {"combine-ll-weights-columns"},
    {"combine-ll-weights-data"}, {"combine-ll-weights-align"}, {"combine-ll-out-required"}, {"combine-ll-out-ndim"},
    {"combine-ll-out-rows"}, {"combine-ll-out-datatype"}, {"combine-ll-out-hidden"}, {"combine-ll-out-data"},
    {"combine-ll-out-align"},
};

LL_SESSION_TEST(ll_dispatch_arguments) {
    check_broken_calls(session, kDispatch, kDispatchCalls, COUNT(kDispatchCalls));
}

LL_SESSION_TEST(ll_combine_arguments) {
    check_works(session);
    check_broken_calls(session, kCombine, kCombineCalls, COUNT(kCombineCalls));
}

// ---- The order of calls ------------------------------------------------------------------------

// Also after a dispatch that was refused.
static void check_dispatch_comes_first(const Session* session) {
    EP_REFUSED("combine-ll-before-dispatch", make_valid_call(session, kCombine, 0));
}

// Three handles of one group, of which two may have a staged operation in flight.
static void too_many_staged(Session* first) {
    Session second = *first;
    Session third = *first;
    const EpEnv* env = first->env;
    EP_REQUIRE_NCCL(open_handle(&second));
    EP_REQUIRE_NCCL(open_handle(&third));
    EP_CHECK_NCCL(make_valid_call(first, kDispatch, 1));
    EP_CHECK_NCCL(make_valid_call(&second, kDispatch, 1));
    EP_REFUSED("dispatch-staged-most", make_valid_call(&third, kDispatch, 1));
    check_dispatch_comes_first(&third);
    EP_CHECK_NCCL(ncclEpComplete(first->handle, NULL, env->stream));
    EP_CHECK_NCCL(make_valid_call(first, kCombine, 1));
    EP_CHECK_NCCL(make_valid_call(&third, kDispatch, 0));
    EP_REFUSED("combine-staged-most", make_valid_call(&third, kCombine, 1));
    EP_CHECK_NCCL(ncclEpComplete(first->handle, NULL, env->stream));
    EP_CHECK_NCCL(ncclEpComplete(second.handle, NULL, env->stream));
    EP_CHECK_NCCL(make_valid_call(&third, kCombine, 0));
    ep_sync(env);
    EP_CHECK_NCCL(ncclEpHandleDestroy(third.handle));
    EP_CHECK_NCCL(ncclEpHandleDestroy(second.handle));
}

LL_SESSION_TEST(ll_order_of_calls) {
    check_dispatch_comes_first(session);
    CallTensors empty;
    memset(&empty, 0, sizeof(empty));
    EP_CHECK_RESULT(make_call(session, kDispatch, &empty, 0), ncclInvalidArgument);
    check_dispatch_comes_first(session);
    EP_CHECK_NCCL(ncclEpComplete(session->handle, NULL, env->stream));
    EP_CHECK_NCCL(make_valid_call(session, kDispatch, 1));
    EP_REFUSED("dispatch-ll-staged", make_valid_call(session, kDispatch, 0));
    EP_REFUSED("combine-ll-staged", make_valid_call(session, kCombine, 0));
    EP_CHECK_NCCL(ncclEpComplete(session->handle, NULL, env->stream));
    check_works(session);
    too_many_staged(session);
}
