// nccl_ep.hpp without exceptions: what is left is to ask each result.
#include "suites/cxx/cases.hpp"

#ifdef __cpp_exceptions
#error "to be compiled with -fno-exceptions"
#endif

namespace {

template <typename T, typename = void>
constexpr bool kHasValue = false;
template <typename T>
constexpr bool kHasValue<T, std::void_t<decltype(std::declval<T>().value())>> = true;
static_assert(!kHasValue<Result<>> && !kHasValue<Result<Group>>);

// As a caller writes it who hands codes on.
ncclResult_t Step(Handle& handle, const Tensor& tokens, cudaStream_t stream) {
    if (auto sent = handle.dispatch(tokens, tokens, {}, stream); !sent) return sent.code();
    return handle.complete(stream).code();
}

EP_TEST(codes_are_handed_on) {
    const Group group = Open(env, NCCL_EP_ALGO_LOW_LATENCY, SmallShape(env));
    void* ids = ep_device_alloc(64);
    Handle handle = MadeFor(env, group, ids);
    EP_CHECK_RESULT(Step(handle, Tensor::tokens(ids, ncclBfloat16, {1, 8}), env->stream), ncclInvalidArgument);
    EP_CHECK_RESULT(handle.complete(env->stream).code(), ncclSuccess);
    EP_CHECK(handle.destroy().has_value());
    ep_device_free(ids);
}

}  // namespace
