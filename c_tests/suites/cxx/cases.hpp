// The cases that each test of nccl_ep.hpp has, whatever its standard, with exceptions and without:
// operations against the reference, refusals, and who destroys what.
#pragma once

#include <cstring>
#include <nccl_ep.hpp>
#include <utility>
#include <vector>

#include "reference/run.h"

namespace {

using nccl_ep::Group;
using nccl_ep::Handle;
using nccl_ep::Phase;
using nccl_ep::Result;
using nccl_ep::Shape;
using nccl_ep::Tensor;

static_assert(!std::is_copy_constructible_v<Group> && std::is_nothrow_move_assignable_v<Group>);
static_assert(!std::is_copy_constructible_v<Handle> && std::is_nothrow_move_assignable_v<Handle>);
static_assert(std::is_trivially_destructible_v<Tensor>);
static_assert(std::is_constructible_v<Result<unsigned>, unsigned>);
static_assert(!std::is_constructible_v<Result<unsigned>, ncclResult_t>);
static_assert(!std::is_lvalue_reference_v<decltype(*std::declval<Result<unsigned>>())>);

template <typename T = void>
T* Data(const RefBuffer& buffer) {
    return static_cast<T*>(ref_buffer_data(&buffer));
}

// One check: the call was refused, with this code, by this function, with such a text.
template <typename T>
bool Refused(const Result<T>& result, ncclResult_t code, const char* call, const char* text) {
    if (result) return false;
    return result.code() == code && std::strcmp(result.error().call(), call) == 0 &&
           std::strstr(result.error().what(), call) != nullptr && std::strstr(result.error().what(), text) != nullptr;
}

RefShape SmallShape(const EpEnv* env) { return {2 * static_cast<unsigned>(env->size), 6, 2, ncclBfloat16, 64}; }

ncclEpGroupConfig_t Config(ncclEpAlgorithm_t algorithm, const RefShape& shape) {
    ncclEpGroupConfig_t config = nccl_ep::group_config(algorithm);
    config.num_experts = shape.num_experts;
    config.max_tokens_per_rank = shape.max_tokens;
    config.token_size_bytes = shape.hidden * static_cast<unsigned>(ep_datatype_size(shape.datatype));
    return config;
}

// A group that must be there for the rest of a case.
Group Open(const EpEnv* env, ncclEpAlgorithm_t algorithm, const RefShape& shape) {
    Result<Group> group = Group::create(env->comm, Config(algorithm, shape), env->stream);
    EP_REQUIRE(group.has_value());
    return std::move(*group);
}

// ---- Low latency: the run has a handle of its own, which nothing uses

class LowLatency {
   public:
    LowLatency(const EpEnv* env, const Group& group, const RefShape& shape, uint64_t seed) {
        run_ = ref_run_open_with(env, group.get(), &shape, kRefMessy, /*uneven=*/true, ref_ll(seed));
        tokens_ = run_.now->num_tokens[env->rank];
        auto made = Handle::open(group);
        EP_REQUIRE(made.has_value());
        handle_ = std::move(*made);
        const Tensor ids = Tensor::topk_idx(Data<int64_t>(run_.ids), {tokens_, shape.top_k});
        EP_CHECK(handle_.update(ids, {}, env->stream).has_value());
    }
    ~LowLatency() {
        EP_CHECK(handle_.destroy().has_value());
        ref_run_close(&run_);
    }
    LowLatency(const LowLatency&) = delete;
    LowLatency& operator=(const LowLatency&) = delete;

    void Dispatch(Phase phase) {
        ref_prepare_dispatch(&run_);
        const Tensor counts = Tensor::expert_counts(Data<int32_t>(run_.counter), run_.local_experts);
        EP_CHECK(
            handle_.dispatch(Home(run_.tokens_in), Away(run_.tokens_out), counts, run_.env->stream, phase).has_value());
        ref_routing_free(run_.sent);
        run_.sent = ref_routing_copy(run_.now);
    }
    void Combine(Phase phase) {
        ref_prepare_combine(&run_);
        const Tensor weights = Tensor::topk_weights(Data<float>(run_.weights), {tokens_, run_.shape.top_k});
        EP_CHECK(
            handle_.combine(Away(run_.results_in), Home(run_.combined), weights, run_.env->stream, phase).has_value());
    }
    void Complete() { EP_CHECK(handle_.complete(run_.env->stream).has_value()); }
    // Until it is completed, a staged operation is in the way of others.
    void CheckPending() {
        const Tensor weights = Tensor::topk_weights(Data<float>(run_.weights), {tokens_, run_.shape.top_k});
        EP_CHECK(Refused(handle_.combine(Away(run_.results_in), Home(run_.combined), weights, run_.env->stream),
                         ncclInvalidUsage, "ncclEpCombine", "staged"));
    }
    void CheckDispatch() { ref_check_dispatch(&run_); }
    void CheckCombine() { ref_check_combine(&run_); }

   private:
    Tensor Home(const RefBuffer& buffer) const {
        return Tensor::tokens(Data(buffer), run_.shape.datatype, {tokens_, run_.shape.hidden});
    }
    Tensor Away(const RefBuffer& buffer) const {
        return Tensor::tokens(Data(buffer), run_.shape.datatype,
                              {run_.local_experts, run_.layout.rows, run_.shape.hidden});
    }

    RefRun run_;
    unsigned tokens_ = 0;
    Handle handle_;
};

EP_TEST(low_latency_agrees_with_the_reference) {
    const RefShape shape = SmallShape(env);
    const Group group = Open(env, NCCL_EP_ALGO_LOW_LATENCY, shape);
    LowLatency layer(env, group, shape, 11);
    for (int step = 0; step < 2; ++step) {
        layer.Dispatch(Phase::whole);
        layer.CheckDispatch();
        layer.Combine(Phase::whole);
        layer.CheckCombine();
    }
    EP_CHECK(group.async_error().has_value());
    EP_CHECK(group.count_rows(nullptr).has_value() && group.time_waits(nullptr).has_value());
    EP_CHECK(group.time_combine_waits(nullptr).has_value());
}

EP_TEST(two_staged_batches_take_turns) {
    const RefShape shape = SmallShape(env);
    const Group group = Open(env, NCCL_EP_ALGO_LOW_LATENCY, shape);
    LowLatency first(env, group, shape, 21), second(env, group, shape, 22);
    first.Dispatch(Phase::send);
    second.Dispatch(Phase::send);
    first.CheckPending();
    first.Complete();
    first.CheckDispatch();
    first.Combine(Phase::send);
    second.Complete();
    second.CheckDispatch();
    second.Combine(Phase::send);
    second.CheckPending();
    first.Complete();
    second.Complete();
    first.CheckCombine();
    second.CheckCombine();
}

// Scales in columns, so their tensor has strides.
EP_TEST(a_cast_writes_scales_by_their_strides) {
    RefShape shape = SmallShape(env);
    shape.hidden = 256;
    const Group group = Open(env, NCCL_EP_ALGO_LOW_LATENCY, shape);
    REF_SCOPED RefRun run = ref_run_open_with(env, group.get(), &shape, kRefDistinct, /*uneven=*/true, ref_ll(31));
    RefFormat format = ref_format_cast(shape.datatype, shape.hidden, ncclFloat32, 128);
    format.out_order = kRefColumns;
    format.round = true;
    ref_run_set_format(&run, &format);
    ref_prepare_dispatch(&run);

    Handle handle(std::exchange(run.handle, nullptr));
    unsigned strides[3];
    ref_scale_strides(&format, format.out_order, run.layout.rows, strides);
    const Tensor scales =
        Tensor::scales(Data(run.scales_out), format.scale_type, {run.local_experts, run.layout.rows, format.num_scales})
            .with_strides(strides);
    const Tensor rows =
        Tensor::tokens(Data(run.tokens_out), format.to, {run.local_experts, run.layout.rows, shape.hidden});
    const Tensor tokens =
        Tensor::tokens(Data(run.tokens_in), format.from, {run.now->num_tokens[env->rank], shape.hidden});
    run.without_counter = true;
    EP_CHECK(
        handle.dispatch(tokens, {rows, scales}, {}, env->stream, Phase::whole, nccl_ep::ScaleRounding::power_of_two)
            .has_value());
    ref_routing_free(run.sent);
    run.sent = ref_routing_copy(run.now);
    ref_check_dispatch(&run);
    handle = Handle();  // destroys the one that it was
}

// ---- High throughput

EP_TEST_HT(high_throughput_agrees_with_the_reference) {
    RefShape shape = SmallShape(env);
    shape.max_tokens = NCCL_EP_AUTO;
    const Group group = Open(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, shape);
    RefRun run = ref_run_open_with(env, group.get(), &shape, kRefDistinct, /*uneven=*/true,
                                   ref_ht_as(kHtRowsExact, kHtNoCounter, 41));
    Handle handle(std::exchange(run.handle, nullptr));
    EP_CHECK_EQ_U64(*handle.num_recv_tokens(), run.received);

    const unsigned tokens = run.now->num_tokens[env->rank], rows = run.num_rows;
    const auto tokens_of = [&](const RefBuffer& buffer, unsigned count) {
        return Tensor::tokens(Data(buffer), shape.datatype, {count, shape.hidden});
    };
    const auto weights_of = [&](const RefBuffer& buffer, unsigned count) {
        return Tensor::topk_weights(Data<float>(buffer), {count, shape.top_k});
    };
    const auto ids_of = [&](const RefBuffer& buffer, unsigned count) {
        return Tensor::topk_idx(Data<int64_t>(buffer), {count, shape.top_k});
    };
    ref_prepare_dispatch(&run);
    run.pass = kRefCounted;
    const std::vector<Tensor> arriving = {tokens_of(run.tokens_out, rows), ids_of(run.ids_out, rows),
                                          weights_of(run.weights_out, rows)};
    EP_CHECK(handle
                 .dispatch({tokens_of(run.tokens_in, tokens), ids_of(run.ids, tokens), weights_of(run.weights, tokens)},
                           arriving, Tensor::expert_counts(Data<int32_t>(run.counter), run.local_experts), env->stream)
                 .has_value());
    ref_check_dispatch(&run);

    ref_prepare_combine(&run);
    run.backward = true;
    EP_CHECK(handle
                 .combine({tokens_of(run.results_in, rows), weights_of(run.gradients_in, rows)},
                          {tokens_of(run.combined, tokens), weights_of(run.gradients_out, tokens)}, {}, env->stream)
                 .has_value());
    ref_check_combine(&run);
    EP_CHECK(handle.destroy().has_value());
    ref_run_close(&run);
}

EP_TEST_HT(a_bound_limits_what_a_handle_may_receive) {
    const Group group = Open(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, SmallShape(env));
    auto bounded = Handle::open(group, 16, 3);
    EP_REQUIRE(bounded.has_value());
    const int64_t ids[] = {0, 1};
    void* const memory = ep_device_upload(ids, sizeof(ids));
    EP_CHECK(bounded->update(Tensor::topk_idx(static_cast<int64_t*>(memory), {1, 2}), {}, env->stream).has_value());
    EP_CHECK_EQ_U64(*bounded->num_recv_tokens(), 3);
    EP_CHECK(bounded->destroy().has_value());
    ep_device_free(memory);
}

// ---- Refusals

EP_TEST(refusals_have_code_call_and_text) {
    const RefShape shape = SmallShape(env);
    ncclEpGroupConfig_t config = Config(NCCL_EP_ALGO_LOW_LATENCY, shape);
    config.token_size_bytes = 7;
    EP_CHECK(Refused(Group::create(env->comm, config, env->stream), ncclInvalidArgument, "ncclEpCreateGroup",
                     "token_size_bytes"));

    Group group = Open(env, NCCL_EP_ALGO_LOW_LATENCY, shape);
    void* memory = ep_device_alloc(4096);
    const auto ids = static_cast<int64_t*>(memory);
    const Tensor four = Tensor::topk_idx(ids, {4, 2});
    EP_CHECK(Refused(Handle::create(group, Tensor::topk_idx(ids, {99, 2}), {}, env->stream), ncclInvalidArgument,
                     "ncclEpCreateHandle", "got 99"));
    EP_CHECK(Refused(Handle::create(group, Tensor::topk_idx(ids, {-4, 2}), {}, env->stream), ncclInvalidArgument,
                     "ncclEpCreateHandle", "ndim"));

    auto handle = Handle::create(group, four, {}, env->stream);
    if (!EP_CHECK(handle.has_value())) return;
    const Tensor rows = Tensor::tokens(memory, ncclBfloat16, {4, 64});
    EP_CHECK(Refused(handle->dispatch(rows, rows, {}, env->stream), ncclInvalidArgument, "ncclEpDispatch",
                     "outputs[TOKENS]"));
    EP_CHECK(
        Refused(handle->dispatch({}, rows, {}, env->stream), ncclInvalidArgument, "ncclEpDispatch", "inputs[TOKENS]"));
    EP_CHECK(Refused(handle->dispatch(std::vector<Tensor>(17, rows), rows, {}, env->stream), ncclInvalidArgument,
                     "ncclEpDispatch", "num_inputs"));
    EP_CHECK(Refused(handle->combine(rows, rows, {}, env->stream), ncclInvalidUsage, "ncclEpCombine",
                     "needs a dispatch before its first combine"));
    EP_CHECK(Refused(handle->num_recv_tokens(), ncclInvalidUsage, "ncclEpHandleGetNumRecvTokens", "handle"));
    EP_CHECK(handle->destroy().has_value());
    EP_CHECK(group.destroy(env->stream).has_value());
    ep_device_free(memory);
}

EP_TEST(shapes_take_integers_and_lists_of_them) {
    const std::vector<int64_t> list = {3, 4, 5};
    const unsigned long long far = 1ull << 32;
    EP_CHECK_EQ_U64(Shape(list).ndim(), 3);
    EP_CHECK_EQ_BYTES(Shape(list).data(), Shape(3, 4u, size_t{5}).data(), 5 * sizeof(unsigned));
    EP_CHECK_EQ_U64(Shape(1, 2, 3, 4, 5).ndim(), 5);
    EP_CHECK_EQ_U64(Shape(std::vector<int>(6, 1)).ndim(), 0);
    EP_CHECK_EQ_U64(Shape(3, far, 5).ndim(), 0);
    EP_CHECK_EQ_U64(Shape(-1).ndim(), 0);
    const Tensor tensor = Tensor::scales(nullptr, ncclFloat32, list).with_strides({20, 5, 1});
    const ncclNDTensor_t raw = tensor.raw();
    const unsigned sizes[] = {3, 4, 5}, strides[] = {20, 5, 1};
    EP_CHECK_EQ_U64(raw.ndim, 3);
    EP_CHECK_EQ_BYTES(raw.sizes, sizes, sizeof(sizes));
    EP_CHECK_EQ_BYTES(raw.strides, strides, sizeof(strides));
    EP_CHECK_EQ_U64(raw.tag, NCCL_EP_TENSOR_TAG_SCALES);
}

// ---- Who destroys what

// A handle of two tokens for this group.
Handle MadeFor(const EpEnv* env, const Group& group, void* ids) {
    auto made = Handle::create(group, Tensor::topk_idx(static_cast<int64_t*>(ids), {2, 2}), {}, env->stream);
    EP_REQUIRE(made.has_value());
    return std::move(*made);
}

EP_TEST(what_was_moved_from_is_empty) {
    Group group = Open(env, NCCL_EP_ALGO_LOW_LATENCY, SmallShape(env));
    void* ids = ep_device_alloc(64);
    Handle handle = MadeFor(env, group, ids);
    const Tensor tensor = Tensor::tokens(ids, ncclBfloat16, {2, 2});

    Group other = std::move(group);
    Handle taken = std::move(handle);
    EP_CHECK(!group && group.get() == nullptr && other);
    EP_CHECK(!handle && handle.get() == nullptr && taken);
    EP_CHECK(
        Refused(handle.dispatch(tensor, tensor, {}, env->stream), ncclInvalidArgument, "ncclEpDispatch", "handle"));
    EP_CHECK(Refused(handle.complete(env->stream), ncclInvalidArgument, "ncclEpComplete", ""));
    EP_CHECK(
        Refused(Handle::create(group, tensor, {}, env->stream), ncclInvalidArgument, "ncclEpCreateHandle", "ep_group"));
    EP_CHECK(Refused(group.async_error(), ncclInvalidArgument, "ncclEpGetAsyncError", "ep_group"));
    EP_CHECK(Refused(group.count_rows(nullptr), ncclInvalidArgument, "ncclEpGroupCountRows", "ep_group"));
    EP_CHECK(Refused(group.time_waits(nullptr), ncclInvalidArgument, "ncclEpGroupTimeWaits", "ep_group"));
    EP_CHECK(
        Refused(group.time_combine_waits(nullptr), ncclInvalidArgument, "ncclEpGroupTimeCombineWaits", "ep_group"));
    EP_CHECK(Refused(Handle::open(group), ncclInvalidArgument, "ncclEpHandleOpen", "ep_group"));
    EP_CHECK(Refused(Handle::open(group, 0, 1), ncclInvalidArgument, "ncclEpHandleOpenBounded", "ep_group"));
    EP_CHECK(Refused(handle.update(tensor, {}, env->stream), ncclInvalidArgument, "ncclEpHandleUpdate", "handle"));
    EP_CHECK(group.destroy(env->stream).has_value() && handle.destroy().has_value());

    // What a variable was is destroyed when it becomes another.
    const ncclEpHandle_t old = taken.get();
    taken = MadeFor(env, other, ids);
    EP_CHECK_RESULT(ncclEpHandleDestroy(old), ncclInvalidArgument);
    EP_CHECK(taken.complete(env->stream).has_value());
    taken = Handle();
    other = Group();
    ep_device_free(ids);

    Group dead = Open(env, NCCL_EP_ALGO_LOW_LATENCY, SmallShape(env));
    EP_CHECK_RESULT(ncclEpGroupDestroy(dead.get(), env->stream), ncclSuccess);
    EP_CHECK(!dead.destroy(env->stream) && !dead);
}

EP_TEST(scopes_destroy_in_any_order) {
    void* ids = ep_device_alloc(64);
    ncclEpGroup_t group_was = nullptr;
    ncclEpHandle_t handle_was = nullptr;
    {
        Handle late;  // outlives its group
        Group group = Open(env, NCCL_EP_ALGO_LOW_LATENCY, SmallShape(env));
        late = MadeFor(env, group, ids);
        const Handle early = MadeFor(env, group, ids);
        handle_was = early.get();
        group_was = group.get();
        EP_CHECK(group.destroy(env->stream).has_value());
        EP_CHECK(!group);
        EP_CHECK(Refused(late.complete(env->stream), ncclInvalidUsage, "ncclEpComplete", "group"));
    }
    EP_CHECK_RESULT(ncclEpHandleDestroy(handle_was), ncclInvalidArgument);
    EP_CHECK_RESULT(ncclEpGroupDestroy(group_was, env->stream), ncclInvalidArgument);

    // Released, they are the caller's.
    Group group = Open(env, NCCL_EP_ALGO_LOW_LATENCY, SmallShape(env));
    ncclEpHandle_t handle = MadeFor(env, group, ids).release();
    ncclEpGroup_t released = group.release();
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    {
        const Group again(released, env->stream);
    }
    EP_CHECK_RESULT(ncclEpGroupDestroy(released, env->stream), ncclInvalidArgument);
    ep_device_free(ids);
}

}  // namespace
