// Low latency (LL) in C++, with exceptions: one MoE layer of a decode step.
//
//   out[t] = sum over the experts e of token t of weight(t, e) * scale(e) * x[t]
//
// Multiplying by scale(e) stands for an expert's network. It is done on the host, with numbers so
// small that bfloat16 holds every result exactly.
#include <nccl_ep.hpp>

#include "device_array.hpp"

namespace {

using nccl_ep::Tensor;

constexpr unsigned kHidden = 64, kTopK = 2, kMaxTokens = 32, kExpertsPerRank = 2;

float TokenValue(int rank, unsigned t, unsigned i) {
    return static_cast<float>((static_cast<unsigned>(rank) + 2 * t + i) % 16);
}
float ScaleOf(std::int64_t expert) { return static_cast<float>(1 + expert % 4); }

// What this rank sends: each rank has its own number of tokens, 0 is fine.
struct Batch {
    explicit Batch(const Ranks& ranks)
        : num(kMaxTokens - static_cast<unsigned>(ranks.rank) % kMaxTokens) {
        const std::int64_t num_experts = ranks.size * std::int64_t{kExpertsPerRank};
        for (unsigned t = 0; t < num; ++t) {
            for (unsigned i = 0; i < kHidden; ++i) {
                tokens.push_back(to_bf16(TokenValue(ranks.rank, t, i)));
            }
            ids.insert(ids.end(),
                       {(ranks.rank + t) % num_experts, (ranks.rank + t + 1) % num_experts});
            weights.insert(weights.end(), {0.25f, 0.75f});
        }
    }

    unsigned num;
    std::vector<std::uint16_t> tokens;
    std::vector<std::int64_t> ids;
    std::vector<float> weights;
};

// The rows of local expert e are its slots 0 to counts[e] - 1.
void ApplyExperts(std::vector<std::uint16_t>& rows, const std::vector<std::int32_t>& counts,
                  int rank) {
    const std::size_t elements = rows.size() / kExpertsPerRank;
    for (unsigned e = 0; e < kExpertsPerRank; ++e) {
        const float scale = ScaleOf(rank * std::int64_t{kExpertsPerRank} + e);
        for (std::size_t n = 0; n < static_cast<std::size_t>(counts[e]) * kHidden; ++n) {
            std::uint16_t& element = rows[e * elements + n];
            element = to_bf16(scale * from_bf16(element));
        }
    }
}

bool IsRight(const Batch& batch, const std::vector<std::uint16_t>& combined, int rank) {
    for (unsigned n = 0; n < batch.num * kHidden; ++n) {
        const unsigned t = n / kHidden;
        float factor = 0;
        for (unsigned k = t * kTopK; k < (t + 1) * kTopK; ++k) {
            factor += batch.weights[k] * ScaleOf(batch.ids[k]);
        }
        if (from_bf16(combined[n]) != factor * TokenValue(rank, t, n % kHidden)) return false;
    }
    return true;
}

// A group serves all layers of a model and holds the buffers that they share.
nccl_ep::Group CreateGroup(const Ranks& ranks) {
    auto config = nccl_ep::group_config(NCCL_EP_ALGO_LOW_LATENCY);
    config.num_experts = static_cast<unsigned>(ranks.size) * kExpertsPerRank;
    config.max_tokens_per_rank = kMaxTokens;
    config.token_size_bytes = kHidden * sizeof(std::uint16_t);
    return nccl_ep::Group::create(ranks.comm, config, ranks.stream).value();
}

bool RunLayer(const Ranks& ranks, const nccl_ep::Group& group) {
    // Any device memory will do; tensors are views of it.
    const Batch batch(ranks);
    const unsigned num_slots = static_cast<unsigned>(ranks.size) * kMaxTokens;
    const std::size_t num_elements = std::size_t{kExpertsPerRank} * num_slots * kHidden;
    const DeviceArray<std::uint16_t> tokens(batch.tokens), combined(batch.tokens.size());
    const DeviceArray<std::int64_t> ids(batch.ids);
    const DeviceArray<float> weights(batch.weights);
    const DeviceArray<std::int32_t> counts(kExpertsPerRank);
    DeviceArray<std::uint16_t> rows(num_elements);
    const Tensor received =
        Tensor::tokens(rows.data(), ncclBfloat16, {kExpertsPerRank, num_slots, kHidden});

    auto handle = nccl_ep::Handle::create(group, Tensor::topk_idx(ids.data(), {batch.num, kTopK}),
                                          {}, ranks.stream)
                      .value();
    handle
        .dispatch(Tensor::tokens(tokens.data(), ncclBfloat16, {batch.num, kHidden}), received,
                  Tensor::expert_counts(counts.data(), kExpertsPerRank), ranks.stream)
        .value();

    auto results = rows.Read(ranks.stream);
    ApplyExperts(results, counts.Read(ranks.stream), ranks.rank);
    rows.Write(results);

    handle
        .combine(received, Tensor::tokens(combined.data(), ncclBfloat16, {batch.num, kHidden}),
                 Tensor::topk_weights(weights.data(), {batch.num, kTopK}), ranks.stream)
        .value();
    return IsRight(batch, combined.Read(ranks.stream), ranks.rank);
}

}  // namespace

int main(int argc, char** argv) {
    Ranks ranks = example_start(&argc, &argv);
    // Outside of the try block, as its destructor waits for the other ranks, which have not failed.
    nccl_ep::Group group;
    bool right = false;
    try {
        group = CreateGroup(ranks);
        right = RunLayer(ranks, group);
    } catch (const nccl_ep::Error& error) {
        example_fail(error.call(), error.what());
    }
    group = nccl_ep::Group();  // before the communicator goes
    return example_finish(&ranks, right);
}
