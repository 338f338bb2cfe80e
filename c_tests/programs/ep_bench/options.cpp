// The command line of ep_bench: parsing, defaults and usage. Nothing here depends on MPI or a
// device, because an option may decide how NCCL is started.
#include "programs/ep_bench/options.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

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
    "  -d, --hidden N           elements of a token (7168)\n"
    "      --layout NAME        how received rows lie (ll expert): expert, a row for each expert; or rank,\n"
    "                           one for each rank, whose weights and sums are the caller's\n"
    "      --variant NAME       ll.reduce, ll.exact, ht.ring, ht.direct or ht.pull, where it is possible (own)\n"
    "      --view               rank-major rows stay where they arrive, in memory of the library\n"
    "      --memory NAME        where experts' rows lie (plain): plain, or symmetric, in memory that peers map\n"
    "      --dispatch FORMAT    the rows of a dispatch (bf16): bf16; or e4m3, cast from bfloat16, with\n"
    "                           scales:\n"
    "                             fp8          float32 for 128 elements\n"
    "                             fp8-pow2     the same, powers of two\n"
    "                             ue8m0        exponent bytes for 128\n"
    "                             mxfp8        exponent bytes for 32\n"
    "                           or, always forwarded, mxfp4 and nvfp4 (4 bits; scales for 32 and 16)\n"
    "      --cast WHERE         who casts (inside):\n"
    "                             inside       the library, in the dispatch\n"
    "                             outside      a kernel of this program, before a dispatch that\n"
    "                                          forwards; timed alone, and with what follows it\n"
    "      --forward            rows and scales are there already: nothing is cast\n"
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
    "      --between code       also time graphs and queued operations with a kernel of 160 KB of code behind each,\n"
    "                           less its own time: as a model meets the library's kernels, cold\n"
    "      --json FILE          write the results to FILE\n"
    "  -h, --help               this text\n"
    "      --version            the versions of this program and of the library\n"
    "The exit status is 0 only if everything ran and, with --validate, all data was right;\n"
    "it is 2 if --use-cuda-graph or --between code meets a CUDA that captures no streams.\n";

namespace {

// Options whose default depends on the mode or on the machine.
struct Open {
    bool routing = true;
    bool tokens = true;
    bool hidden = true;
    bool warmup = true;
    bool iterations = true;
};

// The number after `zipf:`.
std::string ReadExponent(const std::string& text, double* exponent) {
    constexpr double kHighest = 10;
    char* end = nullptr;
    *exponent = strtod(text.c_str(), &end);
    if (!text.empty() && *end == '\0' && *exponent >= 0 && *exponent <= kHighest) return "";
    return "--routing zipf: expected an exponent from 0 to 10, got \"" + text + "\"";
}

std::string ReadRouting(const std::string& text, Options* options) {
    const size_t colon = text.find(':');
    if (text == "uniform") {
        options->routing = RoutingKind::kUniform;
    } else if (text == "consecutive") {
        options->routing = RoutingKind::kConsecutive;
    } else if (text.substr(0, colon) == "zipf") {
        options->routing = RoutingKind::kZipf;
        if (colon != std::string::npos) return ReadExponent(text.substr(colon + 1), &options->zipf_exponent);
    } else {
        return "--routing: expected uniform, zipf, zipf:S or consecutive, got \"" + text + "\"";
    }
    return "";
}

std::string ReadChannels(const std::string& text, Options* options) {
    std::string error;
    if (text == "all") {
        options->channels = kAllChannels;
    } else {
        ep::ReadUnsigned("--channels", text.c_str(), 0, &options->channels, &error);
    }
    return error;
}

// By the numbers of ncclEpVariant_t.
const char* const kVariants[] = {"own", "ll.reduce", "ll.exact", "ht.ring", "ht.direct", "ht.pull"};

std::string ReadVariant(const std::string& name, Options* options) {
    for (unsigned number = 0; number < std::size(kVariants); ++number) {
        if (name != kVariants[number]) continue;
        options->variant = static_cast<ncclEpVariant_t>(number);
        return "";
    }
    return "--variant: expected ll.reduce, ll.exact, ht.ring, ht.direct or ht.pull, got \"" + name + "\"";
}

std::string ReadLists(const std::string& text, bool sweep, Options* options) {
    std::string error;
    options->sweep = sweep;
    options->tokens.clear();
    if (sweep) {
        options->tokens = ReadSweep(text, &error);
    } else {
        options->tokens.push_back(ReadTokens(text, &error));
    }
    return error;
}

// Records that the user has set it.
ep::Option Closing(bool* open, ep::Option option) {
    const auto read = option.read;
    option.read = [=](const std::string& value) {
        *open = false;
        return read(value);
    };
    return option;
}

std::vector<ep::Option> SizeOptions(Options* options, Open* open) {
    const auto tokens = [=](const std::string& list) { return ReadLists(list, false, options); };
    const auto sweep = [=](const std::string& list) { return ReadLists(list, true, options); };
    const auto between = [=](const std::string&) { options->between_code = options->use_cuda_graph = true; };
    return {ep::Algorithm(&options->algorithm),
            Closing(&open->tokens, {'t', "tokens", true, tokens}),
            Closing(&open->tokens, {0, "sweep", true, sweep}),
            ep::Number(0, "max-tokens", 1, &options->max_tokens),
            Closing(&open->hidden, ep::Number('d', "hidden", 1, &options->hidden)),
            ep::Choice(0, "layout", {"expert", "rank"},
                       [=](const std::string& name) { options->by_rank = name == "rank"; }),
            {0, "variant", true, [=](const std::string& name) { return ReadVariant(name, options); }},
            ep::Switch(0, "view", &options->view),
            ep::Choice(0, "memory", {"plain", "symmetric"},
                       [=](const std::string& name) { options->symmetric = name == "symmetric"; }),
            ep::Choice(0, "dispatch", {"bf16", "fp8", "fp8-pow2", "ue8m0", "mxfp8", "mxfp4", "nvfp4"},
                       [=](const std::string& name) { options->rows.name = name; }),
            ep::Choice(0, "cast", {"inside", "outside"}, [=](const std::string& where) { options->rows.cast = where; }),
            ep::Switch(0, "forward", &options->rows.forward),
            ep::Number('k', "top-k", 1, &options->top_k),
            ep::Number('e', "experts", 1, &options->experts),
            ep::Number(0, "masked", 0, &options->masked),
            Closing(&open->warmup, ep::Number('w', "warmup", 0, &options->warmup)),
            Closing(&open->iterations, ep::Number('i', "iters", 1, &options->iterations)),
            ep::Number(0, "graph-ops", 1, &options->graph_ops),
            ep::Choice(0, "between", {"code"}, between)};
}

std::vector<ep::Option> OtherOptions(ParsedOptions* parsed, Open* open) {
    Options* const options = &parsed->options;
    const auto routing = [=](const std::string& text) { return ReadRouting(text, options); };
    const auto uniform = [=](const std::string&) { return ReadRouting("uniform", options); };
    const auto channels = [=](const std::string& text) { return ReadChannels(text, options); };
    return {Closing(&open->routing, {0, "routing", true, routing}),
            Closing(&open->routing, {0, "random-routing", false, uniform}),
            {0, "channels", true, channels},
            ep::Switch('p', "profile", &options->profile),
            ep::Switch('n', "disable-nvlink", &options->disable_nvlink),
            ep::Switch('f', "use-fp8", &options->use_fp8),
            ep::Switch('V', "validate", &options->validate),
            ep::Switch('M', "dynamic-tokens", &options->dynamic_tokens),
            ep::Switch(0, "use-cuda-graph", &options->use_cuda_graph),
            ep::Text(0, "json", &options->json_file),
            ep::Switch('h', "help", &parsed->help),
            ep::Switch(0, "version", &parsed->version)};
}

void FillOpen(const Open& open, bool on_hostsim, Options* options) {
    if (open.routing) {
        options->routing = options->low_latency() ? RoutingKind::kUniform : RoutingKind::kConsecutive;
    }
    if (open.tokens) options->tokens = {{options->low_latency() ? 128u : 4096u}};
    if (!on_hostsim) return;
    const auto reduce = [options](bool is_open, const char* name, unsigned value, unsigned* field) {
        if (!is_open) return;
        *field = value;
        options->reduced += (options->reduced.empty() ? "" : ", ") + std::string(name) + " " + std::to_string(value);
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
    return "--max-tokens: expected at least " + std::to_string(largest) + ", which a rank has, got " +
           std::to_string(options.max_tokens);
}

}  // namespace

const char* RoutingName(const Options& options) {
    switch (options.routing) {
        case RoutingKind::kUniform: return "scores";
        case RoutingKind::kZipf: return "zipf";
        default: return "consecutive";
    }
}

ParsedOptions ParseOptions(int argc, char** argv, bool on_hostsim) {
    ParsedOptions parsed;
    Open open;
    std::vector<ep::Option> table = SizeOptions(&parsed.options, &open);
    const auto others = OtherOptions(&parsed, &open);
    table.insert(table.end(), others.begin(), others.end());
    parsed.error = ep::ParseOptions(argc, argv, table);
    if (!parsed.error.empty()) return parsed;
    FillOpen(open, on_hostsim, &parsed.options);
    if (parsed.options.low_latency() && parsed.options.dynamic_tokens) {
        parsed.error = "--dynamic-tokens: low latency needs a fixed max_tokens_per_rank";
    }
    if (parsed.options.by_rank && !parsed.options.low_latency()) {
        parsed.error = "--layout: high throughput has one alone";
    }
    if (parsed.options.view && !parsed.options.by_rank) parsed.error = "--view: needs --layout rank";
    if (parsed.error.empty()) parsed.error = CheckMaxTokens(parsed.options);
    if (parsed.error.empty()) parsed.error = SizeRows(parsed.options.hidden, &parsed.options.rows);
    return parsed;
}

const char* VariantName(const Options& options) { return kVariants[options.variant]; }

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
