// The command line of moe_layer.
#pragma once

#include "programs/moe_layer/model.h"

namespace moe {

struct Options {
    ModelConfig model;
    size_t max_tokens_per_rank = 48;
    bool low_latency = true;
    bool high_throughput = true;
    bool fp8 = false;
    bool picture = false;  // who sent how many rows to whom
    bool help = false;
};

// Reads the arguments and checks them against the library's rules for num_ranks ranks. Returns an
// empty text or, if it refuses an argument, the reason.
std::string ParseOptions(int argc, char** argv, size_t num_ranks, Options* options);

extern const char kUsage[];  // what --help prints

}  // namespace moe
