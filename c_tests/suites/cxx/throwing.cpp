// nccl_ep.hpp in C++17, with exceptions.
#include "suites/cxx/cases.hpp"

static_assert(__cplusplus < 202002L);

namespace {

EP_TEST(value_throws_what_was_refused) {
    const Group group = Open(env, NCCL_EP_ALGO_LOW_LATENCY, SmallShape(env));
    void* ids = ep_device_alloc(64);
    const Tensor good = Tensor::topk_idx(static_cast<int64_t*>(ids), {2, 2});
    Handle handle = Handle::create(group, good, {}, env->stream).value();
    handle.complete(env->stream).value();
    bool caught = false;
    try {
        handle.dispatch({}, {}, {}, env->stream).value();
    } catch (const std::runtime_error& error) {
        const auto& refusal = static_cast<const nccl_ep::Error&>(error);
        caught = EP_CHECK_STR_CONTAINS(refusal.what(), "ncclEpDispatch: inputs[TOKENS]") &&
                 EP_CHECK_RESULT(refusal.code(), ncclInvalidArgument);
    }
    EP_CHECK(caught);
    // An Error keeps its text when others follow, and objects end as the stack unwinds.
    Result<unsigned> rows = handle.num_recv_tokens();
    const ncclEpHandle_t was = handle.get();
    try {
        const Handle ends = std::move(handle);
        (void)rows.value();
        EP_CHECK(!"reached");
    } catch (const nccl_ep::Error& error) {
        EP_CHECK_STR_CONTAINS(error.what(), "ncclEpHandleGetNumRecvTokens");
    }
    EP_CHECK_RESULT(ncclEpHandleDestroy(was), ncclInvalidArgument);
    ep_device_free(ids);
}

}  // namespace
