// The model of moe_layer and its dense computation; see model.h.
#include "programs/moe_layer/model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "harness/harness.h"

namespace moe {
namespace {

// Every weight and every embedding is a function of a key (seed, kind, index), never of the order in which ranks ask
// for it. So one rank can rebuild any part of the model and check the others.

// The random sequence of one key of three numbers.
class RandomStream {
   public:
    RandomStream(uint64_t a, uint64_t b, uint64_t c) : state_(ep_mix(a, b, c)) {}

    // Uniform in [-limit, limit).
    float Uniform(float limit) { return limit * static_cast<float>(2.0 * ep_random_unit(&state_) - 1.0); }

    // Standard normal, by the Box-Muller transform; 1 - u is never 0.
    float Normal() {
        const double radius = std::sqrt(-2.0 * std::log(1.0 - ep_random_unit(&state_)));
        return static_cast<float>(radius * std::cos(kTwoPi * ep_random_unit(&state_)));
    }

   private:
    static constexpr double kTwoPi = 6.283185307179586;

    uint64_t state_;
};

// Keeps the random numbers of the parts of the model apart.
enum Part : uint64_t { kWord = 1, kPosition, kRouter, kExpertW1, kExpertW2 };

uint64_t KeyOf(const ModelConfig& config, Part part, size_t layer) { return ep_mix(config.seed, part, layer); }

// Uniform with variance gain^2 / columns, so that its product with a column of mean square one has mean square gain^2.
std::vector<float> RandomMatrix(RandomStream stream, size_t rows, size_t columns, float gain) {
    const float limit = gain * std::sqrt(3.0f / static_cast<float>(columns));
    std::vector<float> matrix(rows * columns);
    for (float& element : matrix) element = stream.Uniform(limit);
    return matrix;
}

// Eight partial sums, because the compiler may not reorder a single one to use vector registers.
float Dot(const float* a, const float* b, size_t count) {
    constexpr size_t kLanes = 8;
    float partial[kLanes] = {};
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        for (size_t lane = 0; lane < kLanes; ++lane) partial[lane] += a[i + lane] * b[i + lane];
    }
    float sum = std::accumulate(partial, partial + kLanes, 0.0f);
    for (; i < count; ++i) sum += a[i] * b[i];
    return sum;
}

float Round(float value, Precision precision) {
    return precision == Precision::kBf16 ? ep_f32_from_bf16(ep_bf16_from_f32(value)) : value;
}

float Silu(float value) { return value / (1.0f + std::exp(-value)); }

// Scales a row to a mean square of one.
std::vector<uint16_t> RmsNormToBf16(const std::vector<float>& row) {
    const float mean_square = Dot(row.data(), row.data(), row.size()) / row.size();
    const float scale = 1.0f / std::sqrt(mean_square + 1e-6f);
    std::vector<uint16_t> normalised(row.size());
    std::transform(row.begin(), row.end(), normalised.begin(),
                   [&](float value) { return ep_bf16_from_f32(value * scale); });
    return normalised;
}

}  // namespace

std::vector<float> ToFloat(const uint16_t* row, size_t count) {
    std::vector<float> values(count);
    std::transform(row, row + count, values.begin(), ep_f32_from_bf16);
    return values;
}

std::vector<uint16_t> Embed(const ModelConfig& config, const std::vector<uint64_t>& tokens, size_t first_position) {
    std::vector<uint16_t> rows;
    for (size_t t = 0; t < tokens.size(); ++t) {
        RandomStream word(config.seed, kWord, tokens[t]);
        RandomStream position(config.seed, kPosition, first_position + t);
        std::vector<float> row(config.hidden);
        for (float& element : row) element = word.Normal() + 0.5f * position.Normal();
        const std::vector<uint16_t> normalised = RmsNormToBf16(row);
        rows.insert(rows.end(), normalised.begin(), normalised.end());
    }
    return rows;
}

Router::Router(const ModelConfig& config, size_t layer)
    : config_(config),
      matrix_(RandomMatrix(RandomStream(KeyOf(config, kRouter, layer), 0, 0), config.num_experts,
                           config.hidden, 1.0f)) {}

std::vector<float> Router::Probabilities(const std::vector<float>& x) const {
    std::vector<float> values(config_.num_experts);
    for (size_t e = 0; e < values.size(); ++e) {
        values[e] = Dot(&matrix_[e * config_.hidden], x.data(), config_.hidden);
    }
    const float largest = *std::max_element(values.begin(), values.end());
    for (float& value : values) value = std::exp(value - largest);
    const float sum = std::accumulate(values.begin(), values.end(), 0.0f);
    for (float& value : values) value /= sum;
    return values;
}

Routing Router::Route(const std::vector<uint16_t>& rows) const {
    Routing routing;
    std::vector<int64_t> order(config_.num_experts);
    for (size_t begin = 0; begin < rows.size(); begin += config_.hidden) {
        const std::vector<float> probability = Probabilities(ToFloat(&rows[begin], config_.hidden));
        std::iota(order.begin(), order.end(), 0);
        const auto selected_end = order.begin() + static_cast<std::ptrdiff_t>(config_.top_k);
        std::partial_sort(order.begin(), selected_end, order.end(), [&](int64_t a, int64_t b) {
            return probability[a] != probability[b] ? probability[a] > probability[b] : a < b;
        });
        float selected_sum = 0.0f;
        for (auto id = order.begin(); id != selected_end; ++id) selected_sum += probability[*id];
        for (auto id = order.begin(); id != selected_end; ++id) {
            routing.expert_ids.push_back(*id);
            routing.weights.push_back(probability[*id] / selected_sum);
        }
    }
    return routing;
}

Expert::Expert(const ModelConfig& config, size_t layer, size_t expert_id)
    : config_(config),
      w1_(RandomMatrix(RandomStream(KeyOf(config, kExpertW1, layer), expert_id, 0), config.ffn, config.hidden, 1.0f)),
      w2_(RandomMatrix(RandomStream(KeyOf(config, kExpertW2, layer), expert_id, 0), config.hidden, config.ffn, 2.0f)) {}

std::vector<float> Expert::Forward(const std::vector<float>& x, Precision precision) const {
    std::vector<float> activation(config_.ffn);
    for (size_t j = 0; j < config_.ffn; ++j) {
        const float inner = Dot(&w1_[j * config_.hidden], x.data(), config_.hidden);
        activation[j] = Round(Silu(inner), precision);
    }
    std::vector<float> y(config_.hidden);
    for (size_t i = 0; i < config_.hidden; ++i) {
        y[i] = Round(Dot(&w2_[i * config_.ffn], activation.data(), config_.ffn), precision);
    }
    return y;
}

std::vector<uint16_t> NextLayerInput(const ModelConfig& config, const std::vector<uint16_t>& input,
                                     const std::vector<uint16_t>& output) {
    std::vector<uint16_t> next;
    for (size_t begin = 0; begin < input.size(); begin += config.hidden) {
        std::vector<float> row = ToFloat(&input[begin], config.hidden);
        for (size_t i = 0; i < row.size(); ++i) row[i] += ep_f32_from_bf16(output[begin + i]);
        const std::vector<uint16_t> normalised = RmsNormToBf16(row);
        next.insert(next.end(), normalised.begin(), normalised.end());
    }
    return next;
}

// ---- The yardstick -----------------------------------------------------------------------------

// Expert by expert, so that only one expert's matrices are in memory at a time.
DenseResult DenseForward(const ModelConfig& config, size_t layer, const std::vector<uint16_t>& rows) {
    const Routing routing = Router(config, layer).Route(rows);
    std::vector<float> sums(rows.size(), 0.0f);
    std::vector<float> sums_of_absolutes(rows.size(), 0.0f);
    for (size_t e = 0; e < config.num_experts; ++e) {
        const Expert expert(config, layer, e);
        for (size_t entry = 0; entry < routing.expert_ids.size(); ++entry) {
            if (routing.expert_ids[entry] != static_cast<int64_t>(e)) continue;
            const size_t begin = entry / config.top_k * config.hidden;
            const std::vector<float> y = expert.Forward(ToFloat(&rows[begin], config.hidden), Precision::kFp32);
            for (size_t i = 0; i < config.hidden; ++i) {
                sums[begin + i] += routing.weights[entry] * y[i];
                sums_of_absolutes[begin + i] += routing.weights[entry] * std::fabs(y[i]);
            }
        }
    }
    DenseResult result;
    for (size_t begin = 0; begin < rows.size(); begin += config.hidden) {
        const auto row = sums_of_absolutes.begin() + static_cast<std::ptrdiff_t>(begin);
        result.sizes.push_back(*std::max_element(row, row + static_cast<std::ptrdiff_t>(config.hidden)));
    }
    result.rows = std::move(sums);
    return result;
}

double MaxRelativeError(const DenseResult& dense, const std::vector<uint16_t>& actual) {
    constexpr double kNotComparable = std::numeric_limits<double>::infinity();
    if (actual.size() != dense.rows.size() || dense.rows.empty()) return kNotComparable;
    const size_t hidden = dense.rows.size() / dense.sizes.size();
    double largest = 0.0;
    for (size_t i = 0; i < actual.size(); ++i) {
        const double difference = std::fabs(ep_f32_from_bf16(actual[i]) - dense.rows[i]);
        const double error = difference / dense.sizes[i / hidden];
        if (!std::isfinite(error)) return kNotComparable;
        largest = std::max(largest, error);
    }
    return largest;
}

double MaxRelativeErrorBound(bool fp8) { return (fp8 ? 1.0 + 0x1p-4 : 1.0) * std::pow(1.0 + 0x1p-8, 4) - 1.0; }

void SwapFirstAndLastRow(const ModelConfig& config, std::vector<uint16_t>* rows) {
    const auto hidden = static_cast<std::ptrdiff_t>(config.hidden);
    std::swap_ranges(rows->begin(), rows->begin() + hidden, rows->end() - hidden);
}

}  // namespace moe
