// High throughput (HT) in C++, without exceptions: the forward of one MoE layer.
//
//   out[t] = sum over the experts e of token t of weight(t, e) * scale(e) * x[t]
//
// Multiplying by scale(e) stands for an expert's network. It is done on the host, with numbers so
// small that bfloat16 holds every result exactly.
#include <nccl_ep.hpp>

#include "device_array.hpp"

namespace {

using nccl_ep::Result;
using nccl_ep::Tensor;

constexpr unsigned kHidden = 64, kTopK = 2, kTokens = 32, kExpertsPerRank = 2;

float TokenValue(int rank, unsigned t, unsigned i) {
    return static_cast<float>((static_cast<unsigned>(rank) + 2 * t + i) % 16);
}
float ScaleOf(std::int64_t expert) { return static_cast<float>(1 + expert % 4); }
std::int64_t ExpertOf(const Ranks& ranks, unsigned t, unsigned k) {
    return (ranks.rank + t + k) % (ranks.size * std::int64_t{kExpertsPerRank});
}
float WeightOf(unsigned k) { return k == 0 ? 0.25f : 0.75f; }

// What this rank sends, in device memory.
struct Batch {
    DeviceArray<std::uint16_t> tokens{kTokens * kHidden}, combined{kTokens * kHidden};
    DeviceArray<std::int64_t> ids{kTokens * kTopK};
    DeviceArray<float> weights{kTokens * kTopK};

    explicit Batch(const Ranks& ranks) {
        std::vector<std::uint16_t> values;
        std::vector<std::int64_t> experts;
        std::vector<float> factors;
        for (unsigned t = 0; t < kTokens; ++t) {
            for (unsigned i = 0; i < kHidden; ++i) {
                values.push_back(to_bf16(TokenValue(ranks.rank, t, i)));
            }
            for (unsigned k = 0; k < kTopK; ++k) {
                experts.push_back(ExpertOf(ranks, t, k));
                factors.push_back(WeightOf(k));
            }
        }
        tokens.Write(values);
        ids.Write(experts);
        weights.Write(factors);
    }
};

// What this rank receives: a row for each token with experts here, with their local ids, then -1.
struct Rows {
    explicit Rows(unsigned count)
        : num(count), tokens(count * kHidden), ids(count * kTopK), weights(count * kTopK) {}

    unsigned num;
    DeviceArray<std::uint16_t> tokens;
    DeviceArray<std::int64_t> ids;
    DeviceArray<float> weights;

    Tensor view() const { return Tensor::tokens(tokens.data(), ncclBfloat16, {num, kHidden}); }
};

// In high throughput the rank of the experts applies the weights and sums.
void ApplyExperts(Rows& rows, const Ranks& ranks) {
    auto values = rows.tokens.Read(ranks.stream);
    const auto ids = rows.ids.Read(ranks.stream);
    const auto weights = rows.weights.Read(ranks.stream);
    for (unsigned row = 0; row < rows.num; ++row) {
        float factor = 0;
        for (unsigned n = row * kTopK; n < (row + 1) * kTopK && ids[n] >= 0; ++n) {
            factor += weights[n] * ScaleOf(ranks.rank * std::int64_t{kExpertsPerRank} + ids[n]);
        }
        for (unsigned n = row * kHidden; n < (row + 1) * kHidden; ++n) {
            values[n] = to_bf16(factor * from_bf16(values[n]));
        }
    }
    rows.tokens.Write(values);
}

// A failure is handed on as it came: Result<> takes the error of any other Result.
Result<> RunLayer(const Ranks& ranks, const nccl_ep::Group& group, const Batch& batch) {
    const Tensor tokens = Tensor::tokens(batch.tokens.data(), ncclBfloat16, {kTokens, kHidden});
    const Tensor ids = Tensor::topk_idx(batch.ids.data(), {kTokens, kTopK});
    const Tensor weights = Tensor::topk_weights(batch.weights.data(), {kTokens, kTopK});

    auto handle = nccl_ep::Handle::create(group, ids, {}, ranks.stream);
    if (!handle) return handle.error();
    // Waits until the exchange of the routing is through.
    const auto num_rows = handle->num_recv_tokens();
    if (!num_rows) return num_rows.error();

    Rows rows(*num_rows);
    const Tensor row_ids = Tensor::topk_idx(rows.ids.data(), {rows.num, kTopK});
    const Tensor row_weights = Tensor::topk_weights(rows.weights.data(), {rows.num, kTopK});
    auto done = handle->dispatch({tokens, ids, weights}, {rows.view(), row_ids, row_weights}, {},
                                 ranks.stream);
    if (!done) return done;
    ApplyExperts(rows, ranks);
    const Tensor combined = Tensor::tokens(batch.combined.data(), ncclBfloat16, {kTokens, kHidden});
    done = handle->combine(rows.view(), combined, {}, ranks.stream);
    // It reads the rows, which end with this function.
    TRY_CUDA(cudaStreamSynchronize(ranks.stream));
    return done;
}

bool IsRight(const Ranks& ranks, const Batch& batch) {
    const auto combined = batch.combined.Read(ranks.stream);
    for (unsigned n = 0; n < kTokens * kHidden; ++n) {
        const unsigned t = n / kHidden;
        float factor = 0;
        for (unsigned k = 0; k < kTopK; ++k) factor += WeightOf(k) * ScaleOf(ExpertOf(ranks, t, k));
        if (from_bf16(combined[n]) != factor * TokenValue(ranks.rank, t, n % kHidden)) return false;
    }
    return true;
}

}  // namespace

int main(int argc, char** argv) {
    Ranks ranks = example_start(&argc, &argv);
    auto config = nccl_ep::group_config(NCCL_EP_ALGO_HIGH_THROUGHPUT);
    config.num_experts = static_cast<unsigned>(ranks.size) * kExpertsPerRank;
    config.max_tokens_per_rank = NCCL_EP_AUTO;  // each handle finds out how many rows it receives
    config.token_size_bytes = kHidden * sizeof(std::uint16_t);
    auto group = nccl_ep::Group::create(ranks.comm, config, ranks.stream);
    if (!group) example_fail(group.error().call(), group.error().what());

    const Batch batch(ranks);
    const auto done = RunLayer(ranks, *group, batch);
    if (!done) example_fail(done.error().call(), done.error().what());
    const bool right = IsRight(ranks, batch);
    // Before the communicator goes.
    if (auto gone = group->destroy(ranks.stream); !gone) {
        example_fail(gone.error().call(), gone.error().what());
    }
    return example_finish(&ranks, right);
}
