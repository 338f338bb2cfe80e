// The command line of ep_test: parsing, usage and the line that repeats the configuration. Nothing
// here depends on MPI or a device, because options are read before either is started.
#include "programs/ep_test/options.h"

#include <getopt.h>

#include <string>

#include "harness/options.hpp"

namespace ep_test {

const char kUsage[] =
    "Usage: ep_test [options], one process for each GPU under mpirun\n"
    "  -a, --algorithm ll|ht    low latency (default) or high throughput\n"
    "  -t, --tokens N           tokens of each rank (50)\n"
    "  -d, --hidden N           elements of a token, bfloat16 (7168)\n"
    "  -s, --send-only none|dispatch|combine|both\n"
    "                           which operations are staged and finished by ncclEpComplete;\n"
    "                           high throughput ignores staging\n"
    "  -c, --cached             repeat dispatch and combine on the same handle (ht)\n"
    "  -r, --random             random first expert of each token instead of the next rank's\n"
    "  -m, --dynamic-tokens     max_tokens_per_rank = NCCL_EP_AUTO (ht only)\n"
    "  -h, --help               this text\n";

namespace {

void ReadAlgorithm(const std::string& text, ParsedOptions* parsed) {
    if (text == "ll" || text == "low-latency") {
        parsed->options.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
    } else if (text == "ht" || text == "high-throughput") {
        parsed->options.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    } else {
        parsed->error = "--algorithm: expected ll or ht, got \"" + text + "\"";
    }
}

void ReadStaging(const std::string& text, ParsedOptions* parsed) {
    if (text != "none" && text != "dispatch" && text != "combine" && text != "both") {
        parsed->error =
            "--send-only: expected none, dispatch, combine or both, got \"" + text + "\"";
        return;
    }
    parsed->options.stage_dispatch = text == "dispatch" || text == "both";
    parsed->options.stage_combine = text == "combine" || text == "both";
}

void ReadOption(int letter, ParsedOptions* parsed) {
    Options& options = parsed->options;
    switch (letter) {
        case 'a':
            return ReadAlgorithm(optarg, parsed);
        case 't':
            return ep::ReadUnsigned("--tokens", optarg, 1, &options.tokens, &parsed->error);
        case 'd':
            return ep::ReadUnsigned("--hidden", optarg, 1, &options.hidden, &parsed->error);
        case 's':
            return ReadStaging(optarg, parsed);
        case 'c':
            options.cached = true;
            return;
        case 'r':
            options.random = true;
            return;
        case 'm':
            options.dynamic_tokens = true;
            return;
        case 'h':
            parsed->help = true;
            return;
        default:
            parsed->error = "unknown option, or an option without its value";
    }
}

}  // namespace

ParsedOptions ParseOptions(int argc, char** argv) {
    static const option kLongOptions[] = {{"algorithm", required_argument, nullptr, 'a'},
                                          {"tokens", required_argument, nullptr, 't'},
                                          {"hidden", required_argument, nullptr, 'd'},
                                          {"send-only", required_argument, nullptr, 's'},
                                          {"cached", no_argument, nullptr, 'c'},
                                          {"random", no_argument, nullptr, 'r'},
                                          {"dynamic-tokens", no_argument, nullptr, 'm'},
                                          {"help", no_argument, nullptr, 'h'},
                                          {nullptr, 0, nullptr, 0}};
    ParsedOptions parsed;
    opterr = 0;  // one process reports the error, in our words
    int letter;
    while (parsed.error.empty() &&
           (letter = getopt_long(argc, argv, "a:t:d:s:crmh", kLongOptions, nullptr)) != -1) {
        ReadOption(letter, &parsed);
    }
    if (!parsed.error.empty()) return parsed;
    if (optind < argc) parsed.error = std::string("unexpected argument \"") + argv[optind] + "\"";
    if (parsed.options.low_latency() && parsed.options.dynamic_tokens) {
        parsed.error = "--dynamic-tokens: low latency needs a fixed max_tokens_per_rank";
    }
    return parsed;
}

std::string Describe(const Options& options) {
    std::string text = options.low_latency() ? "low latency" : "high throughput";
    text += ", " + std::to_string(options.tokens) + " tokens of " + std::to_string(options.hidden);
    if (options.stage_dispatch) text += ", staged dispatch";
    if (options.stage_combine) text += ", staged combine";
    if (options.cached) text += options.low_latency() ? ", cached (ignored)" : ", cached";
    if (options.random) text += ", random routing";
    if (options.dynamic_tokens) text += ", dynamic tokens";
    return text;
}

}  // namespace ep_test
