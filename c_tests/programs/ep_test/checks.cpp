// Data and checks of ep_test. Values are chosen so that every sum is exact in bfloat16: the
// comparisons are of bits, without a tolerance.
#include "programs/ep_test/checks.h"

#include <algorithm>
#include <numeric>

namespace ep_test {
namespace {

constexpr unsigned kMarked = 10;          // leading elements of a row that are not zero
constexpr uint16_t kTokenMark = 0x1000;   // raw bits, plus the source rank
constexpr uint16_t kNotANumber = 0x7fff;  // bfloat16
constexpr int64_t kUnusedId = -1;

template <typename T>
std::vector<T> Download(const ncclNDTensor_t& tensor) {
    std::vector<T> host(ep_tensor_elements(&tensor));
    EP_REQUIRE(sizeof(T) == ep_datatype_size(tensor.datatype));
    ep_tensor_download(&tensor, host.data());
    return host;
}

std::vector<uint16_t> TokenRow(unsigned source, unsigned hidden) {
    std::vector<uint16_t> row(hidden, 0);
    std::fill_n(row.begin(), std::min(kMarked, hidden), static_cast<uint16_t>(kTokenMark + source));
    return row;
}

std::vector<uint16_t> ExpertRow(unsigned hidden, unsigned times) {
    std::vector<uint16_t> row(hidden, 0);
    for (unsigned i = 0; i < std::min(kMarked, hidden); ++i) {
        row[i] = ep_bf16_from_f32(static_cast<float>((i + 1) * 2 * times));
    }
    return row;
}

// The packed slots of one expert: as many rows of each source rank as the routing says, in any
// order of the ranks, because the reference leaves that order open.
void CheckExpert(const std::vector<unsigned>& expected, const uint16_t* slab, unsigned hidden) {
    std::vector<unsigned> rows(expected.size(), 0);
    const unsigned total = std::accumulate(expected.begin(), expected.end(), 0u);
    for (unsigned slot = 0; slot < total; ++slot) {
        const uint16_t* row = slab + size_t{slot} * hidden;
        const unsigned source = static_cast<unsigned>(row[0]) - kTokenMark;
        if (!EP_CHECK(source < expected.size())) continue;
        EP_CHECK_EQ_BYTES(row, TokenRow(source, hidden).data(), hidden * sizeof(uint16_t));
        ++rows[source];
    }
    for (size_t source = 0; source < expected.size(); ++source) {
        EP_CHECK_EQ_U64(rows[source], expected[source]);
    }
}

}  // namespace

std::vector<uint16_t> SentTokens(unsigned rank, unsigned tokens, unsigned hidden) {
    const std::vector<uint16_t> row = TokenRow(rank, hidden);
    std::vector<uint16_t> all;
    all.reserve(size_t{tokens} * hidden);
    for (unsigned token = 0; token < tokens; ++token) all.insert(all.end(), row.begin(), row.end());
    return all;
}

std::vector<uint16_t> ExpertOutputsLl(const Routing& routing, unsigned rank, unsigned slots,
                                      unsigned hidden) {
    const std::vector<uint16_t> row = ExpertRow(hidden, 1);
    const unsigned experts = routing.local_experts();
    std::vector<uint16_t> all(size_t{experts} * slots * hidden, kNotANumber);
    for (unsigned expert = 0; expert < experts; ++expert) {
        const std::vector<unsigned> sources = routing.RowsBySource(rank * experts + expert);
        const unsigned valid = std::accumulate(sources.begin(), sources.end(), 0u);
        auto at = all.begin() + static_cast<std::ptrdiff_t>(size_t{expert} * slots * hidden);
        for (unsigned slot = 0; slot < valid; ++slot) at = std::copy(row.begin(), row.end(), at);
    }
    return all;
}

std::vector<uint16_t> ExpertOutputsHt(const Routing& routing, unsigned rank, unsigned rows,
                                      unsigned hidden) {
    const std::vector<uint16_t> row = ExpertRow(hidden, 1);
    std::vector<uint16_t> all(size_t{rows} * hidden, kNotANumber);
    auto at = all.begin();
    const size_t valid = routing.RowsOfRank(rank).size();
    for (size_t i = 0; i < valid; ++i) at = std::copy(row.begin(), row.end(), at);
    return all;
}

void CheckDispatchLl(const Routing& routing, unsigned rank, const ncclNDTensor_t& tokens,
                     const ncclNDTensor_t& counter) {
    const unsigned slots = tokens.sizes[1];
    const unsigned hidden = tokens.sizes[2];
    const std::vector<uint16_t> rows = Download<uint16_t>(tokens);
    const std::vector<int32_t> counts = Download<int32_t>(counter);
    for (unsigned expert = 0; expert < routing.local_experts(); ++expert) {
        const std::vector<unsigned> expected =
            routing.RowsBySource(rank * routing.local_experts() + expert);
        EP_CHECK_EQ_I64(counts[expert], std::accumulate(expected.begin(), expected.end(), 0u));
        CheckExpert(expected, &rows[size_t{expert} * slots * hidden], hidden);
    }
}

void CheckDispatchHt(const Routing& routing, unsigned rank, const ncclNDTensor_t& tokens,
                     const ncclNDTensor_t& weights, const ncclNDTensor_t& ids) {
    const unsigned hidden = tokens.sizes[1];
    const unsigned top_k = routing.top_k();
    const std::vector<uint16_t> got_rows = Download<uint16_t>(tokens);
    const std::vector<float> got_weights = Download<float>(weights);
    const std::vector<int64_t> got_ids = Download<int64_t>(ids);
    const std::vector<Routing::Row> expected = routing.RowsOfRank(rank);
    if (!EP_CHECK(expected.size() <= tokens.sizes[0])) return;

    std::vector<float> expected_weights(got_weights.size(), 0.0f);
    std::vector<int64_t> expected_ids(got_ids.size(), kUnusedId);
    for (size_t i = 0; i < expected.size(); ++i) {
        EP_CHECK_EQ_BYTES(&got_rows[i * hidden], TokenRow(expected[i].source, hidden).data(),
                          hidden * sizeof(uint16_t));
        const size_t used = expected[i].local_ids.size();
        std::copy_n(expected[i].local_ids.begin(), used, &expected_ids[i * top_k]);
        std::fill_n(&expected_weights[i * top_k], used, 1.0f / static_cast<float>(top_k));
    }
    EP_CHECK_EQ_BYTES(got_ids.data(), expected_ids.data(), got_ids.size() * sizeof(int64_t));
    EP_CHECK_EQ_BYTES(got_weights.data(), expected_weights.data(),
                      got_weights.size() * sizeof(float));
}

void CheckCombine(const Routing& routing, unsigned rank, bool low_latency,
                  const ncclNDTensor_t& combined) {
    const unsigned hidden = combined.sizes[1];
    const std::vector<uint16_t> rows = Download<uint16_t>(combined);
    for (unsigned token = 0; token < routing.tokens(); ++token) {
        const unsigned times = low_latency ? 1 : routing.DestinationCount(rank, token);
        EP_CHECK_EQ_BYTES(&rows[size_t{token} * hidden], ExpertRow(hidden, times).data(),
                          hidden * sizeof(uint16_t));
    }
}

void CheckSameBytes(const ncclNDTensor_t& actual, const ncclNDTensor_t& expected) {
    const std::vector<uint16_t> left = Download<uint16_t>(actual);
    const std::vector<uint16_t> right = Download<uint16_t>(expected);
    if (!EP_CHECK_EQ_U64(left.size(), right.size())) return;
    EP_CHECK_EQ_BYTES(left.data(), right.data(), left.size() * sizeof(uint16_t));
}

void CheckAllEqual(const ncclNDTensor_t& floats, float expected) {
    const std::vector<float> got = Download<float>(floats);
    const std::vector<float> same(got.size(), expected);
    EP_CHECK_EQ_BYTES(got.data(), same.data(), got.size() * sizeof(float));
}

}  // namespace ep_test
