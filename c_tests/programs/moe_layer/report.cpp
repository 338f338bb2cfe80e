// What moe_layer prints; see report.h.

#include "programs/moe_layer/report.h"

#include <cstdio>
#include <numeric>

namespace moe {
namespace {

// Escapes only characters that a path may contain and a JSON string may not.
std::string JsonString(const std::string& text) {
    std::string quoted = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') quoted += '\\';
        if (static_cast<unsigned char>(c) >= ' ') quoted += c;
    }
    return quoted + "\"";
}

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

void PrintModel(const EpEnv& env, const Options& options, const std::string& text_path,
                uint64_t num_tokens) {
    const ModelConfig& model = options.model;
    const char* backend = ep_on_hostsim() ? "host" : "gpu";
    const auto seed = static_cast<unsigned long long>(model.seed);
    const auto tokens = static_cast<unsigned long long>(num_tokens);
    if (options.json) {
        std::printf(
            "{\"program\": \"moe_layer\", \"backend\": \"%s\", \"ranks\": %d, \"layers\": %zu, "
            "\"hidden\": %zu, \"ffn\": %zu, \"experts\": %zu, \"top_k\": %zu, \"seed\": %llu, "
            "\"tokens\": %llu, \"text\": %s}\n",
            backend, env.size, model.num_layers, model.hidden, model.ffn, model.num_experts,
            model.top_k, seed, tokens, JsonString(text_path).c_str());
    } else {
        std::printf(
            "moe_layer (%s): ranks %d, layers %zu, hidden %zu, ffn %zu, experts %zu, top-k %zu, "
            "seed %llu%s\n%llu tokens from %s\n",
            backend, env.size, model.num_layers, model.hidden, model.ffn, model.num_experts,
            model.top_k, seed, options.fp8 ? ", dispatch in e4m3" : "", tokens, text_path.c_str());
    }
    std::fflush(stdout);
}

void PrintLayer(const Options& options, const LayerReport& report) {
    const bool low_latency = report.algorithm == NCCL_EP_ALGO_LOW_LATENCY;
    const auto rows = static_cast<unsigned long long>(
        std::accumulate(report.received.begin(), report.received.end(), uint64_t{0}));
    if (options.json) {
        std::printf(
            "{\"algorithm\": \"%s\", \"layer\": %zu, \"rows_received\": %llu, "
            "\"max_relative_error\": %.6g, \"bound\": %.6g, \"error_if_swapped\": %.6g}\n",
            low_latency ? "ll" : "ht", report.layer, rows, report.error, report.bound,
            report.error_if_swapped);
    } else {
        std::printf(
            "%-16s layer %zu: %llu rows to experts; max relative error %.5f, bound %.5f; "
            "with two results swapped %.2f\n",
            low_latency ? "low latency," : "high throughput,", report.layer, rows, report.error,
            report.bound, report.error_if_swapped);
    }
    if (options.picture && report.layer == 0 && !options.json) PrintRows(report);
    std::fflush(stdout);
}

}  // namespace moe
