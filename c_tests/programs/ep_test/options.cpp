// The command line of ep_test: parsing, usage and the line that repeats the configuration. Nothing
// here depends on MPI or a device, because options are read before either is started.
#include "programs/ep_test/options.h"

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
    "  -m, --dynamic-tokens     max_tokens_per_rank = NCCL_EP_AUTO (ht only)\n  -h, --help               this text\n";

namespace {

std::string ReadStaging(const std::string& text, Options* options) {
    if (text != "none" && text != "dispatch" && text != "combine" && text != "both") {
        return "--send-only: expected none, dispatch, combine or both, got \"" + text + "\"";
    }
    options->stage_dispatch = text == "dispatch" || text == "both";
    options->stage_combine = text == "combine" || text == "both";
    return "";
}

}  // namespace

ParsedOptions ParseOptions(int argc, char** argv) {
    ParsedOptions parsed;
    Options* options = &parsed.options;
    const auto read_staging = [=](const std::string& text) { return ReadStaging(text, options); };
    parsed.error = ep::ParseOptions(
        argc, argv,
        {ep::Algorithm(&options->algorithm), ep::Number('t', "tokens", 1, &options->tokens),
         ep::Number('d', "hidden", 1, &options->hidden), {'s', "send-only", true, read_staging},
         ep::Switch('c', "cached", &options->cached), ep::Switch('r', "random", &options->random),
         ep::Switch('m', "dynamic-tokens", &options->dynamic_tokens),
         ep::Switch('h', "help", &parsed.help)});
    if (parsed.error.empty() && options->low_latency() && options->dynamic_tokens) {
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
