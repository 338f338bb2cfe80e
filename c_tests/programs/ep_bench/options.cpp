// The command line of ep_bench: parsing, defaults and usage. Nothing here depends on MPI or a
// device, because an option may decide how NCCL is started.
#include "programs/ep_bench/options.h"

#include <getopt.h>

#include <algorithm>
#include <cstdlib>

#include "harness/options.hpp"

namespace ep_bench {

const char kUsage[] =
    "Usage: ep_bench [options], one process for each GPU under mpirun\n"
    "  -a, --algorithm ll|low-latency|ht|high-throughput   (ll)\n"
    "  -t, --tokens N[,N...]    tokens of each rank (ll 128, ht 4096); or a number for each rank,\n"
    "                           in rank order, some of them 0\n"
    "      --sweep ITEM,...     one measurement for each item, instead of --tokens; an item is\n"
    "                             N          tokens of each rank\n"
    "                             A..B       stands for A, 2A, 4A and so on up to B\n"
    "                             N/N[/...]  of rank 0, of rank 1 and so on; the last number is\n"
    "                                        also that of the ranks behind it\n"
    "      --max-tokens N       max_tokens_per_rank (the largest number of the measurement)\n"
    "  -d, --hidden N           elements of a token, bfloat16 (7168)\n"
    "  -k, --top-k N            experts of a token (8)\n"
    "  -e, --experts N          experts in all, a multiple of the number of ranks (256)\n"
    "      --masked N           entries of each rank that lose their expert (ll, 10)\n"
    "      --routing NAME       which experts a token gets (ll uniform, ht consecutive):\n"
    "                             uniform      the top-k of random scores\n"
    "                             zipf[:S]     the r-th most popular expert has weight r^-S (1)\n"
    "                             consecutive  neighbours, from a random first one\n"
    "      --random-routing     the same as --routing uniform\n"
    "      --channels N|all     num_channels of the group, 2 SMs each; 0: its choice (0)\n"
    "  -w, --warmup N           iterations before the measurement (10)\n"
    "  -i, --iters N            measured iterations; the first is dropped (50)\n"
    "  -p, --profile            profiler start and stop, and a named range for each operation\n"
    "  -n, --disable-nvlink     NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 (ll)\n"
    "  -f, --use-fp8            the flag of ncclEpCreateHandle and the byte formula; data stays "
    "bfloat16\n"
    "  -V, --validate           check all data of one more dispatch and combine\n"
    "  -M, --dynamic-tokens     max_tokens_per_rank = NCCL_EP_AUTO (ht only)\n"
    "      --use-cuda-graph     also time replays of captured graphs\n"
    "      --graph-ops N        operations that a graph contains (1)\n"
    "      --json FILE          write the results to FILE\n"
    "  -h, --help               this text\n"
    "The exit status is 0 only if everything ran and, with --validate, all data was right;\n"
    "it is 2 if --use-cuda-graph meets a CUDA that captures no streams.\n";

namespace {

constexpr int kSweep = 256;  // options without a letter
constexpr int kJson = 257;
constexpr int kUseCudaGraph = 258;
constexpr int kGraphOps = 259;
constexpr int kMasked = 260;
constexpr int kRandomRouting = 261;
constexpr int kRouting = 262;
constexpr int kChannels = 263;
constexpr int kMaxTokens = 264;
constexpr char kLetters[] = "a:t:d:k:e:w:i:pnfVMh";
const option kLongOptions[] = {{"algorithm", required_argument, nullptr, 'a'},
                               {"tokens", required_argument, nullptr, 't'},
                               {"sweep", required_argument, nullptr, kSweep},
                               {"max-tokens", required_argument, nullptr, kMaxTokens},
                               {"hidden", required_argument, nullptr, 'd'},
                               {"top-k", required_argument, nullptr, 'k'},
                               {"experts", required_argument, nullptr, 'e'},
                               {"masked", required_argument, nullptr, kMasked},
                               {"random-routing", no_argument, nullptr, kRandomRouting},
                               {"routing", required_argument, nullptr, kRouting},
                               {"channels", required_argument, nullptr, kChannels},
                               {"warmup", required_argument, nullptr, 'w'},
                               {"iters", required_argument, nullptr, 'i'},
                               {"profile", no_argument, nullptr, 'p'},
                               {"disable-nvlink", no_argument, nullptr, 'n'},
                               {"use-fp8", no_argument, nullptr, 'f'},
                               {"validate", no_argument, nullptr, 'V'},
                               {"dynamic-tokens", no_argument, nullptr, 'M'},
                               {"json", required_argument, nullptr, kJson},
                               {"use-cuda-graph", no_argument, nullptr, kUseCudaGraph},
                               {"graph-ops", required_argument, nullptr, kGraphOps},
                               {"help", no_argument, nullptr, 'h'},
                               {nullptr, 0, nullptr, 0}};

// What a user may leave open, because it depends on the mode or on the machine what it is then.
struct Open {
    bool routing = true;
    bool tokens = true;
    bool hidden = true;
    bool warmup = true;
    bool iterations = true;
};

void ReadAlgorithm(const std::string& text, ParsedOptions* parsed) {
    if (text == "ll" || text == "low-latency") {
        parsed->options.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
    } else if (text == "ht" || text == "high-throughput") {
        parsed->options.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    } else {
        parsed->error = "--algorithm: expected ll or ht, got \"" + text + "\"";
    }
}

// The number behind `zipf:`.
void ReadExponent(const std::string& text, ParsedOptions* parsed) {
    constexpr double kHighest = 10;
    char* end = nullptr;
    const double exponent = strtod(text.c_str(), &end);
    if (text.empty() || *end != '\0' || !(exponent >= 0 && exponent <= kHighest)) {
        parsed->error = "--routing zipf: expected an exponent from 0 to 10, got \"" + text + "\"";
    }
    parsed->options.zipf_exponent = exponent;
}

void ReadRouting(const std::string& text, ParsedOptions* parsed) {
    const size_t colon = text.find(':');
    Options& options = parsed->options;
    if (text == "uniform") {
        options.routing = RoutingKind::kUniform;
    } else if (text == "consecutive") {
        options.routing = RoutingKind::kConsecutive;
    } else if (text.substr(0, colon) == "zipf") {
        options.routing = RoutingKind::kZipf;
        if (colon != std::string::npos) ReadExponent(text.substr(colon + 1), parsed);
    } else {
        parsed->error =
            "--routing: expected uniform, zipf, zipf:S or consecutive, got \"" + text + "\"";
    }
}

void ReadChannels(const std::string& text, ParsedOptions* parsed) {
    if (text == "all") {
        parsed->options.channels = kAllChannels;
    } else {
        ep::ReadUnsigned("--channels", text.c_str(), 0, &parsed->options.channels, &parsed->error);
    }
}

void ReadSwitch(int letter, ParsedOptions* parsed, Open* open) {
    Options& options = parsed->options;
    switch (letter) {
        case 'p':
            options.profile = true;
            break;
        case 'n':
            options.disable_nvlink = true;
            break;
        case 'f':
            options.use_fp8 = true;
            break;
        case 'V':
            options.validate = true;
            break;
        case 'M':
            options.dynamic_tokens = true;
            break;
        case kRandomRouting:
            open->routing = false;
            options.routing = RoutingKind::kUniform;
            break;
        case kUseCudaGraph:
            options.use_cuda_graph = true;
            break;
        case 'h':
            parsed->help = true;
            break;
        default:
            parsed->error = "unknown option, or an option without its value";
    }
}

void ReadOption(int letter, ParsedOptions* parsed, Open* open) {
    Options& options = parsed->options;
    std::string* error = &parsed->error;
    switch (letter) {
        case 'a':
            return ReadAlgorithm(optarg, parsed);
        case 't':
            open->tokens = false;
            options.sweep = false;
            options.tokens = {ReadTokens(optarg, error)};
            return;
        case kSweep:
            open->tokens = false;
            options.sweep = true;
            options.tokens = ReadSweep(optarg, error);
            return;
        case kMaxTokens:
            return ep::ReadUnsigned("--max-tokens", optarg, 1, &options.max_tokens, error);
        case 'd':
            open->hidden = false;
            return ep::ReadUnsigned("--hidden", optarg, 1, &options.hidden, error);
        case 'k':
            return ep::ReadUnsigned("--top-k", optarg, 1, &options.top_k, error);
        case 'e':
            return ep::ReadUnsigned("--experts", optarg, 1, &options.experts, error);
        case kMasked:
            return ep::ReadUnsigned("--masked", optarg, 0, &options.masked, error);
        case kRouting:
            open->routing = false;
            return ReadRouting(optarg, parsed);
        case kChannels:
            return ReadChannels(optarg, parsed);
        case 'w':
            open->warmup = false;
            return ep::ReadUnsigned("--warmup", optarg, 0, &options.warmup, error);
        case 'i':
            open->iterations = false;
            return ep::ReadUnsigned("--iters", optarg, 1, &options.iterations, error);
        case kGraphOps:
            return ep::ReadUnsigned("--graph-ops", optarg, 1, &options.graph_ops, error);
        case kJson:
            options.json_file = optarg;
            return;
        default:
            return ReadSwitch(letter, parsed, open);
    }
}

void FillOpen(const Open& open, bool on_hostsim, Options* options) {
    if (open.routing) {
        options->routing =
            options->low_latency() ? RoutingKind::kUniform : RoutingKind::kConsecutive;
    }
    if (open.tokens) options->tokens = {{options->low_latency() ? 128u : 4096u}};
    if (!on_hostsim) return;
    const auto reduce = [options](bool is_open, const char* name, unsigned value, unsigned* field) {
        if (!is_open) return;
        *field = value;
        options->reduced += (options->reduced.empty() ? "" : ", ") + std::string(name) + " " +
                            std::to_string(value);
    };
    reduce(open.tokens, "tokens", options->low_latency() ? 32 : 128, &options->tokens[0][0]);
    reduce(open.hidden, "hidden", 1024, &options->hidden);
    reduce(open.warmup, "warm-up", 1, &options->warmup);
    reduce(open.iterations, "iterations", 6, &options->iterations);
}

std::string CheckMaxTokens(const Options& options) {
    if (options.max_tokens == 0) return "";
    if (options.dynamic_tokens) return "--max-tokens: --dynamic-tokens leaves it open";
    unsigned largest = 0;
    for (const Tokens& tokens : options.tokens) largest = std::max(largest, Largest(tokens));
    if (largest <= options.max_tokens) return "";
    return "--max-tokens: expected at least " + std::to_string(largest) +
           ", which a rank has, got " + std::to_string(options.max_tokens);
}

}  // namespace

const char* RoutingName(const Options& options) {
    switch (options.routing) {
        case RoutingKind::kUniform:
            return "scores";
        case RoutingKind::kZipf:
            return "zipf";
        default:
            return "consecutive";
    }
}

ParsedOptions ParseOptions(int argc, char** argv, bool on_hostsim) {
    ParsedOptions parsed;
    Open open;
    opterr = 0;  // one process reports the error, in our words
    int letter;
    while (parsed.error.empty() &&
           (letter = getopt_long(argc, argv, kLetters, kLongOptions, nullptr)) != -1) {
        ReadOption(letter, &parsed, &open);
    }
    if (!parsed.error.empty()) return parsed;
    FillOpen(open, on_hostsim, &parsed.options);
    if (optind < argc) parsed.error = std::string("unexpected argument \"") + argv[optind] + "\"";
    if (parsed.error.empty() && parsed.options.low_latency() && parsed.options.dynamic_tokens) {
        parsed.error = "--dynamic-tokens: low latency needs a fixed max_tokens_per_rank";
    }
    if (parsed.error.empty()) parsed.error = CheckMaxTokens(parsed.options);
    return parsed;
}

std::string ApplyRanks(unsigned ranks, Options* options) {
    if (options->experts % ranks != 0) {
        return "--experts: expected a multiple of " + std::to_string(ranks) + " ranks, got " +
               std::to_string(options->experts);
    }
    if (options->top_k > options->experts) {
        return "--top-k: expected at most " + std::to_string(options->experts) + " experts, got " +
               std::to_string(options->top_k);
    }
    for (Tokens& tokens : options->tokens) {
        const std::string error = FitToRanks(ranks, options->sweep, &tokens);
        if (!error.empty()) return error;
    }
    return "";
}

}  // namespace ep_bench
