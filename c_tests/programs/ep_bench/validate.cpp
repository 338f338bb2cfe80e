// Validation: the expert outputs are a verbatim copy of what dispatch delivered, so every combined
// element is a known multiple of the element that was sent. Outputs are overwritten before, so that
// a row which the library leaves out cannot look right.
#include "programs/ep_bench/validate.h"

#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace ep_bench {
namespace {

using Origin = std::pair<unsigned, unsigned>;  // source rank, token
using Row = std::vector<uint16_t>;
constexpr int kStale = 0xff;  // a NaN in bfloat16 and float32, -1 in the integers

Row RowOf(unsigned hidden, const Origin& origin) {
    return TokenRow(hidden, origin.first, origin.second);
}

// The first `rows` rows of a tensor whose last dimension is the row, beginning with row `first`.
template <typename T>
std::vector<T> DownloadRows(const ncclNDTensor_t& tensor, size_t first, size_t rows) {
    const size_t columns = tensor.sizes[tensor.ndim - 1];
    std::vector<T> host(rows * columns);
    const T* device = static_cast<const T*>(tensor.data) + first * columns;
    ep_download(host.data(), device, host.size() * sizeof(T));
    return host;
}

// How many copies of each token an expert must get. A token that names it twice comes twice.
std::map<Origin, unsigned> ExpectedAtExpert(const Routing& routing, int64_t expert) {
    std::map<Origin, unsigned> copies;
    const Shape& shape = routing.shape();
    for (unsigned source = 0; source < shape.ranks; ++source) {
        for (unsigned token = 0; token < shape.tokens[source]; ++token) {
            const int64_t* ids = routing.ids(source, token);
            const auto named = std::count(ids, ids + shape.top_k, expert);
            if (named > 0) copies[{source, token}] = static_cast<unsigned>(named);
        }
    }
    return copies;
}

// The origin whose row has these bytes; the caller compares the whole row with it.
Origin ReadOrigin(const uint16_t* row, unsigned hidden) {
    const float rank = ep_f32_from_bf16(row[0]) + 128.0f;
    const float token = ep_f32_from_bf16(row[hidden - 2]) + 256 * ep_f32_from_bf16(row[hidden - 1]);
    const auto whole = [](float value) {
        return value >= 0.0f && value < 1e9f ? static_cast<unsigned>(value) : 0u;  // NaN gives 0
    };
    return {whole(rank), whole(token)};
}

// Rows may come in any order of their sources: the first release leaves it open.
uint64_t WrongAtExpert(const Routing& routing, const Session& session, unsigned expert,
                       int32_t counted) {
    const unsigned slots = session.received.sizes[1];
    const unsigned hidden = session.received.sizes[2];
    const int64_t global = int64_t{routing.rank()} * routing.shape().local_experts() + expert;
    std::map<Origin, unsigned> missing = ExpectedAtExpert(routing, global);
    if (counted < 0 || static_cast<unsigned>(counted) > slots) return slots;
    const size_t rows = static_cast<size_t>(counted);
    const Row slab = DownloadRows<uint16_t>(session.received, size_t{expert} * slots, rows);
    uint64_t wrong = 0;
    for (size_t slot = 0; slot < rows; ++slot) {
        const uint16_t* row = &slab[slot * hidden];
        const Origin origin = ReadOrigin(row, hidden);
        const auto expected = missing.find(origin);
        const bool right = expected != missing.end() && expected->second > 0 &&
                           std::equal(row, row + hidden, RowOf(hidden, origin).begin());
        if (right) --expected->second;
        wrong += !right;
    }
    uint64_t left = 0;
    for (const auto& [origin, copies] : missing) left += copies;
    return std::max(wrong, left);
}

uint64_t WrongDispatchLl(const Routing& routing, const Session& session) {
    const unsigned experts = routing.shape().local_experts();
    std::vector<int32_t> counts(experts);
    ep_tensor_download(&session.counter, counts.data());
    uint64_t wrong = 0;
    for (unsigned expert = 0; expert < experts; ++expert) {
        wrong += WrongAtExpert(routing, session, expert, counts[expert]);
    }
    return wrong;
}

// The tokens that have an expert on this rank, in the promised row order.
std::vector<Origin> ExpectedHere(const Routing& routing) {
    std::vector<Origin> rows;
    for (unsigned source = 0; source < routing.shape().ranks; ++source) {
        for (unsigned token = 0; token < routing.shape().tokens[source]; ++token) {
            const std::vector<unsigned> ranks = routing.Destinations(source, token);
            if (std::binary_search(ranks.begin(), ranks.end(), routing.rank())) {
                rows.emplace_back(source, token);
            }
        }
    }
    return rows;
}

// The [top_k] local expert ids of a received row: ascending, then -1.
std::vector<int64_t> LocalIds(const Routing& routing, const Origin& origin) {
    const Shape& shape = routing.shape();
    const int64_t first = int64_t{routing.rank()} * shape.local_experts();
    std::set<int64_t> here;
    for (unsigned k = 0; k < shape.top_k; ++k) {
        const int64_t local = routing.ids(origin.first, origin.second)[k] - first;
        if (local >= 0 && local < shape.local_experts()) here.insert(local);
    }
    std::vector<int64_t> ids(here.begin(), here.end());
    ids.resize(shape.top_k, -1);
    return ids;
}

bool IsRightRowHt(const Routing& routing, const Origin& origin, const uint16_t* row,
                  unsigned hidden, const int64_t* ids, const float* weights) {
    const std::vector<int64_t> expected = LocalIds(routing, origin);
    bool right = std::equal(row, row + hidden, RowOf(hidden, origin).begin());
    for (size_t k = 0; k < expected.size(); ++k) {
        right = right && ids[k] == expected[k] && weights[k] == (expected[k] >= 0 ? 1.0f : 0.0f);
    }
    return right;
}

uint64_t WrongDispatchHt(const Routing& routing, const Session& session) {
    const size_t rows = session.received.sizes[0];
    const unsigned hidden = session.received.sizes[1];
    const size_t top_k = routing.shape().top_k;
    const std::vector<Origin> expected = ExpectedHere(routing);
    if (expected.size() > rows) return expected.size();
    const Row tokens = DownloadRows<uint16_t>(session.received, 0, expected.size());
    const auto ids = DownloadRows<int64_t>(session.received_idx, 0, rows);
    const auto weights = DownloadRows<float>(session.received_weights, 0, rows);
    uint64_t wrong = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
        wrong += !IsRightRowHt(routing, expected[i], &tokens[i * hidden], hidden, &ids[i * top_k],
                               &weights[i * top_k]);
    }
    // A row without an expert tells the caller that the received rows have ended.
    for (size_t i = expected.size(); i < rows; ++i) wrong += ids[i * top_k] != -1;
    return wrong;
}

uint64_t WrongCombine(const Routing& routing, const Session& session, bool low_latency) {
    // Two roundings to bfloat16 at most: the sum on the expert's rank and the sum at home.
    constexpr float kRelative = 1.0f / 128;
    const unsigned hidden = session.combined.sizes[1];
    const unsigned tokens = routing.tokens();
    const Row rows = DownloadRows<uint16_t>(session.combined, 0, tokens);
    uint64_t wrong = 0;
    for (unsigned token = 0; token < tokens; ++token) {
        const unsigned rank = routing.rank();
        const size_t times =
            low_latency ? routing.Entries(rank, token) : routing.Destinations(rank, token).size();
        const Row row = TokenRow(hidden, rank, token);
        bool right = true;
        for (unsigned column = 0; column < hidden; ++column) {
            const float sent = ep_f32_from_bf16(row[column]);
            const float expected = sent * static_cast<float>(times);
            const float got = ep_f32_from_bf16(rows[size_t{token} * hidden + column]);
            right = right && std::abs(got - expected) <= std::abs(expected) * kRelative;
        }
        wrong += !right;
    }
    return wrong;
}

void Synchronise(const EpEnv& env) { EP_REQUIRE_CUDA(cudaStreamSynchronize(env.stream)); }

void CopyReceivedToExperts(const Session& session) {
    const size_t bytes = ep_tensor_bytes(&session.received);
    if (bytes == 0) return;
    EP_REQUIRE_CUDA(cudaMemcpy(session.expert_outputs.data, session.received.data, bytes,
                               cudaMemcpyDeviceToDevice));
    EP_REQUIRE_CUDA(cudaDeviceSynchronize());
}

}  // namespace

Wrong Validate(const EpEnv& env, const Options& options, const Routing& routing, Session* session,
               const Operations& operations) {
    for (const ncclNDTensor_t* output :
         {&session->received, &session->received_weights, &session->received_idx, &session->counter,
          &session->combined}) {
        if (output->data != nullptr) ep_tensor_fill(output, kStale);
    }
    EP_REQUIRE_CUDA(cudaDeviceSynchronize());
    operations.dispatch();
    Synchronise(env);
    CopyReceivedToExperts(*session);
    operations.combine();
    Synchronise(env);

    uint64_t mine[2] = {options.low_latency() ? WrongDispatchLl(routing, *session)
                                              : WrongDispatchHt(routing, *session),
                        WrongCombine(routing, *session, options.low_latency())};
    uint64_t all[2] = {0, 0};
    MPI_Allreduce(mine, all, 2, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    return {all[0], all[1]};
}

}  // namespace ep_bench
