// The dense computation and the comparison with it; see dense.h.

#include "programs/moe_layer/dense.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "harness/harness.h"

namespace moe {

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
