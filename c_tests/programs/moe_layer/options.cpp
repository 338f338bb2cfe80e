// The command line of moe_layer; see options.h.
#include "programs/moe_layer/options.h"

#include "harness/options.hpp"

namespace moe {

const char kUsage[] =
    "usage: mpirun -np <ranks> moe_layer [options]\n"
    "  --algorithm ll|ht|both  mode of the library (both)\n"
    "  --tokens N              tokens of the last rank; the others have fewer (48)\n"
    "  --hidden N              width of a token, a multiple of 8 (256)\n"
    "  --ffn N                 inner width of an expert (512)\n"
    "  --experts N             number of experts, a multiple of the ranks (32 or the next)\n"
    "  --top-k N               experts of each token, at most 32 (4)\n"
    "  --layers N              layers, each with a router and experts of its own (2)\n"
    "  --seed N                seed of all parameters (1)\n"
    "  --fp8                   dispatches cast the rows to e4m3, with a scale for 128 elements\n"
    "  --picture               a table of the rows from each rank to each, of the first layer\n";

namespace {

constexpr size_t kMaxTopK = 32;         // limit of the library
constexpr size_t kDefaultExperts = 32;
constexpr unsigned kLargest = 1 << 24;  // keeps every size far from the limits of 32-bit counts

ep::Option Count(const char* name, size_t* number) {
    return {0, name, true, [=](const std::string& text) {
                const auto read = ep::ParseUnsigned(text, 1, kLargest);
                if (read) *number = *read;
                return read ? "" : "--" + std::string(name) + ": expected a whole number from 1 to " +
                                       std::to_string(kLargest) + ", got \"" + text + "\"";
            }};
}

std::string ReadAlgorithm(const std::string& text, Options* options) {
    options->low_latency = text == "ll" || text == "both";
    options->high_throughput = text == "ht" || text == "both";
    if (options->low_latency || options->high_throughput) return "";
    return "--algorithm is ll, ht or both, not \"" + text + "\"";
}

std::string CheckRules(const Options& options, size_t num_ranks) {
    const ModelConfig& model = options.model;
    if (model.hidden % 8 != 0) return "--hidden must be a multiple of 8, as rows have a multiple of 16 bytes";
    if (options.fp8 && model.hidden % 16 != 0) {
        return "--hidden must be a multiple of 16 with --fp8, as rows have a multiple of 16 bytes";
    }
    if (model.num_experts % num_ranks != 0) {
        return "--experts must be a multiple of the number of ranks, " + std::to_string(num_ranks);
    }
    if (model.top_k > model.num_experts || model.top_k > kMaxTopK) {
        return "--top-k is at most --experts and at most " + std::to_string(kMaxTopK);
    }
    const bool can_swap = options.max_tokens_per_rank >= 2;
    return can_swap ? "" : "--tokens must be 2 or more: the check swaps the results of two tokens";
}

}  // namespace

std::string ParseOptions(int argc, char** argv, size_t num_ranks, Options* options) {
    ModelConfig* model = &options->model;
    const auto algorithm = [=](const std::string& text) { return ReadAlgorithm(text, options); };
    const std::string refusal = ep::ParseOptions(
        argc, argv,
        {{0, "algorithm", true, algorithm}, Count("tokens", &options->max_tokens_per_rank),
         Count("hidden", &model->hidden), Count("ffn", &model->ffn), Count("experts", &model->num_experts),
         Count("top-k", &model->top_k), Count("layers", &model->num_layers), Count("seed", &model->seed),
         ep::Switch(0, "fp8", &options->fp8), ep::Switch(0, "picture", &options->picture),
         ep::Switch(0, "help", &options->help)});
    if (!refusal.empty()) return refusal;
    size_t& num_experts = model->num_experts;
    if (num_experts == 0) num_experts = (kDefaultExperts + num_ranks - 1) / num_ranks * num_ranks;
    return options->help ? "" : CheckRules(*options, num_ranks);
}

}  // namespace moe
