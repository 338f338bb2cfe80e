// The command line of moe_layer; see options.h.

#include "programs/moe_layer/options.h"

#include <getopt.h>

#include <cerrno>
#include <cstdlib>

namespace moe {
namespace {

constexpr size_t kMaxTopK = 32;       // limit of the library
constexpr size_t kRowAlignment = 16;  // bytes; rule of the library for a row of tokens
constexpr size_t kDefaultExperts = 32;
constexpr size_t kLargest = 1 << 24;  // keeps every size far from the limits of 32-bit counts

const option kLongOptions[] = {{"algorithm", required_argument, nullptr, 'a'},
                               {"tokens", required_argument, nullptr, 't'},
                               {"hidden", required_argument, nullptr, 'd'},
                               {"ffn", required_argument, nullptr, 'f'},
                               {"experts", required_argument, nullptr, 'e'},
                               {"top-k", required_argument, nullptr, 'k'},
                               {"layers", required_argument, nullptr, 'l'},
                               {"seed", required_argument, nullptr, 's'},
                               {"text", required_argument, nullptr, 'x'},
                               {"json", no_argument, nullptr, 'j'},
                               {"spoil", no_argument, nullptr, 'b'},
                               {"help", no_argument, nullptr, 'h'},
                               {nullptr, 0, nullptr, 0}};

std::string ReadCount(const std::string& text, size_t* value) {
    char* end = nullptr;
    errno = 0;
    const unsigned long long number = std::strtoull(text.c_str(), &end, 10);
    const bool is_number = !text.empty() && text[0] != '-' && *end == '\0' && errno == 0;
    if (!is_number || number < 1 || number > kLargest) {
        return "\"" + text + "\" is not a number from 1 to " + std::to_string(kLargest);
    }
    *value = static_cast<size_t>(number);
    return "";
}

std::string ReadAlgorithm(const std::string& text, Options* options) {
    options->low_latency = text == "ll" || text == "both";
    options->high_throughput = text == "ht" || text == "both";
    if (options->low_latency || options->high_throughput) return "";
    return "--algorithm is ll, ht or both, not \"" + text + "\"";
}

std::string ReadOption(int letter, const std::string& value, Options* options) {
    ModelConfig* model = &options->model;
    switch (letter) {
        case 'a':
            return ReadAlgorithm(value, options);
        case 't':
            return ReadCount(value, &options->max_tokens_per_rank);
        case 'd':
            return ReadCount(value, &model->hidden);
        case 'f':
            return ReadCount(value, &model->ffn);
        case 'e':
            return ReadCount(value, &model->num_experts);
        case 'k':
            return ReadCount(value, &model->top_k);
        case 'l':
            return ReadCount(value, &model->num_layers);
        case 's':
            return ReadCount(value, &model->seed);
        case 'x':
            options->text_path = value;
            return "";
        case 'j':
            options->json = true;
            return "";
        case 'b':
            options->spoil = true;
            return "";
        case 'h':
            options->help = true;
            return "";
        default:
            return "unknown option, or an option without its value";
    }
}

std::string CheckRules(const Options& options, size_t num_ranks) {
    const ModelConfig& model = options.model;
    if (model.hidden * sizeof(uint16_t) % kRowAlignment != 0) {
        return "--hidden must be a multiple of 8, as rows have a multiple of 16 bytes";
    }
    if (model.num_experts % num_ranks != 0) {
        return "--experts must be a multiple of the number of ranks, " + std::to_string(num_ranks);
    }
    if (model.top_k > model.num_experts || model.top_k > kMaxTopK) {
        return "--top-k is at most --experts and at most " + std::to_string(kMaxTopK);
    }
    if (options.max_tokens_per_rank < 2) {
        return "--tokens must be 2 or more: the check swaps the results of two tokens";
    }
    return "";
}

}  // namespace

std::string ParseOptions(int argc, char** argv, size_t num_ranks, Options* options) {
    opterr = 0;  // the caller prints the reason, once for all ranks
    while (true) {
        const int letter = getopt_long(argc, argv, "", kLongOptions, nullptr);
        if (letter == -1) break;
        const std::string refusal = ReadOption(letter, optarg != nullptr ? optarg : "", options);
        if (!refusal.empty()) return refusal;
    }
    size_t& num_experts = options->model.num_experts;
    if (num_experts == 0) num_experts = (kDefaultExperts + num_ranks - 1) / num_ranks * num_ranks;
    if (optind < argc) return std::string("unexpected argument \"") + argv[optind] + "\"";
    return options->help ? "" : CheckRules(*options, num_ranks);
}

const char* Usage() {
    return "usage: mpirun -np <ranks> moe_layer [options]\n"
           "  --algorithm ll|ht|both  mode of the library (both)\n"
           "  --tokens N              tokens of the last rank; the others have fewer (48)\n"
           "  --hidden N              width of a token, a multiple of 8 (256)\n"
           "  --ffn N                 inner width of an expert (512)\n"
           "  --experts N             number of experts, a multiple of the ranks (32 or the next)\n"
           "  --top-k N               experts of each token, at most 32 (4)\n"
           "  --layers N              layers, each with a router and experts of its own (2)\n"
           "  --seed N                seed of all parameters (1)\n"
           "  --text FILE             text to take the tokens from\n"
           "  --json                  one JSON object for each layer instead of a sentence\n"
           "  --spoil                 swap the results of two tokens: the run has to fail\n";
}

}  // namespace moe
