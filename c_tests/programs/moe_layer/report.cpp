// What moe_layer prints; see report.h.

#include "programs/moe_layer/report.h"

#include <cstdio>
#include <numeric>

namespace moe {
namespace {

// Who sent how many rows to whom: a line for each source, a column for each rank of experts.
void PrintRows(const LayerReport& report) {
    const size_t num_ranks = report.received.size();
    std::printf("\n  rows      ");
    for (size_t rank = 0; rank < num_ranks; ++rank) std::printf(" to %-2zu", rank);
    for (size_t i = 0; i < report.sent.size(); ++i) {
        if (i % num_ranks == 0) std::printf("\n  from %-5zu", i / num_ranks);
        const auto rows = static_cast<unsigned long long>(report.sent[i]);
        if (rows == 0) std::printf("%6s", ".");
        if (rows != 0) std::printf("%6llu", rows);
    }
    std::printf("\n\n");
}

}  // namespace

void PrintModel(const EpEnv& env, const Options& options, const std::string& text_path, uint64_t num_tokens) {
    const ModelConfig& model = options.model;
    std::printf(
        "moe_layer (%s): ranks %d, layers %zu, hidden %zu, ffn %zu, experts %zu, top-k %zu, "
        "seed %llu%s\n%llu tokens from %s\n",
        ep_on_hostsim() ? "host" : "gpu", env.size, model.num_layers, model.hidden, model.ffn, model.num_experts,
        model.top_k, static_cast<unsigned long long>(model.seed), options.fp8 ? ", dispatch in e4m3" : "",
        static_cast<unsigned long long>(num_tokens), text_path.c_str());
    std::fflush(stdout);
}

void PrintLayer(const Options& options, const LayerReport& report) {
    const bool low_latency = report.algorithm == NCCL_EP_ALGO_LOW_LATENCY;
    const auto rows = static_cast<unsigned long long>(
        std::accumulate(report.received.begin(), report.received.end(), uint64_t{0}));
    std::printf(
        "%-16s layer %zu: %llu rows to experts; max relative error %.5f, bound %.5f; with two results swapped %.2f\n",
        low_latency ? "low latency," : "high throughput,", report.layer, rows, report.error,
        report.bound, report.error_if_swapped);
    if (options.picture && report.layer == 0) PrintRows(report);
    std::fflush(stdout);
}

}  // namespace moe
