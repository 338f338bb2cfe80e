// ep_test: is the library correct on this machine? One dispatch and one combine, checked on every rank; with -c both
// again on the same handle. The options, the order of the calls and the line that scripts look for are those of the
// reference's program of this name. Works with any number of ranks.
#include <cstdio>

#include "harness/harness.h"
#include "harness/options.hpp"
#include "programs/ep_test/checks.h"
#include "programs/ep_test/options.h"
#include "programs/ep_test/routing.h"
#include "reference/ht.h"

namespace ep_test {
namespace {

class Run {
   public:
    Run(EpEnv* env, const Options& options)
        : env_(env),
          options_(options),
          exchange_(MakeRouting(static_cast<unsigned>(env->size), options.tokens, options.random),
                    static_cast<unsigned>(env->rank), options.hidden) {}

    void All() {
        CreateGroupAndHandle();
        CreateTensors();
        Dispatch();
        Combine();
        if (options_.cached && !options_.low_latency()) Repeat();
        Destroy();
    }

   private:
    void CreateGroupAndHandle();
    void CreateTensors();
    void Dispatch();
    void Combine();
    void Repeat();
    void Destroy();
    void CompleteAndSync();
    unsigned ReceivedRows();

    const RefRouting& routing() const { return exchange_.routing(); }

    EpEnv* env_;
    Options options_;
    Exchange exchange_;
    ncclEpGroup_t group_ = nullptr;
    ncclEpHandle_t handle_ = nullptr;

    ncclNDTensor_t topk_idx_{};
    ncclNDTensor_t tokens_{};
    ncclNDTensor_t weights_{};
    ncclNDTensor_t received_{};
    ncclNDTensor_t received_weights_{};  // high throughput
    ncclNDTensor_t received_idx_{};      // high throughput
    ncclNDTensor_t counter_{};           // low latency
    ncclNDTensor_t expert_outputs_{};
    ncclNDTensor_t combined_{};
};

void Run::CreateGroupAndHandle() {
    const unsigned max_tokens = options_.dynamic_tokens ? NCCL_EP_AUTO : options_.tokens;
    const ncclEpGroupConfig_t config = ep_group_config(options_.algorithm, routing().num_experts, max_tokens,
                                                       options_.hidden * static_cast<unsigned>(sizeof(uint16_t)));
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group_, env_->comm, &config, env_->stream, ep_counted_alloc, ep_counted_free));
    topk_idx_ = ep_tensor_2d(group_, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, options_.tokens, routing().top_k);
    ep_tensor_upload(&topk_idx_, routing().topk_idx[env_->rank]);
    EP_REQUIRE_NCCL(ncclEpCreateHandle(&handle_, group_, &topk_idx_, nullptr, 0, nullptr, env_->stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(env_->stream));
}

// Rows of the high-throughput outputs: the library's bound or, with dynamic tokens, the exact number.
unsigned Run::ReceivedRows() {
    unsigned rows = 0;
    EP_REQUIRE_NCCL(ncclEpHandleGetNumRecvTokens(handle_, &rows));
    const unsigned expected = options_.dynamic_tokens ? ref_ht_received(&routing(), static_cast<unsigned>(env_->rank))
                                                      : routing().num_ranks * options_.tokens;
    EP_CHECK_EQ_U64(rows, expected);
    return rows;
}

void Run::CreateTensors() {
    const unsigned hidden = options_.hidden;
    const unsigned top_k = routing().top_k;
    const auto tokens_tag = NCCL_EP_TENSOR_TAG_TOKENS;
    const auto weights_tag = NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS;

    tokens_ = ep_tensor_2d(group_, ncclBfloat16, tokens_tag, options_.tokens, hidden);
    ep_tensor_upload(&tokens_, exchange_.Tokens().data());
    weights_ = ep_tensor_2d(group_, ncclFloat32, weights_tag, options_.tokens, top_k);
    ep_tensor_upload(&weights_, routing().weights[env_->rank]);
    combined_ = ep_tensor_2d(group_, ncclBfloat16, tokens_tag, options_.tokens, hidden);

    if (options_.low_latency()) {
        const unsigned experts = ref_local_experts(&routing());
        const unsigned slots = exchange_.layout().rows;
        received_ = ep_tensor_3d(group_, ncclBfloat16, tokens_tag, experts, slots, hidden);
        expert_outputs_ = ep_tensor_3d(group_, ncclBfloat16, tokens_tag, experts, slots, hidden);
        counter_ = ep_tensor_1d(group_, ncclInt32, NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, experts);
        ep_tensor_upload(&expert_outputs_, exchange_.ResultsLl().data());
        return;
    }
    const unsigned rows = ReceivedRows();
    received_ = ep_tensor_2d(group_, ncclBfloat16, tokens_tag, rows, hidden);
    received_weights_ = ep_tensor_2d(group_, ncclFloat32, weights_tag, rows, top_k);
    received_idx_ = ep_tensor_2d(group_, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, rows, top_k);
    expert_outputs_ = ep_tensor_2d(group_, ncclBfloat16, tokens_tag, rows, hidden);
    ep_tensor_upload(&expert_outputs_, exchange_.ResultsHt(rows).data());
}

// Callers complete every operation, staged or not: without a staged one this does nothing.
void Run::CompleteAndSync() {
    EP_REQUIRE_NCCL(ncclEpComplete(handle_, nullptr, env_->stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(env_->stream));
}

void Run::Dispatch() {
    const ncclEpDispatchConfig_t config{};
    const ncclNDTensor_t* inputs[] = {&tokens_, &weights_, &topk_idx_};
    ncclNDTensor_t* outputs[] = {&received_, &received_weights_, &received_idx_};
    ncclNDTensor_t* locals[] = {&counter_};
    const bool ll = options_.low_latency();
    for (unsigned i = 0; i < (ll ? 1 : 3); ++i) Poison(*outputs[i]);
    if (ll) Poison(counter_);
    EP_REQUIRE_NCCL(ncclEpDispatch(handle_, inputs, ll ? 1 : 3, outputs, ll ? 1 : 3, locals,
                                   ll ? 1 : 0, options_.stage_dispatch, &config, env_->stream));
    CompleteAndSync();
    if (ll) {
        exchange_.CheckDispatchLl(received_, counter_);
    } else {
        exchange_.CheckTokensHt(received_);
        exchange_.CheckRoutingHt(received_idx_, received_weights_);
    }
}

void Run::Combine() {
    const ncclNDTensor_t* inputs[] = {&expert_outputs_};
    ncclNDTensor_t* outputs[] = {&combined_};
    ncclNDTensor_t* locals[] = {&weights_};
    Poison(combined_);
    EP_REQUIRE_NCCL(ncclEpCombine(handle_, inputs, 1, outputs, 1, locals, options_.low_latency() ? 1 : 0,
                                  options_.stage_combine, nullptr, env_->stream));
    CompleteAndSync();
    options_.low_latency() ? exchange_.CheckCombineLl(combined_) : exchange_.CheckCombineHt(combined_);
}

// The cached dispatch moves only tokens, into another buffer; the backward combine also returns
// gradients of the weights. Both must repeat the first results bit for bit, unused rows included.
void Run::Repeat() {
    ncclNDTensor_t received = ep_tensor_2d(group_, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS,
                                           received_.sizes[0], options_.hidden);
    ncclNDTensor_t combined = ep_tensor_2d(group_, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS,
                                           options_.tokens, options_.hidden);
    const auto weights_tag = NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS;
    const unsigned top_k = routing().top_k;
    ncclNDTensor_t given = ep_tensor_2d(group_, ncclFloat32, weights_tag, received_.sizes[0], top_k);
    ncclNDTensor_t gradients = ep_tensor_2d(group_, ncclFloat32, weights_tag, options_.tokens, top_k);
    ep_tensor_upload(&given, exchange_.Gradients(received_.sizes[0]).data());
    for (const ncclNDTensor_t* output : {&received, &combined, &gradients}) Poison(*output);
    const ncclEpDispatchConfig_t config{};
    const ncclNDTensor_t* tokens_in[] = {&tokens_};
    ncclNDTensor_t* tokens_out[] = {&received};
    EP_REQUIRE_NCCL(ncclEpDispatch(handle_, tokens_in, 1, tokens_out, 1, nullptr, 0,
                                   options_.stage_dispatch, &config, env_->stream));
    CompleteAndSync();
    exchange_.CheckTokensHt(received);

    const ncclNDTensor_t* gradients_in[] = {&expert_outputs_, &given};
    ncclNDTensor_t* gradients_out[] = {&combined, &gradients};
    EP_REQUIRE_NCCL(ncclEpCombine(handle_, gradients_in, 2, gradients_out, 2, nullptr, 0,
                                  options_.stage_combine, nullptr, env_->stream));
    CompleteAndSync();
    exchange_.CheckCombineHt(combined);
    exchange_.CheckGradients(gradients);
    for (ncclNDTensor_t* tensor : {&received, &combined, &given, &gradients}) {
        EP_CHECK_NCCL(ncclEpTensorDestroy(group_, tensor));
    }
}

// Destroys some tensors after the group and the communicator with which they were made, as existing programs do.
void Run::Destroy() {
    EP_CHECK_NCCL(ncclEpTensorDestroy(group_, &topk_idx_));
    EP_CHECK_NCCL(ncclEpTensorDestroy(group_, &tokens_));
    EP_CHECK_NCCL(ncclEpTensorDestroy(group_, &weights_));
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle_));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group_, env_->stream));
    EP_REQUIRE_NCCL(ncclCommDestroy(env_->comm));
    env_->comm = nullptr;
    for (ncclNDTensor_t* tensor : {&received_, &received_weights_, &received_idx_, &counter_,
                                   &expert_outputs_, &combined_}) {
        EP_CHECK_NCCL(ncclEpTensorDestroy(group_, tensor));
    }
    EP_CHECK_EQ_I64(ep_counted_live(), 0);
}

}  // namespace
}  // namespace ep_test

int main(int argc, char** argv) {
    const ep_test::ParsedOptions parsed = ep_test::ParseOptions(argc, argv);
    EpEnv env;
    ep_init_mpi(&env, &argc, &argv);
    if (parsed.help || !parsed.error.empty()) {
        if (env.rank == 0 && parsed.help) printf("%s", ep_test::kUsage);
        if (env.rank == 0 && !parsed.help) ep::PrintRefusal("ep_test", parsed.error);
        ep_release(&env);
        return parsed.help ? 0 : 1;
    }
    ep_init_device(&env);
    if (!parsed.options.low_latency() && !ep_has_high_throughput(&env)) {
        ep_skip_high_throughput();
        return ep_finish(&env);
    }
    if (env.rank == 0) {
        printf("ep_test: %d ranks, %s\n", env.size, ep_test::Describe(parsed.options).c_str());
        fflush(stdout);
    }
    ep_test::Run(&env, parsed.options).All();
    if (ep_failed() == 0) {
        printf("[MPI Rank %d] Success\n", env.rank);
    } else {
        printf("[MPI Rank %d] %llu checks failed\n", env.rank, static_cast<unsigned long long>(ep_failed()));
    }
    fflush(stdout);
    const int status = ep_finish(&env);
    cudaDeviceReset();
    return status;
}
