// The command line of ep_test. Letters and defaults are those of the reference's program of this name.
#pragma once

#include <string>

#include "harness/harness.h"

namespace ep_test {

struct Options {
    ncclEpAlgorithm_t algorithm = NCCL_EP_ALGO_LOW_LATENCY;
    unsigned tokens = 50;
    unsigned hidden = 7168;
    bool stage_dispatch = false;
    bool stage_combine = false;
    bool cached = false;
    bool random = false;
    bool dynamic_tokens = false;

    bool low_latency() const { return algorithm == NCCL_EP_ALGO_LOW_LATENCY; }
};

struct ParsedOptions {
    Options options;
    bool help = false;
    std::string error;  // empty if the command line is valid
};

extern const char kUsage[];

ParsedOptions ParseOptions(int argc, char** argv);

// One line that repeats what is going to run.
std::string Describe(const Options& options);

}  // namespace ep_test
