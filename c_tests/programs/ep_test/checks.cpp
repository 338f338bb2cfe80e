// Data and checks of ep_test; see checks.h.
#include "programs/ep_test/checks.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "reference/ht.h"
#include "reference/ll.h"

namespace ep_test {
namespace {

constexpr uint64_t kSeedOfTokens = 1;
constexpr uint64_t kSeedOfResults = 2;
constexpr uint64_t kSeedOfGradients = 3;
constexpr int kPoison = 0xff;  // NaN in bfloat16 and float32, -1 in the integers

template <typename T>
std::vector<T> Poisoned(size_t elements) {
    std::vector<T> host(elements);
    std::memset(host.data(), kPoison, elements * sizeof(T));
    return host;
}

// Compares a whole tensor with what `expect` makes of poison.
template <typename T, typename Expect>
void Check(const ncclNDTensor_t& tensor, Expect expect) {
    EP_REQUIRE(sizeof(T) == ep_datatype_size(tensor.datatype));
    std::vector<T> expected = Poisoned<T>(ep_tensor_elements(&tensor));
    std::vector<T> actual(expected.size());
    ep_tensor_download(&tensor, actual.data());
    expect(expected.data());
    EP_CHECK_EQ_BYTES(actual.data(), expected.data(), actual.size() * sizeof(T));
}

}  // namespace

void Poison(const ncclNDTensor_t& output) { ep_tensor_fill(&output, kPoison); }

Exchange::Exchange(ref::Routing routing, unsigned rank, unsigned hidden)
    : routing_(std::move(routing)),
      rank_(rank),
      tokens_{ncclBfloat16, hidden, kSeedOfTokens, true},
      results_{ncclBfloat16, hidden, kSeedOfResults, false} {}

std::vector<uint16_t> Exchange::Tokens() const {
    std::vector<uint16_t> rows(size_t{tokens()} * tokens_.hidden);
    ref_rows_fill(&tokens_, rank_, 0, tokens(), rows.data());
    return rows;
}

std::vector<uint16_t> Exchange::ResultsLl() const {
    const size_t rows = ref_layout_rows(layout());
    std::vector<uint16_t> results = Poisoned<uint16_t>(rows * results_.hidden);
    ref_ll_results(routing_.get(), rank_, layout(), &results_, results.data());
    return results;
}

std::vector<uint16_t> Exchange::ResultsHt(unsigned rows) const {
    std::vector<uint16_t> results = Poisoned<uint16_t>(size_t{rows} * results_.hidden);
    ref_rows_fill(&results_, rank_, 0, ref_ht_received(routing_.get(), rank_), results.data());
    return results;
}

std::vector<float> Exchange::Gradients(unsigned rows) const {
    const unsigned columns = routing_->top_k;
    std::vector<float> gradients = Poisoned<float>(size_t{rows} * columns);
    const size_t used = size_t{ref_ht_received(routing_.get(), rank_)} * columns;
    for (size_t i = 0; i < used; ++i) gradients[i] = ref_weight(kSeedOfGradients, rank_, i);
    return gradients;
}

void Exchange::CheckDispatchLl(const ncclNDTensor_t& tokens, const ncclNDTensor_t& counter) const {
    std::vector<int32_t> counts(ep_tensor_elements(&counter));
    Check<uint16_t>(
        tokens, [&](uint16_t* out) { ref_ll_dispatch(routing_.get(), rank_, layout(), &tokens_, out, counts.data()); });
    Check<int32_t>(counter, [&](int32_t* out) { std::copy(counts.begin(), counts.end(), out); });
}

void Exchange::CheckTokensHt(const ncclNDTensor_t& tokens) const {
    Check<uint16_t>(
        tokens, [&](uint16_t* out) { ref_ht_dispatch_tokens(routing_.get(), rank_, &tokens_, tokens.sizes[0], out); });
}

void Exchange::CheckRoutingHt(const ncclNDTensor_t& ids, const ncclNDTensor_t& weights) const {
    std::vector<float> expected(ep_tensor_elements(&weights));
    Check<int64_t>(ids, [&](int64_t* out) {
        ref_ht_dispatch_routing(routing_.get(), routing_.get(), rank_, ids.sizes[0], out, expected.data());
    });
    Check<float>(weights, [&](float* out) { std::copy(expected.begin(), expected.end(), out); });
}

void Exchange::CheckCombineLl(const ncclNDTensor_t& combined) const {
    Check<uint16_t>(combined, [&](uint16_t* out) {
        ref_ll_combine(routing_.get(), routing_.get(), rank_, layout(), &results_, out);
    });
}

void Exchange::CheckCombineHt(const ncclNDTensor_t& combined) const {
    Check<uint16_t>(combined, [&](uint16_t* out) { ref_ht_combine(routing_.get(), rank_, &results_, out); });
}

void Exchange::CheckGradients(const ncclNDTensor_t& gradients) const {
    Check<float>(gradients,
                 [&](float* out) { ref_ht_gradients(routing_.get(), rank_, routing_->top_k, kSeedOfGradients, out); });
}

}  // namespace ep_test
